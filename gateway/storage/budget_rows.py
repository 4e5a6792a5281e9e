"""Budget rows inside a transaction: lock them, roll ended windows, move amounts. Arithmetic is in core/budget.py."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec

from gateway.core.budget import (
    Budget,
    BudgetMode,
    Delta,
    OnExceed,
    at,
    counts_from_ms,
    crossed,
    in_force,
    propagate,
)
from gateway.core.entry import Unit
from gateway.core.ids import RANDOM_BYTES, new_id
from gateway.core.task import landing_percent
from gateway.storage.transact import Each, Fetch, FetchEach, Row, Sql, Tx, json_text

#: (budget id, start of the window that admitted the hold): a hold settles in that window, even after its end.
Window = tuple[str, int]

COLUMNS = (
    'budget_id, scope, "window", zone, window_start_ms, window_end_ms, limit_amount, posted_amount, held_amount, '
    "on_exceed, epoch, unit, mode, alert_percents, landing_percent, override_limit_amount, override_until_ms, "
    "ancestors, carved_amount, would_refuse"
)
LOCK = Sql(f"SELECT {COLUMNS} FROM budget WHERE scope = ANY($1::text[]) ORDER BY budget_id FOR UPDATE")  # noqa: S608
_LOCK_BY_ID = Sql(
    f"SELECT {COLUMNS} FROM budget WHERE budget_id = ANY($1::text[]) ORDER BY budget_id FOR UPDATE"  # noqa: S608
)
_READ = Sql(f"SELECT {COLUMNS} FROM budget WHERE scope = $1 ORDER BY budget_id")  # noqa: S608
_READ_ALL = Sql(f"SELECT {COLUMNS} FROM budget WHERE scope = ANY($1::text[])")  # noqa: S608
_NOW = Sql("SELECT now_ms()")
_EARLIER = Sql(
    "SELECT budget_id, window_start_ms, posted_amount, held_amount FROM budget_closed "
    "WHERE budget_id = ANY($1::text[]) AND window_start_ms >= $2"
)
_ARCHIVE = Sql(
    "INSERT INTO budget_closed (budget_id, window_start_ms, window_end_ms, scope, unit, limit_amount, "
    "posted_amount, held_amount, would_refuse) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)"
)
_ROLL = Sql(
    "UPDATE budget SET window_start_ms = $2, window_end_ms = $3, posted_amount = 0, held_amount = 0, "
    "would_refuse = 0 WHERE budget_id = $1"
)
_HOLD = Sql("UPDATE budget SET held_amount = $2, would_refuse = $3 WHERE budget_id = $1")
_CREATE_FOR_TASK = Sql(
    'INSERT INTO budget (budget_id, scope, "window", zone, window_start_ms, limit_amount, on_exceed, epoch, '
    "created_at_ms, landing_percent) VALUES ($1, $2, 'lifetime', 'UTC', 0, $3, $4, 0, $5, $6) ON CONFLICT DO NOTHING"
)
_SETTLE = Sql(
    "UPDATE budget SET held_amount = held_amount + $3, posted_amount = posted_amount + $4 "  # noqa: S608
    "WHERE budget_id = $1 AND window_start_ms = $2 RETURNING " + COLUMNS
)
_SETTLE_CLOSED = Sql(
    "UPDATE budget_closed SET held_amount = held_amount + $3, posted_amount = posted_amount + $4 "
    "WHERE budget_id = $1 AND window_start_ms = $2"
)
_ANNOUNCE = Sql(
    "INSERT INTO outbox (outbox_id, kind, dedupe, body, created_at_ms) VALUES ($1, $2, $3, $4, $5) "
    "ON CONFLICT (dedupe) DO NOTHING"
)


@dataclass(frozen=True, slots=True)
class TaskLimit:
    """The lifetime budget of a task that nobody gave one, and what happens when it is used up."""

    nano_usd: int
    on_exceed: OnExceed = OnExceed.ERROR


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where amounts are held or posted. In a row: a JSON array, which ends where the defaults begin."""

    budget_id: str
    window_start_ms: int
    unit: Unit = Unit.USD
    ancestors: tuple[str, ...] = ()  # of the budget, which take part in what it posts

    @classmethod
    def of(cls, budget: Budget) -> Place:
        return cls(budget.budget_id, budget.window_start_ms, budget.unit, budget.ancestors)


