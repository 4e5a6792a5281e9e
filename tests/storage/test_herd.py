"""A herd of calls at once against a budget with room for k of them: k are admitted, every time. `make herd` is longer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from gateway.core.entry import Attempt, Granted
from gateway.storage import reports
from gateway.storage.accounts import Accounts
from gateway.storage.ledger import SqlLedger
from tests.storage.worlds import attempt, opened, outcome, reserve

EACH = 700
HERDS = (1, 32, 256, 1_000)
#: How long a busy machine takes is not the subject.
PATIENCE_S = 30.0


async def key_with_room(accounts: Accounts, k: int) -> str:
    """A new key, whose budget has room for k calls and not for one more."""
    record, _ = await accounts.create_key(pepper=b"pepper", name=f"room for {k}")
    await accounts.set_budget(f"key:{record.key_id}", k * EACH + EACH - 1)
    return record.key_id


async def admitted(ledgers: Sequence[SqlLedger], calls: int, key_id: str) -> list[SqlLedger]:
    """Who admitted, of so many calls at once that take turns at the ledgers."""

    async def call(n: int) -> SqlLedger | None:
        ledger = ledgers[n % len(ledgers)]
        a = attempt(key_id=key_id, task_id=f"task_{key_id}")
        if not isinstance(await reserve(ledger, a, EACH), Granted):
            return None
        held.append((ledger, a))
        return ledger

    held: list[tuple[SqlLedger, Attempt]] = []
    answers = await asyncio.gather(*(call(n) for n in range(calls)))
    await asyncio.gather(*(ledger.settle(a, outcome(EACH)) for ledger, a in held))
    return [ledger for ledger in answers if ledger is not None]


@pytest.mark.parametrize("calls", HERDS)
async def test_one_ledger_admits_exactly_what_fits(store: str, tmp_path: Path, calls: int) -> None:
    async with opened(store, tmp_path, store_timeout_s=PATIENCE_S) as (ledger, database, accounts):
        await accounts.ensure_defaults()
        for k in sorted({0, 1, calls // 3, calls - 1, calls}):
            key_id = await key_with_room(accounts, k)
            assert len(await admitted([ledger], calls, key_id)) == k
        assert await reports.drift(database) == []


@pytest.mark.parametrize("calls", HERDS)
async def test_three_replicas_admit_together_exactly_what_fits(
    postgres_url: str, tmp_path: Path, calls: int
) -> None:
    async with AsyncExitStack() as stack:
        worlds = [
            await stack.enter_async_context(
                opened(postgres_url, tmp_path / name, replica_id=name, store_timeout_s=PATIENCE_S)
            )
            for name in ("r1", "r2", "r3")
        ]
        ledgers = [ledger for ledger, _, _ in worlds]
        _, database, accounts = worlds[0]
        await accounts.ensure_defaults()
        for k in sorted({0, 1, calls // 3, calls - 1, calls}):
            by = await admitted(ledgers, calls, await key_with_room(accounts, k))
            assert len(by) == k
            if k == calls > 1:
                assert {ledgers.index(ledger) for ledger in by} == {0, 1, 2}
        assert await reports.drift(database) == []
