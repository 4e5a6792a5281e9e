"""What the ledger's own jobs do when a transaction fails: they try again, or say that the store is down, and go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from gateway.core.errors import LedgerUnavailable
from gateway.jobs.reaper import Reaper
from gateway.storage.database import open_database
from gateway.storage.ledger import SqlLedger
from gateway.storage.transact import Conflict, Runner, StoreDown, Tx
from tests.storage.worlds import attempt, reserve

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
