"""Where the tables live, by URL. Everything that touches them runs as a transaction of `transact`."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError

from gateway.core.errors import Unavailable
from gateway.core.ids import RANDOM_BYTES
from gateway.ports import Clock
from gateway.storage.postgres_runner import PostgresRunner
from gateway.storage.sqlite_runner import SqliteRunner
from gateway.storage.transact import Conflict, Runner, StoreDown, Tx

T = TypeVar("T")

#: How long operators' reads and writes may take; the ledger brings its own, shorter time.
TIMEOUT_S = 10.0
_CONFLICTS_MAX = 5
#: Reports of one process on Postgres; more wait for one another, and leave connections to requests.
_DESK_AT_ONCE_MAX = 4


class SystemClock:
    """`ports.Clock` of this machine."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    #: the C function itself: it is read a dozen times per request
    monotonic = staticmethod(time.monotonic)


_IDS = struct.Struct(f"{RANDOM_BYTES}s" * 400)


class Randomness:
    """Random bytes for ids, fetched from the kernel a few hundred ids at a time."""

    def __init__(self) -> None:
        self._pool: list[bytes] = []

    def take(self) -> bytes:
        if not self._pool:
            self._pool = list(_IDS.unpack(os.urandom(_IDS.size)))
        return self._pool.pop()


@dataclass(frozen=True, slots=True)
class Database:
    """An open database: exactly one of `sqlite_path` and `postgres_dsn` is set.

    `writer` and `reader` run transactions; on SQLite one thread each, so that no two writers of this process ever
    wait for one another's lock, and readers never wait. `desk` is for people: what takes long there keeps no request
    waiting, and what is asked only once is not prepared on a connection that requests use (None = `reader`).
    """

    writer: Runner
    reader: Runner
    clock: Clock
    sqlite_path: Path | None = None
    postgres_dsn: str | None = None
    desk: Runner | None = None

    async def write(self, tx: Callable[[], Tx[T]]) -> T:
        """Run a transaction, again if another one was first. Raises `Unavailable` if the store is down."""
        for _ in range(_CONFLICTS_MAX):
            try:
                return await self.writer.run(tx, TIMEOUT_S)
            except Conflict:
                continue
            except StoreDown as e:
                raise Unavailable(f"the database does not answer: {e}") from e
        raise Unavailable("the database is too busy")

    async def read(self, tx: Callable[[], Tx[T]]) -> T:
        """Run a transaction that only reads. Raises `Unavailable` if the store is down."""
        return await _read(self.reader, tx)

    async def report(self, tx: Callable[[], Tx[T]]) -> T:
        """The same for people, who may ask for much."""
        return await _read(self.desk or self.reader, tx)

    async def close(self) -> None:
        if self.desk is not None:
            await self.desk.close()
        await self.reader.close()
        if self.writer is not self.reader:
            await self.writer.close()


async def _read(runner: Runner, tx: Callable[[], Tx[T]]) -> T:
    try:
        return await runner.run(tx, TIMEOUT_S)
    except (StoreDown, Conflict) as e:
        raise Unavailable(f"the database does not answer: {e}") from e


def open_database(url: str, clock: Clock | None = None) -> Database:
    """Open `sqlite:///path` (or `sqlite+aiosqlite:///path`), or Postgres by any of its usual URLs.

    Connects lazily: an unreachable Postgres shows at the first transaction. Raises ValueError for other URLs.
    """
    clock = clock or SystemClock()
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise ValueError(
            "the database URL cannot be read; use sqlite:///path or postgresql://user@host/name"
        ) from None
    scheme = parsed.drivername.partition("+")[0]
    if scheme == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise ValueError("SQLite needs a file: sqlite:///path/to/file.db")
        path = Path(parsed.database)
        reader, desk = (SqliteRunner(path, clock, reading=True) for _ in range(2))
        return Database(SqliteRunner(path, clock), reader, clock, sqlite_path=path, desk=desk)
    if scheme in ("postgresql", "postgres"):
        # asyncpg reads the whole DSN itself, `sslmode` and a socket directory as `host` included.
        dsn = parsed.set(drivername="postgresql").render_as_string(hide_password=False)
        runner = PostgresRunner(dsn)
        reports = PostgresRunner(dsn, statement_s=TIMEOUT_S, at_once_max=_DESK_AT_ONCE_MAX)
        return Database(runner, runner, clock, postgres_dsn=dsn, desk=reports)
    raise ValueError(f"{scheme} is not supported; use sqlite:///path or postgresql://user@host/name")
