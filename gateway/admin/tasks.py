"""Tasks, for people: what runs and what it costs, how to stop it, and how runs turned out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.admin.bodies import TaskHandover, TaskIn, TaskOutcomeIn, TaskPatch, TaskRaise
from gateway.admin.budgets import raised
from gateway.admin.call import Call, Json, Reply, etag_of
from gateway.admin.problems import Problem, invalid
from gateway.admin.route import PAGED, Param, Route, choice, moment, text, words
from gateway.admin.schemas import TaskStateIn
from gateway.admin.shown import (
    Out,
    TaskCreated,
    TaskOut,
    TaskView,
    entry_out,
    shown,
    task_out,
)
from gateway.core import handover, secrets
from gateway.core.budget import Budget
from gateway.core.money import usd_text
from gateway.core.offices import Once, Right
from gateway.core.outcomes import Statistics, statistics
from gateway.core.task import State
from gateway.core.task_facts import TaskRow

STEPS_MAX = 1_000
TREE_MAX = 200
#: Attempts that a handover shows.
LAST_MAX = 10
_END_OF_TIME_MS = 2**53
#: What statistics can be grouped by; the last four are of the attempts that most of a task's money went to.
_GROUPS = ("tenant_id", "team_id", "key_id", "name", "model", "tier", "client", "deployment")


class TaskNode(TaskView):
    """A task with those below it. `total_cost_usd` counts them in."""

    total_cost_usd: str
    tasks: list[dict[str, Any]]


class StepsOut(Out):
    """The steps of a task, the latest `limit` of them in their order."""

    task_id: str
    steps: list[dict[str, Any]]
    misses: list[dict[str, Any]]
    complete: bool


class HandoverOut(Out):
    """Where a task stands, for whoever takes it over. `summary`: sentences for a person; `last`: its latest attempts, the
    latest first. What was asked and answered is not kept, so it is not in there.
    """

    to: str
    task: TaskView
    summary: list[str]
    last: list[dict[str, Any]]
    below: list[TaskOut]
    changed: list[str]


class StatisticsOut(Out):
    """See `core.outcomes.Statistics`."""

    group: dict[str, str]
    runs: int
    successes: int
    success_rate: float
    first_passes: int
    first_pass_rate: float
    interventions: int
    mean_score: float | None
    cost_usd: str
    cost_per_success_usd: str | None
    output_tokens_per_success: int | None
    steps_per_success: int | None
    cost_min_usd: str | None
    cost_median_usd: str | None
    cost_max_usd: str | None


async def list_tasks(call: Call) -> Reply:
    """The most first, by `sort`; default: the latest. `cost_per_min_usd` is the average since it began."""
    return await call.page(call.registry.tasks, lambda task: shown(TaskOut.of(task)))


async def create_task(call: Call) -> Reply:
    """Declare a task of a key, with budgets and a key of its own, which is shown once."""
    wanted = TaskIn.model_validate(call.body)

    def again(body: Json, once: Once) -> Json:
        secret = secrets.secret_text(once.secret_bytes(call.deps.pepper))
        return {"key": secrets.key_text(body["own_key_id"], secret)}

    reply = await call.change(
        lambda it: it.declare_task(
            wanted.key_id, wanted.name, [b.rule() for b in wanted.budgets], wanted.labels, wanted.parent
        ),
        lambda made: {"task_id": made[0].task_id, "own_key_id": (secrets.parse_key(made[1]) or ("", ""))[0]},
        status=201,
        secret=lambda made: {"key": made[1]},
        again=again,
    )
    assert not isinstance(reply.body, bytes)
    view = await _view(call, reply.body["task_id"])
    return Reply({**view, "key": reply.body["key"]}, 201, _tag(view), headers=reply.headers)


async def get_task(call: Call) -> Reply:
    """By its id, or by the id that its client gave it; with its budgets, and what breakers saw and did."""
    view = await _view(call, call.path["task_id"])
    return Reply(view, etag=_tag(view))


async def get_steps(call: Call) -> Reply:
    """What each step did: tier, model, tokens by class, cost, and how it ended; and what was lost to caches, by cause."""
    task = await call.registry.find_task(call.path["task_id"])
    page = await call.registry.entries({"task_id": task.task_id}, None, STEPS_MAX)
    missed = await call.deps.misses(
        by=(), from_ms=0, to_ms=_END_OF_TIME_MS, tenant_id="", team_id="", key_id="", task_id=task.task_id
    )
    lost = [
        {
            "cause": row.cause,
            "attempts": row.attempts,
            "tokens": row.lost_tokens,
            "usd": usd_text(row.lost_nano_usd),
        }
        for row in missed
    ]
    body = {
        "task_id": task.task_id,
        "steps": _steps(page.rows[::-1]),
        "misses": lost,
        "complete": page.after is None,
    }
    return Reply(body)


def _steps(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Entries in the order of their attempts, by step; a step's cost is that of all its attempts."""
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for entry in entries:
        by_step.setdefault(entry["step"], []).append(entry)
    return [
        {
            "step": step,
            "cost_usd": usd_text(sum(e["amount_nano_usd"] for e in own)),
            "list_cost_usd": usd_text(sum(e["list_cost_nano_usd"] for e in own)),
            "attempts": [entry_out(e) for e in own],
        }
        for step, own in sorted(by_step.items())
    ]


