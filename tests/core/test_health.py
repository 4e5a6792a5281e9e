"""Circuit breakers: when a deployment or a credential is left alone, and when it is tried again."""

from __future__ import annotations

import pytest

from gateway.core.catalog import Deployment, Provider, Wire
from gateway.core.errors import (
    UpstreamAuthFailed,
    UpstreamError,
    UpstreamLost,
    UpstreamOverloaded,
    UpstreamRefused,
    UpstreamTimeout,
)
from gateway.core.health import (
    HealthState,
    Result,
    Status,
    begin,
    begin_call,
    drain,
    fit,
    observe,
    pause,
    record,
    result_of,
)

OK, FAILURE, LIMITED, AUTH = Result.OK, Result.FAILURE, Result.RATE_LIMITED, Result.AUTH
FRESH = HealthState()


def after(*results: Result, state: HealthState = FRESH, at: float = 0.0) -> HealthState:
    for result in results:
        state = record(state, result, at)
    return state


def test_five_failures_in_a_row_open_it_and_a_success_between_does_not() -> None:
    assert after(*[FAILURE] * 4).status(0) is Status.CLOSED
    assert after(*[FAILURE] * 4, OK, *[FAILURE] * 4).status(0) is Status.CLOSED
    opened = after(*[FAILURE] * 5)
    assert (opened.status(0), opened.status(29.9), opened.status(30)) == (
        Status.OPEN,
        Status.OPEN,
        Status.HALF_OPEN,
    )
    assert (opened.cause, opened.available(29.9), opened.available(30)) == ("failures", False, True)


def test_more_than_half_of_twenty_in_thirty_seconds_open_it() -> None:
    mixed = [FAILURE, OK] * 9
    assert after(*mixed, FAILURE).status(0) is Status.CLOSED  # 10 of 19
    assert after(*mixed, OK, FAILURE).status(0) is Status.CLOSED  # 10 of 20: just half
    assert after(*mixed, OK, FAILURE, FAILURE).status(0) is Status.OPEN  # 11 of 21
    # the old ones no longer count
    assert after(FAILURE, FAILURE, state=after(*mixed, OK), at=31).status(31) is Status.CLOSED


def test_the_window_does_not_grow_with_traffic() -> None:
    state = HealthState()
    for n in range(10_000):
        state = record(state, OK, n / 100)
    assert len(state.window) <= 7


def test_one_probe_closes_it_or_ejects_it_for_longer() -> None:
    opened = after(*[FAILURE] * 5)
    probing = begin(opened, 30)
    assert probing.status(30) is Status.PROBING
    assert not probing.available(30)  # nobody else meanwhile
    assert probing.status(90) is Status.HALF_OPEN  # the probe was lost: another may try

    assert record(probing, OK, 31).status(31) is Status.CLOSED
    again = record(probing, FAILURE, 31)
    assert (again.status(31 + 59.9), again.status(31 + 60)) == (Status.OPEN, Status.HALF_OPEN)


def test_ejections_grow_to_five_minutes_and_are_forgiven_after_five_good_ones() -> None:
    state, at, lengths = HealthState(), 0.0, []
    for _ in range(12):
        state = after(*[FAILURE] * 5, state=state, at=at)
        assert state.open_until_s is not None
        lengths.append(state.open_until_s - at)
        at = state.open_until_s
        state = record(state, OK, at)
    assert lengths == [30, 60, 90, 120, 150, 180, 210, 240, 270, 300, 300, 300]
    forgiven = after(*[FAILURE] * 5, state=state, at=at + 301)
    assert forgiven.open_until_s == at + 301 + 30


def test_results_of_calls_sent_before_the_ejection_do_not_lengthen_it() -> None:
    opened = after(*[FAILURE] * 5)
    assert after(FAILURE, FAILURE, state=opened, at=5) == opened
    assert record(opened, OK, 5).status(5) is Status.CLOSED  # but a success is proof


def test_a_429_is_a_pause_and_no_failure() -> None:
    cooling = record(after(*[FAILURE] * 4), LIMITED, 0, retry_after_s=12)
    assert (cooling.status(11.9), cooling.status(12)) == (Status.COOLING, Status.CLOSED)
    assert cooling.failures_in_a_row == 0
    assert record(HealthState(), LIMITED, 0).cooling_until_s == 5
    assert record(HealthState(), LIMITED, 0, retry_after_s=86_400).cooling_until_s == 300
    # a later, shorter pause does not cut the first one short
    assert record(cooling, LIMITED, 1, retry_after_s=1).cooling_until_s == 12


@pytest.mark.parametrize(
    ("error", "result"),
    [
        (None, OK),
        (UpstreamRefused("no such field", upstream_status=400), OK),
        (UpstreamAuthFailed(upstream_status=402), AUTH),
        (UpstreamOverloaded(upstream_status=429), LIMITED),
        (UpstreamOverloaded(upstream_status=529), FAILURE),
        (UpstreamTimeout(), FAILURE),
        (UpstreamLost(), FAILURE),
    ],
)
def test_what_an_error_says_about_health(error: UpstreamError | None, result: Result) -> None:
    assert result_of(error) is result


def deployment(name: str, credential: str = "main") -> Deployment:
    provider = Provider("acme", Wire.OPENAI, "http://127.0.0.1:1/v1", credential)
    return Deployment(name, provider, "m", "m", "acme/m")


def test_a_refused_credential_ejects_all_that_use_it_and_nothing_else() -> None:
    one, two, other = deployment("one"), deployment("two"), deployment("other", "spare")
    health = observe({}, one, AUTH, 0)
    assert {name: state.cause for name, state in health.items()} == {"credential:main": "auth"}
    assert [fit(health, d, 59.9) for d in (one, two, other)] == [False, False, True]
    assert fit(health, two, 60)

    health |= begin_call(health, two, 60)
    assert not fit(health, one, 60)  # one probe for all of them
    health |= observe(health, two, OK, 61)
    assert [fit(health, d, 61) for d in (one, two)] == [True, True]


def test_without_a_credential_the_deployment_itself_is_ejected() -> None:
    bare = deployment("bare", "")
    assert observe({}, bare, AUTH, 0).keys() == {"bare"}


def test_failures_are_the_deployments_own() -> None:
    health: dict[str, HealthState] = {}
    for _ in range(5):
        health |= observe(health, deployment("one"), FAILURE, 0)
    assert not fit(health, deployment("one"), 0)
    assert fit(health, deployment("two"), 0)
    assert begin_call(health, deployment("two"), 0) == {}


def test_what_comes_back_gets_its_share_of_the_traffic_step_by_step() -> None:
    back = record(after(*[FAILURE] * 5), OK, 40.0)
    assert [round(back.share(at), 2) for at in (40.0, 70.0, 99.0, 100.0)] == [0.1, 0.55, 0.98, 1.0]
    assert FRESH.share(0.0) == 1.0


def test_a_pause_without_blame_and_a_drain_that_outlasts_everything() -> None:
    paused = pause(FRESH, 10.0, 90.0)
    assert (paused.status(99.0), paused.status(100.0), paused.failures_in_a_row) == (
        Status.COOLING,
        Status.CLOSED,
        0,
    )
    drained = after(*[FAILURE] * 5, state=drain(FRESH, drained=True))
    assert drained.status(0.0) is Status.DRAINED
    assert record(drained, OK, 40.0).status(40.0) is Status.DRAINED
    assert drain(record(drained, OK, 40.0), drained=False).status(40.0) is Status.CLOSED
