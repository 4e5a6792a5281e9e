"""What a store tells of usage and costs, for those who show it, and how it is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: What can be grouped and filtered by.
GROUPS = (
    "tenant_id",
    "team_id",
    "key_id",
    "model",
    "provider",
    "deployment",
    "tier",
    "client",
    "task_id",
)
#: What tasks know of themselves.
TASK_GROUPS = ("tenant_id", "team_id", "key_id", "task_id")
TEAM_GROUPS = ("tenant_id", "team_id")


@dataclass(frozen=True, slots=True)
class Question:
    """`by` and the names in `filters` are of GROUPS; `label` names a label of keys, whose value is grouped by as well.
    `edges` are the starts of the buckets and the end of the last.
    """

    by: Sequence[str]
    edges: Sequence[int]
    filters: Mapping[str, str] = field(default_factory=dict)
    label: str = ""
    misses: bool = False
    refusals: bool = False

    @property
    def source(self) -> str:
        """Where it is answered from. ValueError for what is not summed up."""
        names = {*self.by, *self.filters}
        if not names <= {*GROUPS}:
            raise ValueError(f"not summed up: {', '.join(sorted(names - {*GROUPS}))}")
        if "task_id" in self.filters:
            return "ledger"
        if "task_id" in names:
            if not names <= {*TASK_GROUPS}:
                raise ValueError(f"tasks have no {', '.join(sorted(names - {*TASK_GROUPS}))}")
            return "task"
        return "team_hour" if names <= {*TEAM_GROUPS} and not self.label else "usage_hour"


@dataclass(frozen=True, slots=True)
class Missed:
    """Attempts that read less from a cache than they could have, for one cause."""

    cause: str
    attempts: int
    lost_tokens: int
    lost_nano_usd: int


@dataclass(frozen=True, slots=True)
class RefusedSum:
    """Holds that budgets of one kind of scope refused; `unbounded` of them were of no known amount."""

    scope_kind: str
    refusals: int
    unbounded: int
    nano_usd: int


@dataclass(frozen=True, slots=True)
class UsageBucket:
    """The sums of one group in the bucket that begins at `start_ms`. `tokens` are by class: `input_uncached`,
    `cache_read`, `cache_write_5m`, `cache_write_1h`, `cache_write_12h`, `output`, `reasoning`."""

    start_ms: int
    group: Mapping[str, str]
    attempts: int
    errors: int
    retries: int
    retries_cost_nano_usd: int
    failed_cost_nano_usd: int
    cost_nano_usd: int
    list_cost_nano_usd: int
    tokens: Mapping[str, int]
    misses: Sequence[Missed] = ()
    refused: Sequence[RefusedSum] = ()

    @property
    def place(self) -> tuple[Any, ...]:
        """What it is ordered by."""
        return (self.start_ms, *self.group.values())
