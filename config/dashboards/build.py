"""Generate the dashboards in config/grafana/dashboards/ and the PrometheusRule in k8s/monitoring/ out of short descriptions.

Grafana's JSON repeats forty lines for each panel; here a panel is what differs: its title, what it says, its queries.
`money.py`, `budgets.py`, `tasks.py`, `cache.py`, `providers.py`, `traffic.py` and `ledger.py` have them.

    python -m config.dashboards.build            write the files
    python -m config.dashboards.build --check    are the committed files what would be written?
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from config.dashboards.budgets import BUDGETS
from config.dashboards.cache import CACHE
from config.dashboards.gpu import GPU
from config.dashboards.ledger import LEDGER
from config.dashboards.money import MONEY
from config.dashboards.panels import Dashboard, Panel, Query, Table, Variable
from config.dashboards.providers import PROVIDERS
from config.dashboards.tasks import TASK, TASKS
from config.dashboards.traffic import TRAFFIC

CONFIG = Path(__file__).resolve().parents[1]
DASHBOARD_FILES = CONFIG / "grafana" / "dashboards"
RULES = tuple(CONFIG / "prometheus" / name for name in ("recording.yaml", "alerts.yaml"))
DASHBOARDS = (MONEY, BUDGETS, TASKS, TASK, CACHE, PROVIDERS, TRAFFIC, GPU, LEDGER)
PROMETHEUS_RULE = CONFIG.parent / "k8s" / "monitoring" / "prometheus-rule.yaml"

#: Grafana 10 and later read this version of the schema, and migrate it by themselves.
SCHEMA_VERSION = 39
_COLUMNS = 24
_METRIC = re.compile(r"\b((?:tollhouse|process)_\w+)(\{)?")


def of_the_job(expression: str) -> str:
    """The expression, of the scrape jobs that are chosen on the dashboard."""
    return _METRIC.sub(
        lambda m: f'{m[1]}{{job=~"$job"' + (", " if m[2] else "}"),
        expression,
    )


def _target(query: Query, ref: str, *, instant: bool) -> dict[str, Any]:
    return {
        "refId": ref,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "expr": of_the_job(query.expr),
        "legendFormat": query.legend,
        "instant": instant,
        "range": not instant,
    }


def _sql_target(sql: str) -> dict[str, Any]:
    return {
        "refId": "A",
        "datasource": {"type": "grafana-postgresql-datasource", "uid": "${postgres}"},
        "format": "table",
        "rawQuery": True,
        "rawSql": sql,
    }


def _thresholds(panel: Panel) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": panel.colors[0], "value": None}]
    steps += [
        {"color": color, "value": at} for color, at in zip(panel.colors[1:], panel.turns_at, strict=True)
    ]
    return {"mode": "absolute", "steps": steps}


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    stat = panel.kind == "stat"
    custom: dict[str, Any] = {"fillOpacity": 20 if panel.stacked else 0, "showPoints": "never"}
    if panel.stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    options: dict[str, Any] = (
        {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value"}
        if stat
        else {
            "legend": {
                "displayMode": "table",
                "placement": "bottom",
                "showLegend": True,
                "calcs": ["mean", "max"],
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    )
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "gridPos": place,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "targets": [_target(query, chr(ord("A") + i), instant=stat) for i, query in enumerate(panel.queries)],
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                **({} if panel.below_zero or stat else {"min": 0}),
                "custom": {} if stat else custom,
                "thresholds": _thresholds(panel),
            },
            "overrides": [],
        },
        "options": options,
    }


def _table(table: Table, number: int, place: dict[str, int]) -> dict[str, Any]:
    overrides = [
        {
            "matcher": {"id": "byName", "options": column},
            "properties": [{"id": "unit", "value": unit}],
        }
        for column, unit in table.units.items()
    ] + [
        {
            "matcher": {"id": "byName", "options": column},
            "properties": [{"id": "links", "value": [{"title": f"Open {column.lower()}", "url": url}]}],
        }
        for column, url in table.links.items()
    ]
    return {
        "id": number,
        "type": "table",
        "title": table.title,
        "description": table.description,
        "gridPos": place,
        "datasource": {"type": "grafana-postgresql-datasource", "uid": "${postgres}"},
        "targets": [_sql_target(table.sql)],
        "fieldConfig": {"defaults": {"unit": "none", "custom": {}}, "overrides": overrides},
        "options": {"showHeader": True, "cellHeight": "sm"},
    }


def _placed(dashboard: Dashboard) -> Iterator[dict[str, Any]]:
    number = y = 0
    for section in dashboard.sections:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": section.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
            "panels": [],
        }
        x, y, tallest = 0, y + 1, 0
        for panel in section.panels:
            number += 1
            if x + panel.width > _COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            x, tallest = x + panel.width, max(tallest, panel.height)
            yield _table(panel, number, place) if isinstance(panel, Table) else _panel(panel, number, place)
        y += tallest


def _chosen(variable: Variable) -> dict[str, Any]:
    if not variable.sql:
        return {
            "name": variable.name,
            "type": "textbox",
            "label": variable.label,
            "query": "",
            "current": {"text": "", "value": ""},
        }
    return {
        "name": variable.name,
        "type": "query",
        "label": variable.label,
        "datasource": {"type": "grafana-postgresql-datasource", "uid": "${postgres}"},
        "query": variable.sql,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _variables(chosen: Sequence[Variable], *, postgres: bool) -> list[dict[str, Any]]:
    def source(name: str, kind: str, label: str) -> dict[str, Any]:
        return {"name": name, "type": "datasource", "query": kind, "label": label, "refresh": 1}

    variables = [source("datasource", "prometheus", "Prometheus")]
    if postgres:
        variables.append(source("postgres", "grafana-postgresql-datasource", "Postgres"))
    variables.append(
        {
            "name": "job",
            "type": "query",
            "label": "Job",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": {"query": "label_values(tollhouse_build_info, job)", "refId": "job"},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }
    )
    return variables + [_chosen(variable) for variable in chosen]


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana imports and provisions it."""
    has_tables = any(isinstance(p, Table) for s in dashboard.sections for p in s.panels)
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["tollhouse"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "1m",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables(dashboard.variables, postgres=has_tables)},
        "annotations": {"list": []},
        "links": [
            {
                "type": "dashboards",
                "title": "Tollhouse",
                "tags": ["tollhouse"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "panels": list(_placed(dashboard)),
    }


def prometheus_rule(groups: Any) -> str:
    """The same rules as an object for the Prometheus Operator."""
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "tollhouse"},
        "spec": {"groups": groups},
    }
    head = "# Written by config/dashboards/build.py out of config/prometheus/*.yaml: change those.\n"
    return head + yaml.safe_dump(rule, sort_keys=False, width=110)


def files() -> dict[Path, str]:
    """Path -> text of everything that is generated."""
    found = {
        DASHBOARD_FILES / f"{d.uid.removeprefix('tollhouse-')}.json": json.dumps(dashboard_json(d), indent=1)
        + "\n"
        for d in DASHBOARDS
    }
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    found[PROMETHEUS_RULE] = prometheus_rule(groups)
    return found


def main() -> int:
    check = "--check" in sys.argv[1:]
    stale = [path for path, text in files().items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files()[path], "utf-8")
        print(f"{'differs' if check else 'written'}: {path}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
