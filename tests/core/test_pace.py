"""What the next step may use, and how many are left."""

from __future__ import annotations

from gateway.core.budget import Budget, OnExceed
from gateway.core.entry import Unit
from gateway.core.pace import next_step, steps_left


def budget(unit: Unit, limit: int, posted: int = 0, **more: object) -> Budget:
    return Budget("b", "task:t", "lifetime", "UTC", 0, None, limit, posted, unit=unit, **more)  # type: ignore[arg-type]


def test_a_steady_run_goes_on_as_it_did() -> None:
    assert next_step([(step, 100, 50, 10, 1) for step in (4, 3, 2, 1)]) == {
        Unit.USD: 100,
        Unit.INPUT_TOKENS: 50,
        Unit.OUTPUT_TOKENS: 10,
        Unit.CALLS: 1,
    }
    assert next_step([]) == {}


def test_steps_that_grow_go_on_growing_and_those_that_shrink_do_not_vanish() -> None:
    grown = next_step([(step, 10 * step, 0, 0, 1) for step in range(12, 0, -1)])
    assert grown[Unit.USD] == 130, "the last ten, 30 to 120, and the next"
    shrunk = next_step([(2, 10, 0, 0, 1), (1, 1_000, 0, 0, 1)])
    assert shrunk[Unit.USD] == 505, "the average: the first wrote the cache"


def test_the_tries_of_a_step_are_one_step() -> None:
    used = next_step([(2, 5, 0, 0, 0), (2, 5, 1, 1, 1), (1, 4, 1, 1, 1), (1, 6, 1, 1, 1)])
    assert (used[Unit.USD], used[Unit.CALLS]) == (10, 2)


def test_the_tightest_budget_of_any_unit_says_how_many_are_left() -> None:
    used = {Unit.USD: 100, Unit.INPUT_TOKENS: 1_000, Unit.OUTPUT_TOKENS: 0, Unit.CALLS: 2}
    usd, tokens = budget(Unit.USD, 10_000, 1_000), budget(Unit.INPUT_TOKENS, 50_000, 45_500)
    assert steps_left([usd], used) == 90
    assert steps_left([usd, tokens], used) == 4
    assert steps_left([usd, budget(Unit.CALLS, 9)], used) == 4
    assert (
        steps_left([budget(Unit.USD, 10_000, on_exceed=OnExceed.SUMMARIZE, landing_percent=10)], used) == 90
    )
    assert steps_left([budget(Unit.USD, 5, 9)], used) == 0
    assert steps_left([budget(Unit.CALLS, 5)], {}) == 5, (
        "before its first step, of which it is known to be a call"
    )
    assert steps_left([budget(Unit.USD, 5), budget(Unit.OUTPUT_TOKENS, 5)], {}) is None
    assert steps_left([budget(Unit.USD, 10_000, on_exceed=OnExceed.WARN)], used) is None
