"""Signs that a key's clients retry more than they work: SDK retries, or the same body again and again.

Both vendors' Python and Node SDKs count their retries in `x-stainless-retry-count`; Claude Code always sends 0 and
repeats all the same (captured 2026-11), so bodies are compared as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gateway.core.breakers.policy import REQUESTS_KEPT, Amplification, Breaker, Verdict

#: How many bodies are remembered, and for how long a repeat counts.
BODIES_KEPT = 64
REPEAT_WINDOW_MS = 600_000
_MASK = (1 << REQUESTS_KEPT) - 1
_HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class KeyState:
    """The last bodies of a key, oldest first, and which of its last 50 requests were retries (1 = retry)."""

    bodies: tuple[tuple[bytes, int], ...] = ()  # (hash, wall clock in ms)
    bits: int = 0
    requests: int = 0
    told: str = ""

    @property
    def retries(self) -> int:
        return self.bits.bit_count()


def observe_key(
    state: KeyState, body: bytes, retry_count: int, policy: Amplification, now_ms: int
) -> tuple[KeyState, tuple[Verdict, ...]]:
    """After one more request. `body`: a hash that differs for each step of an agent; `retry_count`: the SDK's.

    Says nothing before 50 requests, so that one retry among the first says nothing.
    """
    bodies, first = state.bodies, 0
    while first < len(bodies) and now_ms - bodies[first][1] >= REPEAT_WINDOW_MS:
        first += 1
    recent = bodies[first:]
    repeated = body in [seen for seen, _ in recent]  # a list: for every request, and faster than any()
    state = KeyState(
        (*recent[-(BODIES_KEPT - 1) :], (body, now_ms)),
        (state.bits << 1 | (retry_count > 0 or repeated)) & _MASK,
        min(state.requests + 1, REQUESTS_KEPT),
        state.told,
    )
    if state.requests < REQUESTS_KEPT or state.retries * 100 <= policy.percent * REQUESTS_KEPT:
        return state, ()
    if policy.mode is policy.mode.OFF:
        return state, ()
    episode = f"{Breaker.RETRIES}/trip/{now_ms // _HOUR_MS}"
    verdict = Verdict(
        Breaker.RETRIES,
        policy.mode,
        tripped=True,
        fresh=episode != state.told,
        episode=episode,
        evidence={"retries": state.retries, "of": REQUESTS_KEPT, "percent": policy.percent},
        message=f"{state.retries} of the last {REQUESTS_KEPT} requests of this key were retries",
        retry_after_s=60,
    )
    return replace(state, told=episode), (verdict,)