async def get_tree(call: Call) -> Reply:
    """A task and all below it, each with its budgets and breakers."""
    found = await call.registry.task_tree(call.path["task_id"])
    if len(found) > TREE_MAX:
        raise Problem(422, f"It has more than {TREE_MAX} tasks below it; list them by parent_task_id.")
    desk = call.deps.tasks(call.admin.actor)
    views = {task.task_id: task_out(await desk.task_view(task.task_id)) for task in found}
    below: dict[str | None, list[TaskRow]] = {}
    for task in found[1:]:
        below.setdefault(task.parent_task_id, []).append(task)
    return Reply(_node(found[0], below, views, frozenset())[0])


def _node(
    task: TaskRow,
    below: Mapping[str | None, Sequence[TaskRow]],
    views: Mapping[str, Json],
    above: frozenset[str],
) -> tuple[dict[str, Any], int]:
    """The node and what it and all below it cost. Clients may name tasks in a circle, which ends where it began."""
    path = above | {task.task_id}
    nodes = [_node(t, below, views, path) for t in below.get(task.task_id, ()) if t.task_id not in path]
    total = task.cost_nano_usd + sum(cost for _, cost in nodes)
    return {
        **views[task.task_id],
        "total_cost_usd": usd_text(total),
        "tasks": [node for node, _ in nodes],
    }, total


