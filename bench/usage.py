#!/usr/bin/env python3
"""What a report of a month costs in a year of entries: answered from sums, beside a scan of the entries themselves.

Fills a throw-away Postgres with entries of agents that make 20 calls each, and with the sums that the gateway writes
along with its entries (shown on a slice that the gateway itself settles). Then shows the plan, the rows read and the
time of a month's reports. Prints a table and writes bench/USAGE.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from bench.machine import description
from bench.postgres import NoPostgres, throwaway_postgres
from gateway.core.buckets import Width, edges
from gateway.core.entry import Amounts, Attempt, Kind, Outcome
from gateway.core.ids import RANDOM_BYTES, new_id
from gateway.core.offices import Reach
from gateway.core.usage import Quality, Usage
from gateway.core.usage_facts import Question
from gateway.storage.database import Database, open_database
from gateway.storage.ledger import SqlLedger
from gateway.storage.partitions import ensure_partitions
from gateway.storage.registry_usage import buckets, usage_sql
from gateway.storage.schema import migrate
from gateway.storage.tables import TEAM_KEYS, TOKEN_COLUMNS, USAGE_KEYS, USAGE_SUMS, ledger

HERE = Path(__file__).resolve().parent
TEAMS, KEYS, STEPS = 50, 2_000, 20
PART = 100_000
HOUR_MS, DAY_MS = 3_600_000, 86_400_000
BEGIN_MS, END_MS = (round(datetime(year, 1, 1, tzinfo=UTC).timestamp()) * 1000 for year in (2025, 2026))
MONTH = tuple(round(datetime(2025, m, 1, tzinfo=UTC).timestamp()) * 1000 for m in (10, 11))
REPEATS = 5
ROWS_MAX = 1_000_000
#: (what, grouped by)
REPORTS = (
    ("team and day", ("team_id",)),
    ("model and day", ("model",)),
    ("key and day", ("key_id",)),
    ("task and day", ("task_id",)),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """`rows_read` by the scans of the plan; `ms` of the statement, `told_ms` through the store, with its rows decoded."""

    report: str
    read_from: str
    rows_read: int
    buffers: int  # of 8 KB
    rows: int
    ms: float
    told_ms: float | None


@dataclass(frozen=True, slots=True)
class Found:
    entries: int
    sums: dict[str, int]  # rows of each table of sums
    bytes: int
    filled_s: float
    teams_times_hours: int
    load: float  # of the machine at the end, by the last minute
    measured: tuple[Measured, ...]
    plan: str


def main() -> int:
    ap = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    ap.add_argument("--entries", type=int, default=10_000_000)
    ap.add_argument("--json", action="store_true", help="the figures as JSON; writes no file")
    ap.add_argument("--out", type=Path, default=HERE / "USAGE.md")
    args = ap.parse_args()
    try:
        with throwaway_postgres() as url:
            found = asyncio.run(_filled_and_measured(url, args.entries))
    except NoPostgres as why:
        print(f"usage: {why}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(asdict(found), indent=1))
    else:
        args.out.write_text(report(found))
        print(report(found))
    months = next(m for m in found.measured if (m.report, m.read_from) == (REPORTS[0][0], "sums"))
    return 0 if months.rows_read <= found.teams_times_hours else 1


async def _filled_and_measured(url: str, entries: int) -> Found:
    """In a server whose data is thrown away, so nothing waits for its disk."""
    connection = await asyncpg.connect(url)
    for setting in ("fsync = off", "full_page_writes = off", "max_wal_size = '8GB'"):
        await connection.execute(f"ALTER SYSTEM SET {setting}")
    await connection.execute("SELECT pg_reload_conf()")
    await connection.close()
    return await compared(url, entries)


async def compared(url: str, entries: int) -> Found:
    """Fill the empty database at `url`, and measure. Raises AssertionError where two ways to one sum differ."""
    await migrate(url)
    await same_as_the_gateways_own(url)
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:1], BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("entries", total=entries)
        began_s = time.monotonic()
        await fill(url, entries, lambda n: progress.update(task, advance=n))
    return await measure(url, entries, time.monotonic() - began_s)


# --- filling ---------------------------------------------------------------------------------------------------

#: Of an entry `i` of the task `t`; h1 and h2 are 31 random bits of the task, h of the entry.
_VALUES = {
    "at_ms": "at_ms",
    "entry_id": "'ent_' || tail",
    "attempt_id": "'att_' || tail",
    "kind": "CASE WHEN failed THEN 'void' ELSE 'post' END",
    "amount_nano_usd": "input_uncached * 3000 + cache_read * 300 + cache_write_5m * 3750 + output * 15000",
    "list_cost_nano_usd": "(input_uncached + cache_read + cache_write_5m) * 3000 + output * 15000",
    "hold_nano_usd": "1000000",
    "step": "i % {steps} + 1",
    "posted_at_ms": "at_ms + 4000",
    "budgets": "'[]'",
    "replica_id": "'bench'",
    "request_id": "'req_' || tail",
    "tenant_id": "'default'",
    "team_id": "'team-' || key % {teams}",
    "key_id": "'key-' || key",
    "task_id": "'task_' || t",
    "parent_task_id": "NULL",
    "attempt_no": "CASE WHEN h % 33 = 0 THEN 2 ELSE 1 END",
    "operation": "'chat'",
    "client": "(ARRAY['claude-code', 'codex', 'aider', 'sdk'])[h1 % 4 + 1]",
    "model_requested": "'auto'",
    "model": "'model-' || d",
    "upstream_model": "'model-' || d",
    "provider": "'provider-' || d % 2",
    "deployment": "'deployment-' || d",
    "tier": "(ARRAY['small', 'standard', 'fast'])[d % 3 + 1]",
    "rule": "''",
    "stream": "true",
    "started_at_ms": "at_ms",
    **{name: name for name in ("input_uncached", "cache_read", "cache_write_5m", "output")},
    **dict.fromkeys(("cache_write_1h", "cache_write_12h", "reasoning"), "0"),
    "quality": "'exact'",
    "price_version": "'2025-01'",
    "finish": "CASE WHEN failed THEN 'error' ELSE 'stop' END",
    "status": "CASE WHEN failed THEN 503 ELSE 200 END",
    "error": "CASE WHEN failed THEN 'upstream_overloaded' ELSE '' END",
    "latency_ms": "3000",
    "first_token_ms": "400",
    "upstream_request_id": "'up_' || tail",
    "service_tier": "''",
    "note": "''",
    "served_by": "NULL",
    "charged_input_tokens": "input_uncached + cache_read + cache_write_5m",
    "charged_output_tokens": "output",
    "charged_calls": "CASE WHEN failed THEN 0 ELSE 1 END",
}
_COLUMNS = [column.name for column in ledger.columns]
#: $1, $2: entries [from, to); $3: when the part begins; $4: how long it is.
_ENTRIES = f"""
INSERT INTO ledger ({", ".join(_COLUMNS)})
SELECT {", ".join(_VALUES[name].format(steps=STEPS, teams=TEAMS) for name in _COLUMNS)} FROM (
  SELECT *, lpad(to_hex(at_ms), 12, '0') || lpad(to_hex(i), 20, '0') AS tail,
    CASE WHEN failed THEN 0 ELSE 200 + h % 1500 END AS input_uncached,
    CASE WHEN failed THEN 0 ELSE i % {STEPS} * 2500 END AS cache_read,
    CASE WHEN failed THEN 0 ELSE 2500 END AS cache_write_5m,
    CASE WHEN failed THEN 0 ELSE 50 + h % 900 END AS output
  FROM (
    SELECT i, t, h, h1, h % 50 = 0 AS failed, floor((h2::float8 / 2147483648) ^ 2 * {KEYS})::int AS key,
      CASE WHEN h % 10 = 0 THEN 0 ELSE h1 % 5 + 1 END AS d,
      least($3 + floor(h1::float8 / 2147483648 * $4)::bigint + i % {STEPS} * 20000 + h % 15000, {END_MS - 1}) AS at_ms
    FROM (
      SELECT i, i / {STEPS} AS t, hashint8extended(i, 3) & 2147483647 AS h,
        hashint8extended(i / {STEPS}, 1) & 2147483647 AS h1, hashint8extended(i / {STEPS}, 2) & 2147483647 AS h2
      FROM generate_series($1::bigint, $2::bigint - 1) AS i
    ) randoms
  ) facts
) tokens
"""  # noqa: S608
#: As entries are summed up where none of them is a correction.
_OF_ENTRY = {
    "attempts": "1",
    "errors": "CASE WHEN error <> '' THEN 1 ELSE 0 END",
    "retries": "CASE WHEN attempt_no > 1 THEN 1 ELSE 0 END",
    "retries_cost_nano_usd": "CASE WHEN attempt_no > 1 THEN amount_nano_usd ELSE 0 END",
    "failed_cost_nano_usd": "CASE WHEN error <> '' THEN amount_nano_usd ELSE 0 END",
    "cost_nano_usd": "amount_nano_usd",
    "list_cost_nano_usd": "list_cost_nano_usd",
    **{name: name for name in TOKEN_COLUMNS},
}
_SUMS = ", ".join(f"sum({_OF_ENTRY[name]})::bigint AS {name}" for name in USAGE_SUMS)
_HOUR = f"at_ms / {HOUR_MS} * {HOUR_MS} AS hour_ms"
_USAGE_HOUR = (
    f"SELECT {', '.join([_HOUR, *USAGE_KEYS[1:]])}, {_SUMS} FROM ledger "  # noqa: S608
    f"WHERE at_ms >= $1 AND at_ms < $2 GROUP BY {', '.join(map(str, range(1, len(USAGE_KEYS) + 1)))}"
)
_TEAM_HOUR = (
    f"SELECT {', '.join(TEAM_KEYS)}, {', '.join(f'sum({name})::bigint' for name in USAGE_SUMS)} FROM usage_hour "  # noqa: S608
    "WHERE hour_ms >= $1 AND hour_ms < $2 GROUP BY 1, 2, 3"
)
_TASKS = (
    "INSERT INTO task (task_id, key_id, team_id, tenant_id, external_id, source, state, created_at_ms, last_at_ms, "  # noqa: S608
    f"steps, {', '.join(USAGE_SUMS)}) SELECT task_id, min(key_id), min(team_id), min(tenant_id), '', 'header', 'done', "
    f"min(at_ms), max(at_ms), max(step), {_SUMS} FROM ledger WHERE at_ms >= $1 AND at_ms < $2 GROUP BY task_id"
)


async def fill(url: str, entries: int, told: Callable[[int], object]) -> None:
    """Entries over the year, then their sums. `told` hears how many there are more."""
    database = open_database(url)
    for month in range(1, 13):
        at_ms = round(datetime(2025, month, 1, tzinfo=UTC).timestamp()) * 1000
        await database.write(partial(ensure_partitions, True, at_ms))
    await database.close()
    connection = await asyncpg.connect(url)
    try:
        span_ms = END_MS - BEGIN_MS
        for begin in range(0, entries, PART):
            end = min(entries, begin + PART)
            from_ms = BEGIN_MS + span_ms * begin // entries
            await connection.execute(_ENTRIES, begin, end, from_ms, span_ms * (end - begin) // entries)
            told(end - begin)
        names = ", ".join(USAGE_SUMS)
        for month in range(12):
            part = (BEGIN_MS + month * 31 * DAY_MS, min(END_MS, BEGIN_MS + (month + 1) * 31 * DAY_MS))
            keys = ", ".join(USAGE_KEYS)
            await connection.execute(f"INSERT INTO usage_hour ({keys}, {names}) {_USAGE_HOUR}", *part)
            keys = ", ".join(TEAM_KEYS)
            await connection.execute(f"INSERT INTO team_hour ({keys}, {names}) {_TEAM_HOUR}", *part)
        await connection.execute(_TASKS, BEGIN_MS, END_MS)
        await connection.execute("VACUUM ANALYZE")
    finally:
        await connection.close()


async def same_as_the_gateways_own(url: str) -> None:
    """What the gateway sums up while it settles is what the statements above make of its entries."""
    database = open_database(url)
    with tempfile.TemporaryDirectory(prefix="bench-usage-") as directory:
        own = await SqlLedger.open(database, replica_id="slice", journal_dir=Path(directory))
        await asyncio.gather(*(_settled(own, n) for n in range(500)))
        await own.close()
    connection = await asyncpg.connect(url)
    try:
        for table, keys, statement in (
            ("usage_hour", USAGE_KEYS, _USAGE_HOUR),
            ("team_hour", TEAM_KEYS, _TEAM_HOUR),
        ):
            written = await connection.fetch(
                f"SELECT {', '.join((*keys, *USAGE_SUMS))} FROM {table}"  # noqa: S608
            )
            summed = await connection.fetch(statement, 0, 2**60)
            assert sorted(map(tuple, written)) == sorted(map(tuple, summed)), table
        await connection.execute("TRUNCATE ledger, usage_hour, team_hour, task, hold, replica")
    finally:
        await connection.close()
        await database.close()


async def _settled(own: SqlLedger, n: int) -> None:
    at_ms = BEGIN_MS + n * 40_000
    attempt_id, request_id = (new_id(kind, at_ms, n.to_bytes(RANDOM_BYTES, "big")) for kind in ("att", "req"))
    team, d = f"team-{n % 3}", n % 4
    attempt = Attempt(
        attempt_id, request_id, "default", team, f"key-{n % 9}", f"task_{n // 20}", None, 1 + n % 2, "chat", "sdk",
        "auto", f"model-{d}", f"model-{d}", "provider", f"deployment-{d}", "fast", "", True, at_ms,
    )  # fmt: skip
    await own.reserve(attempt, (f"team:{team}",), Amounts(10**9, 10**6, 10**6), Amounts(10**9, 10**6, 10**6))
    error = "upstream_cut" if n % 7 == 0 else ""
    usage = Usage(input_uncached=n, cache_read=2 * n, cache_write_5m=3 * n, output=5)
    await own.settle(
        attempt,
        Outcome(Kind.POST, usage, Quality.EXACT, n * 1_001, n * 2_003, "1", "stop", 200, error, 9, None, ""),
    )


# --- measuring -------------------------------------------------------------------------------------------------


async def measure(url: str, entries: int, filled_s: float) -> Found:
    database = open_database(url)
    connection = await asyncpg.connect(url)
    try:
        measured = []
        plan = ""
        for name, by in REPORTS:
            question = Question(by, tuple(edges(Width.DAY, "UTC", *MONTH)))
            sql, args = usage_sql(Reach(), question, None, ROWS_MAX)
            quick, text = await _explained(connection, sql.postgres, args, name, "sums")
            told_ms, told = await _told(database, question)
            measured.append(Measured(**{**asdict(quick), "told_ms": told_ms}))
            plan = plan or text
            group = ", ".join(by)
            scan = (
                f"SELECT at_ms / {DAY_MS} * {DAY_MS}, {group}, {_SUMS} FROM ledger "  # noqa: S608
                f"WHERE at_ms >= $1 AND at_ms < $2 GROUP BY 1, {group}"
            )
            measured.append((await _explained(connection, scan, MONTH, name, "entries"))[0])
            if by != ("task_id",):  # tasks are told whole, entries by their own time
                rows = await connection.fetch(scan, *MONTH)
                assert sum(row["cost_nano_usd"] for row in rows) == told, name
        tables = ("usage_hour", "team_hour", "task")
        counts = {name: await connection.fetchval(f"SELECT count(*) FROM {name}") for name in tables}  # noqa: S608
        teams = await connection.fetchval("SELECT count(DISTINCT team_id) FROM team_hour")
        size = await connection.fetchval("SELECT pg_database_size(current_database())")
    finally:
        await connection.close()
        await database.close()
    hours = (MONTH[1] - MONTH[0]) // HOUR_MS
    return Found(entries, counts, size, filled_s, teams * hours, os.getloadavg()[0], tuple(measured), plan)


async def _told(database: Database, question: Question) -> tuple[float, int]:
    """(ms until a report is there as values, the sum of its costs)."""
    times = []
    rows: Sequence[Any] = ()
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        rows, more = await database.read(lambda: buckets(Reach(), question, None, ROWS_MAX))
        assert not more
        times.append((time.perf_counter() - began_s) * 1e3)
    return statistics.median(times), sum(row.cost_nano_usd for row in rows)


async def _explained(
    connection: Any, sql: str, args: Sequence[Any], name: str, read_from: str
) -> tuple[Measured, str]:
    """The middle of several runs."""
    runs = []
    for _ in range(REPEATS):
        found = await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", *args)
        runs.append(json.loads(found)[0])
    middle = sorted(runs, key=lambda run: float(run["Execution Time"]))[REPEATS // 2]
    plan = middle["Plan"]
    buffers = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    text = "\n".join(row[0] for row in await connection.fetch(f"EXPLAIN (ANALYZE, BUFFERS) {sql}", *args))
    measured = Measured(
        name,
        read_from,
        rows_read(plan),
        buffers,
        int(plan["Actual Rows"]),
        float(middle["Execution Time"]),
        None,
    )
    return measured, text


def rows_read(plan: Any) -> int:
    """By the scans of a plan, those that they threw away included; a bitmap's are read by the heap scan above it."""
    own: float = (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"]
    scan: bool = plan["Node Type"].endswith("Scan") and plan["Node Type"] != "Bitmap Index Scan"
    below: int = sum(map(rows_read, plan.get("Plans", ())))
    return int(own) * scan + below


def report(found: Found) -> str:
    rows = [
        f"| {m.report} | {'sums' if m.read_from == 'sums' else 'the entries'} | {m.rows_read:,} | {m.buffers:,} "
        f"| {m.rows:,} | {m.ms:,.1f} | {'' if m.told_ms is None else f'{m.told_ms:,.1f}'} |"
        for m in found.measured
    ]
    sums = ", ".join(f"{count:,} in `{name}`" for name, count in found.sums.items())
    return f"""# Usage and costs

{datetime.now(UTC):%Y-%m-%d}, {description()}, Postgres as shipped but for `fsync` (its data is thrown away). {found.entries:,}
entries of a year, {TEAMS} teams, {KEYS:,} keys, {STEPS} calls a task: {found.bytes / 1e9:.1f} GB, made in {found.filled_s:,.0f} s; rows of
sums: {sums}. October 2025, the middle of {REPEATS} runs. Both ways give the same sums to the nano-dollar.
Load average at the end: {found.load:.1f}. Times are those of a machine as busy as that; rows and buffers are not.

The promise: a month by team and day reads at most teams x hours rows, {found.teams_times_hours:,} here, however many entries
there are. Entries are read by month already, for each has a partition of its own.

| report | answered from | rows read | buffers of 8 KB | rows told | ms in Postgres | ms in the gateway, rows decoded |
|---|---|---|---|---|---|---|
{chr(10).join(rows)}

The plan of the first:

```
{found.plan}
```

Again: `make bench-usage`, or `python bench/usage.py --entries 1000000`. Exit status 1 if the promise is broken.
"""


if __name__ == "__main__":
    sys.exit(main())
