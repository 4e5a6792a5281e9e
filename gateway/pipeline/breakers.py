"""breakers: ask whether this run is stuck or runs away, before anything is spent on the request.

What a breaker says is told once per episode; only a breaker that was configured to `stop` refuses.
"""

from __future__ import annotations

from collections.abc import Iterable

from gateway.core.breakers import Breaker, Ended, Mode, Verdict
from gateway.core.catalog import Operation
from gateway.core.entry import Outcome
from gateway.core.errors import GatewayError, RateLimited, TaskStopped
from gateway.core.identity import TaskSource
from gateway.core.tail import Tail, tail
from gateway.pipeline.exchange import Exchange, World

#: Fewer messages than a question, a call and its result show no turn.
_MESSAGES_MIN = 3
_NO_TURNS = Tail()
#: Ends of an attempt that are no failure of a provider.
_NOT_FAILED = frozenset({"", "client_gone", "upstream_refused", "internal"})
_FAN_OUT = frozenset({Breaker.CONCURRENCY, Breaker.CHILDREN, Breaker.DEPTH})
_CAPS = _FAN_OUT | {Breaker.STEPS, Breaker.WALL_CLOCK}


def ask(world: World, x: Exchange) -> None:
    """Raises `TaskStopped`, or `RateLimited` where waiting helps."""
    if x.operation is Operation.COUNT_TOKENS:
        return  # clients count the same again and again, and nobody pays for it
    policy = world.breakers
    retries = int(x.retried)
    verdicts = world.watch.key_asked(x.caller.key_id, x.facts.digest, retries, policy, x.received_ms)
    if _is_run(x):
        segments = x.facts.segments
        seen = tail(x.operation, segments, x.chain) if len(segments) >= _MESSAGES_MIN else _NO_TURNS
        x.spoken = bool(seen.pending and seen.turns) and seen.pending != seen.turns[-1].prompted
        verdicts += world.watch.asked(
            x.task.task_id,
            seen,
            policy,
            x.received_ms,
            parent_task_id=x.task.parent_task_id,
        )
    if not verdicts:
        return
    _tell(world, x, verdicts)
    stops = [v for v in verdicts if v.action is Mode.STOP]
    if stops:
        # One that waiting does not help with goes first, so that nobody waits in vain.
        raise _refusal(min(stops, key=lambda v: v.retry_after_s or 0))


def began(world: World, x: Exchange) -> None:
    """A hold is committed; `ended` is due for its attempt, once."""
    if _is_run(x):
        world.watch.began(x.task.task_id, x.task_began_ms or None)


def ended(world: World, x: Exchange, outcome: Outcome) -> None:
    """The attempt is posted."""
    if _is_run(x):
        failed = outcome.error not in _NOT_FAILED
        fact = Ended(failed, outcome.cost_nano_usd, x.task_step or None)
        _tell(world, x, world.watch.ended(x.task.task_id, fact, world.breakers, world.clock.now_ms()))


def _is_run(x: Exchange) -> bool:
    """Calls without a history that name no task share one per key and day, which is no run of an agent."""
    return bool(x.chain) or x.task.source is not TaskSource.NEW


def _tell(world: World, x: Exchange, verdicts: Iterable[Verdict]) -> None:
    for v in verdicts:
        if v.fresh:
            subject = _subject(x, v.breaker)
            body = {
                "breaker": v.breaker.value,
                "action": v.action.value,
                "task_id": x.task.task_id,
                "key_id": x.caller.key_id,
                "team_id": x.caller.team_id,
                "tenant_id": x.caller.tenant_id,
                "message": v.message,
                "evidence": dict(v.evidence),
                "tripped": v.tripped,
                "pauses_task": _pauses(v),
            }
            kind = "breaker_tripped" if v.tripped else "breaker_warning"
            world.alert(kind, f"{subject}/{v.episode}", body)


def _pauses(v: Verdict) -> bool:
    """Whether the task waits for a person. Caps are raised, and what time mends is waited for."""
    return v.action is Mode.STOP and v.tripped and v.retry_after_s is None and v.breaker not in _CAPS


def _subject(x: Exchange, breaker: Breaker) -> str:
    """Whose episode it is."""
    if breaker is Breaker.RETRIES:
        return x.caller.key_id
    if breaker is Breaker.CHILDREN and x.task.parent_task_id:
        return x.task.parent_task_id
    return x.task.task_id


def _refusal(v: Verdict) -> GatewayError:
    name = "fan_out" if v.breaker in _FAN_OUT else v.breaker.value
    if v.retry_after_s is not None:
        return RateLimited(f"{v.message} (breaker {v.breaker.value})", retry_after_s=v.retry_after_s)
    if v.breaker in _CAPS:
        resume = f"Start a new task, or ask the gateway's operator to raise breakers.{name}."
    else:
        resume = (
            "To go on, say something new to the model, have the task resumed, or start a new one; "
            f"the gateway's operator can change breakers.{name}."
        )
    return TaskStopped(f"the breaker {v.breaker.value} stopped this task: {v.message}. {resume}")
