"""The authority: Postgres at READ COMMITTED as far as our statements can tell, on SQLite in memory.

A transaction whose statements are spread over time sees, with each of them, what is committed by then and what it
wrote itself. SQLite runs one transaction at a time, so when another one has its turn, this one is rolled back, and its
writes are performed again before its next statement. Row locks (row_locks.py) keep that from changing anything; should
it do so all the same, the transaction ends in a conflict, which is always a legal answer.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple, TypeVar

from gateway.core.ids import new_id
from gateway.storage.schema import render
from gateway.storage.transact import (
    Conflict,
    Each,
    Fetch,
    FetchEach,
    FetchPair,
    Row,
    Script,
    Sql,
    Step,
    Tx,
    json_text,
)
from tests.simulator.loop import OWNER, Owner, VirtualLoop
from tests.simulator.row_locks import Deadlock, LockTable, Shape, key_values, shape_of

T = TypeVar("T")

#: Tables whose changes the checker wants to see.
WATCHED = frozenset({"hold", "ledger", "budget", "budget_closed", "replica", "task"})
_CONFLICTS = ("SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY")


class Gone(Exception):
    """The connection is."""


@dataclass(slots=True)
class Weather:
    """What the store does to those who use it: shares of transactions, and times in seconds."""

    spread: float = 0.0  # have other transactions between their statements
    round_trip_s: float = 0.0005
    broken: float = 0.0  # lose their connection at some statement
    conflict: float = 0.0  # are told to try again at some statement
    lost_before: float = 0.0  # lose their connection at COMMIT, before it is performed
    lost_after: float = 0.0  # ... after it is performed
    late: float = (
        0.0  # are committed by the server some time after COMMIT was sent, whoever still waits for it
    )
    late_s: float = 0.0
    down: float = 0.0  # not 0: connections are refused
    stalled: float = 0.0  # not 0: nothing is answered; what was sent is performed when it is over


class Fate(NamedTuple):
    """What will happen to one transaction."""

    spread: bool = False
    breaks_at: int = -1
    conflicts_at: int = -1
    lost_before: bool = False
    lost_after: bool = False
    late_s: float | None = None


_CALM = Fate()


class Sabotage:
    """Alters the store on purpose, to see whether the checker notices. This one alters nothing."""

    drop_indexes: Sequence[str] = ()

    def rewrite(self, text: str) -> str:
        return text

    def rows(self, text: str, rows: Sequence[Row]) -> Sequence[Row]:
        """What is read instead of `rows` by the statement `text`."""
        return rows


@dataclass
class Counts:
    transactions: int = 0
    commits: int = 0  # of those that changed a watched table
    switches: int = 0
    conflicts: int = 0
    lost_answers: int = 0
    late_commits: int = 0


class Store:
    """`clock_ms` is the authority's clock. `on_commit` is called after each commit that changed a watched table."""

    def __init__(
        self, loop: VirtualLoop, rng: Random, clock_ms: Callable[[], int], sabotage: Sabotage | None = None
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.clock_ms = clock_ms
        self.weather = Weather()
        self.locks = LockTable()
        self.counts = Counts()
        self.on_commit: Callable[[Session], None] = lambda _: None
        self.context: Context = Context()
        self.sabotage = sabotage or Sabotage()
        self._sessions: dict[Session, None] = {}
        self.closed = False
        self._active: Session | None = None
        self._shapes = _shapes if sabotage is None else {}
        self._stalled: list[asyncio.Future[None]] = []
        self.connection = _connection(tuple(self.sabotage.drop_indexes))
        self.connection.create_function("now_ms", 0, self._now_ms)

    # --- for clients -----------------------------------------------------------------------------------

    async def begin(self) -> Session:
        """Raises `Gone` if the store is down; waits while it is stalled."""
        await self.answering()
        if self.weather.down:
            raise Gone("connection refused")
        self.counts.transactions += 1
        fate = self._fate()
        if fate.spread:
            await self.round_trip()
        session = Session(self, self.clock_ms(), fate, began_after=self.counts.commits)
        session.direct = not session.fate.spread and session.fate.late_s is None and not self._sessions
        self._sessions[session] = None
        return session

    async def round_trip(self) -> None:
        await asyncio.sleep(self.rng.random() * 2 * self.weather.round_trip_s)
        await self.answering()

    async def answering(self) -> None:
        while self.weather.stalled:
            future = self.loop.create_future()
            self._stalled.append(future)
            await future

    def _fate(self) -> Fate:
        w, rng = self.weather, self.rng
        spread = w.spread > 0 and rng.random() < w.spread
        roll = rng.random()
        if (roll := roll - w.broken) < 0:
            return Fate(spread, breaks_at=rng.randrange(8))
        if (roll := roll - w.conflict) < 0:
            return Fate(spread, conflicts_at=rng.randrange(8))
        if (roll := roll - w.lost_before) < 0:
            return Fate(spread, lost_before=True)
        if (roll := roll - w.lost_after) < 0:
            return Fate(spread, lost_after=True)
        if roll < w.late:
            return Fate(spread, late_s=rng.random() ** 3 * w.late_s)
        return Fate(True) if spread else _CALM

    # --- for the schedule ------------------------------------------------------------------------------

    def set_weather(self, weather: Weather) -> None:
        self.weather = weather
        if not weather.stalled:
            waiting, self._stalled = self._stalled, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)

    def break_connections(self) -> None:
        """What was being committed is, or is not."""
        for session in list(self._sessions):
            if session.committing and self.rng.random() < 0.5:
                with suppress(Conflict, sqlite3.IntegrityError):
                    session.apply()
            session.abort(Gone("the server has gone"))

    def end_idle(self, owner: Owner) -> None:
        """What Postgres does to those who stand still inside a transaction."""
        for session in list(self._sessions):
            if session.owner is owner and not session.committing:
                session.abort(Gone("idle in transaction"))

    def rows(self, text: str, *args: Any) -> list[tuple[Any, ...]]:
        """What is committed, read from beside."""
        self._make_room()
        return self.connection.execute(text, args).fetchall()

    @property
    def open_sessions(self) -> int:
        return len(self._sessions)

    def close(self) -> None:
        """The connection goes to the next store; sessions that are still found open touch it no more."""
        self._make_room()
        self.closed = True

    # --- for sessions ----------------------------------------------------------------------------------

    def shape(self, sql: Sql) -> Shape:
        shape = self._shapes.get(sql)
        if shape is None:
            shape = shape_of(self.sabotage.rewrite(sql.postgres), self.sabotage.rewrite(sql.sqlite))
            self._shapes[sql] = shape
        return shape

    def enter(self, session: Session) -> None:
        """Make the connection show what this session sees. Raises `Conflict`."""
        if self._active is session:
            return
        self._make_room()
        self.connection.execute("BEGIN")
        self._active = session
        if session.log:
            self.counts.switches += 1
            for text, args, expected in session.log:
                if self.perform(text, args)[0] != expected:
                    raise Conflict("what this transaction wrote would now come out differently")

    def perform(self, text: str, args: Sequence[Any]) -> tuple[tuple[int, list[Row]], list[Row]]:
        """Run one statement: ((rows changed, rows returned) to compare later, rows returned)."""
        try:
            cursor = self.connection.execute(text, args)
            rows = cursor.fetchall()
        except sqlite3.IntegrityError as e:
            if e.sqlite_errorname in _CONFLICTS:
                raise Conflict(str(e)) from e
            raise
        return (cursor.rowcount, rows), rows

    def commit(self, session: Session) -> None:
        try:
            self.enter(session)
        except BaseException:
            self.forget(session)
            raise
        self.connection.execute("COMMIT")
        self._active = None
        self.forget(session)
        if session.changed:
            self.counts.commits += 1
            self.on_commit(session)

    def forget(self, session: Session) -> None:
        if self.closed:
            return
        if self._active is session:
            self._make_room()
        self._sessions.pop(session, None)
        self.locks.release(session)

    def _make_room(self) -> None:
        if self._active is not None:
            self.connection.execute("ROLLBACK")
            self._active = None

    def _now_ms(self) -> int:
        return self.clock_ms() if self._active is None else self._active.began_ms


