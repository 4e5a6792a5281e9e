"""Token buckets, and their store in one process."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.limits import NEVER, Bucket, take
from gateway.storage.memory import MemoryLimits


def test_a_bucket_starts_full_empties_and_says_how_long_to_wait() -> None:
    bucket = Bucket.full(60, now_ms=0)
    for _ in range(60):
        bucket, wait_s = take(bucket, 1, 60, now_ms=0)
        assert wait_s == 0
    assert take(bucket, 1, 60, now_ms=0) == (bucket, 1.0)
    assert take(bucket, 1, 60, now_ms=999)[1] == 0.001
    assert take(bucket, 1, 60, now_ms=1000)[1] == 0
    assert take(bucket, 60, 60, now_ms=0)[1] == 60.0


def test_what_is_larger_than_its_bucket_never_fits() -> None:
    assert take(Bucket.full(10, 0), 11, 10, 0)[1] == NEVER == math.inf
    assert take(Bucket.full(0, 0), 1, 0, 0)[1] == NEVER
    assert take(Bucket.full(0, 0), 0, 0, 0)[1] == 0
    with pytest.raises(ValueError, match="must not be negative"):
        take(Bucket.full(10, 0), -1, 10, 0)


def test_a_clock_that_steps_back_gives_nothing_and_a_lowered_limit_holds_at_once() -> None:
    empty, _ = take(Bucket.full(60, 100_000), 60, 60, 100_000)
    back, wait_s = take(empty, 1, 60, 40_000)
    assert (back, wait_s) == (empty, 1.0)
    lowered, _ = take(Bucket.full(1000, 0), 0, 5, 0)
    assert lowered == Bucket.full(5, 0)


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 1500)), max_size=40),
)
def test_no_more_passes_than_the_capacity_and_what_has_refilled(
    capacity: int, calls: list[tuple[int, int]]
) -> None:
    bucket, now_ms, passed = Bucket.full(capacity, 0), 0, 0
    for pause_ms, cost in calls:
        now_ms += pause_ms
        bucket, wait_s = take(bucket, cost, capacity, now_ms)
        if wait_s == 0:
            passed += cost
        elif wait_s != NEVER:
            # and the wait is enough
            assert take(bucket, cost, capacity, now_ms + round(wait_s * 1000))[1] == 0
    assert passed * 60_000 <= capacity * (60_000 + now_ms)


async def test_all_buckets_give_or_none_does() -> None:
    limits = MemoryLimits()
    assert await limits.take([("requests", 1, 10), ("tokens", 900, 1000)], 0) is None
    assert await limits.take([("requests", 1, 10), ("tokens", 200, 1000)], 0) == ("tokens", 6.0)
    # the refusal took no request: nine are left
    assert await limits.take([("requests", 9, 10), ("tokens", 100, 1000)], 0) is None
    assert await limits.take([("requests", 1, 10)], 0) == ("requests", 6.0)


async def test_the_longest_wait_is_told_and_a_bucket_named_twice_pays_twice() -> None:
    limits = MemoryLimits()
    assert await limits.take([("a", 10, 10), ("b", 10, 20)], 0) is None
    assert await limits.take([("b", 20, 20), ("a", 10, 10)], 0) == ("a", 60.0)
    assert await limits.take([("c", 6, 10), ("c", 6, 10)], 0) == ("c", 12.0)


async def test_buckets_unused_for_longest_are_forgotten_first() -> None:
    limits = MemoryLimits(max_buckets=2)
    for name in ("a", "b", "a", "c"):
        assert await limits.take([(name, 1, 2)], 0) is None
    assert await limits.take([("a", 1, 2)], 0) == ("a", 30.0)  # kept: empty after two
    assert await limits.take([("b", 2, 2)], 0) is None  # forgotten: full again
