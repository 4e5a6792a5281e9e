"""An admin listener on a loopback port, in front of a real SQLite store."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from gateway.admin.ports import AdminDeps, Configured
from gateway.admin.server import AdminServer
from gateway.administration import configured, identify
from gateway.core.cache_rules import CacheRules
from gateway.core.catalog import Catalog, Deployment, Operation, Provider, Tier, Wire
from gateway.core.config_overlay import Documents
from gateway.core.prices import PriceBook, PriceRow
from gateway.core.rates import Rates
from gateway.core.rules import RuleText
from gateway.overlay import Overlay
from gateway.settings import Settings, load
from gateway.storage import reports
from gateway.storage.accounts import Accounts
from gateway.storage.admin_keys import AdminKeys
from gateway.storage.database import Database, open_database
from gateway.storage.explained import Explained
from gateway.storage.registry import Registry
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
CONFIGURED = Configured(
    {"acme": ACME},
    frozenset({"acme"}),
    (RuleText("late", "task.step > 40", Tier.SMALL),),
    "active",
    PriceBook.of((PriceRow("acme/large", "2026-01", 0, Rates(3_000_000, 15_000_000, 300_000)),)),
    catalog=CATALOG,
)
#: The same as a file, for what is written over it; the release's lists hold one more provider.
FILE = """
providers:
  acme:
    base_url: http://127.0.0.1:1/v1
    key: secret-of-acme
    deployments:
      - {name: large-eu, model: large, upstream_model: large-2026, price: acme/large, context_tokens: 200000}
      - {name: mini-eu, model: mini, upstream_model: mini-2026, price: acme/mini, tier: small, operations: [chat]}
rules:
  - {name: late, when: task.step > 40, tier: small}
"""
PROVIDERS = """
providers:
  known: {wire: openai, base_url: "https://known.example/v1", key_env: [KNOWN_API_KEY]}
"""
PRICES = """
version: 1
models:
  - {price: acme/large, provider: nobody, model: large,
     rows: [{rates: {input_usd_per_mtok: "3", output_usd_per_mtok: "15", cache_read_usd_per_mtok: "0.3"}}]}
  - {price: acme/mini, provider: nobody, model: mini,
     rows: [{rates: {input_usd_per_mtok: "1", output_usd_per_mtok: "2"}}]}
  - {price: known/mid, provider: known, model: mid,
     rows: [{rates: {input_usd_per_mtok: "1", output_usd_per_mtok: "2"}}]}
"""
ENV = {"LOCAL_API_KEY": "secret-of-local", "TOLLHOUSE_ADMIN_KEY": ADMIN_KEY, "HOME": "/home/acme"}


@dataclass(slots=True)
class Office:
    url: str
    http: aiohttp.ClientSession
    database: Database
    settings: Settings
    reasons: list[str] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    clock_s: float = 1_000.0
    configured: Configured = CONFIGURED
    #: the environment that the configuration is read in, and its folder
    env: dict[str, str] = field(default_factory=lambda: dict(ENV))
    folder: Path = Path()
    now_ms: int = 1_790_000_000_000

    async def ask(
        self, method: str, path: str, body: object = None, *, key: str | None = ADMIN_KEY, **more: Any
    ) -> tuple[int, Any]:
        """(status, decoded body) of /admin/v1`path`."""
        status, found, _ = await self.told(method, path, body, key=key, **more)
        return status, found

    async def told(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        key: str | None = ADMIN_KEY,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> tuple[int, Any, Mapping[str, str]]:
        """With the reply's headers."""
        sent = {**({"Authorization": f"Bearer {key}"} if key else {}), **(headers or {})}
        async with self.http.request(method, f"/admin/v1{path}", json=body, headers=sent, **more) as answer:
            return answer.status, await answer.json(content_type=None), answer.headers

    async def rows(self, sql: str) -> list[tuple[Any, ...]]:
        def tx() -> Tx[list[Row]]:
            return list((yield Fetch(Sql(sql))))

        return [tuple(row) for row in await self.database.read(tx)]


async def _scraped(_: str) -> tuple[str, bytes]:
    return "text/plain; version=0.0.4; charset=utf-8", b"tollhouse_up 1\n"


@asynccontextmanager
async def office(url: str) -> AsyncIterator[Office]:
    """In front of the empty, migrated database at `url`."""
    with tempfile.TemporaryDirectory(prefix="tollhouse-office-") as folder:
        async with _office(url, Path(folder)) as it:
            yield it


@asynccontextmanager
async def _office(url: str, folder: Path) -> AsyncIterator[Office]:
    for name, text in (("gateway", FILE), ("providers", PROVIDERS), ("prices", PRICES)):
        (folder / f"{name}.yaml").write_text(text)
    database = open_database(url)

    def read(documents: Documents) -> Settings:
        return load(folder / "gateway.yaml", it.env, documents, lists=folder)

    def use(settings: Settings) -> None:
        it.settings, it.configured = settings, configured(settings)

    overlay = Overlay(read, lambda: it.settings, use)
    await Accounts(database, actor="set-up").ensure_defaults()
    # `it` is made last, when there is an address; until then nobody asks.
    deps = AdminDeps(
        identify=identify(ADMIN_KEY, AdminKeys(database, PEPPER)),
        readiness=lambda: it.reasons,
        metrics=_scraped,
        registry=lambda admin, once: Registry(database, admin, pepper=PEPPER, once=once),
        prefix=Explained(database, lambda: CATALOG, CacheRules).request,
        misses=partial(reports.misses, database),
        tasks=lambda actor: Tasks(database, actor=actor, pepper=PEPPER),
        on_change=lambda: it.changes.append("changed"),
        pepper=PEPPER,
        catalog=lambda: it.configured.catalog,
        configured=lambda: it.configured,
        overlay=overlay,
        health=lambda: {"mini-eu": "open"},
        now_ms=lambda: it.now_ms,
        monotonic=lambda: it.clock_s,
        on_fault=lambda where, fault: it.faults.append((where, str(fault))),
    )
    server = AdminServer(deps)
    await server.start("127.0.0.1", 0)
    try:
        url = f"http://127.0.0.1:{server.port}"
        async with aiohttp.ClientSession(url) as http:
            it = Office(url, http, database, load(folder / "gateway.yaml", ENV, lists=folder), folder=folder)
            await overlay.begin(database)
            yield it
    finally:
        await server.stop()
        await database.close()
