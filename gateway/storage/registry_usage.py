"""Usage and cost in buckets of time, from the hourly sums alone: as many rows are read as there are groups in those hours,
however many attempts they sum up. Times are those of the attempts' starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
