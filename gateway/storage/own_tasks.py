"""Tasks as the holder of a virtual key may declare, see and change them: those of its own, and no others.

A task-scoped key reaches its task and what is below it. It may not change that task's own budgets: a limit that an
agent could raise by itself would be none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gateway.core.budget import OnExceed
from gateway.core.entry import Unit
from gateway.core.errors import Forbidden, InvalidRequest, NotFound
from gateway.core.identity import KeyRecord
from gateway.core.task import DEPTH_MAX, State, TaskDefault
from gateway.storage.accounts import Accounts, rule_of
from gateway.storage.database import Database
from gateway.storage.tasks import Tasks, TaskView, Wanted
from gateway.storage.transact import Fetch, Sql, Tx

_FIND = Sql(
    "SELECT task_id FROM task WHERE key_id = $2 AND (task_id = $1 OR external_id = $1) "
    "ORDER BY CASE WHEN task_id = $1 THEN 0 ELSE 1 END, last_at_ms DESC LIMIT 1"
)
_ABOVE = Sql("SELECT parent_task_id FROM task WHERE task_id = $1")


class OwnTasks:
    """`edge.tasks.TaskDesk`. A task is named by its id or by the id that its client gave it; one that the key does not
    reach raises `NotFound`, whether it exists or not. All raise `Unavailable` when the store is down.

    `on_change` is called after each change of a budget or a state.
    """

    def __init__(
        self,
        database: Database,
        *,
        pepper: bytes,
        task_default: TaskDefault = TaskDefault(),  # noqa: B008 - frozen
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self._pepper = pepper
        self._task_default = task_default
        self._on_change = on_change

    async def declare(
        self,
        key: KeyRecord,
        name: str,
        budgets: Sequence[tuple[Unit, int, OnExceed, tuple[int, ...]]],
        labels: Mapping[str, str],
        parent: str | None,
    ) -> tuple[TaskView, str]:
        """The new task, and the text of its key, which is shown once. `budgets`: unit, limit, what happens at it, and
        the percents that are announced. Raises `InvalidRequest` as `Tasks.create_task` does.
        """
        if parent is not None:
            parent = await self._own(key, parent, "parent")
        rules = [
            rule_of(limit, unit, "lifetime", "UTC", on_exceed, alert_percents=percents)
            for unit, limit, on_exceed, percents in budgets
        ]
        limits = {rule.unit: rule.limit for rule in rules}
        wanted = Wanted(name, limits, labels=labels, budget_rules=tuple(rules))
        declared = await self._tasks(key).create_task(key, wanted, parent)
        return await self._view(key, declared.task.task_id), declared.key_text

    async def view(self, key: KeyRecord, task_id: str) -> TaskView:
        return await self._view(key, await self._own(key, task_id))

    async def change_budget(
        self, key: KeyRecord, task_id: str, unit: Unit, limit: int, reason: str
    ) -> TaskView:
        """Raise or lower a limit, a child's out of its parent's; a task that waited for it goes on."""
        found = await self._own(key, task_id)
        if found == key.task_id:
            raise Forbidden(
                "the key of a task cannot change that task's own budgets: use the key that declared it"
            )
        view = await self._view(key, found)
        if all(b.unit is not unit for b in view.budgets):
            raise InvalidRequest(f"this task has no budget in {unit}", param="unit")
        accounts = Accounts(self._database, actor=_actor(key))
        await accounts.adjust_budget(f"task:{found}", limit, reason, unit=unit)
        self._on_change()
        return await self._view(key, found)

    async def record_outcome(
        self, key: KeyRecord, task_id: str, success: bool, score: float | None, labels: Mapping[str, str]
    ) -> TaskView:
        found = await self._own(key, task_id)
        await self._tasks(key).record_outcome(found, success, score, labels)
        return await self._view(key, found)

    async def end(self, key: KeyRecord, task_id: str, reason: str) -> TaskView:
        """It and all below it are done; what a child did not use is its parent's again. Ending twice changes nothing."""
        found = await self._own(key, task_id)
        await self._tasks(key).end(found, reason)
        self._on_change()
        return await self._view(key, found)

    async def pause(self, key: KeyRecord, task_id: str, reason: str) -> TaskView:
        """It and all below it admit nothing until somebody resumes them."""
        found = await self._own(key, task_id)
        # Paused as by a breaker: whoever may do this may undo it, which is not so for what an operator has paused.
        await self._tasks(key).pause(found, reason or "by its owner", State.PAUSED_LOOP)
        self._on_change()
        return await self._view(key, found)

    async def resume(self, key: KeyRecord, task_id: str, reason: str) -> TaskView:
        """It goes on, and what breakers saw of it counts no more. Not for the task's own key: an agent that could resume
        itself would have no breaker."""
        found = await self._own(key, task_id)
        if found == key.task_id:
            raise Forbidden("the key of a task cannot resume that task: use the key that declared it")
        if (await self._view(key, found)).task.state == State.PAUSED_ADMIN:
            raise Forbidden("an operator has paused this task, and only an operator can resume it")
        await self._tasks(key).resume(found, reason)
        self._on_change()
        return await self._view(key, found)

    def _tasks(self, key: KeyRecord) -> Tasks:
        return Tasks(
            self._database,
            actor=_actor(key),
            pepper=self._pepper,
            task_default=self._task_default,
        )

    async def _view(self, key: KeyRecord, task_id: str) -> TaskView:
        return await self._tasks(key).task_view(task_id, _owner(key))

    async def _own(self, key: KeyRecord, task_id: str, param: str | None = None) -> str:
        found = await self._database.read(partial(_reached, key, task_id))
        if found is None:
            raise NotFound(f"there is no task {task_id}", param=param)
        return found


def _reached(key: KeyRecord, task_id: str) -> Tx[str | None]:
    """The id of the task, if the key reaches it."""
    rows = yield Fetch(_FIND, (task_id, _owner(key)))
    found: str | None = rows[0][0] if rows else None
    if key.task_id is None:
        return found
    at = found
    for _ in range(DEPTH_MAX + 1):
        if at is None or at == key.task_id:
            break
        rows = yield Fetch(_ABOVE, (at,))
        at = rows[0][0] if rows else None
    return found if at == key.task_id else None


def _owner(key: KeyRecord) -> str:
    return key.declared_by or key.key_id


def _actor(key: KeyRecord) -> str:
    return f"key:{key.key_id}"