async def change_task(call: Call) -> Reply:
    """Its name and its labels, which statistics group by."""
    patch = TaskPatch.model_validate(call.body)
    if call.if_match is not None:
        call.expect(await _view(call, call.path["task_id"]), _tag)

    def change(name: str, labels: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
        given = patch.model_fields_set
        return (
            patch.name if "name" in given else name,
            patch.labels if "labels" in given else labels,
        )

    reply = await call.change(
        lambda it: it.change_task(call.path["task_id"], change), lambda task_id: {"task_id": task_id}
    )
    assert not isinstance(reply.body, bytes)
    view = await _view(call, reply.body["task_id"])
    return Reply(view, etag=_tag(view), headers=reply.headers)


async def raise_task(call: Call) -> Reply:
    """Raise a budget of the task's own; if it waited for that, it goes on."""
    wanted = TaskRaise.model_validate(call.body)
    task = await call.registry.find_task(call.path["task_id"])
    filters = {"scope": f"task:{task.task_id}", "unit": wanted.unit.value}
    page = await call.registry.budgets(filters, None, 1)
    if not page.rows:
        raise invalid(f"limit_{wanted.unit}", f"this task has no budget in {wanted.unit}")

    def change(before: Budget, now_ms: int) -> Budget:
        return raised(before, wanted, now_ms)

    budget_id = page.rows[0].budget_id
    reply = await call.change(
        lambda it: it.change_budget(budget_id, change, wanted.reason), lambda _: {"task_id": task.task_id}
    )
    view = await _view(call, task.task_id)
    return Reply(view, etag=_tag(view), headers=reply.headers)


async def pause_task(call: Call) -> Reply:
    """It and all below it admit nothing until they are resumed."""
    return await _change_state(call, "pause")


async def resume_task(call: Call) -> Reply:
    """It goes on, whatever stopped it, except for a cap or a budget that is still used up; and what breakers saw of it so
    far counts no more, on any replica."""
    return await _change_state(call, "resume")


async def delete_task(call: Call) -> Reply:
    """As `stop`: the ledger keeps naming it, so it stays listed, as done."""
    return await _change_state(call, "end")


async def stop_task(call: Call) -> Reply:
    """It and all below it are done for good; what they did not use of its budgets goes back to those above."""
    return await _change_state(call, "end")


async def _change_state(call: Call, how: str) -> Reply:
    wanted = TaskStateIn.model_validate({} if call.body is None else call.body)
    task_id = (await call.registry.find_task(call.path["task_id"])).task_id
    desk = call.deps.tasks(call.admin.actor)
    act = {"pause": desk.pause, "resume": desk.resume, "end": desk.end}[how]
    changed = await act(task_id, wanted.reason)
    call.deps.on_change()
    return Reply({**task_out(await desk.task_view(task_id)), "changed": list(changed)})


async def hand_over_task(call: Call) -> Reply:
    """Pause it and all below it, and say where it stands; whoever takes it over resumes it.

    The audit trail says who handed it to whom. One that is done is told of as it is.
    """
    wanted = TaskHandover.model_validate(call.body)
    task = await call.registry.find_task(call.path["task_id"])
    desk = call.deps.tasks(call.admin.actor)
    reason = f"handed over to {wanted.to}" + (f": {wanted.reason}" if wanted.reason else "")
    changed = await desk.pause(task.task_id, reason)
    await call.registry.note(
        "task.handover", f"task:{task.task_id}", {"to": wanted.to, "reason": wanted.reason}
    )
    call.deps.on_change()
    below = (await call.registry.task_tree(task.task_id))[1 : TREE_MAX + 1]
    page = await call.registry.entries({"task_id": task.task_id}, None, LAST_MAX)
    facts = await desk.task_view(task.task_id)
    return Reply(
        {
            "to": wanted.to,
            "task": task_out(facts),
            "summary": handover.summary(facts, below, page.rows[0] if page.rows else None),
            "last": [entry_out(row) for row in page.rows],
            "below": [shown(TaskOut.of(row)) for row in below],
            "changed": list(changed),
        }
    )


async def set_outcome(call: Call) -> Reply:
    """Say how a run turned out; statistics count it."""
    said = TaskOutcomeIn.model_validate(call.body)
    task = await call.registry.find_task(call.path["task_id"])
    desk = call.deps.tasks(call.admin.actor)
    await desk.record_outcome(task.task_id, said.success, said.score, said.labels, audited=True)
    call.deps.on_change()
    view = task_out(await desk.task_view(task.task_id))
    return Reply(view, etag=_tag(view))


async def get_statistics(call: Call) -> Reply:
    """Of tasks whose outcome was said: what a success costs, how often the first try is one, how far runs differ."""
    by: tuple[str, ...] = call.params.get("group_by", ())
    label = call.params.get("label", "")
    runs = await call.registry.runs(
        by,
        label,
        call.params.get("since", 0),
        call.params.get("until", _END_OF_TIME_MS),
        call.params.get("team_id", ""),
        call.params.get("key_id", ""),
    )
    names = (*by, f"label:{label}") if label else by
    return Reply({"data": [_statistics(names, group) for group in statistics(runs)]})


def _statistics(names: Sequence[str], found: Statistics) -> Json:
    def usd(nano_usd: int | None) -> str | None:
        return None if nano_usd is None else usd_text(nano_usd)

    return shown(
        StatisticsOut(
            group=dict(zip(names, found.group, strict=True)),
            runs=found.runs,
            successes=found.successes,
            success_rate=found.successes / found.runs,
            first_passes=found.first_passes,
            first_pass_rate=found.first_passes / found.runs,
            interventions=found.interventions,
            mean_score=found.mean_score,
            cost_usd=usd_text(found.cost_nano_usd),
            cost_per_success_usd=usd(found.cost_per_success_nano_usd),
            output_tokens_per_success=found.output_tokens_per_success,
            steps_per_success=found.steps_per_success,
            cost_min_usd=usd(found.cost_min_nano_usd),
            cost_median_usd=usd(found.cost_median_nano_usd),
            cost_max_usd=usd(found.cost_max_nano_usd),
        )
    )


async def _view(call: Call, name: str) -> dict[str, Any]:
    found = await call.registry.find_task(name)
    return task_out(await call.deps.tasks(call.admin.actor).task_view(found.task_id))


def _tag(view: Json) -> str:
    """Over what was decided, not over what it does."""
    return etag_of({"task_id": view["task_id"], "name": view["name"], "labels": view["labels"]})


_TIMES = (moment("since", "last used at or after it"), moment("until", "last used before it"))
_FILTERS = (
    *(text(name) for name in ("team_id", "tenant_id", "key_id", "parent_task_id", "external_id")),
    choice("state", State),
    *_TIMES,
    choice("sort", ("last_at", "created_at", "spend", "slope", "steps"), "the most first; default: last_at"),
)
_STATISTICS: tuple[Param, ...] = (
    words("group_by", {name: name for name in _GROUPS}),
    text("label", "group by the values of this label, too"),
    text("team_id"),
    text("key_id"),
    *_TIMES,
)
ROUTES = (
    Route("GET", "/tasks", list_tasks, Right.READ, "tasks", TaskOut, params=(*_FILTERS, *PAGED), listed=True),
    Route("POST", "/tasks", create_task, Right.CHANGE_IN_TEAM, "tasks", TaskCreated, TaskIn, status=201, once=True),
    Route("GET", "/tasks/{task_id}", get_task, Right.READ, "tasks", TaskView, tagged=True),
    Route("PATCH", "/tasks/{task_id}", change_task, Right.CHANGE_IN_TEAM, "tasks", TaskView, TaskPatch, once=True, tagged=True),
    Route("DELETE", "/tasks/{task_id}", delete_task, Right.CHANGE_IN_TEAM, "tasks", TaskView),
    Route("GET", "/tasks/{task_id}/steps", get_steps, Right.READ, "tasks", StepsOut),
    Route("GET", "/tasks/{task_id}/tree", get_tree, Right.READ, "tasks", TaskNode),
    Route("POST", "/tasks/{task_id}/pause", pause_task, Right.CHANGE_IN_TEAM, "tasks", TaskView, TaskStateIn),
    Route("POST", "/tasks/{task_id}/resume", resume_task, Right.CHANGE_IN_TEAM, "tasks", TaskView, TaskStateIn),
    Route("POST", "/tasks/{task_id}/raise", raise_task, Right.CHANGE_IN_TEAM, "tasks", TaskView, TaskRaise, once=True),
    Route("POST", "/tasks/{task_id}/stop", stop_task, Right.CHANGE_IN_TEAM, "tasks", TaskView, TaskStateIn),
    Route("POST", "/tasks/{task_id}/handover", hand_over_task, Right.CHANGE_IN_TEAM, "tasks", HandoverOut, TaskHandover),
    Route("POST", "/tasks/{task_id}/outcome", set_outcome, Right.CHANGE_IN_TEAM, "tasks", TaskView, TaskOutcomeIn),
    Route("GET", "/outcomes", get_statistics, Right.READ, "tasks", params=_STATISTICS),
)  # fmt: skip
