"""A new configuration for a running gateway: what is swapped, and what has to wait for a restart."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from gateway.core.catalog import Wire
from gateway.settings import ConfigError, Problem, Settings

#: What requests look up anew each time, and so may change between two of them.
LIVE = frozenset({"providers", "catalog", "credentials", "prices", "routing", "cache_rules", "keyless"})
#: Which file it was is no setting.
_IGNORED = frozenset({"file"})

_log = logging.getLogger("gateway")


def renewed(old: Settings, read: Callable[[], Settings]) -> tuple[Settings, tuple[str, ...]]:
    """The settings in force from now on, and the names of changed ones that only a restart takes over.

    Raises `ConfigError` if what is read cannot be used, or not without a restart: then nothing has changed.
    """
    new = read()
    demo = next((p.base_url for p in old.providers.values() if p.wire is Wire.DEMO), "")
    if demo:
        new = new.with_demo_at(demo)
    for provider in new.providers.values():
        if provider.wire is Wire.DEMO and not provider.base_url:
            raise ConfigError(
                [Problem(new.file, 0, "demo", "the demo provider starts with the gateway only")]
            )
    if new.catalog.needs_litellm and not old.catalog.needs_litellm:
        raise ConfigError([Problem(new.file, 0, "providers", "the first litellm provider needs a restart")])
    names = [f.name for f in dataclasses.fields(Settings) if f.name not in _IGNORED]
    changed = [name for name in names if getattr(old, name) != getattr(new, name)]
    live = {name: getattr(new, name) for name in LIVE}
    return dataclasses.replace(old, **live), tuple(name for name in changed if name not in LIVE)


def told(outcome: tuple[str, ...] | ConfigError) -> None:
    """Say in the log what became of a reload."""
    if isinstance(outcome, ConfigError):
        for problem in outcome.problems:
            _log.error("not reloaded: %s", problem)
    elif outcome:
        _log.warning("reloaded; these wait for a restart: %s", ", ".join(outcome))
    else:
        _log.info("reloaded")
