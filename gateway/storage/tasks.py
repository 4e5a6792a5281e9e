"""Declared tasks: an agent run with budgets and a key of its own, and children whose budgets are parts of its own.

A child needs a slice in every unit in which its parent has a budget, so that nothing it does goes uncounted; in other
units it may have budgets of its own. What slices mean for the parent is in core/budget.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from gateway.core import pace
from gateway.core.budget import ALERT_PERCENTS, Budget, OnExceed
from gateway.core.entry import Unit
from gateway.core.errors import InvalidRequest, NotFound
from gateway.core.identity import KeyRecord
from gateway.core.task import ADMITTING, CHILDREN_MAX, DEPTH_MAX, State, TaskDefault
from gateway.storage import audit, breaker_events, budget_changes, budget_rows, lines, task_rows
from gateway.storage.accounts import SELECT_TASKS, Task, add_key, rule_of, task_of
from gateway.storage.breaker_events import BreakerEvent
from gateway.storage.budget_changes import BudgetRule
from gateway.storage.budget_rows import fresh_id
from gateway.storage.database import Database
from gateway.storage.transact import Fetch, Sql, Tx, json_text

_NOW = Sql("SELECT now_ms()")
_TASK = Sql(f"{SELECT_TASKS} WHERE task_id = $1")
_LOCK_TASK = Sql(f"{SELECT_TASKS} WHERE task_id = $1 FOR UPDATE")
_FIND = Sql(
    f"{SELECT_TASKS} WHERE (task_id = $1 OR external_id = $1) AND ($2 = '' OR key_id = $2) "
    "ORDER BY CASE WHEN task_id = $1 THEN 0 ELSE 1 END, last_at_ms DESC LIMIT 1"
)
_CHILDREN = Sql(f"{SELECT_TASKS} WHERE parent_task_id = $1 ORDER BY created_at_ms, task_id")
_OPEN_CHILDREN = Sql(
    "SELECT count(*) FROM task WHERE parent_task_id = $1 AND source = 'declared' AND state <> 'done'"
)
_TASK_LIMIT = Sql("SELECT default_task_budget_nano_usd FROM team WHERE team_id = $1")
_ADD = Sql(
    "INSERT INTO task (task_id, key_id, team_id, tenant_id, external_id, source, parent_task_id, state, "
    "created_at_ms, last_at_ms, name, labels, breakers, depth) "
    "VALUES ($1, $2, $3, $4, '', 'declared', $5, 'running', $6, $6, $7, $8, $9, $10)"
)
_MORE = Sql(
    "SELECT labels, breakers, success, score, outcome_labels, outcome_at_ms FROM task WHERE task_id = $1"
)
_LAST_COSTS = Sql(
    "SELECT step, amount_nano_usd, charged_input_tokens, charged_output_tokens, charged_calls FROM ledger "
    "WHERE task_id = $1 ORDER BY at_ms DESC, entry_id DESC LIMIT 100"
)
_OUTCOME = Sql(
    "UPDATE task SET success = $2, score = $3, outcome_labels = $4, outcome_at_ms = now_ms() WHERE task_id = $1"
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A task to be declared. `budgets`: its limit in each unit, for its lifetime.

    `landing_percent` of None: 2 % of each limit if `on_exceed` is `summarize`, else 0. `breakers`: JSON of a policy,
    None = the defaults. `budget_rules`, if there are any, say more of each budget, and then hold alone.
    """

    name: str
    budgets: Mapping[Unit, int]
    on_exceed: OnExceed = OnExceed.ERROR
    landing_percent: int | None = None
    alert_percents: tuple[int, ...] = ALERT_PERCENTS
    labels: Mapping[str, str] | None = None
    breakers: str | None = None
    budget_rules: tuple[BudgetRule, ...] = ()

    def rules(self) -> list[BudgetRule]:
        """Raises `InvalidRequest`."""
        if self.budget_rules:
            return list(self.budget_rules)
        return [
            rule_of(
                limit,
                unit,
                "lifetime",
                "UTC",
                self.on_exceed,
                alert_percents=self.alert_percents,
                landing_percent=self.landing_percent,
            )
            for unit, limit in self.budgets.items()
        ]


@dataclass(frozen=True, slots=True)
class Declared:
    """A new task, its key, and the key's text, which is shown once."""

    task: Task
    key: KeyRecord
    key_text: str


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """How a run turned out, as whoever runs it says."""

    success: bool
    score: float | None
    labels: Mapping[str, str]
    at_ms: int


