"""Usage and cost in buckets of time, answered from sums alone: as many rows are read as there are groups in those hours,
however many attempts they sum up. Times are those of the attempts' starts.

    by team and tenant only   team_hour: a row for each team and hour
    by task                   the tasks themselves, each whole in the bucket in which it was last used
    of one task               its entries, by their index
    else                      usage_hour

Misses and refusals, where they are asked for, come from sums of their own in the same statement, so that all of it is
of one moment, and can be read in parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from gateway.core.buckets import runs
from gateway.core.offices import Reach
from gateway.core.usage_facts import GROUPS, Missed, Question, RefusedSum, UsageBucket
from gateway.storage.tables import MISS_SUMS, REFUSED_SUMS, TOKEN_COLUMNS, USAGE_SUMS
from gateway.storage.transact import Fetch, Row, Sql, Tx


def buckets(
    reach: Reach, question: Question, after: Sequence[Any] | None, limit: int
) -> Tx[tuple[list[UsageBucket], bool]]:
    """In the order of time and group, those behind the `place` `after`; and whether there are more than `limit` rows.

    Buckets in which nothing happened have none.
    """
    sql, args = usage_sql(reach, question, after, limit + 1)
    rows = yield Fetch(sql, args)
    names = _names(question)
    found = list(_read(rows, names))
    more = len(rows) > limit
    if more and len(found) > 1:
        found.pop()  # what is missed and refused of it may not all be there
    return found, more


def _names(question: Question) -> list[str]:
    return [name for name in GROUPS if name in question.by] + ["label"] * bool(question.label)


def _read(rows: Sequence[Row], names: Sequence[str]) -> Iterator[UsageBucket]:
    width = 1 + len(names)
    for place, own in groupby(rows, key=lambda row: tuple(row[:width])):
        sums = dict.fromkeys(USAGE_SUMS, 0)
        misses, refused = [], []
        for part, name, *numbers in (row[width:] for row in own):
            if part == 0:
                sums = dict(zip(USAGE_SUMS, numbers, strict=True))
            elif part == 1:
                misses.append(Missed(name, *numbers[: len(MISS_SUMS)]))
            else:
                refused.append(RefusedSum(name, *numbers[: len(REFUSED_SUMS)]))
        tokens = {name: sums.pop(name) for name in TOKEN_COLUMNS}
        group = dict(zip(names, place[1:], strict=True))
        yield UsageBucket(place[0], group, tokens=tokens, misses=misses, refused=refused, **sums)


# --- the statement ---------------------------------------------------------------------------------------------


class _Args(list[Any]):
    def place(self, value: Any) -> str:
        """Where the statement refers to it."""
        self.append(value)
        return f"${len(self)}"


def usage_sql(
    reach: Reach, question: Question, after: Sequence[Any] | None, limit: int
) -> tuple[Sql, list[Any]]:
    """The statement and its arguments. Its rows: start, groups, part (0 sums, 1 misses, 2 refused), name, numbers."""
    args = _Args()
    source = question.source
    label = args.place(question.label) if question.label else ""
    parts = [_part(reach, question, after, args, source, 0, "''", USAGE_SUMS)]
    if question.misses:
        parts.append(_part(reach, question, after, args, "miss_hour", 1, "s.cause", MISS_SUMS))
    if question.refusals:
        parts.append(_part(reach, question, after, args, "refused_hour", 2, "s.scope_kind", REFUSED_SUMS))
    order = ", ".join(str(i + 1) for i in range(len(_names(question)) + 3))
    text = f"{' UNION ALL '.join(parts)} ORDER BY {order} LIMIT {args.place(limit)}"
    if not label:
        return Sql(text), args
    # Each key's labels are read once, and not for each of its rows.
    with_labels = "WITH k AS MATERIALIZED (SELECT key_id, {} AS label FROM virtual_key) "
    return Sql.of(
        postgres=with_labels.format(f"labels::jsonb ->> CAST({label} AS text)") + text,
        sqlite=Sql(
            with_labels.format(f"(SELECT value FROM json_each(labels) WHERE key = {label})") + text  # noqa: S608
        ).sqlite,
    ), args


def _part(
    reach: Reach,
    question: Question,
    after: Sequence[Any] | None,
    args: _Args,
    table: str,
    part: int,
    name: str,
    sums: Sequence[str],
) -> str:
    at = {"task": "s.last_at_ms", "ledger": "s.at_ms"}.get(table, "s.hour_ms")
    start = _start(question.edges, at)
    groups = [f"s.{group}" for group in GROUPS if group in question.by]
    groups += ["coalesce(k.label, '')"] * bool(question.label)
    from_ms = question.edges[0] if after is None else after[0]
    conditions = [f"{at} >= {args.place(from_ms)}", f"{at} < {args.place(question.edges[-1])}"]
    wanted = [*question.filters.items(), ("tenant_id", reach.tenant_id), ("team_id", reach.team_id)]
    conditions += [f"s.{column} = {args.place(value)}" for column, value in wanted if value]
    behind = ""
    if after is not None:
        places = ", ".join(args.place(value) for value in after)
        behind = f" AND ({', '.join([start, *groups])}) > ({places})"
    where = " AND ".join(conditions)
    origin = f"{table} s"
    if table == "ledger":
        # Inside, so that the index of tasks finds them; the window looks at an attempt's entries together.
        origin, where = f"({_OF_ENTRIES} WHERE {where}) s", "1 = 1"
    if question.label:
        origin += " LEFT JOIN k ON k.key_id = s.key_id"
    # Postgres sums BIGINT to NUMERIC, which would arrive as Decimal.
    numbers = [f"CAST(sum(s.{column}) AS BIGINT)" for column in sums] + ["0"] * (len(USAGE_SUMS) - len(sums))
    grouped = [start, *groups] + [name] * (part > 0)
    return (
        f"SELECT {', '.join([start, *groups, str(part), name, *numbers])} FROM {origin} "  # noqa: S608
        f"WHERE {where}{behind} GROUP BY {', '.join(grouped)}"
    )


def _start(edges: Sequence[int], at: str) -> str:
    """The start of the bucket that a time is in."""
    cases = [
        (run.end_ms, f"{run.start_ms} + ({at} - {run.start_ms}) / {run.width_ms} * {run.width_ms}")
        for run in runs(edges)
    ]
    last = cases.pop()[1]
    if not cases:
        return f"CAST({last} AS BIGINT)"
    whens = " ".join(f"WHEN {at} < {end_ms} THEN {start}" for end_ms, start in cases)
    return f"CAST(CASE {whens} ELSE {last} END AS BIGINT)"


#: Entries as if each were a row of sums. A `correct` entry is no attempt of its own; its amounts are differences.
_OF_ENTRIES = (
    f"SELECT s.at_ms, {', '.join(f's.{group}' for group in GROUPS)}, "  # noqa: S608
    "CASE WHEN s.kind <> 'correct' THEN 1 ELSE 0 END AS attempts, "
    "CASE WHEN s.kind <> 'correct' AND s.error <> '' THEN 1 ELSE 0 END AS errors, "
    "CASE WHEN s.kind <> 'correct' AND s.attempt_no > 1 THEN 1 ELSE 0 END AS retries, "
    "CASE WHEN s.attempt_no > 1 THEN s.amount_nano_usd ELSE 0 END AS retries_cost_nano_usd, "
    "CASE WHEN max(CASE WHEN s.kind <> 'correct' AND s.error <> '' THEN 1 ELSE 0 END) "
    "OVER (PARTITION BY s.attempt_id) = 1 THEN s.amount_nano_usd ELSE 0 END AS failed_cost_nano_usd, "
    "s.amount_nano_usd AS cost_nano_usd, s.list_cost_nano_usd, "
    f"{', '.join(f's.{column}' for column in TOKEN_COLUMNS)} FROM ledger s"
)
