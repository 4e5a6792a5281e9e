"""Which deployments are fit to be called: a circuit breaker per deployment and per credential.

Pure transitions over a frozen state; the pipeline keeps a mapping of states and applies what `observe` returns.
`now_s` is a monotonic clock. Numbers from Envoy's outlier detection defaults (5 in a row, 30 s x count).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from gateway.core.catalog import Deployment
from gateway.core.errors import UpstreamAuthFailed, UpstreamError, UpstreamOverloaded, UpstreamRefused

FAILURES_IN_A_ROW = 5
WINDOW_S = 30
WINDOW_MIN_CALLS = 20
EJECTION_S = 30.0
AUTH_EJECTION_S = 60.0
MAX_EJECTION_S = 300.0
#: Pause after a 429 that does not say how long.
DEFAULT_COOLING_S = 5.0
#: After an ejection a deployment gets its share of the traffic back over this time.
SLOW_START_S = 60.0
SLOW_START_SHARE = 0.1
#: A probe whose result never came (its client left) gives the place free after this time.
PROBE_LEASE_S = 60.0

_SLOT_S = 5  # the window is counted in slots, so its size does not grow with traffic


class Result(StrEnum):
    """What one attempt says about the health of its deployment."""

    OK = "ok"  # answered, a 4xx about the request itself included
    FAILURE = "failure"  # 5xx, timeout, connection lost or refused, unreadable answer
    RATE_LIMITED = "rate_limited"  # 429: alive, but wants a pause
    AUTH = "auth"  # 401, 402, 403: our credential is refused; a person must look


def result_of(error: UpstreamError | None) -> Result:
    """None = a good answer. An overload that is not a 429 (503, 529) is a failure."""
    match error:
        case None | UpstreamRefused():
            return Result.OK
        case UpstreamAuthFailed():
            return Result.AUTH
        case UpstreamOverloaded() if error.upstream_status in (None, 429):
            return Result.RATE_LIMITED
        case _:
            return Result.FAILURE


class Status(StrEnum):
    DRAINED = "drained"  # taken out by a person
    CLOSED = "closed"  # in use
    OPEN = "open"  # ejected
    COOLING = "cooling"  # pausing after a 429
    HALF_OPEN = "half_open"  # the ejection is over: one call may try
    PROBING = "probing"  # that call is on its way


@dataclass(frozen=True, slots=True)
class HealthState:
    """Of one deployment or credential. `HealthState()` is healthy; `cause` says why it was last ejected."""

    failures_in_a_row: int = 0
    #: (slot number, good, failed) of the last 30 s, oldest first
    window: tuple[tuple[int, int, int], ...] = ()
    open_until_s: float | None = None  # None = closed
    ejections: int = 0  # since it was last healthy for five minutes
    closed_at_s: float = 0.0  # when the last ejection ended
    cause: str = ""  # "" | "failures" | "auth"
    cooling_until_s: float = 0.0
    probe_until_s: float = 0.0
    drained: bool = False

    def status(self, now_s: float) -> Status:
        if self.drained:
            return Status.DRAINED
        if self.open_until_s is not None:
            if now_s < self.open_until_s:
                return Status.OPEN
            return Status.PROBING if now_s < self.probe_until_s else Status.HALF_OPEN
        return Status.COOLING if now_s < self.cooling_until_s else Status.CLOSED

    def available(self, now_s: float) -> bool:
        return self.status(now_s) in (Status.CLOSED, Status.HALF_OPEN)

    def share(self, now_s: float) -> float:
        """Of its weight: what has just come back is not flooded at once."""
        since_s = now_s - self.closed_at_s
        if not self.ejections or self.open_until_s is not None or since_s >= SLOW_START_S:
            return 1.0
        return SLOW_START_SHARE + (1.0 - SLOW_START_SHARE) * max(0.0, since_s) / SLOW_START_S


def pause(state: HealthState, now_s: float, pause_s: float) -> HealthState:
    """Leave it alone for a while without any blame."""
    until_s = now_s + min(pause_s, MAX_EJECTION_S)
    return replace(state, cooling_until_s=max(state.cooling_until_s, until_s))


def drain(state: HealthState, drained: bool) -> HealthState:
    """Take it out of the traffic, or put it back."""
    return replace(state, drained=drained)


def record(
    state: HealthState, result: Result, now_s: float, retry_after_s: float | None = None
) -> HealthState:
    """The state after one attempt's result."""
    match result:
        case Result.OK:
            return _after_success(state, now_s)
        case Result.RATE_LIMITED:
            pause_s = DEFAULT_COOLING_S if retry_after_s is None else min(retry_after_s, MAX_EJECTION_S)
            # a 429 proves that the deployment answers, so it closes an open breaker as a success would
            cooled = _after_success(state, now_s)
            return replace(cooled, cooling_until_s=max(cooled.cooling_until_s, now_s + pause_s))
        case Result.AUTH:
            return _eject(state, now_s, "auth", AUTH_EJECTION_S)
        case Result.FAILURE:
            return _after_failure(state, now_s)


def begin(state: HealthState, now_s: float) -> HealthState:
    """Call before an attempt: takes the probe's place if the state is half-open, else changes nothing."""
    if state.status(now_s) is Status.HALF_OPEN:
        return replace(state, probe_until_s=now_s + PROBE_LEASE_S)
    return state


class Shared(NamedTuple):
    """What replicas tell one another of a subject, on the wall clock; 0 = not."""

    open_until_ms: int
    cause: str
    ejections: int
    closed_at_ms: int
    cooling_until_ms: int
    drained: bool


