"""A migration is safe while the version before it serves: it only adds, it gives way to whoever holds a lock, and what the
older version writes and reads still works.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import asyncpg
import pytest

from gateway.storage import schema
from gateway.storage.database import open_database
from gateway.storage.schema import check, migrate, migrations_directory, render
from tests.conftest import create_database
from tests.storage.worlds import rows, run
from tests.support.servers import PostgresServer

#: Until the first release nobody upgraded; from this revision on everybody may.
SINCE = "0006"
NEWEST = max(path.name[:4] for path in migrations_directory().glob("versions/*.py"))
REVISIONS = [f"{n:04}" for n in range(int(SINCE), int(NEWEST) + 1)]
#: What may be done to a schema that an older version uses. A new column has a default, or may be empty.
ADDS = (
    r"CREATE TABLE \w+",
    r"CREATE (UNIQUE )?INDEX \w+ ON \w+",
    r"ALTER TABLE \w+ ADD COLUMN \w+ \w+( DEFAULT \S+)? NOT NULL",
    r"ALTER TABLE \w+ ADD COLUMN \w+ \w+",
    r"(INSERT INTO|UPDATE) alembic_version",
    # sums that are filled out of others: no row that an older version writes is touched
    r"INSERT INTO (team_hour|miss_hour|refused_hour) ",
)


@pytest.mark.parametrize("revision", REVISIONS[1:])
def test_a_migration_only_adds(revision: str) -> None:
    before = f"{int(revision) - 1:04}"
    for dialect in ("postgresql", "sqlite"):
        for statement in render(dialect, before, revision):
            text = " ".join(statement.split())
            assert any(re.match(pattern, text) for pattern in ADDS), text
            if " ADD COLUMN " in text and "NOT NULL" in text:
                assert " DEFAULT " in text, text


@pytest.fixture(params=["sqlite", "postgres"])
def empty(request: pytest.FixtureRequest, tmp_path: Any) -> str:
    """The URL of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'old.db'}"
    server = request.getfixturevalue("postgres")
    asyncio.run(create_database(server, "upgraded"))
    url: str = server.url("upgraded")
    return url


def test_what_the_older_version_writes_still_works(empty: str) -> None:
    """Rows with only the columns that it knows, in every table that it knows; and it may start."""

    async def both() -> None:
        await migrate(empty, SINCE)
        database = open_database(empty)
        try:
            known = await columns(database)
            await migrate(empty)
            assert await check(database) == NEWEST
            for table, names in known.items():
                if table in ("alembic_version", "revision"):
                    continue
                listed = ", ".join(f'"{name}"' for name, _ in names)
                values = ", ".join(sample(kind) for _, kind in names)
                await run(database, f"INSERT INTO {table} ({listed}) VALUES ({values})")
                assert len(await rows(database, f"SELECT {listed} FROM {table}")) >= 1, table
            await run(database, "UPDATE revision SET number = number + 1")
            await run(database, "UPDATE alembic_version SET version_num = '9999'")
            assert await check(database) == "9999", "a process of this version starts beside a newer schema"
        finally:
            await database.close()

    asyncio.run(both())


async def columns(database: Any) -> dict[str, list[tuple[str, str]]]:
    """By table: name and type of every column."""
    if database.postgres_dsn is None:
        found = await rows(
            database,
            "SELECT m.name, c.name, c.type FROM sqlite_master m, pragma_table_info(m.name) c "
            "WHERE m.type = 'table' ORDER BY 1, c.cid",
        )
    else:
        found = await rows(
            database,
            "SELECT c.table_name, c.column_name, c.data_type FROM information_schema.columns c "
            "WHERE table_schema = 'public' AND table_name NOT LIKE 'ledger!_%' ESCAPE '!' "
            "ORDER BY 1, c.ordinal_position",
        )
    by_table: dict[str, list[tuple[str, str]]] = {}
    for table, name, kind in found:
        by_table.setdefault(table, []).append((name, kind.lower()))
    return by_table


def sample(kind: str) -> str:
    if "bool" in kind:
        return "true"
    if "bytea" in kind or "blob" in kind:
        return "CAST('x' AS bytea)" if kind == "bytea" else "x'00'"
    if "int" in kind:
        return "1790000000000" if kind == "bigint" else "1"
    return "1.5" if kind in ("float", "double precision", "real") else "'x'"


def test_a_migration_gives_way_to_whoever_holds_a_lock(postgres: PostgresServer) -> None:
    asyncio.run(create_database(postgres, "locked"))
    url = postgres.url("locked")

    async def locked() -> None:
        await migrate(url, SINCE)
        holder = await asyncpg.connect(url)
        try:
            reading = holder.transaction()
            await reading.start()
            await holder.execute("LOCK TABLE outbox IN ACCESS SHARE MODE")
            began_s = time.monotonic()
            migrating = asyncio.create_task(migrate(url))
            while not await waits(postgres, "locked"):
                assert not migrating.done()
            # Others come through behind it, because it does not wait for long.
            other = await asyncpg.connect(url)
            await other.fetch("SELECT count(*) FROM outbox", timeout=schema.LOCK_TIMEOUT_MS / 1_000 + 5)
            await other.close()
            assert time.monotonic() - began_s < schema.LOCK_TIMEOUT_MS / 1_000 + 5
            await reading.rollback()
            assert await migrating == NEWEST
        finally:
            await holder.close()

    asyncio.run(locked())


async def waits(server: PostgresServer, name: str) -> bool:
    """Whether somebody waits for a lock there."""
    watcher = await asyncpg.connect(server.url(name))
    try:
        count = await watcher.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted")
        return bool(count)
    finally:
        await watcher.close()
