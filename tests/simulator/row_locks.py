"""Which rows a statement of ours locks on Postgres, found by asking SQLite, and who waits for whom.

Understands the statements that the product has: SELECT (FOR UPDATE | SHARE [OF x] [SKIP LOCKED]), INSERT, UPDATE,
DELETE, one table each. Anything else is an error here, so that nothing runs without its locks unnoticed.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.storage.tables import metadata

Key = tuple[str, Hashable]

_LOCK_CLAUSE = re.compile(r"\s+FOR (UPDATE|SHARE)(?: OF (\w+))?( SKIP LOCKED)?\s*$")
_INSERT = re.compile(
    r"INSERT INTO (\w+) \(([^)]*)\) VALUES \((.*?)\)(?: ON CONFLICT(?: \(([^)]*)\))? (.*))?$", re.S
)
_FROM = re.compile(r"(\w+)(?: (?:AS )?(?!LEFT|JOIN|WHERE|ORDER|LIMIT|GROUP|ON)(\w+))?")
_NUMBER = re.compile(r"\?(\d+)")


@dataclass(frozen=True, slots=True)
class Shape:
    """A statement, as far as locks go."""

    text: str
    writes: bool
    returns: bool
    #: finds the rows to lock; for `locked_select`, followed by what was asked for
    find: str = ""
    table: str = ""
    keys: int = 0  # columns of the key at the beginning of what `find` returns
    locked_select: bool = False
    share: bool = False
    skip: bool = False
    #: of an INSERT ... ON CONFLICT: (name of the unique key, positions or constants of its values)
    unique: tuple[tuple[str, tuple[Any, ...]], ...] = ()


def shape_of(postgres: str, sqlite: str) -> Shape:
    """Raises ValueError for a statement that it does not understand."""
    verb = sqlite.split(None, 1)[0]
    if verb == "SELECT":
        return _select(postgres, sqlite)
    if verb == "INSERT":
        return _insert(sqlite)
    if verb in ("UPDATE", "DELETE"):
        return _change(sqlite, verb)
    raise ValueError(f"tests/simulator/row_locks.py does not know which rows this locks: {sqlite}")


def _select(postgres: str, sqlite: str) -> Shape:
    clause = _LOCK_CLAUSE.search(postgres)
    if clause is None:
        return Shape(sqlite, writes=False, returns=True)
    mode, of, skip = clause.groups()
    rest = sqlite[_top_level(sqlite, " FROM ") + len(" FROM ") :]
    named = _FROM.match(rest)
    assert named is not None
    table, alias = named[1], named[2] or named[1]
    if of not in (None, alias):
        raise ValueError(f"locks rows of {of!r}, which is not the first table: {sqlite}")
    key = _primary_key(table)
    columns = ", ".join(f"{alias}.{c}" for c in key)
    find = f"SELECT {columns}, {sqlite.removeprefix('SELECT ')}"
    return Shape(
        *(sqlite, False, True, find, table, len(key)),
        locked_select=True,
        share=mode == "SHARE",
        skip=skip is not None,
    )


def _change(sqlite: str, verb: str) -> Shape:
    table = sqlite.split()[1 if verb == "UPDATE" else 2]
    where, returning = _top_level(sqlite, " WHERE "), _top_level(sqlite, " RETURNING ")
    end = len(sqlite) if returning < 0 else returning
    condition = "1" if where < 0 else sqlite[where + len(" WHERE ") : end]
    used, all_of_it = (max(map(int, _NUMBER.findall(t)), default=0) for t in (condition, sqlite))
    if used < all_of_it:  # SQLite wants as many arguments as the highest number says
        condition = f"({condition}) AND ?{all_of_it} IS ?{all_of_it}"
    key = _primary_key(table)
    find = f"SELECT {', '.join(key)} FROM {table} WHERE {condition} ORDER BY {', '.join(key)}"
    return Shape(sqlite, True, returning >= 0, find, table, len(key))


def _insert(sqlite: str) -> Shape:
    returning = _top_level(sqlite, " RETURNING ")
    match = _INSERT.match(sqlite if returning < 0 else sqlite[:returning])
    if match is None:
        raise ValueError(f"tests/simulator/row_locks.py cannot read this INSERT: {sqlite}")
    table, columns, values, target, action = match.groups()
    shape = Shape(sqlite, True, returning >= 0, table=table)
    if action is None:
        return shape  # a key that another transaction takes first is found at COMMIT, as a conflict
    at = dict(zip((c.strip(' "') for c in columns.split(",")), _split(values), strict=True))
    targets = [tuple(c.strip() for c in target.split(","))] if target else _unique_keys(table)
    unique = []
    for names in targets:
        named = table if names == _primary_key(table) else f"{table}({','.join(names)})"
        unique.append((named, tuple(_value(at[n] if n in at else _default(table, n)) for n in names)))
    return Shape(sqlite, True, returning >= 0, table=table, unique=tuple(unique))


def _primary_key(table: str) -> tuple[str, ...]:
    return tuple(c.name for c in metadata.tables[table].primary_key)


def _unique_keys(table: str) -> list[tuple[str, ...]]:
    indexes = sorted(metadata.tables[table].indexes, key=lambda i: str(i.name))
    return [_primary_key(table), *(tuple(c.name for c in i.columns) for i in indexes if i.unique)]


def _default(table: str, column: str) -> str:
    return str(metadata.tables[table].columns[column].server_default.arg)  # type: ignore[union-attr]


@dataclass(frozen=True, slots=True)
class _Argument:
    index: int


def _value(text: str) -> Any:
    match = _NUMBER.fullmatch(text)
    if match:
        return _Argument(int(match[1]) - 1)
    return text[1:-1] if text.startswith("'") else int(text)


def key_values(places: Sequence[Any], args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(args[p.index] if isinstance(p, _Argument) else p for p in places)


def _split(values: str) -> list[str]:
    parts, depth, start = [], 0, 0
    for i, c in enumerate(values):
        depth += (c == "(") - (c == ")")
        if c == "," and not depth:
            parts.append(values[start:i].strip())
            start = i + 1
    return [*parts, values[start:].strip()]


def _top_level(text: str, word: str) -> int:
    """Where `word` stands outside of parentheses and quotes, or -1."""
    depth, quoted = 0, False
    for i, c in enumerate(text):
        if c == "'":
            quoted = not quoted
        elif not quoted:
            depth += (c == "(") - (c == ")")
            if not depth and text.startswith(word, i):
                return i
    return -1


# --- who holds what -----------------------------------------------------------------------------------------


class Deadlock(Exception):
    """Each waits for the other. The one who notices gives up."""


@dataclass(slots=True, eq=False)
class _Waiting:
    who: Hashable
    share: bool
    granted: asyncio.Future[None]


@dataclass(slots=True)
class _Lock:
    holders: dict[Hashable, bool] = field(default_factory=dict)  # who -> only a share of it
    queue: deque[_Waiting] = field(default_factory=deque)


class LockTable:
    """Row locks, first come first served."""

    def __init__(self) -> None:
        self.waits = 0
        self.deadlocks = 0
        self._locks: dict[Key, _Lock] = {}
        self._held: dict[Hashable, dict[Key, None]] = {}

    def take(self, who: Hashable, key: Key, share: bool) -> bool:
        """Take it if that needs no waiting. Returns whether it was taken."""
        lock = self._locks.setdefault(key, _Lock())
        if not self._fits(lock, who, share) or (lock.queue and who not in lock.holders):
            return False
        self._grant(key, lock, who, share)
        return True

    async def wait(self, who: Hashable, key: Key, share: bool) -> None:
        """Raises `Deadlock`."""
        lock = self._locks.setdefault(key, _Lock())
        waiting = _Waiting(who, share, asyncio.get_running_loop().create_future())
        lock.queue.append(waiting)
        self.waits += 1
        if who in self._reachable(who):
            lock.queue.remove(waiting)
            self.deadlocks += 1
            raise Deadlock
        try:
            await waiting.granted
        finally:
            if waiting in lock.queue:
                lock.queue.remove(waiting)
                self._wake(key, lock)

    def release(self, who: Hashable) -> None:
        """Give everything back, and stop waiting."""
        for key, lock in list(self._locks.items()):
            for waiting in [w for w in lock.queue if w.who is who]:
                lock.queue.remove(waiting)
                self._wake(key, lock)
        for key in self._held.pop(who, {}):
            lock = self._locks[key]
            del lock.holders[who]
            self._wake(key, lock)
            if not lock.holders and not lock.queue:
                del self._locks[key]

    def _fits(self, lock: _Lock, who: Hashable, share: bool) -> bool:
        return all(other is who or (share and held) for other, held in lock.holders.items())

    def _grant(self, key: Key, lock: _Lock, who: Hashable, share: bool) -> None:
        lock.holders[who] = share and lock.holders.get(who, True)
        self._held.setdefault(who, {})[key] = None

    def _wake(self, key: Key, lock: _Lock) -> None:
        while lock.queue and self._fits(lock, lock.queue[0].who, lock.queue[0].share):
            waiting = lock.queue.popleft()
            self._grant(key, lock, waiting.who, waiting.share)
            if not waiting.granted.done():
                waiting.granted.set_result(None)

    def _reachable(self, start: Hashable) -> set[Hashable]:
        """Everyone for whom `start` waits, directly or not."""
        found: set[Hashable] = set()
        ask = [start]
        while ask:
            for other in self._blockers(ask.pop()):
                if other not in found:
                    found.add(other)
                    ask.append(other)
        return found

    def _blockers(self, who: Hashable) -> Iterator[Hashable]:
        for lock in self._locks.values():
            for i, waiting in enumerate(lock.queue):
                if waiting.who is who:
                    yield from (h for h in lock.holders if h is not who)
                    yield from (w.who for w in list(lock.queue)[:i])
