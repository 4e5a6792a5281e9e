"""Facts that the ledger keeps: holds before an attempt, one terminal entry after it.

Ids: `req_`, `att_`, `ent_` + 32 hex digits of a UUIDv7, so an id carries its own time and month partition.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from gateway.core.usage import Quality, Usage


class Kind(StrEnum):
    """How an attempt's hold ended. Exactly one of the first three per attempt, then at most one `correct`."""

    POST = "post"
    VOID = "void"  # only with proof that the provider did not bill
    CHARGE_UNKNOWN = "charge_unknown"  # at the bound
    CORRECT = "correct"  # signed difference, on later proof


class Attempt(msgspec.Struct, frozen=True):
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


class Outcome(msgspec.Struct, frozen=True):
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

    def __post_init__(self) -> None:
        if self.kind is Kind.VOID and self.cost_nano_usd:
            raise ValueError("a voided attempt costs nothing")


@dataclass(frozen=True, slots=True)
class Scope:
    """Where money is held: "tenant:<id>", "team:<id>", "key:<id>", "task:<id>"."""

    id: str


class Granted(msgspec.Struct, frozen=True):
    """The hold is committed; `amount_nano_usd` was reserved in every budget of the attempt's scopes."""

    amount_nano_usd: int
    #: the tightest budget after this hold: (scope, remaining), or None if no budget applies
    remaining_nano_usd: int | None = None
    remaining_scope: str = ""
    task_step: int = 0  # number of this task's requests, this one included


class Refused(msgspec.Struct, frozen=True):
    """The hold does not fit this budget; nothing was reserved anywhere."""

    scope: str
    limit_nano_usd: int
    spent_nano_usd: int
    held_nano_usd: int
    resets_at_ms: int | None

    @property
    def remaining_nano_usd(self) -> int:
        return max(0, self.limit_nano_usd - self.spent_nano_usd - self.held_nano_usd)


class Settled(StrEnum):
    SETTLED = "settled"
    ALREADY = "already_terminal"  # same amount: nothing to do
    CORRECTED = "corrected"  # another amount: became the one `correct` entry
