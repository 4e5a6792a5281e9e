"""tasks: what agent runs did and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gateway.commands.database import Desk, at_desk
from gateway.commands.output import dollars, moment, print_json, print_table, say
from gateway.storage import reports
from gateway.storage.accounts import Task

_MOST_ENTRIES = 10_000


def show_all(path: Path | None, limit: int, as_json: bool) -> int:
    found = at_desk(path, lambda desk: desk.accounts.list_tasks(limit=limit))
    if as_json:
        print_json([asdict(task) for task in found])
    else:
        _print_tasks(found)
    return 0


def show_one(path: Path | None, task_id: str, as_json: bool) -> int:
    async def act(desk: Desk) -> tuple[Task, list[dict[str, Any]]]:
        task = await desk.accounts.get_task(task_id)
        return task, await reports.entries(desk.database, task_id=task.task_id, limit=_MOST_ENTRIES)

    task, entries = at_desk(path, act)
    if as_json:
        print_json({**asdict(task), "entries": entries})
        return 0
    _print_tasks([task])
    print_table(
        [
            "step>",
            "started",
            "model",
            "tier",
            "kind",
            "input>",
            "cached>",
            "output>",
            "cost>",
            "finish",
            "ms>",
        ],
        [
            [
                str(e["step"]),
                moment(e["started_at_ms"]),
                e["model"],
                e["tier"],
                e["kind"] if e["attempt_no"] == 1 else f"{e['kind']} (try {e['attempt_no']})",
                f"{input_total(e):,}",
                share(e),
                f"{e['output']:,}",
                dollars(e["amount_nano_usd"]),
                e["error"] or e["finish"],
                f"{e['latency_ms']:,}",
            ]
            for e in entries
        ],
    )
    return 0


def _print_tasks(found: list[Task]) -> None:
    if not found:
        say("no task yet")
        return
    print_table(
        ["task", "named", "key", "team", "state", "steps>", "input>", "cached>", "output>", "cost>", "last"],
        [
            [
                t.task_id,
                t.external_id or "-",
                t.key_id,
                t.team_id,
                t.state,
                f"{t.steps:,}",
                f"{input_total(t.tokens):,}",
                share(t.tokens),
                f"{t.tokens['output']:,}",
                dollars(t.cost_nano_usd),
                moment(t.last_at_ms),
            ]
            for t in found
        ],
    )


def input_total(tokens: Mapping[str, int]) -> int:
    """All input tokens, whatever class they were billed in."""
    writes = tokens["cache_write_5m"] + tokens["cache_write_1h"] + tokens["cache_write_12h"]
    return tokens["input_uncached"] + tokens["cache_read"] + writes


def share(tokens: Mapping[str, int]) -> str:
    """The part of the input that came out of the provider's cache."""
    total = input_total(tokens)
    return f"{tokens['cache_read'] / total:.0%}" if total else "-"