def told(state: HealthState, now_s: float, now_ms: int) -> Shared:
    """`state` as others read it; `now_s` and `now_ms` are the same moment on both clocks."""

    def wall(at_s: float | None) -> int:
        # to a tenth of a second: two clocks of one process do not advance in step
        return 0 if not at_s else round((now_ms + (at_s - now_s) * 1_000) / 100) * 100

    return Shared(
        wall(state.open_until_s),
        state.cause,
        state.ejections,
        wall(state.closed_at_s) if state.ejections else 0,
        wall(state.cooling_until_s) if state.cooling_until_s > now_s else 0,
        state.drained,
    )


def adopted(own: HealthState, shared: Shared, now_s: float, now_ms: int) -> HealthState:
    """The state after another replica's word; what this one has counted itself stays."""

    def here(at_ms: int) -> float:
        return now_s + (at_ms - now_ms) / 1_000

    return replace(
        own,
        open_until_s=here(shared.open_until_ms) if shared.open_until_ms else None,
        cause=shared.cause,
        ejections=shared.ejections,
        closed_at_s=here(shared.closed_at_ms) if shared.closed_at_ms else own.closed_at_s,
        cooling_until_s=max(own.cooling_until_s, here(shared.cooling_until_ms))
        if shared.cooling_until_ms
        else 0.0,
        drained=shared.drained,
    )


def credential_subject(deployment: Deployment) -> str | None:
    """The name under which the health of a deployment's credential is kept; None if it needs none."""
    credential = deployment.provider.credential
    return f"credential:{credential}" if credential else None


def subjects(deployment: Deployment) -> tuple[str, ...]:
    """All names whose state decides about a deployment: its own, then its credential's."""
    credential = credential_subject(deployment)
    return (deployment.name,) if credential is None else (deployment.name, credential)


def fit(health: Mapping[str, HealthState], deployment: Deployment, now_s: float) -> bool:
    """True if neither the deployment nor its credential is ejected, cooling or being probed."""
    return all((state := health.get(name)) is None or state.available(now_s) for name in subjects(deployment))


def begin_call(
    health: Mapping[str, HealthState], deployment: Deployment, now_s: float
) -> dict[str, HealthState]:
    """Changes to make to `health` before calling a deployment: takes the probe's place where one is due."""
    if not health:
        return {}
    return {
        name: begun
        for name in subjects(deployment)
        if (state := health.get(name)) is not None and (begun := begin(state, now_s)) is not state
    }


def observe(
    health: Mapping[str, HealthState],
    deployment: Deployment,
    result: Result,
    now_s: float,
    retry_after_s: float | None = None,
) -> dict[str, HealthState]:
    """Changes to make to `health` after an attempt.

    A refused credential ejects every deployment that uses it; all else is about the deployment alone, except
    that any other answer from the provider shows that the credential works.
    """
    if result is Result.OK and health.keys().isdisjoint(subjects(deployment)):
        return {}
    own, credential = deployment.name, credential_subject(deployment)
    if result is Result.AUTH:
        name = credential or own
        return {name: record(health.get(name, HealthState()), result, now_s)}
    changes = {own: record(health.get(own, HealthState()), result, now_s, retry_after_s)}
    if credential in health and credential is not None and result in (Result.OK, Result.RATE_LIMITED):
        changes[credential] = record(health[credential], Result.OK, now_s)
    return changes


def _after_success(state: HealthState, now_s: float) -> HealthState:
    if state.open_until_s is not None:
        # the count of ejections stays: a relapse soon after is ejected for longer
        return HealthState(
            ejections=state.ejections,
            closed_at_s=now_s,
            cooling_until_s=state.cooling_until_s,
            drained=state.drained,
        )
    if not state.failures_in_a_row and not any(slot[2] for slot in state.window):
        # Good calls are counted only beside failed ones: what has no failure needs no share of failures.
        return state
    return replace(state, failures_in_a_row=0, window=_count(state.window, now_s, good=1, failed=0))


def _after_failure(state: HealthState, now_s: float) -> HealthState:
    if state.open_until_s is not None:
        return _eject(state, now_s, state.cause, AUTH_EJECTION_S if state.cause == "auth" else EJECTION_S)
    failing = replace(
        state,
        failures_in_a_row=state.failures_in_a_row + 1,
        window=_count(state.window, now_s, good=0, failed=1),
    )
    good = sum(slot[1] for slot in failing.window)
    failed = sum(slot[2] for slot in failing.window)
    mostly_failing = good + failed >= WINDOW_MIN_CALLS and failed > good
    if failing.failures_in_a_row >= FAILURES_IN_A_ROW or mostly_failing:
        return _eject(failing, now_s, "failures", EJECTION_S)
    return failing


def _eject(state: HealthState, now_s: float, cause: str, unit_s: float) -> HealthState:
    if state.open_until_s is not None and now_s < state.open_until_s and state.cause == cause:
        return state  # a call that was sent before the ejection tells nothing new
    recovered = state.open_until_s is None and now_s - state.closed_at_s > MAX_EJECTION_S
    ejections = 1 if recovered else state.ejections + 1
    return HealthState(
        open_until_s=now_s + min(unit_s * ejections, MAX_EJECTION_S),
        ejections=ejections,
        cause=cause,
        cooling_until_s=state.cooling_until_s,
        drained=state.drained,
    )


def _count(
    window: tuple[tuple[int, int, int], ...], now_s: float, *, good: int, failed: int
) -> tuple[tuple[int, int, int], ...]:
    slot = int(now_s // _SLOT_S)
    kept = tuple(w for w in window if w[0] > slot - WINDOW_S // _SLOT_S)
    if kept and kept[-1][0] == slot:
        last = kept[-1]
        return (*kept[:-1], (slot, last[1] + good, last[2] + failed))
    return (*kept, (slot, good, failed))
