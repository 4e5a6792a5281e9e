"""Who is asking: tenant > team > key > task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec


@dataclass(frozen=True, slots=True)
class RateLimit:
    """Over one minute; None = no limit."""

    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A virtual key as stored: never the secret, only its HMAC. Empty `models` = all models."""

    key_id: str
    secret_hmac: bytes
    tenant_id: str
    team_id: str
    name: str
    models: frozenset[str] = frozenset()
    team_models: frozenset[str] = frozenset()
    expires_at_ms: int | None = None
    revoked_at_ms: int | None = None
    limit: RateLimit = RateLimit()
    team_limit: RateLimit = RateLimit()
    #: set on a task-scoped key: every request with it belongs to this task
    task_id: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    #: of a task-scoped key: the key that declared the task, whose budgets, rates and reports are its
    declared_by: str | None = None


class Caller(msgspec.Struct, frozen=True):
    """A request's proven identity."""

    tenant_id: str
    team_id: str
    key_id: str
    key: KeyRecord

    def may_use(self, *names: str) -> bool:
        """True if any of a model's names is allowed by both the key's and the team's list."""
        return _allows(self.key.models, names) and _allows(self.key.team_models, names)


def _allows(allowed: frozenset[str], names: tuple[str, ...]) -> bool:
    return not allowed or any(n in allowed for n in names)


class TaskSource(StrEnum):
    """How a request's task was recognised, first match wins (architecture: Task identity)."""

    KEY = "key"
    PATH = "path"
    HEADER = "header"
    CLIENT = "client"
    BODY = "body"
    LINEAGE = "lineage"
    NEW = "new"


class TaskRef(msgspec.Struct, frozen=True):
    """One agent run. `task_id` is derived from (key, external id), so replicas agree without a look-up."""

    task_id: str
    source: TaskSource
    external_id: str = ""
    parent_task_id: str | None = None
