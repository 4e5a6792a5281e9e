"""explain: why an attempt read less from its provider's cache than it could have; kept with its ledger entry."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from msgspec.structs import replace

from gateway.core.catalog import Deployment, Operation
from gateway.core.entry import Attempt, Kind, Outcome
from gateway.core.misses import rules_for
from gateway.core.second_opinion import opinion
from gateway.core.shaping import Transform
from gateway.core.threads import Answered
from gateway.core.usage import Quality
from gateway.pipeline.exchange import Exchange, World
from gateway.pipeline.shape import as_it_is

_log = logging.getLogger(__name__)
_NOTHING: frozenset[str] = frozenset()
_RESTORES = {Transform.TOOLS: "tools", Transform.RELOCATE: "system"}
#: Shorter prompts are cached nowhere (the least documented minimum is Qwen's), and most of them are no agent's.
LEAST_TOKENS = 256
_PROMPTS = frozenset({Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES})


def _restored(applied: Sequence[Transform]) -> frozenset[str]:
    """What the provider got as it had got it before, although the client sent something else."""
    if not applied:
        return _NOTHING
    return frozenset(_RESTORES[transform] for transform in applied if transform in _RESTORES)


def explained(world: World, x: Exchange, attempt: Attempt, outcome: Outcome) -> Outcome:
    """The outcome, with what is to be said about its prompt. Never raises: an attempt is settled in any case."""
    try:
        return _explained(world, x, attempt, outcome)
    except Exception:
        _log.exception("request %s could not be compared with the one before", attempt.request_id)
        return outcome


def _explained(world: World, x: Exchange, attempt: Attempt, outcome: Outcome) -> Outcome:
    """Estimated usage says nothing about a cache."""
    if outcome.kind is not Kind.POST or outcome.quality is not Quality.EXACT or x.operation not in _PROMPTS:
        return outcome
    if outcome.usage.input_total < LEAST_TOKENS and not world.threads.knows(attempt.task_id):
        return outcome
    deployment = x.route.named(attempt.deployment)
    if deployment is None or not x.chain:
        return outcome
    signal, shaped = x.signal, x.shaped
    miss = world.threads.answered(
        attempt.task_id,
        Answered(
            attempt.request_id,
            x.facts,
            x.incoming.body,
            x.chain,
            f"{signal.purpose}/{signal.agent_id}" if signal.purpose or signal.agent_id else "",
            f"{deployment.name}/{deployment.upstream_model}",
            outcome.usage,
            rules_for(world.cache_rules(), deployment, x.received_ms),
            world.prices().find(deployment.price, x.received_ms),
            outcome.service_tier,
            attempt.started_at_ms,
            x.task_step,
            shaped.level,
            shaped.applied,
            _restored(shaped.applied),
        ),
        world.clock.now_ms()
        if outcome.first_token_ms is None
        else attempt.started_at_ms + outcome.first_token_ms,
    )
    vendor = ""
    if world.caching().diagnostics:
        of = _thread(x, deployment)
        world.opinions.answered(*of, outcome.upstream_request_id)
        vendor = opinion(x.said)
    # That a request was the first of its kind is told from its entry alone.
    if miss is None or not (miss.lost_tokens or miss.unseen):
        return outcome
    return replace(outcome, miss=replace(miss, vendor=vendor) if vendor else miss)


def ask_vendor(world: World, x: Exchange, deployment: Deployment) -> bytes:
    """The member that asks a vendor for its own word on the cache, if it has one; b"" else."""
    if x.operation not in _PROMPTS or not as_it_is(x, deployment):
        return b""
    family = deployment.provider.cache_rules or deployment.provider.name
    rule = world.cache_rules().find(f"{family}/{deployment.upstream_model}", x.received_ms)
    return world.opinions.asking(x.facts, rule, family, *_thread(x, deployment))


def _thread(x: Exchange, deployment: Deployment) -> tuple[str, str, str]:
    target = f"{deployment.name}/{deployment.upstream_model}"
    return x.task.task_id, f"{x.signal.purpose}/{x.signal.agent_id}", target
