"""The tables as the checker reads them. What columns are called is known only here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tests.simulator.calls import Amounts
from tests.simulator.store import Store

#: (budget id, start of the window)
Place = tuple[str, int]


class Hold(NamedTuple):
    attempt_id: str
    replica_id: str
    epoch: int
    amounts: Amounts
    places: tuple[Place, ...]
    created_ms: int
    above: tuple[str, ...]  # budgets of which those of the places are parts


class Entry(NamedTuple):
    attempt_id: str
    kind: str
    quality: str
    error: str
    amounts: Amounts
    places: tuple[Place, ...]
    posted_at_ms: int


class Window(NamedTuple):
    """A budget in one window, the current one or one that is over."""

    scope: str
    unit: str
    window: str
    zone: str
    hard: bool
    posted: int
    held: int
    base_limit: int
    override_limit: int | None = None
    override_until_ms: int = 0
    ancestors: tuple[str, ...] = ()
    carved: int = 0
    #: Of a budget under which each task sums up: which stop it is.
    stop: tuple[int, int] | None = None

    def limit(self, at_ms: int) -> int:
        if self.override_limit is None or at_ms >= self.override_until_ms:
            return self.base_limit
        return self.override_limit


def new_holds(store: Store, after: int) -> list[tuple[int, Hold]]:
    rows = store.rows(
        "SELECT rowid, attempt_id, replica_id, replica_epoch, amount_nano_usd, input_tokens, output_tokens, calls, "
        "budgets, created_at_ms FROM hold WHERE rowid > ?",
        after,
    )
    return [(r[0], Hold(r[1], r[2], r[3], r[4:8], _places(r[8]), r[9], _above(r[8]))) for r in rows]


def open_holds(store: Store) -> set[str]:
    return {row[0] for row in store.rows("SELECT attempt_id FROM hold WHERE state = 'held'")}


def new_entries(store: Store, after: int) -> list[tuple[int, Entry]]:
    rows = store.rows(
        "SELECT rowid, attempt_id, kind, quality, error, amount_nano_usd, charged_input_tokens, charged_output_tokens, "
        "charged_calls, budgets, posted_at_ms FROM ledger WHERE rowid > ?",
        after,
    )
    return [(r[0], Entry(r[1], r[2], r[3], r[4], r[5:9], _places(r[9]), r[10])) for r in rows]


def windows(store: Store) -> dict[Place, Window]:
    """The current ones."""
    rows = store.rows(
        'SELECT budget_id, window_start_ms, scope, unit, "window", zone, on_exceed, mode, posted_amount, held_amount, '
        "limit_amount, override_limit_amount, override_until_ms, ancestors, carved_amount, epoch FROM budget ORDER BY budget_id"
    )
    return {
        (r[0], r[1]): Window(
            *(
                r[2],
                r[3],
                r[4],
                r[5],
                r[6] != "warn" and r[7] == "enforce",
                r[8],
                r[9],
                r[10],
                r[11],
                r[12] or 0,
            ),
            tuple(msgspec.json.decode(r[13])),
            r[14],
            (0 if r[4].startswith("rolling") else r[1], r[15])
            if r[6] == "summarize" and r[7] == "enforce" and not r[2].startswith("task:")
            else None,
        )
        for r in rows
    }


def closed_windows(store: Store, places: Sequence[Place]) -> dict[Place, Window]:
    """Those of `places` that are over."""
    found: dict[Place, Window] = {}
    for place in places:
        for r in store.rows(
            "SELECT scope, unit, posted_amount, held_amount, limit_amount FROM budget_closed "
            "WHERE budget_id = ? AND window_start_ms = ?",
            *place,
        ):
            found[place] = Window(r[0], r[1], "", "", False, r[2], r[3], r[4])
    return found


def all_closed(store: Store) -> list[Place]:
    return [
        (r[0], r[1]) for r in store.rows("SELECT budget_id, window_start_ms FROM budget_closed ORDER BY 1, 2")
    ]


def leases(store: Store) -> list[tuple[Any, ...]]:
    """(replica, epoch, started, expires) of each replica's latest run."""
    return store.rows(
        "SELECT replica_id, epoch, started_at_ms, expires_at_ms FROM replica ORDER BY replica_id"
    )


def sums_that_differ(store: Store) -> list[tuple[Any, ...]]:
    """Hourly usage and tasks against the entries they are sums of."""
    return [
        *(
            row
            for table in ("usage_hour", "team_hour")
            for row in store.rows(
                f"SELECT '{table}', u.n, u.cost, l.n, l.cost FROM "
                f"(SELECT coalesce(sum(attempts), 0) n, coalesce(sum(cost_nano_usd), 0) cost FROM {table}) u, "
                "(SELECT count(CASE WHEN kind <> 'correct' THEN 1 END) n, coalesce(sum(amount_nano_usd), 0) cost "
                "FROM ledger) l WHERE u.n <> l.n OR u.cost <> l.cost"
            )
        ),
        *store.rows(
            "SELECT t.task_id, t.attempts, t.cost_nano_usd, t.output, l.n, l.cost, l.output FROM task t LEFT JOIN "
            "(SELECT task_id, count(CASE WHEN kind <> 'correct' THEN 1 END) n, sum(amount_nano_usd) cost, "
            "sum(output) output FROM ledger GROUP BY 1) l ON l.task_id = t.task_id WHERE t.attempts <> coalesce(l.n, 0) "
            "OR t.cost_nano_usd <> coalesce(l.cost, 0) OR t.output <> coalesce(l.output, 0)"
        ),
    ]


def task_states(store: Store) -> dict[str, str]:
    return dict(store.rows("SELECT task_id, state FROM task"))


def named_parents(store: Store) -> list[tuple[str, str]]:
    """(task, parent) of those that clients named; the money of a declared child is a slice of its parent's."""
    return store.rows(
        "SELECT task_id, parent_task_id FROM task WHERE parent_task_id IS NOT NULL AND source <> 'declared' "
        "ORDER BY task_id"
    )


def steps(store: Store) -> dict[str, int]:
    return dict(store.rows("SELECT task_id, steps FROM task"))


def _places(text: str) -> tuple[Place, ...]:
    return tuple((p[0], p[1]) for p in msgspec.json.decode(text))


def _above(text: str) -> tuple[str, ...]:
    found = {budget_id for p in msgspec.json.decode(text) if len(p) > 3 for budget_id in p[3]}
    return tuple(sorted(found))
