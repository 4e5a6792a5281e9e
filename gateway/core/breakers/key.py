"""Signs that a key's clients retry more than they work: SDK retries, or the same body again and again.

Both vendors' Python and Node SDKs count their retries in `x-stainless-retry-count`; Claude Code always sends 0 and
repeats all the same (captured 2026-11), so bodies are compared as well.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from gateway.core.breakers.policy import REQUESTS_KEPT, Amplification, Breaker, Verdict

#: How many bodies are remembered, and for how long a repeat counts.
BODIES_KEPT = 64
REPEAT_WINDOW_MS = 600_000
_MASK = (1 << REQUESTS_KEPT) - 1
_HOUR_MS = 3_600_000


class KeyState(msgspec.Struct, frozen=True):
    """The last bodies of a key, and which of its last 50 requests were retries (1 = retry)."""

    bodies: dict[bytes, int] = {}  # hash -> wall clock in ms when it last came, oldest first
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

    Says nothing before 50 requests, so that one retry among the first says nothing. The new state takes over the old
    one's `bodies`, which then must not be used any more: a copy would cost more than all the rest.
    """
    bodies = state.bodies
    before_ms = bodies.pop(body, None)
    repeated = before_ms is not None and now_ms - before_ms < REPEAT_WINDOW_MS
    bodies[body] = now_ms
    if len(bodies) > BODIES_KEPT:
        del bodies[next(iter(bodies))]
    bits = (state.bits << 1 | (retry_count > 0 or repeated)) & _MASK
    requests = state.requests
    if requests < REQUESTS_KEPT:
        requests += 1
    state = KeyState(bodies, bits, requests, state.told)
    if requests < REQUESTS_KEPT or bits.bit_count() * 100 <= policy.percent * REQUESTS_KEPT:
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
