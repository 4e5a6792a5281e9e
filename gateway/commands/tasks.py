"""tasks: what agent runs did and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gateway.commands.database import ACTOR, Desk, at_desk
from gateway.commands.output import dollars, moment, print_json, print_table, say
from gateway.core.explanation import Cause, prevented_by
from gateway.storage import reports
from gateway.storage.accounts import Task
from gateway.storage.breaker_events import BreakerEvent
from gateway.storage.reports import MissRow
from gateway.storage.tasks import Tasks, TaskView

_MOST_ENTRIES = 10_000


def show_all(path: Path | None, limit: int, as_json: bool) -> int:
    found = at_desk(path, lambda desk: desk.accounts.list_tasks(limit=limit))
    if as_json:
        print_json([asdict(task) for task in found])
    else:
        _print_tasks(found)
    return 0


def show_one(path: Path | None, task_id: str, as_json: bool) -> int:
    async def act(desk: Desk) -> tuple[TaskView, list[dict[str, Any]], list[MissRow]]:
        view = await Tasks(desk.database, actor=ACTOR, pepper=b"").task_view(task_id)
        entries = await reports.entries(desk.database, task_id=view.task.task_id, limit=_MOST_ENTRIES)
        return view, entries, await reports.misses(desk.database, by=(), task_id=view.task.task_id)

    view, entries, misses = at_desk(path, act)
    task = view.task
    if as_json:
        print_json(
            {
                **asdict(task),
                "breakers": [asdict(e) for e in view.events],
                "misses": [cause_document(row) for row in misses],
                "entries": entries,
            }
        )
        return 0
    _print_tasks([task])
    if task.state_reason:
        say(f"{task.state}: {task.state_reason}")
    if view.events:
        _print_events(view.events)
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
    for row in misses:
        say(
            f"{row.cause.replace('_', ' ')}: {row.lost_tokens:,} tokens not read from a cache in "
            f"{row.attempts:,} attempt{'s' * (row.attempts != 1)}, {dollars(row.lost_nano_usd)} lost"
        )
    return 0


def cause_document(row: MissRow) -> dict[str, Any]:
    """Misses for one cause, for JSON and CSV."""
    return {
        "cause": row.cause,
        "attempts": row.attempts,
        "lost_tokens": row.lost_tokens,
        "lost_nano_usd": row.lost_nano_usd,
        "prevented_by": prevented_by(Cause(row.cause)),
    }


def change_state(path: Path | None, task_id: str, reason: str, *, pause: bool, as_json: bool) -> int:
    """Pause a task and all below it, or let it go on and forget what breakers have seen of it."""

    async def act(desk: Desk) -> tuple[TaskView, list[str]]:
        tasks = Tasks(desk.database, actor=ACTOR, pepper=b"")  # no key is made here
        found = (await tasks.task_view(task_id)).task.task_id
        changed = await (tasks.pause if pause else tasks.resume)(found, reason)
        return await tasks.task_view(found), changed

    view, changed = at_desk(path, act)
    if as_json:
        print_json({**asdict(view.task), "changed": changed, "breakers": [asdict(e) for e in view.events]})
        return 0
    say(
        f"{view.task.task_id} is {view.task.state}"
        + (f", with {len(changed) - 1} below it" if len(changed) > 1 else "")
    )
    return 0


def _print_events(events: Sequence[BreakerEvent]) -> None:
    print_table(
        ["breaker", "did", "when", "what it saw", "resumed by"],
        [
            [e.breaker, e.action if e.tripped else "warned", moment(e.at_ms), e.message, e.resumed_by or "-"]
            for e in events
        ],
    )


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
