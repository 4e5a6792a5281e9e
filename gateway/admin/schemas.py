"""Bodies of the admin API. Money is an exact decimal text in dollars, instants are RFC 3339 in UTC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StringConstraints,
    model_validator,
)

from gateway.admin.ports import BreakerRow, MissRow, TaskFacts, TaskRow, TeamRow, UsageRow
from gateway.core.budget import ALERT_PERCENTS, AMOUNT_MAX, Budget, BudgetMode, OnExceed
from gateway.core.catalog import Deployment, Operation
from gateway.core.entry import Unit
from gateway.core.identity import KeyRecord, RateLimit
from gateway.core.money import MAX_NANO_USD, PICO_PER_NANO, pico_from_usd_text, usd_text
from gateway.core.windows import parse_window


class In(BaseModel):
    """A body that is read: unknown fields are mistakes, and texts are not turned into numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Out(BaseModel):
    """A body that is written."""

    model_config = ConfigDict(from_attributes=True, frozen=True)


# --- kinds of values ------------------------------------------------------------------------------------------


def _nano_usd(value: Any) -> int:
    """ "12.50" (or the integer 12) as nano-dollars; a float has already lost what it stood for."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError('must be dollars as a text, such as "12.50"')
    pico = pico_from_usd_text(str(value))
    nano, rest = divmod(pico, PICO_PER_NANO)
    if rest:
        raise ValueError("is finer than a nano-dollar (9 decimals)")
    if nano > MAX_NANO_USD:
        raise ValueError("is more than can be kept")
    return nano


def _window(text: str) -> str:
    parse_window(text, "UTC")
    return text


def _ms(value: Any) -> int:
    if not isinstance(value, str):
        raise ValueError('must be an instant such as "2026-12-31T00:00:00Z"')
    try:
        when = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError('must be an instant such as "2026-12-31T00:00:00Z"') from None
    if when.tzinfo is None:
        raise ValueError('needs a time zone, such as the Z in "2026-12-31T00:00:00Z"')
    return int(when.timestamp() * 1000)


def instant(ms: int | None) -> str | None:
    """Milliseconds since 1970 as RFC 3339."""
    if ms is None:
        return None
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


NanoUsd = Annotated[int, BeforeValidator(_nano_usd)]
#: Nano-dollars inside, text outside.
UsdOut = Annotated[int, PlainSerializer(usd_text, return_type=str)]
MaybeUsdOut = Annotated[int | None, PlainSerializer(lambda v: None if v is None else usd_text(v))]
Instant = Annotated[int, BeforeValidator(_ms)]
InstantOut = Annotated[int | None, PlainSerializer(instant)]
Window = Annotated[str, AfterValidator(_window)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Id = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._:@/-]+$")]
Scope = Annotated[str, StringConstraints(pattern=r"^(tenant|team|key|task):[A-Za-z0-9._:@/-]{1,200}$")]
PerMin = Annotated[int, Field(ge=1, le=10**12)]


# --- what is read ---------------------------------------------------------------------------------------------


class Limits(In):
    """Over one minute, and at once; left out = no limit."""

    requests_per_min: PerMin | None = None
    tokens_per_min: PerMin | None = None
    concurrent: PerMin | None = None

    def rate_limit(self) -> RateLimit:
        return RateLimit(self.requests_per_min, self.tokens_per_min, self.concurrent)


class TeamIn(In):
    name: Id
    models: list[Name] = []
    task_budget_usd: NanoUsd | None = None
    limits: Limits = Limits()


Amount = Annotated[int, Field(ge=0, le=AMOUNT_MAX)]


class BudgetAmount(In):
    """Exactly one limit, whose name says its unit."""

    limit_usd: NanoUsd | None = None
    limit_input_tokens: Amount | None = None
    limit_output_tokens: Amount | None = None
    limit_calls: Amount | None = None
    window: Window = "month"
    on_exceed: Annotated[OnExceed, Field(strict=False)] = OnExceed.ERROR
    mode: Annotated[BudgetMode, Field(strict=False)] = BudgetMode.ENFORCE
    alerts: list[Annotated[int, Field(ge=1, le=100)]] = list(ALERT_PERCENTS)
    landing_percent: Annotated[int, Field(ge=0, le=50)] | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        given = [f"limit_{unit}" for unit in Unit if getattr(self, f"limit_{unit}") is not None]
        if len(given) != 1:
            names = ", ".join(f"limit_{unit}" for unit in Unit)
            raise ValueError(
                f"give exactly one of {names}" + (f", not {' and '.join(given)}" if given else "")
            )
        return self

    @property
    def unit(self) -> Unit:
        return next(unit for unit in Unit if getattr(self, f"limit_{unit}") is not None)

    @property
    def limit(self) -> int:
        limit: int = getattr(self, f"limit_{self.unit}")
        return limit

    def more(self) -> dict[str, Any]:
        """What `Accounts.set_budget` takes by name."""
        return {
            "unit": self.unit,
            "mode": self.mode,
            "alert_percents": tuple(self.alerts),
            "landing_percent": self.landing_percent,
        }


class KeyIn(In):
    name: Name
    team: Id = "default"
    models: list[Name] = []
    expires_at: Instant | None = None
    limits: Limits = Limits()
    budget: BudgetAmount | None = None


class BudgetIn(BudgetAmount):
    scope: Scope
    zone: Name = "UTC"


# --- what is written ------------------------------------------------------------------------------------------


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
            expires_at=key.expires_at_ms,
            revoked_at=key.revoked_at_ms,
        )


class KeyCreated(Out):
    """What comes with a new key, once: the key itself."""

    key: str


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


def budget_out(budget: Budget) -> dict[str, Any]:
    """Where a budget stands now. Amounts end in its unit: `limit_usd` as text, `limit_calls` as a number; `left` is
    negative after a breach or a lowered limit.
    """
    amounts = {
        "limit": budget.limit,
        "spent": budget.spent,
        "held": budget.reserved,
        "left": budget.left,
        "landing": budget.landing,
    }
    usd = budget.unit is Unit.USD
    return {
        "scope": budget.scope,
        "unit": budget.unit.value,
        "window": budget.window,
        "zone": budget.zone,
        **{f"{name}_{budget.unit}": usd_text(n) if usd else n for name, n in amounts.items()},
        "on_exceed": budget.on_exceed.value,
        "mode": budget.mode.value,
        "would_refuse": budget.would_refuse,
        "alerts": list(budget.alert_percents),
        "override_until": instant(budget.override_until_ms),
        "window_start": instant(budget.window_start_ms),
        "window_end": instant(budget.window_end_ms),
    }


class DeploymentOut(Out):
    """A deployment and its health: `closed` = in use."""

    name: str
    model: str
    upstream_model: str
    aliases: list[str]
    provider: str
    tier: str
    price: str
    operations: list[str]
    context_tokens: int | None
    max_output_tokens: int | None
    health: str

    @classmethod
    def of(cls, d: Deployment, health: str) -> DeploymentOut:
        return cls(
            name=d.name,
            model=d.model,
            upstream_model=d.upstream_model,
            aliases=list(d.aliases),
            provider=d.provider.name,
            tier=d.tier.value,
            price=d.price,
            operations=sorted(op.value for op in Operation if d.serves(op)),
            context_tokens=d.context_tokens,
            max_output_tokens=d.max_output_tokens,
            health=health,
        )


class TaskOut(Out):
    """One agent run: what it did and cost so far. `list_cost_usd` = the same tokens without any cache."""

    task_id: str
    key_id: str
    team_id: str
    tenant_id: str
    external_id: str
    source: str
    parent_task_id: str | None
    state: str
    created_at: InstantOut
    last_at: InstantOut
    steps: int
    attempts: int
    cost_usd: UsdOut
    list_cost_usd: UsdOut
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
            state=task.state,
            created_at=task.created_at_ms,
            last_at=task.last_at_ms,
            steps=task.steps,
            attempts=task.attempts,
            cost_usd=task.cost_nano_usd,
            list_cost_usd=task.list_cost_nano_usd,
            tokens=dict(task.tokens),
        )


class TaskStateIn(In):
    """Why a task is paused or goes on, for the audit trail."""

    reason: Annotated[str, StringConstraints(max_length=1_000, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""


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


def task_out(view: TaskFacts) -> dict[str, Any]:
    """One task, and what breakers saw and did, the latest first."""
    return {
        **TaskOut.of(view.task).model_dump(mode="json"),
        "state_reason": view.task.state_reason,
        "breakers": [BreakerOut.of(event).model_dump(mode="json") for event in view.events],
    }


class UsageOut(Out):
    """One group of a report. `group` has the keys that were asked for; a day is its date."""

    group: dict[str, str]
    attempts: int
    errors: int
    retries: int
    retries_cost_usd: UsdOut
    cost_usd: UsdOut
    list_cost_usd: UsdOut
    tokens: dict[str, int]

    @classmethod
    def of(cls, by: Sequence[str], row: UsageRow) -> UsageOut:
        group = {
            name: _date(value) if isinstance(value, int) else value
            for name, value in zip(by, row.group, strict=True)
        }
        return cls(
            group=group,
            attempts=row.attempts,
            errors=row.errors,
            retries=row.retries,
            retries_cost_usd=row.retries_cost_nano_usd,
            cost_usd=row.cost_nano_usd,
            list_cost_usd=row.list_cost_nano_usd,
            tokens=dict(row.tokens),
        )


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
