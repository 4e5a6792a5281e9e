"""bound: the most input tokens that a deployment can bill for a request, and what its answers teach about that.

What is learned is a memory of this process; losing it only loosens bounds (`core.known_prompts`, `core.outputs`).
"""

from __future__ import annotations

import logging

import msgspec

from gateway.core.catalog import Deployment
from gateway.core.dialects import media
from gateway.core.entry import Attempt, Kind, Outcome
from gateway.core.known_prompts import Prompt
from gateway.core.usage import Quality
from gateway.pipeline.exchange import Exchange, World

_log = logging.getLogger(__name__)
_TRIM = "trim"
#: Transforms, without their versions, beside which a prompt is still the same, or shorter.
_NEUTRAL = frozenset({"markers", "cache_key", _TRIM})


def input_bound(world: World, x: Exchange, deployment: Deployment) -> int | None:
    """Tokens of what leaves for this deployment (`x.shaped`); None = nothing bounds them."""
    tokens = world.known_prompts.bound(deployment, x.chain, _as_sent(x))
    if tokens is None:
        return None
    served = deployment.provider.server_tools_tokens_max
    if served != 0 and media.server_tools(x.facts):
        if served is None:
            return None
        tokens += served
    return tokens + x.shaped.added_bytes


def unbounded_by(x: Exchange, deployment: Deployment) -> str:
    """Which member of the request nothing bounds, as far as that is known; "model" where it is the price or the rest."""
    offered = deployment.provider.server_tools_tokens_max is None and media.server_tools(x.facts)
    return "tools" if offered else "model"


def input_estimate(world: World, x: Exchange, deployment: Deployment) -> int:
    """The probable tokens of what left for this deployment, where it does not say."""
    return world.known_prompts.estimate(deployment, x.chain, _as_sent(x))


def learn(world: World, x: Exchange, attempt: Attempt, outcome: Outcome) -> None:
    """What an attempt's end says about prompts and answers like this one."""
    if outcome.quality is not Quality.EXACT or outcome.kind is not Kind.POST:
        return
    usage = outcome.usage
    billed = usage.input_total
    if usage.output:
        world.outputs.note(asker(x), usage.output // x.facts.n)
    if x.input_bound is not None and billed > x.input_bound:
        # What a provider's own tools bring (web search) is in no request, and says nothing about its tokens.
        # Told once; the ledger tells of each.
        if not media.server_tools(x.facts) and world.known_prompts.distrust(attempt.deployment):
            _log.error(
                "%s billed %d input tokens for attempt %s, whose bound was %d; from now on only bytes bound what goes there",
                *(attempt.deployment, billed, attempt.attempt_id, x.input_bound),
            )
    elif _TRIM not in _transforms(x):
        # What was trimmed now may leave whole another time.
        world.known_prompts.note(attempt.deployment, x.chain, _as_sent(x), billed)


def _as_sent(x: Exchange) -> Prompt:
    """What was moved or dropped on the way makes another prompt of it."""
    if not x.shaped.applied:
        return x.prompt
    kinds = _transforms(x) - _NEUTRAL
    if not kinds or x.prompt.group is None:
        return x.prompt
    return msgspec.structs.replace(x.prompt, group=hash((x.prompt.group, kinds)))


def _transforms(x: Exchange) -> frozenset[str]:
    return frozenset([name.partition("@")[0] for name in x.shaped.applied])


def asker(x: Exchange) -> tuple[str, str, str]:
    """Whose answers are of like length."""
    return x.caller.key_id, x.client, x.facts.model
