"""The gateway's metrics, written down as they happen and rendered as Prometheus text on a scrape.

Labels come from the configuration (model, provider, deployment), from our own enumerations (operation,
status class, outcome), or are bounded by the guard in `series` (client, team). Ids of tasks, keys and
requests are never labels: they belong into the ledger and the access log.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import compress
from operator import attrgetter

from gateway.core.catalog import Catalog
from gateway.core.entry import Attempt, Outcome
from gateway.telemetry import process
from gateway.telemetry.page import Across, Exemplar, Family, Labels, written
from gateway.telemetry.series import OTHER, Counter, Gauge, Histogram, Observed, Reading

#: Seconds: a gateway answers in milliseconds, a reasoning model in minutes.
DURATION_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
FIRST_TOKEN_S = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
CHUNK_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
OVERHEAD_S = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)

_STATUS_CLASS = tuple(f"{n}xx" for n in range(10))
#: Ways of ending that are no error of anybody's but matter to who looks at a provider.
_FINISHES = frozenset({"client_gone", "upstream_cut", "error"})
_CLASSES = ("input_uncached", "cache_read", "cache_write_5m", "cache_write_1h", "cache_write_12h", "output")
_by_class = attrgetter(*_CLASSES)


class _Tokens(dict[str, list[int]]):
    """The series of each class of tokens, made when the first ones are counted."""

    def __init__(self, counter: Counter, spend: Labels) -> None:
        self._counter, self._spend = counter, spend

    def __missing__(self, name: str) -> list[int]:
        cell = self[name] = self._counter.cell((name, *self._spend))
        return cell


@dataclass(frozen=True, slots=True)
class _Attempts:
    """The series of all attempts that are alike."""

    called: Labels  # provider, deployment
    spend: Labels  # model, provider, team
    ended: list[int]
    duration: Observed
    entries: list[int]
    cost: list[int]
    list_cost: list[int]
    client_cost: list[int]
    tokens: _Tokens


def _counter(max_series: int, name: str, text: str, labels: Labels, *, nano: bool = False) -> Counter:
    open_labels = tuple(x for x in ("client", "team") if x in labels)
    return Counter(name, text, labels, open_labels=open_labels, max_series=max_series, nano=nano)


def _cost_counters(counter: Callable[..., Counter], labels: Labels) -> tuple[Counter, Counter, Counter]:
    """Charged, without caches, and charged by client: one more label on the first two would multiply their series."""
    return (
        counter("tollhouse_cost_usd_total", "Cost charged to the ledger.", labels, nano=True),
        counter(
            "tollhouse_list_cost_usd_total",
            "What the same tokens would have cost without any cache.",
            labels,
            nano=True,
        ),
        counter(
            "tollhouse_client_cost_usd_total",
            "The same cost by the kind of agent that asked.",
            ("client",),
            nano=True,
        ),
    )


def _cache_counters(counter: Callable[..., Counter], labels: Labels) -> tuple[Counter, Counter]:
    """Misses, and what they cost."""
    return (
        counter(
            "tollhouse_cache_misses_total",
            "Calls that read less from a cache than they could have.",
            labels,
        ),
        counter(
            "tollhouse_cache_lost_usd_total",
            "What those calls cost more than they would have.",
            labels,
            nano=True,
        ),
    )


def _queue_wait(max_series: int) -> Histogram:
    return Histogram(
        "tollhouse_queue_wait_seconds",
        "Waiting for a place at a deployment: entered, or not because it was late, full, or left.",
        ("deployment", "class", "outcome"),
        DURATION_S,
        max_series=max_series,
    )


class Metrics:
    """All metrics of one worker. `team_label=False` leaves teams out of the token and cost counters."""

    def __init__(
        self, catalog: Catalog, *, team_label: bool = True, version: str = "", max_series: int = 2_000
    ) -> None:
        self._team_label, self._max_series = team_label, max_series
        self.use_catalog(catalog)
        spend = ("model", "provider", "team")
        counter = partial(_counter, max_series)
        self._requests = counter(
            "tollhouse_requests_total", "Answered requests.", ("operation", "client", "status_class")
        )
        self._duration = Histogram(
            "tollhouse_request_duration_seconds",
            "From the request line to the last byte of the answer.",
            ("operation", "status_class"),
            DURATION_S,
            max_series=max_series,
        )
        self._first_token = Histogram(
            "tollhouse_first_token_seconds",
            "From the request line to the first byte of the answer's body that left.",
            ("operation",),
            FIRST_TOKEN_S,
            max_series=max_series,
        )
        self._overhead = Histogram(
            "tollhouse_overhead_seconds",
            "Time that the gateway itself took: without waiting for the provider or the client.",
            ("operation",),
            OVERHEAD_S,
            max_series=max_series,
        )
        self._attempts = counter(
            "tollhouse_attempts_total",
            "Calls to providers, by how they ended.",
            ("provider", "deployment", "outcome"),
        )
        self._attempt_duration = Histogram(
            "tollhouse_attempt_duration_seconds",
            "From sending to a provider to the last byte read from it.",
            ("provider", "deployment"),
            DURATION_S,
            max_series=max_series,
        )
        self._entries = counter(
            "tollhouse_ledger_entries_total", "Terminal ledger entries, one per attempt.", ("kind", "quality")
        )
        self._tokens = counter("tollhouse_tokens_total", "Tokens by billing class.", ("class", *spend))
        self._cost, self._list_cost, self._client_cost = _cost_counters(counter, spend)
        self._misses, self._lost = _cache_counters(counter, ("cause", *spend))
        self._refusals = counter("tollhouse_refusals_total", "Requests refused before spending.", ("kind",))
        self._breakers = counter(
            "tollhouse_breaker_episodes_total",
            "What breakers had to say about tasks and keys, once per episode.",
            ("breaker", "action"),
        )
        self._queue_wait = _queue_wait(max_series)
        self._families: list[Counter | Histogram] = [
            self._requests,
            self._duration,
            self._first_token,
            self._overhead,
            self._attempts,
            self._attempt_duration,
            self._entries,
            self._tokens,
            self._cost,
            self._list_cost,
            self._client_cost,
            self._misses,
            self._lost,
            self._refusals,
            self._breakers,
            self._queue_wait,
            *self._calls_and_holds(counter, max_series),
        ]
        self._gauges: dict[str, Gauge] = {}
        self.gauge(
            "tollhouse_build_info",
            "Version of this gateway.",
            lambda: {(version,): 1.0},
            ("version",),
            across="max",
        )
        self.gauge("tollhouse_workers", "Processes that answered this scrape.", lambda: 1.0)
        self._process_gauges()

    def _calls_and_holds(self, counter: Callable[..., Counter], max_series: int) -> list[Counter | Histogram]:
        self._call_first_token = Histogram(
            "tollhouse_attempt_first_token_seconds",
            "From sending to a provider to the first event of its stream.",
            ("provider", "deployment"),
            FIRST_TOKEN_S,
            max_series=max_series,
        )
        self._between_chunks = Histogram(
            "tollhouse_inter_chunk_seconds",
            "Mean time between the events of a stream, one value per stream that ended by itself.",
            ("provider", "deployment"),
            CHUNK_S,
            max_series=max_series,
        )
        self._holds_refused = counter(
            "tollhouse_holds_refused_total",
            "Holds that a budget, or the state of a task, refused.",
            ("scope", "unit"),
        )
        self._refused_usd = counter(
            "tollhouse_refused_usd_total",
            "What the refused holds would have reserved, where that is known.",
            ("scope",),
            nano=True,
        )
        self._corrections = counter(
            "tollhouse_corrections_usd_total",
            "By how much proof changed, afterwards, what had been charged.",
            ("direction",),
            nano=True,
        )
        for direction in ("up", "down"):
            self._corrections.add((direction,), 0)
        return [
            self._call_first_token,
            self._between_chunks,
            self._holds_refused,
            self._refused_usd,
            self._corrections,
        ]

    def _process_gauges(self) -> None:
        self.gauge(
            "process_cpu_seconds_total", "User and system CPU time.", process.cpu_seconds, only_grows=True
        )
        self.gauge("process_resident_memory_bytes", "Resident memory.", process.resident_bytes)
        self.gauge("process_virtual_memory_bytes", "Virtual memory.", process.virtual_bytes)
        self.gauge("process_open_fds", "Open file descriptors.", process.open_fds)
        self.gauge("process_max_fds", "Limit of open file descriptors.", process.max_fds)
        started_s = process.start_time_seconds()
        self.gauge(
            "process_start_time_seconds", "Start time since 1970 UTC.", lambda: started_s, across="min"
        )

    def use_catalog(self, catalog: Catalog) -> None:
        """Take model, provider and deployment labels from this catalog; anything else counts as "other"."""
        self._models = frozenset(catalog.by_model)
        self._providers = frozenset(d.provider.name for d in catalog.deployments)
        self._deployments = frozenset(d.name for d in catalog.deployments)
        self._alike: dict[Labels, _Attempts] = {}

    def gauge(
        self,
        name: str,
        text: str,
        read: Callable[[], Reading],
        labels: Labels = (),
        *,
        only_grows: bool = False,
        across: Across = "sum",
        nano: bool = False,
    ) -> None:
        """Read this at every scrape: a number, or a mapping from label values to numbers; with `nano`, billionths.

        `only_grows` makes it a Prometheus counter; its name then ends in `_total`. `across`: how the values of
        several workers become one.
        """
        if name in self._gauges or any(f.name == name for f in self._families):
            raise ValueError(f"{name} exists already")
        if only_grows != name.endswith("_total"):
            raise ValueError(f"{name}: names of counters, and only they, end in _total")
        self._gauges[name] = Gauge(
            name, text, read, labels, kind="counter" if only_grows else "gauge", across=across, nano=nano
        )

    def request(
        self,
        *,
        operation: str,
        client: str,
        status: int,
        duration_s: float,
        first_token_s: float | None = None,
        overhead_s: float | None = None,
        span: tuple[str, str] | None = None,
        at_s: float = 0.0,
    ) -> None:
        """One request was answered. `status` is what the client saw (499 if it was gone).

        `span`, trace id and span id of a sampled request that ended at `at_s` (1970 UTC), makes it an exemplar.
        """
        status_class = _STATUS_CLASS[status // 100] if 0 <= status < 1000 else OTHER
        self._requests.add((operation, client, status_class))
        self._duration.observe((operation, status_class), duration_s)
        if first_token_s is not None:
            self._first_token.observe((operation,), first_token_s)
        if overhead_s is not None:
            self._overhead.observe((operation,), overhead_s)
        if span is not None:
            self._duration.exemplify((operation, status_class), Exemplar(duration_s, *span, at_s))
            if first_token_s is not None:
                self._first_token.exemplify((operation,), Exemplar(first_token_s, *span, at_s))
            if overhead_s is not None:
                self._overhead.exemplify((operation,), Exemplar(overhead_s, *span, at_s))

    def attempt(self, attempt: Attempt, outcome: Outcome) -> None:
        """One attempt got its terminal entry; a `correct` one is told by `correction`."""
        ended = outcome.error or (outcome.finish if outcome.finish in _FINISHES else "ok")
        key = (
            attempt.provider,
            attempt.deployment,
            attempt.model,
            attempt.team_id,
            attempt.client,
            ended,
            outcome.kind,
            outcome.quality,
        )
        alike = self._alike.get(key) or self._series_of(attempt, outcome, ended, key)
        alike.ended[0] += 1
        alike.duration.add(outcome.latency_ms / 1e3)
        alike.entries[0] += 1
        alike.cost[0] += outcome.cost_nano_usd
        alike.list_cost[0] += outcome.list_cost_nano_usd
        alike.client_cost[0] += outcome.cost_nano_usd
        counts = _by_class(outcome.usage)
        for name, count in compress(zip(_CLASSES, counts, strict=True), counts):
            alike.tokens[name][0] += count
        if outcome.first_token_ms is not None:
            self._call_first_token.observe(alike.called, outcome.first_token_ms / 1e3)
        if outcome.miss is not None:
            cause = outcome.miss.cause.value
            self._misses.add((cause, *alike.spend))
            self._lost.add((cause, *alike.spend), outcome.miss.lost_nano_usd)

    def _series_of(self, attempt: Attempt, outcome: Outcome, ended: str, key: Labels) -> _Attempts:
        """Remembered, until there are too many of them or another catalog. A call that cost nothing still makes its
        series: rate() needs the zero to start from."""
        provider = attempt.provider if attempt.provider in self._providers else OTHER
        deployment = attempt.deployment if attempt.deployment in self._deployments else OTHER
        model = attempt.model if attempt.model in self._models else OTHER
        spend = (model, provider, attempt.team_id if self._team_label else "")
        if len(self._alike) >= self._max_series:
            self._alike.clear()
        found = self._alike[key] = _Attempts(
            called=(provider, deployment),
            spend=spend,
            ended=self._attempts.cell((provider, deployment, ended)),
            duration=self._attempt_duration.cell((provider, deployment)),
            entries=self._entries.cell((outcome.kind.value, outcome.quality.value)),
            cost=self._cost.cell(spend),
            list_cost=self._list_cost.cell(spend),
            client_cost=self._client_cost.cell((attempt.client or "unknown",)),
            tokens=_Tokens(self._tokens, spend),
        )
        return found

    def waited(self, deployment: str, urgency: str, waited_s: float, how: str) -> None:
        """A call came to a deployment that has places; `how` its waiting ended is a word of `pipeline.places`."""
        self._queue_wait.observe((deployment, urgency, how), waited_s)

    def correction(self, nano_usd: int) -> None:
        """An attempt got its `correct` entry, of so much; counters only grow, so it is counted by its direction."""
        self._corrections.add(("up" if nano_usd > 0 else "down",), abs(nano_usd))

    def refusal(self, kind: str) -> None:
        """A request was refused before spending; `kind` is a `GatewayError.kind`."""
        self._refusals.add((kind,))

    def hold_refused(self, scope: str, unit: str, nano_usd: int | None) -> None:
        """A hold was refused; `scope` is a kind of scope ("team"), `nano_usd` what it was to reserve."""
        self._holds_refused.add((scope, unit))
        self._refused_usd.add((scope,), nano_usd or 0)

    def streamed(self, attempt: Attempt, events: int, took_s: float) -> None:
        """A stream has ended by itself: so many events, the last one `took_s` after the first."""
        provider = attempt.provider if attempt.provider in self._providers else OTHER
        deployment = attempt.deployment if attempt.deployment in self._deployments else OTHER
        self._between_chunks.observe((provider, deployment), took_s / (events - 1))

    def breaker(self, breaker: str, action: str) -> None:
        """A breaker spoke of something new; `breaker` and `action` are values of `core.breakers`."""
        self._breakers.add((breaker, action))

    def read(self) -> list[Family]:
        """Everything as it stands now."""
        return [each.read() for each in (*self._families, *self._gauges.values())]

    def render(self) -> bytes:
        """The page for a scrape of this process alone, in the older text form."""
        return written(self.read())
