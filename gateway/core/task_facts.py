"""What a store tells of a task, for those who show it: its owner at `/v1/tasks`, and the admin API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from gateway.core.budget import Budget


class TaskRow(Protocol):
    """One agent run and its totals."""

    @property
    def task_id(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def state_reason(self) -> str: ...

    @property
    def key_id(self) -> str: ...

    @property
    def team_id(self) -> str: ...

    @property
    def tenant_id(self) -> str: ...

    @property
    def external_id(self) -> str: ...

    @property
    def source(self) -> str: ...

    @property
    def parent_task_id(self) -> str | None: ...

    @property
    def depth(self) -> int: ...

    @property
    def created_at_ms(self) -> int: ...

    @property
    def last_at_ms(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def attempts(self) -> int: ...

    @property
    def cost_nano_usd(self) -> int: ...

    @property
    def list_cost_nano_usd(self) -> int: ...

    @property
    def tokens(self) -> Mapping[str, int]: ...


class OutcomeRow(Protocol):
    """How a run turned out."""

    @property
    def success(self) -> bool: ...

    @property
    def score(self) -> float | None: ...

    @property
    def labels(self) -> Mapping[str, str]: ...

    @property
    def at_ms(self) -> int: ...


class BreakerRow(Protocol):
    """One episode of one breaker; `resumed_*` is of whoever let the task go on."""

    @property
    def breaker(self) -> str: ...

    @property
    def action(self) -> str: ...

    @property
    def tripped(self) -> bool: ...

    @property
    def message(self) -> str: ...

    @property
    def evidence(self) -> Mapping[str, str | int]: ...

    @property
    def at_ms(self) -> int: ...

    @property
    def resumed_at_ms(self) -> int | None: ...

    @property
    def resumed_by(self) -> str | None: ...


class TaskFacts(Protocol):
    """Everything about one task (`storage.tasks.TaskView`)."""

    @property
    def task(self) -> TaskRow: ...

    @property
    def labels(self) -> Mapping[str, str]: ...

    @property
    def budgets(self) -> Sequence[Budget]: ...

    @property
    def above(self) -> Sequence[Budget]: ...

    @property
    def children(self) -> Sequence[TaskRow]: ...

    @property
    def step_nano_usd(self) -> int | None: ...

    @property
    def steps_left(self) -> int | None: ...

    @property
    def outcome(self) -> OutcomeRow | None: ...

    @property
    def events(self) -> Sequence[BreakerRow]: ...
