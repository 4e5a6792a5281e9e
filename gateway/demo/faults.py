"""Faults that the demo provider plays on request, deterministic by script or by seed and request number.

What was charged under a fault goes to the bill truthfully. Each kind says what that is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any


class FaultKind(StrEnum):
    OK = "ok"
    REFUSE = "refuse"  # `status` (default 429) with the dialect's error body; charged 0
    HTML_502 = "html_502"  # a proxy's page instead of JSON; charged 0
    EMPTY_200 = "empty_200"  # charged only if `billed`
    ERROR_IN_200 = "error_in_200"  # an error object as the body or the first event; charged 0
    CLOSE = "close_before_headers"  # reset without an answer; charged in full if `billed`
    STALL_HEADERS = "stall_before_headers"  # silent until the client leaves; charged in full if `billed`
    # The rest produce tokens, and those are charged.
    TRUNCATED_JSON = (
        "truncated_json"  # clean end in the middle of a plain body (a stream: in the middle of an event)
    )
    STALL = "stall"  # silent after `after_events` tokens until the client leaves
    CUT = "cut"  # reset after `after_events` tokens
    ERROR_EVENT = "error_event"  # a stream's error event after `after_events` tokens, then a clean end
    USAGE_MISSING = "usage_missing"
    USAGE_TWICE = "usage_twice"  # the event that carries the final usage is sent twice
    USAGE_NEGATIVE = "usage_negative"
    USAGE_HUGE = "usage_huge"
    SLOW = "slow"  # events arrive in pieces of a few bytes, `delay_s` apart
    WRONG_TYPE = "wrong_content_type"
    COMMENTS = "comments"  # ": keep-alive" lines between events
    CRLF = "crlf"  # events end in CR LF


@dataclass(frozen=True, slots=True)
class Fault:
    """One request's fault. On plain answers the stream kinds act on the body: CUT and STALL in its middle."""

    kind: FaultKind = FaultKind.OK
    status: int = 429  # REFUSE
    retry_after_s: float | None = None  # REFUSE: sent as Retry-After
    after_events: int = 3
    delay_s: float = 0.0
    billed: bool = False  # EMPTY_200, CLOSE, STALL_HEADERS: the model ran to its end and is charged

    def __post_init__(self) -> None:
        if not 400 <= self.status <= 599:
            raise ValueError(f"a refusal's status must be from 400 to 599, not {self.status}")
        if self.after_events < 0 or self.delay_s < 0:
            raise ValueError("after_events and delay_s cannot be negative")


OK = Fault()


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Which fault the n-th generation request (from 0, since the plan was set) gets.

    First the script, one item per request; then, by `rates` (kind -> probability), a draw that depends only on
    `seed` and n.
    """

    script: tuple[Fault, ...] = ()
    seed: int = 0
    rates: Mapping[FaultKind, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(rate < 0 for rate in self.rates.values()) or sum(self.rates.values()) > 1 + 1e-9:
            raise ValueError("fault rates must be probabilities that sum to at most 1")

    def at(self, n: int) -> Fault:
        if n < len(self.script):
            return self.script[n]
        draw = hashlib.sha256(f"{self.seed}:{n}".encode()).digest()
        point = int.from_bytes(draw[:8]) / 2**64
        for kind, rate in sorted(self.rates.items()):
            if point < rate:
                return Fault(
                    kind,
                    (429, 500, 503, 529)[draw[8] % 4],
                    after_events=draw[9] % 12,
                    billed=draw[10] % 2 == 1,
                )
            point -= rate
        return OK


def read_plan(body: Mapping[str, Any]) -> FaultPlan:
    """From JSON: {"script": ["cut", {"kind": "refuse", "status": 503}, 529, ...]} and/or {"seed": 1, "rates": {...}}.

    A number in the script is a refusal with that status. Raises ValueError.
    """
    unknown = set(body) - {"script", "seed", "rates"}
    if unknown:
        raise ValueError(f"unknown fields: {sorted(unknown)}")
    script: Sequence[Any] = body.get("script") or ()
    rates = {FaultKind(kind): float(rate) for kind, rate in (body.get("rates") or {}).items()}
    return FaultPlan(tuple(_read_fault(item) for item in script), int(body.get("seed") or 0), rates)


def _read_fault(item: object) -> Fault:
    if isinstance(item, int):
        return Fault(FaultKind.REFUSE, item)
    if isinstance(item, str):
        return Fault(FaultKind(item))
    if not isinstance(item, Mapping):
        raise ValueError(f"a fault is a status, a kind or an object, not {item!r}")
    known = {f.name for f in fields(Fault)}
    if set(item) - known:
        raise ValueError(f"unknown fault fields: {sorted(set(item) - known)}")
    return Fault(**{**item, "kind": FaultKind(item.get("kind", "ok"))})
