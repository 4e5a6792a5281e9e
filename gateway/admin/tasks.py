"""Tasks, for people: what runs and what it costs, and how to stop it."""

from __future__ import annotations

from gateway.admin.call import Call, Reply
from gateway.admin.route import PAGED, Route, choice, moment, text
from gateway.admin.schemas import TaskStateIn
from gateway.admin.shown import TaskOut, shown, task_out
from gateway.core.offices import Right
from gateway.core.task import State


async def list_tasks(call: Call) -> Reply:
    """The most first, by `sort`; default: the latest."""
    return await call.page(call.registry.tasks, lambda task: shown(TaskOut.of(task)))


async def get_task(call: Call) -> Reply:
    """By its id, or by the id that its client gave it; with what breakers saw and did."""
    found = await call.registry.find_task(call.path["task_id"])
    return Reply(task_out(await call.deps.tasks(call.admin.actor).task_view(found.task_id)))


async def pause_task(call: Call) -> Reply:
    """It and all below it admit nothing until they are resumed."""
    return await _change_task(call, pause=True)


async def resume_task(call: Call) -> Reply:
    """It goes on, whatever stopped it, except for a cap or a budget that is still used up; and what breakers saw of it so
    far counts no more, on any replica."""
    return await _change_task(call, pause=False)


async def _change_task(call: Call, *, pause: bool) -> Reply:
    wanted = TaskStateIn.model_validate({} if call.body is None else call.body)
    task_id = (await call.registry.find_task(call.path["task_id"])).task_id
    desk = call.deps.tasks(call.admin.actor)
    change = desk.pause if pause else desk.resume
    changed = await change(task_id, wanted.reason)
    call.deps.on_change()
    return Reply({**task_out(await desk.task_view(task_id)), "changed": list(changed)})


_FILTERS = (
    *(text(name) for name in ("team_id", "tenant_id", "key_id", "parent_task_id", "external_id")),
    choice("state", State),
    moment("since", "last used at or after it"),
    moment("until", "last used before it"),
    choice("sort", ("last_at", "created_at", "spend", "steps"), "the most first; default: last_at"),
)
ROUTES = (
    Route("GET", "/tasks", list_tasks, Right.READ, "tasks", TaskOut, params=(*_FILTERS, *PAGED), listed=True),
    Route("GET", "/tasks/{task_id}", get_task, Right.READ, "tasks"),
    Route("POST", "/tasks/{task_id}/pause", pause_task, Right.CHANGE_IN_TEAM, "tasks", body=TaskStateIn),
    Route("POST", "/tasks/{task_id}/resume", resume_task, Right.CHANGE_IN_TEAM, "tasks", body=TaskStateIn),
)  # fmt: skip
