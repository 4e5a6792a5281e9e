"""Buckets of time: days of a zone that are 23, 24 or 25 hours long, and zones whose days sums by hours cannot answer."""

from __future__ import annotations

import itertools
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.buckets import DAY_MS, HOUR_MS, Run, Width, bucket_at, edges, local_ms, runs


def at(text: str) -> int:
    return round(datetime.fromisoformat(text).timestamp() * 1_000)


def test_a_year_of_berlin_has_a_day_of_23_and_one_of_25_hours() -> None:
    found = list(
        edges(Width.DAY, "Europe/Berlin", at("2026-01-01T00:00+01:00"), at("2027-01-01T00:00+01:00"))
    )
    assert len(found) == 366
    assert runs(found) == [
        Run(at("2025-12-31T23:00Z"), DAY_MS, at("2026-03-28T23:00Z")),
        Run(at("2026-03-28T23:00Z"), 23 * HOUR_MS, at("2026-03-29T22:00Z")),
        Run(at("2026-03-29T22:00Z"), DAY_MS, at("2026-10-24T22:00Z")),
        Run(at("2026-10-24T22:00Z"), 25 * HOUR_MS, at("2026-10-25T23:00Z")),
        Run(at("2026-10-25T23:00Z"), DAY_MS, at("2026-12-31T23:00Z")),
    ]


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "Australia/Adelaide", "America/St_Johns"])
def test_days_that_do_not_begin_with_a_full_hour_are_refused(zone: str) -> None:
    with pytest.raises(ValueError, match=f"days of {zone} do not begin with a full hour of UTC"):
        bucket_at(Width.DAY, zone, at("2026-11-30T12:00Z"))


@pytest.mark.parametrize("zone", ["Europe/Atlantis", "", "../etc/passwd", "Europe", "\0"])
def test_zones_that_do_not_exist_are_refused(zone: str) -> None:
    with pytest.raises(ValueError, match="there is no time zone"):
        bucket_at(Width.DAY, zone, 0)
    with pytest.raises(ValueError, match="there is no time zone"):
        local_ms(datetime.fromisoformat("2026-01-01"), zone)


@given(
    zone=st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Africa/Cairo", "Pacific/Auckland"]),
    width=st.sampled_from(Width),
    from_ms=st.integers(0, at("2100-01-01T00:00Z")),
    days=st.floats(0.01, 40),
)
def test_buckets_follow_one_another_and_cover_what_was_asked(
    zone: str, width: Width, from_ms: int, days: float
) -> None:
    to_ms = from_ms + round(days * DAY_MS)
    found = list(edges(width, zone, from_ms, to_ms))
    assert found[0] <= from_ms < found[1]
    assert found[-2] < to_ms <= found[-1]
    assert all(bucket_at(width, zone, a) == (a, b) for a, b in itertools.pairwise(found))
    assert [run.start_ms for run in runs(found)] + [found[-1]] == [found[0], *(r.end_ms for r in runs(found))]


def test_a_local_midnight_is_that_of_the_zone() -> None:
    november = datetime.fromisoformat("2026-11-01")
    assert local_ms(november, "America/New_York") == at("2026-11-01T04:00Z")
    assert local_ms(november, "UTC") == at("2026-11-01T00:00Z")
