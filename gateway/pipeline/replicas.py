"""replicas: which replica of a deployment an attempt goes to, and what its end tells of that replica.

Only for deployments that have replicas; where they are and whether they are well comes from `jobs.replica_watch`.
"""

from __future__ import annotations

import logging

from msgspec.structs import replace

from gateway.core.catalog import Deployment
from gateway.core.dialects import ABORT
from gateway.core.entry import Attempt, Outcome
from gateway.core.errors import UpstreamAuthFailed, UpstreamError, UpstreamOverloaded, UpstreamUnreachable
from gateway.core.identity import TaskSource
from gateway.core.protection import SALTED
from gateway.core.replicas.chain import seed_of
from gateway.core.replicas.group import short_name
from gateway.core.replicas.terms import Ask, End, EndKind, Why
from gateway.core.serving import CacheSalt
from gateway.core.usage import Quality
from gateway.pipeline.exchange import Exchange, OnReplica, World

_NO_PROMPT = Ask()
#: By these, engines and other routers let a client say where it goes. None is forwarded, and none is heeded here.
_STEERING = ("x-replica", "x-data-parallel-rank", "x-vllm-priority")
#: Ends of an answer that calls tools, in chat completions and messages.
_CALLS = frozenset({"tool_calls", "function_call", "tool_use"})
_log = logging.getLogger(__name__)
#: How an attempt ends that says nothing of its replica: our credential, our fault, or a request that nobody would serve.
_NOT_ITS_FAULT = frozenset({"client_gone", "upstream_refused", "upstream_auth", "internal"})


def choose(world: World, x: Exchange, deployment: Deployment, attempt: Attempt) -> None:
    """Raises `UpstreamUnreachable` (nothing was sent) if there is no replica at all."""
    _pass_over_wishes(world, x)
    group = world.replicas.get(deployment.name)
    pick = None
    if group is not None:
        ask, now_s, chance = _ask(world, x, deployment), world.clock.monotonic(), world.random()
        pick = group.pick(ask, now_s, chance, x.avoided)
        if pick is None and x.avoided:  # one that has failed may have come back
            pick = group.pick(ask, now_s, chance)
    if group is None or pick is None:
        raise UpstreamUnreachable(f"no replica of {deployment.name} can be used", billed=False)
    group.sent(attempt.attempt_id, ask, pick, now_s)
    x.replica = OnReplica(group, pick.address, attempt.attempt_id)


def _pass_over_wishes(world: World, x: Exchange) -> None:
    for name in _STEERING:
        if name in x.incoming.headers and world.told.first(f"own {name}/{x.caller.key_id}"):
            _log.warning(
                "key %s sends the header %s; it picks no replica, now and from now on", x.caller.key_id, name
            )


def first_chunk(world: World, on: OnReplica) -> None:
    on.group.fleet.first_chunk(on.attempt_id, world.clock.monotonic())


def failed(x: Exchange, on: OnReplica, error: UpstreamError) -> None:
    """Before the first byte. Nobody sends a bill for an answer that one's own server did not give."""
    on.error = error
    if about_replica(error):
        error.billed = False
        x.avoided |= {on.address}


def about_replica(error: UpstreamError) -> bool:
    """Another replica might have answered: it was not the request, nor our credential."""
    return error.retryable and not isinstance(error, UpstreamAuthFailed)


def another(world: World, x: Exchange, deployment: Deployment, error: UpstreamError) -> bool:
    """The deployment as a whole is fine: a replica that is well, and has not failed this request, is left."""
    group = world.replicas.get(deployment.name)
    if group is None or not x.avoided or not about_replica(error):
        return False
    pick = group.pick(_NO_PROMPT, world.clock.monotonic(), 1.0, x.avoided)
    return pick is not None and pick.why is not Why.LAST_RESORT


def ended(world: World, on: OnReplica, outcome: Outcome) -> Outcome:
    """Tells the fleet, and says in the entry who served."""
    now_s = world.clock.monotonic()
    kind = _kind(on.error, outcome)
    if isinstance(on.error, UpstreamUnreachable):
        on.group.fleet.unreachable(on.address, now_s)
    usage, told = outcome.usage, outcome.quality is Quality.EXACT and outcome.usage.input_total > 0
    if usage.cache_read:
        on.group.tells_cached = True
    end = End(
        kind,
        prompt_tokens=usage.input_total if told else None,
        cached_tokens=usage.cache_read if told and on.group.tells_cached else None,
        output_tokens=usage.output if told else None,
        retry_after_s=on.error.retry_after_s if on.error is not None else None,
        calls=outcome.finish in _CALLS,
    )
    on.group.fleet.ended(on.attempt_id, end, now_s)
    return replace(outcome, served_by=short_name(on.address))


def _kind(error: UpstreamError | None, outcome: Outcome) -> EndKind:
    if outcome.finish == ABORT:
        return EndKind.ABORTED
    if outcome.error in _NOT_ITS_FAULT:
        return EndKind.CANCELLED
    if isinstance(error, UpstreamOverloaded):
        return EndKind.REFUSED
    return EndKind.FAILED if outcome.error else EndKind.OK


def _ask(world: World, x: Exchange, deployment: Deployment) -> Ask:
    segments = x.facts.segments
    if not len(segments):
        return Ask(streams=x.facts.stream)
    # A task that nothing names has one request, so its id is no thread; but its first prompt may begin like others.
    named = x.task.source is not TaskSource.NEW
    opening = (
        x.chain[min(len(x.chain), 1 + len(segments) - x.facts.message_count) - 1].hex() if x.chain else ""
    )
    thread = f"{x.task.task_id}/{opening}"
    chain = world.replicas.chains.of(
        segments, thread, seed_of(deployment.upstream_model, _apart(x, deployment))
    )
    return Ask(chain, thread, x.task.task_id if named else "", x.facts.stream)


def _apart(x: Exchange, deployment: Deployment) -> str:
    """Whose prompts share no block with others', because their salt is another."""
    if SALTED not in x.shaped.protections:
        return ""
    caller = x.caller
    return (
        f"{caller.tenant_id}/{caller.team_id}"
        if deployment.serving.cache_salt is CacheSalt.TEAM
        else caller.tenant_id
    )
