"""Costs and usage in buckets: whole values, pages, exports, and where the numbers come from."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.core.buckets import Width, edges
from gateway.core.entry import Outcome
from gateway.core.offices import Reach
from gateway.core.usage import Usage
from gateway.core.usage_facts import Question
from gateway.storage.ledger import SqlLedger
from gateway.storage.registry_usage import usage_sql
from gateway.storage.transact import Fetch, Row, Sql, Tx
from tests.admin.office import ADMIN_KEY, Office, office
from tests.storage import worlds

HOUR_MS = 3_600_000
#: 2026-09-21 14:13:20
AT_MS = worlds.NOON_MS


async def settled(it: Office, folder: Path, calls: list[tuple[dict[str, Any], Outcome]]) -> None:
    ledger = await SqlLedger.open(it.database, replica_id="r1", journal_dir=folder)
    for facts, outcome in calls:
        attempt = worlds.attempt(**facts)
        await worlds.reserve(ledger, attempt, 50_000_000)
        await ledger.settle(attempt, outcome)
    await ledger.close()


async def some(it: Office, folder: Path) -> None:
    """Two teams, two models, two days; one retry."""
    await settled(
        it,
        folder,
        [
            ({"team_id": "a", "model": "sonnet"}, worlds.outcome(30_000_001)),
            ({"team_id": "a", "model": "sonnet", "attempt_no": 2}, worlds.outcome(7)),
            ({"team_id": "b", "model": "mini"}, worlds.outcome(1_000)),
            ({"team_id": "b", "model": "mini", "started_at_ms": AT_MS + 24 * HOUR_MS}, worlds.outcome(5)),
        ],
    )


def usd(value: Any) -> Any:
    """The amount of a result, as it stood in the JSON."""
    return value["amount"]["value"]


async def test_costs_by_day_and_team(on: Office, tmp_path: Path) -> None:
    await some(on, tmp_path)
    async with on.http.get(
        "/admin/v1/costs?start_time=1789948800&end_time=1790121600&group_by=team_id",
        headers={"Authorization": f"Bearer {ADMIN_KEY}"},
    ) as answer:
        text = await answer.text()
    assert '"amount":{"value":0.030000008,"currency":"usd"}' in text, "the exact decimal, no float"
    found = json.loads(text)
    nothing = dict.fromkeys(
        ("label", "tenant_id", "key_id", "model", "provider", "deployment", "tier", "client", "task_id")
    )
    assert found == {
        "object": "page",
        "data": [
            {
                "object": "bucket",
                "start_time": 1789948800,
                "end_time": 1790035200,
                "results": [
                    {
                        "object": "organization.costs.result",
                        "amount": {"value": 0.030000008, "currency": "usd"},
                        "line_item": None,
                        "project_id": "a",
                        **nothing,
                        "team_id": "a",
                        "attempts": 2,
                        "cost_usd": "0.030000008",
                        "list_cost_usd": "0.090000024",
                        "saved_usd": "0.060000016",
                        "retries_cost_usd": "0.000000007",
                        "failed_cost_usd": "0",
                    },
                    {
                        "object": "organization.costs.result",
                        "amount": {"value": 0.000001, "currency": "usd"},
                        "line_item": None,
                        "project_id": "b",
                        **nothing,
                        "team_id": "b",
                        "attempts": 1,
                        "cost_usd": "0.000001",
                        "list_cost_usd": "0.000003",
                        "saved_usd": "0.000002",
                        "retries_cost_usd": "0",
                        "failed_cost_usd": "0",
                    },
                ],
            },
            {
                "object": "bucket",
                "start_time": 1790035200,
                "end_time": 1790121600,
                "results": [
                    {
                        "object": "organization.costs.result",
                        "amount": {"value": 5e-9, "currency": "usd"},
                        "line_item": None,
                        "project_id": "b",
                        **nothing,
                        "team_id": "b",
                        "attempts": 1,
                        "cost_usd": "0.000000005",
                        "list_cost_usd": "0.000000015",
                        "saved_usd": "0.00000001",
                        "retries_cost_usd": "0",
                        "failed_cost_usd": "0",
                    }
                ],
            },
        ],
        "has_more": False,
        "next_page": None,
    }


async def test_usage_tells_cached_written_and_uncached_input_apart(it: Office, tmp_path: Path) -> None:
    await settled(
        it,
        tmp_path,
        [
            (
                {},
                worlds.outcome(
                    9,
                    usage=Usage(
                        input_uncached=1, cache_read=20, cache_write_5m=300, cache_write_1h=4_000, output=7
                    ),
                ),
            )
        ],
    )
    _, found = await it.ask(
        "GET", "/usage?start_time=2026-09-21&end_time=2026-09-22&group_by[]=model&group_by[]=key"
    )
    (result,) = found["data"][0]["results"]
    assert result == {
        "object": "organization.usage.completions.result",
        "num_model_requests": 1,
        "project_id": None,
        "api_key_id": "key00001",
        "user_id": None,
        "batch": None,
        "label": None,
        "tenant_id": None,
        "team_id": None,
        "key_id": "key00001",
        "model": "sonnet",
        "provider": None,
        "deployment": None,
        "tier": None,
        "client": None,
        "task_id": None,
        "attempts": 1,
        "errors": 0,
        "retries": 0,
        "input_tokens": 4_321,
        "input_uncached_tokens": 1,
        "input_cached_tokens": 20,
        "input_written_tokens": 4_300,
        "input_written_5m_tokens": 300,
        "input_written_1h_tokens": 4_000,
        "input_written_12h_tokens": 0,
        "output_tokens": 7,
        "reasoning_tokens": 0,
        "cost_usd": "0.000000009",
        "list_cost_usd": "0.000000027",
        "saved_usd": "0.000000018",
        "retries_cost_usd": "0",
        "failed_cost_usd": "0",
    }


async def test_pages_of_hours_follow_one_another_without_gap_or_repetition(
    it: Office, tmp_path: Path
) -> None:
    hours = [0, 1, 5, 23, 24, 30]
    await settled(
        it,
        tmp_path,
        [({"started_at_ms": AT_MS + h * HOUR_MS}, worlds.outcome(10**h % 997 + 1)) for h in hours],
    )
    path = "/costs?start_time=2026-09-21T14:00:00Z&end_time=2026-09-22T21:00:00Z&bucket_width=1h&limit=7"
    buckets: list[Any] = []
    more = ""
    while True:
        status, page = await it.ask("GET", path + more)
        assert (status, len(page["data"]) <= 7) == (200, True)
        buckets += page["data"]
        if not page["has_more"]:
            break
        more = f"&page={page['next_page']}"
    starts = [b["start_time"] for b in buckets]
    assert starts == list(range(starts[0], starts[0] + 31 * 3600, 3600))
    assert [n for n, b in enumerate(buckets) if b["results"]] == hours
    status, problem = await it.ask("GET", f"{path}&team_id=b&page={page['next_page'] or 'x'}")
    assert (status, problem["errors"][0]["field"]) == (422, "page")


async def test_exports_have_the_same_numbers(it: Office, tmp_path: Path) -> None:
    await some(it, tmp_path)
    path = "/admin/v1/costs?start_time=2026-09-01&end_time=2026-10-01&group_by=team,model"
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with it.http.get(f"{path}&format=csv", headers=headers) as answer:
        assert answer.content_type == "text/csv"
        rows = list(csv.DictReader(io.StringIO(await answer.text())))
    async with it.http.get(f"{path}&format=jsonl", headers=headers) as answer:
        assert answer.content_type == "application/x-ndjson"
        lines = [json.loads(line) for line in (await answer.text()).splitlines()]
    assert [
        (r["start"][:10], r["team_id"], r["model"], r["cost_usd"], r["retries_cost_usd"]) for r in rows
    ] == [
        ("2026-09-21", "a", "sonnet", "0.030000008", "0.000000007"),
        ("2026-09-21", "b", "mini", "0.000001", "0"),
        ("2026-09-22", "b", "mini", "0.000000005", "0"),
    ]
    assert [{k: str(v) for k, v in line.items()} for line in lines] == rows
    assert sum(line["attempts"] for line in lines) == (await it.rows("SELECT count(*) FROM ledger"))[0][0]


async def test_a_name_that_begins_like_a_formula_stays_text(it: Office, tmp_path: Path) -> None:
    await settled(it, tmp_path, [({"client": '=HYPERLINK("http://x")'}, worlds.outcome(1))])
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    path = "/admin/v1/usage?start_time=2026-09-21&end_time=2026-09-22&group_by=client&format=csv"
    async with it.http.get(path, headers=headers) as answer:
        (row,) = csv.DictReader(io.StringIO(await answer.text()))
    assert row["client"] == '\'=HYPERLINK("http://x")'


@pytest.mark.parametrize(
    ("by", "filters", "table"),
    [(("team_id",), {}, "team_hour"), (("team_id",), {"model": "sonnet"}, "usage_hour")],
)
async def test_the_hourly_sums_alone_are_read(
    on: Office, tmp_path: Path, by: tuple[str, ...], filters: dict[str, str], table: str
) -> None:
    await some(on, tmp_path)
    day_ms = AT_MS // (24 * HOUR_MS) * 24 * HOUR_MS
    question = Question(by, (day_ms, day_ms + 24 * HOUR_MS), filters)
    sql, args = usage_sql(Reach("default", "a"), question, None, 10)
    postgres = on.database.postgres_dsn is not None
    explain = Sql.of(
        postgres=f"EXPLAIN (FORMAT JSON) {sql.postgres}", sqlite=f"EXPLAIN QUERY PLAN {sql.sqlite}"
    )

    def tx() -> Tx[list[Row]]:
        if postgres:  # so few rows would be read in any order
            yield Fetch(Sql("SET LOCAL enable_seqscan = off"))
        return list((yield Fetch(explain, args)))

    plan = str([tuple(row) for row in await on.database.write(tx)])
    assert f"pk_{table}" in plan or f"sqlite_autoindex_{table}_1 (hour_ms>? AND hour_ms<?)" in plan, plan
    assert "ledger" not in plan

    path = "/usage?start_time=2026-09-01&end_time=2026-10-01&group_by=team&include=misses,refusals"
    before = await on.ask("GET", path)
    await worlds.run(on.database, "ALTER TABLE ledger RENAME TO gone")
    assert await on.ask("GET", path) == before
    assert before[0] == 200


async def test_a_month_of_teams_reads_a_row_for_each_team_and_hour(postgres_url: str, tmp_path: Path) -> None:
    """3 teams, 4 hours, and 6 calls in each of them that differ in everything else."""
    calls = [
        ({"team_id": f"t{n % 3}", "key_id": f"k{n}", "task_id": f"x{n}", "started_at_ms": AT_MS + h * HOUR_MS},
         worlds.outcome(n + 1))
        for h in range(4) for n in range(18)
    ]  # fmt: skip
    async with office(postgres_url) as on:
        await settled(on, tmp_path, calls)
        month = tuple(edges(Width.DAY, "UTC", AT_MS - 9 * 24 * HOUR_MS, AT_MS + 21 * 24 * HOUR_MS))
        sql, args = usage_sql(Reach(), Question(("team_id",), month), None, 1_000)
        (row,) = await worlds.rows(on.database, f"EXPLAIN (ANALYZE, FORMAT JSON) {sql.postgres}", *args)
        assert rows_read(json.loads(row[0])[0]["Plan"]) == 3 * 4
        _, found = await on.ask("GET", "/costs?start_time=2026-09-21&end_time=2026-09-22&group_by=team")
        results = found["data"][0]["results"]
        assert sum(r["attempts"] for r in results) == 72
        assert sum(round(1e9 * float(r["cost_usd"])) for r in results) == 4 * sum(range(1, 19))


def rows_read(plan: Any) -> int:
    """By the scans of a plan, those that they threw away included."""
    own = (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"]
    below = sum(map(rows_read, plan.get("Plans", ())))
    # A bitmap index scan finds rows, which the heap scan above it then reads.
    scan = plan["Node Type"].endswith("Scan") and plan["Node Type"] != "Bitmap Index Scan"
    return below + (int(own) if scan else 0)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "start_time"),
        ("start_time=2026-09-02&end_time=2026-09-01", "end_time"),
        ("start_time=2026-09-01&end_time=2026-09-01", "end_time"),
        ("start_time=1970-01-01&end_time=2070-01-01", "end_time"),
        ("start_time=0&end_time=99999999999999", "end_time"),
        ("start_time=yesterday", "start_time"),
        ("start_time=2026-09-01&bucket_width=1m", "bucket_width"),
        ("start_time=2026-09-01&group_by=colour", "group_by"),
        ("start_time=2026-09-01&limit=0", "limit"),
        ("start_time=2026-09-01&bucket_width=1h&limit=180", "limit"),
        ("start_time=2026-09-01&page=x", "page"),
        ("start_time=2026-09-01&team_id=a&team_id=b", "team_id"),
    ],
)
async def test_mistakes_name_their_parameter(it: Office, query: str, field: str) -> None:
    status, problem = await it.ask("GET", f"/costs?{query}")
    assert (status, problem["errors"][0]["field"]) == (422, field), problem
    assert msgspec.json.encode(problem)


async def test_what_keys_are_labelled_with_can_be_grouped_by(on: Office, tmp_path: Path) -> None:
    ids = [
        (await on.ask("POST", "/keys", {"name": "k", "labels": labels}))[1]["key_id"]
        for labels in ({"project": "red"}, {"project": "red", "env": "test"}, {"project": "blue"}, {})
    ]
    await settled(on, tmp_path, [({"key_id": key_id}, worlds.outcome(10**n)) for n, key_id in enumerate(ids)])
    path = "/costs?start_time=2026-09-21&end_time=2026-09-22"

    async def by(query: str) -> list[tuple[str, str, int]]:
        status, found = await on.ask("GET", f"{path}&{query}")
        assert status == 200, found
        return [(r["label"], r["cost_usd"], r["attempts"]) for r in found["data"][0]["results"]]

    assert await by("group_by=label&label=project") == [
        ("", "0.000001", 1),
        ("blue", "0.0000001", 1),
        ("red", "0.000000011", 2),
    ]
    assert len(await by("group_by=key_id&label=project")) == 4
    assert await by("label=nothing") == [("", "0.000001111", 4)]
    status, problem = await on.ask("GET", f"{path}&group_by=label")
    assert (status, problem["errors"][0]["field"]) == (422, "label")
