"""Bodies that the admin API reads. Money is an exact decimal text in dollars, instants are RFC 3339."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from gateway.core.budget import ALERT_PERCENTS, AMOUNT_MAX, BudgetMode, OnExceed
from gateway.core.entry import Unit
from gateway.core.identity import RateLimit
from gateway.core.money import MAX_NANO_USD, PICO_PER_NANO, pico_from_usd_text
from gateway.core.windows import parse_window


class In(BaseModel):
    """A body that is read: unknown fields are mistakes, and texts are not turned into numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


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


NanoUsd = Annotated[
    int,
    BeforeValidator(_nano_usd),
    WithJsonSchema({"type": "string", "pattern": r"^\d{1,9}(\.\d{1,9})?$", "examples": ["12.50"]}),
]
Instant = Annotated[int, BeforeValidator(_ms), WithJsonSchema({"type": "string", "format": "date-time"})]
Window = Annotated[str, AfterValidator(_window)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Id = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._:@/-]+$")]
Scope = Annotated[str, StringConstraints(pattern=r"^(tenant|team|key|task):[A-Za-z0-9._:@/-]{1,200}$")]
PerMin = Annotated[int, Field(ge=1, le=10**12)]
LabelName = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
LabelText = Annotated[str, StringConstraints(max_length=256, pattern=r"^[^\x00-\x1f\x7f]*$")]
Labels = Annotated[dict[LabelName, LabelText], Field(max_length=32)]
Reason = Annotated[str, StringConstraints(max_length=1_000, pattern=r"^[^\x00-\x1f\x7f]*$")]


# --- what is read ---------------------------------------------------------------------------------------------


class Limits(In):
    """Over one minute, and at once; left out = no limit."""

    requests_per_min: PerMin | None = None
    tokens_per_min: PerMin | None = None
    concurrent: PerMin | None = None

    def rate_limit(self) -> RateLimit:
        return RateLimit(self.requests_per_min, self.tokens_per_min, self.concurrent)


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

    def rule(self, zone: str = "UTC") -> dict[str, Any]:
        """What the store takes by name."""
        return {
            "limit": self.limit,
            "window": self.window,
            "zone": zone,
            "on_exceed": self.on_exceed,
            "unit": self.unit,
            "mode": self.mode,
            "alert_percents": tuple(self.alerts),
            "landing_percent": self.landing_percent,
        }


class TeamIn(In):
    name: Id
    tenant: Id = "default"
    models: list[Name] = []
    task_budget_usd: NanoUsd | None = None
    limits: Limits = Limits()
    budget: BudgetAmount | None = None


class KeyIn(In):
    name: Name
    team: Id = "default"
    models: list[Name] = []
    expires_at: Instant | None = None
    limits: Limits = Limits()
    labels: Labels = {}
    budget: BudgetAmount | None = None


class KeysIn(In):
    keys: Annotated[list[KeyIn], Field(min_length=1, max_length=200)]


class BudgetIn(BudgetAmount):
    """A raise of one that is there needs a `reason`; a limit below what is spent and held needs `below_spent`."""

    scope: Scope
    zone: Name = "UTC"
    reason: Reason = ""
    below_spent: bool = False


class TaskStateIn(In):
    """Why a task is paused or goes on, for the audit trail."""

    reason: Annotated[str, StringConstraints(max_length=1_000, pattern=r"^[^\x00-\x1f\x7f]*$")] = ""
