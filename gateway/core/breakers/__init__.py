"""Agent breakers: signs that a run is stuck, runs away, or costs more than it should.

    tail(operation, segments) -> Tail              what the request shows of its own past (`gateway.core.tail`)
    observe(state, fact, policy, now_ms)           one task
    observe_key(state, body, retries, ...)         one key
    Watch                                          both, for all tasks and keys of a process

All pure: a verdict says what was seen and what the policy allows; who refuses or tells somebody is elsewhere.
"""

from __future__ import annotations

from gateway.core.breakers.key import KeyState, observe_key
from gateway.core.breakers.policy import (
    Amplification,
    Breaker,
    BreakerPolicy,
    Errors,
    FanOut,
    Mode,
    Polling,
    Repeats,
    SpendSlope,
    StepCap,
    Verdict,
    WallClock,
)
from gateway.core.breakers.task import Asked, Child, Ended, Fact, Signs, TaskState, forgive, observe, signs
from gateway.core.breakers.watch import Watch

__all__ = [
    "Amplification",
    "Asked",
    "Breaker",
    "BreakerPolicy",
    "Child",
    "Ended",
    "Errors",
    "Fact",
    "FanOut",
    "KeyState",
    "Mode",
    "Polling",
    "Repeats",
    "Signs",
    "SpendSlope",
    "StepCap",
    "TaskState",
    "Verdict",
    "WallClock",
    "Watch",
    "forgive",
    "observe",
    "observe_key",
    "signs",
]
