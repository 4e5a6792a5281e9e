"""The simulated store against what Postgres is known to do, at READ COMMITTED."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from gateway.storage.transact import CommitUnknown, Fetch, Sql, StoreDown, Tx
from tests.simulator.loop import VirtualLoop
from tests.simulator.row_locks import shape_of
from tests.simulator.runner import SimulatedRunner
from tests.simulator.store import Store, Weather

READ = Sql("SELECT steps FROM task WHERE task_id = $1")
LOCK = Sql("SELECT steps FROM task WHERE task_id = $1 FOR UPDATE")
SKIP = Sql("SELECT steps FROM task WHERE task_id = $1 FOR UPDATE SKIP LOCKED")
WRITE = Sql("UPDATE task SET steps = $2 WHERE task_id = $1")
ADD = Sql("UPDATE task SET steps = steps + 1 WHERE task_id = $1 RETURNING steps")
UPSERT = Sql(
    "INSERT INTO task (task_id, key_id, team_id, tenant_id, external_id, source, state, created_at_ms, last_at_ms, "
    "steps) VALUES ($1, '', '', '', '', '', '', 0, 0, 1) ON CONFLICT (task_id) DO UPDATE SET "
    "steps = task.steps + excluded.steps RETURNING steps"
)


def simulated(weather: Weather, play: Callable[[Store, SimulatedRunner], Coroutine[Any, Any, Any]]) -> Any:
    """What `play` returns, on a store of that weather."""
    loop = VirtualLoop()
    store = Store(loop, Random(1), lambda: round(loop.now_s * 1_000))
    store.set_weather(weather)
    try:
        return loop.run_until_complete(play(store, SimulatedRunner(store, 2)))
    finally:
        loop.close()


SPREAD = Weather(spread=1.0, round_trip_s=0.01)


def increment(lock: Sql) -> Tx[int]:
    """Read, and write what is one more: safe only under a lock."""
    (before,) = (yield Fetch(lock, ("t",)))[0]
    yield Fetch(READ, ("other",))
    yield Fetch(WRITE, ("t", before + 1))
    return int(before)


def count(sql: Sql) -> Tx[int]:
    return int((yield Fetch(sql, ("t",)))[0][0])


@pytest.mark.parametrize(("sql", "expected"), [(LOCK, 10), (READ, 1)])
def test_without_a_lock_updates_are_lost_and_with_one_they_are_not(sql: Sql, expected: int) -> None:
    async def play(store: Store, runner: SimulatedRunner) -> int:
        await runner.run(lambda: count(UPSERT), 9)
        await asyncio.gather(*(runner.run(lambda: increment(sql), 9) for _ in range(9)))
        return int(store.rows("SELECT steps FROM task")[0][0])

    # Without the lock, the nine lose some of one another's; how many depends on the seed.
    assert (simulated(SPREAD, play) == 10) == (expected == 10)


@pytest.mark.parametrize("sql", [ADD, UPSERT])
def test_a_change_of_what_is_there_waits_for_the_one_before(sql: Sql) -> None:
    async def play(store: Store, runner: SimulatedRunner) -> list[int]:
        await runner.run(lambda: count(UPSERT), 9)
        return sorted(await asyncio.gather(*(runner.run(lambda: count(sql), 9) for _ in range(5))))

    assert simulated(SPREAD, play) == [2, 3, 4, 5, 6]


def test_a_locked_row_can_be_skipped() -> None:
    async def play(store: Store, runner: SimulatedRunner) -> list[int]:
        await runner.run(lambda: count(UPSERT), 9)
        holder = await store.begin()
        await holder._one_by_one(Fetch(LOCK, ("t",)))

        def tx() -> Tx[int]:
            return len((yield Fetch(SKIP, ("t",))))

        while_held = await runner.run(tx, 9)
        holder.leave()
        return [while_held, await runner.run(tx, 9)]

    assert simulated(SPREAD, play) == [0, 1]


def test_of_two_that_wait_for_each_other_one_is_told_to_try_again() -> None:
    def tx(first: str, second: str) -> Tx[None]:
        yield Fetch(ADD, (first,))
        yield Fetch(READ, ("other",))
        yield Fetch(ADD, (second,))

    async def play(store: Store, runner: SimulatedRunner) -> list[str]:
        for task in ("a", "b"):
            await runner.run(lambda task=task: (yield Fetch(UPSERT, (task,))), 9)  # type: ignore[misc]
        both = await asyncio.gather(
            runner.run(lambda: tx("a", "b"), 9), runner.run(lambda: tx("b", "a"), 9), return_exceptions=True
        )
        assert store.rows("SELECT steps FROM task") == [(2,), (2,)]
        return sorted(type(answer).__name__ for answer in both)

    assert simulated(SPREAD, play) == ["Conflict", "NoneType"]


@pytest.mark.parametrize(
    ("weather", "error", "steps"),
    [
        (Weather(lost_before=1.0), CommitUnknown, []),
        (Weather(lost_after=1.0), CommitUnknown, [(1,)]),
        (Weather(late=1.0, late_s=1e9), CommitUnknown, []),
        (Weather(down=1.0), StoreDown, []),
        (Weather(stalled=1.0), StoreDown, []),
    ],
)
def test_what_the_weather_does_to_a_transaction(
    weather: Weather, error: type[Exception], steps: list[tuple[int]]
) -> None:
    async def play(store: Store, runner: SimulatedRunner) -> Any:
        with pytest.raises(error):
            await runner.run(lambda: count(UPSERT), 2.0)
        return store.rows("SELECT steps FROM task")

    assert simulated(weather, play) == steps


def test_a_commit_may_happen_after_its_client_has_given_up() -> None:
    async def play(store: Store, runner: SimulatedRunner) -> list[Any]:
        with pytest.raises(CommitUnknown):
            await runner.run(lambda: count(UPSERT), 0.001)
        before = store.rows("SELECT steps FROM task")
        await asyncio.sleep(60)
        return [before, store.rows("SELECT steps FROM task")]

    assert simulated(Weather(late=1.0, late_s=50.0), play) == [[], [(1,)]]


def test_a_statement_of_a_form_that_is_not_known_is_refused() -> None:
    text = "WITH x AS (SELECT 1) UPDATE task SET steps = 1"
    with pytest.raises(ValueError, match="does not know which rows this locks"):
        shape_of(text, text)
