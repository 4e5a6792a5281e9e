"""`cache_rules` of config/providers.yaml: every row is refused, by file, line and key, that is expired or wrong."""

from __future__ import annotations

from datetime import date
from decimal import Decimal, InvalidOperation

from gateway.core.cache_rules import (
    Alias,
    CacheRule,
    CacheRules,
    Contested,
    KeyMeans,
    Life,
    LookbackUnit,
    Mark,
    RuleFault,
    Style,
    covering,
)
from gateway.core.catalog import Operation
from gateway.settings.section import Section

_MOST_TOKENS = 10_000_000
_LONGEST_S = 30 * 86_400


def read_cache_rules(root: Section, today: date) -> CacheRules:
    """All rows that are sound; what is wrong with the others is among the section's problems."""
    rows: tuple[CacheRule | Alias, ...] = ()
    lines: dict[tuple[str, ...], int] = {}
    aliases: list[tuple[Section, Alias]] = []
    for item in root.sections("cache_rules"):
        row = _alias(item, today) if "same_as" in item else _rule(item, today)
        item.done()
        if row is None:
            continue
        shadow = covering(rows, row)
        if shadow is not None:
            item.wrong(
                "models",
                f"can never match: line {lines[shadow.models]} names these models already",
                "the first row that matches holds, so put the narrower one first",
            )
        rows = (*rows, row)
        lines[row.models] = item.line
        if isinstance(row, Alias):
            aliases.append((item, row))
    known = {pattern.split("/", 1)[0] for row in rows if isinstance(row, CacheRule) for pattern in row.models}
    for item, row in aliases:
        if row.same_as not in known:
            item.wrong("same_as", f"there are no cache rules of {row.same_as!r}")
    return CacheRules(rows)


def _alias(item: Section, today: date) -> Alias | None:
    models, source, checked_on = _origin(item, today)
    item.choice("mark", Mark, Mark.OWN)
    same_as = item.required("same_as")
    return Alias(models, same_as, source, checked_on) if models and checked_on else None


def _origin(item: Section, today: date) -> tuple[tuple[str, ...], str, date | None]:
    """What every row must say: which models, who says so, and when it was looked at."""
    models = item.texts("models")
    if not models:
        item.wrong("models", "is required", 'for example ["openai/gpt-6-*"]')
    for pattern in models:
        if "/" not in pattern:
            item.wrong("models", f"must be provider/model, not {pattern!r}")
    checked_on = _day(item, "checked_on")
    if "checked_on" not in item:
        item.wrong("checked_on", "is required", "the day on which the source was looked at")
    elif checked_on and checked_on > today:
        item.wrong("checked_on", f"is in the future: {checked_on}")
    return models, item.required("source", "who says so"), checked_on


def _rule(item: Section, today: date) -> CacheRule | None:
    models, source, checked_on = _origin(item, today)
    lookup = item.section("explicit_lookup")
    explicit_first, explicit_latest = (lookup.optional_integer(k, 0, 10_000) for k in ("first", "latest"))
    lookup.done()
    if "style" not in item:
        item.wrong("style", "is required", f"one of {', '.join(Style)}, or same_as")
    until = _day(item, "valid_until")
    if until is not None and until < today:
        item.wrong("valid_until", f"this row expired on {until}", "look the facts up again, or remove it")
    try:
        rule = CacheRule(
            models=models,
            style=item.choice("style", Style, Style.IMPLICIT),
            source=source,
            checked_on=checked_on or today,
            mark=item.choice("mark", Mark, Mark.OWN),
            min_prefix_tokens=item.optional_integer("min_prefix_tokens", 1, _MOST_TOKENS),
            granularity_tokens=item.optional_integer("granularity_tokens", 1, _MOST_TOKENS),
            max_breakpoints=item.optional_integer("max_breakpoints", 1, 100),
            implicit_breakpoints=item.integer("implicit_breakpoints", 0, 0, 100),
            lookback=item.optional_integer("lookback", 1, 10_000),
            lookback_unit=item.optional_choice("lookback_unit", LookbackUnit),
            explicit_first=explicit_first,
            explicit_latest=explicit_latest,
            lives=tuple(life for section in item.sections("ttls") if (life := _life(section))),
            read_milli=_milli(item, "read"),
            markers=_markers(item),
            key=item.text("key"),
            key_header=item.text("key_header"),
            key_means=item.optional_choice("key_means", KeyMeans),
            isolation=item.text("isolation"),
            billing_header=item.flag("billing_header", False),
            mid_conversation_system=_optional_flag(item, "mid_conversation_system"),
            mid_conversation_tools=_optional_flag(item, "mid_conversation_tools"),
            valid_from=_day(item, "valid_from"),
            valid_until=until,
            contested=tuple(c for section in item.sections("contested") if (c := _contested(section))),
        )
    except RuleFault as fault:
        item.wrong(fault.field, str(fault))
        return None
    return rule if models else None


def _life(section: Section) -> Life | None:
    name = section.required("name")
    life_s = section.optional_integer("life_s", 1, _LONGEST_S)
    refreshed = section.flag("refreshed", False)
    write = _milli(section, "write")
    surface = section.optional_choice("surface", Operation)
    section.done()
    if write is None:
        if "write" not in section:
            section.wrong("write", "is required", 'price of a write, times input: "1.25"')
        return None
    try:
        return Life(name, life_s, refreshed, write, surface)
    except RuleFault as fault:
        section.wrong("write" if "write" in str(fault) else "life_s", str(fault))
        return None


def _markers(item: Section) -> dict[Operation, str]:
    section = item.section("markers")
    found: dict[Operation, str] = {}
    for name in section.names:
        marker = section.text(name)
        try:
            found[Operation(name)] = marker
        except ValueError:
            section.wrong(name, f"is none of {', '.join(Operation)}")
    return found


def _contested(section: Section) -> Contested | None:
    checked_on = _day(section, "checked_on")
    name, source = section.required("field"), section.required("source")
    value, models = section.text("value"), section.text("models")
    section.done()
    first = name.partition(".")[0]
    if first not in ("explicit_lookup", "ttls", "read") and first not in CacheRule.__dataclass_fields__:
        section.wrong("field", f"a rule has no {name!r}")
        return None
    if checked_on is None:
        section.wrong("checked_on", "is required")
        return None
    return Contested(name, value or None, source, checked_on, models)


def _milli(section: Section, key: str) -> int | None:
    """A multiplier in thousandths. Text, so that it never passes through a float."""
    if key not in section:
        return None
    text = section.text(key)
    try:
        exact = Decimal(text) * 1_000
        if exact.is_finite() and exact == int(exact) and 0 <= exact <= 100_000:
            return int(exact)
    except InvalidOperation:
        pass
    section.wrong(key, f"must be a multiple of the input price with at most 3 decimals, not {text!r}")
    return None


def _day(section: Section, key: str) -> date | None:
    if key not in section:
        return None
    text = section.text(key)
    try:
        return date.fromisoformat(text)
    except ValueError:
        section.wrong(key, f"must be a day, not {text!r}", "for example 2026-11-30")
        return None


def _optional_flag(section: Section, key: str) -> bool | None:
    return section.flag(key, False) if key in section else None
