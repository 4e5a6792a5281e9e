"""Token buckets: how fast something may be used. Arithmetic only; the stores keep the buckets.

A bucket of capacity C per minute starts full, refills C / 60 units a second and never holds more than C.
Levels are integers in 1/60,000 of a unit, so that one millisecond of refill is exactly C of them and no time
is lost to rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_MS_PER_MIN = 60_000
#: The wait of a request that is larger than its whole bucket: it never fits, so no Retry-After helps.
NEVER = math.inf


@dataclass(frozen=True, slots=True)
class Bucket:
    """`level` in 1/60,000 of a unit at wall-clock time `at_ms`."""

    level: int
    at_ms: int

    @classmethod
    def full(cls, capacity_per_min: int, now_ms: int) -> Bucket:
        return cls(capacity_per_min * _MS_PER_MIN, now_ms)


def refill(bucket: Bucket, capacity_per_min: int, now_ms: int) -> Bucket:
    """The bucket as it is at `now_ms`. A clock that steps back adds nothing; a lowered capacity applies at once."""
    elapsed_ms = max(0, now_ms - bucket.at_ms)
    level = min(capacity_per_min * _MS_PER_MIN, bucket.level + elapsed_ms * capacity_per_min)
    return Bucket(level, max(now_ms, bucket.at_ms))


def take(bucket: Bucket, cost: int, capacity_per_min: int, now_ms: int) -> tuple[Bucket, float]:
    """Take `cost` units: (bucket after, 0.0), or (bucket refilled but untouched, seconds until it fits).

    The wait is rounded up to a whole millisecond, so waiting that long is enough if nobody else takes.
    It is `NEVER` (infinite) when `cost` exceeds the capacity.
    """
    if cost < 0 or capacity_per_min < 0:
        raise ValueError(f"cost ({cost}) and capacity ({capacity_per_min}) must not be negative")
    bucket = refill(bucket, capacity_per_min, now_ms)
    missing = cost * _MS_PER_MIN - bucket.level
    if missing <= 0:
        return Bucket(-missing, bucket.at_ms), 0.0
    if cost > capacity_per_min:
        return bucket, NEVER
    return bucket, -(-missing // capacity_per_min) / 1000
