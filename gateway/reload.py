"""A new configuration for a running gateway: what is swapped, and what has to wait for a restart."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from gateway.admin.ports import Finding, Reloaded
from gateway.core.catalog import Wire
from gateway.settings import ConfigError, Problem, Settings

#: What requests look up anew each time, and so may change between two of them.
LIVE = frozenset(
    {
        *("providers", "catalog", "credentials", "prices", "routing", "cache_rules", "keyless", "places"),
        "overlaid",
    }
)
#: Which file it was is no setting.
_IGNORED = frozenset({"file"})

_log = logging.getLogger("gateway")


def demo_url(settings: Settings) -> str:
    """Where the demo provider listens, "" if there is none."""
    return next((p.base_url for p in settings.providers.values() if p.wire is Wire.DEMO), "")


def renewed(old: Settings, read: Callable[[], Settings], demo: str) -> tuple[Settings, tuple[str, ...]]:
    """The settings in force from now on, and the names of changed ones that only a restart takes over. `demo`: where the
    demo provider listens that was started, whether it is in use now or not.

    Raises `ConfigError` if what is read cannot be used, or not without a restart: then nothing has changed.
    """
    new = read()
    if demo:
        new = new.with_demo_at(demo)
    for provider in new.providers.values():
        if provider.wire is Wire.DEMO and not provider.base_url:
            raise ConfigError(
                [Problem(new.file, 0, "demo", "the demo provider starts with the gateway only")]
            )
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


class Reload:
    """A reload that is asked for over the admin API. `siblings` has the other processes of this gateway do the same."""

    def __init__(
        self,
        reread: Callable[[], tuple[str, ...]] | None,
        siblings: Callable[[], None],
    ) -> None:
        self._reread = reread
        self._siblings = siblings

    def __call__(self) -> Reloaded | None:
        """What became of it; None if this gateway was not started from a file."""
        if self._reread is None:
            return None
        try:
            waiting = self._reread()
        except ConfigError as error:
            told(error)
            return Reloaded((), tuple(found(problem) for problem in error.problems))
        told(waiting)
        self._siblings()
        return Reloaded(waiting)


def found(problem: Problem) -> Finding:
    return Finding(problem.file, problem.line, problem.column, problem.key, problem.message, problem.hint)
