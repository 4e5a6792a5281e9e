"""An admin listener on a loopback port, in front of a real SQLite store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from gateway.admin.server import AdminDeps, AdminServer
from gateway.core.cache_rules import CacheRules
from gateway.core.catalog import Catalog, Deployment, Operation, Provider, Tier, Wire
from gateway.storage import reports, schema
from gateway.storage.accounts import Accounts, Team
from gateway.storage.database import Database, open_database
from gateway.storage.explained import Explained
from gateway.storage.tasks import Tasks
from gateway.storage.transact import Fetch, Row, Sql, Tx

ADMIN_KEY = "admin-key-of-the-tests"
PEPPER = b"pepper-of-the-tests"
ACME = Provider("acme", Wire.OPENAI, "http://127.0.0.1:1/v1", "acme")
CATALOG = Catalog.of(
    (
        Deployment(
            "large-eu",
            ACME,
            "large",
            "large-2026",
            "acme/large",
            aliases=("acme/large",),
            context_tokens=200_000,
        ),
        Deployment(
            "mini-eu", ACME, "mini", "mini-2026", "acme/mini", Tier.SMALL, frozenset({Operation.CHAT})
        ),
    )
)


@dataclass(slots=True)
class Office:
    url: str
    http: aiohttp.ClientSession
    database: Database
    reasons: list[str] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    clock_s: float = 1_000.0

    async def ask(
        self, method: str, path: str, body: object = None, *, key: str | None = ADMIN_KEY, **more: Any
    ) -> tuple[int, Any]:
        """(status, decoded body) of /admin/v1`path`."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self.http.request(
            method, f"/admin/v1{path}", json=body, headers=headers, **more
        ) as answer:
            return answer.status, await answer.json(content_type=None)

    async def rows(self, sql: str) -> list[tuple[Any, ...]]:
        def tx() -> Tx[list[Row]]:
            return list((yield Fetch(Sql(sql))))

        return [tuple(row) for row in await self.database.read(tx)]


@asynccontextmanager
async def office(folder: Path) -> AsyncIterator[Office]:
    url = f"sqlite:///{folder / 'ledger.db'}"
    await schema.migrate(url)
    database = open_database(url)
    await Accounts(database, actor="set-up").ensure_defaults()
    # `it` is made last, when there is an address; until then nobody asks.
    deps = AdminDeps(
        verify=lambda token: "admin-key" if token == ADMIN_KEY else None,
        readiness=lambda: it.reasons,
        metrics=lambda: ("text/plain; version=0.0.4; charset=utf-8", b"tollhouse_up 1\n"),
        accounts=lambda actor: Accounts(database, actor=actor),
        team=Team,
        usage=partial(reports.usage, database),
        entries=partial(reports.entries, database),
        prefix=Explained(database, CATALOG, CacheRules()).request,
        misses=partial(reports.misses, database),
        tasks=lambda actor: Tasks(database, actor=actor, pepper=PEPPER),
        on_change=lambda: it.changes.append("changed"),
        pepper=PEPPER,
        catalog=lambda: CATALOG,
        health=lambda: {"mini-eu": "open"},
        monotonic=lambda: it.clock_s,
        on_fault=lambda where, fault: it.faults.append((where, str(fault))),
    )
    server = AdminServer(deps)
    await server.start("127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.port}"
        async with aiohttp.ClientSession(url) as http:
            it = Office(url, http, database)
            yield it
    finally:
        await server.stop()
        await database.close()