#: What an enum's own look-up does, at a tenth of its cost: budgets are read in every transaction.
_ON_EXCEED = {e.value: e for e in OnExceed}
_UNIT = {e.value: e for e in Unit}
_MODE = {e.value: e for e in BudgetMode}


def budget_of(row: Row) -> Budget:
    """A row of COLUMNS."""
    budget_id, scope, window, zone, start_ms, end_ms, limit, posted, held, on_exceed, epoch, *more = row
    unit, mode, percents, landing, override, until_ms, ancestors, carved, would_refuse = more
    return Budget(
        budget_id,
        scope,
        window,
        zone,
        start_ms,
        end_ms,
        limit,
        posted,
        held,
        _ON_EXCEED[on_exceed],
        epoch,
        _UNIT[unit],
        _MODE[mode],
        _percents(percents),
        landing,
        override,
        until_ms,
        _ids(ancestors),
        carved,
        would_refuse,
    )


@lru_cache(256)
def _percents(text: str) -> tuple[int, ...]:
    return msgspec.json.decode(text, type=tuple[int, ...])


@lru_cache(4096)
def _ids(text: str) -> tuple[str, ...]:
    return msgspec.json.decode(text, type=tuple[str, ...])


def places_text(places: Iterable[Place]) -> str:
    return json_text([_short(place) for place in places])


def _short(place: Place) -> tuple[object, ...]:
    if place.ancestors:
        return place.budget_id, place.window_start_ms, place.unit, place.ancestors
    if place.unit is Unit.USD:
        return place.budget_id, place.window_start_ms
    return place.budget_id, place.window_start_ms, place.unit


@lru_cache(4096)  # most holds of a moment are in the same few budgets
def places_of(text: str) -> tuple[Place, ...]:
    return msgspec.json.decode(text, type=tuple[Place, ...])


def lock(
    scopes: Iterable[str], now_ms: int, task_limits: Mapping[str, TaskLimit] | None = None
) -> Tx[dict[str, list[Budget]]]:
    """Lock the budgets of these scopes in the order of their ids, which prevents deadlock, and roll ended windows.

    `task_limits` are scopes of tasks that get such a lifetime budget of dollars if they have none yet.
    """
    rows = yield Fetch(LOCK, (sorted(set(scopes)),))
    return (yield from locked(rows, now_ms, task_limits))


def locked(
    rows: Sequence[Row], now_ms: int, task_limits: Mapping[str, TaskLimit] | None = None
) -> Tx[dict[str, list[Budget]]]:
    """The same where LOCK has found `rows`."""
    budgets = [budget_of(row) for row in rows]
    found = {b.scope for b in budgets}
    missing = {scope: limit for scope, limit in (task_limits or {}).items() if scope not in found}
    if missing:
        yield Each(
            _CREATE_FOR_TASK,
            [
                (
                    fresh_id("bud", now_ms),
                    scope,
                    missing[scope].nano_usd,
                    missing[scope].on_exceed.value,
                    now_ms,
                    landing_percent(missing[scope].on_exceed),
                )
                for scope in sorted(missing)
            ],
        )
        budgets += [budget_of(row) for row in (yield Fetch(LOCK, (sorted(missing),)))]
    budgets = yield from _roll(budgets, now_ms)
    by_scope: dict[str, list[Budget]] = {}
    for b in budgets:
        by_scope.setdefault(b.scope, []).append(b)
    return by_scope


