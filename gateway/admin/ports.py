"""What the admin API needs: stores, shaped as those of `storage` are, and callables of the app."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gateway.core.addresses import judge
from gateway.core.catalog import Catalog, Provider
from gateway.core.config_overlay import Document, Documents, Key
from gateway.core.identity import RateLimit
from gateway.core.offices import Admin, Once
from gateway.core.prices import PriceBook
from gateway.core.rules import RuleText
from gateway.core.task_facts import TaskFacts

if TYPE_CHECKING:
    from gateway.admin.store import Registry


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


class TaskDesk(Protocol):
    """Changes states of tasks, each with its audit row; `NotFound`, `Unavailable`."""

    async def task_view(self, task_id: str) -> TaskFacts: ...

    async def pause(self, task_id: str, reason: str) -> Sequence[str]:
        """It and all below it; the ids of those that changed."""
        ...

    async def resume(self, task_id: str, reason: str = "") -> Sequence[str]: ...

    async def end(self, task_id: str, reason: str = "") -> Sequence[str]: ...

    async def record_outcome(
        self,
        task_id: str,
        success: bool,
        score: float | None = None,
        labels: Mapping[str, str] | None = None,
        *,
        audited: bool = False,
    ) -> None: ...


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


class Prefix(Protocol):
    async def __call__(self, request_id: str) -> Mapping[str, Any]:
        """How one request fared with its provider's cache; `NotFound` if there is none of that id."""
        ...


class Misses(Protocol):
    async def __call__(
        self,
        *,
        by: Sequence[str],
        from_ms: int,
        to_ms: int,
        tenant_id: str,
        team_id: str,
        key_id: str,
        task_id: str,
    ) -> Sequence[MissRow]:
        """Misses over [from, to) by these keys and their cause; `InvalidRequest` for an unknown one."""
        ...


@dataclass(frozen=True, slots=True)
class Configured:
    """What the configuration says, without any secret: of credentials the names."""

    providers: Mapping[str, Provider]
    credentials: frozenset[str]
    rules: Sequence[RuleText]
    rules_mode: str
    prices: PriceBook
    #: rules of virtual models, by their names
    virtual: Mapping[str, Sequence[RuleText]] = field(default_factory=dict)
    #: "provider:NAME", "deployment:NAME", "rule:NAME" ... -> (file, line from 1 or 0), where that is known
    places: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    #: the URL of the webhook, "" if there is none
    webhook: str = ""
    catalog: Catalog = field(default_factory=lambda: Catalog.of(()))
    #: what virtual models are for requests that none of their rules matches, by their names
    otherwise: Mapping[str, str] = field(default_factory=dict)
    #: what was written over this API; `shadowed` is also in a file, (file, line), and does nothing
    documents: Sequence[Document] = ()
    shadowed: Mapping[Key, tuple[str, int]] = field(default_factory=dict)


class Finding(NamedTuple):
    """One thing that is wrong with a configuration; `line` and `column` from 1, 0 = the whole."""

    file: str
    line: int
    column: int
    key: str
    message: str
    hint: str


class Tried(NamedTuple):
    """What the configuration would be, or what is wrong with it."""

    configured: Configured | None
    problems: Sequence[Finding] = ()


class Overlay(Protocol):
    """Documents that are laid over the files."""

    @property
    def writing(self) -> asyncio.Lock:
        """Held from trying to writing: within this process nobody has to try twice."""
        ...

    @property
    def trouble(self) -> str:
        """Why what is written is not in force in this process, "" if it is."""
        ...

    async def turn(self) -> None:
        """Take over what was written anywhere; `Unavailable`."""
        ...

    async def tried(self, wanted: Documents) -> Tried: ...


class Reloaded(NamedTuple):
    """Settings that wait for a restart; or what is wrong, and then nothing has changed."""

    waiting: Sequence[str]
    problems: Sequence[Finding] = ()


class SubjectHealth(NamedTuple):
    """Of a deployment, or of a credential: "credential:<name>"."""

    subject: str
    status: str
    cause: str
    failures_in_a_row: int
    ejections: int
    back_in_s: float  # 0 = it is in use, or only a person brings it back
    share: float  # of its weight


