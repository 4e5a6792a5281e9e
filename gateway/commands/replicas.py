"""replicas: where a running gateway sends calls of deployments with several servers, and how to take one out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from gateway.commands.asking import rows_of
from gateway.commands.opening import load_settings
from gateway.commands.output import print_json, print_table, say


def replicas(path: Path | None, action: str, deployment: str, replica: str, as_json: bool) -> int:
    """`action` is "show", "drain" or "undrain"."""
    settings = load_settings(path)
    wanted = {"deployment": deployment, "replica": replica}
    change = None if action == "show" else (f"/replicas/{action}", wanted)
    rows = asyncio.run(rows_of(settings, "/replicas", change))
    if as_json:
        print_json(rows)
        return 0
    costs = asyncio.run(rows_of(settings, "/gpu"))
    if not rows and not costs:
        say("no deployment has replicas; `replicas:` of a deployment lists them or says how they are found")
    if rows:
        _print(rows)
    if costs:
        _print_costs(costs)
    return 0


def _print(rows: list[dict[str, Any]]) -> None:
    print_table(
        [
            *("deployment", "replica", "name", "health", "queue>", "runs>", "KV>", "backlog>", "sessions>"),
            *("cached>", "expected>", "restarts>", "version", "why"),
        ],
        [
            [
                row["deployment"],
                row["replica"],
                row["name"],
                row["health"],
                _count(row["waiting"]),
                _count(row["running"]),
                _share(row["kv_usage"]),
                f"{row['backlog_tokens'] + row['peer_backlog_tokens']:,}",
                _count(row["sessions"]),
                _share_of(row["reported_cached_tokens"], row["prompt_tokens"]),
                _share_of(row["predicted_cached_tokens"], row["prompt_tokens"]),
                _count(row["restarts"]),
                row["version"] or "-",
                row["why"] or "-",
            ]
            for row in rows
        ],
    )


def _print_costs(rows: list[dict[str, Any]]) -> None:
    print_table(
        [
            "deployment",
            "replicas>",
            "an hour of one>",
            "hours>",
            "cost>",
            "charged>",
            "idle>",
            "utilisation>",
        ],
        [
            [
                row["deployment"],
                _count(row["replicas"]),
                f"${row['usd_per_replica_hour']}",
                f"{row['replica_hours']:,.2f}",
                *(f"${float(row[name]):,.2f}" for name in ("cost_usd", "charged_usd", "idle_usd")),
                f"{_share(row['utilisation'])} of {_share(row['sold_share'])}",
            ]
            for row in rows
        ],
        title="since the gateway that answered began, and charged by it alone, with all its workers",
    )


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _share_of(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"
