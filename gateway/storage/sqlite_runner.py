"""Runs transactions on SQLite: one connection, one thread, a whole transaction in one visit to it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from gateway.ports import Clock
from gateway.storage.transact import (
    CommitUnknown,
    Conflict,
    Each,
    Fetch,
    FetchEach,
    FetchPair,
    Row,
    Sql,
    Step,
    StoreDown,
    Tx,
    json_text,
)

T = TypeVar("T")

#: How long a transaction waits for a writer of another process.
BUSY_MS = 1_500
_CONFLICTS = ("SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY")


class SqliteRunner:
    """`reading`: transactions take no write lock, and see the database as it was when they began."""

    flights = 1

    def __init__(self, path: Path, clock: Clock, *, reading: bool = False) -> None:
        self._path = path
        self._clock = clock
        # A transaction that reads first and writes later could deadlock with another such one; IMMEDIATE cannot.
        self._begin = "BEGIN" if reading else "BEGIN IMMEDIATE"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sqlite")
        self._connection: sqlite3.Connection | None = None

    async def run(self, tx: Callable[[], Tx[T]], timeout_s: float) -> T:
        # A thread cannot be stopped half-way, so the time-out is SQLite's own wait for locks.
        del timeout_s
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, tx)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        self._thread.shutdown(wait=False)

    def _run(self, tx: Callable[[], Tx[T]]) -> T:
        try:
            connection = self._connect()
            connection.execute(self._begin)
        except sqlite3.OperationalError as e:
            raise StoreDown(str(e)) from e
        try:
            result = _drive(connection, tx())
        except sqlite3.IntegrityError as e:
            self._rollback(connection)
            if e.sqlite_errorname in _CONFLICTS:
                raise Conflict(str(e)) from e
            raise
        except sqlite3.OperationalError as e:
            self._rollback(connection)
            if e.sqlite_errorname == "SQLITE_ERROR":  # a mistake in a statement, not the state of the store
                raise
            raise StoreDown(str(e)) from e
        except BaseException:
            self._rollback(connection)
            raise
        try:
            connection.execute("COMMIT")
        except sqlite3.OperationalError as e:
            self._rollback(connection)
            raise CommitUnknown(str(e), result) from e
        return result

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(
                self._path, isolation_level=None, check_same_thread=False, cached_statements=200
            )
            connection.execute(f"PRAGMA busy_timeout={BUSY_MS}")
            connection.execute("PRAGMA journal_mode=WAL")
            # FULL survives power loss; NORMAL survives only the death of the process.
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA foreign_keys=ON")
            connection.create_function("now_ms", 0, self._clock.now_ms)
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _rollback(self, connection: sqlite3.Connection) -> None:
        try:
            connection.rollback()
        except sqlite3.Error:
            self._disconnect()  # closing rolls back as well


def _drive(connection: sqlite3.Connection, tx: Tx[T]) -> T:
    rows: Sequence[Row] | None = None
    while True:
        try:
            step = next(tx) if rows is None else tx.send(rows)
        except StopIteration as stop:
            result: T = stop.value
            return result
        rows = _perform(connection, step)


def _perform(connection: sqlite3.Connection, step: Step) -> Sequence[Row]:
    if isinstance(step, Fetch):
        return _fetch(connection, step.sql, step.args)
    if isinstance(step, Each):
        connection.executemany(step.sql.sqlite, step.rows)
        return ()
    found: list[Row] = []
    if isinstance(step, FetchEach):
        for args in step.rows:
            found += connection.execute(step.sql.sqlite, args).fetchall()
    elif isinstance(step, FetchPair):
        found += _fetch(connection, step.pair.first, step.first)
        if found:
            found += _fetch(connection, step.pair.second, step.second)
    else:
        for statement in step.statements:
            connection.execute(statement)
    return found


def _fetch(connection: sqlite3.Connection, sql: Sql, args: Sequence[Any]) -> list[Row]:
    return connection.execute(sql.sqlite, [_bindable(a) for a in args]).fetchall()


def _bindable(arg: Any) -> Any:
    return json_text(arg) if type(arg) is list else arg
