"""Budget rows inside a transaction: lock them, roll ended windows, move money. Arithmetic is in core/budget.py."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import msgspec

from gateway.core.budget import Budget, OnExceed, at, counts_from_ms, crossed
from gateway.core.ids import RANDOM_BYTES, new_id
from gateway.storage.transact import Each, Fetch, FetchEach, Row, Sql, Tx, json_text

#: (budget id, start of the window that admitted the hold): a hold settles in that window, even after its end.
Place = tuple[str, int]
#: (change of held, change of posted)
Delta = tuple[int, int]

COLUMNS = (
    'budget_id, scope, "window", zone, window_start_ms, window_end_ms, limit_nano_usd, posted_nano_usd, '
    "held_nano_usd, on_exceed, epoch"
)
_LOCK = Sql(f"SELECT {COLUMNS} FROM budget WHERE scope = ANY($1::text[]) ORDER BY budget_id FOR UPDATE")  # noqa: S608
_READ = Sql(f"SELECT {COLUMNS} FROM budget WHERE scope = $1 ORDER BY budget_id")  # noqa: S608
_NOW = Sql("SELECT now_ms()")
_EARLIER = Sql(
    "SELECT budget_id, window_start_ms, posted_nano_usd, held_nano_usd FROM budget_closed "
    "WHERE budget_id = ANY($1::text[]) AND window_start_ms >= $2"
)
_ARCHIVE = Sql(
    "INSERT INTO budget_closed (budget_id, window_start_ms, window_end_ms, scope, limit_nano_usd, "
    "posted_nano_usd, held_nano_usd) VALUES ($1, $2, $3, $4, $5, $6, $7)"
)
_ROLL = Sql(
    "UPDATE budget SET window_start_ms = $2, window_end_ms = $3, posted_nano_usd = 0, held_nano_usd = 0 "
    "WHERE budget_id = $1"
)
_HOLD = Sql("UPDATE budget SET held_nano_usd = $2 WHERE budget_id = $1")
_CREATE_FOR_TASK = Sql(
    'INSERT INTO budget (budget_id, scope, "window", zone, window_start_ms, limit_nano_usd, on_exceed, epoch, '
    "created_at_ms) VALUES ($1, $2, 'lifetime', 'UTC', 0, $3, 'error', 0, $4) ON CONFLICT DO NOTHING"
)
_SETTLE = Sql(
    "UPDATE budget SET held_nano_usd = held_nano_usd + $3, posted_nano_usd = posted_nano_usd + $4 "  # noqa: S608
    "WHERE budget_id = $1 AND window_start_ms = $2 RETURNING " + COLUMNS
)
_SETTLE_CLOSED = Sql(
    "UPDATE budget_closed SET held_nano_usd = held_nano_usd + $3, posted_nano_usd = posted_nano_usd + $4 "
    "WHERE budget_id = $1 AND window_start_ms = $2"
)
_ANNOUNCE = Sql(
    "INSERT INTO outbox (outbox_id, kind, dedupe, body, created_at_ms) VALUES ($1, $2, $3, $4, $5) "
    "ON CONFLICT (dedupe) DO NOTHING"
)


def budget_of(row: Row) -> Budget:
    budget_id, scope, window, zone, start_ms, end_ms, limit, posted, held, on_exceed, epoch = row
    return Budget(
        budget_id, scope, window, zone, start_ms, end_ms, limit, posted, held, OnExceed(on_exceed), epoch
    )


def places_text(places: Iterable[Place]) -> str:
    return json_text(tuple(places))


@lru_cache(4096)  # most holds of a moment are in the same few budgets
def places_of(text: str) -> tuple[Place, ...]:
    return msgspec.json.decode(text, type=tuple[Place, ...])


def lock(
    scopes: Iterable[str], now_ms: int, task_limits: Mapping[str, int] | None = None
) -> Tx[dict[str, list[Budget]]]:
    """Lock the budgets of these scopes in the order of their ids, which prevents deadlock, and roll ended windows.

    `task_limits` are scopes of tasks that get a lifetime budget of that many nano-dollars if they have none yet.
    """
    wanted = sorted(set(scopes))
    budgets = [budget_of(row) for row in (yield Fetch(_LOCK, (wanted,)))]
    found = {b.scope for b in budgets}
    missing = {scope: limit for scope, limit in (task_limits or {}).items() if scope not in found}
    if missing:
        yield Each(
            _CREATE_FOR_TASK,
            [(fresh_id("bud", now_ms), scope, missing[scope], now_ms) for scope in sorted(missing)],
        )
        budgets += [budget_of(row) for row in (yield Fetch(_LOCK, (sorted(missing),)))]
    budgets = yield from _roll(budgets, now_ms)
    by_scope: dict[str, list[Budget]] = {}
    for b in budgets:
        by_scope.setdefault(b.scope, []).append(b)
    return by_scope


def _roll(budgets: list[Budget], now_ms: int) -> Tx[list[Budget]]:
    ended = [b for b in budgets if b.window_end_ms is not None and b.window_end_ms <= now_ms]
    if ended:
        yield Each(
            _ARCHIVE,
            [
                (
                    b.budget_id,
                    b.window_start_ms,
                    b.window_end_ms,
                    b.scope,
                    b.limit_nano_usd,
                    b.posted_nano_usd,
                    b.held_nano_usd,
                )
                for b in ended
            ],
        )
        budgets = [at(b, now_ms) for b in budgets]
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
    for budget_id, start_ms, posted_nano_usd, held_nano_usd in (
        yield Fetch(_EARLIER, (sorted(rolling), min(rolling.values())))
    ):
        if start_ms >= rolling[budget_id]:
            posted[budget_id] += posted_nano_usd
            held[budget_id] += held_nano_usd
    return [
        replace(b, earlier_posted_nano_usd=posted[b.budget_id], earlier_held_nano_usd=held[b.budget_id])
        if b.budget_id in rolling
        else b
        for b in budgets
    ]


def read(scope: str) -> Tx[list[Budget]]:
    """The budgets of a scope as they stand now, without a lock."""
    now_ms: int = (yield Fetch(_NOW))[0][0]
    budgets = [at(budget_of(row), now_ms) for row in (yield Fetch(_READ, (scope,)))]
    return (yield from with_earlier(budgets, now_ms))


def write_holds(budgets: Iterable[Budget]) -> Tx[None]:
    """Write what is held. Only under the lock taken by `lock`."""
    yield Each(_HOLD, [(b.budget_id, b.held_nano_usd) for b in budgets])


def move(deltas: Mapping[Place, Delta], now_ms: int) -> Tx[None]:
    """Add (held, posted) to the windows where they belong, in the order of ids, and announce crossed thresholds.

    A budget that was removed meanwhile is in neither table, and takes nothing.
    """
    if not deltas:
        return
    rows = [(*place, *deltas[place]) for place in sorted(deltas)]
    budgets = [budget_of(row) for row in (yield FetchEach(_SETTLE, rows))]
    current = {(b.budget_id, b.window_start_ms) for b in budgets}
    closed = [row for row in rows if (row[0], row[1]) not in current]
    if closed:
        yield Each(_SETTLE_CLOSED, closed)
    alerts = []
    for b in (
        yield from with_earlier([b for b in budgets if deltas[b.budget_id, b.window_start_ms][1] > 0], now_ms)
    ):
        after = b.spent_nano_usd
        before = after - deltas[b.budget_id, b.window_start_ms][1]
        for percent in crossed(b.limit_nano_usd, before, after):
            body = {
                "scope": b.scope,
                "percent": percent,
                "limit_nano_usd": b.limit_nano_usd,
                "spent_nano_usd": after,
                "window_start_ms": b.window_start_ms,
            }
            alerts.append(("budget_alert", f"{b.budget_id}/{b.window_start_ms}/{b.epoch}/{percent}", body))
    yield from announce(alerts, now_ms)


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
    return (new_id(prefix, now_ms, noise[i : i + RANDOM_BYTES]) for i in range(0, len(noise), RANDOM_BYTES))
