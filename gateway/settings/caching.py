"""The section `caching`: which level of prompt shaping holds for whom, and which transforms are switched off."""

from __future__ import annotations

from collections.abc import Collection

from gateway.core.shaping import CachingPolicy, Level, Transform
from gateway.core.trimming import TrimPolicy
from gateway.settings.section import Section

_KEEP_CHARS = TrimPolicy().keep_chars
#: A transform is switched off whatever its version.
_NAMES = {transform.value.partition("@")[0]: transform for transform in Transform}


def read_caching(section: Section, teams: Collection[str], deployments: Collection[str]) -> CachingPolicy:
    """The policy; what names a team or a deployment that there is not is a problem at its line."""
    policy = CachingPolicy(
        level=section.choice("level", Level, Level.SAFE),
        keys=_levels(section.section("keys"), None, ""),
        teams=_levels(section.section("teams"), teams, "there is no team"),
        deployments=_levels(section.section("deployments"), deployments, "there is no deployment"),
        off=frozenset(_off(section)),
        trim=_trim(section),
        diagnostics=section.flag("vendor_diagnostics", False),
    )
    section.done()
    return policy


def _levels(section: Section, known: Collection[str] | None, missing: str) -> dict[str, Level]:
    found = {}
    for name in section.names:
        found[name] = section.choice(name, Level, Level.SAFE)
        if known is not None and name not in known:
            section.wrong(name, f"{missing} {name!r}")
    return found


def _trim(section: Section) -> TrimPolicy:
    over = section.integer("trim_over_chars", 0, 0, 1_000_000_000)
    keep = section.integer("trim_keep_chars", min(_KEEP_CHARS, over or _KEEP_CHARS), 0, 1_000_000_000)
    try:
        return TrimPolicy(over, keep)
    except ValueError:
        section.wrong("trim_keep_chars", f"must be from 100 to trim_over_chars ({over}), not {keep}")
        return TrimPolicy()


def _off(section: Section) -> list[Transform]:
    found = []
    for word in section.texts("off"):
        if word in _NAMES:
            found.append(_NAMES[word])
        else:
            section.wrong("off", f"there is no transform {word!r}", f"one of {', '.join(_NAMES)}")
    return found
