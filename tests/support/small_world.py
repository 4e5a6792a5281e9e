"""A whole gateway in one process without a database: real sockets, real pipeline, stores in memory.

For what does not depend on the store; `tests/e2e` runs the same against SQLite and Postgres.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

import aiohttp

from gateway.core.breakers import BreakerPolicy
from gateway.core.cache_rules import CacheRules
from gateway.core.catalog import Catalog, Deployment, OnDisconnect, Order, Provider, Tier, Wire
from gateway.core.entry import Amounts, Attempt, Granted, Kind, Outcome, Refused, Settled
from gateway.core.health import HealthState
from gateway.core.identity import KeyRecord, RateLimit
from gateway.core.prices import PriceBook, PriceRow, Rates
from gateway.core.replicas.group import Groups
from gateway.core.retries import RetryBudget
from gateway.core.rules import RuleSet, RuleText
from gateway.core.secrets import hmac_of, key_text, new_key
from gateway.core.shaping import CachingPolicy
from gateway.core.threads import Threads
from gateway.edge.server import Done, Edge, EdgeOptions
from gateway.pipeline.exchange import Drains, Policy, World
from gateway.pipeline.serve import Gateway
from gateway.ports import Bindings, Learned
from gateway.storage.database import SystemClock
from gateway.storage.memory import MemoryLimits, MemoryPrefixIndex
from gateway.tasks import Tasks
from gateway.upstream.http import HttpUpstream, Upstreams

PEPPER = b"pepper-of-the-tests"
KEY_ID, SECRET = new_key(b"\1" * 5, b"\2" * 32)
KEY = key_text(KEY_ID, SECRET)
RATES = Rates(3_000_000, 15_000_000, 300_000, 3_750_000, 6_000_000)


class MemoryLedger:
    """`ports.Ledger` that remembers. `refuse` answers the next holds, but for one landing if `lands`; holds and entries
    stay readable.
    """

    def __init__(self) -> None:
        self.holds: dict[str, int] = {}
        self.entries: list[tuple[Attempt, Outcome]] = []
        self.refuse: Refused | None = None
        self.lands = False
        self.warned: tuple[Refused, ...] = ()
        self.remaining_nano_usd: int | None = None
        self.remaining_calls: int | None = None
        self.grant_nano_usd: int | None = None

    async def reserve(
        self,
        attempt: Attempt,
        scopes: Sequence[str],
        ask: Amounts,
        least: Amounts,
        *,
        landing: bool = False,
    ) -> Granted | Refused:
        if self.refuse is not None:
            if not (landing and self.lands):
                return self.refuse
            self.lands = False
        amount = self.grant_nano_usd if self.grant_nano_usd is not None else ask.nano_usd or 0
        self.holds[attempt.attempt_id] = amount
        scope = scopes[-1] if self.remaining_nano_usd is not None else ""
        return Granted(
            amount,
            self.remaining_nano_usd,
            scope,
            1,
            ask.output_tokens,
            remaining_calls=self.remaining_calls,
            warned=self.warned,
        )

    @property
    def changes(self) -> int:
        return 0

    def post(self, attempt: Attempt, outcome: Outcome) -> None:
        if self.holds.pop(attempt.attempt_id, None) is not None:
            self.entries.append((attempt, outcome))

    async def settle(self, attempt: Attempt, outcome: Outcome) -> Settled:
        if self.holds.pop(attempt.attempt_id, None) is None:
            return Settled.ALREADY
        self.entries.append((attempt, outcome))
        return Settled.SETTLED

    def lines(self) -> list[tuple[int, Kind, str, str]]:
        """(attempt number, kind, finish, error) of each entry, in order of their end."""
        return [(a.attempt_no, o.kind, o.finish, o.error) for a, o in self.entries]


class MemoryKeys:
    def __init__(self, *records: KeyRecord) -> None:
        self.records = {r.key_id: r for r in records}

    async def find(self, key_id: str) -> KeyRecord | None:
        return self.records.get(key_id)


class MemoryTaskOwners:
    """`ports.TaskOwners` out of a dict: task id -> key id."""

    def __init__(self) -> None:
        self.owners: dict[str, str] = {}

    async def owner(self, task_id: str) -> str | None:
        return self.owners.get(task_id)


class Silent:
    """`ports.Observer` with nothing to do: the ledger remembers."""

    def attempt(self, attempt: Attempt, outcome: Outcome) -> None: ...


def provider(base_url: str, wire: Wire = Wire.OPENAI, name: str = "up", **more: object) -> Provider:
    return Provider(name, wire, base_url, "cred", **more)  # type: ignore[arg-type]


def deployment(at: Provider, model: str = "m", upstream_model: str = "m-2026", **more: object) -> Deployment:
    return Deployment(f"{at.name}/{model}", at, model, upstream_model, "up/m", **more)  # type: ignore[arg-type]


def key_record(**more: object) -> KeyRecord:
    return KeyRecord(KEY_ID, hmac_of(PEPPER, SECRET), "t1", "team1", "test", **more)  # type: ignore[arg-type]


@dataclass(slots=True)
class SmallWorld:
    """`async with SmallWorld(deployments) as gw:` listens on `gw.url`; `gw.http` is a client with the key."""

    deployments: Sequence[Deployment]
    record: KeyRecord = field(default_factory=key_record)
    policy: Policy = field(default_factory=Policy)
    options: EdgeOptions = field(default_factory=EdgeOptions)
    price: bool = True
    random: Callable[[], float] = lambda: 0.0
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    task_owners: MemoryTaskOwners = field(default_factory=MemoryTaskOwners)
    done: list[Done] = field(default_factory=list)
    faults: list[BaseException] = field(default_factory=list)
    not_ready: list[str] = field(default_factory=list)
    observer: Silent = field(default_factory=Silent)
    breakers: BreakerPolicy = field(default_factory=BreakerPolicy)
    threads: Threads = field(default_factory=Threads)
    caching: CachingPolicy = field(default_factory=CachingPolicy)
    cache_rules: CacheRules = field(default_factory=CacheRules)
    rules: Sequence[RuleText] = ()
    shadow: bool = False  # of the rules
    retries: RetryBudget = field(default_factory=RetryBudget)
    fallbacks: Mapping[Tier, tuple[Tier, ...]] = field(default_factory=dict)
    order: Order = Order.WEIGHT
    bindings: Bindings | None = None
    learned: Learned | None = None
    more_prices: Sequence[PriceRow] = ()
    replicas: Groups = field(default_factory=Groups)
    virtual: Mapping[str, RuleSet] = field(default_factory=dict)
    failed_rules: list[str] = field(default_factory=list)
    alerts: list[tuple[str, str, Mapping[str, object]]] = field(default_factory=list)  # kind, dedupe, body
    go_on: Callable[[str, str], Awaitable[bool]] | None = None
    url: str = ""
    http: aiohttp.ClientSession = field(init=False)
    world: World = field(init=False)
    tasks: Tasks = field(init=False)
    _edge: Edge = field(init=False)
    _upstream: HttpUpstream = field(init=False)

    async def __aenter__(self) -> SmallWorld:
        ids = itertools.count(1)
        self.tasks = Tasks(lambda _name, fault: self.faults.append(fault))
        self._upstream = HttpUpstream({"cred": "sk-upstream"})
        await self._upstream.start()
        clock = SystemClock()
        rows = [PriceRow("up/m", "up/m@1", 0, RATES)] if self.price else []
        catalog, book = (
            Catalog.of(tuple(self.deployments), Tier.STANDARD, self.fallbacks, self.order),
            PriceBook.of([*rows, *self.more_prices]),
        )
        rules = RuleSet.compile(list(self.rules), Tier.STANDARD, shadow=self.shadow)
        health: dict[str, HealthState] = {}
        self.world = World(
            clock=clock,
            keys=MemoryKeys(self.record),
            ledger=self.ledger,
            task_owners=self.task_owners,
            limits=MemoryLimits(),
            prefixes=MemoryPrefixIndex(clock.monotonic),
            upstream=Upstreams(self._upstream, None),
            observer=self.observer,
            spawn=self.tasks.spawn,
            random=self.random,
            new_id=lambda prefix: f"{prefix}_{next(ids):032x}",
            catalog=lambda: catalog,
            prices=lambda: book,
            rules=lambda: rules,
            virtual=lambda: self.virtual,
            rule_failed=self.failed_rules.append,
            retries=self.retries,
            replicas=self.replicas,
            bindings=self.bindings,
            learned=self.learned,
            health=health,
            pepper=PEPPER,
            policy=self.policy,
            drains=Drains(64),
            breakers=self.breakers,
            threads=self.threads,
            caching=lambda: self.caching,
            cache_rules=lambda: self.cache_rules,
            alert=lambda kind, dedupe, body: self.alerts.append((kind, dedupe, body)),
            tell=lambda kind, dedupe, body: self.alerts.append((kind, dedupe, body)),
        )
        if self.go_on is not None:
            self.world = replace(self.world, go_on=self.go_on)
        self._edge = Edge(
            Gateway(self.world),
            options=self.options,
            monotonic=clock.monotonic,
            new_request_id=lambda: f"req_{next(ids):032x}",
            readiness=lambda: self.not_ready,
            on_done=self.done.append,
            on_fault=lambda _id, fault: self.faults.append(fault),
        )
        await self._edge.start("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._edge.port}"
        self.http = aiohttp.ClientSession(self.url, headers={"Authorization": f"Bearer {KEY}"})
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.close()
        await self._edge.drain(5.0)
        await self.tasks.drain(5.0)
        await self._upstream.stop()

    async def settled(self) -> list[tuple[int, Kind, str, str]]:
        """The ledger's lines when everything in flight has ended."""
        await self.tasks.drain(10.0)
        return self.ledger.lines()


__all__ = [
    "KEY",
    "KEY_ID",
    "OnDisconnect",
    "RateLimit",
    "SmallWorld",
    "Wire",
    "deployment",
    "key_record",
    "provider",
]
