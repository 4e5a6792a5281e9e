"""The `breakers:` table: by name a mode, or some of a breaker's numbers."""

from __future__ import annotations

from dataclasses import fields

from gateway.core.breakers import BreakerPolicy, Mode
from gateway.settings.section import Section

_MOST = 1_000_000_000


def read_breakers(section: Section) -> BreakerPolicy:
    """The default policy with what was written; each breaker that means nothing is a problem at its line."""
    policy = BreakerPolicy()
    for field in fields(policy):
        written = _written(section, field.name, getattr(policy, field.name))
        try:
            policy = policy.changed({field.name: written})
        except ValueError as error:
            section.wrong(field.name, str(error).removeprefix(f"{field.name}: "))
    section.done()
    return policy


def _written(section: Section, name: str, part: object) -> dict[str, object]:
    if section.is_single(name) and hasattr(part, "mode"):
        return {"mode": section.choice(name, Mode, Mode.OFF)}
    table = section.section(name)
    found: dict[str, object] = {}
    for field in fields(part):  # type: ignore[arg-type]
        # Dollars are written as dollars everywhere in the file.
        key = field.name.replace("nano_usd", "usd")
        value = _value(table, key, field.name, getattr(part, field.name))
        if key in table and value is not None:
            found[field.name] = value
    table.done()
    return found


def _value(table: Section, key: str, name: str, default: object) -> object:
    match default:
        case Mode():
            return table.optional_choice(key, Mode)
        case frozenset():
            return table.texts(key)
        case float():
            return table.number(key, default, 0, _MOST)
        case _ if "nano_usd" in name:
            return table.nano_usd(key)
    return table.optional_integer(key, 0, _MOST)
