"""The ledger's monthly partitions on Postgres, made ahead; what comes without one falls into the default partition."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from gateway.storage.transact import Fetch, Script, Sql, Tx

MONTHS_AHEAD = 3
DEFAULT_PARTITION = "ledger_default"
_NOW = Sql("SELECT now_ms()")
#: One process makes partitions at a time; the others find them made.
_LOCK = Sql("SELECT pg_advisory_xact_lock(7305512)")
_EXISTS = Sql("SELECT to_regclass($1) IS NOT NULL")


def months(now_ms: int, ahead: int = MONTHS_AHEAD) -> Iterator[tuple[str, int, int]]:
    """(partition, start, end) of this UTC month and the next ones, in milliseconds."""
    first = datetime.fromtimestamp(now_ms / 1000, UTC).date().replace(day=1)
    index = first.year * 12 + first.month - 1
    for i in range(index, index + ahead + 1):
        year, month = divmod(i, 12)
        yield f"ledger_y{year}m{month + 1:02d}", _month_ms(i), _month_ms(i + 1)


def ensure_partitions(postgres: bool, at_ms: int | None = None) -> Tx[None]:
    """Make the missing partitions of the month of `at_ms` (default: now) and of the months ahead.

    Rows that fell into the default partition meanwhile move to where they belong.
    """
    if not postgres:
        return
    yield Fetch(_LOCK)
    now_ms: int = (yield Fetch(_NOW))[0][0] if at_ms is None else at_ms
    for name, start_ms, end_ms in months(now_ms):
        if (yield Fetch(_EXISTS, (name,)))[0][0]:
            continue
        yield Script(partition_statements(name, start_ms, end_ms))


def partition_statements(name: str, start_ms: int, end_ms: int) -> tuple[str, ...]:
    """DDL for one partition; names and bounds are our own, so they stand in the text."""
    return (
        f"CREATE TABLE {name} (LIKE ledger INCLUDING ALL)",
        f"WITH moved AS (DELETE FROM {DEFAULT_PARTITION} WHERE at_ms >= {start_ms} AND at_ms < {end_ms} "  # noqa: S608
        f"RETURNING *) INSERT INTO {name} SELECT * FROM moved",
        f"ALTER TABLE ledger ATTACH PARTITION {name} FOR VALUES FROM ({start_ms}) TO ({end_ms})",
    )


def _month_ms(index: int) -> int:
    year, month = divmod(index, 12)
    return round(datetime(year, month + 1, 1, tzinfo=UTC).timestamp()) * 1000
