"""The schema's version: start-up refuses any but the newest, `tollhouse migrate` makes it the newest.

Alembic renders a migration to SQL, and the store's own driver runs it as one transaction: so there is one path for
SQLite and Postgres, a migration happens as a whole or not at all, and no second driver is needed. The price:
migrations are SQL only; one that moves rows says so in SQL, and SQLite's `batch_alter_table` needs `copy_from`.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

import gateway
from gateway.core.errors import Unavailable
from gateway.storage.database import Database, open_database
from gateway.storage.transact import Conflict, Fetch, Script, Sql, StoreDown, Tx

_HAS_VERSION = Sql.of(
    postgres="SELECT to_regclass('alembic_version') IS NOT NULL",
    sqlite="SELECT count(*) FROM sqlite_master WHERE name = 'alembic_version'",
)
_VERSION = Sql("SELECT version_num FROM alembic_version")
_ONE_AT_A_TIME = Sql("SELECT pg_advisory_xact_lock(7305511)")


#: How long a migration may take; it builds indexes over what is there.
TIMEOUT_S = 3_600.0
LOCK_TIMEOUT_MS = 3_000
LOCK_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)


class SchemaMismatch(Exception):
    """The database's schema is not the one that this version works with."""

    def __init__(self, found: str | None, wanted: str) -> None:
        self.found = found
        self.wanted = wanted
        super().__init__(
            f"the database's schema is {'missing' if found is None else f'at revision {found}'}, this version needs "
            f"revision {wanted}; run: tollhouse migrate"
        )


async def check(database: Database) -> str:
    """The revision of the schema. Raises `SchemaMismatch` for one that is older than this version, `Unavailable` if the
    store is down. A newer one will do: migrations only add (tests/storage/test_upgrade.py), so a process of this version
    may start beside those of the next, or after it was given up.
    """
    wanted = _scripts().get_current_head() or ""
    found = await database.read(_found)
    if found is None or found < wanted:
        raise SchemaMismatch(found, wanted)
    return found


async def migrate(url: str, target: str = "head") -> str | None:
    """Bring the database at `url` to `target`, up or down: a revision, "head", "base", "+1" or "-1".

    Returns the revision that it is at afterwards (None = empty). Two processes that migrate at once do so one after
    the other. Whoever waits for a table's lock lets everybody behind it wait, so a migration waits for a few seconds
    only, gives way, and tries again. Raises `Unavailable` if that never succeeds or the store is down, alembic's
    `CommandError` for an unknown target.
    """
    database = open_database(url)
    migration = partial(_migrate, database.postgres_dsn is not None, target)
    try:
        for pause_s in (*LOCK_PAUSES_S, None):
            try:
                return await database.writer.run(migration, TIMEOUT_S)
            except Conflict as e:
                if pause_s is None:
                    raise Unavailable(
                        f"others hold locks on tables for too long ({e}); nothing was changed: end long transactions, "
                        "then migrate again"
                    ) from e
                await asyncio.sleep(pause_s)
            except StoreDown as e:
                raise Unavailable(f"the database does not answer: {e}") from e
        raise AssertionError("not reached")
    finally:
        await database.close()


def _migrate(postgres: bool, target: str) -> Tx[str | None]:
    if postgres:
        yield Fetch(_ONE_AT_A_TIME)
        yield Script([f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_MS}ms'"])
    found = yield from _found()
    statements = render("postgresql" if postgres else "sqlite", found, target)
    if statements:
        # Alembic leaves its own table behind at "base", and makes it anew from there.
        yield Script([*(["DROP TABLE IF EXISTS alembic_version"] if found is None else []), *statements])
    return (yield from _found())


def _found() -> Tx[str | None]:
    if not (yield Fetch(_HAS_VERSION))[0][0]:
        return None
    rows = yield Fetch(_VERSION)
    return rows[0][0] if rows else None


def render(dialect: str, found: str | None, target: str) -> list[str]:
    """The statements that bring a schema from `found` (None = empty) to `target`."""
    config = Config()
    config.set_main_option("script_location", str(migrations_directory()).replace("%", "%%"))
    statements = _Statements()
    config.attributes.update(dialect=dialect, statements=statements)
    here = found or "base"
    wanted = _resolve(found, target)
    if wanted == here:
        return []
    run = command.downgrade if _is_older(wanted, found) else command.upgrade
    run(config, f"{here}:{wanted}", sql=True)
    return statements


class _Statements(list[str]):
    """What Alembic takes for the file that it writes to: each statement comes in one piece."""

    def write(self, text: str) -> None:
        if text.strip() and not text.startswith("--"):
            self.append(text.strip())

    def flush(self) -> None: ...


def _resolve(found: str | None, target: str) -> str:
    """`target` as a revision or "base"; relative ones are counted along the only line there is."""
    line = ["base", *reversed([script.revision for script in _scripts().walk_revisions()])]
    if target == "head":
        return line[-1]
    if target[:1] in ("+", "-"):
        index = line.index(found or "base") + int(target)
        return line[max(0, min(index, len(line) - 1))]
    if target == "base":
        return target
    script: Any = _scripts().get_revision(target)
    return str(script.revision)


def _is_older(target: str, found: str | None) -> bool:
    if target == "base" or found is None:
        return target == "base"
    return target in [script.revision for script in _scripts().iterate_revisions(found, "base")]


def _scripts() -> ScriptDirectory:
    return ScriptDirectory(str(migrations_directory()))


def migrations_directory() -> Path:
    """Inside the installed package, or beside it in a checkout."""
    package = Path(gateway.__file__).parent
    shipped = package / "_shipped" / "migrations"
    return shipped if shipped.is_dir() else package.parent / "migrations"
