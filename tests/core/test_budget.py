"""The arithmetic of budgets, without a store."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core import budget as budgets
from gateway.core.budget import Budget, BudgetMode, OnExceed, crossed, decide, exhausted
from gateway.core.entry import Amounts, Granted, Refused, Unit
from gateway.core.windows import bounds, parse_window

DAY_MS = 86_400_000
NOW_MS = 1_790_000_000_000


def lifetime(limit: int, posted: int = 0, held: int = 0, **changes: object) -> Budget:
    budget = Budget("bud_1", "team:red", "lifetime", "UTC", 0, None, limit, posted, held)
    return msgspec.structs.replace(budget, **changes)


def usd(nano_usd: int | None) -> Amounts:
    return Amounts(nano_usd, 10, 10)


def granted(amount: int, remaining: int | None = None, scope: str = "") -> Granted:
    return Granted(amount, remaining, scope, output_tokens=10)


def decide_usd(within: Sequence[Budget], amount: int | None, least: int | None) -> Granted | Refused:
    return decide(within, usd(amount), usd(least), NOW_MS)


def test_the_worked_example_of_a_task_with_half_a_dollar() -> None:
    task = lifetime(500_000_000, scope="task:t")

    first = decide_usd([task], 272_880_000, 150_000_000 + 2_048 * 15_000)
    assert first == granted(272_880_000, 227_120_000, "task:t")
    task = budgets.hold(task, usd(272_880_000))

    second = decide_usd([task], 272_880_000, 150_000_000 + 2_048 * 15_000)
    assert second == granted(227_120_000, 0, "task:t")
    task = budgets.hold(task, usd(227_120_000))

    assert decide_usd([task], 272_880_000, 180_720_000) == Refused(
        "task:t", 500_000_000, 0, 500_000_000, None
    )
    task = budgets.settle(task, 272_880_000, 37_650_000)
    assert (task.posted, task.held, task.room) == (
        37_650_000,
        227_120_000,
        235_230_000,
    )


def test_a_hold_fits_all_budgets_or_none_and_the_tightest_is_named() -> None:
    team, key = lifetime(1_000, held=400), lifetime(500, posted=200, scope="key:k", budget_id="bud_2")

    assert decide_usd([team, key], 300, 300) == granted(300, 0, "key:k")
    assert decide_usd([team, key], 301, 301) == Refused("key:k", 500, 200, 0, None)
    assert decide_usd([team, key], 700, 100) == granted(300, 0, "key:k")


def test_nothing_is_clamped_below_the_least_that_is_of_use() -> None:
    assert decide_usd([lifetime(99)], 500, 100) == Refused("team:red", 99, 0, 0, None)
    assert decide_usd([lifetime(100)], 500, 100) == granted(100, 0, "team:red")
    assert decide_usd([lifetime(0)], 500, 0) == Refused("team:red", 0, 0, 0, None)


def test_what_is_free_fits_even_an_overdrawn_budget() -> None:
    assert decide_usd([lifetime(100, posted=150)], 0, 0) == granted(0, -50, "team:red")


def test_soft_budgets_never_refuse_and_are_not_what_remains() -> None:
    soft = lifetime(10, posted=50, on_exceed=OnExceed.WARN)
    warned = (Refused("team:red", 10, 50, 0, None, on_exceed=OnExceed.WARN),)

    assert decide_usd([soft], 500, 500) == msgspec.structs.replace(granted(500), warned=warned)
    assert decide_usd([soft, lifetime(700)], 500, 500) == msgspec.structs.replace(
        granted(500, 200, "team:red"), warned=warned
    )
    assert decide_usd([lifetime(9_000, on_exceed=OnExceed.WARN)], 500, 500) == granted(500)
    shadow = lifetime(10, posted=50, mode=BudgetMode.SHADOW)
    assert decide_usd([shadow], 500, 500) == granted(500)


def test_what_cannot_be_bounded_is_refused_by_hard_budgets_of_its_unit_only() -> None:
    assert decide_usd([lifetime(10**15)], None, None) == Refused("team:red", 10**15, 0, 0, None)
    assert decide_usd([lifetime(10**15, mode=BudgetMode.SHADOW)], None, None) == granted(0)
    assert decide_usd([lifetime(10**15, unit=Unit.CALLS)], None, None) == Granted(
        0, output_tokens=10, remaining_calls=10**15 - 1
    )
    assert decide_usd([], None, None) == granted(0)


def test_an_ended_window_is_empty_in_the_next_one() -> None:
    start_ms, end_ms = bounds(parse_window("day"), NOW_MS)
    assert end_ms is not None
    day = Budget("bud_1", "team:red", "day", "UTC", start_ms, end_ms, 100, 60, 40)

    assert budgets.at(day, end_ms - 1) == day
    assert budgets.at(day, end_ms) == Budget("bud_1", "team:red", "day", "UTC", end_ms, end_ms + DAY_MS, 100)
    assert decide_usd([day], 1, 1) == Refused("team:red", 100, 60, 40, end_ms)


def test_earlier_buckets_of_a_rolling_window_count() -> None:
    start_ms, end_ms = budgets.first_window("1h", "UTC", NOW_MS)
    hour = Budget(
        "bud_1", "team:red", "1h", "UTC", start_ms, end_ms, 100, 10, 20, earlier_posted=30, earlier_held=15
    )  # fmt: skip

    assert (hour.rolling, hour.spent, hour.reserved, hour.room) == (
        True,
        40,
        35,
        25,
    )
    refused = decide_usd([hour], 26, 26)
    assert isinstance(refused, Refused)
    assert (refused.spent, refused.held) == (40, 35)
    assert refused.resets_at_ms is not None
    assert NOW_MS < refused.resets_at_ms <= NOW_MS + 60_000


def test_only_posted_money_makes_a_refusal_final() -> None:
    assert not exhausted(Refused("s", 100, 40, 60, None), usd(50))
    assert exhausted(Refused("s", 100, 60, 0, None), usd(50))
    assert exhausted(Refused("s", 100, 100, 0, None), usd(None))


@pytest.mark.parametrize(
    ("before", "after", "percents"),
    [(0, 49, []), (0, 50, [50]), (49, 100, [50, 80, 90, 100]), (80, 90, [90]), (100, 150, []), (90, 40, [])],
)
def test_thresholds_are_crossed_once(before: int, after: int, percents: list[int]) -> None:
    assert crossed((50, 80, 90, 100), 100, before, after) == percents


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
        answer = decide_usd(chosen, amount, least)
        if isinstance(answer, Granted):
            assert min(least, amount) <= answer.amount_nano_usd <= amount
            for i in where & world.keys():
                held = budgets.hold(world[i], usd(answer.amount_nano_usd))
                assert held.room >= 0
                world[i] = budgets.settle(held, answer.amount_nano_usd, min(cost, answer.amount_nano_usd))
        else:
            assert min(b.room for b in chosen) < max(1, min(least, amount))