def lock_by_id(budget_ids: Iterable[str], now_ms: int) -> Tx[dict[str, Budget]]:
    """Lock these budgets in the order of their ids, as they stand now; windows are not rolled."""
    rows = yield Fetch(_LOCK_BY_ID, (sorted(set(budget_ids)),))
    budgets = [at(budget_of(row), now_ms) for row in rows]
    return {b.budget_id: b for b in budgets}


def lock_tasks(task_ids: Iterable[str], now_ms: int) -> Tx[dict[str, Budget]]:
    """Lock the budgets of these tasks together with all that they are carved from, in the order of ids."""
    scopes = sorted({f"task:{task_id}" for task_id in task_ids})
    found = [budget_of(row) for row in (yield Fetch(_READ_ALL, (scopes,)))]
    return (yield from lock_by_id({i for b in found for i in (b.budget_id, *b.ancestors)}, now_ms))


def _roll(budgets: list[Budget], now_ms: int) -> Tx[list[Budget]]:
    ended = [b for b in budgets if b.window_end_ms is not None and b.window_end_ms <= now_ms]
    budgets = [at(b, now_ms) for b in budgets]
    if ended:
        yield Each(
            _ARCHIVE,
            [
                (
                    b.budget_id,
                    b.window_start_ms,
                    b.window_end_ms,
                    b.scope,
                    b.unit.value,
                    b.limit,
                    b.posted,
                    b.held,
                    b.would_refuse,
                )
                for b in ended
            ],
        )
        changed = {b.budget_id for b in ended}
        yield Each(
            _ROLL,
            [(b.budget_id, b.window_start_ms, b.window_end_ms) for b in budgets if b.budget_id in changed],
        )
    return (yield from with_earlier(budgets, now_ms))


def with_earlier(budgets: list[Budget], now_ms: int) -> Tx[list[Budget]]:
    """Add what the earlier buckets of rolling windows still count.

    Read by a statement of its own after the lock, so that it sees a bucket which another replica just closed.
    """
    rolling = {b.budget_id: counts_from_ms(b, now_ms) for b in budgets if b.rolling}
    if not rolling:
        return budgets
    posted = dict.fromkeys(rolling, 0)
    held = dict.fromkeys(rolling, 0)
    for budget_id, start_ms, posted_amount, held_amount in (
        yield Fetch(_EARLIER, (sorted(rolling), min(rolling.values())))
    ):
        if start_ms >= rolling[budget_id]:
            posted[budget_id] += posted_amount
            held[budget_id] += held_amount
    return [
        msgspec.structs.replace(b, earlier_posted=posted[b.budget_id], earlier_held=held[b.budget_id])
        if b.budget_id in rolling
        else b
        for b in budgets
    ]


def apart(budgets: Iterable[Budget]) -> list[Budget]:
    """Those that none of the others is carved from: what is held in a child is held in its parent already."""
    found = list(budgets)
    above = {i for b in found for i in b.ancestors}
    return [b for b in found if b.budget_id not in above] if above else found


def read(scope: str) -> Tx[list[Budget]]:
    """The budgets of a scope as they stand now, without a lock."""
    now_ms: int = (yield Fetch(_NOW))[0][0]
    budgets = [at(budget_of(row), now_ms) for row in (yield Fetch(_READ, (scope,)))]
    return (yield from with_earlier(budgets, now_ms))


def write_holds(budgets: Iterable[Budget]) -> Tx[None]:
    """Write what is held, and how much a shadow would have refused. Only under the lock taken by `lock`."""
    yield Each(_HOLD, [(b.budget_id, b.held, b.would_refuse) for b in budgets])