class ReplicaState(NamedTuple):
    """Of one replica of a deployment. What it says itself is None if it does not; sums of tokens are since it joined."""

    deployment: str
    replica: str  # host and port
    name: str  # what clients see of it
    address: str
    health: str
    in_use: bool
    why: str  # it is not used, or what is odd about it
    drained: bool
    version: str
    engine: str
    waiting: int | None
    running: int | None
    kv_usage: float | None
    kv_tokens: int | None
    seen_age_s: float | None
    active: int
    backlog_tokens: int
    peer_active: int
    peer_backlog_tokens: int
    sessions: int
    prompt_tokens: int
    predicted_cached_tokens: int
    reported_cached_tokens: int
    predictions: int
    predictions_close: int
    picks: Mapping[str, int]
    index_blocks: int
    index_capacity_blocks: int
    index_bytes: int
    failures: int
    aborts: int
    refusals: int
    restarts: int
    lies: int


class GpuCost(NamedTuple):
    """What a deployment's replicas cost since this gateway began, and what it charged for calls there."""

    deployment: str
    replicas: int  # now, in use or not
    usd_per_replica_hour: int  # nano-dollars, as are the other amounts
    replica_hours: float
    cost_usd: int
    charged_usd: int
    idle_usd: int
    utilisation: float
    sold_share: float


async def _none() -> tuple[()]:
    return ()


def _no_such_replica(_deployment: str, _replica: str, _drained: bool, _who: str) -> None:
    return None


def _nobody_there(_subject: str, _action: str, _who: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class AdminDeps:
    """Everything from outside, chosen by `app.py`."""

    #: admin token -> whose it is, or None; compares in constant time; `Unavailable`
    identify: Callable[[str], Awaitable[Admin | None]]
    #: reasons why traffic should go elsewhere; empty = ready
    readiness: Callable[[], Sequence[str]]
    #: (content type, page)
    #: for an `Accept` header: content type and page
    metrics: Callable[[str], Awaitable[tuple[str, bytes]]]
    #: the store, for one request of one admin, which may be one that is to happen once
    registry: Callable[[Admin, Once | None], Registry]
    prefix: Prefix
    misses: Misses
    #: tasks, acting for an actor
    tasks: Callable[[str], TaskDesk]
    #: something was changed here
    on_change: Callable[[], None]
    pepper: bytes
    catalog: Callable[[], Catalog]
    #: what was configured, for reading
    configured: Callable[[], Configured]
    #: deployment name -> "closed" (in use), "open" (ejected), "cooling", "half_open", "probing"
    health: Callable[[], Mapping[str, str]]
    now_ms: Callable[[], int]
    monotonic: Callable[[], float]
    #: (where, exception) of what nobody foresaw
    on_fault: Callable[[str, BaseException], None]
    #: everything that has a health of its own, with what is known of it
    subjects: Callable[[], Sequence[SubjectHealth]] = tuple
    #: (subject, "reset" | "drain" | "undrain", who): False if there is no such subject
    change_health: Callable[[str, str, str], bool] = _nobody_there
    #: reads the configuration anew, for all processes of this gateway; None: there is no file
    reload: Callable[[], Reloaded | None] = lambda: None
    #: what is written over this API; None: there is no file that it could be laid over
    overlay: Overlay | None = None
    #: (YAML of rules) -> (what they amount to, what is wrong with them)
    check_rules: Callable[[str], tuple[Sequence[RuleText], Sequence[Finding]]] = lambda _: ((), ())
    #: why a webhook may not have that URL, "" if it may
    judge_url: Callable[[str], str] = lambda url: judge(url).reason
    #: replicas of all deployments that have some
    replicas: Callable[[], Awaitable[Sequence[ReplicaState]]] = _none
    #: (deployment, replica, drained or not, who): its address; None if there is no such replica
    drain_replica: Callable[[str, str, bool, str], str | None] = _no_such_replica
    #: of deployments whose price is by the replica-hour
    gpu_costs: Callable[[], Awaitable[Sequence[GpuCost]]] = _none
