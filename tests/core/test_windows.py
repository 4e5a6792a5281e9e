"""Budget windows: every zone, no gap, no overlap; rolling windows never looser than asked."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo, available_timezones

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.windows import (
    SUB_BUCKETS,
    Calendar,
    Lifetime,
    Rolling,
    Unit,
    Window,
    bounds,
    bucket,
    parse_window,
    resets_at_ms,
)

HOUR_MS = 3_600_000


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()) * 1_000


def said(window: Window, at: str) -> tuple[str, ...]:
    """The bounds as UTC texts."""
    return tuple(
        f"{datetime.fromtimestamp((t or 0) // 1_000, UTC):%Y-%m-%d %H:%M}" for t in bounds(window, ms(at))
    )


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("lifetime", Lifetime()),
        ("hour", Calendar(Unit.HOUR, "Europe/Berlin")),
        ("day", Calendar(Unit.DAY, "Europe/Berlin")),
        ("week", Calendar(Unit.WEEK, "Europe/Berlin")),
        ("month", Calendar(Unit.MONTH, "Europe/Berlin")),
        ("30d", Rolling(30 * 86_400)),
        ("rolling:24h", Rolling(86_400)),
        ("90m", Rolling(5_400)),
        ("2w", Rolling(1_209_600)),
    ],
)
def test_window_texts(text: str, window: Window) -> None:
    assert parse_window(text, "Europe/Berlin") == window


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("daily", "'daily' is not a window: write"),
        ("0d", "'0d' is not a window"),
        ("-1d", "'-1d' is not a window"),
        ("1.5h", "'1.5h' is not a window"),
        ("٣d", "is not a window"),
        ("59s", "a rolling window lasts from 60 to"),
        ("9999d", "a rolling window lasts from 60 to"),
    ],
)
def test_bad_window_texts_say_what_is_possible(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_window(text)


@pytest.mark.parametrize("zone", ["Mars/Olympus", "Europe", "../etc/passwd", ""])
def test_an_unknown_zone_is_refused_when_the_window_is_built(zone: str) -> None:
    with pytest.raises(ValueError, match="there is no time zone"):
        parse_window("day", zone)


def test_days_are_23_or_25_hours_where_clocks_change() -> None:
    berlin = Calendar(Unit.DAY, "Europe/Berlin")
    assert said(berlin, "2026-03-29 12:00") == ("2026-03-28 23:00", "2026-03-29 22:00")
    assert said(berlin, "2026-10-25 12:00") == ("2026-10-24 22:00", "2026-10-25 23:00")


def test_weeks_begin_on_monday_and_months_on_the_first() -> None:
    assert said(Calendar(Unit.WEEK), "2026-11-29 23:59") == ("2026-11-23 00:00", "2026-11-30 00:00")
    assert said(Calendar(Unit.WEEK), "2026-11-30 00:00") == ("2026-11-30 00:00", "2026-12-07 00:00")
    assert said(Calendar(Unit.MONTH, "Asia/Tokyo"), "2026-01-31 15:00") == (
        "2026-01-31 15:00",
        "2026-02-28 15:00",
    )


def test_a_day_without_midnight_begins_with_the_change() -> None:
    # Cairo's clocks go from 24 April 2026 00:00 to 01:00.
    assert said(Calendar(Unit.DAY, "Africa/Cairo"), "2026-04-24 12:00") == (
        "2026-04-23 22:00",
        "2026-04-24 21:00",
    )
    # Toronto's went from 23:30 on 30 March 1919 to 00:30, so there was half an hour less of both days.
    assert said(Calendar(Unit.DAY, "America/Toronto"), "1919-03-31 12:00") == (
        "1919-03-31 04:30",
        "1919-04-01 04:00",
    )


def test_where_midnight_comes_twice_the_day_begins_at_the_first() -> None:
    # St. John's clocks went from 00:01 on 7 November 2010 back to 23:01 on the 6th.
    st_johns = Calendar(Unit.DAY, "America/St_Johns")
    first_midnight = "2010-11-07 02:30"
    assert said(st_johns, "2010-11-07 02:29") == ("2010-11-06 02:30", first_midnight)
    assert said(st_johns, "2010-11-07 02:45") == (
        first_midnight,
        "2010-11-08 03:30",
    )  # it is 23:15 on the 6th again


def test_a_local_hour_is_cut_where_clocks_change_inside_it() -> None:
    # Lord Howe Island goes from 02:00 back to 01:30 on 5 April 2026 (15:00 UTC on the 4th).
    lord_howe = Calendar(Unit.HOUR, "Australia/Lord_Howe")
    assert said(lord_howe, "2026-04-04 14:59") == ("2026-04-04 14:00", "2026-04-04 15:00")
    assert said(lord_howe, "2026-04-04 15:10") == ("2026-04-04 15:00", "2026-04-04 15:30")
    assert said(lord_howe, "2026-04-04 15:30") == ("2026-04-04 15:30", "2026-04-04 16:30")
    st_johns = Calendar(Unit.HOUR, "America/St_Johns")
    assert said(st_johns, "2010-11-07 02:30") == ("2010-11-07 02:30", "2010-11-07 02:31")
    assert said(st_johns, "2010-11-07 02:31") == ("2010-11-07 02:31", "2010-11-07 03:30")
    assert said(Calendar(Unit.HOUR, "Asia/Kolkata"), "2026-04-04 15:10") == (
        "2026-04-04 14:30",
        "2026-04-04 15:30",
    )


#: (when, seconds east of Greenwich from then on), for all of 2020 to 2040
Clock = tuple[tuple[int, int], ...]
FIRST_S, LAST_S, WEEK_S = (int(datetime(y, 1, 1, tzinfo=UTC).timestamp()) for y in (2020, 2041, 1970))
WEEK_S += 7 * 86_400


def _offset_s(zone: ZoneInfo, at_s: int) -> int:
    return int((datetime.fromtimestamp(at_s, zone).utcoffset() or timedelta()).total_seconds())


def _clock(zone: ZoneInfo) -> Clock:
    """Found by looking every week, and then by halves."""
    found = [(FIRST_S, _offset_s(zone, FIRST_S))]
    for week_s in range(FIRST_S + WEEK_S, LAST_S, WEEK_S):
        offset_s = _offset_s(zone, week_s)
        if offset_s != found[-1][1]:
            low, high = week_s - WEEK_S, week_s
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if _offset_s(zone, middle) == offset_s else (middle, high)
            found.append((high, offset_s))
    return tuple(found)


def _different_clocks() -> dict[Clock, str]:
    """A zone for each: most zones go like another one in these years."""
    return {_clock(ZoneInfo(name)): name for name in sorted(available_timezones())}


def _days_to_try(clock: Clock) -> list[date]:
    """The first of each month of 2020 to 2040, and the days around every change."""
    days = {date(year, month, 1) for year in range(2020, 2041) for month in range(1, 13)}
    for at_s, offset_s in clock[1:]:
        changed = datetime.fromtimestamp(at_s + offset_s, UTC).date()
        days |= {changed + timedelta(days=n) for n in (-2, -1, 0, 1)}
    return sorted(days)


def local_date(zone: ZoneInfo, at_ms: int) -> date:
    return datetime.fromtimestamp(at_ms // 1_000, zone).date()


def test_every_zone_has_neither_gap_nor_overlap_from_2020_to_2040() -> None:
    problems: list[tuple[str, Unit, date]] = []
    clocks = _different_clocks()
    for clock, name in clocks.items():
        zone = ZoneInfo(name)
        windows = {unit: Calendar(unit, name) for unit in (Unit.DAY, Unit.WEEK, Unit.MONTH)}
        for day in _days_to_try(clock):
            noon = int(datetime(day.year, day.month, day.day, 12, tzinfo=zone).timestamp()) * 1_000
            for unit in (Unit.MONTH,) if day.day == 1 else (Unit.DAY, Unit.WEEK):
                start, end = bounds(windows[unit], noon)
                assert end is not None
                inside = start <= noon < end
                joined = (
                    bounds(windows[unit], end - 1) == (start, end) and bounds(windows[unit], end)[0] == end
                )
                # It begins with the first instant that has its date, wherever clocks stand then.
                first = day - timedelta(days=day.weekday()) if unit is Unit.WEEK else day
                begins = local_date(zone, start) == first > local_date(zone, start - 1)
                # Antarctic stations change by up to three hours.
                plausible = unit is not Unit.DAY or 21 * HOUR_MS <= end - start <= 27 * HOUR_MS
                if not (inside and joined and begins and plausible):
                    problems.append((name, unit, day))
    assert problems == []
    assert len(clocks) > 70


def test_where_clocks_change_one_window_ends_where_the_next_begins() -> None:
    """Every week and month of these years, and every day of the first four."""
    changing = [name for clock, name in _different_clocks().items() if len(clock) > 1]
    lasts = {
        Unit.DAY: (21, 27, FIRST_S + 4 * 366 * 86_400),
        Unit.WEEK: (165, 171, LAST_S),
        Unit.MONTH: (28 * 24 - 3, 31 * 24 + 3, LAST_S),
    }
    for name in changing:
        for unit, (least_h, most_h, until_s) in lasts.items():
            window = Calendar(unit, name)
            _, end = bounds(window, FIRST_S * 1_000)
            while end is not None and end < until_s * 1_000:
                before = end
                start, end = bounds(window, before)
                assert end is not None
                assert start == before, f"{name}: after {before} a {unit} begins at {start}"
                assert least_h * HOUR_MS <= end - start <= most_h * HOUR_MS, f"{name}: {start} to {end}"
    assert len(changing) > 40


@given(st.integers(0, 2**41), st.sampled_from(list(Unit)), st.sampled_from(sorted(available_timezones())))
def test_an_instant_is_in_its_window_and_the_next_begins_at_its_end(now: int, unit: Unit, zone: str) -> None:
    window = Calendar(unit, zone)
    start, end = bounds(window, now)
    assert end is not None
    assert start <= now < end
    assert bounds(window, end)[0] == end
    assert bounds(window, end - 1) == (start, end)
    assert bucket(window, now) == (start, end)
    assert resets_at_ms(window, now) == end


@given(st.integers(60, 10**8), st.integers(0, 10**13))
def test_a_rolling_window_counts_all_it_must_and_at_most_a_sixtieth_more(seconds: int, now: int) -> None:
    window = Rolling(seconds)
    start, end = bounds(window, now)
    assert end is not None
    assert start <= now - seconds * 1_000 < start + window.bucket_ms
    posted_to = bucket(window, now)
    assert posted_to[0] <= now < end == posted_to[1]
    assert (end - start) // window.bucket_ms <= SUB_BUCKETS + 1
    leaves = resets_at_ms(window, now)
    assert leaves is not None
    assert bounds(window, leaves - 1)[0] == start
    assert bounds(window, leaves)[0] == start + window.bucket_ms


def test_a_lifetime_never_ends() -> None:
    assert bounds(Lifetime(), ms("2026-11-30 12:00")) == bucket(Lifetime(), 5) == (0, None)
    assert resets_at_ms(Lifetime(), 5) is None