@dataclass(frozen=True, slots=True)
class TaskView:
    """Everything about one task."""

    task: Task
    labels: Mapping[str, str]
    breakers: str | None  # JSON, as it was declared
    budgets: Sequence[Budget]
    children: Sequence[Task]
    #: what the next step may be expected to use of each unit; nothing before the first
    next_step: Mapping[Unit, int]
    outcome: TaskOutcome | None
    #: what breakers saw and did, the latest first
    events: Sequence[BreakerEvent] = ()

    #: those of tasks above it that its own are no parts of: what it uses counts in them as well
    above: Sequence[Budget] = ()

    @property
    def step_nano_usd(self) -> int | None:
        return self.next_step.get(Unit.USD)

    @property
    def steps_left(self) -> int | None:
        """How many more such steps its budgets and those above it pay for; None = nothing says."""
        return pace.steps_left([*self.budgets, *self.above], self.next_step)


class Tasks:
    """Declares tasks, shows them, and changes their states. All raise `Unavailable` when the store is down.

    `actor` is for the audit trail; `task_default` is what tasks get whose declaration says nothing;
    `secret_bytes` are those of a new task's key, if they are not to be random.
    """

    def __init__(
        self,
        database: Database,
        *,
        actor: str,
        pepper: bytes,
        task_default: TaskDefault = TaskDefault(),  # noqa: B008 - frozen
        secret_bytes: bytes | None = None,
    ) -> None:
        self._secret_bytes = secret_bytes
        self._database = database
        self._actor = actor
        self._pepper = pepper
        self._task_default = task_default

    async def create_task(self, key: KeyRecord, wanted: Wanted, parent: str | None = None) -> Declared:
        """Declare a task of the key's owner; with a task-scoped key, a child of that key's task.

        Raises `NotFound` for a parent that this owner does not have; `InvalidRequest` for budgets that the parent's
        do not leave room for, for too many children, too deep nesting, or a parent that admits nothing.
        """
        return await self._database.write(self.declaring(key, wanted, parent))

    def declaring(
        self, key: KeyRecord, wanted: Wanted, parent: str | None = None
    ) -> Callable[[], Tx[Declared]]:
        """The transaction of `create_task`."""
        if key.task_id is not None and parent not in (None, key.task_id):
            raise InvalidRequest("the key of a task declares children of that task only", param="parent")
        parent = parent or key.task_id
        rules = wanted.rules()
        if parent is None:
            return partial(self._declare, key, wanted, rules)
        return partial(self._declare_child, key, wanted, rules, parent)

    async def task_view(self, task_id: str, key_id: str = "") -> TaskView:
        """By its id, or by the id that its client gave it; of that owner only, if one is given. Raises `NotFound`."""
        return await self._database.read(partial(self._view, task_id, key_id))

    async def pause(self, task_id: str, reason: str, state: State = State.PAUSED_ADMIN) -> list[str]:
        """Let a task and all below it admit nothing. Returns the ids of those that changed; raises `NotFound`."""
        if state not in (State.PAUSED_ADMIN, State.PAUSED_LOOP):
            raise InvalidRequest(f"a task is not made {state} by hand")
        return await self._database.write(partial(self._change, task_id, state, reason))

    async def resume(self, task_id: str, reason: str = "") -> list[str]:
        """Let a paused task go on, and those below it that were paused for the same cause. Raises `NotFound`."""
        return await self._database.write(partial(self._resume, task_id, reason))

    async def end(self, task_id: str, reason: str = "") -> list[str]:
        """A task and all below it are done: nothing more is admitted, and slices give back what is unused."""
        return await self._database.write(partial(self._end, task_id, reason))

    async def record_outcome(
        self,
        task_id: str,
        success: bool,
        score: float | None = None,
        labels: Mapping[str, str] | None = None,
        *,
        audited: bool = False,
    ) -> None:
        """Say how a run turned out; a later word replaces an earlier one. `audited`: with a row of the audit trail, as a
        person says it. Raises `NotFound`, `InvalidRequest`.
        """
        if score is not None and not math.isfinite(score):
            raise InvalidRequest("a score must be a finite number", param="score")
        await self._database.write(
            partial(self._outcome, task_id, success, score, dict(labels or {}), audited)
        )

    # --- transactions --------------------------------------------------------------------------------

    def _declare(self, key: KeyRecord, wanted: Wanted, rules: Sequence[BudgetRule]) -> Tx[Declared]:
        now_ms: int = (yield Fetch(_NOW))[0][0]
        task_id = fresh_id("task", now_ms)
        default = yield from self._default_rule(key.team_id)
        if default is not None and all(rule.unit is not Unit.USD for rule in rules):
            rules = [*rules, default]
        declared = yield from self._add(key, wanted, task_id, None, 0, now_ms)
        for rule in rules:
            yield from budget_changes.add(f"task:{task_id}", rule, (), now_ms)
        return declared

    def _declare_child(
        self, key: KeyRecord, wanted: Wanted, rules: Sequence[BudgetRule], parent_id: str
    ) -> Tx[Declared]:
        now_ms: int = (yield Fetch(_NOW))[0][0]
        scope = f"task:{parent_id}"
        slices = (yield from budget_rows.lock([scope], now_ms)).get(scope, [])
        rows = yield Fetch(_LOCK_TASK, (parent_id,))
        parent = task_of(rows[0]) if rows else None
        if parent is None or parent.key_id != _owner(key):
            raise NotFound(f"there is no task {parent_id}")
        yield from _refuse_child(parent)
        by_unit = {b.unit: b for b in slices}
        missing = [unit for unit in by_unit if all(rule.unit is not unit for rule in rules)]
        if missing:
            units = ", ".join(unit.value for unit in missing)
            raise InvalidRequest(f"its parent has a budget in {units}: say how much of it", param="budgets")
        task_id = fresh_id("task", now_ms)
        declared = yield from self._add(key, wanted, task_id, parent_id, parent.depth + 1, now_ms)
        for rule in rules:
            above = by_unit.get(rule.unit)
            if above is None:
                yield from budget_changes.add(f"task:{task_id}", rule, (), now_ms)
                continue
            if not rule.hard:
                raise InvalidRequest(
                    "a child's budget must be hard: it is part of its parent's", param="on_exceed"
                )
            yield from budget_changes.take(above, rule.limit)
            ancestors = (above.budget_id, *above.ancestors)
            yield from budget_changes.add(f"task:{task_id}", rule, ancestors, now_ms)
        return declared

    def _default_rule(self, team_id: str) -> Tx[BudgetRule | None]:
        rows = yield Fetch(_TASK_LIMIT, (team_id,))
        limit = rows[0][0] if rows and rows[0][0] is not None else self._task_default.nano_usd
        return None if limit is None else BudgetRule(limit, on_exceed=self._task_default.on_exceed)

    def _add(
        self, key: KeyRecord, wanted: Wanted, task_id: str, parent_id: str | None, depth: int, now_ms: int
    ) -> Tx[Declared]:
        owner = _owner(key)
        labels = json_text(dict(wanted.labels or {}))
        row = (task_id, owner, key.team_id, key.tenant_id, parent_id, now_ms, wanted.name, labels)
        yield Fetch(_ADD, (*row, wanted.breakers, depth))
        # Its money, rates and reports are the owner's, and it ends with the owner's key.
        own = KeyRecord(
            key_id="",
            secret_hmac=b"",
            tenant_id="",
            team_id=key.team_id,
            name=wanted.name,
            models=key.models,
            expires_at_ms=key.expires_at_ms,
            limit=key.limit,
            task_id=task_id,
            labels=key.labels,
            declared_by=owner,
        )
        record, text = yield from add_key(self._actor, own, self._pepper, self._secret_bytes)
        budgets = {unit.value: limit for unit, limit in wanted.budgets.items()}
        yield from audit.record(
            self._actor, "task.create", f"task:{task_id}", {"parent": parent_id, "budgets": budgets}
        )
        rows = yield Fetch(_TASK, (task_id,))
        return Declared(task_of(rows[0]), record, text)

    def _change(self, task_id: str, state: State, reason: str) -> Tx[list[str]]:
        yield from _locked(task_id)
        changed = yield from task_rows.change_all(state, task_id, reason)
        if changed:
            yield from self._tell(state, task_id, reason, changed)
        return changed

    def _resume(self, task_id: str, reason: str) -> Tx[list[str]]:
        before = yield from _locked(task_id)
        changed = yield from task_rows.change_all(State.RUNNING, task_id, "", before.state)
        # Some breakers stop a task for a while only, and without pausing it.
        stopped = yield from breaker_events.open_among([task_id, *changed])
        if changed or stopped:
            revision, now_ms = yield from audit.record(
                self._actor, "task.resume", f"task:{task_id}", {"reason": reason, "tasks": changed}
            )
            yield from breaker_events.clear([task_id, *changed], self._actor, revision, now_ms)
        return changed

    def _end(self, task_id: str, reason: str) -> Tx[list[str]]:
        yield from _locked(task_id)
        changed = yield from task_rows.change_all(State.DONE, task_id, reason)
        now_ms: int = (yield Fetch(_NOW))[0][0]
        budgets = yield from budget_rows.lock_tasks(changed, now_ms)
        ended = {f"task:{t}" for t in changed}
        yield from budget_changes.close([b for b in budgets.values() if b.scope in ended], budgets)
        if changed:
            yield from audit.record(
                self._actor, "task.end", f"task:{task_id}", {"reason": reason, "tasks": changed}
            )
        return changed

    def _tell(self, state: State, task_id: str, reason: str, changed: list[str]) -> Tx[None]:
        body = {"task_id": task_id, "state": state, "reason": reason, "tasks": changed}
        revision, now_ms = yield from audit.record(self._actor, "task.pause", f"task:{task_id}", body)
        yield from budget_rows.announce([("task_paused", f"{task_id}/{state}/{revision}", body)], now_ms)

    def _outcome(
        self, task_id: str, success: bool, score: float | None, labels: dict[str, str], audited: bool
    ) -> Tx[None]:
        yield from _known(task_id)
        if audited:
            said = {"success": success, "score": score, "labels": labels}
            yield from audit.record(self._actor, "task.outcome", f"task:{task_id}", said)
        yield Fetch(_OUTCOME, (task_id, success, score, json_text(labels)))

    def _view(self, task_id: str, key_id: str) -> Tx[TaskView]:
        rows = yield Fetch(_FIND, (task_id, key_id))
        if not rows:
            raise NotFound(f"there is no task {task_id}")
        task = task_of(rows[0])
        labels, breakers, success, score, outcome_labels, outcome_at_ms = (
            yield Fetch(_MORE, (task.task_id,))
        )[0]
        children = yield Fetch(_CHILDREN, (task.task_id,))
        costs = yield Fetch(_LAST_COSTS, (task.task_id,))
        budgets = yield from budget_rows.read(f"task:{task.task_id}")
        outcome = None
        if success is not None:
            said = msgspec.json.decode(outcome_labels, type=dict[str, str])
            outcome = TaskOutcome(bool(success), score, said, outcome_at_ms)
        return TaskView(
            task,
            msgspec.json.decode(labels, type=dict[str, str]),
            breakers,
            budgets,
            [task_of(row) for row in children],
            pace.next_step((*row,) for row in costs),
            outcome,
            (yield from breaker_events.of_task(task.task_id)),
            (yield from _above(task.task_id, budgets)),
        )


