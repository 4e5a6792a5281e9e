"""route: rules + health -> tier, then ordered candidate deployments."""

from __future__ import annotations

from dataclasses import replace

from gateway.core import bounds, routing
from gateway.core.dialects import media
from gateway.core.rules import OwnerFacts, RequestFacts, RuleContext, RuleSet, TaskFacts, TimeFacts
from gateway.pipeline.exchange import Exchange, World


def route(world: World, x: Exchange) -> None:
    """Raises `ModelNotFound`, or `InvalidRequest` if the model is not served at this address."""
    facts = x.facts
    input_tokens = bounds.estimate_input_tokens(facts.size)
    decision = shadow = None
    rules = world.rules()
    if rules is not None and facts.model == routing.AUTO:
        decision = rules.decide(_context(world, x, rules, input_tokens))
        if world.policy.shadow_rules:
            shadow, decision = decision, None
    x.route = routing.route(
        model=facts.model,
        operation=x.operation,
        catalog=world.catalog(),
        decision=decision,
        health=world.health,
        may_use=x.caller.may_use,
        needs=routing.Needs(input_tokens),
        affinity=None,
        pick=world.random(),
        now_s=world.clock.monotonic(),
    )

    if shadow is not None and shadow.rule:
        x.route = replace(x.route, rule=f"shadow:{shadow.rule}", why=f"{x.route.why}; would be {shadow.tier}")


def _context(world: World, x: Exchange, rules: RuleSet, input_tokens: int) -> RuleContext:
    if not rules.rules:
        return RuleContext()
    facts = x.facts
    signs = world.watch.signs(x.task.task_id, world.breakers)
    return RuleContext(
        request=RequestFacts(
            model=facts.model,
            dialect=x.operation.value,
            client=x.client,
            stream=facts.stream,
            context_tokens=input_tokens,
            max_output_tokens=facts.max_output_tokens or 0,
            tools=facts.tool_count,
            last_role=facts.last_role,
            has_images=facts.has_images and media.of(facts).images > 0,
            reasoning_effort=facts.reasoning_effort,
        ),
        task=TaskFacts(repeats=signs.repeats, tool_errors=signs.tool_errors),
        key=OwnerFacts(labels=x.caller.key.labels),
        time=TimeFacts.at(x.received_ms),
    )
