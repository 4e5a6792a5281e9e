"""Where the time of one request went. The only telemetry that the pipeline touches.

A mark costs one clock reading and one append; everything else is worked out when somebody asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

#: The stages of a request, in the order they flow (architecture: One request).
STAGES = ("read", "identify", "shape", "route", "admit", "call", "meter", "settle")


class Span(NamedTuple):
    """One stage: `start_s` on the clock that the Steps were built with, `duration_s` in seconds."""

    name: str
    start_s: float
    duration_s: float


class Steps:
    """A request's clock: starts when built, and `mark(name)` says that stage `name` has just ended.

    A stage that runs twice (a retried call) is marked twice and shows up twice.
    """

    __slots__ = ("_clock", "_keep", "_marks", "_paused_at_s", "_paused_s", "started_s")

    def __init__(self, monotonic: Callable[[], float], *, keep: bool = True) -> None:
        """Not to `keep` them, marks are forgotten at once: nobody will ask for `spans`."""
        self._clock = monotonic
        self._keep = keep
        self._marks: list[tuple[str, float]] = []
        self._paused_s = 0.0
        self._paused_at_s = -1.0
        self.started_s = monotonic()

    def mark(self, name: str) -> None:
        """Stage `name` ends now; it began at the mark before, or at the start."""
        if self._keep:
            self._marks.append((name, self._clock()))

    def pause(self) -> None:
        """From now on the gateway waits for somebody else: the upstream, or the client's body."""
        if self._paused_at_s < 0:
            self._paused_at_s = self._clock()

    def resume(self) -> None:
        """The wait is over; without a `pause` before it this does nothing."""
        if self._paused_at_s >= 0:
            self._paused_s += self._clock() - self._paused_at_s
            self._paused_at_s = -1.0

    def spans(self) -> tuple[Span, ...]:
        """All marked stages in order; together they cover the time from the start to the last mark."""
        out = []
        start_s = self.started_s
        for name, end_s in self._marks:
            out.append(Span(name, start_s, end_s - start_s))
            start_s = end_s
        return tuple(out)

    def elapsed_s(self) -> float:
        """Seconds since the start, waits included."""
        return self._clock() - self.started_s

    def gateway_s(self) -> float:
        """Seconds since the start that the gateway itself took: without finished and running waits."""
        now_s = self._clock()
        waiting_s = now_s - self._paused_at_s if self._paused_at_s >= 0 else 0.0
        return max(0.0, now_s - self.started_s - self._paused_s - waiting_s)

    def gateway_ms(self) -> str:
        """The same in milliseconds, to three decimals: the header `x-gateway-overhead-ms`."""
        return f"{self.gateway_s() * 1e3:.3f}"