def _owner(key: KeyRecord) -> str:
    return key.declared_by or key.key_id


def _above(task_id: str, own: Sequence[Budget]) -> Tx[list[Budget]]:
    line = lines.line_of(task_id, (), (yield from lines.links([task_id])))
    found: list[Budget] = []
    for up in line.above:
        found += yield from budget_rows.read(f"task:{up}")
    mine = {b.budget_id for b in own}
    return [b for b in budget_rows.apart([*own, *found]) if b.budget_id not in mine]


def _known(task_id: str) -> Tx[Task]:
    rows = yield Fetch(_TASK, (task_id,))
    if not rows:
        raise NotFound(f"there is no task {task_id}")
    return task_of(rows[0])


def _locked(task_id: str) -> Tx[Task]:
    """The task, locked with all below it."""
    now_ms: int = (yield Fetch(_NOW))[0][0]
    yield from _known(task_id)
    yield from task_rows.lock_below(task_id, now_ms)
    return (yield from _known(task_id))


def _refuse_child(parent: Task) -> Tx[None]:
    """`parent` is locked, so that the count stays right."""
    if parent.state not in ADMITTING:
        raise InvalidRequest(
            f"task {parent.task_id} is {parent.state}, so it has no children", param="parent"
        )
    if parent.depth >= DEPTH_MAX:
        raise InvalidRequest(f"tasks nest at most {DEPTH_MAX} deep", param="parent")
    if (yield Fetch(_OPEN_CHILDREN, (parent.task_id,)))[0][0] >= CHILDREN_MAX:
        raise InvalidRequest(f"a task has at most {CHILDREN_MAX} children that are not done", param="parent")
