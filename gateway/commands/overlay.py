"""What was written over the admin API, beside what files say: for commands that show what is in force, and as YAML."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway import settings as config
from gateway.commands.database import at_desk
from gateway.commands.findings import Finding, State
from gateway.commands.opening import config_errors_told
from gateway.commands.output import complain, say
from gateway.core.config_overlay import DEFAULT_ORDER, Documents, Kind, Stored, exported, of_kind, title
from gateway.core.errors import Unavailable
from gateway.settings import ConfigError, Settings
from gateway.storage import documents, schema
from gateway.storage.database import open_database

_HEADER = """\
# What was written over the admin API. Merge it into the configuration, reload, and delete it there
# (DELETE /admin/v1/rules/NAME ...): what a file declares goes before what the API says.
"""


@dataclass(frozen=True, slots=True)
class InForce:
    """The settings with the overlay. `unread`: why it could not be had, "" if it could; then these are those of the files."""

    settings: Settings
    unread: str = ""


def load_in_force(path: Path | None) -> InForce:
    """Raises `ConfigError`."""
    env = config.environment()
    files = config.load(path, env)
    found, unread = asyncio.run(_stored(files))
    return InForce(config.load(path, env, found) if found else files, unread)


def settings_in_force(path: Path | None) -> Settings:
    """The same; what is missing is complained about, problems are the operator's."""
    with config_errors_told():
        found = load_in_force(path)
    if found.unread:
        complain(f"only what the files say: {found.unread}")
    return found.settings


async def _stored(settings: Settings) -> tuple[Documents, str]:
    database = open_database(settings.database_url)
    try:
        if database.sqlite_path is not None and not database.sqlite_path.exists():
            return (), ""
        await schema.check(database)
        return (await database.read(documents.stored)).documents, ""
    except (schema.SchemaMismatch, Unavailable) as error:
        return (), str(error)
    finally:
        await database.close()


def summary(found: InForce) -> dict[str, Any]:
    """For `--json`."""
    overlaid = found.settings.overlaid
    return {
        "documents": [{"kind": d.kind, "name": d.name, "version": d.version} for d in overlaid.documents],
        "shadowed": {
            title(key): f"{place.file}:{place.line}" for key, place in sorted(overlaid.shadowed.items())
        },
        "unread": found.unread,
    }


def print_summary(found: InForce) -> None:
    overlaid = found.settings.overlaid
    for document in overlaid.documents:
        place = overlaid.shadowed.get(document.key)
        declared = f"; does nothing, for {place.file}:{place.line} declares it" if place is not None else ""
        say(f"{document.title}: admin API, version {document.version}{declared}")
    if found.unread:
        complain(f"only what the files say: {found.unread}")


async def examine(path: Path | None, files: Settings) -> tuple[Settings, list[Finding]]:
    """For doctor: the settings in force, as far as they can be, and what is to be said of the overlay."""
    found, unread = await _stored(files)
    if unread or not found:
        return files, []  # what is wrong with the database is said elsewhere
    count = f"{len(found)} resource{'' if len(found) == 1 else 's'}"
    try:
        settings = config.load(path, config.environment(), found)
    except ConfigError as error:
        to_do = "mend it here, or delete it over the admin API; until then a gateway here keeps what it has"
        return files, [Finding("admin API", State.FAIL, str(problem), to_do) for problem in error.problems]
    shadowed = [
        Finding(
            "admin API",
            State.WARN,
            f"{title(key)} does nothing, for {place.file}:{place.line} declares it",
            "delete it over the admin API",
        )
        for key, place in settings.overlaid.shadowed.items()
    ]
    return settings, [Finding("admin API", State.OK, f"{count} written there can be used here"), *shadowed]


def export(path: Path | None) -> int:
    """As YAML, to be moved into a file."""

    async def act(desk: Any) -> Stored:
        stored: Stored = await desk.database.read(documents.stored)
        return stored

    found = at_desk(path, act).documents
    if not found:
        complain("nothing was written over the admin API")
        return 0
    before = [d.name for d in of_kind(found, Kind.RULE) if d.body.get("order", DEFAULT_ORDER) < 0]
    print(
        _HEADER + (f"# These rules go before the file's own: {', '.join(before)}\n" if before else ""), end=""
    )
    print(config.written(exported(found)), end="")
    return 0
