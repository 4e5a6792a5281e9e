"""What the ledger does when a transaction fails, or takes longer than anybody waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import asyncpg
import pytest

from gateway.core.entry import Granted, Settled
from gateway.core.errors import LedgerUnavailable
from gateway.jobs.reaper import Reaper
from gateway.storage import reports
from gateway.storage.database import open_database
from gateway.storage.ledger import SqlLedger
from gateway.storage.postgres_runner import PostgresRunner
from gateway.storage.tables import hold
from gateway.storage.transact import Conflict, Fetch, Runner, Sql, StoreDown, Tx
from tests.storage.worlds import TEAM, attempt, opened, reserve, rows, void

T = TypeVar("T")


class Troubled(Runner):
    """Fails as it is told before it performs anything."""

    def __init__(self, inner: Runner) -> None:
        self.flights = 1
        self.troubles: list[Exception] = []
        self._inner = inner

    async def run(self, tx: Callable[[], Tx[T]], timeout_s: float) -> T:
        if self.troubles:
            raise self.troubles.pop(0)
        return await self._inner.run(tx, timeout_s)

    async def close(self) -> None:
        await self._inner.close()


async def test_another_transaction_that_is_first_stops_neither_start_nor_reaper_nor_end(
    store: str, tmp_path: Path
) -> None:
    opened = open_database(store)
    runner = Troubled(opened.writer)
    database = replace(opened, writer=runner)
    runner.troubles = [Conflict()]
    ledger = await SqlLedger.open(database, replica_id="r1", journal_dir=tmp_path)
    await reserve(ledger, attempt(), 400)

    runner.troubles = [Conflict()] * 4
    assert await Reaper(ledger).turn() == 0
    runner.troubles = [Conflict()] * 5
    with pytest.raises(LedgerUnavailable):
        await Reaper(ledger).turn()
    runner.troubles = [Conflict()]
    await ledger.close()
    await database.close()


async def test_the_reaper_hears_in_every_step_that_the_store_is_down(store: str, tmp_path: Path) -> None:
    opened = open_database(store)
    runner = Troubled(opened.writer)
    database = replace(opened, writer=runner)
    ledger = await SqlLedger.open(database, replica_id="r1", journal_dir=tmp_path)
    for step in (lambda: ledger.reap(0), lambda: ledger.forget_holds(0), ledger.ensure_partitions):
        runner.troubles = [StoreDown()]
        with pytest.raises(LedgerUnavailable):
            await step()
    await ledger.close()
    await database.close()


async def test_a_hold_whose_commit_is_still_under_way_is_ended_by_its_void(
    postgres_url: str, tmp_path: Path
) -> None:
    async with opened(postgres_url, tmp_path) as (ledger, database, accounts):
        await accounts.ensure_defaults()
        await accounts.set_budget(TEAM, 1_000)
        known, late = attempt(), attempt()
        await reserve(ledger, known, 400)
        await ledger.settle(known, void())

        # What an admission does, up to its COMMIT.
        admission = await asyncpg.connect(postgres_url)
        await admission.execute("BEGIN")
        await admission.execute("SELECT 1 FROM replica FOR SHARE")
        columns = ", ".join(c.name for c in hold.columns if c.name not in ("attempt_id", "state"))
        await admission.execute(
            f"INSERT INTO hold (attempt_id, state, {columns}) SELECT '{late.attempt_id}', 'held', {columns} FROM hold"
        )
        await admission.execute("UPDATE budget SET held_amount = 400")
        settling = asyncio.create_task(ledger.settle(late, void()))
        async with asyncio.timeout(10):
            while not await rows(
                database,
                "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%FROM replica%'",
            ):
                await asyncio.sleep(0.01)
        await admission.execute("COMMIT")
        await admission.close()

        assert await settling is Settled.SETTLED
        assert await rows(database, "SELECT DISTINCT state FROM hold") == [("ended",)]
        assert [b.reserved for b in await ledger.snapshot(TEAM)] == [0]
        assert [(e["kind"], e["hold_nano_usd"]) for e in await reports.entries(database)] == [
            ("void", 400)
        ] * 2
        assert await reports.drift(database) == []


async def test_who_stands_still_inside_a_transaction_keeps_its_locks_only_for_a_while(
    postgres_url: str, tmp_path: Path
) -> None:
    async with opened(postgres_url, tmp_path, replica_id="lives") as (ledger, _, accounts):
        await accounts.ensure_defaults()
        await accounts.set_budget(TEAM, 1_000)
        frozen = PostgresRunner(postgres_url.replace("postgresql+asyncpg", "postgresql"), 0.2)

        def tx() -> Tx[None]:
            yield Fetch(Sql("SELECT 1 FROM budget FOR UPDATE"))
            time.sleep(1.0)  # the whole process stands still
            yield Fetch(Sql("UPDATE budget SET held_amount = 77"))

        with pytest.raises(StoreDown):
            await frozen.run(tx, 2.0)
        await frozen.close()
        assert isinstance(await reserve(ledger, attempt(), 400), Granted)
        assert [b.reserved for b in await ledger.snapshot(TEAM)] == [400]


async def test_reports_leave_the_connections_of_requests_alone(postgres_url: str) -> None:
    """A report's statement is another one each time: prepared where requests are served it would push out theirs."""
    database = open_database(postgres_url)
    who = Sql("SELECT pg_backend_pid()")

    def tx() -> Tx[int]:
        return int((yield Fetch(who))[0][0])

    serving = {await database.read(tx), await database.write(tx)}
    reporting = {await database.report(tx), await database.report(tx)}
    assert (len(serving), len(reporting), serving & reporting) == (1, 1, set())
    await database.close()


async def test_of_many_reports_some_wait_and_none_goes_on_when_nobody_waits_for_it(postgres_url: str) -> None:
    dsn = postgres_url.replace("postgresql+asyncpg", "postgresql")
    desk = PostgresRunner(dsn, statement_s=0.2, at_once_max=1)

    def sleeping(seconds: float) -> Callable[[], Tx[None]]:
        def tx() -> Tx[None]:
            yield Fetch(Sql(f"SELECT 'report', pg_sleep({seconds})"))

        return tx

    with pytest.raises(StoreDown, match="statement timeout"):
        await desk.run(sleeping(60.0), 5.0)
    slow = asyncio.create_task(desk.run(sleeping(0.15), 5.0))
    await asyncio.sleep(0)  # it has its turn now
    with pytest.raises(StoreDown, match="too many reports are being made at once"):
        await desk.run(sleeping(0.0), 0.05)
    await slow
    await desk.run(sleeping(0.0), 5.0)
    await desk.close()
