"""Every panel has something to show of a real run: its query is answered by a real Prometheus or a real Postgres.

Where no Prometheus is and none can be installed, only `test_dashboards` looks at its queries: by reading them.
"""

from __future__ import annotations

import asyncio
import math
import re
import subprocess
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.storage.accounts import Accounts
from gateway.storage.tasks import Tasks
from tests.operations.conftest import WEBHOOK, ask, served
from tests.operations.test_dashboards import ROOT, panels, rows
from tests.support.running import Running, running
from tests.support.servers import RedisServer, prometheus_binary, prometheus_server

#: Panels whose subject is what does not happen in a run in which all goes well; their queries have no `or vector(0)`.
QUIET = {"Out of use, by status", "Quota refusals, by deployment", "Answers cut short", "Deliveries"}
#: The tier of one's own GPUs has a dashboard of its own, which a gateway without replicas cannot fill.
GPU = "tollhouse_replica"


def expressions() -> list[tuple[str, str]]:
    return [
        (panel["title"], query["expr"])
        for panel in panels()
        for query in panel["targets"]
        if "expr" in query and GPU not in query["expr"]
    ]


def chosen(expression: str) -> str:
    """As Grafana fills it in, for a Prometheus that scrapes every second."""
    for name, value in (("$__rate_interval", "10s"), ("$__range", "1m"), ("$job", ".*")):
        expression = expression.replace(name, value)
    return expression


async def asked(http: aiohttp.ClientSession, expression: str) -> list[float]:
    async with http.get("/api/v1/query", params={"query": expression}) as answer:
        said = await answer.json()
    assert said["status"] == "success", f"{expression}: {said}"
    return [float(series["value"][1]) for series in said["data"]["result"]]


async def scrapes(http: aiohttp.ClientSession, more: int) -> None:
    """Returns once Prometheus has scraped so many times more."""
    count = "sum(count_over_time(up[5m]))"
    before = sum(await asked(http, count))
    async with asyncio.timeout(30):
        while sum(await asked(http, count)) < before + more:
            await asyncio.sleep(0.1)


async def silent_panels(gw: Running) -> list[str]:
    """Titles of panels without a number, once a Prometheus has watched the gateway serve."""
    with prometheus_server(f"127.0.0.1:{gw.app.admin_port}") as url:
        async with aiohttp.ClientSession(url) as http:
            await scrapes(http, 1)
            await served(gw)
            await scrapes(http, 2)
            await ask(gw, "again", [{"role": "user", "content": "hi"}], model="auto", stream=True)
            await gw.app.quiet()
            await scrapes(http, 2)
            return [
                title
                for title, expression in expressions()
                if not any(math.isfinite(value) for value in await asked(http, chosen(expression)))
            ]


async def test_every_panel_shows_numbers_of_a_real_run(postgres_url: str, own_redis: RedisServer) -> None:
    if prometheus_binary() is None:
        return
    configured = {"redis_url": own_redis.url, "webhook": WEBHOOK}
    async with running(postgres_url, configured=configured) as gw:
        assert set(await silent_panels(gw)) <= QUIET


@pytest.mark.parametrize("name", ["alerts", "recording"])
def test_the_rules_pass_their_own_tests(name: str) -> None:
    if prometheus_binary() is None:
        return
    at: Path = ROOT / "config/prometheus" / f"{name}_test.yaml"
    done = subprocess.run(
        ["promtool", "test", "rules", at.name], cwd=at.parent, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


async def run_of_everything(gw: Running) -> dict[str, str]:
    """Served, refused, missed, paused, with a child and an outcome; the ids of a task and of one of its requests."""
    database = gw.app.database
    await Accounts(database, actor="test").set_budget("tenant:default", 10_000_000_000, window="30d")
    await served(gw)
    said = [{"role": "user", "content": "and you?"}]
    entries = await gw.entries()
    task = str(entries[0]["task_id"])
    await Accounts(database, actor="test").set_budget(f"task:{task}", 10_000_000_000)
    headers = {"x-task-id": "child", "x-parent-task-id": "run"}
    body = {"model": "demo-fast", "max_tokens": 16, "messages": said}
    async with gw.http.post("/v1/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
    await gw.app.quiet()
    await gw.app.refused.flush()
    tasks = Tasks(database, actor="test", pepper=b"p" * 32)
    await tasks.record_outcome(task, True)
    await tasks.pause(task, "a look at it")
    return {"task": task, "request": str(entries[0]["request_id"])}


async def test_every_table_has_rows_of_a_real_run(postgres_url: str) -> None:
    async with running(postgres_url) as gw:
        of = await run_of_everything(gw)
        tables: dict[str, list[dict[str, Any]]] = {
            panel["title"]: await rows(gw.app.database, query["rawSql"], **of)
            for panel in panels()
            for query in panel["targets"]
            if "rawSql" in query
        }
        counted = {
            name: sum(map(Decimal, re.findall(rf"^{name}\{{.*\}} (\S+)$", page, re.MULTILINE)))
            for page in [gw.app.metrics.render().decode()]
            for name in ("tollhouse_cost_usd_total", "tollhouse_list_cost_usd_total")
        }
        entries = await gw.entries()
    # to the nano-dollar: the ledger, what a scrape reads, and what the tables sum up
    spent_usd = Decimal(sum(e["amount_nano_usd"] for e in entries)) / 10**9
    saved_usd = Decimal(sum(e["list_cost_nano_usd"] for e in entries)) / 10**9 - spent_usd
    assert spent_usd > 0
    assert counted == {
        "tollhouse_cost_usd_total": spent_usd,
        "tollhouse_list_cost_usd_total": spent_usd + saved_usd,
    }
    for title in ("Teams that spend most", "Keys that spend most", "Models"):
        sums = [sum(Decimal(str(row[name])) for row in tables[title]) for name in ("Cost", "Saved")]
        assert sums == [spent_usd, saved_usd], title
    assert {title for title, found in tables.items() if not found} == {"Open holds"}
    (task,) = tables["Task"]
    assert (task["Task"], task["State"], task["Success"]) == (of["task"], "paused_admin", True)
    assert [row["Request"] for row in tables["Requests"]].count(of["request"]) == 1
    assert [row["No"] for row in tables["Attempts"]] == [1]
