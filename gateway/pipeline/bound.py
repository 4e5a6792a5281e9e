"""bound: the most input tokens that a deployment can bill for a request, and what its answers teach about that.

What is learned is a memory of this process; losing it only loosens bounds (`core.known_prompts`, `core.outputs`).
"""

from __future__ import annotations

from gateway.core.catalog import Deployment
from gateway.core.entry import Attempt, Kind, Outcome
from gateway.core.usage import Quality
from gateway.pipeline.exchange import Exchange, World


def input_bound(world: World, x: Exchange, deployment: Deployment) -> int | None:
    """Tokens; None = nothing bounds them."""
    return world.known_prompts.bound(deployment, x.chain, x.prompt)


def learn(world: World, x: Exchange, attempt: Attempt, outcome: Outcome) -> None:
    """What an attempt's end says about prompts and answers like this one."""
    if outcome.quality is not Quality.EXACT or outcome.kind is not Kind.POST:
        return
    usage = outcome.usage
    if usage.output:
        world.outputs.note(asker(x), usage.output // x.facts.n)
    if x.input_bound is not None and usage.input_total > x.input_bound:
        world.known_prompts.distrust(attempt.deployment)
    else:
        world.known_prompts.note(attempt.deployment, x.chain, x.prompt, usage.input_total)


def asker(x: Exchange) -> tuple[str, str, str]:
    """Whose answers are of like length."""
    return x.caller.key_id, x.client, x.facts.model
