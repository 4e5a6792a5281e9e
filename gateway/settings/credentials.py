"""`credentials:`: secrets for providers that have a name of their own, each out of the environment or a mounted file.

What the admin API names is held in a narrower field: whoever may write a provider there could otherwise have any
variable of the gateway, or any file of its machine, sent to an address of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from gateway.settings.model import Secret
from gateway.settings.section import Section

#: Variables that credentials of the admin API may name, if the configuration does not say others.
ENV_PATTERNS = ("*_API_KEY", "*_API_TOKEN")
#: The gateway's own secrets are never a provider's.
_OWN = "TOLLHOUSE_*"
_BYTES_MAX = 65_536


@dataclass(frozen=True, slots=True)
class Sources:
    """Where credentials of the admin API may come from; no folder = from no file."""

    env: tuple[str, ...] = ENV_PATTERNS
    folder: Path | None = None


def read_sources(section: Section) -> Sources:
    """`admin_credentials:`"""
    patterns = section.texts("env") if "env" in section else ENV_PATTERNS
    folder = section.text("files")
    section.done()
    return Sources(patterns, Path(folder) if folder else None)


def read_credentials(section: Section, sources: Sources, env: Mapping[str, str]) -> dict[str, Secret]:
    """Each by its name; one that cannot be had is a problem."""
    found = {}
    for name, entry in section.named():
        secret = _secret(entry, env, None if entry.node.origin is None else sources)
        entry.done()
        found[name] = Secret(secret)
    return found


def _secret(entry: Section, env: Mapping[str, str], within: Sources | None) -> str:
    """`within`: where it may come from; None = anywhere."""
    given = [key for key in ("key", "env", "file") if key in entry]
    if entry.unresolved("key"):
        return ""
    if len(given) != 1:
        message = f"says {' and '.join(given)}" if given else "does not say where the secret is"
        entry.wrong("", message, "give one of `env` and `file`")
        return ""
    match given[0]:
        case "env":
            return _of_variable(entry, entry.text("env"), env, within)
        case "file":
            return _of_file(entry, Path(entry.text("file")), within)
        case _:
            if within is not None:
                entry.wrong(
                    "key", "secrets are not kept here", "name a variable as `env` or a file as `file`"
                )
            return entry.text("key")


def _of_variable(entry: Section, name: str, env: Mapping[str, str], within: Sources | None) -> str:
    if within is not None and (
        fnmatchcase(name, _OWN) or not any(fnmatchcase(name, pattern) for pattern in within.env)
    ):
        patterns = ", ".join(within.env) or "none"
        entry.wrong(
            "env",
            f"{name} may not be named here; allowed: {patterns}",
            "see `admin_credentials:` in the file",
        )
        return ""
    value = env.get(name, "").strip()
    if not value:
        entry.wrong("env", f"the environment variable {name} is not set", "set it where the gateway runs")
    return value


def _of_file(entry: Section, path: Path, within: Sources | None) -> str:
    if within is not None:
        if within.folder is None:
            hint = "set `admin_credentials: {files: /run/secrets/tollhouse}` in the file"
            entry.wrong("file", "no folder of secrets is configured", hint)
            return ""
        # Where it leads to counts, not what it is called.
        path = (within.folder / path).resolve()
        if not path.is_relative_to(within.folder.resolve()):
            entry.wrong("file", f"must be below {within.folder}")
            return ""
    try:
        with path.open("rb") as file:
            raw = file.read(_BYTES_MAX + 1)
        value = raw.decode("utf-8").strip()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is no text"
        entry.wrong("file", f"{path} cannot be read: {why}")
        return ""
    if not value or len(raw) > _BYTES_MAX:
        entry.wrong("file", f"{path} {'is larger than a secret is' if value else 'is empty'}")
    return value
