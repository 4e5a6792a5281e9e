"""The arithmetic of budgets, without a store."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core import budget as budgets
from gateway.core.budget import Budget, OnExceed, crossed, decide, exhausted
from gateway.core.entry import Granted, Refused
from gateway.core.windows import bounds, parse_window

DAY_MS = 86_400_000
NOW_MS = 1_790_000_000_000


def lifetime(limit: int, posted: int = 0, held: int = 0, **changes: object) -> Budget:
    budget = Budget("bud_1", "team:red", "lifetime", "UTC", 0, None, limit, posted, held)
    return replace(budget, **changes)  # type: ignore[arg-type]


def test_the_worked_example_of_a_task_with_half_a_dollar() -> None:
    task = lifetime(500_000_000, scope="task:t")

    first = decide([task], 272_880_000, 150_000_000 + 2_048 * 15_000, NOW_MS)
    assert first == Granted(272_880_000, 227_120_000, "task:t")
    task = budgets.hold(task, 272_880_000)

    second = decide([task], 272_880_000, 150_000_000 + 2_048 * 15_000, NOW_MS)
    assert second == Granted(227_120_000, 0, "task:t")
    task = budgets.hold(task, 227_120_000)

    assert decide([task], 272_880_000, 180_720_000, NOW_MS) == Refused(
        "task:t", 500_000_000, 0, 500_000_000, None
    )
    task = budgets.settle(task, 272_880_000, 37_650_000)
    assert (task.posted_nano_usd, task.held_nano_usd, task.room_nano_usd) == (
        37_650_000,
        227_120_000,
        235_230_000,
    )


def test_a_hold_fits_all_budgets_or_none_and_the_tightest_is_named() -> None:
    team, key = lifetime(1_000, held=400), lifetime(500, posted=200, scope="key:k", budget_id="bud_2")

    assert decide([team, key], 300, 300, NOW_MS) == Granted(300, 0, "key:k")
    assert decide([team, key], 301, 301, NOW_MS) == Refused("key:k", 500, 200, 0, None)
    assert decide([team, key], 700, 100, NOW_MS) == Granted(300, 0, "key:k")


def test_nothing_is_clamped_below_the_least_that_is_of_use() -> None:
    assert decide([lifetime(99)], 500, 100, NOW_MS) == Refused("team:red", 99, 0, 0, None)
    assert decide([lifetime(100)], 500, 100, NOW_MS) == Granted(100, 0, "team:red")
    assert decide([lifetime(0)], 500, 0, NOW_MS) == Refused("team:red", 0, 0, 0, None)


def test_what_is_free_fits_even_an_overdrawn_budget() -> None:
    assert decide([lifetime(100, posted=150)], 0, 0, NOW_MS) == Granted(0, -50, "team:red")


def test_soft_budgets_never_refuse_and_are_not_what_remains() -> None:
    soft = lifetime(10, posted=50, on_exceed=OnExceed.WARN)

    assert decide([soft], 500, 500, NOW_MS) == Granted(500)
    assert decide([soft, lifetime(700)], 500, 500, NOW_MS) == Granted(500, 200, "team:red")


def test_what_cannot_be_bounded_is_refused_by_hard_budgets_only() -> None:
    assert decide([lifetime(10**15)], None, None, NOW_MS) == Refused("team:red", 10**15, 0, 0, None)
    assert decide([lifetime(10, on_exceed=OnExceed.WARN)], None, None, NOW_MS) == Granted(0)
    assert decide([], None, None, NOW_MS) == Granted(0)


def test_an_ended_window_is_empty_in_the_next_one() -> None:
    start_ms, end_ms = bounds(parse_window("day"), NOW_MS)
    assert end_ms is not None
    day = Budget("bud_1", "team:red", "day", "UTC", start_ms, end_ms, 100, 60, 40)

    assert budgets.at(day, end_ms - 1) == day
    assert budgets.at(day, end_ms) == Budget("bud_1", "team:red", "day", "UTC", end_ms, end_ms + DAY_MS, 100)
    assert decide([day], 1, 1, NOW_MS) == Refused("team:red", 100, 60, 40, end_ms)


def test_earlier_buckets_of_a_rolling_window_count() -> None:
    start_ms, end_ms = budgets.first_window("1h", "UTC", NOW_MS)
    hour = Budget(
        "bud_1", "team:red", "1h", "UTC", start_ms, end_ms, 100, 10, 20, earlier_posted_nano_usd=30,
        earlier_held_nano_usd=15,
    )  # fmt: skip

    assert (hour.rolling, hour.spent_nano_usd, hour.reserved_nano_usd, hour.room_nano_usd) == (
        True,
        40,
        35,
        25,
    )
    refused = decide([hour], 26, 26, NOW_MS)
    assert isinstance(refused, Refused)
    assert (refused.spent_nano_usd, refused.held_nano_usd) == (40, 35)
    assert refused.resets_at_ms is not None
    assert NOW_MS < refused.resets_at_ms <= NOW_MS + 60_000


def test_only_posted_money_makes_a_refusal_final() -> None:
    assert not exhausted(Refused("s", 100, 40, 60, None), 50)
    assert exhausted(Refused("s", 100, 60, 0, None), 50)
    assert exhausted(Refused("s", 100, 100, 0, None), None)


@pytest.mark.parametrize(
    ("before", "after", "percents"),
    [(0, 49, []), (0, 50, [50]), (49, 100, [50, 80, 90, 100]), (80, 90, [90]), (100, 150, []), (90, 40, [])],
)
def test_thresholds_are_crossed_once(before: int, after: int, percents: list[int]) -> None:
    assert crossed(100, before, after) == percents


def test_a_limit_that_no_column_holds_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="a limit must be from 0 to"):
        lifetime(2**63)
    with pytest.raises(ValueError, match="a limit must be from 0 to"):
        lifetime(-1)


@given(
    limits=st.lists(st.integers(0, 200), min_size=1, max_size=3),
    asks=st.lists(
        st.tuples(st.sets(st.integers(0, 2)), st.integers(0, 120), st.integers(0, 120), st.integers(0, 150)),
        max_size=25,
    ),
)
def test_posted_and_held_never_exceed_a_hard_limit(
    limits: list[int], asks: list[tuple[set[int], int, int, int]]
) -> None:
    world = {i: lifetime(limit, budget_id=f"bud_{i}", scope=f"s:{i}") for i, limit in enumerate(limits)}
    for where, amount, least, cost in asks:
        chosen = [world[i] for i in sorted(where) if i in world]
        answer = decide(chosen, amount, least, NOW_MS)
        if isinstance(answer, Granted):
            assert min(least, amount) <= answer.amount_nano_usd <= amount
            for i in where & world.keys():
                held = budgets.hold(world[i], answer.amount_nano_usd)
                assert held.room_nano_usd >= 0
                world[i] = budgets.settle(held, answer.amount_nano_usd, min(cost, answer.amount_nano_usd))
        else:
            assert min(b.room_nano_usd for b in chosen) < max(1, min(least, amount))
