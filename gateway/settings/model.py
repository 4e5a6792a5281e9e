"""What the gateway is told to be: frozen values, complete and already checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from gateway.core.breakers import BreakerPolicy
from gateway.core.budget import ALERT_PERCENTS, BudgetMode, OnExceed
from gateway.core.cache_rules import CacheRules
from gateway.core.catalog import Catalog, Provider, Wire
from gateway.core.config_overlay import Documents, Key
from gateway.core.entry import Unit
from gateway.core.identity import RateLimit
from gateway.core.prices import PriceBook
from gateway.core.rules import RuleSet, RuleText
from gateway.core.shaping import CachingPolicy
from gateway.core.task import TaskDefault


class Secret:
    """A secret that shows itself only when asked by name: `reveal()`."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with the configuration. `line` counts from 1; 0 = the file as a whole."""

    file: str
    line: int
    key: str  # dotted path: "providers.local.deployments[0].price"
    message: str
    hint: str = ""
    column: int = 0  # counts from 1; 0 = the line as a whole

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        where += f":{self.column}" if self.column else ""
        key = f" {self.key}:" if self.key else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}:{key} {self.message}{hint}"


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is configured. `line` counts from 1; 0 = the file as a whole."""

    file: str  # or "$NAME", a variable of the environment; or "admin API, version 3"
    line: int


class ConfigError(Exception):
    """The configuration cannot be used; `problems` names everything that is wrong with it."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(p) for p in problems))


