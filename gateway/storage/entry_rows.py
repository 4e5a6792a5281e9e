"""Ledger entries as rows, and the sums that are derived from them in the same transaction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import msgspec

from gateway.core.entry import Attempt, Kind, Outcome
from gateway.core.explanation import Explanation
from gateway.storage.tables import (
    MISS_KEYS,
    MISS_SUMS,
    TEAM_KEYS,
    TOKEN_COLUMNS,
    USAGE_KEYS,
    USAGE_SUMS,
    ledger,
    prefix_miss,
)
from gateway.storage.transact import Each, FetchEach, Sql, Tx, json_text

_HOUR_MS = 3_600_000
_LEDGER_COLUMNS = tuple(c.name for c in ledger.columns)


def _insert(table: str, columns: Sequence[str]) -> str:
    values = ", ".join(f"${i + 1}" for i in range(len(columns)))
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({values})"  # noqa: S608


_INSERT_ENTRY = Sql(_insert("ledger", _LEDGER_COLUMNS))
_INSERT_MISS = Sql(
    _insert("prefix_miss", [c.name for c in prefix_miss.columns])
    + " ON CONFLICT DO NOTHING RETURNING attempt_id"
)


def add_to(table: str, keys: Sequence[str], sums: Sequence[str]) -> Sql:
    """Add sums to the row with these keys, which is made if there is none."""
    return Sql(
        _insert(table, (*keys, *sums))
        + f" ON CONFLICT ({', '.join(keys)}) DO UPDATE SET "
        + ", ".join(f"{c} = {table}.{c} + excluded.{c}" for c in sums)
    )


_ADD_USAGE = add_to("usage_hour", USAGE_KEYS, USAGE_SUMS)
_ADD_TO_TEAM = add_to("team_hour", TEAM_KEYS, USAGE_SUMS)
_ADD_MISSES = add_to("miss_hour", MISS_KEYS, MISS_SUMS)
_ADD_TO_TASK = Sql(
    "UPDATE task SET "  # noqa: S608
    + ", ".join(f"{c} = {c} + ${i + 3}" for i, c in enumerate(USAGE_SUMS))
    + ", last_at_ms = CASE WHEN last_at_ms < $2 THEN $2 ELSE last_at_ms END WHERE task_id = $1"
)
_ENSURE_TASK = Sql(
    "INSERT INTO task (task_id, key_id, team_id, tenant_id, external_id, source, parent_task_id, state, "
    "created_at_ms, last_at_ms) VALUES ($1, $2, $3, $4, $5, $6, $7, 'running', $8, $8) ON CONFLICT DO NOTHING"
)

S = TypeVar("S", Attempt, Outcome)


# A Struct that the garbage collector does not follow: one is built for every attempt, and nothing in it points back.
class Entry(msgspec.Struct, frozen=True, gc=False):
    """One entry about to be written. `charged`, `list_cost` and `tokens` are signed differences in a `correct`."""

    entry_id: str
    at_ms: int
    attempt: Attempt
    outcome: Outcome
    kind: Kind
    charged: tuple[int, int, int, int]  # to budgets: nano-dollars, input tokens, output tokens, calls
    list_cost_nano_usd: int
    tokens: tuple[int, ...]  # as TOKEN_COLUMNS
    hold_nano_usd: int
    step: int
    budgets: str
    failed: bool  # the attempt's terminal entry says an error


_tokens = attrgetter(*TOKEN_COLUMNS)


def tokens_of(outcome: Outcome) -> tuple[int, ...]:
    tokens: tuple[int, ...] = _tokens(outcome.usage)
    return tokens


def storable(fact: S) -> S:
    """The same with text that both stores take: clients send NULs, and lone surrogates come from odd headers."""
    texts = _TEXTS[type(fact)](fact)
    if "".join(filter(None, texts)).isprintable():
        return fact
    changed = {
        name: text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")
        for name, text in zip(_TEXT_FIELDS[type(fact)], texts, strict=True)
        if text is not None
    }
    return msgspec.structs.replace(fact, **changed)


_TEXT_FIELDS = {
    kind: tuple(f.name for f in msgspec.structs.fields(kind) if f.type in (str, str | None))
    for kind in (Attempt, Outcome)
}
_TEXTS = {kind: attrgetter(*names) for kind, names in _TEXT_FIELDS.items()}


def write(entries: Sequence[Entry], replica_id: str, now_ms: int) -> Tx[set[str]]:
    """Insert entries; `Conflict` if one is there already. Returns the attempts of which a miss was not yet written.

    `add_up` follows, after the budgets are locked.
    """
    yield Each(_INSERT_ENTRY, [_ledger_row(e, replica_id, now_ms) for e in entries])
    misses = [_miss_row(e, e.outcome.miss) for e in entries if e.outcome.miss is not None]
    if not misses:
        return set()
    return {row[0] for row in (yield FetchEach(_INSERT_MISS, misses))}


def add_up(entries: Sequence[Entry], new_misses: Collection[str], now_ms: int) -> Tx[None]:
    """Add entries to the hourly sums and to their tasks, each in the order of its keys (against deadlock)."""
    usage: _Parts = defaultdict(list)
    teams: _Parts = defaultdict(list)
    tasks: _Parts = defaultdict(list)
    misses: _Parts = defaultdict(list)
    for e in entries:
        a, miss = e.attempt, e.outcome.miss
        key = (e.at_ms // _HOUR_MS * _HOUR_MS, *_usage_keys(a))
        sums = _sums(e)
        usage[key].append(sums)
        tasks[a.task_id,].append(sums)
        if miss is not None and a.attempt_id in new_misses:
            misses[*key, miss.cause.value].append((1, miss.lost_tokens, miss.lost_nano_usd))
    usage_rows = _rows(usage)
    for row in usage_rows:
        teams[row[: len(TEAM_KEYS)]].append(row[len(USAGE_KEYS) :])
    yield Each(_ADD_USAGE, usage_rows)
    yield Each(_ADD_TO_TEAM, _rows(teams))
    if misses:
        yield Each(_ADD_MISSES, _rows(misses))
    yield Each(_ADD_TO_TASK, [(task_id, now_ms, *sums) for task_id, *sums in _rows(tasks)])


#: What is to be added to the row with these keys, not added up yet: a batch is mostly for the same few rows.
_Parts = defaultdict[tuple[Any, ...], list[tuple[int, ...]]]
_usage_keys = attrgetter(*USAGE_KEYS[1:])


def _sums(e: Entry) -> tuple[int, ...]:
    """As USAGE_SUMS."""
    amount, terminal = e.charged[0], e.kind is not Kind.CORRECT
    if terminal and not e.failed and e.attempt.attempt_no == 1:  # almost all
        return 1, 0, 0, 0, 0, amount, e.list_cost_nano_usd, *e.tokens
    retry = e.attempt.attempt_no > 1
    return (
        int(terminal),
        int(terminal and e.failed),
        int(terminal and retry),
        amount if retry else 0,
        amount if e.failed else 0,
        amount,
        e.list_cost_nano_usd,
        *e.tokens,
    )


def _rows(parts: _Parts) -> list[tuple[Any, ...]]:
    return [(*key, *map(sum, zip(*parts[key], strict=True))) for key in sorted(parts)]


def ensure_tasks(attempts: Iterable[Attempt], now_ms: int) -> Tx[None]:
    """Make rows for tasks that the store has lost together with their holds."""
    by_task = {a.task_id: a for a in attempts}
    yield Each(
        _ENSURE_TASK,
        [
            (
                a.task_id,
                a.key_id,
                a.team_id,
                a.tenant_id,
                a.task_external_id,
                a.task_source,
                a.parent_task_id,
                now_ms,
            )
            for a in (by_task[t] for t in sorted(by_task))
        ],
    )


def _miss_row(e: Entry, miss: Explanation) -> tuple[Any, ...]:
    a = e.attempt
    return (
        a.attempt_id,
        e.at_ms,
        a.request_id,
        a.tenant_id,
        a.team_id,
        a.key_id,
        a.task_id,
        a.model,
        a.provider,
        a.deployment,
        a.client,
        miss.verdict.value,
        miss.cause.value,
        miss.lost_tokens,
        miss.lost_nano_usd,
        json_text(miss),
    )


def _from_to(first: str, last: str) -> tuple[str, ...]:
    return _LEDGER_COLUMNS[_LEDGER_COLUMNS.index(first) : _LEDGER_COLUMNS.index(last) + 1]


#: Neighbours in the table that have the names of fields are read in one go.
_attempt_columns = attrgetter(*_from_to("request_id", "started_at_ms"))
_outcome_columns = attrgetter(*_from_to("price_version", "note"))


def _ledger_row(e: Entry, replica_id: str, now_ms: int) -> tuple[Any, ...]:
    o = e.outcome
    amount, *charged = e.charged
    return (
        e.at_ms,
        e.entry_id,
        e.attempt.attempt_id,
        e.kind._value_,  # `value` of an enum costs two calls
        amount,
        e.list_cost_nano_usd,
        e.hold_nano_usd,
        e.step,
        now_ms,
        e.budgets,
        replica_id,
        *_attempt_columns(e.attempt),
        *e.tokens,
        o.quality._value_,
        *_outcome_columns(o),
        *charged,
        o.served_by,
    )
