"""After a mixed run with faults, everything that tells what was spent says the same, to the nano-dollar: entries, sums by
hour, team and task, the API in each of its forms, Prometheus counters, and the dashboards' queries.
"""

from __future__ import annotations

import csv
import io
import json
import re
import time
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

from gateway.administration import admin_token
from gateway.settings import ensure_pepper
from gateway.storage.accounts import Accounts
from gateway.storage.tables import TOKEN_COLUMNS, USAGE_SUMS
from tests.e2e.test_ledger_equals_bill import FAULTS
from tests.e2e.traffic import calls, send_all
from tests.storage import worlds
from tests.support.running import Running, running

DASHBOARDS = Path(__file__).resolve().parents[2] / "config" / "grafana" / "dashboards"
#: Those that show all of something in dollars, and the column in which.
TABLES = {
    "Keys that spend most": "Cost",
    "Models": "Cost",
    "Tasks that spend most": "Cost",
    "Teams that spend most": "Cost",
    "Tiers and deployments": "Cost",
    "Where it is lost": "Lost",
    "Who was refused": "Would have held",
}
#: Everything that was used so far.
NOW_S = int(time.time())
EVER = f"start_time={NOW_S - 40 * 86_400}&end_time={NOW_S + 86_400}"


async def test_all_sums_agree(store: str) -> None:
    async with running(
        store,
        faults=FAULTS,
        first_token_delay_s=0.002,
        on_disconnect="drain",
        first_byte_timeout_s=1.0,
        idle_timeout_s=1.0,
    ) as gw:
        await send_all(gw.url, gw.key, calls(120, seed=11, leaving=0.2), at_once=16)
        refused = await refusals(gw)
        await gw.settle_all()
        await gw.app.refused.flush()

        entries = await gw.entries()
        told = sums_of(entries)
        assert told["cost_nano_usd"] > 0
        assert told["retries_cost_nano_usd"] > 0
        assert told["failed_cost_nano_usd"] > 0
        for table in ("usage_hour", "team_hour", "task"):
            assert await sums_in(gw, table) == told, table

        usage = [line async for line in lines(gw, "/usage", "")]
        assert added_up(usage) == shown(told)
        for by in ("team", "key", "model,deployment", "tier,client,provider", "task", "label&label=env"):
            assert added_up([line async for line in lines(gw, "/usage", f"&group_by={by}")]) == shown(told), (
                by
            )
        assert await of_each_task(gw, entries) == shown(told)
        assert await in_pages(gw) == shown(told)["cost_usd"]

        lost = await lost_by_cause(gw)
        assert sum(lost.values()) > 0
        counted = counters(gw)
        assert counted["tollhouse_cost_usd_total"] == sum(
            e["amount_nano_usd"] for e in entries if e["kind"] != "correct"
        )
        assert counted["tollhouse_client_cost_usd_total"] == counted["tollhouse_cost_usd_total"]
        corrected = counted['corrections{direction="up"}'] - counted['corrections{direction="down"}']
        assert corrected != 0
        assert counted["tollhouse_cost_usd_total"] + corrected == told["cost_nano_usd"]
        assert counted["tollhouse_cache_lost_usd_total"] == sum(lost.values())
        assert counted["tollhouse_refused_usd_total"] == refused["nano_usd"] > 0
        assert counted["tollhouse_holds_refused_total"] == refused["holds"] == 6
        if gw.app.database.postgres_dsn is not None:
            amounts = {
                "Cost": told["cost_nano_usd"],
                "Lost": sum(lost.values()),
                "Would have held": refused["nano_usd"],
            }
            assert await dashboards(gw) == {title: amounts[column] for title, column in TABLES.items()}


def sums_of(entries: list[dict[str, Any]]) -> dict[str, int]:
    """What the entries add up to, in the words of the sums."""
    failed = {e["attempt_id"] for e in entries if e["kind"] != "correct" and e["error"]}
    terminal = [e for e in entries if e["kind"] != "correct"]
    return {
        "attempts": len(terminal),
        "errors": len(failed),
        "retries": sum(e["attempt_no"] > 1 for e in terminal),
        "retries_cost_nano_usd": sum(e["amount_nano_usd"] for e in entries if e["attempt_no"] > 1),
        "failed_cost_nano_usd": sum(e["amount_nano_usd"] for e in entries if e["attempt_id"] in failed),
        "cost_nano_usd": sum(e["amount_nano_usd"] for e in entries),
        "list_cost_nano_usd": sum(e["list_cost_nano_usd"] for e in entries),
        **{name: sum(e[name] for e in entries) for name in TOKEN_COLUMNS},
    }


async def sums_in(gw: Running, table: str) -> dict[str, int]:
    columns = ", ".join(f"CAST(sum({name}) AS BIGINT)" for name in USAGE_SUMS)
    (row,) = await worlds.rows(gw.app.database, f"SELECT {columns} FROM {table}")
    return dict(zip(USAGE_SUMS, row, strict=True))


def shown(told: dict[str, int]) -> dict[str, Decimal]:
    """The same in the words of the API."""
    return {
        "attempts": Decimal(told["attempts"]),
        "errors": Decimal(told["errors"]),
        "retries": Decimal(told["retries"]),
        "input_uncached_tokens": Decimal(told["input_uncached"]),
        "input_cached_tokens": Decimal(told["cache_read"]),
        "input_written_tokens": Decimal(told["cache_write_5m"] + told["cache_write_1h"] + told["cache_write_12h"]),
        "output_tokens": Decimal(told["output"]),
        **{
            f"{name}_usd": Decimal(told[f"{name}_nano_usd"]).scaleb(-9)
            for name in ("cost", "list_cost", "retries_cost", "failed_cost")
        },
        "saved_usd": Decimal(told["list_cost_nano_usd"] - told["cost_nano_usd"]).scaleb(-9),
    }  # fmt: skip


