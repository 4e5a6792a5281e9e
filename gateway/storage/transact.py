"""Transactions without IO: a generator yields statements and is sent their rows; a runner performs it on its store.

So admission and settlement are written once, and differ between SQLite and Postgres only in how statements run:
on SQLite a whole transaction in one visit to one thread, on Postgres over a plain asyncpg connection.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

Row = Sequence[Any]
T = TypeVar("T")

_PLACE = re.compile(r"\$(\d+)")
_SQLITE_REWRITES = (
    (re.compile(r"= ANY\(\$(\d+)::text\[\]\)"), r"IN (SELECT value FROM json_each(?\1))"),
    (_PLACE, r"?\1"),
    (re.compile(r"\s+FOR (UPDATE|SHARE)( OF \w+)?( SKIP LOCKED)?"), ""),
)


class Sql:
    """One statement for both stores, written for Postgres.

    Rewritten for SQLite: `$1`, `= ANY($1::text[])`, and the row locks, which its single writer does not need.
    `now_ms()` is the authority's clock: the server's on Postgres, the gateway's on SQLite.
    """

    __slots__ = ("arguments", "postgres", "sqlite")

    def __init__(self, text: str) -> None:
        self.arguments = max(map(int, _PLACE.findall(text)), default=0)  # how many it takes
        self.postgres = text.replace("now_ms()", "(extract(epoch FROM now()) * 1000)::bigint")
        for pattern, replacement in _SQLITE_REWRITES:
            text = pattern.sub(replacement, text)
        self.sqlite = text

    @classmethod
    def of(cls, *, postgres: str, sqlite: str) -> Sql:
        """For the few statements that have nothing in common."""
        sql = cls(postgres)
        sql.sqlite = sqlite
        return sql


class Fetch(NamedTuple):
    """Run once, send back the rows. A list among the arguments is an array of text."""

    sql: Sql
    args: Sequence[Any] = ()


class FetchEach(NamedTuple):
    """Run for each tuple of arguments in order, send back all rows."""

    sql: Sql
    rows: Sequence[Sequence[Any]]


class Each(NamedTuple):
    """Run for each tuple of arguments in order, send back nothing."""

    sql: Sql
    rows: Sequence[Sequence[Any]]


class Pair:
    """Two reads, of which the first finds one row at most (`columns` wide) and has its lock before the second begins.

    On Postgres one statement: a left join without a condition can only be a loop over what is on its left.
    """

    __slots__ = ("columns", "first", "postgres", "second")

    def __init__(self, first: Sql, second: Sql, columns: int) -> None:
        self.first, self.second, self.columns = first, second, columns
        after = _PLACE.sub(lambda m: f"${int(m[1]) + first.arguments}", second.postgres)
        self.postgres = f"SELECT * FROM ({first.postgres}) a LEFT JOIN ({after}) b ON true"  # noqa: S608


class FetchPair(NamedTuple):
    """Run both reads; send back the row of the first, then those of the second, or nothing if the first found none."""

    pair: Pair
    first: Sequence[Any]
    second: Sequence[Any]


class Script(NamedTuple):
    """Run statements as they stand (DDL), send back nothing."""

    statements: Sequence[str]


Step = Fetch | FetchEach | Each | FetchPair | Script
Tx = Generator[Step, Sequence[Row], T]


class StoreDown(Exception):
    """The store cannot be reached or does not answer; nothing was committed."""


class CommitUnknown(StoreDown):
    """The answer to COMMIT is lost: the transaction happened or not. `result` is what it would have returned."""

    def __init__(self, reason: str, result: Any) -> None:
        self.result = result
        super().__init__(reason)


class Conflict(Exception):
    """Another transaction was there first (unique index, deadlock); nothing was committed, run it again."""


class Runner(Protocol):
    #: transactions that may run at the same time with profit
    flights: int

    async def run(self, tx: Callable[[], Tx[T]], timeout_s: float) -> T:
        """Run one transaction. Raises `StoreDown`, `CommitUnknown`, `Conflict`, or what the generator raises."""
        ...

    async def close(self) -> None: ...


_encode = msgspec.json.Encoder().encode


def json_text(value: Any) -> str:
    return _encode(value).decode()
