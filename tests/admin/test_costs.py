"""Costs by what is not in the hourly sums alone: tasks, days of a zone, misses and refusals; exports in parts; mistakes."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.admin.call import TURN_ROWS, shown_in_turns
from gateway.admin.usage import PART_ROWS
from gateway.core.entry import Kind, Refused
from gateway.core.explanation import Cause, Explanation, Verdict
from gateway.core.usage import Quality, Usage
from gateway.storage.refused_sums import RefusedSums
from tests.admin.office import ADMIN_KEY, Office
from tests.admin.test_usage import AT_MS, HOUR_MS, settled
from tests.storage import worlds

DAY = "start_time=2026-09-21&end_time=2026-09-22"


def miss(cause: Cause, tokens: int, nano_usd: int) -> Explanation:
    return Explanation(Verdict.MISS, cause, lost_tokens=tokens, lost_nano_usd=nano_usd)


async def results(it: Office, query: str, path: str = "/costs") -> list[dict[str, Any]]:
    status, found = await it.ask("GET", f"{path}?{query}")
    assert status == 200, found
    return [
        {"start": b["start_time"], **{k: v for k, v in r.items() if v is not None}}
        for b in found["data"]
        for r in b["results"]
    ]


def only(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


async def test_misses_by_cause_with_what_they_cost(on: Office, tmp_path: Path) -> None:
    await settled(
        on,
        tmp_path,
        [
            ({"team_id": "a"}, worlds.outcome(10, miss=miss(Cause.TOOLS_ADDED, 5_000, 700))),
            ({"team_id": "a", "model": "mini"}, worlds.outcome(10, miss=miss(Cause.TOOLS_ADDED, 1, 1))),
            ({"team_id": "a"}, worlds.outcome(10, miss=miss(Cause.EXPIRED, 9_000, 20))),
            ({"team_id": "b"}, worlds.outcome(10)),
        ],
    )
    found = await results(on, f"{DAY}&group_by=team&include=misses")
    assert only(found, "team_id", "attempts", "lost_usd", "misses") == [
        (
            "a",
            3,
            "0.000000721",
            [
                {"cause": "expired", "attempts": 1, "lost_tokens": 9_000, "lost_usd": "0.00000002"},
                {"cause": "tools_added", "attempts": 2, "lost_tokens": 5_001, "lost_usd": "0.000000701"},
            ],
        ),
        ("b", 1, "0", []),
    ]
    # Explanations are forgotten after a while; what they cost is not.
    await worlds.run(on.database, "DELETE FROM prefix_miss")
    assert await results(on, f"{DAY}&group_by=team&include=misses") == found
    assert only(await results(on, f"{DAY}&model=mini&include=misses"), "lost_usd") == [("0.000000001",)]


async def test_a_miss_counts_once_however_often_its_attempt_is_settled(on: Office, tmp_path: Path) -> None:
    a = worlds.attempt()
    said = miss(Cause.EXPIRED, 100, 50)
    async with worlds.opened(_url(on), tmp_path) as (ledger, _, _):
        await worlds.reserve(ledger, a, 1_000)
        guess = worlds.outcome(900, Kind.CHARGE_UNKNOWN, quality=Quality.UNKNOWN, usage=Usage(), miss=said)
        await ledger.settle(a, guess)
        await ledger.settle(a, worlds.outcome(100, miss=said))
        await ledger.settle(a, worlds.outcome(100, miss=said))
    (found,) = await results(on, f"{DAY}&include=misses")
    assert (found["cost_usd"], found["attempts"], found["lost_usd"]) == ("0.0000001", 1, "0.00000005")


async def test_what_failed_attempts_cost_is_told_apart_also_after_a_correction(
    on: Office, tmp_path: Path
) -> None:
    failed = worlds.attempt()
    async with worlds.opened(_url(on), tmp_path) as (ledger, _, _):
        for a, outcome in (
            (failed, worlds.outcome(900, Kind.CHARGE_UNKNOWN, error="upstream_lost", status=0)),
            (failed, worlds.outcome(200, error="", quality=Quality.EXACT)),
            (worlds.attempt(attempt_no=2), worlds.outcome(30, error="upstream_cut")),
            (worlds.attempt(attempt_no=2), worlds.outcome(4)),
            (worlds.attempt(), worlds.outcome(5)),
        ):
            await worlds.reserve(ledger, a, 1_000)
            await ledger.settle(a, outcome)
    told = {"attempts": 4, "errors": 2, "retries": 2, "cost_usd": "0.000000239", "failed_cost_usd": "0.00000023",
            "retries_cost_usd": "0.000000034"}  # fmt: skip
    for query in ("group_by=team", "group_by=model", "task_id=task_a", "task_id=task_a&group_by=tier,task"):
        (found,) = await results(on, f"{DAY}&{query}", "/usage")
        assert {name: found[name] for name in told} == told, query
    (line,) = await exported(on, f"start_time=2026-09-21&group_by=task&{UNTIL_NOW}")
    assert {name: line[name] for name in told} == told


async def test_tasks_are_told_whole_in_the_bucket_of_their_last_use(on: Office, tmp_path: Path) -> None:
    await settled(
        on,
        tmp_path,
        [
            ({"task_id": "t1", "team_id": "a"}, worlds.outcome(1)),
            ({"task_id": "t1", "team_id": "a", "started_at_ms": AT_MS + 30 * HOUR_MS}, worlds.outcome(2)),
            ({"task_id": "t2", "team_id": "b"}, worlds.outcome(4)),
        ],
    )
    for task, days in (("t1", 1), ("t2", 3)):
        last = AT_MS + days * 24 * HOUR_MS
        await worlds.run(on.database, f"UPDATE task SET last_at_ms = {last} WHERE task_id = '{task}'")
    lines = await exported(on, "start_time=2026-09-20&end_time=2026-10-01&group_by=task,team")
    assert only(lines, "start", "team_id", "task_id", "attempts", "cost_usd") == [
        ("2026-09-22T00:00:00.000Z", "a", "t1", 2, "0.000000003"),
        ("2026-09-24T00:00:00.000Z", "b", "t2", 1, "0.000000004"),
    ]
    # One of them by the time of its attempts, grouped by anything.
    found = await results(on, "start_time=2026-09-21&end_time=2026-09-24&task_id=t1&group_by=model,client")
    assert only(found, "start", "model", "cost_usd") == [
        (1789948800, "sonnet", "0.000000001"),
        (1790035200, "sonnet", "0.000000002"),
    ]


async def test_refused_holds_by_kind_of_scope(on: Office) -> None:
    sums = RefusedSums(on.database, lambda: AT_MS)
    team = Refused("team:a", 10, 10, 0, None)
    task = Refused("task:x", 10, 10, 0, None)
    for _ in range(3):
        sums.add(worlds.attempt(team_id="a"), team, 1_000)
    sums.add(worlds.attempt(team_id="a", key_id="k2"), team, None)
    sums.add(worlds.attempt(team_id="b", client="bad\0\ud800"), task, 7)
    await sums.flush()
    await sums.flush()
    sums.add(worlds.attempt(team_id="b"), task, 1)
    await sums.flush()
    found = await results(on, f"{DAY}&group_by=team&include=refusals,misses")
    assert only(found, "team_id", "attempts", "cost_usd", "refusals", "refused_usd", "lost_usd", "refused") == [
        ("a", 0, "0", 4, "0.000003", "0",
         [{"scope": "team", "refusals": 4, "unbounded": 1, "refused_usd": "0.000003"}]),
        ("b", 0, "0", 2, "0.000000008", "0",
         [{"scope": "task", "refusals": 2, "unbounded": 0, "refused_usd": "0.000000008"}]),
    ]  # fmt: skip
    text = await exported_text(on, f"{DAY}&include=refusals&format=csv")
    (line,) = csv.DictReader(io.StringIO(text))
    assert {k: v for k, v in line.items() if "refus" in k and v not in ("0", "")} == {
        "refusals": "6", "refused_usd": "0.000003008", "refusals_team": "4", "refused_team_usd": "0.000003",
        "refusals_task": "2", "refused_task_usd": "0.000000008",
    }  # fmt: skip


async def test_refused_sums_wait_for_a_store_that_is_down(it: Office) -> None:
    sums = RefusedSums(it.database, lambda: AT_MS)
    sums.add(worlds.attempt(), Refused("key:k", 1, 1, 0, None), 5)
    with closing(sqlite3.connect(str(it.database.sqlite_path), isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        await sums.flush()
        other.execute("ROLLBACK")
    sums.add(worlds.attempt(), Refused("key:k", 1, 1, 0, None), 5)
    await sums.flush()
    assert await it.rows("SELECT scope_kind, refusals, refused_nano_usd FROM refused_hour") == [
        ("key", 2, 10)
    ]


async def test_days_of_a_zone(on: Office, tmp_path: Path) -> None:
    """25 October 2026 lasts 25 hours in Berlin: from 22:00 to 23:00 UTC."""
    begin_ms = 1_792_879_200_000  # 24 October 2026 22:00 UTC
    hours = (-1, 0, 23, 24, 25)
    calls = [({"started_at_ms": begin_ms + h * HOUR_MS}, worlds.outcome(10**n)) for n, h in enumerate(hours)]
    await settled(on, tmp_path, calls)
    query = "start_time=2026-10-24&end_time=2026-10-27&time_zone=Europe/Berlin"
    found = await results(on, query)
    assert only(found, "start", "cost_usd", "attempts") == [
        (begin_ms // 1000 - 86_400, "0.000000001", 1),
        (begin_ms // 1000, "0.00000111", 3),
        (begin_ms // 1000 + 90_000, "0.00001", 1),
    ]
    lines = await exported(on, query)
    assert only(lines, "start", "end") == [
        ("2026-10-23T22:00:00.000Z", "2026-10-24T22:00:00.000Z"),
        ("2026-10-24T22:00:00.000Z", "2026-10-25T23:00:00.000Z"),
        ("2026-10-25T23:00:00.000Z", "2026-10-26T23:00:00.000Z"),
    ]
    paged, more = [], ""
    while True:
        _, page = await on.ask("GET", f"/costs?{query}&limit=1{more}")
        paged += page["data"]
        if not page["has_more"]:
            break
        more = f"&page={page['next_page']}"
    assert [(b["start_time"], len(b["results"])) for b in paged] == [(f["start"], 1) for f in found]


async def test_an_export_of_more_rows_than_are_read_at_once(on: Office) -> None:
    """The first bucket alone has more groups than a part, each with a cause beside its sums."""
    count = PART_ROWS + 7
    values = ", ".join(
        f"({AT_MS // HOUR_MS * HOUR_MS}, 'a', 't', 'k{n:05}', 'm', 'p', 'd', 'x', 'c', {{}})"
        for n in range(count)
    )
    keys = "hour_ms, tenant_id, team_id, key_id, model, provider, deployment, tier, client"
    await worlds.run(
        on.database, f"INSERT INTO usage_hour ({keys}, cost_nano_usd) VALUES {values.format(*range(count))}"
    )
    await worlds.run(
        on.database,
        f"INSERT INTO miss_hour ({keys}, cause, lost_nano_usd) "
        f"SELECT {keys}, 'expired', 1 FROM usage_hour UNION ALL SELECT {keys}, 'tools_added', 2 FROM usage_hour",
    )
    query = "start_time=2026-09-21T12:00:00Z&end_time=2026-09-21T18:00:00Z&bucket_width=1h&group_by=key"
    lines = await exported(on, f"{query}&include=misses")
    assert [line["key_id"] for line in lines] == [f"k{n:05}" for n in range(count)]
    assert {line["lost_usd"] for line in lines} == {"0.000000003"}
    assert sum(round(float(line["cost_usd"]) * 1e9) for line in lines) == sum(range(count))


async def test_others_get_their_turn_while_a_large_export_is_made(it: Office) -> None:
    """Requests are served by the same thread: no more than ten rows are written between two of its turns."""
    rows = 700
    values = ", ".join(
        f"({AT_MS // HOUR_MS * HOUR_MS}, 'a', 't', 'k{n}', 'm', 'p', 'd', 'x', 'c')" for n in range(rows)
    )
    keys = "hour_ms, tenant_id, team_id, key_id, model, provider, deployment, tier, client"
    await worlds.run(it.database, f"INSERT INTO usage_hour ({keys}) VALUES {values}")
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    parts = []
    async with it.http.get(f"/admin/v1/usage?{DAY}&group_by=key&format=jsonl", headers=headers) as answer:
        async for part, _ in answer.content.iter_chunks():
            parts.append(part.count(b"\n"))
    assert (sum(parts), max(parts) <= TURN_ROWS) == (rows, True)
    rows_between_turns, most = 0, 0

    def show(n: int) -> dict[str, int]:
        nonlocal rows_between_turns, most
        rows_between_turns += 1
        most = max(most, rows_between_turns)
        return {"n": n}

    listed = asyncio.create_task(shown_in_turns(range(rows), show))
    while not listed.done():
        rows_between_turns = 0
        await asyncio.sleep(0)
    assert (len(await listed), most) == (rows, TURN_ROWS)


async def test_the_format_may_come_by_accept(it: Office, tmp_path: Path) -> None:
    await settled(it, tmp_path, [({}, worlds.outcome(1))])
    for accept, media in (
        ("text/csv", "text/csv"),
        ("application/jsonl;q=0.9, text/csv;q=0.1", "application/x-ndjson"),
        ("*/*", "application/json"),
        ("text/html, application/json", "application/json"),
    ):
        headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Accept": accept}
        async with it.http.get(f"/admin/v1/costs?{DAY}", headers=headers) as answer:
            assert (answer.status, answer.content_type) == (200, media)
            assert await answer.text()


async def test_a_page_of_another_tenant_is_none_of_yours(it: Office) -> None:
    keys = []
    for tenant in ("one", "two"):
        await it.ask("POST", "/tenants", {"tenant_id": tenant, "name": tenant})
        made = {"name": tenant, "role": "operator", "tenant_id": tenant}
        keys.append((await it.ask("POST", "/admin_keys", made))[1]["key"])
    path = "/costs?start_time=2026-09-01&end_time=2026-09-20&limit=2"
    _, page = await it.ask("GET", path, key=keys[0])
    status, problem = await it.ask("GET", f"{path}&page={page['next_page']}", key=keys[1])
    assert (status, problem["errors"][0]["field"]) == (422, "page")
    assert (await it.ask("GET", f"{path}&page={page['next_page']}", key=keys[0]))[0] == 200


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("start_time=2026-09-22&end_time=2026-09-21", "end_time"),
        ("start_time=1970-01-01&end_time=2970-01-01", "end_time"),
        ("start_time=9999-12-30&end_time=9999-12-31&time_zone=Europe/Berlin", "start_time"),
        ("start_time=2026-09-01&end_time=253402300799", "end_time"),
        ("start_time=1969-12-31", "start_time"),
        ("start_time=2026-02-30", "start_time"),
        (f"{DAY}&bucket_width=1m", "bucket_width"),
        (f"{DAY}&bucket_width=", "bucket_width"),
        (f"{DAY}&time_zone=Mars/Olympus", "time_zone"),
        (f"{DAY}&time_zone=Asia/Kolkata", "time_zone"),
        (f"{DAY}&time_zone=..%2F..%2Fetc%2Fpasswd", "time_zone"),
        (f"{DAY}&group_by=colour", "group_by"),
        (f"{DAY}&group_by=task,model", "group_by"),
        (f"{DAY}&group_by=task&tier=fast", "tier"),
        (f"{DAY}&group_by=task&include=misses", "include"),
        (f"{DAY}&task_id=x&include=refusals", "include"),
        (f"{DAY}&include=everything", "include"),
        (f"{DAY}&format=xml", "format"),
        (f"{DAY}&page=x", "page"),
        (f"{DAY}&page=eyJ4Ijo", "page"),
        (f"{DAY}&team_id=%00", "team_id"),
        (f"{DAY}&colour=red", "colour"),
    ],
)
async def test_mistakes_are_named(it: Office, query: str, field: str) -> None:
    for path in ("/costs", "/usage"):
        status, problem = await it.ask("GET", f"{path}?{query}")
        assert (status, problem["errors"][0]["field"]) == (422, field), problem


UNTIL_NOW = "end_time=2035-01-01"


async def exported_text(it: Office, query: str) -> str:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with it.http.get(f"/admin/v1/usage?{query}", headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.text()


async def exported(it: Office, query: str) -> list[dict[str, Any]]:
    text = await exported_text(it, f"{query}&format=jsonl")
    return [json.loads(line) for line in text.splitlines()]


def _url(it: Office) -> str:
    return it.database.postgres_dsn or f"sqlite:///{it.database.sqlite_path}"
