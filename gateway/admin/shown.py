"""What the admin API writes. Money is an exact decimal text in dollars, instants are RFC 3339 in UTC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainSerializer, create_model

from gateway.admin.ports import MissRow, TeamRow
from gateway.core.budget import Budget
from gateway.core.entry import Unit
from gateway.core.identity import KeyRecord
from gateway.core.money import usd_text
from gateway.core.offices import AdminKey, AuditEntry, Tenant
from gateway.core.task_facts import BreakerRow, TaskFacts, TaskRow


class Out(BaseModel):
    """A body that is written."""

    model_config = ConfigDict(from_attributes=True, frozen=True)


def instant(ms: int | None) -> str | None:
    """Milliseconds since 1970 as RFC 3339."""
    if ms is None:
        return None
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _maybe_usd(nano_usd: int | None) -> str | None:
    return None if nano_usd is None else usd_text(nano_usd)


#: Nano-dollars inside, text outside.
UsdOut = Annotated[int, PlainSerializer(usd_text, return_type=str)]
MaybeUsdOut = Annotated[int | None, PlainSerializer(_maybe_usd)]
InstantOut = Annotated[int | None, PlainSerializer(instant)]


def shown(out: Out) -> dict[str, Any]:
    return out.model_dump(mode="json")


class TenantOut(Out):
    tenant_id: str
    name: str
    created_at: InstantOut

    @classmethod
    def of(cls, tenant: Tenant) -> TenantOut:
        return cls(tenant_id=tenant.tenant_id, name=tenant.name, created_at=tenant.created_at_ms)


class LimitsOut(Out):
    requests_per_min: int | None
    tokens_per_min: int | None
    concurrent: int | None


class KeyOut(Out):
    """A virtual key without its secret. `revoked_at` null = in force."""

    key_id: str
    name: str
    tenant_id: str
    team_id: str
    models: list[str]
    limits: LimitsOut
    labels: dict[str, str]
    task_id: str | None
    expires_at: InstantOut
    revoked_at: InstantOut

    @classmethod
    def of(cls, key: KeyRecord) -> KeyOut:
        return cls(
            key_id=key.key_id,
            name=key.name,
            tenant_id=key.tenant_id,
            team_id=key.team_id,
            models=sorted(key.models),
            limits=LimitsOut.model_validate(key.limit),
            labels=dict(key.labels),
            task_id=key.task_id,
            expires_at=key.expires_at_ms,
            revoked_at=key.revoked_at_ms,
        )


class KeyCreated(KeyOut):
    """A new key, and, once, its text."""

    key: str


class AdminKeyOut(Out):
    """An admin key without its secret. No tenant and no team = all of them."""

    admin_key_id: str
    name: str
    role: str
    tenant_id: str | None
    team_id: str | None
    created_at: InstantOut
    expires_at: InstantOut
    revoked_at: InstantOut

    @classmethod
    def of(cls, key: AdminKey) -> AdminKeyOut:
        return cls(
            admin_key_id=key.admin_key_id,
            name=key.name,
            role=key.role.value,
            tenant_id=key.reach.tenant_id or None,
            team_id=key.reach.team_id or None,
            created_at=key.created_at_ms,
            expires_at=key.expires_at_ms,
            revoked_at=key.revoked_at_ms,
        )


class AdminKeyCreated(AdminKeyOut):
    """A new admin key, and, once, its text."""

    key: str


class AuditOut(Out):
    """Who changed what. Amounts in `body` are in the unit they are counted in: nano-dollars for money. `hash` covers the entry
    and the hash of the one before; null for those of a version without a chain.
    """

    audit_id: str
    at: InstantOut
    actor: str
    action: str
    subject: str
    body: dict[str, Any]
    hash: str | None

    @classmethod
    def of(cls, entry: AuditEntry) -> AuditOut:
        return cls(
            audit_id=entry.audit_id,
            at=entry.at_ms,
            actor=entry.actor,
            action=entry.action,
            subject=entry.subject,
            body=dict(entry.body),
            hash=entry.hash,
        )


class TeamOut(Out):
    team_id: str
    tenant_id: str
    models: list[str]
    limits: LimitsOut
    task_budget_usd: MaybeUsdOut

    @classmethod
    def of(cls, team: TeamRow) -> TeamOut:
        return cls(
            team_id=team.team_id,
            tenant_id=team.tenant_id,
            models=sorted(team.models),
            limits=LimitsOut.model_validate(team.limit),
            task_budget_usd=team.task_budget_nano_usd,
        )


_AMOUNTS = ("limit", "base_limit", "spent", "held", "left", "landing")


class _BudgetOut(Out):
    """Where a budget stands now. Amounts end in its unit: `limit_usd` as text, `limit_calls` as a number; those of other
    units are left out. `left` is negative after a breach or a lowered limit; `base_limit` is the limit without the
    override that may be in force until `override_until`.
    """

    budget_id: str
    scope: str
    unit: str
    window: str
    zone: str
    on_exceed: str
    mode: str
    would_refuse: int
    alerts: list[int]
    landing_percent: int
    override_until: InstantOut
    window_start: InstantOut
    window_end: InstantOut


_AMOUNT_FIELDS: dict[str, Any] = {
    f"{name}_{unit.value}": (str if unit is Unit.USD else int, None) for unit in Unit for name in _AMOUNTS
}
BudgetOut = create_model("BudgetOut", __base__=_BudgetOut, **_AMOUNT_FIELDS)
BudgetOut.__doc__ = _BudgetOut.__doc__


def budget_out(budget: Budget) -> dict[str, Any]:
    """As `BudgetOut`."""
    amounts = {
        "limit": budget.limit,
        "base_limit": budget.base_limit,
        "spent": budget.spent,
        "held": budget.reserved,
        "left": budget.left,
        "landing": budget.landing,
    }
    usd = budget.unit is Unit.USD
    return {
        "budget_id": budget.budget_id,
        "scope": budget.scope,
        "unit": budget.unit.value,
        "window": budget.window,
        "zone": budget.zone,
        **{f"{name}_{budget.unit}": usd_text(n) if usd else n for name, n in amounts.items()},
        "on_exceed": budget.on_exceed.value,
        "mode": budget.mode.value,
        "would_refuse": budget.would_refuse,
        "alerts": list(budget.alert_percents),
        "landing_percent": budget.landing_percent,
        "override_until": instant(budget.override_until_ms),
        "window_start": instant(budget.window_start_ms),
        "window_end": instant(budget.window_end_ms),
    }


def budget_rule_out(body: Mapping[str, Any]) -> dict[str, Any]:
    """What somebody decided of a budget, without what it counts: its entity tag is over this."""
    counted = ("limit_", "spent_", "held_", "left_", "landing_", "would_refuse", "window_")
    return {k: v for k, v in body.items() if k == "landing_percent" or not k.startswith(counted)}


class SourceOut(Out):
    """Where something is configured: a file, "$NAME" of the environment, or "admin API, version 3"; no line = the file as a
    whole.
    """

    file: str
    line: int | None


class TaskOut(Out):
    """One agent run: what it did and cost so far. `list_cost_usd` = the same tokens without any cache."""

    task_id: str
    key_id: str
    team_id: str
    tenant_id: str
    external_id: str
    source: str
    parent_task_id: str | None
    name: str
    state: str
    state_reason: str
    created_at: InstantOut
    last_at: InstantOut
    steps: int
    attempts: int
    cost_usd: UsdOut
    list_cost_usd: UsdOut
    cost_per_min_usd: UsdOut
    tokens: dict[str, int]

    @classmethod
    def of(cls, task: TaskRow) -> TaskOut:
        return cls(
            task_id=task.task_id,
            key_id=task.key_id,
            team_id=task.team_id,
            tenant_id=task.tenant_id,
            external_id=task.external_id,
            source=task.source,
            parent_task_id=task.parent_task_id,
            name=task.name,
            state=task.state,
            state_reason=task.state_reason,
            created_at=task.created_at_ms,
            last_at=task.last_at_ms,
            steps=task.steps,
            attempts=task.attempts,
            cost_usd=task.cost_nano_usd,
            list_cost_usd=task.list_cost_nano_usd,
            cost_per_min_usd=task.cost_nano_usd // ((task.last_at_ms - task.created_at_ms) // 60_000 + 1),
            tokens=dict(task.tokens),
        )


class BreakerOut(Out):
    """One episode of one breaker: what it saw, what it did, and who let the task go on."""

    breaker: str
    action: str
    tripped: bool
    message: str
    evidence: dict[str, str | int]
    at: InstantOut
    resumed_at: InstantOut | None
    resumed_by: str | None

    @classmethod
    def of(cls, event: BreakerRow) -> BreakerOut:
        return cls(
            breaker=event.breaker,
            action=event.action,
            tripped=event.tripped,
            message=event.message,
            evidence=dict(event.evidence),
            at=event.at_ms,
            resumed_at=event.resumed_at_ms,
            resumed_by=event.resumed_by,
        )


class OutcomeOut(Out):
    """How a run turned out, as whoever runs it says."""

    success: bool
    score: float | None
    labels: dict[str, str]
    at: InstantOut


class TaskView(TaskOut):
    """One task: what it did and cost, what it may still cost, and what breakers saw, the latest first. `steps_left`: how
    many more steps at the pace of the last ones its budgets pay for; null = nothing says.
    """

    labels: dict[str, str]
    budgets: list[dict[str, Any]]
    step_cost_usd: str | None
    steps_left: int | None
    outcome: OutcomeOut | None
    children: list[str]
    breakers: list[BreakerOut]


class TaskCreated(TaskView):
    """A new task, and, once, the text of its key."""

    key: str


def task_out(view: TaskFacts) -> dict[str, Any]:
    """As `TaskView`."""
    outcome = view.outcome
    said = None
    if outcome is not None:
        said = {
            "success": outcome.success,
            "score": outcome.score,
            "labels": dict(outcome.labels),
            "at": instant(outcome.at_ms),
        }
    return {
        **shown(TaskOut.of(view.task)),
        "labels": dict(view.labels),
        "budgets": [budget_out(budget) for budget in (*view.budgets, *view.above)],
        "step_cost_usd": _maybe_usd(view.step_nano_usd),
        "steps_left": view.steps_left,
        "outcome": said,
        "children": [child.task_id for child in view.children],
        "breakers": [shown(BreakerOut.of(event)) for event in view.events],
    }


def miss_out(by: Sequence[str], row: MissRow) -> dict[str, Any]:
    """Misses of one group for one cause."""
    values = [_date(value) if isinstance(value, int) else value for value in row.group]
    return {
        "group": dict(zip(by, values, strict=True)),
        "cause": row.cause,
        "attempts": row.attempts,
        "lost_tokens": row.lost_tokens,
        "lost_usd": usd_text(row.lost_nano_usd),
    }


def _date(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).date().isoformat()


#: Columns of the ledger that say where the money was held; they mean nothing outside of it.
_INTERNAL = frozenset({"budgets", "replica_id"})


def entry_out(row: Mapping[str, Any]) -> dict[str, Any]:
    """A ledger entry: `*_nano_usd` becomes `*_usd` as text, `*_at_ms` becomes `*_at`, `at_ms` becomes `at`."""
    out: dict[str, Any] = {}
    for name, value in row.items():
        if name.endswith("_nano_usd"):
            out[f"{name.removesuffix('_nano_usd')}_usd"] = usd_text(value)
        elif name == "at_ms" or name.endswith("_at_ms"):
            out[name.removesuffix("_ms")] = instant(value)
        elif name not in _INTERNAL:
            out[name] = value
    return out
