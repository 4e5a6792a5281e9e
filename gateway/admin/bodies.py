"""Bodies that change what is there: a field that is left out stays as it is."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from gateway.admin.schemas import (
    Amount,
    BudgetAmount,
    Id,
    In,
    Instant,
    Labels,
    Limits,
    Name,
    NanoUsd,
    Reason,
)
from gateway.core.budget import BudgetMode, OnExceed
from gateway.core.entry import Unit
from gateway.core.identity import RateLimit
from gateway.core.offices import Role


def patched(limit: RateLimit, patch: Limits) -> RateLimit:
    """The limits with those that the patch names; null takes one away."""
    wanted = {name: getattr(patch, name) for name in patch.model_fields_set}
    return RateLimit(
        wanted.get("requests_per_min", limit.requests_per_min),
        wanted.get("tokens_per_min", limit.tokens_per_min),
        wanted.get("concurrent", limit.concurrent),
    )


class Patch(In):
    """At least one field."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError(f"say what to change: one or more of {', '.join(type(self).model_fields)}")
        return self


class TenantIn(In):
    tenant_id: Id
    name: Name | None = None


class TenantPatch(Patch):
    name: Name


class TeamPatch(Patch):
    models: list[Name] = Field(default_factory=list)
    task_budget_usd: NanoUsd | None = None
    limits: Limits = Limits()


class KeyPatch(Patch):
    name: Name = ""
    models: list[Name] = Field(default_factory=list)
    expires_at: Instant | None = None
    limits: Limits = Limits()
    labels: Labels = Field(default_factory=dict)


class BudgetPatch(Patch):
    """A limit is in the budget's own unit. With `until` it holds until then; `until: null` ends such an override. A raise
    needs a `reason`; a limit below what is spent and held needs `below_spent`.
    """

    limit_usd: NanoUsd | None = None
    limit_input_tokens: Amount | None = None
    limit_output_tokens: Amount | None = None
    limit_calls: Amount | None = None
    until: Instant | None = None
    on_exceed: Annotated[OnExceed, Field(strict=False)] = OnExceed.ERROR
    mode: Annotated[BudgetMode, Field(strict=False)] = BudgetMode.ENFORCE
    alerts: list[Annotated[int, Field(ge=1, le=100)]] = Field(default_factory=list)
    landing_percent: Annotated[int, Field(ge=0, le=50)] = 0
    reason: Reason = ""
    below_spent: bool = False

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if len(self.limits) > 1:
            raise ValueError(f"give one limit, not {' and '.join(f'limit_{u}' for u in self.limits)}")
        if self.until is not None and not self.limits:
            raise ValueError("until: needs the limit that holds until then")
        return self

    @property
    def limits(self) -> dict[Unit, int]:
        found: dict[Unit, Any] = {unit: getattr(self, f"limit_{unit}") for unit in Unit}
        return {unit: limit for unit, limit in found.items() if limit is not None}


class AdminKeyIn(In):
    """No tenant and no team: it reaches everything. A team admin needs a team."""

    name: Name
    role: Annotated[Role, Field(strict=False)]
    tenant_id: Id | None = None
    team_id: Id | None = None
    expires_at: Instant | None = None

    @model_validator(mode="after")
    def _team(self) -> Self:
        if self.role is Role.TEAM_ADMIN and self.team_id is None:
            raise ValueError("team_id: a team admin needs a team")
        if self.role is Role.OWNER and (self.team_id or self.tenant_id):
            raise ValueError("role: an owner reaches everything; an operator may have a tenant")
        return self


class TaskBudget(BudgetAmount):
    """Of a task's own, for its lifetime."""

    window: Literal["lifetime"] = "lifetime"


class TaskIn(In):
    """A task of a key. A child gets its budgets out of its parent's."""

    key_id: Id
    name: Name
    budgets: Annotated[list[TaskBudget], Field(max_length=4)] = Field(default_factory=list)
    labels: Labels = Field(default_factory=dict)
    parent: Id | None = None


class TaskPatch(Patch):
    name: Name = ""
    labels: Labels = Field(default_factory=dict)


class TaskRaise(BudgetPatch):
    """A higher limit in one unit, and why; with `until`, for a time."""

    reason: Annotated[str, Field(min_length=1, max_length=1_000, pattern=r"^[^\x00-\x1f\x7f]*$")]

    @model_validator(mode="after")
    def _a_raise(self) -> Self:
        if not self.limits:
            raise ValueError("give the limit that it is to have: limit_usd, limit_input_tokens, ...")
        other = self.model_fields_set - {"reason", "until", *(f"limit_{unit}" for unit in Unit)}
        if other:
            raise ValueError(f"only a limit is raised here, not {', '.join(sorted(other))}")
        return self

    @property
    def unit(self) -> Unit:
        return next(iter(self.limits))


class TaskHandover(In):
    """Who takes it over, and why."""

    to: Name
    reason: Reason = ""


class TaskOutcomeIn(In):
    """How a run turned out, in the words of a person; a later word replaces an earlier one."""

    success: bool
    score: Annotated[float, Field(allow_inf_nan=False, ge=-1e12, le=1e12, strict=False)] | None = None
    labels: Labels = Field(default_factory=dict)