def added_up(rows: list[dict[str, Any]]) -> dict[str, Decimal]:
    names = shown(dict.fromkeys(USAGE_SUMS, 0))
    return {name: sum((Decimal(row[name]) for row in rows), Decimal()) for name in names}


async def answer(gw: Running, path: str) -> str:
    url = f"http://127.0.0.1:{gw.app.admin_port}/admin/v1{path}"
    headers = {"Authorization": f"Bearer {admin_token(gw.app.settings)}"}
    async with gw.http.get(url, headers=headers) as found:
        assert found.status == 200, await found.text()
        return await found.text()


async def lines(gw: Running, path: str, query: str) -> Any:
    """Of both forms of an export, which say the same."""
    as_csv = list(csv.DictReader(io.StringIO(await answer(gw, f"{path}?{EVER}&format=csv{query}"))))
    as_json = [json.loads(x) for x in (await answer(gw, f"{path}?{EVER}&format=jsonl{query}")).splitlines()]
    assert [{k: str(v) for k, v in line.items()} for line in as_json] == as_csv
    for line in as_json:
        yield line


async def of_each_task(gw: Running, entries: list[dict[str, Any]]) -> dict[str, Decimal]:
    """Each task by itself, from its entries, grouped by what only they know."""
    rows = []
    for task_id in sorted({e["task_id"] for e in entries}):
        text = await answer(gw, f"/usage?{EVER}&format=jsonl&task_id={task_id}&group_by=model,tier")
        rows += [json.loads(x) for x in text.splitlines()]
    return added_up(rows)


async def in_pages(gw: Running) -> Decimal:
    """The cost over all pages of buckets of OpenAI's shape, as exact decimals."""
    total, more = Decimal(), ""
    while True:
        text = await answer(gw, f"/costs?{EVER}&limit=20{more}")
        page = json.loads(text, parse_float=Decimal, parse_int=Decimal)
        total += sum((r["amount"]["value"] for b in page["data"] for r in b["results"]), Decimal())
        if not page["has_more"]:
            return total
        more = f"&page={page['next_page']}"


async def lost_by_cause(gw: Running) -> Counter[str]:
    """In nano-dollars; by the explanations, by their sums, and by the API."""
    by_table = [
        Counter(dict(await worlds.rows(
            gw.app.database, f"SELECT cause, CAST(sum(lost_nano_usd) AS BIGINT) FROM {table} GROUP BY cause"
        )))
        for table in ("prefix_miss", "miss_hour")
    ]  # fmt: skip
    told: Counter[str] = Counter()
    async for line in lines_of(gw, "/costs", "&group_by=key&include=misses"):
        told.update({m["cause"]: int(Decimal(m["lost_usd"]).scaleb(9)) for m in line["misses"]})
        assert sum(Decimal(m["lost_usd"]) for m in line["misses"]) == Decimal(line["lost_usd"])
    assert by_table == [told, told]
    return told


async def lines_of(gw: Running, path: str, query: str) -> Any:
    for line in (await answer(gw, f"{path}?{EVER}&format=jsonl{query}")).splitlines():
        yield json.loads(line)


async def refusals(gw: Running) -> Counter[str]:
    """Six calls of a key whose budget is used up, two of them the same, as the API tells them."""
    accounts = Accounts(gw.app.database, actor="test")
    record, key = await accounts.create_key(pepper=ensure_pepper(gw.app.settings), name="poor")
    await accounts.set_budget(f"key:{record.key_id}", 1)
    for said in ("a", "a", "b", "c", "d", "e"):
        body = {"model": "demo-fast", "max_tokens": 4_000, "messages": [{"role": "user", "content": said}]}
        async with gw.http.post(
            "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
        ) as refused:
            assert refused.status == 402
    await gw.app.refused.flush()
    told: Counter[str] = Counter()
    async for line in lines_of(gw, "/costs", f"&key_id={record.key_id}&include=refusals"):
        (part,) = line["refused"]
        assert (part["scope"], part["refused_usd"]) == ("key", line["refused_usd"])
        told.update(holds=line["refusals"], nano_usd=int(Decimal(line["refused_usd"]).scaleb(9)))
    return told


def counters(gw: Running) -> Counter[str]:
    """Each family added up over its labels; dollars as nano-dollars."""
    found: Counter[str] = Counter()
    for line in gw.app.metrics.render().decode().splitlines():
        match = re.fullmatch(r"(tollhouse_\w+_total)(\{.*\})? (\S+)", line)
        if match:
            name, labels, value = match.groups()
            amount = int(Decimal(value).scaleb(9)) if "usd" in name else int(Decimal(value))
            found[name] += amount
            if name == "tollhouse_corrections_usd_total":
                found[f"corrections{labels}"] += amount
    return found


async def dashboards(gw: Running) -> dict[str, int]:
    """What the tables of costs add up to, in nano-dollars."""
    found = {}
    for path in DASHBOARDS.glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            for query in panel.get("targets", ()):
                column = TABLES.get(panel["title"])
                if column is not None and "rawSql" in query:
                    sql = re.sub(r"LIMIT \d+$", "", query["rawSql"])
                    for name, value in (
                        ("$__from", "0"),
                        ("$__to", str(2**60)),
                        ("${team:sqlstring}", "'default'"),
                    ):
                        sql = sql.replace(name, value)
                    rows = await worlds.rows(gw.app.database, f'SELECT "{column}" FROM ({sql}) AS shown')
                    found[panel["title"]] = sum(round(Decimal(str(row[0])).scaleb(9)) for row in rows)
    return found
