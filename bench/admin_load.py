#!/usr/bin/env python3
"""What admin traffic does to calls: their latency with and without scrapes, reports and exports, in turn.

One gateway process serves calls at a steady rate in front of the demo provider. In every third window its
admin port answers, too: a scrape a second, reports of a month and lists of tasks twice a second, and one export of a
quarter after the other. In every other third another gateway on this machine answers the same: what calls wait longer
then is what any work does to a machine of so few cores. Prints a table and writes bench/ADMIN_LOAD.md; `--postgres`: on a
throw-away Postgres instead of SQLite, and into bench/ADMIN_LOAD_POSTGRES.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import aiohttp
import asyncpg
import uvloop

from bench.gateway_under_test import start_gateway
from bench.machine import busy_s, cpu_s, description
from bench.postgres import throwaway_postgres
from gateway.demo.provider import DemoProvider
from gateway.storage.tables import TEAM_KEYS, USAGE_KEYS

HERE = Path(__file__).resolve().parent
KINDS = ("none", "elsewhere", "here")
HOUR_MS, DAY_S = 3_600_000, 86_400
DAYS, TEAMS, KEYS_PER_TEAM, TASKS = 90, 20, 3, 5_000
BODY = json.dumps(
    {"model": "demo-fast", "max_tokens": 16, "messages": [{"role": "user", "content": "word " * 200}]}
).encode()


@dataclass(frozen=True, slots=True)
class Window:
    """Calls in a few seconds. `cpu` and `others_cores` are cores that the gateway, and everybody else, kept busy."""

    admin: str  # none | elsewhere | here
    calls: int
    failed: int
    p50_ms: float
    p99_ms: float
    cpu: float
    others_cores: float
    admin_answers: int
    admin_mb: float


def main() -> int:
    ap = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    ap.add_argument("--rounds", type=int, default=5, help="windows without and with admin traffic")
    ap.add_argument("--seconds", type=float, default=5.0, help="of each window")
    ap.add_argument("--rate", type=float, default=60.0, help="calls a second")
    ap.add_argument("--json", action="store_true", help="all windows as JSON; writes no file")
    ap.add_argument("--postgres", action="store_true", help="a throw-away Postgres, of both gateways")
    ap.add_argument("--out", type=Path, help="default: ADMIN_LOAD.md or ADMIN_LOAD_POSTGRES.md")
    ap.add_argument("--ask", nargs=2, metavar=("URL", "KEY"), help=argparse.SUPPRESS)
    args = ap.parse_args()
    if args.ask:
        print(json.dumps(uvloop.run(ask_all(args.ask[0], args.ask[1], args.seconds))))
        return 0
    with throwaway_postgres() if args.postgres else nullcontext("") as postgres:
        windows = uvloop.run(measured(args.rounds, args.seconds, args.rate, postgres))
    if args.json:
        print(json.dumps([asdict(w) for w in windows], indent=1))
    else:
        text = report(windows, args.seconds, args.rate, args.postgres)
        (args.out or HERE / f"ADMIN_LOAD{'_POSTGRES' * args.postgres}.md").write_text(text)
        print(text)
    return 0 if not any(w.failed for w in windows) else 1


async def measured(rounds: int, seconds: float, rate: float, postgres: str) -> list[Window]:
    found = []
    with tempfile.TemporaryDirectory(prefix="bench-admin-load-") as directory:
        states = [Path(directory) / name for name in ("here", "elsewhere")]
        async with DemoProvider() as provider, AsyncExitStack() as stack:
            gateways, desks = [], {}
            for state in states:
                state.mkdir()
                url = await create(postgres, state.name) if postgres else ""
                gateway = await stack.enter_async_context(
                    start_gateway(state, provider.base_url, url, 1, "drain", False)
                )
                now_ms = time.time_ns() // 1_000_000
                await (
                    fill_postgres(url, now_ms)
                    if url
                    else asyncio.to_thread(fill, state / "ledger.db", now_ms)
                )
                gateways.append(gateway)
                desks[state.name] = gateway.admin_url, (state / "admin-key").read_text().strip()
            here = gateways[0]
            headers = {"Authorization": f"Bearer {here.key}"}
            async with aiohttp.ClientSession(here.base_url, headers=headers) as http:
                await window(http, "none", desks, here.pid, seconds / 2, rate)  # warm
                for n in range(rounds):
                    for i in range(len(KINDS)):
                        kind = KINDS[(n + i) % len(KINDS)]
                        found.append(await window(http, kind, desks, here.pid, seconds, rate))
    return found


async def window(
    http: aiohttp.ClientSession,
    kind: str,
    desks: Mapping[str, tuple[str, str]],
    pid: int,
    seconds: float,
    rate: float,
) -> Window:
    waits_s: list[float] = []
    failed = 0
    seen: Counter[str] = Counter()

    async def call(due_s: float) -> None:
        nonlocal failed
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        async with http.post("/v1/chat/completions", data=BODY) as answer:
            await answer.read()
            failed += answer.status != 200
        waits_s.append(time.monotonic() - due_s)

    async with traffic(desks.get(kind), seconds, seen):
        cpu_before, all_before, began_s = cpu_s(pid), busy_s(), time.monotonic()
        async with asyncio.TaskGroup() as calls:
            for n in range(int(seconds * rate)):
                calls.create_task(call(began_s + n / rate))
        took_s = time.monotonic() - began_s
        own_s, all_s = cpu_s(pid) - cpu_before, busy_s() - all_before
    ordered = sorted(waits_s)
    return Window(
        kind,
        len(ordered),
        failed,
        statistics.median(ordered) * 1e3,
        ordered[int(len(ordered) * 0.99)] * 1e3,
        own_s / took_s,
        max(0.0, all_s - own_s) / took_s,
        seen["answers"],
        seen["bytes"] / 1e6,
    )


@asynccontextmanager
async def traffic(admin: tuple[str, str] | None, seconds: float, seen: Counter[str]) -> AsyncIterator[None]:
    """Admin traffic beside the block, from a process of its own: the calls' clients are measured here."""
    if admin is None:
        yield
        return
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.admin_load", "--seconds", str(seconds), "--ask", *admin,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout is not None
    await child.stdout.readline()  # it asks from now on
    try:
        yield
        out, _ = await child.communicate()
        seen.update(json.loads(out))
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def ask_all(url: str, key: str, seconds: float) -> Counter[str]:
    """Ask for so long; answers and bytes."""
    now_s = int(time.time())
    month = f"start_time={now_s - 30 * DAY_S}&limit=31"
    quarter = f"start_time={now_s - DAYS * DAY_S}&format=jsonl"
    seen: Counter[str] = Counter()

    async def ask(path: str, every_s: float) -> None:
        while True:
            async with desk.get(path) as answer:
                async for part in answer.content.iter_any():
                    seen["bytes"] += len(part)
                seen["answers"] += answer.status == 200
            await asyncio.sleep(every_s)

    async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {key}"}) as desk:
        print("asking", flush=True)
        tasks = [
            asyncio.create_task(ask(path, every_s))
            for path, every_s in (
                ("/metrics", 1.0),
                (f"/admin/v1/costs?{month}&group_by=team", 0.5),
                (f"/admin/v1/usage?{month}&group_by=key,model", 0.5),
                ("/admin/v1/tasks?sort=spend&limit=200", 0.5),
                (f"/admin/v1/usage?{quarter}&group_by=key,model", 0.0),
            )
        ]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return seen


