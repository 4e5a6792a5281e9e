"""Attempts, outcomes and a ledger to play them on."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from gateway.core.entry import Amounts, Attempt, Granted, Kind, Outcome, Refused
from gateway.core.ids import new_id
from gateway.core.task import TaskDefault
from gateway.core.usage import Quality, Usage
from gateway.storage.accounts import Accounts
from gateway.storage.database import Database, SystemClock, open_database
from gateway.storage.ledger import STORE_TIMEOUT_S, SqlLedger
from gateway.storage.transact import Fetch, Row, Sql, Tx

NOON_MS = 1_790_000_000_000
TEAM = "team:default"
_numbers = itertools.count(1)


class HandClock:
    """Wall clock set by hand; monotonic time is the machine's."""

    def __init__(self, now_ms: int = NOON_MS) -> None:
        self.ms = now_ms

    def now_ms(self) -> int:
        return self.ms

    def monotonic(self) -> float:
        return SystemClock().monotonic()


def attempt(**changes: Any) -> Attempt:
    at_ms = changes.get("started_at_ms", NOON_MS)
    facts: dict[str, Any] = {
        "attempt_id": new_id("att", at_ms, os.urandom(10)),
        "request_id": new_id("req", at_ms, os.urandom(10)),
        "tenant_id": "default",
        "team_id": "default",
        "key_id": "key00001",
        "task_id": "task_a",
        "parent_task_id": None,
        "attempt_no": 1,
        "operation": "chat",
        "client": "codex",
        "model_requested": "auto",
        "model": "sonnet",
        "upstream_model": "sonnet-4",
        "provider": "anthropic",
        "deployment": "sonnet-main",
        "tier": "standard",
        "rule": "default",
        "stream": True,
        "started_at_ms": at_ms,
    }
    return Attempt(**{**facts, **changes})


def scopes(a: Attempt) -> tuple[str, ...]:
    return (f"tenant:{a.tenant_id}", f"team:{a.team_id}", f"key:{a.key_id}", f"task:{a.task_id}")


def outcome(cost_nano_usd: int, kind: Kind = Kind.POST, **changes: Any) -> Outcome:
    facts: dict[str, Any] = {
        "kind": kind,
        "usage": Usage(input_uncached=100, cache_read=1_000, cache_write_5m=50, output=20, reasoning=5),
        "quality": Quality.EXACT,
        "cost_nano_usd": cost_nano_usd,
        "list_cost_nano_usd": cost_nano_usd * 3,
        "price_version": "2026-01",
        "finish": "stop",
        "status": 200,
        "error": "",
        "latency_ms": 900,
        "first_token_ms": 300,
        "upstream_request_id": "msg_1",
    }
    return Outcome(**{**facts, **changes})


def void() -> Outcome:
    return outcome(0, Kind.VOID, usage=Usage(), list_cost_nano_usd=0, status=0, error="upstream_unreachable")


def usd(nano_usd: int | None) -> Amounts:
    """An ask of so much money, ten tokens each way and one call."""
    return Amounts(nano_usd, 10, 10)


async def reserve(
    ledger: SqlLedger, a: Attempt, amount: int | None, least: int | None = None, *, landing: bool = False
) -> Granted | Refused:
    lowest = usd(amount if least is None else least)
    return timeless(await ledger.reserve(a, scopes(a), usd(amount), lowest, landing=landing))


def timeless(answer: Granted | Refused) -> Granted | Refused:
    """Without the moment at which the task began, which no test can know."""
    return (
        answer if isinstance(answer, Refused) else msgspec.structs.replace(answer, task_began_ms=0, used=())
    )


def granted(
    amount: int, remaining: int | None = None, scope: str = "", step: int = 0, **more: Any
) -> Granted:
    """What `reserve` gets."""
    return Granted(amount, remaining, scope, step, **{"output_tokens": 10, **more})


@asynccontextmanager
async def opened(
    url: str,
    journal_dir: Path,
    *,
    replica_id: str = "r1",
    clock: Any = None,
    task_limit: int | None = None,
    store_timeout_s: float = STORE_TIMEOUT_S,
) -> AsyncIterator[tuple[SqlLedger, Database, Accounts]]:
    database = open_database(url, clock)
    try:
        ledger = await SqlLedger.open(
            database,
            replica_id=replica_id,
            journal_dir=journal_dir,
            task_default=TaskDefault(task_limit),
            store_timeout_s=store_timeout_s,
        )
        try:
            yield ledger, database, Accounts(database, actor="test")
        finally:
            await ledger.close()
    finally:
        await database.close()


async def rows(database: Database, text: str, *args: Any) -> list[tuple[Any, ...]]:
    def tx() -> Tx[list[Row]]:
        return list((yield Fetch(Sql(text), args)))

    return [tuple(row) for row in await database.read(tx)]


async def run(database: Database, text: str, *args: Any) -> None:
    def tx() -> Tx[None]:
        yield Fetch(Sql(text), args)

    await database.write(tx)
