"""`rules:` and `virtual_models:`: rules as written become compiled sets, every mistake with its place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.core.catalog import Catalog, Tier
from gateway.core.protection import PRIORITY_MAX
from gateway.core.routing import AUTO
from gateway.core.rules import Caps, RuleError, RuleSet, RuleText, Switch
from gateway.core.serving import Urgency
from gateway.settings.model import Mode, Problem, Routing
from gateway.settings.section import Section
from gateway.settings.yaml_marks import parse, plain

_MOST_TOKENS = 1_000_000_000
_TIERS = frozenset(Tier)
#: Each is compiled together with those before it.
CHECKED_MAX = 100


def check_rules(text: str, catalog: Catalog) -> tuple[Routing, list[Problem]]:
    """`mode`, `rules` and `virtual_models` as they would stand in the configuration, tried out on a catalog. The
    environment does not reach in, so that nobody reads it this way.
    """
    problems: list[Problem] = []
    too_much = plain(text)
    if too_much:
        return Routing(), [Problem("rules", 0, "", too_much)]
    root = Section(parse(text, "rules", {}, problems), "", "rules", problems)
    count = sum(
        1
        for part in (root, *(e for _, e in root.section("virtual_models").named()))
        for _ in part.sections("rules")
    )
    if count > CHECKED_MAX:
        return Routing(), [Problem("rules", 0, "rules", f"{count} are more than {CHECKED_MAX}")]
    routing = read_routing(root, catalog)
    root.done()
    if not root.names and not problems:
        problems.append(Problem("rules", 0, "rules", "there are none"))
    return routing, sorted(dict.fromkeys(problems), key=lambda p: (p.line, p.column))


def read_routing(root: Section, catalog: Catalog) -> Routing:
    """The rules of "auto", and those of each virtual model."""
    root = root.exact()
    mode = root.choice("mode", Mode, Mode.ACTIVE)
    virtual = root.section("virtual_models")
    names = frozenset(virtual.names)
    shadow = mode is Mode.SHADOW
    rules = RuleSet.compile(_rules(root, catalog, names), catalog.default_tier, shadow=shadow)
    found = {name: _virtual(name, entry, catalog, names, shadow) for name, entry in virtual.named()}
    _refuse_cycles(virtual, found)
    return Routing(mode, rules, found)


def _virtual(name: str, entry: Section, catalog: Catalog, virtual: frozenset[str], shadow: bool) -> RuleSet:
    if name == AUTO or name in _TIERS or name in catalog.by_model:
        what = "a model" if name in catalog.by_model else "one of the gateway's own names"
        entry.wrong("", f"{name!r} is {what} already")
    otherwise = entry.text("otherwise", catalog.default_tier.value)
    _refuse_unknown(entry, "otherwise", otherwise, catalog, virtual)
    rules = _rules(entry, catalog, virtual)
    entry.done()
    tier = Tier(otherwise) if otherwise in _TIERS else catalog.default_tier
    return RuleSet.compile(rules, tier, "" if otherwise in _TIERS else otherwise, shadow=shadow)


def _rules(section: Section, catalog: Catalog, virtual: frozenset[str]) -> list[RuleText]:
    """Those that can work; each problem is reported where it stands."""
    rules: list[RuleText] = []
    for item in section.sections("rules"):
        optional = item.flag("optional", False)
        if optional and item.text("tier") in _TIERS - catalog.by_tier.keys():
            continue  # there is nothing that it could lead to
        rule = _rule(item, catalog, virtual)
        if any(rule.name == before.name for before in rules):
            item.wrong("name", "another rule has the same name")
            continue
        # Alone, for its own faults, and after the sound ones before it, for what only the order makes wrong.
        for together in ([rule], [*rules, rule]):
            try:
                RuleSet.compile(together)
            except RuleError as error:
                if error.offset is not None and "when" in item:
                    item.wrong_at("when", error.offset, error.message)
                else:
                    item.wrong("when" if "when" in item else "", error.message)
                break
        else:
            rules.append(rule)
    return rules


def _rule(item: Section, catalog: Catalog, virtual: frozenset[str]) -> RuleText:
    tier, model = item.optional_choice("tier", Tier), item.text("model")
    if "tier" in item and "model" in item:
        item.wrong("model", "a rule leads to a tier or to a model, not to both")
    elif model:
        _refuse_unknown(item, "model", model, catalog, virtual)
    elif "tier" not in item:
        item.wrong("tier", "is required", f"one of {', '.join(Tier)}")
    elif tier and tier not in catalog.by_tier:
        item.wrong("tier", f"no deployment is in tier {tier}", f"give one of them `tier: {tier}`")
    for key in ("reasoning_effort", "service_tier"):
        if not (item.text(key) or "a").replace("_", "a").replace("-", "a").isalnum():
            item.wrong(key, "must be one word")
    caps = Caps(
        item.optional_integer("max_output_tokens", 1, _MOST_TOKENS),
        item.text("reasoning_effort") or None,
        item.text("service_tier") or None,
        item.optional_choice("urgency", Urgency),
        item.optional_integer("priority", -PRIORITY_MAX, PRIORITY_MAX),
    )
    rule = RuleText(
        item.required("name"),
        item.text("when", "true"),
        tier or Tier.STANDARD,
        caps,
        item.text("why"),
        item.choice("switch", Switch, Switch.PAYS),
        model,
    )
    item.done()
    return rule


def _refuse_unknown(
    section: Section, key: str, target: str, catalog: Catalog, virtual: frozenset[str]
) -> None:
    if target in _TIERS:
        if Tier(target) not in catalog.by_tier:
            section.wrong(key, f"no deployment is in tier {target}", f"give one of them `tier: {target}`")
    elif target not in catalog.by_model and target not in virtual:
        section.wrong(key, f"there is no model {target!r}", "`tollhouse check` of a sound file lists them")


def _refuse_cycles(section: Section, virtual: Mapping[str, RuleSet]) -> None:
    """A virtual model that leads back to itself would never arrive."""
    told: set[frozenset[str]] = set()
    for name in virtual:
        way = _way_back(name, virtual)
        if way and frozenset(way) not in told:
            told.add(frozenset(way))
            section.wrong(name, f"leads back to itself: {' -> '.join((*way, name))}")


def _way_back(start: str, virtual: Mapping[str, RuleSet]) -> tuple[str, ...]:
    """The virtual models on a way from `start` back to it; () if there is none."""
    seen: set[str] = set()
    ways: list[tuple[str, ...]] = [(start,)]
    while ways:
        way = ways.pop()
        for target in _targets(virtual[way[-1]]):
            if target == start:
                return way
            if target in virtual and target not in seen:
                seen.add(target)
                ways.append((*way, target))
    return ()


def _targets(rules: RuleSet) -> Iterable[str]:
    return (*(rule.text.model for rule in rules.rules), rules.default_model)
