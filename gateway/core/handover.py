"""A task in a few sentences, for a person who takes it over: out of what is kept anyway, so without a word of any prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.entry import Unit
from gateway.core.money import usd_text
from gateway.core.task_facts import TaskFacts, TaskRow


def summary(facts: TaskFacts, below: Sequence[TaskRow], last: Mapping[str, Any] | None) -> list[str]:
    """One sentence each: where it stands, what it did and cost, its last request, its budgets, its breakers, its
    children, how it turned out. `last`: its latest ledger entry.
    """
    return [
        *_state(facts.task),
        *_last(last),
        *_budgets(facts),
        *(f"Breaker {e.breaker} ({e.action}): {e.message}." for e in facts.events if e.resumed_at_ms is None),
        *_below(below),
        *_outcome(facts),
    ]


def _state(task: TaskRow) -> list[str]:
    name = f"{task.name} " if task.name else ""
    why = f": {task.state_reason}" if task.state_reason else ""
    return [
        f"Task {name}({task.task_id}) is {task.state}{why}.",
        f"It took {task.steps} steps in {task.attempts} attempts and cost ${usd_text(task.cost_nano_usd)} "
        f"(${usd_text(task.list_cost_nano_usd)} without any cache).",
    ]


def _last(last: Mapping[str, Any] | None) -> list[str]:
    if last is None:
        return ["It has asked nothing yet."]
    ended = last["error"] or last["finish"] or last["kind"]
    return [
        f"Its last request {last['request_id']}, step {last['step']}, went to {last['model']} "
        f"({last['deployment']}) and ended with {ended} after {last['output']} output tokens.",
    ]


def _budgets(facts: TaskFacts) -> list[str]:
    found = []
    for b in (*facts.budgets, *facts.above):
        shown = [
            f"${usd_text(n)}" if b.unit is Unit.USD else f"{n} {b.unit.replace('_', ' ')}"
            for n in (b.spent, b.limit, b.left)
        ]
        found.append(f"Of the budget of {b.scope}, {shown[0]} of {shown[1]} is spent and {shown[2]} left.")
    if facts.steps_left is not None:
        found.append(f"That pays for about {facts.steps_left} more steps as the last ones were.")
    return found


def _below(below: Sequence[TaskRow]) -> list[str]:
    return [
        f"Below it: {t.name or t.task_id} is {t.state} after {t.steps} steps and ${usd_text(t.cost_nano_usd)}."
        for t in below
    ]


def _outcome(facts: TaskFacts) -> list[str]:
    if facts.outcome is None:
        return []
    score = "" if facts.outcome.score is None else f", with a score of {facts.outcome.score:g}"
    return [f"It was said to have {'succeeded' if facts.outcome.success else 'failed'}{score}."]
