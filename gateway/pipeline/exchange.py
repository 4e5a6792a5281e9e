"""One request on its way: what comes in, what is known so far, what goes out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from gateway.core.breakers import BreakerPolicy, Watch
from gateway.core.cache_rules import CacheRules
from gateway.core.catalog import Catalog, Deployment, Operation
from gateway.core.clients import Signal
from gateway.core.dialects import Facts
from gateway.core.entry import Attempt, Granted, Refused
from gateway.core.errors import UpstreamError
from gateway.core.health import HealthState
from gateway.core.identity import Caller, RateLimit, TaskRef
from gateway.core.kept_answers import KeptAnswers, Wish
from gateway.core.known_prompts import KnownPrompts, Prompt
from gateway.core.outputs import Outputs
from gateway.core.pools import CurrentPools
from gateway.core.prices import PriceBook
from gateway.core.replicas.group import Group, Groups
from gateway.core.retries import RetryBudget
from gateway.core.routing import Route
from gateway.core.rules import RuleSet
from gateway.core.runs import Run, Runs, Thread
from gateway.core.second_opinion import Opinions
from gateway.core.serving import Urgency
from gateway.core.shaping import AS_IT_CAME, CachingPolicy, Level, Shaped, Shaper
from gateway.core.threads import Threads
from gateway.pipeline.places import Places
from gateway.pipeline.repeats import Repeats
from gateway.pipeline.spent import Spent
from gateway.ports import (
    Bindings,
    Clock,
    Incoming,
    KeyStore,
    Learned,
    Ledger,
    Limits,
    Observer,
    PrefixIndex,
    Spawn,
    TaskOwners,
    Upstream,
)
from gateway.telemetry.steps import Steps

#: Answers larger than this are refused (an embedding batch of 2,048 x 3,072 floats is about 80 MB of JSON).
ANSWER_BYTES_MAX = 128 << 20


@dataclass(frozen=True, slots=True)
class Policy:
    """Knobs of the request flow, from settings."""

    attempts_max: int = 3
    default_output_tokens: int = 8_192
    #: Below this an output bound is never clamped to fit a budget; the request is refused instead (money.md).
    comfort_output_tokens: int = 2_048
    comfort_reasoning_output_tokens: int = 8_192
    slow_input_tokens: int = 100_000
    drain_s: float = 120.0
    expose_cost: bool = True
    #: Of keys that have no limits of their own.
    key_limit: RateLimit = field(default_factory=RateLimit)


class Drains:
    """How many abandoned answers are still being read to their end; past the limit they are stopped instead."""

    def __init__(self, most: int) -> None:
        self._free = most

    def acquire(self) -> bool:
        if self._free <= 0:
            return False
        self._free -= 1
        return True

    def release(self) -> None:
        self._free += 1


class Verified:
    """Key texts whose HMAC was right, so that it is computed once per key and not per request.

    Holds what the caller has just sent and nothing else; a changed record does not match any more.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._hmacs: dict[str, bytes] = {}
        self._capacity = capacity

    def knows(self, text: str, stored: bytes) -> bool:
        return self._hmacs.get(text) == stored

    def remember(self, text: str, stored: bytes) -> None:
        if len(self._hmacs) >= self._capacity:
            self._hmacs.clear()
        self._hmacs[text] = stored


class Told:
    """Events of which somebody was told from here; a second time the outbox would drop them, at the cost of SQL."""

    def __init__(self, capacity: int = 10_000) -> None:
        self._told: set[str] = set()
        self._capacity = capacity

    def first(self, event: str) -> bool:
        if event in self._told:
            return False
        if len(self._told) >= self._capacity:
            self._told.clear()
        self._told.add(event)
        return True


def _nobody(_kind: str, _dedupe: str, _body: Mapping[str, object]) -> None:
    """Nobody is told."""


def _unmeasured(_attempt: Attempt, _events: int, _took_s: float) -> None:
    """Nobody measures streams."""


def _uncounted(_attempt: Attempt, _refused: Refused, _nano_usd: int | None) -> None:
    """Nobody counts what is refused."""


async def _not_paused(_task_id: str, _reason: str) -> bool:
    """No task is paused here."""
    return False


def _unshared(_changes: Mapping[str, HealthState]) -> None:
    """No other replica is told."""


def _unheard(_rule: str) -> None:
    """Nobody counts."""