def fill(path: Path, now_ms: int) -> None:
    """Sums of a quarter, and tasks."""
    hours = range(now_ms // HOUR_MS - DAYS * 24, now_ms // HOUR_MS)
    with closing(sqlite3.connect(path, timeout=30)) as database, database:
        database.executemany(
            f"INSERT INTO usage_hour ({', '.join(USAGE_KEYS)}, attempts, cost_nano_usd) "  # noqa: S608
            "VALUES (?, 'default', ?, ?, 'demo-fast', 'demo', 'demo-fast', 'fast', 'codex', 9, 1234567)",
            (
                (hour * HOUR_MS, f"team-{team}", f"key-{team}-{key}")
                for hour in hours for team in range(TEAMS) for key in range(KEYS_PER_TEAM)
            ),
        )  # fmt: skip
        database.execute(
            f"INSERT INTO team_hour ({', '.join(TEAM_KEYS)}, attempts, cost_nano_usd) "  # noqa: S608
            f"SELECT {', '.join(TEAM_KEYS)}, sum(attempts), sum(cost_nano_usd) FROM usage_hour GROUP BY 1, 2, 3"
        )
        database.executemany(
            "INSERT INTO task (task_id, key_id, team_id, tenant_id, external_id, source, state, created_at_ms, "
            "last_at_ms, cost_nano_usd) VALUES (?, 'key-0-0', 'team-0', 'default', '', 'header', 'running', ?, ?, ?)",
            ((f"task_{n}", now_ms - n * 1_000, now_ms, n) for n in range(TASKS)),
        )


async def create(postgres: str, name: str) -> str:
    """The URL of a new database beside that one."""
    connection = await asyncpg.connect(postgres)
    try:
        await connection.execute(f"CREATE DATABASE {name}")
    finally:
        await connection.close()
    return f"{postgres.rpartition('/')[0]}/{name}"


async def fill_postgres(url: str, now_ms: int) -> None:
    """The same as `fill`."""
    last = now_ms // HOUR_MS
    hours = f"generate_series({last - DAYS * 24}::bigint, {last - 1}) hour"
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(
            f"INSERT INTO usage_hour ({', '.join(USAGE_KEYS)}, attempts, cost_nano_usd) "  # noqa: S608
            f"SELECT hour * {HOUR_MS}, 'default', 'team-' || t, 'key-' || t || '-' || k, "
            "'demo-fast', 'demo', 'demo-fast', 'fast', 'codex', 9, 1234567 "
            f"FROM {hours}, generate_series(0, {TEAMS - 1}) t, generate_series(0, {KEYS_PER_TEAM - 1}) k"
        )
        await connection.execute(
            f"INSERT INTO team_hour ({', '.join(TEAM_KEYS)}, attempts, cost_nano_usd) "  # noqa: S608
            f"SELECT {', '.join(TEAM_KEYS)}, sum(attempts), sum(cost_nano_usd) FROM usage_hour GROUP BY 1, 2, 3"
        )
        await connection.execute(
            "INSERT INTO task (task_id, key_id, team_id, tenant_id, external_id, source, state, created_at_ms, "  # noqa: S608
            "last_at_ms, cost_nano_usd) SELECT 'task_' || n, 'key-0-0', 'team-0', 'default', '', 'header', 'running', "
            f"{now_ms} - n * 1000, {now_ms}, n FROM generate_series(0, {TASKS - 1}) n"
        )
        await connection.execute("ANALYZE")
    finally:
        await connection.close()


def report(windows: list[Window], seconds: float, rate: float, postgres: bool) -> str:
    of = {kind: [w for w in windows if w.admin == kind] for kind in KINDS}

    def middle(name: str, kind: str) -> float:
        return float(statistics.median(getattr(w, name) for w in of[kind]))

    def more(name: str, kind: str, than: str) -> float:
        pairs = zip(of[kind], of[than], strict=True)
        return float(statistics.median(getattr(a, name) - getattr(b, name) for a, b in pairs))

    store = "Postgres" if postgres else "SQLite"
    rows = "\n".join(
        f"| {kind} | {sum(w.calls for w in of[kind]):,} | {sum(w.failed for w in of[kind])} "
        f"| {middle('p50_ms', kind):.1f} | {middle('p99_ms', kind):.1f} | {middle('cpu', kind):.2f} "
        f"| {sum(w.admin_answers for w in of[kind]):,} | {sum(w.admin_mb for w in of[kind]):.0f} |"
        for kind in KINDS
    )
    return f"""# Admin traffic beside calls

{datetime.now(UTC):%Y-%m-%d}, {description()}. One gateway process on {store}, {rate:.0f} calls a second of 1 KB, windows of {seconds:.0f} s in
turn, {len(of["none"])} of each kind; the middle of the windows. Admin traffic is a scrape a second, reports of a month and a list of
tasks twice a second each, and one export of {DAYS} days after the other ({DAYS * 24 * TEAMS * KEYS_PER_TEAM:,} rows of sums); `here` it goes to the
gateway that serves the calls, `elsewhere` to another one on the same machine. Everything but this gateway used
{statistics.median(w.others_cores for w in windows):.2f} cores, the provider and the clients of this run included.

| admin traffic | calls | failed | p50 ms | p99 ms | cores of the gateway | admin answers | MB of them |
|---|---|---|---|---|---|---|---|
{rows}

The middle of the differences in turn: `here` against `none` p50 {more("p50_ms", "here", "none"):+.1f} ms, p99 {more("p99_ms", "here", "none"):+.1f} ms;
`here` against `elsewhere`, which is what the gateway itself could do better, p50 {more("p50_ms", "here", "elsewhere"):+.1f} ms, p99 {more("p99_ms", "here", "elsewhere"):+.1f} ms.

Again: `python -m bench.admin_load{" --postgres" * postgres}`.
"""


if __name__ == "__main__":
    sys.exit(main())
