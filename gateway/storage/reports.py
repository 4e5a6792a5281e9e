"""What was used and what it cost, by any of a few dimensions; and the ledger's entries themselves.

All of it comes from the sums that the settling transaction writes, by the hour and of each task. Of tasks that were
under way when the time asked for began or ended the entries are read as well, by their index; so are those of tasks
beside other dimensions, and misses by task, which no sums tell apart.
Times are those of the attempts' starts. All raise `Unavailable` when the store is down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.core.errors import InvalidRequest
from gateway.core.explanation import Explanation
from gateway.storage.database import Database
from gateway.storage.tables import TOKEN_COLUMNS, ledger
from gateway.storage.transact import Fetch, Row, Sql, Tx

_DAY_MS = 86_400_000
_HOUR_MS = 3_600_000
#: Between an attempt's start and what its task's row says of it: clocks differ, and a row is written a little later.
_SLACK_MS = 600_000
#: What a report may be grouped by -> the column, in usage_hour and in ledger.
DIMENSIONS: Mapping[str, str] = {
    "tenant": "tenant_id",
    "team": "team_id",
    "key": "key_id",
    "task": "task_id",
    "model": "model",
    "provider": "provider",
    "deployment": "deployment",
    "tier": "tier",
    "client": "client",
    "day": "day",
}
_ENTRY_COLUMNS = tuple(c.name for c in ledger.columns)


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One group: its values in the order asked for ("day" as milliseconds of its UTC midnight), and its sums."""

    group: tuple[str | int, ...]
    attempts: int
    errors: int
    retries: int
    retries_cost_nano_usd: int
    cost_nano_usd: int
    list_cost_nano_usd: int
    tokens: Mapping[str, int]  # as tables.TOKEN_COLUMNS

    @property
    def saved_nano_usd(self) -> int:
        """What caching saved against the same tokens without a cache; negative if writing cost more."""
        return self.list_cost_nano_usd - self.cost_nano_usd


