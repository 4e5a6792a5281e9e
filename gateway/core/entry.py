"""Facts that the ledger keeps: holds before an attempt, one terminal entry after it.

Ids: `req_`, `att_`, `ent_` + 32 hex digits of a UUIDv7, so an id carries its own time and month partition.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from gateway.core.explanation import Explanation
from gateway.core.usage import Quality, Usage

#: Begins the part of an entry's note that says why its request went where it went; always the last part.
ROUTE_NOTE = "route: "


class Unit(StrEnum):
    """What a budget counts. Amounts in `usd` are nano-dollars, all others are whole numbers of what they say."""

    USD = "usd"
    INPUT_TOKENS = "input_tokens"  # of every class: uncached, read from and written to a cache
    OUTPUT_TOKENS = "output_tokens"
    CALLS = "calls"  # attempts, unless the provider provably did nothing for them


class OnExceed(StrEnum):
    """What a caller gets when a budget is used up (money: What agents feel). `warn` never refuses."""

    ERROR = "error"
    SUMMARIZE = "summarize"
    SOFT_STOP = "soft_stop"
    WARN = "warn"


class Amounts(msgspec.Struct, frozen=True, gc=False):
    """How much of each unit an attempt may use. None = it cannot be bounded: no hard budget in that unit takes it."""

    nano_usd: int | None
    input_tokens: int | None
    output_tokens: int | None
    calls: int = 1

    def of(self, unit: Unit) -> int | None:
        if unit is Unit.USD:
            return self.nano_usd
        if unit is Unit.INPUT_TOKENS:
            return self.input_tokens
        return self.output_tokens if unit is Unit.OUTPUT_TOKENS else self.calls


class Kind(StrEnum):
    """How an attempt's hold ended. Exactly one of the first three per attempt, then at most one `correct`."""

    POST = "post"
    VOID = "void"  # only with proof that the provider did not bill
    CHARGE_UNKNOWN = "charge_unknown"  # at the bound
    CORRECT = "correct"  # signed difference, on later proof


class Attempt(msgspec.Struct, frozen=True, gc=False):
    """One try on one deployment: everything known before it is sent."""

    attempt_id: str
    request_id: str
    tenant_id: str
    team_id: str
    key_id: str
    task_id: str
    parent_task_id: str | None
    attempt_no: int  # 1 for the first try of a request
    operation: str
    client: str
    model_requested: str
    model: str  # the deployment's public model
    upstream_model: str
    provider: str
    deployment: str
    tier: str
    rule: str
    stream: bool
    started_at_ms: int
    #: how the task was recognised (TaskSource) and what its client calls it; kept on the task's row
    task_source: str = ""
    task_external_id: str = ""


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """How an attempt ended: everything known after it."""

    kind: Kind
    usage: Usage
    quality: Quality
    cost_nano_usd: int
    list_cost_nano_usd: int  # the same tokens with every input token at the uncached price
    price_version: str  # "" when no price was known
    finish: str  # provider's finish reason, or client_gone | upstream_cut | error
    status: int  # upstream HTTP status; 0 if there was none
    error: str  # GatewayError.kind, "" if none
    latency_ms: int
    first_token_ms: int | None
    upstream_request_id: str
    service_tier: str = ""
    note: str = ""  # what is estimated and why, one line
    #: a replica, by the name that clients see; None where the deployment is one server
    served_by: str | None = None
    miss: Explanation | None = None  # why less was read from the cache than could have been

    def __post_init__(self) -> None:
        if self.kind is Kind.VOID and self.cost_nano_usd:
            raise ValueError("a voided attempt costs nothing")


@dataclass(frozen=True, slots=True)
class Scope:
    """Where money is held: "tenant:<id>", "team:<id>", "key:<id>", "task:<id>"."""

    id: str


class Refused(msgspec.Struct, frozen=True, gc=False):
    """The hold does not fit this budget; nothing was reserved anywhere. All amounts are in `unit`.

    `state` is not "" if the task itself admits nothing (`core.task.State`); without a budget that refuses as well,
    the amounts are 0.
    """

    scope: str
    limit: int
    spent: int
    held: int
    resets_at_ms: int | None
    unit: Unit = Unit.USD
    on_exceed: OnExceed = OnExceed.ERROR
    kept_back: int = 0  # the part of the limit that only a landing may use
    state: str = ""
    #: nothing resets at `resets_at_ms`: it is when the oldest that may count leaves the window
    rolling: bool = False

    @property
    def remaining(self) -> int:
        return max(0, self.limit - self.kept_back - self.spent - self.held)


class Granted(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The hold is committed: `amount_nano_usd` was reserved in every dollar budget of the attempt's scopes, and
    `output_tokens` (None = unbounded) in every budget of those; input and calls as they were asked for.
    """

    amount_nano_usd: int
    #: the tightest hard dollar budget after this hold: (scope, remaining), or None if none applies
    remaining_nano_usd: int | None = None
    remaining_scope: str = ""
    task_step: int = 0  # number of this task's requests, this one included
    output_tokens: int | None = None
    #: of the tightest hard budget in each other unit; None if none applies
    remaining_input_tokens: int | None = None
    remaining_output_tokens: int | None = None
    remaining_calls: int | None = None
    #: what budgets with `on_exceed: warn` would have refused
    warned: tuple[Refused, ...] = ()
    #: (scope, percent that is spent or held) of budgets that are half used up or more
    used: tuple[tuple[str, int], ...] = ()
    #: when the task's first request was admitted, or it was declared; 0 = not known
    task_began_ms: int = 0

    @property
    def under_hard_budget(self) -> bool:
        """A hard budget applies to this attempt, in whatever unit."""
        return (
            self.remaining_nano_usd is not None
            or self.remaining_input_tokens is not None
            or self.remaining_output_tokens is not None
            or self.remaining_calls is not None
        )


class Settled(StrEnum):
    SETTLED = "settled"
    ALREADY = "already_terminal"  # same amount: nothing to do
    CORRECTED = "corrected"  # another amount: became the one `correct` entry