class Moves:
    """Changes of budgets, added up over a batch."""

    __slots__ = ("ancestors", "deltas")

    def __init__(self) -> None:
        self.deltas: dict[Window, Delta] = {}
        self.ancestors: set[str] = set()

    def add(self, place: Place, held: int, posted: int) -> None:
        window = place.budget_id, place.window_start_ms
        held_so_far, posted_so_far = self.deltas.get(window, (0, 0))
        self.deltas[window] = held_so_far + held, posted_so_far + posted
        self.ancestors.update(place.ancestors)


def move(moves: Moves, now_ms: int) -> Tx[list[tuple[Budget, int, list[int]]]]:
    """Add (held, posted) to the windows where they belong, and in the budgets that those are carved from, in the
    order of ids; announce crossed thresholds.

    A budget that was removed meanwhile is in neither table, and takes nothing. Returns the budgets of tasks in which
    anything was posted, by how much, and the percents that they crossed.
    """
    deltas = moves.deltas
    if not deltas:
        return []
    if moves.ancestors:
        deltas = yield from _with_ancestors(moves, now_ms)
    rows = [(*window, *deltas[window]) for window in sorted(deltas)]
    budgets = [in_force(budget_of(row), now_ms) for row in (yield FetchEach(_SETTLE, rows))]
    current = {(b.budget_id, b.window_start_ms) for b in budgets}
    closed = [row for row in rows if (row[0], row[1]) not in current]
    if closed:
        yield Each(_SETTLE_CLOSED, closed)
    alerts = []
    posted_in_tasks = []
    for b in (
        yield from with_earlier([b for b in budgets if deltas[b.budget_id, b.window_start_ms][1]], now_ms)
    ):
        posted = deltas[b.budget_id, b.window_start_ms][1]
        percents = crossed(b.alert_percents, b.limit, b.spent - posted, b.spent)
        alerts += [_alert(b, percent) for percent in percents]
        if b.scope.startswith("task:"):
            posted_in_tasks.append((b, posted, percents))
    yield from announce(alerts, now_ms)
    return posted_in_tasks


def _with_ancestors(moves: Moves, now_ms: int) -> Tx[dict[Window, Delta]]:
    """The budgets of tasks are for their lifetime: one window, which begins at 0."""
    budgets = yield from lock_by_id({b for b, _ in moves.deltas} | moves.ancestors, now_ms)
    tasks = {i: b for i, b in budgets.items() if b.window_end_ms is None}
    within = {i: delta for (i, start_ms), delta in moves.deltas.items() if i in tasks and start_ms == 0}
    changes = {(i, 0): delta for i, delta in propagate(tasks, within).items()}
    return {**moves.deltas, **changes}


def _alert(b: Budget, percent: int) -> tuple[str, str, Mapping[str, Any]]:
    body = {
        "scope": b.scope,
        "unit": b.unit,
        "percent": percent,
        "limit": b.limit,
        "spent": b.spent,
        "window_start_ms": b.window_start_ms,
    }
    # A limit that was changed is crossed anew: the epoch counts its changes.
    return "budget_alert", f"{b.budget_id}/{b.window_start_ms}/{b.epoch}/{percent}", body


def announce(messages: Sequence[tuple[str, str, Mapping[str, Any]]], now_ms: int) -> Tx[None]:
    """Put (kind, dedupe, body) into the outbox; a second one of the same `dedupe` is dropped."""
    if messages:
        yield Each(
            _ANNOUNCE,
            [
                (fresh_id("out", now_ms), kind, dedupe, json_text(body), now_ms)
                for kind, dedupe, body in messages
            ],
        )


def fresh_id(prefix: str, now_ms: int) -> str:
    return new_id(prefix, now_ms, os.urandom(RANDOM_BYTES))


def fresh_ids(prefix: str, now_ms: int, count: int) -> Iterator[str]:
    """As many ids for one visit to the kernel."""
    noise = os.urandom(RANDOM_BYTES * count)
    return iter(
        [new_id(prefix, now_ms, noise[i : i + RANDOM_BYTES]) for i in range(0, len(noise), RANDOM_BYTES)]
    )
