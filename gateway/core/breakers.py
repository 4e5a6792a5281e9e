"""Signs that a client runs in circles: the same body again and again, or too many SDK retries.

They observe; what to do about it (warn, stop) is the pipeline's decision.
"""

from __future__ import annotations

from dataclasses import dataclass

#: How many bodies one ring remembers, and for how long a repeat counts.
RING_SIZE = 32
REPEAT_WINDOW_S = 600.0

#: A key amplifies when more than a fifth of its last 50 requests are retries (`x-stainless-retry-count` >= 1,
#: which both vendors' Python and Node SDKs send; Claude Code always sends 0: measured 2026-11).
RETRY_WINDOW = 50
_RETRY_MASK = (1 << RETRY_WINDOW) - 1


@dataclass(frozen=True, slots=True)
class BodyRepeat:
    """The last request bodies of one task (or key): (hash, monotonic seconds), oldest first."""

    seen: tuple[tuple[bytes, float], ...] = ()


def observe(state: BodyRepeat, body_hash: bytes, now_s: float) -> tuple[BodyRepeat, int]:
    """Add a body. The count says how often it was seen within the window, this time included: 1 = new.

    A repeat is a client's retry or an agent that makes no progress, because every step of an agent that moves
    on has a longer body.
    """
    recent = tuple(s for s in state.seen if now_s - s[1] < REPEAT_WINDOW_S)
    repeats = 1 + sum(1 for seen_hash, _ in recent if seen_hash == body_hash)
    return BodyRepeat((*recent[-(RING_SIZE - 1) :], (body_hash, now_s))), repeats


@dataclass(frozen=True, slots=True)
class Retries:
    """Which of a key's last 50 requests were retries: one bit each, the newest lowest."""

    bits: int = 0
    requests: int = 0

    @property
    def amplified(self) -> bool:
        """True only once the window is full, so that one retry among the first requests says nothing."""
        return self.requests == RETRY_WINDOW and self.bits.bit_count() * 5 > RETRY_WINDOW


def observe_retry(state: Retries, is_retry: bool) -> Retries:
    return Retries((state.bits << 1 | is_retry) & _RETRY_MASK, min(state.requests + 1, RETRY_WINDOW))