@dataclass(eq=False)
class Session:
    """One transaction on one connection. `direct`: it runs in one go, and nobody else is under way."""

    store: Store
    began_ms: int
    fate: Fate
    direct: bool = False
    committing: bool = False
    ended: bool = False
    changed: set[str] = field(default_factory=set)  # of the watched tables
    began_after: int = 0  # commits
    owner: Owner | None = field(default_factory=OWNER.get)
    statements: int = 0
    log: list[tuple[str, Sequence[Any], tuple[int, list[Row]]]] = field(default_factory=list)
    _broken: Exception | None = None

    async def drive(self, tx: Tx[T]) -> T:
        """Raises `Gone`, `Conflict`, or what the transaction raises."""
        rows: Sequence[Row] | None = None
        while True:
            try:
                step = next(tx) if rows is None else tx.send(rows)
            except StopIteration as stop:
                result: T = stop.value
                return result
            rows = await self._perform(step)

    async def _perform(self, step: Step) -> Sequence[Row]:
        """What Postgres does in one statement is several here: others may come between, which it would not let them."""
        if isinstance(step, FetchPair):
            rows = await self._perform(Fetch(step.pair.first, step.first))
            return [*rows, *await self._perform(Fetch(step.pair.second, step.second))] if rows else rows
        self._suffer()
        rows = self._all_of(step) if self.direct else await self._one_by_one(step)
        if isinstance(step, Fetch | FetchEach):
            rows = self.store.sabotage.rows(step.sql.sqlite, rows)
        return rows

    def _suffer(self) -> None:
        if self.statements == self.fate.breaks_at:
            raise Gone("the connection broke")
        if self.statements == self.fate.conflicts_at:
            raise Conflict("could not serialize access")
        self.statements += 1

    def _all_of(self, step: Fetch | FetchEach | Each | Script) -> Sequence[Row]:
        store = self.store
        store.enter(self)
        if isinstance(step, Script):
            return [row for text in step.statements for row in store.perform(text, ())[1]]
        shape = store.shape(step.sql)
        if shape.writes and shape.table in WATCHED:
            self.changed.add(shape.table)
        found: list[Row] = []
        for args in _each(step):
            found += store.perform(shape.text, self._known(shape, args))[1]
        return found

    async def _one_by_one(self, step: Fetch | FetchEach | Each | Script) -> Sequence[Row]:
        if isinstance(step, Script):
            raise ValueError("scripts are for migrations, which are not simulated")
        shape = self.store.shape(step.sql)
        if shape.writes and shape.table in WATCHED:
            self.changed.add(shape.table)
        found: list[Row] = []
        for args in _each(step):
            found += await self._statement(shape, self._known(shape, args))
        if self.fate.spread:
            await self.store.round_trip()
            self._alive()
        return found

    async def _statement(self, shape: Shape, args: Sequence[Any]) -> list[Row]:
        store = self.store
        if shape.locked_select:
            while True:
                store.enter(self)
                rows = store.perform(shape.find, args)[1]
                keys = [(shape.table, tuple(row[: shape.keys])) for row in rows]
                if shape.skip:
                    mine = [store.locks.take(self, key, shape.share) for key in keys]
                    return [row[shape.keys :] for row, taken in zip(rows, mine, strict=True) if taken]
                if not await self._lock(keys, shape.share):
                    return [row[shape.keys :] for row in rows]
        while True:
            store.enter(self)
            if shape.find:
                keys = [(shape.table, tuple(row)) for row in store.perform(shape.find, args)[1]]
            else:
                keys = [(name, key_values(values, args)) for name, values in shape.unique]
            if not await self._lock(keys, share=False):
                break
        store.enter(self)
        expected, rows = store.perform(shape.text, args)
        if shape.writes and expected[0]:
            self.log.append((shape.text, args, expected))
        return rows

    async def _lock(self, keys: Sequence[Any], share: bool) -> bool:
        """Returns whether it had to wait: then the rows may not be what they were."""
        waited = False
        for key in keys:
            if self.store.locks.take(self, key, share):
                continue
            waited = True
            try:
                await self.store.locks.wait(self, key, share)
            except Deadlock:
                raise Conflict("deadlock detected") from None
            self._alive()
            await self.store.answering()
            self._alive()
        return waited

    def _known(self, shape: Shape, args: Sequence[Any]) -> Sequence[Any]:
        """Budgets get ids that the seed decides, because locks are taken in their order."""
        if shape.table == "budget" and shape.text.startswith("INSERT"):
            return (new_id("bud", self.began_ms, self.store.rng.randbytes(10)), *args[1:])
        return args

    async def commit(self) -> None:
        """Raises `Gone` or `Conflict`; whoever is cancelled here does not know."""
        store, fate = self.store, self.fate
        if fate.lost_before:
            store.counts.lost_answers += 1
            self.abort()
            raise Gone("the connection broke at COMMIT")
        if fate.spread:
            await store.round_trip()
            self._alive()
        if fate.late_s is not None:
            await self._commit_late(fate.late_s)
        else:
            self.apply()
        if fate.lost_after:
            store.counts.lost_answers += 1
            raise Gone("the connection broke at COMMIT")
        if fate.spread:
            await store.round_trip()

    async def _commit_late(self, after_s: float) -> None:
        self.store.counts.late_commits += 1
        self.committing = True
        performed = self.store.loop.create_future()

        def perform() -> None:
            if self.store.weather.stalled:
                self.store.loop.call_later(0.05, perform, context=self.store.context)
                return
            try:
                if not self.ended:
                    self.apply()
            except (Conflict, sqlite3.IntegrityError) as e:
                if not performed.done():
                    performed.set_exception(e)
                    performed.exception()
            else:
                if not performed.done():
                    performed.set_result(None)

        self.store.loop.call_later(after_s, perform, context=self.store.context)
        await performed
        self._alive()

    def apply(self) -> None:
        """What COMMIT does."""
        self.ended = True
        self.store.commit(self)

    def abort(self, why: Exception | None = None) -> None:
        if not self.ended:
            self.ended = True
            self.store.forget(self)
        self._broken = self._broken or why

    def leave(self) -> None:
        """The client is done, or gone. What it sent to be committed will be."""
        if not self.committing:
            self.abort()

    def _alive(self) -> None:
        if self._broken is not None:
            raise self._broken


def _each(step: Fetch | FetchEach | Each) -> Sequence[Sequence[Any]]:
    if isinstance(step, Fetch):
        return ([json_text(a) if type(a) is list else a for a in step.args],)
    return step.rows


_shapes: dict[Sql, Shape] = {}
_connections: dict[tuple[str, ...], sqlite3.Connection] = {}


def _connection(drop_indexes: tuple[str, ...]) -> sqlite3.Connection:
    """One per schema and process, emptied for each schedule: preparing its statements costs more than running them."""
    connection = _connections.get(drop_indexes)
    if connection is None:
        connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=400)
        for statement in render("sqlite", None, "head"):
            connection.execute(statement)
        for index in drop_indexes:
            connection.execute(f"DROP INDEX {index}")
        _connections[drop_indexes] = connection
    if connection.in_transaction:
        connection.rollback()
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    for (table,) in tables:
        if table == "revision":
            connection.execute("UPDATE revision SET number = 0")
        elif table != "alembic_version":
            connection.execute(f"DELETE FROM {table}")
    return connection