@dataclass(frozen=True, slots=True)
class World:
    """Everything the pipeline talks to. `catalog`, `prices` and `rules` are snapshots that a reload swaps."""

    clock: Clock
    keys: KeyStore
    ledger: Ledger
    task_owners: TaskOwners
    limits: Limits
    prefixes: PrefixIndex
    upstream: Upstream
    observer: Observer
    spawn: Spawn
    random: Callable[[], float]
    new_id: Callable[[str], str]
    catalog: Callable[[], Catalog]
    prices: Callable[[], PriceBook]
    rules: Callable[[], RuleSet | None]
    health: dict[str, HealthState]
    pepper: bytes
    policy: Policy
    drains: Drains
    verified: Verified = field(default_factory=Verified)
    watch: Watch = field(default_factory=Watch)
    breakers: BreakerPolicy = field(default_factory=BreakerPolicy)
    threads: Threads = field(default_factory=Threads)
    cache_rules: Callable[[], CacheRules] = CacheRules
    caching: Callable[[], CachingPolicy] = CachingPolicy
    shaper: Shaper = field(default_factory=Shaper)
    known_prompts: KnownPrompts = field(default_factory=KnownPrompts)
    outputs: Outputs = field(default_factory=Outputs)
    runs: Runs = field(default_factory=Runs)
    retries: RetryBudget = field(default_factory=RetryBudget)
    #: (request id, attempt id, what the client sent) -> `traceparent` for the provider; None: what the client sent
    traceparent: Callable[[str, str, str | None], str] | None = None
    bindings: Bindings | None = None  # None: no other process serves these tasks
    learned: Learned | None = None  # None: no other process serves these runs
    places: Places = field(default_factory=Places)
    #: seconds until a deployment's answers began, averaged; the newest weighs most
    latency: dict[str, float] = field(default_factory=dict)
    pools: CurrentPools = field(default_factory=CurrentPools)
    answers: KeptAnswers = field(default_factory=KeptAnswers)
    opinions: Opinions = field(default_factory=Opinions)
    #: what of `health` has just changed; never blocks
    health_changed: Callable[[Mapping[str, HealthState]], None] = _unshared
    #: rules of virtual models, by name; swapped by a reload, too
    virtual: Callable[[], Mapping[str, RuleSet]] = dict
    #: a rule could not be evaluated on a request
    rule_failed: Callable[[str], None] = _unheard
    #: (kind, key that is the same for the same event, body): somebody is to be told. Never blocks.
    alert: Callable[[str, str, Mapping[str, object]], None] = _nobody
    #: the same for what is no breaker's
    tell: Callable[[str, str, Mapping[str, object]], None] = _nobody
    told: Told = field(default_factory=Told)
    repeats: Repeats = field(default_factory=Repeats)
    spent: Spent = field(default_factory=Spent)
    #: counts a hold that was refused: attempt, refusal, nano-dollars that it was to hold (None = not known)
    refused: Callable[[Attempt, Refused, int | None], None] = _uncounted
    #: a stream has ended by itself: its events, and seconds from the first to the last
    streamed: Callable[[Attempt, int, float], None] = _unmeasured
    #: (task id, why): let a task go on that a breaker has paused; False if it is not. Raises `Unavailable`.
    go_on: Callable[[str, str], Awaitable[bool]] = _not_paused
    #: of deployments that have replicas
    replicas: Groups = field(default_factory=Groups)


@dataclass(slots=True)
class OnReplica:
    """An attempt at a deployment with replicas, from its pick to its end."""

    group: Group
    address: str
    attempt_id: str
    error: UpstreamError | None = None  # how it failed before its first byte


class Exchange:
    """One request. Each stage fills in its part; nothing is read before the stage that writes it.

    What no stage has filled in is as the class says: most requests need little of it.
    """

    incoming: Incoming
    received_ms: int
    steps: Steps

    operation: Operation
    caller: Caller
    facts: Facts
    signal: Signal
    task: TaskRef
    chain: tuple[bytes, ...] = ()
    prompt: Prompt
    cache_level: Level | None = None  # the request's own wish
    said: bytes = b""  # where the answer may hold its vendor's word on the cache
    shaped: Shaped = AS_IT_CAME  # for the deployment that is tried
    input_bound: int | None = None  # tokens, at the deployment that is tried; None = nothing bounds them
    route: Route
    # what routing remembers of it; None where there was nothing to choose
    run: Run | None = None
    thread: Thread | None = None
    wish: Wish | None = None  # to be answered again, or to have its answer kept for that

    spoken: bool = False  # somebody has said something new to the model since its last turn

    urgency: Urgency | None = None  # as `urgency_of` tells it; None until somebody asks

    landing: bool = False  # the last answer of a task whose budget is used up
    landed: bool = False  # it was refused one, for the task had it already

    # filled in as attempts end
    attempts: int = 0
    charged_nano_usd: int = 0  # by attempts that failed but may be billed
    task_step: int = 0
    task_began_ms: int = 0  # as the ledger knows it; 0 = not known
    under_hard_budget: bool = False
    granted: Granted | None = None  # to the latest attempt

    @property
    def retried(self) -> bool:
        """The client's SDK says that it has asked this before."""
        return self.incoming.headers.get("x-stainless-retry-count", "0") not in ("", "0")

    calling: Deployment | None = None  # whose answer is being waited for
    client_gone: bool = False  # the attempt under way may go on, but is the last
    replica: OnReplica | None = None  # of the attempt under way, if its deployment has replicas
    avoided: frozenset[str] = frozenset()  # addresses of replicas that have failed this request

    def __init__(self, incoming: Incoming, received_ms: int, steps: Steps) -> None:
        self.incoming, self.received_ms, self.steps = incoming, received_ms, steps
        self.operation, self.caller = incoming.operation, incoming.caller

    @property
    def client(self) -> str:
        return self.signal.client
