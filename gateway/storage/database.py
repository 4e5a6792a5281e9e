"""Where the tables live: a URL, and an async engine for everything but the ledger's hot path."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
from sqlalchemy import event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

#: How long a SQLite statement waits for another writer before it fails.
SQLITE_BUSY_MS = 1_500
POSTGRES_CONNECT_TIMEOUT_S = 2.0
_READING = "tollhouse_reading"


@dataclass(frozen=True, slots=True)
class Database:
    """An open database: exactly one of `sqlite_path` and `postgres_dsn` is set."""

    engine: AsyncEngine
    #: the same pool, for transactions that only read: on SQLite they take no write lock
    reader: AsyncEngine
    sqlite_path: Path | None
    postgres_dsn: str | None

    async def close(self) -> None:
        await self.engine.dispose()


def open_database(url: str, *, pool_size: int = 5) -> Database:
    """Open `sqlite+aiosqlite:///path` (or `sqlite:///path`), or Postgres by any of its usual URLs.

    Connects lazily: an unreachable Postgres shows at the first query. Raises ValueError for other URLs.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ValueError("the database URL cannot be read; use sqlite:///path or postgresql://...") from None
    scheme = parsed.drivername.partition("+")[0]
    if scheme == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise ValueError("SQLite needs a file: sqlite:///path/to/file.db")
        path = Path(parsed.database)
        engine = _sqlite_engine(path, pool_size)
        return Database(engine, engine.execution_options(**{_READING: True}), path, None)
    if scheme in ("postgresql", "postgres"):
        dsn = parsed.set(drivername="postgresql").render_as_string(hide_password=False)
        engine = _postgres_engine(dsn, pool_size)
        return Database(engine, engine, None, dsn)
    raise ValueError(f"{scheme} is not supported; use sqlite:///path or postgresql://...")


def sqlite_pragmas(connection: Any) -> None:
    """Durable through power loss (FULL: WAL alone survives only the death of the process), readers beside a writer."""
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.execute(f"PRAGMA busy_timeout={SQLITE_BUSY_MS}")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def connect_sqlite(path: Path) -> sqlite3.Connection:
    """A plain connection for one writer thread; transactions are begun by hand."""
    connection = sqlite3.connect(
        path,
        isolation_level=None,
        check_same_thread=False,
        timeout=SQLITE_BUSY_MS / 1000,
        cached_statements=200,
    )
    sqlite_pragmas(connection)
    return connection


def _sqlite_engine(path: Path, pool_size: int) -> AsyncEngine:
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}", pool_size=pool_size, max_overflow=0)

    def on_connect(connection: Any, _record: Any) -> None:
        # Stops the driver from beginning transactions by itself, late and deferred: two readers that both
        # turn into writers would then deadlock.
        connection.isolation_level = None
        sqlite_pragmas(connection)

    def on_begin(connection: Any) -> None:
        reading = connection.get_execution_options().get(_READING)
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")

    event.listen(engine.sync_engine, "connect", on_connect)
    event.listen(engine.sync_engine, "begin", on_begin)
    return engine


def _postgres_engine(dsn: str, pool_size: int) -> AsyncEngine:
    async def connect() -> Any:
        # asyncpg reads the whole DSN itself, `sslmode` and a socket directory as `host` included.
        return await asyncpg.connect(
            dsn, timeout=POSTGRES_CONNECT_TIMEOUT_S, server_settings={"application_name": "tollhouse"}
        )

    return create_async_engine(
        "postgresql+asyncpg://",
        async_creator=connect,
        pool_size=pool_size,
        max_overflow=0,
        pool_pre_ping=True,
    )
