"""Which breakers watch a task, at which numbers, and what each may do.

The defaults observe and alert; nothing is stopped unless somebody opted in (`BreakerPolicy.stopping`, or the mode of
one breaker). Sources of the numbers: OpenHands stops at 4 identical action-observation pairs, 3 errors, 3 monologues
and 6 alternations; OpenRouter observes at 2, blocks at 3 and stops at 6 (both documented, 2026-11).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum

import msgspec

#: Turns of a task that are remembered: what a policy may ask about.
TURNS_KEPT = 20
REQUESTS_KEPT = 50


class Breaker(StrEnum):
    """What is watched."""

    STEPS = "steps"
    WALL_CLOCK = "wall_clock"
    LOOP = "loop"  # one call again and again, with the same result
    PING_PONG = "ping_pong"  # two turns in turn
    MONOLOGUE = "monologue"  # the same words again and again, without a call
    TOOL_ERRORS = "tool_errors"
    UPSTREAM_ERRORS = "upstream_errors"
    SPEND_SLOPE = "spend_slope"
    CONCURRENCY = "concurrency"
    CHILDREN = "children"
    DEPTH = "depth"
    RETRIES = "retries"  # of a key, not of a task


class Mode(StrEnum):
    """What a breaker may do, each more than the one before."""

    OFF = "off"
    OBSERVE = "observe"  # record the evidence
    ALERT = "alert"  # and tell somebody
    STOP = "stop"  # and refuse the request


def _need(good: bool, message: str) -> None:
    if not good:
        raise ValueError(message)


@dataclass(frozen=True, slots=True)
class StepCap:
    """Requests of a task, over its whole life."""

    mode: Mode = Mode.OFF
    most: int = 2_000

    def __post_init__(self) -> None:
        _need(self.most >= 1, "a cap on steps must be at least 1")


@dataclass(frozen=True, slots=True)
class WallClock:
    """No new attempt when a task is older than this."""

    mode: Mode = Mode.OFF
    most_s: int = 86_400

    def __post_init__(self) -> None:
        _need(self.most_s >= 1, "a cap on the wall clock must be at least 1 second")


@dataclass(frozen=True, slots=True)
class Repeats:
    """How many turns in a row, the first one included, are worth a warning (None = no warning) and trip."""

    mode: Mode = Mode.ALERT
    stop: int = 6
    warn: int | None = None

    def __post_init__(self) -> None:
        _need(2 <= self.stop <= TURNS_KEPT, f"repeats trip at 2 to {TURNS_KEPT}, not at {self.stop}")
        _need(
            self.warn is None or 2 <= self.warn <= self.stop,
            f"a warning must come at 2 to {self.stop} repeats, not at {self.warn}",
        )


@dataclass(frozen=True, slots=True)
class Polling:
    """What is no repetition although it looks like one: waiting.

    A turn that calls one of `tools`, or that comes `gap_s` or more after the one it repeats.
    """

    tools: frozenset[str] = frozenset(
        {
            # tools of clients that wait for something started before, or look after it (captured 2026-11)
            *("write_stdin", "wait_agent"),  # Codex
            *("read_bash", "list_bash", "read_agent", "list_agents"),  # Copilot CLI
            *("BashOutput", "TaskOutput", "ListAgents", "Monitor", "ScheduleWakeup"),  # Claude Code
            *("team_status", "team_await_runs", "team_list_runs", "team_read_mailbox"),  # Cline
            *("sleep", "wait", "wait_for", "poll", "check_status", "get_status"),
        }
    )
    gap_s: float = 30.0

    def __post_init__(self) -> None:
        _need(self.gap_s > 0, "the gap of polling must be more than 0 seconds")


@dataclass(frozen=True, slots=True)
class Errors:
    """Trips at `in_row` failures in a row, or when more than `percent` of the last `window` failed.

    After `probe_after_s` one request is let through (upstream errors only); its success closes the breaker.
    """

    mode: Mode = Mode.ALERT
    in_row: int = 10
    percent: int = 50
    window: int = 20
    probe_after_s: int = 30

    def __post_init__(self) -> None:
        _need(1 <= self.in_row <= TURNS_KEPT, f"errors in a row must be 1 to {TURNS_KEPT}")
        _need(1 <= self.window <= TURNS_KEPT, f"a window of errors must be 1 to {TURNS_KEPT}")
        _need(0 < self.percent <= 100, "a share of errors must be 1 to 100 percent")
        _need(self.probe_after_s >= 1, "a probe must wait at least 1 second")


@dataclass(frozen=True, slots=True)
class SpendSlope:
    """Money per minute, as the average over the last `over_min` minutes.

    Trips above `limit_nano_usd_per_min` (None = no limit), or above `times_own` times the average of the task's
    earlier minutes in which it spent, once there are `history_min` of them; not below `least_nano_usd_per_min`.
    """

    mode: Mode = Mode.ALERT
    limit_nano_usd_per_min: int | None = None
    times_own: int | None = 10
    history_min: int = 10
    over_min: int = 5
    least_nano_usd_per_min: int = 100_000_000

    def __post_init__(self) -> None:
        limit = self.limit_nano_usd_per_min
        _need(limit is None or limit > 0, "a limit per minute must be more than 0")
        _need(self.times_own is None or self.times_own >= 2, "times_own must be at least 2")
        _need(self.history_min >= 1, "history_min must be at least 1")
        _need(1 <= self.over_min <= 60, "over_min must be 1 to 60 minutes")
        _need(self.least_nano_usd_per_min >= 0, "least_nano_usd_per_min must not be negative")


@dataclass(frozen=True, slots=True)
class FanOut:
    """What a task may have at once and below it. The depth of a task without a parent is 0."""

    mode: Mode = Mode.ALERT
    concurrent: int = 8
    children: int = 20
    depth: int = 3

    def __post_init__(self) -> None:
        _need(self.concurrent >= 1, "concurrent must be at least 1")
        _need(0 <= self.children <= 1_000, "children must be 0 to 1000")
        _need(self.depth >= 0, "depth must not be negative")


@dataclass(frozen=True, slots=True)
class Amplification:
    """Trips when more than `percent` of a key's last 50 requests are retries."""

    mode: Mode = Mode.ALERT
    percent: int = 20

    def __post_init__(self) -> None:
        _need(0 < self.percent <= 100, "a share of retries must be 1 to 100 percent")


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """The breakers of one task and its key. ValueError, here and in the parts, for numbers that mean nothing."""

    steps: StepCap = field(default_factory=StepCap)
    wall_clock: WallClock = field(default_factory=WallClock)
    loop: Repeats = Repeats(stop=6, warn=3)
    ping_pong: Repeats = Repeats(stop=6)
    monologue: Repeats = Repeats(stop=3)
    polling: Polling = field(default_factory=Polling)
    tool_errors: Errors = field(default_factory=Errors)
    upstream_errors: Errors = field(default_factory=Errors)
    spend_slope: SpendSlope = field(default_factory=SpendSlope)
    fan_out: FanOut = field(default_factory=FanOut)
    retries: Amplification = field(default_factory=Amplification)

    def changed(self, overrides: Mapping[str, object]) -> BreakerPolicy:
        """The same with some breakers changed, as configuration and declared tasks write them.

        By name either a mode or some of the numbers: {"loop": "stop", "steps": {"mode": "stop", "most": 500}}.
        ValueError that names what is unknown or means nothing.
        """
        parts: dict[str, object] = {}
        for name, given in overrides.items():
            if name not in {f.name for f in fields(self)}:
                raise ValueError(f"there is no breaker {name!r}; there are {_listed(self)}")
            part = getattr(self, name)
            numbers = {"mode": given} if isinstance(given, str) else given
            if not isinstance(numbers, Mapping):
                raise ValueError(f"{name} must be a mode or a table, not {given!r}")
            unknown = sorted(map(str, set(numbers) - {f.name for f in fields(part)}))
            if unknown:
                raise ValueError(f"{name} has no {', '.join(unknown)}; it has {_listed(part)}")
            try:
                parts[name] = msgspec.convert({**_plain(part), **numbers}, type(part))
            except msgspec.ValidationError as e:
                raise ValueError(f"{name}: {e}") from None
        return replace(self, **parts)  # type: ignore[arg-type]

    def stopping(self) -> BreakerPolicy:
        """The same numbers, with every breaker that is on allowed to stop."""
        on = (n for n, part in _plain(self).items() if getattr(part, "mode", Mode.OFF) is not Mode.OFF)
        return self.changed(dict.fromkeys(on, Mode.STOP))


def _listed(part: object) -> str:
    return ", ".join(f.name for f in fields(part))  # type: ignore[arg-type]


def _plain(part: object) -> dict[str, object]:
    return {f.name: getattr(part, f.name) for f in fields(part)}  # type: ignore[arg-type]


class Verdict(msgspec.Struct, frozen=True):
    """What a breaker has to say about a request."""

    breaker: Breaker
    action: Mode  # observe | alert | stop
    tripped: bool  # False: a warning on the way there
    fresh: bool  # nothing was said about this episode before
    episode: str  # the same as long as it goes on: for telling somebody once
    evidence: Mapping[str, str | int]
    message: str  # for the caller: one line, says what was seen
    retry_after_s: int | None = None  # None: waiting does not help
