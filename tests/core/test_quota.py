"""What providers say of their own limits, and how far retries may go."""

from __future__ import annotations

import pytest

from gateway.core.quota import used_up_for_s
from gateway.core.retries import RetryBudget


@pytest.mark.parametrize(
    ("headers", "pause_s"),
    [
        ({}, None),
        ({"x-ratelimit-remaining-requests": "3", "x-ratelimit-reset-requests": "1s"}, None),
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "6m0s"}, 360.0),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "1m2.5s"}, 62.5),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "20ms"}, 0.02),
        ({"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "soon"}, 5.0),
        ({"anthropic-ratelimit-requests-remaining": "0"}, 5.0),
        ({"anthropic-ratelimit-tokens-remaining": "12000"}, None),
    ],
)
def test_a_used_up_quota_is_left_alone_until_it_is_back(
    headers: dict[str, str], pause_s: float | None
) -> None:
    assert used_up_for_s(headers) == pause_s


def test_retries_are_a_few_and_then_a_tenth_of_the_traffic() -> None:
    budget = RetryBudget(grows_back_s=10.0)
    assert [budget.take("p", 0.0) for _ in range(6)] == [True] * 5 + [False]
    for _ in range(100):
        budget.asked("p")
    assert [budget.take("p", 0.0) for _ in range(11)] == [True] * 10 + [False]
    assert budget.take("p", 10.0), "one grows back without traffic"
    assert not budget.take("p", 10.0)
    assert budget.take("q", 0.0), "each provider has an account of its own"
    assert (budget.refused, round(budget.left("p"), 1)) == (3, 0.0)


def test_an_account_does_not_grow_without_end() -> None:
    budget = RetryBudget()
    for _ in range(10_000):
        budget.asked("p")
    assert 50.0 <= budget.left("p") < 50.2
