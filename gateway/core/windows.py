"""Budget windows: over which time an amount is summed.

Calendar windows follow an IANA zone, so that a day is 23 or 25 hours long where clocks change; days begin at local
midnight (weeks on Monday), hours at the zone's full hour. Rolling windows are 60 sub-buckets long; a bucket leaves
only when it is wholly outside, so what counts is up to a sixtieth stricter than asked, never looser.

All instants are milliseconds since 1970 UTC. The one thing outside of this module that it depends on is the time
zone database, which `zoneinfo` reads once per zone from the system or from the `tzdata` package.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from zoneinfo import ZoneInfo

SUB_BUCKETS = 60
MAX_ROLLING_S = 10 * 366 * 86_400

_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS
_MS = timedelta(milliseconds=1)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EPOCH_DAY = date(1970, 1, 1).toordinal()
_LENGTH = re.compile(r"(?:rolling:)?([1-9]\d{0,8})([smhdw])", re.ASCII)
_UNIT_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


class Unit(StrEnum):
    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"


@dataclass(frozen=True, slots=True)
class Lifetime:
    """From the beginning, for ever: what a task has."""


@dataclass(frozen=True, slots=True)
class Calendar:
    """The calendar's hour, day, week or month in an IANA zone. ValueError if there is no such zone."""

    unit: Unit
    zone: str = "UTC"

    def __post_init__(self) -> None:
        _zone(self.zone)


@dataclass(frozen=True, slots=True)
class Rolling:
    """The last `seconds`, a minute to ten years."""

    seconds: int

    def __post_init__(self) -> None:
        if type(self.seconds) is not int or not 60 <= self.seconds <= MAX_ROLLING_S:
            raise ValueError(
                f"a rolling window lasts from 60 to {MAX_ROLLING_S} seconds, not {self.seconds!r}"
            )

    @property
    def bucket_ms(self) -> int:
        return -(-self.seconds * 1_000 // SUB_BUCKETS)


Window = Lifetime | Calendar | Rolling


def parse_window(text: str, zone: str = "UTC") -> Window:
    """A window out of its text: "lifetime", "hour", "day", "week", "month" (in `zone`), or the length of a rolling
    one: "30d", "rolling:24h", "90m". Raises ValueError that says what is possible.
    """
    if text == "lifetime":
        return Lifetime()
    if text in tuple(Unit):
        return Calendar(Unit(text), zone)
    match = _LENGTH.fullmatch(text)
    if match is None:
        raise ValueError(
            f'{text!r} is not a window: write "lifetime", "hour", "day", "week", "month", or the length of a rolling '
            'window such as "30d" or "rolling:24h"'
        )
    return Rolling(int(match[1]) * _UNIT_S[match[2]])


def bounds(window: Window, now_ms: int) -> tuple[int, int | None]:
    """What counts now: amounts posted in [start, end); end is None for a lifetime.

    Calendar windows of one unit and zone have no gap and no overlap. For a rolling window the end is that of the
    bucket which is filled now.
    """
    match window:
        case Lifetime():
            return 0, None
        case Rolling():
            size = window.bucket_ms
            oldest = (now_ms - window.seconds * 1_000) // size * size
            return oldest, now_ms // size * size + size
        case Calendar(Unit.HOUR, zone):
            return _hour(_zone(zone), now_ms)
        case Calendar():
            return _days(_zone(window.zone), window.unit, now_ms)


def bucket(window: Window, now_ms: int) -> tuple[int, int | None]:
    """Where an amount is posted now: the whole window, or the sub-bucket of a rolling one."""
    start_ms, end_ms = bounds(window, now_ms)
    if isinstance(window, Rolling) and end_ms is not None:
        return end_ms - window.bucket_ms, end_ms
    return start_ms, end_ms


def resets_at_ms(window: Window, now_ms: int) -> int | None:
    """When something next stops counting: the window's end, or the oldest sub-bucket's leaving; None = never."""
    start_ms, end_ms = bounds(window, now_ms)
    if isinstance(window, Rolling):
        return start_ms + window.bucket_ms + window.seconds * 1_000
    return end_ms


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (LookupError, ValueError, OSError):  # OSError: "Europe" is a directory of the database
        raise ValueError(
            f"there is no time zone {name!r}; use an IANA name such as 'Europe/Berlin'"
        ) from None


def _offset_ms(zone: ZoneInfo, at_ms: int) -> int:
    offset = (_EPOCH + at_ms * _MS).astimezone(zone).utcoffset()
    return (offset or timedelta()) // _MS


def _transition_ms(zone: ZoneInfo, before_ms: int, after_ms: int) -> int:
    """The first instant in (before, after] with the offset that `after` has; clocks change on whole seconds."""
    new_offset = _offset_ms(zone, after_ms)
    low, high = before_ms // 1_000, after_ms // 1_000
    while high - low > 1:
        middle = (low + high) // 2
        if _offset_ms(zone, middle * 1_000) == new_offset:
            high = middle
        else:
            low = middle
    return high * 1_000


def _midnight_ms(zone: ZoneInfo, day: date) -> int:
    """When `day` begins.

    Where clocks go back over midnight it comes twice: the first counts. Where they go forward over it there is
    none: the day begins with the change, which need not be at what would have been midnight by either clock.
    """
    local = datetime(day.year, day.month, day.day, tzinfo=zone)
    by_old_clock = local.utcoffset() or timedelta()
    by_new_clock = local.replace(fold=1).utcoffset() or timedelta()
    utc_midnight_ms = (day.toordinal() - _EPOCH_DAY) * _DAY_MS
    first_ms = utc_midnight_ms - by_old_clock // _MS
    if by_old_clock >= by_new_clock:
        return first_ms
    return _transition_ms(zone, utc_midnight_ms - by_new_clock // _MS - 1_000, first_ms)


def _days(zone: ZoneInfo, unit: Unit, now_ms: int) -> tuple[int, int]:
    local_day = (_EPOCH + now_ms * _MS).astimezone(zone).date()
    first = _first_day(unit, local_day)
    start_ms, end_ms = _midnight_ms(zone, first), _midnight_ms(zone, _next_first(unit, first))
    # Where midnight comes twice, the local date of an instant may be that of the day before its window.
    if now_ms >= end_ms:
        first = _next_first(unit, first)
        return end_ms, _midnight_ms(zone, _next_first(unit, first))
    return start_ms, end_ms


def _first_day(unit: Unit, day: date) -> date:
    if unit is Unit.WEEK:
        return day - timedelta(days=day.weekday())
    return day.replace(day=1) if unit is Unit.MONTH else day


def _next_first(unit: Unit, first: date) -> date:
    if unit is Unit.MONTH:
        return (first + timedelta(days=32)).replace(day=1)
    return first + timedelta(days=7 if unit is Unit.WEEK else 1)


def _hour(zone: ZoneInfo, now_ms: int) -> tuple[int, int]:
    """The zone's full hour; cut where clocks change inside it (Lord Howe Island changes by half an hour)."""
    offset_ms = _offset_ms(zone, now_ms)
    start_ms = (now_ms + offset_ms) // _HOUR_MS * _HOUR_MS - offset_ms
    end_ms = start_ms + _HOUR_MS
    if _offset_ms(zone, start_ms) != offset_ms:
        start_ms = _transition_ms(zone, start_ms, now_ms)
    if _offset_ms(zone, end_ms - 1) != offset_ms:
        end_ms = _transition_ms(zone, now_ms, end_ms - 1)
    return start_ms, end_ms
