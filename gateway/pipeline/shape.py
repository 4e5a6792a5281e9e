"""shape: what of the prompt is compared with others. Canonical segments and markers join here when the prefix work lands."""

from __future__ import annotations

from gateway.core import bounds
from gateway.core.known_prompts import Prompt
from gateway.pipeline.exchange import Exchange, World


def shape(x: Exchange) -> None:
    x.prompt = Prompt.of(x.facts, x.incoming.body, x.caller.tenant_id)


def is_slow(world: World, x: Exchange) -> bool:
    """True if the first byte may take minutes: reasoning, or a very long prompt."""
    return x.facts.reasoning or bounds.estimate_input_tokens(x.facts.size) > world.policy.slow_input_tokens