async def usage(
    database: Database, *, by: Sequence[str], from_ms: int, to_ms: int, team_id: str = "", key_id: str = ""
) -> list[UsageRow]:
    """Sums over [from, to), grouped by any of DIMENSIONS; the costliest group first.

    Widened to full hours, unless tasks are among the groups. A task that was never called has no row.
    """
    unknown = [name for name in by if name not in DIMENSIONS]
    if unknown:
        raise InvalidRequest(
            f"cannot group by {', '.join(unknown)}; choose from {', '.join(DIMENSIONS)}", param="by"
        )
    if tuple(by) == ("task",) and not team_id and not key_id:
        return [_usage_row(row, 1) for row in await _fetch(database, _TASKS, from_ms, to_ms, _SLACK_MS)]
    sql = Sql(_usage_sql(by, "task" in by))
    first_ms = from_ms // _HOUR_MS * _HOUR_MS
    end_ms = -(-to_ms // _HOUR_MS) * _HOUR_MS
    found = await _fetch(database, sql, first_ms, end_ms, team_id, key_id)
    return [_usage_row(row, len(by)) for row in found]


async def entries(
    database: Database,
    *,
    request_id: str = "",
    task_id: str = "",
    from_ms: int = 0,
    to_ms: int = 2**62,
    after: tuple[int, str] = (-1, ""),
    limit: int = 1_000,
) -> list[dict[str, Any]]:
    """Ledger entries in the order of their attempts, as dicts of all columns of `tables.ledger`.

    The next page is `after` = (at_ms, entry_id) of the last one.
    """
    found = await _fetch(database, _ENTRIES, request_id, task_id, from_ms, to_ms, after[0], after[1], limit)
    dicts = [dict(zip(_ENTRY_COLUMNS, row, strict=True)) for row in found]
    for entry in dicts:
        entry["stream"] = bool(entry["stream"])  # SQLite has no booleans
    return dicts


@dataclass(frozen=True, slots=True)
class MissRow:
    """Attempts of one group that read less from a cache than they could have, for one cause."""

    group: tuple[str | int, ...]
    cause: str
    attempts: int
    lost_tokens: int
    lost_nano_usd: int


async def misses(
    database: Database,
    *,
    by: Sequence[str],
    from_ms: int = 0,
    to_ms: int = 2**62,
    tenant_id: str = "",
    team_id: str = "",
    key_id: str = "",
    task_id: str = "",
) -> list[MissRow]:
    """Misses over [from, to), grouped by any of DIMENSIONS and by their cause; the costliest first.

    Of a task or by tasks: as long as misses are kept, and not by "tier". Else of all time, widened to full hours.
    """
    of_tasks = bool(task_id) or "task" in by
    known = [name for name in DIMENSIONS if name != "tier" or not of_tasks]
    unknown = [name for name in by if name not in known]
    if unknown:
        raise InvalidRequest(
            f"cannot group by {', '.join(unknown)}; choose from {', '.join(known)}", param="by"
        )
    if not of_tasks:
        from_ms, to_ms = from_ms // _HOUR_MS * _HOUR_MS, -(-to_ms // _HOUR_MS) * _HOUR_MS
    args = (from_ms, to_ms, team_id, key_id, tenant_id, *((task_id,) if of_tasks else ()))
    found = await _fetch(database, Sql(_misses_sql(by, of_tasks)), *args)
    return [MissRow(tuple(row[: len(by)]), *row[len(by) :]) for row in found]


async def task_costs(database: Database, task_id: str) -> tuple[int, int]:
    """(cost, cost of the same tokens without a cache) of a task, in nano-dollars; zeros if there is none."""
    rows = await _fetch(database, _TASK_COSTS, task_id)
    return tuple(rows[0]) if rows else (0, 0)


async def explanations(database: Database, request_id: str) -> dict[str, Explanation]:
    """Why the attempts of a request read less than they could have, by attempt id. A hit is not in there."""
    rows = await _fetch(database, _EXPLANATIONS, request_id)
    return {attempt_id: _explanation.decode(detail) for attempt_id, detail in rows}


@dataclass(frozen=True, slots=True)
class Drift:
    """A budget window whose totals are not the sums of its entries, open holds and children. There must be none.

    All amounts are in `unit`.
    """

    budget_id: str
    window_start_ms: int
    scope: str
    unit: str
    posted: int
    posted_by_entries: int
    held: int
    held_by_holds: int


async def drift(database: Database) -> list[Drift]:
    """Recompute every budget window from entries, holds and the budgets carved from it (invariant I3) and return those
    that differ.

    Reads the whole ledger: for `doctor` and tests. Windows of removed budgets are left out.
    """
    return [Drift(*row) for row in await _fetch(database, _DRIFT)]


def _usage_row(row: Row, groups: int) -> UsageRow:
    attempts, errors, retries, retries_cost, cost, list_cost, *tokens = row[groups:]
    return UsageRow(
        tuple(row[:groups]),
        attempts,
        errors,
        retries,
        retries_cost,
        cost,
        list_cost,
        dict(zip(TOKEN_COLUMNS, tokens, strict=True)),
    )


def _usage_sql(by: Sequence[str], from_entries: bool) -> str:
    at = "at_ms" if from_entries else "hour_ms"
    columns = [f"{at} / {_DAY_MS} * {_DAY_MS}" if name == "day" else DIMENSIONS[name] for name in by]
    sums = [*_SUMS_OF_ENTRIES] if from_entries else [_sum(name) for name in _SUMS]
    groups = ", ".join(str(i + 1) for i in range(len(by)))
    cost = len(by) + 5
    return (
        f"SELECT {', '.join(columns + sums)} FROM {'ledger l' if from_entries else 'usage_hour'} "  # noqa: S608
        f"WHERE {at} >= $1 AND {at} < $2 AND ($3 = '' OR team_id = $3) AND ($4 = '' OR key_id = $4) "
        + (f"GROUP BY {groups} ORDER BY {cost} DESC, {groups}" if by else "")
    )


def _sum(expression: str) -> str:
    # Postgres sums BIGINT to NUMERIC, which would arrive as Decimal.
    return f"CAST(coalesce(sum({expression}), 0) AS BIGINT)"


def _misses_sql(by: Sequence[str], of_tasks: bool) -> str:
    at = "at_ms" if of_tasks else "hour_ms"
    columns = [f"{at} / {_DAY_MS} * {_DAY_MS}" if name == "day" else DIMENSIONS[name] for name in by]
    groups = ", ".join(str(i + 1) for i in range(len(by) + 1))
    attempts = "count(*)" if of_tasks else _sum("attempts")
    of_task = "AND ($6 = '' OR task_id = $6) " if of_tasks else ""
    sums = ["cause", attempts, _sum("lost_tokens"), _sum("lost_nano_usd")]
    return (
        f"SELECT {', '.join(columns + sums)} FROM {'prefix_miss' if of_tasks else 'miss_hour'} "  # noqa: S608
        f"WHERE {at} >= $1 AND {at} < $2 AND ($3 = '' OR team_id = $3) AND ($4 = '' OR key_id = $4) "
        f"AND ($5 = '' OR tenant_id = $5) {of_task}"
        f"GROUP BY {groups} ORDER BY {len(by) + 4} DESC, {groups}"
    )


#: As the fields of UsageRow.
_SUMS = (
    "attempts",
    "errors",
    "retries",
    "retries_cost_nano_usd",
    "cost_nano_usd",
    "list_cost_nano_usd",
    *TOKEN_COLUMNS,
)
#: The same of entries. A `correct` one is no attempt of its own; its amounts are differences, which just add up.
_SUMS_OF_ENTRIES = (
    "count(CASE WHEN l.kind <> 'correct' THEN 1 END)",
    "count(CASE WHEN l.kind <> 'correct' AND l.error <> '' THEN 1 END)",
    "count(CASE WHEN l.kind <> 'correct' AND l.attempt_no > 1 THEN 1 END)",
    _sum("CASE WHEN l.attempt_no > 1 THEN l.amount_nano_usd ELSE 0 END"),
    _sum("l.amount_nano_usd"),
    *(_sum(f"l.{name}") for name in ("list_cost_nano_usd", *TOKEN_COLUMNS)),
)
_WHOLLY_WITHIN = "t.created_at_ms >= $1 + $3 AND t.last_at_ms < $2 - $3"
_TASKS = Sql(
    f"SELECT t.task_id, {', '.join(f't.{name}' for name in _SUMS)} FROM task t "  # noqa: S608
    f"WHERE t.attempts > 0 AND t.last_at_ms >= $1 AND {_WHOLLY_WITHIN} "
    f"UNION ALL SELECT l.task_id, {', '.join(_SUMS_OF_ENTRIES)} FROM task t JOIN ledger l ON l.task_id = t.task_id "
    f"WHERE t.last_at_ms >= $1 - $3 AND t.created_at_ms < $2 + $3 AND NOT ({_WHOLLY_WITHIN}) "
    "AND l.at_ms >= $1 AND l.at_ms < $2 GROUP BY l.task_id ORDER BY 6 DESC, 1"
)
_TASK_COSTS = Sql("SELECT cost_nano_usd, list_cost_nano_usd FROM task WHERE task_id = $1")
_EXPLANATIONS = Sql("SELECT attempt_id, detail FROM prefix_miss WHERE request_id = $1 ORDER BY at_ms")
_explanation = msgspec.json.Decoder(Explanation)

_ENTRIES = Sql(
    f"SELECT {', '.join(_ENTRY_COLUMNS)} FROM ledger "  # noqa: S608
    "WHERE ($1 = '' OR request_id = $1) AND ($2 = '' OR task_id = $2) AND at_ms >= $3 AND at_ms < $4 "
    "AND (at_ms > $5 OR (at_ms = $5 AND entry_id > $6)) ORDER BY at_ms, entry_id LIMIT $7"
)


def _drift_sql(places: str, field: Callable[[int], str], first: str) -> str:
    """`places` unfolds a row's JSON array of places, `field` names the n-th element of one, `first` an ancestor."""
    window = f"{field(0)} AS b, CAST({field(1)} AS BIGINT) AS w"
    unit = f"CASE coalesce({field(2)}, 'usd')"
    posted = (
        f"{unit} WHEN 'usd' THEN amount_nano_usd WHEN 'input_tokens' THEN charged_input_tokens "
        "WHEN 'output_tokens' THEN charged_output_tokens ELSE charged_calls END"
    )
    held = (
        f"{unit} WHEN 'usd' THEN amount_nano_usd WHEN 'input_tokens' THEN input_tokens "
        "WHEN 'output_tokens' THEN output_tokens ELSE calls END"
    )
    # What a child occupies of its parent: core/budget.py, `claim`.
    claim = (
        "CASE WHEN held_amount > carved_amount - posted_amount THEN held_amount "
        "ELSE carved_amount - posted_amount END"
    )
    child = f"FROM budget WHERE ancestors <> '[]' GROUP BY {first}"
    columns = "budget_id, window_start_ms, scope, unit, posted_amount, held_amount"
    return (
        f"WITH windows AS (SELECT {columns} FROM budget UNION ALL SELECT {columns} FROM budget_closed), "  # noqa: S608
        f"posted AS (SELECT {window}, sum({posted}) AS n FROM ledger, {places} GROUP BY 1, 2), "
        f"held AS (SELECT {window}, sum({held}) AS n FROM hold, {places} WHERE state = 'held' GROUP BY 1, 2), "
        f"below AS (SELECT {first} AS b, sum(posted_amount) AS posted, sum({claim}) AS held {child}), "
        "sums AS (SELECT windows.*, "
        "CAST(coalesce(p.n, 0) + coalesce(c.posted, 0) AS BIGINT) AS posted_sum, "
        "CAST(coalesce(h.n, 0) + coalesce(c.held, 0) AS BIGINT) AS held_sum FROM windows "
        "LEFT JOIN posted p ON p.b = budget_id AND p.w = window_start_ms "
        "LEFT JOIN held h ON h.b = budget_id AND h.w = window_start_ms "
        # Only budgets for a lifetime have children, so the window needs no comparison.
        "LEFT JOIN below c ON c.b = budget_id) "
        "SELECT budget_id, window_start_ms, scope, unit, posted_amount, posted_sum, held_amount, held_sum FROM sums "
        "WHERE posted_amount <> posted_sum OR held_amount <> held_sum ORDER BY 1, 2"
    )


_DRIFT = Sql.of(
    postgres=_drift_sql(
        "jsonb_array_elements(budgets::jsonb) AS place", lambda n: f"place ->> {n}", "ancestors::jsonb ->> 0"
    ),
    sqlite=_drift_sql(
        "json_each(budgets) AS place",
        lambda n: f"json_extract(place.value, '$[{n}]')",
        "json_extract(ancestors, '$[0]')",
    ),
)


async def _fetch(database: Database, sql: Sql, *args: Any) -> list[Row]:
    def tx() -> Tx[list[Row]]:
        return list((yield Fetch(sql, args)))

    return await database.report(tx)
