"""Dashboards and alerts ask for what a gateway really exports, and the page on metrics says the same."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from config.dashboards import build
from gateway.storage import reports
from gateway.storage.accounts import Accounts
from gateway.storage.database import Database
from gateway.storage.transact import Fetch, Sql, Tx
from tests.operations.promql import Exported, problems
from tests.support.running import running

ROOT = Path(__file__).resolve().parents[2]
GRAFANA = ROOT / "config" / "grafana"
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))
OPERATIONS = (ROOT / "docs" / "operations.md").read_text("utf-8")
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "config/prometheus/alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
RECORDED: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "config/prometheus/recording.yaml").read_text())["groups"]
    for rule in group["rules"]
]


def dashboards() -> list[dict[str, Any]]:
    return [json.loads(path.read_text("utf-8")) for path in DASHBOARDS]


def panels() -> list[dict[str, Any]]:
    return [p for d in dashboards() for p in d["panels"] if p["type"] != "row"]


def queries() -> list[dict[str, Any]]:
    return [q for p in panels() for q in p["targets"]]


def test_the_files_are_what_the_descriptions_say() -> None:
    assert {path: text for path, text in build.files().items() if path.read_text("utf-8") != text} == {}
    assert {p for p in build.files() if p.suffix == ".json"} == set(DASHBOARDS)


def test_every_panel_asks_for_what_is_exported(on: Exported) -> None:
    found = [
        (panel["title"], problem)
        for panel in panels()
        for query in panel["targets"]
        if "expr" in query
        for problem in problems(query["expr"], on, query["legendFormat"])
    ]
    assert found == []


def test_every_alert_asks_for_what_is_exported(on: Exported) -> None:
    found = [
        (rule["alert"], problem)
        for rule in ALERTS
        for problem in problems(rule["expr"], on, rule["annotations"]["summary"])
    ]
    assert found == []


def test_every_recorded_rule_asks_for_what_is_exported(on: Exported) -> None:
    assert [(r["record"], found) for r in RECORDED if (found := problems(r["expr"], on))] == []


def _lost(written: Any, read: Any, at: str) -> Iterator[str]:
    if isinstance(written, dict) and isinstance(read, dict):
        for name, value in written.items():
            yield from _lost(value, read.get(name, "nothing"), f"{at}.{name}")
    elif isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        for number, (one, other) in enumerate(zip(written, read, strict=True)):
            yield from _lost(one, other, f"{at}[{number}]")
    elif written != read:
        yield f"{at}: {written!r} became {read!r}"


def test_grafanas_own_library_knows_all_that_is_written() -> None:
    """What its types do not know, or know as something else, does not come back from them."""
    register_default_plugins()
    for document in dashboards():
        read = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(document)))
        assert list(_lost(document, read, document["uid"])) == []
    document["panels"][1]["gridPos"]["width"] = 4
    read = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(document)))
    assert len(list(_lost(document, read, ""))) == 1, "so a word that Grafana does not have is noticed"


@pytest.mark.parametrize(
    ("expression", "legend", "problem"),
    [
        ("sum(rate(tollhouse_spend_total[5m]))", "", "no metric tollhouse_spend_total"),
        ("sum by (key) (tollhouse_cost_usd_total)", "", "no label key to group by"),
        ('tollhouse_cost_usd_total{task="x"}', "", "tollhouse_cost_usd_total has no label task"),
        ('tollhouse_refusals_total{kind="no_money"}', "", "tollhouse_refusals_total has no kind no_money"),
        ('tollhouse_attempts_total{outcome=~"up_.*"}', "", "tollhouse_attempts_total has no outcome up_.*"),
        ("sum by (team) (tollhouse_cost_usd_total)", "{{model}}", "no label model in the result"),
        ("tollhouse_inflight_requests", "{{ $labels.team }}", "no label team in the result"),
        ("sum by (le) (tollhouse_overhead_seconds_sum)", "", "no label le to group by"),
        ("median(tollhouse_inflight_requests)", "", "no function median"),
    ],
)
def test_what_is_not_exported_is_found(on: Exported, expression: str, legend: str, problem: str) -> None:
    assert problems(expression, on, legend) == [problem]


def test_the_page_on_metrics_names_each_with_its_labels(on: Exported) -> None:
    documented = {
        name: frozenset(re.findall(r"\w+", labels))
        for name, labels in re.findall(r"^\| `(tollhouse_\w+)` \| ([\w, ]*)\|", OPERATIONS, re.MULTILINE)
    }
    really = {
        name.removesuffix("_bucket"): labels - {"le"}
        for name, labels in on.labels.items()
        if name.startswith("tollhouse_") and not name.endswith(("_seconds_sum", "_seconds_count"))
    }
    assert documented == really


def test_every_panel_can_be_read_without_its_query() -> None:
    for panel in panels():
        assert panel["description"].endswith((".", "?")), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert all(query.get("legendFormat", panel["title"]) for query in panel["targets"])
    for dashboard in dashboards():
        assert dashboard["uid"].startswith("tollhouse-")
        numbers = [panel["id"] for panel in dashboard["panels"]]
        assert numbers == list(range(1, len(numbers) + 1))
        titles = [panel["title"] for panel in dashboard["panels"]]
        assert len(titles) == len(set(titles))


def test_panels_lie_beside_one_another() -> None:
    for dashboard in dashboards():
        taken: set[tuple[int, int]] = set()
        for panel in dashboard["panels"]:
            at = panel["gridPos"]
            mine = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
            assert at["x"] + at["w"] <= 24
            assert not taken & mine, panel["title"]
            taken |= mine


def test_sources_are_chosen_on_the_dashboard() -> None:
    for dashboard in dashboards():
        variables = {v["name"] for v in dashboard["templating"]["list"]}
        text = json.dumps(dashboard["panels"])
        asked = set(re.findall(r"\$\{(\w+):sqlstring\}", text))
        assert set(re.findall(r'"uid": "\$\{(\w+)\}"', text)) | {"datasource", "job"} | asked == variables
        assert set(re.findall(r'"uid": "([^"$]+)"', text)) == set()
    assert all('job=~"$job"' in query["expr"] for query in queries() if "expr" in query)


def test_what_grafana_and_the_sidecar_load_is_there() -> None:
    generator = yaml.safe_load((GRAFANA / "kustomization.yaml").read_text())["configMapGenerator"]
    assert {GRAFANA / file for entry in generator for file in entry["files"]} == set(DASHBOARDS)
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/tollhouse.yaml").read_text())["datasources"]
    used = {query["datasource"]["type"] for query in queries()}
    assert {source["type"] for source in sources} == used
    (provider,) = yaml.safe_load((GRAFANA / "provisioning/dashboards/tollhouse.yaml").read_text())[
        "providers"
    ]
    assert (provider["type"], provider["options"]["path"]) == (
        "file",
        "/var/lib/grafana/dashboards/tollhouse",
    )


def test_every_alert_says_how_grave_it_is_and_what_to_do() -> None:
    headings = {h.lower() for h in re.findall(r"^#+ (\w+)$", OPERATIONS, re.MULTILINE)}
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert rule["alert"].lower() in headings
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)


def test_every_click_leads_to_a_dashboard_that_takes_it() -> None:
    takes = {d["uid"]: {v["name"] for v in d["templating"]["list"]} for d in dashboards()}
    links = [
        (column["matcher"]["options"], link["url"])
        for panel in panels()
        for column in panel["fieldConfig"]["overrides"]
        for each in column["properties"]
        if each["id"] == "links"
        for link in each["value"]
    ]
    assert {column for column, _ in links} == {"Team", "Task", "Parent", "Request"}
    for _, url in links:
        uid, _, query = url.removeprefix("/d/").partition("?")
        given = set(re.findall(r"var-(\w+)=|\{(\w+):queryparam\}", query))
        assert {a or b for a, b in given} <= takes[uid]


async def rows(
    database: Database, sql: str, team: str = "default", task: str = "", request: str = ""
) -> list[dict[str, Any]]:
    """As Grafana asks, from the beginning to a minute from now."""
    chosen = {"$__from": "0", "$__to": str(time.time_ns() // 1_000_000 + 60_000)}
    chosen |= {
        f"${{{name}:sqlstring}}": f"'{value}'"
        for name, value in (("team", team), ("task", task), ("request", request))
    }
    for name, value in chosen.items():
        sql = sql.replace(name, value)
    statement = Sql(sql)

    def tx() -> Tx[list[dict[str, Any]]]:
        return [dict(row) for row in (yield Fetch(statement))]

    return await database.read(tx)


async def test_every_table_reads_the_real_schema(postgres_url: str) -> None:
    async with running(postgres_url) as gw:
        database = gw.app.database
        accounts = Accounts(database, actor="test")
        await accounts.set_budget("tenant:default", 10_000_000_000, window="30d")
        ask = {"model": "demo-fast", "max_tokens": 16, "messages": [{"role": "user", "content": "hi"}]}
        async with gw.http.post("/v1/chat/completions", json=ask) as answer:
            assert answer.status == 200
        await gw.app.quiet()
        tables = {
            panel["title"]: await rows(database, query["rawSql"])
            for panel in panels()
            for query in panel["targets"]
            if "rawSql" in query
        }
        (entry,) = await reports.entries(database)
    spent_usd = pytest.approx(entry["amount_nano_usd"] / 1e9)
    (budget,) = tables["Budgets near their end"]
    assert (budget["Budget"], budget["Window"], float(budget["Limit"]), budget["Held"]) == (
        "tenant:default",
        "30d",
        10.0,
        0,
    )
    assert float(budget["Spent"]) == spent_usd
    assert [float(row["Cost"]) for row in tables["Tasks that spend most"]] == [spent_usd]
    assert [float(row["Cost"]) for row in tables["Keys that spend most"]] == [spent_usd]
    assert tables["Open holds"] == []
    assert [row["Replica"] for row in tables["Replicas"]] == ["test"]


async def test_the_table_of_budgets_counts_windows_as_the_ledger_does(postgres_url: str) -> None:
    usd, day_ms = 1_000_000_000, 86_400_000
    async with running(postgres_url) as gw:
        accounts = Accounts(gw.app.database, actor="test")
        now_ms = gw.app.clock.now_ms()
        for window in ("30d", "day", "lifetime"):
            await accounts.set_budget("team:default", 10 * usd, window=window)
        store = await asyncpg.connect(postgres_url)
        try:
            (rolling,) = (b for b in await gw.app.ledger.snapshot("team:default") if b.window == "30d")
            await store.execute("UPDATE budget SET posted_amount = $1, held_amount = $2", 3 * usd, 1 * usd)
            await store.execute(
                "UPDATE budget SET window_end_ms = window_start_ms + 1 WHERE \"window\" = 'day'"
            )
            await store.execute(
                "UPDATE budget SET override_limit_amount = $1, override_until_ms = $2 WHERE \"window\" = 'lifetime'",
                8 * usd,
                now_ms + day_ms,
            )
            for days_ago in (10, 40):
                await store.execute(
                    "INSERT INTO budget_closed (budget_id, window_start_ms, window_end_ms, scope, limit_amount,"
                    " posted_amount, held_amount) VALUES ($1, $2::bigint, $2::bigint + 1, 'team:default', 0, $3, $4)",
                    rolling.budget_id,
                    now_ms - days_ago * day_ms,
                    2 * usd,
                    1 * usd,
                )
        finally:
            await store.close()
        (table,) = (p for p in panels() if p["title"] == "Budgets near their end")
        shown = {
            row["Window"]: tuple(float(row[name]) for name in ("Spent", "Held", "Limit", "Used"))
            for row in await rows(gw.app.database, table["targets"][0]["rawSql"])
        }
        counted = {
            b.window: (b.spent / usd, b.reserved / usd, b.limit / usd, 100 * (b.spent + b.reserved) / b.limit)
            for b in await gw.app.ledger.snapshot("team:default")
        }
    assert shown == {
        "30d": (5.0, 2.0, 10.0, 70.0),
        "lifetime": (3.0, 1.0, 8.0, 50.0),
        "day": (0.0, 0.0, 10.0, 0.0),
    }
    assert shown == counted