@dataclass(frozen=True, slots=True)
class Listen:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Upstream: connect, first byte, between bytes, first event and between events of a stream, total. Client: request body, write to a slow reader."""

    connect_s: float = 5.0
    first_byte_s: float = 60.0
    slow_first_byte_s: float = 300.0
    idle_s: float = 120.0
    first_event_s: float = 600.0  # keep-alives do not count
    event_idle_s: float = 600.0
    total_s: float = 3600.0
    body_s: float = 60.0
    slow_client_s: float = 120.0
    keep_alive_s: float = 15.0  # a comment is sent on a silent stream this often


class Mode(StrEnum):
    """Whether rules act on traffic or only record what they would have done."""

    ACTIVE = "active"
    SHADOW = "shadow"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Routing:
    """The rules, compiled, with the tier for requests that none of them matches."""

    mode: Mode = Mode.ACTIVE
    rules: RuleSet = field(default_factory=RuleSet)
    #: names that clients may ask for in place of a model, each with rules of its own
    virtual: Mapping[str, RuleSet] = field(default_factory=dict)

    @property
    def texts(self) -> tuple[RuleText, ...]:
        """The rules as they were written."""
        return tuple(rule.text for rule in self.rules.rules)


@dataclass(frozen=True, slots=True)
class BudgetSpec:
    """A budget declared in configuration. `scope` is "tenant:<id>", "team:<id>" or "key:<id>"."""

    scope: str
    limit: int  # in `unit`; nano-dollars if that is `usd`
    window: str  # as core.windows.parse_window reads it: "lifetime", "day", "month", "30d" ...
    on_exceed: OnExceed = OnExceed.ERROR
    zone: str = "UTC"
    unit: Unit = Unit.USD
    mode: BudgetMode = BudgetMode.ENFORCE
    alert_percents: tuple[int, ...] = ALERT_PERCENTS
    landing_percent: int | None = None  # None = 2 if `on_exceed` is `summarize`, else 0


@dataclass(frozen=True, slots=True)
class TeamSpec:
    """A team declared in configuration; created at start-up if it is missing."""

    id: str
    tenant: str
    models: tuple[str, ...] = ()
    limit: RateLimit = field(default_factory=RateLimit)
    task_budget_nano_usd: int | None = None  # of its tasks, before the general one


@dataclass(frozen=True, slots=True)
class Telemetry:
    """OTLP/HTTP. A URL of "" = that signal does not leave; metrics are served at the admin port in any case.

    Sampled are `sampling_ratio` of all requests by trace id, what the caller's `traceparent` says where
    `follow_parent`, and whatever failed (5xx) or took long where that is asked for (0 = not).
    """

    traces_url: str = ""
    metrics_url: str = ""
    headers: Mapping[str, Secret] = field(default_factory=dict)
    sampling_ratio: float = 1.0
    follow_parent: bool = True
    sample_errors: bool = False
    sample_slower_than_s: float = 0.0
    metrics_every_s: float = 60.0
    timeout_s: float = 10.0
    service_name: str = "tollhouse"
    resource: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WebhookSpec:
    """Where alerts go. The URL often holds a secret of the receiver, so it does not show either."""

    url: str = field(repr=False)
    secret: Secret


@dataclass(frozen=True, slots=True)
class Overlaid:
    """What was written over the admin API and is laid over the file; `shadowed` are those that the file declares too, and
    where: these do nothing.
    """

    documents: Documents = ()
    shadowed: Mapping[Key, Place] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that was configured. A reload builds a new one and swaps it whole."""

    file: str
    listen: Listen
    admin_listen: Listen
    state_dir: Path
    database_url: str = field(repr=False)
    redis_url: str | None = field(repr=False)
    admin_key: Secret | None  # None: the application makes one in state_dir
    pepper: Secret | None  # None: `ensure_pepper` reads or makes the one in state_dir
    workers: int
    providers: Mapping[str, Provider]
    catalog: Catalog
    credentials: Mapping[str, Secret]  # by credential name; only the sender resolves them
    prices: PriceBook
    routing: Routing
    tenants: tuple[str, ...]
    teams: tuple[TeamSpec, ...]
    budgets: tuple[BudgetSpec, ...]
    task_default: TaskDefault
    limits: RateLimit  # of every key that has none of its own
    timeouts: Timeouts
    body_limit_bytes: int
    log_level: LogLevel
    telemetry: Telemetry
    drain_s: float
    reaper_grace_s: float
    expose_cost: bool
    webhook: WebhookSpec | None = None  # None: alerts stay in the database
    breakers: BreakerPolicy = field(default_factory=BreakerPolicy)
    crash_file: Path | None = None  # for `make crash` only: where death is ordered (gateway/crash.py)
    cache_rules: CacheRules = field(default_factory=CacheRules)
    caching: CachingPolicy = field(default_factory=CachingPolicy)
    places: Mapping[str, Place] = field(default_factory=dict)  # as `settings.places.places` names them
    overlaid: Overlaid = field(default_factory=Overlaid)
    keyless: tuple[str, ...] = ()  # known providers that stay off: none of their key variables is set

    def revealed(self) -> dict[str, str]:
        """The secrets themselves, by the names of credentials: for the sender only."""
        return {name: secret.reveal() for name, secret in self.credentials.items()}

    @property
    def database_shown(self) -> str:
        """The database's address without its password."""
        return _without_password(self.database_url)

    @property
    def redis_shown(self) -> str | None:
        return _without_password(self.redis_url) if self.redis_url else None

    @property
    def demo(self) -> bool:
        """A demo provider is configured and the application must start it."""
        return any(p.wire is Wire.DEMO and not p.base_url for p in self.providers.values())

    def with_demo_at(self, base_url: str) -> Settings:
        """The same settings with the demo provider's address filled in ("http://127.0.0.1:1234/v1")."""
        moved = {
            name: dataclasses.replace(p, base_url=base_url) if p.wire is Wire.DEMO and not p.base_url else p
            for name, p in self.providers.items()
        }
        deployments = tuple(
            dataclasses.replace(d, provider=moved[d.provider.name]) for d in self.catalog.deployments
        )
        catalog = Catalog.of(
            deployments, self.catalog.default_tier, self.catalog.fallbacks, self.catalog.order
        )
        return dataclasses.replace(self, providers=moved, catalog=catalog)


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    address, query, _ = rest.partition("?")  # a query may hold a password, too
    identity, at, place = address.rpartition("@")
    user, colon, _ = identity.partition(":")
    return f"{scheme}://{user}{':***' if colon else ''}{at}{place}{'?...' if query else ''}"
