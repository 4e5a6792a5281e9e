"""shape: bound the input tokens. Canonical segments and markers join here when the prefix work lands."""

from __future__ import annotations

from gateway.core import bounds
from gateway.pipeline.exchange import Exchange, World


def shape(x: Exchange) -> None:
    facts = x.facts
    # Images are seen but not counted yet, so a request with images has no bound.
    images = None if facts.has_images else 0
    x.input_bound = bounds.input_bound_tokens(facts.size, facts.message_count, facts.tool_count, images)


def is_slow(world: World, x: Exchange) -> bool:
    """True if the first byte may take minutes: reasoning, or a very long prompt."""
    return x.facts.reasoning or bounds.estimate_input_tokens(x.facts.size) > world.policy.slow_input_tokens
