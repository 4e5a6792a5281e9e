"""route: rules + health + warm caches -> tier, then ordered candidate deployments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from gateway.core import bounds, routing
from gateway.core.catalog import Catalog, Deployment, Order
from gateway.core.routing import AUTO, Needs, Route
from gateway.core.rules import Caps, Decision, RuleSet, Switch
from gateway.core.runs import Thread
from gateway.core.switching import Pace, Side, turn_saving
from gateway.pipeline import runs
from gateway.pipeline.exchange import Exchange, World

_NO_CAPS = Caps()


def route(world: World, x: Exchange) -> None:
    """Raises `ModelNotFound`, or `InvalidRequest` if the model is not served at this address."""
    asked = x.facts.model
    catalog = world.catalog()
    named = catalog.by_model.get(asked, ())
    if len(named) == 1:  # one place to go: nothing to decide
        (only,) = named
        if only.serves(x.operation) and x.caller.may_use(only.model, *only.aliases):
            x.route = Route(None, "", f"the client asked for {asked}", named)
            return
        x.route = _candidates(world, x, catalog, asked, None, {})  # says what is wrong
        return
    thread = runs.join(world, x)
    if not named and (rules := rules_of(world, asked)) is not None:
        x.route = _by_rules(world, x, catalog, rules, thread)
        if x.route.caps.service_tier is not None:  # what is asked for is what is priced
            x.facts = structs.replace(x.facts, service_tier=x.route.caps.service_tier)
        return
    x.route = _candidates(world, x, catalog, asked, None, _warm(world, x, thread))


def rules_of(world: World, model: str) -> RuleSet | None:
    """The rules behind a name: of "auto", or of a virtual model."""
    return world.rules() if model == AUTO else world.virtual().get(model)


def _by_rules(world: World, x: Exchange, catalog: Catalog, rules: RuleSet, thread: Thread | None) -> Route:
    decision = decide(world, x, rules)
    if rules.shadow and decision.rule:
        would = f"{decision.model or decision.tier}"
        plain = _target(world, x, catalog, _default(rules), thread)
        return replace(plain, rule=f"shadow:{decision.rule}", why=f"{plain.why}; would be {would}")
    wanted = _target(world, x, catalog, decision, thread)
    if thread is None or x.run is None:
        return wanted
    habit = world.runs.habit(x.run, thread, decision.model or decision.tier.value)
    home = _home(world, x, catalog, thread, rules, wanted)
    if home is None and thread.imagined is None:
        return wanted
    pace = thread.pace(bounds.estimate_input_tokens(x.facts.size), habit, world.runs.remaining(x.run))
    bound = bool(thread.home) and runs.tool_call_open(world, x)
    _imagine(world, x, thread, pace, home, wanted.candidates, decision, bound)
    if home is None:
        return wanted
    if bound:
        hold = _Hold("a tool call is open that only this model can go on with")
    else:
        hold = _hold(world, x, thread, pace, home, wanted.candidates[0], decision)
    if not hold.reason:
        return replace(wanted, why=f"{wanted.why}; {hold.told}") if hold.told else wanted
    stay = Decision(decision.rule, home.tier, decision.caps, f"{decision.why}; stays: {hold.reason}")
    kept = _target(world, x, catalog, stay, thread, home)
    return replace(kept, instead_of=decision.model or decision.tier.value)


def decide(world: World, x: Exchange, rules: RuleSet) -> Decision:
    """What the rules say, through virtual models that lead to one another. Each failed rule is told of."""
    input_tokens = bounds.estimate_input_tokens(x.facts.size)
    before: Decision | None = None
    while True:
        decision = rules.decide(runs.context(world, x, rules, input_tokens))
        for failed in decision.failed:
            world.rule_failed(failed)
        if before is not None:
            decision = before.then(decision)
        further = rules_of(world, decision.model) if decision.model else None
        if further is None:
            return decision
        before, rules = decision, further  # never in a circle: that is refused at load


def _default(rules: RuleSet) -> Decision:
    return Decision("", rules.default_tier, _NO_CAPS, "the default", model=rules.default_model)


def _target(
    world: World,
    x: Exchange,
    catalog: Catalog,
    decision: Decision,
    thread: Thread | None,
    home: Deployment | None = None,
) -> Route:
    there = () if decision.model else catalog.by_tier.get(decision.tier, ())
    if len(there) == 1 and _open_to_all(x, there[0]):
        found = Route(decision.tier, decision.rule, decision.why, there)
        return replace(found, caps=decision.caps) if decision.caps != _NO_CAPS else found
    warm = _warm(world, x, thread) if home is None else {home.name: 1}
    if decision.model:
        found = _candidates(world, x, catalog, decision.model, None, warm)
        found = replace(found, rule=decision.rule, why=decision.why)
    else:
        found = _candidates(world, x, catalog, AUTO, decision, warm)
    return replace(found, caps=decision.caps) if decision.caps != _NO_CAPS else found


def _open_to_all(x: Exchange, d: Deployment) -> bool:
    key = x.caller.key
    return not key.models and not key.team_models and d.serves(x.operation)


def _candidates(
    world: World,
    x: Exchange,
    catalog: Catalog,
    model: str,
    decision: Decision | None,
    warm: Mapping[str, int],
) -> Route:
    asked, caller = x.facts.model, x.caller
    if asked in (model, AUTO):
        may_use = caller.may_use
    else:

        def may_use(*names: str) -> bool:
            return caller.may_use(asked, *names)

    pools = world.pools.get(catalog, world.prices(), x.received_ms)
    by_latency = catalog.order is Order.LATENCY
    return routing.route(
        model=model,
        operation=x.operation,
        catalog=catalog,
        decision=decision,
        health=world.health,
        may_use=may_use,
        needs=Needs(bounds.estimate_input_tokens(x.facts.size)),
        warm=warm,
        rank=world.latency if by_latency else pools.rank,
        pick=world.random(),
        now_s=world.clock.monotonic(),
        pools=None if by_latency or caller.key.models or caller.key.team_models else pools,
    )


def _warm(world: World, x: Exchange, thread: Thread | None) -> Mapping[str, int]:
    """Tokens of this thread that each deployment holds now."""
    if thread is None or not thread.held:
        return {}
    now_s = world.clock.monotonic()
    return {name: thread.warm(name, x.chain).at(now_s) for name in thread.held}


def _home(
    world: World, x: Exchange, catalog: Catalog, thread: Thread, rules: RuleSet, wanted: Route
) -> Deployment | None:
    """Where the thread is now, if that is elsewhere and still open to it; at its beginning, where the default is."""
    if thread.home and wanted.named(thread.home) is not None:
        return None
    found = catalog.by_name.get(thread.home) if thread.home else None
    if found is None and not thread.home:
        if not rules.default_model and rules.default_tier is wanted.tier:
            return None
        found = _target(world, x, catalog, _default(rules), thread).candidates[0]
        if wanted.named(found.name) is not None:
            return None
    if found is None or not found.serves(x.operation):
        return None
    if not x.caller.may_use(x.facts.model, found.tier.value, found.model, *found.aliases):
        return None
    return found if routing.fits(found, world.health, world.clock.monotonic()) else None


@dataclass(frozen=True, slots=True)
class _Hold:
    reason: str = ""  # why the task stays; "" = it goes
    told: str = ""  # what is said about going


def _imagine(
    world: World,
    x: Exchange,
    thread: Thread,
    pace: Pace,
    home: Deployment | None,
    wanted: Sequence[Deployment],
    decision: Decision,
    bound: bool,
) -> None:
    """Play this request along under each policy, from the first one on at which they part."""
    assert x.run is not None
    now_s, there = world.clock.monotonic(), runs.terms(world, wanted[0], x.received_ms)
    if thread.imagined is None:
        if home is None or there is None or bound or decision.switch is Switch.ALWAYS:
            return
        here = runs.terms(world, home, x.received_ms)
        if here is None or turn_saving(here, there, pace) <= 0:
            return
        thread.imagine(world.runs.bills(x.run), here, home.name)
    if thread.imagined is None or there is None:
        return
    if bound:
        thread.imagined.bound(now_s)
        return
    thread.imagined.asked(
        [d.name for d in wanted],
        there,
        pace,
        now_s,
        always=decision.switch is Switch.ALWAYS,
        rewritten=thread.home in thread.held and not thread.warm(thread.home, x.chain).tokens,
    )


def _hold(
    world: World,
    x: Exchange,
    thread: Thread,
    pace: Pace,
    home: Deployment,
    target: Deployment,
    decision: Decision,
) -> _Hold:
    assert x.run is not None
    if decision.switch is Switch.ALWAYS:
        return _Hold()
    here, there = runs.terms(world, home, x.received_ms), runs.terms(world, target, x.received_ms)
    if here is None or there is None:
        return _Hold()  # without prices there is nothing to weigh
    if turn_saving(here, there, pace) <= 0:
        return _Hold()  # what is dearer is wanted for something else than its price
    sides = Side(here, thread.warm(home.name, x.chain)), Side(there, thread.warm(target.name, x.chain))
    choice = thread.choose(*sides, pace, world.clock.monotonic(), world.runs.bills(x.run))
    return _Hold("", choice.text) if choice.goes else _Hold(choice.text)
