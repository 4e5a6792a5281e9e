"""Migrations: up, down and up again, on both stores; and they build what the code's tables say."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy.dialects.postgresql.base import PGDialect
from sqlalchemy.dialects.sqlite.base import SQLiteDialect
from sqlalchemy.engine import Dialect
from sqlalchemy.schema import CreateIndex, CreateTable

from gateway.core.entry import Granted
from gateway.core.ids import ms_of
from gateway.storage import reports, schema
from gateway.storage.database import Database, open_database
from gateway.storage.lockfile import AlreadyServing, ServingLock
from gateway.storage.partitions import ensure_partitions, months
from gateway.storage.schema import SchemaMismatch, check, migrate, migrations_directory
from gateway.storage.tables import metadata
from gateway.storage.transact import Script, Tx
from tests.conftest import create_database
from tests.storage.worlds import NOON_MS, attempt, opened, outcome, reserve, rows, run
from tests.support.servers import PostgresServer

NEWEST = max(path.name[:4] for path in migrations_directory().glob("versions/*.py"))

_COLUMNS = {
    "sqlite": 'SELECT m.name, c.name, c.type, c."notnull", c.dflt_value, c.pk FROM sqlite_master m, '
    "pragma_table_info(m.name) c WHERE m.type = 'table' AND m.name <> 'alembic_version' ORDER BY 1, 2",
    "postgres": "SELECT c.table_name, column_name, data_type, is_nullable, column_default "
    "FROM information_schema.columns c WHERE table_schema = 'public' AND table_name <> 'alembic_version' "
    "AND table_name NOT LIKE 'ledger!_%' ESCAPE '!' ORDER BY 1, 2",
}
_REST = {
    "sqlite": "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL ORDER BY 1",
    "postgres": "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' "
    "AND tablename <> 'alembic_version' AND tablename NOT LIKE 'ledger!_%' ESCAPE '!' "
    "UNION ALL SELECT conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE contype = 'c' "
    "AND conname LIKE 'ck!_%' ESCAPE '!' UNION ALL SELECT relname, pg_get_partkeydef(oid) FROM pg_class "
    "WHERE relkind = 'p' ORDER BY 1",
}


async def catalog(url: str, kind: str) -> tuple[list[Any], list[Any]]:
    database = open_database(url)
    try:
        return await rows(database, _COLUMNS[kind]), await rows(database, _REST[kind])
    finally:
        await database.close()


async def build_from_tables(url: str, kind: str) -> None:
    dialect: Dialect = PGDialect() if kind == "postgres" else SQLiteDialect()  # type: ignore[no-untyped-call]
    elements = [CreateTable(t) for t in metadata.sorted_tables]
    statements = [str(e.compile(dialect=dialect)) for e in elements]
    statements += [
        str(CreateIndex(i).compile(dialect=dialect)) for t in metadata.sorted_tables for i in t.indexes
    ]

    def tx() -> Tx[None]:
        yield Script(statements)

    database = open_database(url)
    await database.write(tx)
    await database.close()


@pytest.fixture(params=["sqlite", "postgres"])
def two_empty(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str, str]:
    """A kind of store, and the URLs of two empty ones. Not async: the cluster of the session starts its own loop."""
    if request.param == "sqlite":
        return "sqlite", f"sqlite:///{tmp_path}/migrated.db", f"sqlite:///{tmp_path}/declared.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    for name in ("from_migrations", "from_tables"):
        asyncio.run(create_database(server, name))
    return "postgres", server.url("from_migrations"), server.url("from_tables")


async def test_the_migrations_build_the_tables_of_the_code(two_empty: tuple[str, str, str]) -> None:
    kind, migrated, declared = two_empty
    assert await migrate(migrated) == NEWEST
    await build_from_tables(declared, kind)

    assert await catalog(migrated, kind) == await catalog(declared, kind)


async def test_up_down_and_up_again(store: str) -> None:
    kind = "sqlite" if store.startswith("sqlite") else "postgres"
    first = await catalog(store, kind)
    assert len(first[0]) > 100

    assert await migrate(store, "base") is None
    assert await catalog(store, kind) == ([], [])
    assert set(await asyncio.gather(migrate(store), migrate(store, "head"))) == {NEWEST}
    assert await catalog(store, kind) == first
    assert await migrate(store, "0001") == "0001"
    assert await migrate(store, "+1") == "0002"
    assert await migrate(store, "+1") == "0003"
    assert await migrate(store, "-1") == "0002"
    assert await migrate(store, NEWEST) == NEWEST
    assert await catalog(store, kind) == first
    assert await migrate(store, "base") is None


async def test_budgets_and_open_holds_of_the_first_schema_go_on(store: str, tmp_path: Path) -> None:
    await migrate(store, "0001")
    database = open_database(store)
    a = attempt()
    await run(database, "INSERT INTO tenant VALUES ('default', 'default', 0)")
    await run(
        database,
        'INSERT INTO budget (budget_id, scope, "window", zone, window_start_ms, window_end_ms, limit_nano_usd, '
        "posted_nano_usd, held_nano_usd, on_exceed, epoch, created_at_ms) VALUES ('bud_1', 'team:default', 'lifetime', 'UTC', 0, NULL, 1000, 70, 400, 'error', 0, 0)",
    )
    await run(
        database,
        "INSERT INTO hold (attempt_id, replica_id, replica_epoch, amount_nano_usd, budgets, state, step, "
        "remaining_nano_usd, remaining_scope, created_at_ms, attempt) VALUES ($1, 'r1', 1, 400, '[[\"bud_1\",0]]', 'held', 2, 530, 'team:default', 0, $2)",
        a.attempt_id,
        msgspec.json.encode(a).decode(),
    )
    await run(database, "INSERT INTO replica VALUES ('r1', 0, 0, 0)")
    await database.close()
    await migrate(store)

    async with opened(store, tmp_path) as (ledger, database, accounts):
        if store.startswith("postgres"):  # on SQLite the next start has charged the hold at its bound
            assert await reserve(ledger, a, 400) == Granted(400, 530, "team:default", 2)
        assert str(await ledger.settle(a, outcome(60))) in ("settled", "corrected")
        (budget,) = await accounts.list_budgets()
        assert (budget.unit, budget.limit, budget.posted, budget.held) == ("usd", 1_000, 130, 0)


async def test_a_schema_that_is_not_the_newest_is_refused_with_what_to_do(database: Database) -> None:
    await check(database)
    await run(database, "UPDATE alembic_version SET version_num = '0000'")
    with pytest.raises(
        SchemaMismatch, match=rf"at revision 0000.*needs revision {NEWEST}; run: tollhouse migrate"
    ):
        await check(database)
    await run(database, "DROP TABLE alembic_version")
    with pytest.raises(SchemaMismatch, match=r"missing.*; run: tollhouse migrate"):
        await check(database)


async def test_a_migration_happens_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'half.db'}"
    database = open_database(url)

    def tx() -> Tx[None]:
        yield Script(["CREATE TABLE usage_hour (x INTEGER)"])  # in the way of the migration's own

    await database.write(tx)
    with pytest.raises(Exception, match="already exists"):
        await migrate(url)
    assert await rows(database, "SELECT name FROM sqlite_master WHERE type = 'table'") == [("usage_hour",)]
    await database.close()


def test_the_migrations_are_found_beside_the_package_in_a_checkout() -> None:
    assert (schema.migrations_directory() / "env.py").is_file()


def test_months_are_whole_utc_months() -> None:
    assert list(months(1_798_761_599_999, ahead=1)) == [
        ("ledger_y2026m12", 1_796_083_200_000, 1_798_761_600_000),
        ("ledger_y2027m01", 1_798_761_600_000, 1_801_440_000_000),
    ]


async def test_entries_of_two_months_land_in_two_partitions(postgres_url: str, tmp_path: Path) -> None:
    september, october = NOON_MS, NOON_MS + 30 * 86_400_000
    async with opened(postgres_url, tmp_path) as (ledger, database, accounts):
        await accounts.ensure_defaults()
        attempts = [attempt(started_at_ms=ms) for ms in (september, october)]
        await ledger.settle(attempts[0], outcome(1))  # before its partition exists
        where = "SELECT tableoid::regclass::text, at_ms FROM ledger ORDER BY at_ms"
        assert await rows(database, where) == [("ledger_default", september)]

        for _ in range(2):
            await database.write(lambda: ensure_partitions(True, september))
        await ledger.settle(attempts[1], outcome(1))

        assert await rows(database, where) == [("ledger_y2026m09", september), ("ledger_y2026m10", october)]
        assert [ms_of(e["attempt_id"]) for e in await reports.entries(database)] == [september, october]
        for a in attempts:
            assert str(await ledger.settle(a, outcome(1))) == "already_terminal"


def test_a_second_server_on_the_same_file_is_told_who_serves(tmp_path: Path) -> None:
    path = tmp_path / "var" / "tollhouse.db"
    lock = ServingLock.take(path)
    with pytest.raises(AlreadyServing, match=rf"\(pid {os.getpid()}\) already serves from {path}"):
        ServingLock.take(path)
    lock.release()
    lock.release()
    ServingLock.take(path).release()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://x/y", "mysql is not supported; use sqlite:///path or postgresql://"),
        ("sqlite://", "SQLite needs a file"),
        ("sqlite:///:memory:", "SQLite needs a file"),
        ("not a url", "cannot be read"),
    ],
)
def test_other_databases_are_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_database(url)


async def test_postgres_is_reached_by_any_of_its_usual_urls(postgres: PostgresServer) -> None:
    for url in (
        postgres.url("template1").replace("postgresql://", "postgres://"),
        postgres.url("template1").replace("postgresql://", "postgresql+asyncpg://") + "?sslmode=disable",
        f"postgresql://postgres@/template1?host={postgres.directory}&port={postgres.port}",
    ):
        database = open_database(url)
        assert await rows(database, "SELECT 1") == [(1,)]
        await database.close()
