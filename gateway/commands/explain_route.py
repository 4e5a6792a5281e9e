"""explain --request: where a request would go, and why; nothing is sent and nothing is spent."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gateway.commands.output import OperatorError, dollars, print_json, print_table, say
from gateway.commands.overlay import settings_in_force
from gateway.core import bounds, dialects, prices, routing
from gateway.core.catalog import Catalog, Deployment, Operation
from gateway.core.dialects import Facts
from gateway.core.errors import GatewayError
from gateway.core.policies import Bills, Choice, Policy
from gateway.core.routing import AUTO, Needs, Route
from gateway.core.rules import (
    Caps,
    Decision,
    OwnerFacts,
    RequestFacts,
    RuleContext,
    RuleSet,
    TaskFacts,
    TimeFacts,
)
from gateway.core.runs import only_reads
from gateway.core.switching import (
    Arithmetic,
    Habit,
    Lengths,
    Pace,
    Side,
    Warm,
    terms_of,
    turn_saving,
    weigh,
)
from gateway.core.tail import Tail, tail
from gateway.settings import Settings

_OUTPUT_TOKENS = 8_192
_TURN_OUTPUT, _TURN_GROWTH, _TURN_GAP_S = 400.0, 800.0, 10.0


@dataclass(frozen=True, slots=True)
class Supposed:
    """What the request alone does not tell."""

    step: int = 1
    budget_used: float = 0.0
    tool_errors: int | None = None
    repeats: int | None = None
    interactive: bool = False
    client: str = "other"
    purpose: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    home: str = ""  # the deployment that answered the task last
    warm_tokens: int = 0  # of the prompt, in its cache


def labels_of(pairs: Sequence[str]) -> dict[str, str]:
    """Of `--label name=value`."""
    for pair in pairs:
        name, equals, _ = pair.partition("=")
        if not equals or not name:
            raise OperatorError(f"--label {pair!r} is not name=value")
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def explain_route(path: Path | None, request: Path, supposed: Supposed, as_json: bool) -> int:
    settings = settings_in_force(path)
    facts = _facts(request)
    now_ms = time.time_ns() // 1_000_000
    found = explained(settings, facts, supposed, now_ms)
    if as_json:
        print_json(found)
    else:
        _show(found)
    return 0


def _facts(request: Path) -> Facts:
    try:
        body = request.read_bytes()
        doc = msgspec.json.decode(body)
    except OSError as error:
        raise OperatorError(f"{request} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise OperatorError(f"{request} is not JSON: {error}") from error
    if not isinstance(doc, dict):
        raise OperatorError(f"{request} holds no request", "a JSON object with model and messages")
    operation = Operation.CHAT
    if "input" in doc and "messages" not in doc:
        operation = Operation.RESPONSES
    elif "system" in doc or "anthropic_version" in doc:
        operation = Operation.MESSAGES
    try:
        return dialects.read(operation, body)
    except GatewayError as error:
        raise OperatorError(f"{request}: {error.message}") from error


def explained(settings: Settings, facts: Facts, supposed: Supposed, now_ms: int) -> dict[str, Any]:
    """The whole answer as a document; money in nano-dollars."""
    catalog = settings.catalog
    context = _context(facts, supposed, now_ms)
    rules = _rules_of(settings, facts.model)
    sets: list[dict[str, Any]] = []
    decision: Decision | None = None
    name = facts.model
    while rules is not None and name not in catalog.by_model:
        here = rules.decide(context)
        sets.append(_told(name, rules, context, here))
        decision = here if decision is None else decision.then(here)
        name = here.model
        rules = _rules_of(settings, name) if name else None
    root, would = _rules_of(settings, facts.model), ""
    if root is not None and root.shadow and decision is not None and decision.rule:
        # as `pipeline.route` has it
        would = decision.model or decision.tier.value
        rule, why = f"shadow:{decision.rule}", f"the default; would be {would}"
        decision = Decision(rule, root.default_tier, Caps(), why, model=root.default_model)
    try:
        route = _route(catalog, facts, decision)
    except GatewayError as error:
        raise OperatorError(error.message) from error
    switch = None if would else _switch(settings, catalog, facts, supposed, route, decision, now_ms)
    chosen = route
    if switch is not None and not switch["goes"]:
        home = next(d for d in catalog.deployments if d.name == supposed.home)
        chosen = Route(home.tier, route.rule, route.why, (home,))
    return {
        "operation": facts.operation.value,
        "model": facts.model,
        "context_tokens": context.request.context_tokens,
        "mode": settings.routing.mode.value,
        "rules": sets,
        "tier": chosen.tier.value if chosen.tier else None,
        "rule": route.rule,
        "reason": route.why,
        "candidates": [_candidate(settings, facts, d, now_ms) for d in chosen.candidates],
        "switch": switch,
    }


def _rules_of(settings: Settings, model: str) -> RuleSet | None:
    return settings.routing.rules if model == AUTO else settings.routing.virtual.get(model)


def _context(facts: Facts, supposed: Supposed, now_ms: int) -> RuleContext:
    turns = tail(facts.operation, facts.segments) if len(facts.segments) > 2 else Tail()
    last = turns.turns[-1] if turns.turns else None
    calls = [call for turn in turns.turns for call in turn.calls]
    failing = next((n for n, call in enumerate(reversed(calls)) if not call.failed), len(calls))
    repeats = next(
        (n for n, turn in enumerate(reversed(turns.turns)) if last is None or turn.sign != last.sign),
        len(turns.turns),
    )
    return RuleContext(
        request=RequestFacts(
            facts.model,
            facts.operation.value,
            supposed.client,
            supposed.purpose,
            facts.stream,
            bounds.estimate_input_tokens(facts.size),
            facts.max_output_tokens or 0,
            facts.tool_count,
            facts.last_role,
            facts.has_images,
            facts.reasoning_effort,
            supposed.labels,
        ),
        task=TaskFacts(
            supposed.step,
            budget_used=supposed.budget_used,
            tool_errors=failing if supposed.tool_errors is None else supposed.tool_errors,
            repeats=repeats if supposed.repeats is None else supposed.repeats,
            interactive=supposed.interactive,
            reading=last is not None and only_reads(last.tools),
        ),
        team=OwnerFacts(),
        key=OwnerFacts(),
        time=TimeFacts.at(now_ms),
    )


def _told(name: str, rules: RuleSet, context: RuleContext, decision: Decision) -> dict[str, Any]:
    rows = []
    for rule, verdict in zip(rules.rules, rules.verdicts(context), strict=True):
        rows.append(
            {
                "name": rule.text.name,
                "when": rule.text.when,
                "target": rule.text.target,
                "matched": verdict.matched,
                "decided": rule.text.name == decision.rule,
                "why": verdict.why,
            }
        )
    default = rules.default_model or rules.default_tier.value
    return {"model": name, "rules": rows, "otherwise": default}


def _route(catalog: Catalog, facts: Facts, decision: Decision | None) -> Route:
    pinned = decision is not None and bool(decision.model)
    route = routing.route(
        model=decision.model
        if decision is not None and pinned
        else facts.model
        if decision is None
        else AUTO,
        operation=facts.operation,
        catalog=catalog,
        decision=None if pinned else decision,
        health={},
        may_use=lambda *_: True,
        needs=Needs(bounds.estimate_input_tokens(facts.size)),
        pick=0.0,
        now_s=0.0,
    )
    if decision is None or not pinned:
        return route
    return Route(route.tier, decision.rule, decision.why, route.candidates)


def _switch(
    settings: Settings,
    catalog: Catalog,
    facts: Facts,
    supposed: Supposed,
    route: Route,
    decision: Decision | None,
    now_ms: int,
) -> dict[str, Any] | None:
    """The arithmetic of leaving `home`; None if the request does not leave it, or nobody said where it is."""
    if not supposed.home or decision is None:
        return None
    home = next((d for d in catalog.deployments if d.name == supposed.home), None)
    if home is None:
        raise OperatorError(f"there is no deployment {supposed.home!r}", "`tollhouse check` lists them")
    if any(d.name == home.name for d in route.candidates):
        return None
    target = route.candidates[0]
    here = terms_of(settings.prices, settings.cache_rules, home, now_ms)
    there = terms_of(settings.prices, settings.cache_rules, target, now_ms)
    about: dict[str, Any] = {"from": home.name, "to": target.name}
    if decision.switch.value == "always":
        return {**about, "goes": True, "why": "the rule says `switch: always`", "arithmetic": None}
    if here is None or there is None:
        return {**about, "goes": True, "why": "one of them has no price", "arithmetic": None}
    share, stretch = Habit().beside(Habit())
    pace = Pace(
        bounds.estimate_input_tokens(facts.size),
        _TURN_GROWTH,
        _TURN_OUTPUT,
        _TURN_GAP_S,
        Lengths().remaining(supposed.step),
        share,
        stretch,
    )
    if turn_saving(here, there, pace) <= 0:
        return {
            **about,
            "goes": True,
            "why": "the target costs more: it is wanted for something else",
            "arithmetic": None,
        }
    found = weigh(Side(here, Warm(supposed.warm_tokens, here.life_s)), Side(there), pace, 0.0)
    # What runs like this one have cost is known to the process that serves them, not here.
    choice = Choice(found.pays, Policy.WEIGH, Bills().text, found)
    return {
        **about,
        "goes": choice.goes,
        "policy": choice.policy.value,
        "why": choice.text,
        "arithmetic": _arithmetic(found),
    }


def _arithmetic(found: Arithmetic) -> dict[str, Any]:
    return {
        "turns": round(found.turns, 2),
        "saving_nano_usd": found.saving_nano_usd,
        "later_nano_usd": found.later_nano_usd,
        "going_nano_usd": found.going_nano_usd,
        "return_nano_usd": found.return_nano_usd,
        "net_nano_usd": found.net_nano_usd,
    }


def _candidate(settings: Settings, facts: Facts, d: Deployment, now_ms: int) -> dict[str, Any]:
    row = settings.prices.find(d.price, now_ms)
    output = facts.max_output_tokens or _OUTPUT_TOKENS
    hold = None
    if row is not None:
        hold = prices.ceiling(
            row,
            now_ms,
            input_bound_tokens=bounds.input_bound_tokens(facts.size, facts.message_count, facts.tool_count),
            output_bound_tokens=min(output, d.max_output_tokens or output) * facts.n,
            writes=True,
            writes_1h=facts.long_cache_write,
            service_tier=facts.service_tier,
        )
    return {
        "deployment": d.name,
        "model": d.model,
        "tier": d.tier.value,
        "priority": d.priority,
        "weight": d.weight,
        "context_tokens": d.context_tokens,
        "hold_nano_usd": hold,
    }


def _show(found: dict[str, Any]) -> None:
    say(f"{found['operation']} for {found['model']}, about {found['context_tokens']:,} tokens of input")
    for rules in found["rules"]:
        say(f"rules of {rules['model']}, otherwise {rules['otherwise']}")
        print_table(
            ["rule", "matched", "to", "when", "why"],
            [
                [
                    ("-> " if row["decided"] else "   ") + row["name"],
                    {True: "yes", False: "no", None: "failed"}[row["matched"]],
                    row["target"],
                    " ".join(row["when"].split()),
                    row["why"] if row["why"] != row["when"] else "",
                ]
                for row in rules["rules"]
            ],
        )
    say(f"tier    {found['tier'] or '- (a pinned model)'}")
    say(
        f"rule    {found['rule'] or '-'}{' (mode: shadow, not acted upon)' if found['mode'] == 'shadow' else ''}"
    )
    say(f"reason  {found['reason']}")
    switch = found["switch"]
    if switch is not None:
        verb = "leaves" if switch["goes"] else "stays at"
        say(f"switch  {verb} {switch['from']} (wanted: {switch['to']}): {switch['why']}")
    print_table(
        ["candidate", "model", "tier", "priority>", "weight>", "context>", "hold>"],
        [
            [
                c["deployment"],
                c["model"],
                c["tier"],
                str(c["priority"]),
                str(c["weight"]),
                f"{c['context_tokens']:,}" if c["context_tokens"] else "-",
                dollars(c["hold_nano_usd"]),
            ]
            for c in found["candidates"]
        ],
    )
