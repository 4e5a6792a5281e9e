"""Runs transactions on Postgres: plain asyncpg connections, as many as transactions fly at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import asyncpg

from gateway.storage.transact import (
    CommitUnknown,
    Conflict,
    Each,
    Fetch,
    FetchEach,
    FetchPair,
    Pair,
    Row,
    Step,
    StoreDown,
    Tx,
)

T = TypeVar("T")

CONNECT_TIMEOUT_S = 2.0
#: A process that stands still inside a transaction (a frozen machine, a half-open connection) holds locks that all
#: others wait for; after this time the server takes them away.
IDLE_IN_TRANSACTION_S = 5.0

_CONFLICTS = (
    asyncpg.UniqueViolationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.SerializationError,
    asyncpg.LockNotAvailableError,
)
#: Server answers that are about the server, not about the statement.
_UNWELL = (
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.PostgresSystemError,
    asyncpg.IdleInTransactionSessionTimeoutError,
)


class PostgresRunner:
    """`statement_s`: the server ends a statement that takes longer, which nobody waits for any more. `at_once_max`
    transactions run at once, and others wait; None = as many as come.
    """

    flights = 2

    def __init__(
        self,
        dsn: str,
        idle_in_transaction_s: float = IDLE_IN_TRANSACTION_S,
        *,
        statement_s: float | None = None,
        at_once_max: int | None = None,
    ) -> None:
        self._dsn = dsn
        # Not settings of the connection's start: poolers refuse those that they do not know.
        self._settings = f"SET idle_in_transaction_session_timeout = {round(idle_in_transaction_s * 1_000)}"
        if statement_s is not None:
            self._settings += f"; SET statement_timeout = {round(statement_s * 1_000)}"
        self._turns = None if at_once_max is None else asyncio.Semaphore(at_once_max)
        self._idle: list[Any] = []

    async def run(self, tx: Callable[[], Tx[T]], timeout_s: float) -> T:
        deadline = asyncio.get_running_loop().time() + timeout_s
        if self._turns is None:
            return await self._run(tx, deadline)
        try:
            async with asyncio.timeout_at(deadline):
                await self._turns.acquire()
        except TimeoutError as e:
            raise StoreDown("too many reports are being made at once") from e
        try:
            return await self._run(tx, deadline)
        finally:
            self._turns.release()

    async def _run(self, tx: Callable[[], Tx[T]], deadline: float) -> T:
        connection = await self._begin(deadline)
        committing = False
        result: Any = None
        healthy = False
        try:
            async with asyncio.timeout_at(deadline):
                result = await _drive(connection, tx())
                committing = True
                await connection.execute("COMMIT")
            healthy = True
        except (OSError, TimeoutError, asyncpg.InterfaceError, *_UNWELL) as e:
            if isinstance(e, asyncpg.DataError):  # a value that no column takes: says nothing about the store
                raise
            reason = str(e) or type(e).__name__
            raise (CommitUnknown(reason, result) if committing else StoreDown(reason)) from e
        except (Conflict, *_CONFLICTS) as e:
            healthy = await _rolled_back(connection, deadline)
            raise Conflict(str(e)) from e
        finally:
            if healthy:
                self._idle.append(connection)
            else:
                # Closing rolls back, and no half-read answer can reach the next transaction.
                connection.terminate()
        answer: T = result
        return answer

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            try:
                await connection.close(timeout=1)
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                connection.terminate()

    async def _begin(self, deadline: float) -> Any:
        """A connection inside a transaction. One that broke while idle is replaced; nothing was sent on it yet."""
        while self._idle:
            connection = self._idle.pop()
            try:
                async with asyncio.timeout_at(deadline):
                    await connection.execute("BEGIN")
                return connection
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
                connection.terminate()
            except BaseException:
                connection.terminate()
                raise
        connection = None
        try:
            async with asyncio.timeout_at(deadline):
                connection = await asyncpg.connect(
                    self._dsn,
                    timeout=CONNECT_TIMEOUT_S,
                    server_settings={"application_name": "tollhouse"},
                )
                await connection.execute(self._settings)
                await connection.execute("BEGIN")
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as e:
            if connection is not None:
                connection.terminate()
            raise StoreDown(str(e) or type(e).__name__) from e
        except BaseException:
            if connection is not None:
                connection.terminate()
            raise
        return connection


async def _rolled_back(connection: Any, deadline: float) -> bool:
    try:
        async with asyncio.timeout_at(deadline):
            await connection.execute("ROLLBACK")
    except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return False
    return True


async def _drive(connection: Any, tx: Tx[T]) -> T:
    rows: Sequence[Row] | None = None
    while True:
        try:
            step = next(tx) if rows is None else tx.send(rows)
        except StopIteration as stop:
            result: T = stop.value
            return result
        rows = await _perform(connection, step)


async def _perform(connection: Any, step: Step) -> Sequence[Row]:
    rows: Sequence[Row]
    if isinstance(step, Fetch):
        rows = await connection.fetch(step.sql.postgres, *step.args)
    elif isinstance(step, Each):
        await connection.executemany(step.sql.postgres, step.rows)
        rows = ()
    elif isinstance(step, FetchEach):
        rows = await connection.fetchmany(step.sql.postgres, step.rows)
    elif isinstance(step, FetchPair):
        rows = _of_pair(step.pair, await connection.fetch(step.pair.postgres, *step.first, *step.second))
    else:
        for statement in step.statements:
            await connection.execute(statement)
        rows = ()
    return rows


def _of_pair(pair: Pair, joined: Sequence[Row]) -> Sequence[Row]:
    """What was joined, apart again. Where the second read found nothing, its key is NULL."""
    first = [row[: pair.columns] for row in joined[:1]]
    return first + [row[pair.columns :] for row in joined if row[pair.columns] is not None]
