"""Usage and cost in buckets of time, from the hourly sums alone: as many rows are read as there are groups in those hours,
however many attempts they sum up. Times are those of the attempts' starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gateway.core.offices import Reach
from gateway.storage.tables import TOKEN_COLUMNS, USAGE_KEYS, USAGE_SUMS
from gateway.storage.transact import Fetch, Sql, Tx

#: What can be grouped and filtered by: columns of the sums.
GROUPS = USAGE_KEYS[1:]


@dataclass(frozen=True, slots=True)
class UsageBucket:
    """The sums of one group in the bucket that begins at `start_ms`. `tokens` has the keys of `tables.TOKEN_COLUMNS`."""

    start_ms: int
    group: Mapping[str, str]
    attempts: int
    errors: int
    retries: int
    retries_cost_nano_usd: int
    cost_nano_usd: int
    list_cost_nano_usd: int
    tokens: Mapping[str, int]


def usage_sql(
    reach: Reach,
    by: Sequence[str],
    width_ms: int,
    from_ms: int,
    to_ms: int,
    filters: Mapping[str, str],
    limit: int,
) -> tuple[Sql, list[Any]]:
    """The statement and its arguments. `by` and the names in `filters` are of GROUPS."""
    args: list[Any] = [from_ms, to_ms]
    wanted = {**filters}
    conditions = ["hour_ms >= $1", "hour_ms < $2"]
    for name, value in [*wanted.items(), ("tenant_id", reach.tenant_id), ("team_id", reach.team_id)]:
        if name not in GROUPS:
            raise ValueError(f"no column of the hourly sums: {name}")
        if value:
            args.append(value)
            conditions.append(f"{name} = ${len(args)}")
    start = f"CAST(hour_ms / {width_ms} * {width_ms} AS BIGINT)"
    columns = [start, *(name for name in GROUPS if name in by)]
    # Postgres sums BIGINT to NUMERIC, which would arrive as Decimal.
    sums = [f"CAST(sum({name}) AS BIGINT)" for name in USAGE_SUMS]
    groups = ", ".join(str(i + 1) for i in range(len(columns)))
    args.append(limit)
    return (
        Sql(
            f"SELECT {', '.join(columns + sums)} FROM usage_hour WHERE {' AND '.join(conditions)} "  # noqa: S608
            f"GROUP BY {groups} ORDER BY {groups} LIMIT ${len(args)}"
        ),
        args,
    )


_LABELS = Sql("SELECT key_id, labels FROM virtual_key WHERE key_id = ANY($1::text[])")


def buckets_by_label(
    reach: Reach,
    by: Sequence[str],
    label: str,
    width_ms: int,
    from_ms: int,
    to_ms: int,
    filters: Mapping[str, str],
    limit: int,
) -> Tx[list[UsageBucket]]:
    """As `buckets`, with "label" in each group: the value that the key has for that label now, "" without one."""
    rows = yield from buckets(reach, (*by, "key_id"), width_ms, from_ms, to_ms, filters, limit)
    if len(rows) >= limit:
        return rows
    ids = sorted({row.group["key_id"] for row in rows})
    values = {
        key_id: msgspec.json.decode(text, type=dict[str, str]).get(label, "")
        for key_id, text in (yield Fetch(_LABELS, (ids,)))
    }
    merged: dict[tuple[Any, ...], UsageBucket] = {}
    for row in rows:
        group = {name: value for name, value in row.group.items() if name != "key_id" or "key_id" in by}
        group["label"] = values.get(row.group["key_id"], "")
        place = (row.start_ms, *group.values())
        known = merged.get(place)
        merged[place] = replace(row, group=group) if known is None else _sum(known, row)
    return [merged[place] for place in sorted(merged)]


def _sum(a: UsageBucket, b: UsageBucket) -> UsageBucket:
    """Two rows of one group."""
    sums = {name: getattr(a, name) + getattr(b, name) for name in USAGE_SUMS if name not in TOKEN_COLUMNS}
    return replace(a, **sums, tokens={name: n + b.tokens[name] for name, n in a.tokens.items()})


def buckets(
    reach: Reach,
    by: Sequence[str],
    width_ms: int,
    from_ms: int,
    to_ms: int,
    filters: Mapping[str, str],
    limit: int,
) -> Tx[list[UsageBucket]]:
    """In the order of time and group; hours in [from, to). Empty buckets have no row."""
    names = [name for name in GROUPS if name in by]
    sql, args = usage_sql(reach, by, width_ms, from_ms, to_ms, filters, limit)
    found = []
    for row in (yield Fetch(sql, args)):
        start_ms, group = row[0], dict(zip(names, row[1:], strict=False))
        sums = dict(zip(USAGE_SUMS, row[1 + len(names) :], strict=True))
        tokens = {name: sums.pop(name) for name in TOKEN_COLUMNS}
        found.append(UsageBucket(start_ms, group, tokens=tokens, **sums))
    return found
