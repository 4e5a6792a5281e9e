"""The time that usage is summed up in: full hours, or the days of a zone. All instants are milliseconds since 1970 UTC.

Sums are kept by full hours of UTC, so only what begins and ends with one can be answered from them: `bucket_at` raises
ValueError for the days of zones that are half an hour off (India), and takes those that are 23 or 25 hours long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import pairwise
from zoneinfo import ZoneInfo

from gateway.core.windows import Calendar, Unit, bounds

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


#: Later than any usage; calendars end with the year 9999.
LATEST_YEAR = 2999


class Width(StrEnum):
    HOUR = "1h"
    DAY = "1d"


@dataclass(frozen=True, slots=True)
class Run:
    """Buckets in a row that are equally long: from `start_ms` on, up to `end_ms`."""

    start_ms: int
    width_ms: int
    end_ms: int


def bucket_at(width: Width, zone: str, at_ms: int) -> tuple[int, int]:
    """[start, end) of the bucket that `at_ms` is in. ValueError for an unknown zone, and where the days are not of full
    hours."""
    size = HOUR_MS if width is Width.HOUR else DAY_MS
    if width is Width.HOUR or zone == "UTC":
        start_ms = at_ms // size * size
        return start_ms, start_ms + size
    start_ms, end_ms = bounds(Calendar(Unit.DAY, zone), at_ms)
    assert end_ms is not None
    if start_ms % HOUR_MS or end_ms % HOUR_MS:
        raise ValueError(f"days of {zone} do not begin with a full hour of UTC, and sums are kept by those")
    return start_ms, end_ms


def local_ms(when: datetime, zone: str) -> int:
    """When clocks of the zone show that; the first time, if they show it twice. ValueError for an unknown zone."""
    Calendar(Unit.DAY, zone)
    return round(when.replace(tzinfo=ZoneInfo(zone)).timestamp() * 1_000)


def edges(width: Width, zone: str, from_ms: int, to_ms: int) -> Iterator[int]:
    """The starts of all buckets from the one that `from_ms` is in, and the end of the last, which is not before
    `to_ms`."""
    start_ms, end_ms = bucket_at(width, zone, from_ms)
    yield start_ms
    while end_ms < to_ms:
        yield end_ms
        _, end_ms = bucket_at(width, zone, end_ms)
    yield end_ms


def runs(found: Sequence[int]) -> list[Run]:
    """Buckets by their edges, those of equal length together."""
    joined: list[Run] = []
    for start_ms, end_ms in pairwise(found):
        width_ms = end_ms - start_ms
        if joined and joined[-1].width_ms == width_ms:
            joined[-1] = Run(joined[-1].start_ms, width_ms, end_ms)
        else:
            joined.append(Run(start_ms, width_ms, end_ms))
    return joined
