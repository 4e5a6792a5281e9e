"""What the admin API needs: stores, shaped as `storage.accounts` and `storage.reports` are, and callables of the app."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.core.budget import Budget, BudgetMode, OnExceed
from gateway.core.catalog import Catalog
from gateway.core.entry import Unit
from gateway.core.identity import KeyRecord, RateLimit


class TeamRow(Protocol):
    @property
    def team_id(self) -> str: ...

    @property
    def tenant_id(self) -> str: ...

    @property
    def models(self) -> frozenset[str]: ...

    @property
    def limit(self) -> RateLimit: ...

    @property
    def task_budget_nano_usd(self) -> int | None: ...


class TaskRow(Protocol):
    """One agent run and its totals."""

    @property
    def task_id(self) -> str: ...

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
    def state(self) -> str: ...

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
    """Everything about one task (`storage.tasks.TaskView`), as far as it is shown here."""

    @property
    def task(self) -> TaskDetail: ...

    @property
    def events(self) -> Sequence[BreakerRow]: ...


class TaskDetail(TaskRow, Protocol):
    @property
    def state_reason(self) -> str: ...


class TaskDesk(Protocol):
    """Changes states of tasks, each with its audit row; `NotFound`, `Unavailable`."""

    async def task_view(self, task_id: str) -> TaskFacts: ...

    async def pause(self, task_id: str, reason: str) -> Sequence[str]:
        """It and all below it; the ids of those that changed."""
        ...

    async def resume(self, task_id: str, reason: str = "") -> Sequence[str]: ...


class UsageRow(Protocol):
    """One group of a report: its values in the order asked for ("day" in milliseconds), and its sums."""

    @property
    def group(self) -> tuple[str | int, ...]: ...

    @property
    def attempts(self) -> int: ...

    @property
    def errors(self) -> int: ...

    @property
    def retries(self) -> int: ...

    @property
    def retries_cost_nano_usd(self) -> int: ...

    @property
    def cost_nano_usd(self) -> int: ...

    @property
    def list_cost_nano_usd(self) -> int: ...

    @property
    def tokens(self) -> Mapping[str, int]: ...


class MissRow(Protocol):
    """Attempts of a group that read less from a cache than they could have, for one cause."""

    @property
    def group(self) -> tuple[str | int, ...]: ...

    @property
    def cause(self) -> str: ...

    @property
    def attempts(self) -> int: ...

    @property
    def lost_tokens(self) -> int: ...

    @property
    def lost_nano_usd(self) -> int: ...


class Accounts(Protocol):
    """Keys, teams, budgets, tasks. Changes write their audit row; `NotFound`, `InvalidRequest`, `Unavailable`."""

    async def list_teams(self) -> Sequence[TeamRow]: ...

    async def put_team(self, team: Any) -> TeamRow: ...

    async def list_keys(self) -> Sequence[KeyRecord]: ...

    async def create_key(
        self,
        *,
        pepper: bytes,
        name: str,
        team_id: str,
        models: Iterable[str],
        limit: RateLimit,
        expires_at_ms: int | None,
    ) -> tuple[KeyRecord, str]: ...

    async def revoke_key(self, key_id: str) -> KeyRecord: ...

    async def list_budgets(self) -> Sequence[Budget]: ...

    async def set_budget(
        self,
        scope: str,
        limit: int,
        window: str,
        on_exceed: OnExceed,
        zone: str,
        *,
        unit: Unit,
        mode: BudgetMode,
        alert_percents: tuple[int, ...],
        landing_percent: int | None,
    ) -> Budget: ...

    async def list_tasks(
        self, *, key_id: str, team_id: str, before_ms: int | None, limit: int
    ) -> Sequence[TaskRow]: ...

    async def get_task(self, task_id: str) -> TaskRow: ...


class Usage(Protocol):
    async def __call__(
        self, *, by: Sequence[str], from_ms: int, to_ms: int, team_id: str, key_id: str
    ) -> Sequence[UsageRow]:
        """Sums over [from, to) grouped by these keys; `InvalidRequest` for an unknown one."""
        ...


class Entries(Protocol):
    async def __call__(self, *, request_id: str) -> Sequence[Mapping[str, Any]]:
        """The ledger entries of a request in the order of its attempts; empty if there are none."""
        ...


class Prefix(Protocol):
    async def __call__(self, request_id: str) -> Mapping[str, Any]:
        """How one request fared with its provider's cache; `NotFound` if there is none of that id."""
        ...


class Misses(Protocol):
    async def __call__(
        self, *, by: Sequence[str], from_ms: int, to_ms: int, team_id: str, key_id: str, task_id: str
    ) -> Sequence[MissRow]:
        """Misses over [from, to) by these keys and their cause; `InvalidRequest` for an unknown one."""
        ...


@dataclass(frozen=True, slots=True)
class AdminDeps:
    """Everything from outside, chosen by `app.py`."""

    #: admin token -> the actor's name for the audit trail, or None; compares in constant time
    verify: Callable[[str], str | None]
    #: reasons why traffic should go elsewhere; empty = ready
    readiness: Callable[[], Sequence[str]]
    #: (content type, page)
    metrics: Callable[[], tuple[str, bytes]]
    #: the store, acting for an actor
    accounts: Callable[[str], Accounts]
    #: makes what `Accounts.put_team` takes: team_id, models, limit, task_budget_nano_usd by name
    team: Callable[..., Any]
    usage: Usage
    entries: Entries
    prefix: Prefix
    misses: Misses
    #: tasks, acting for an actor
    tasks: Callable[[str], TaskDesk]
    #: a task's state was changed here
    on_change: Callable[[], None]
    pepper: bytes
    catalog: Callable[[], Catalog]
    #: deployment name -> "closed" (in use), "open" (ejected), "cooling", "half_open", "probing"
    health: Callable[[], Mapping[str, str]]
    monotonic: Callable[[], float]
    #: (where, exception) of what nobody foresaw
    on_fault: Callable[[str, BaseException], None]
