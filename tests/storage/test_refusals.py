"""A storm of refused requests costs no SQL: what stays refused until somebody acts is told from memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gateway.core.budget import OnExceed
from gateway.core.entry import Amounts, Granted, Refused, Unit
from gateway.storage.refusals import TTL_S, Refusals
from gateway.storage.transact import Runner, Tx
from tests.storage.worlds import TEAM, HandClock, attempt, opened, outcome, reserve, scopes, usd

T = TypeVar("T")


class Counting:
    """A runner that counts its transactions."""

    def __init__(self, runner: Runner) -> None:
        self.count = 0
        self._runner = runner

    async def run(self, tx: Callable[[], Tx[T]], timeout_s: float) -> T:
        self.count += 1
        return await self._runner.run(tx, timeout_s)


async def test_a_storm_costs_one_transaction_until_a_budget_changes(store: str, tmp_path: Path) -> None:
    async with opened(store, tmp_path / "journal") as (ledger, database, accounts):
        await accounts.ensure_defaults()
        await accounts.set_budget(TEAM, 100)
        first = attempt()
        assert isinstance(await reserve(ledger, first, 95), Granted)
        await ledger.settle(first, outcome(95))
        ledger._writer = counting = Counting(database.writer)  # type: ignore[assignment]
        refused = Refused(TEAM, 100, 95, 0, None)
        assert await reserve(ledger, attempt(), 10) == refused
        storm = [reserve(ledger, attempt(task_id=f"task_{i % 7}"), 10) for i in range(500)]
        assert set(map(str, await asyncio.gather(*storm))) == {str(refused)}
        assert counting.count == 1

        assert isinstance(await reserve(ledger, attempt(), 5), Granted), "what fits is asked for"
        await accounts.set_budget(TEAM, 1_000)
        ledger.revision_changed()
        assert isinstance(await reserve(ledger, attempt(), 10), Granted)


async def test_money_that_is_only_held_may_come_back(store: str, tmp_path: Path) -> None:
    async with opened(store, tmp_path / "journal") as (ledger, _, accounts):
        await accounts.ensure_defaults()
        await accounts.set_budget(TEAM, 100)
        first = attempt()
        await reserve(ledger, first, 100)
        assert isinstance(await reserve(ledger, attempt(), 10), Refused)
        await ledger.settle(first, outcome(1))
        assert isinstance(await reserve(ledger, attempt(), 10), Granted)


async def test_those_below_a_task_that_is_used_up_are_told_from_memory_too(
    store: str, tmp_path: Path
) -> None:
    async with opened(store, tmp_path / "journal") as (ledger, database, accounts):
        await accounts.ensure_defaults()
        await accounts.set_budget("task:top", 100)
        a = attempt(task_id="child", parent_task_id="top")
        await reserve(ledger, a, 100)
        await ledger.settle(a, outcome(100))
        await reserve(ledger, attempt(task_id="grandchild", parent_task_id="child"), 5)
        ledger._writer = counting = Counting(database.writer)  # type: ignore[assignment]
        again = await reserve(ledger, attempt(task_id="grandchild", parent_task_id="child"), 5)
        assert again == Refused("task:top", 100, 100, 0, None)
        assert counting.count == 0


async def test_a_landing_that_was_had_is_not_asked_for_again(store: str, tmp_path: Path) -> None:
    async with opened(store, tmp_path / "journal") as (ledger, database, accounts):
        await accounts.ensure_defaults()
        await accounts.set_budget("task:task_a", 1_000, on_exceed=OnExceed.SUMMARIZE)
        a = attempt()
        await reserve(ledger, a, 975)
        await ledger.settle(a, outcome(975))
        await reserve(ledger, attempt(), 10)
        assert isinstance(await reserve(ledger, attempt(), 10, landing=True), Granted)
        assert isinstance(await reserve(ledger, attempt(), 10, landing=True), Refused)
        ledger._writer = counting = Counting(database.writer)  # type: ignore[assignment]
        for landing in (False, True) * 20:
            assert isinstance(await reserve(ledger, attempt(), 10, landing=landing), Refused)
        assert counting.count == 0


class StoppedClock(HandClock):
    def __init__(self) -> None:
        super().__init__()
        self.s = 0.0

    def monotonic(self) -> float:
        return self.s


def test_what_is_remembered_ends_with_its_time_its_window_and_any_change() -> None:
    clock = StoppedClock()
    known = Refusals(clock)
    used_up = Refused("key:k", 100, 95, 0, clock.ms + 500, Unit.USD)
    where = ("task:t", scopes(attempt(key_id="k")), usd(10), usd(10), False)

    def told() -> Refused | None:
        return known.find(*where)

    known.add("task:t", used_up, usd(10), False)
    assert told() == used_up
    assert known.find("task:t", ("key:k",), Amounts(0, 0, 0, 0), usd(0), False) is None, "what is free fits"
    clock.ms += 500
    assert told() is None, "its window is over"
    clock.ms -= 500
    known.add("task:t", used_up, usd(10), False)
    clock.s += TTL_S
    assert told() is None
    known.forget()
    # A task that is paused, for which the key's budget is also too small: the state is its own.
    paused = Refused("key:k", 100, 50, 0, None, state="paused_admin")
    known.add("task:t", paused, usd(60), False)
    assert told() == paused
    assert (
        known.find("task:u", scopes(attempt(key_id="k", task_id="task:u")), usd(10), usd(10), False) is None
    )
    known.add("task:t", used_up, usd(10), False)
    before = known.changes
    known.forget()
    assert (told(), known.changes) == (None, before + 1)
