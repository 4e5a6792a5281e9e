"""What a refusal says, where it must not say more than is so."""

from __future__ import annotations

import pytest

from gateway.core.budget import Budget, refused_by
from gateway.core.entry import Amounts, Unit
from gateway.core.refusal import refusal_of

NOW_MS = 1_790_000_000_000  # 2026-09-21T14:13:20Z


def told(spent: int, held: int, window: str, calls: int = 1) -> str:
    budget = Budget("b", "key:k", window, "UTC", 0, NOW_MS + 1, 5, spent, unit=Unit.CALLS, held=held)
    ask = Amounts(0, 0, 0, calls)
    return refusal_of(refused_by(budget, NOW_MS), ask, ask).message


@pytest.mark.parametrize(
    ("spent", "held", "says"),
    [(5, 0, "is used up"), (4, 1, "is used up"), (3, 1, "has too little left for this request")],
)
def test_only_a_budget_of_which_nothing_is_left_is_used_up(spent: int, held: int, says: str) -> None:
    assert told(spent, held, "day", calls=2).startswith(
        f"the budget of the key k {says}: {spent} calls spent"
    )


def test_a_calendar_window_resets_and_a_rolling_one_does_not() -> None:
    assert told(5, 0, "day").endswith(" It resets at 2026-09-22T00:00:00Z.")
    assert told(5, 0, "rolling:24h").endswith(
        " Its window is rolling: each amount counts for a whole window, and none comes back before 2026-09-21T14:24:00Z."
    )


@pytest.mark.parametrize(("limit", "kept_back"), [(0, 0), (1, 0), (2, 1), (5, 1), (50, 1), (200, 4)])
def test_of_a_few_calls_one_is_kept_back_for_a_last_answer(limit: int, kept_back: int) -> None:
    calls = Budget("b", "key:k", "day", "UTC", 0, NOW_MS + 1, limit, unit=Unit.CALLS, landing_percent=2)
    assert (calls.landing, calls.room) == (kept_back, limit - kept_back)
