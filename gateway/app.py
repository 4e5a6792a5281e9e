"""The composition root: builds the adapters, wires the pipeline, owns start-up and shutdown.

Start-up, in order: demo provider if one is wanted, database (schema checked, lock taken on SQLite), ledger (its
journal replayed), keys, upstreams, pipeline, admin listener, public listener. Shutdown runs backwards: stop
listening, drain requests, drain their settlements, close the stores.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gateway import __version__
from gateway.admin.server import AdminServer
from gateway.administration import admin_deps
from gateway.alerts import Alerts
from gateway.core import health
from gateway.core.breakers import Watch
from gateway.core.entry import Attempt, Outcome, Refused
from gateway.core.errors import is_refusal
from gateway.core.ids import new_id
from gateway.core.retries import RetryBudget
from gateway.core.runs import Runs
from gateway.edge.artifacts import own_or_shared
from gateway.edge.server import Done, Edge, EdgeOptions
from gateway.fleets import keep_fleets
from gateway.following import Following
from gateway.gauges import add_gauges, add_ledger_gauges
from gateway.gpu import GpuTier
from gateway.jobs import reaper as reaping
from gateway.jobs.reaper import Reaper
from gateway.jobs.reconcile import Reconcile
from gateway.jobs.resumes import Resumes
from gateway.jobs.sweeper import Sweeper
from gateway.overlay import Overlay, Read
from gateway.pipeline.exchange import Drains, Policy, World
from gateway.pipeline.serve import Gateway
from gateway.ports import Limits, PrefixIndex, Upstream
from gateway.reload import Reload
from gateway.settings import LogLevel, Settings, ensure_pepper
from gateway.storage import schema
from gateway.storage.breaker_events import BreakerEvents
from gateway.storage.database import Database, Randomness, SystemClock, open_database
from gateway.storage.explained import Explained
from gateway.storage.journal import Journal
from gateway.storage.keys import SqlKeyStore
from gateway.storage.ledger import SqlLedger
from gateway.storage.lockfile import ServingLock
from gateway.storage.memory import MemoryLimits, MemoryPrefixIndex
from gateway.storage.outbox import SqlOutbox
from gateway.storage.own_prices import OwnPrices
from gateway.storage.own_tasks import OwnTasks
from gateway.storage.receivers import SqlReceivers
from gateway.storage.refused_sums import RefusedSums
from gateway.storage.rollups import keep_mended
from gateway.storage.task_owners import SqlTaskOwners
from gateway.storage.uncertain import uncertain
from gateway.tasks import Tasks
from gateway.telemetry.logs import AccessLog
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.page import OPENMETRICS, PROMETHEUS, wants_openmetrics, written
from gateway.upstream.lookup import UsageLookup
from gateway.upstreams import Litellm, open_upstreams

RECONCILE_EVERY_S = 15.0
DRAINS_MAX = 64
#: Client sides that hang on after the drain are cut; settlements then get this long.
SETTLE_S = 30.0

if TYPE_CHECKING:
    from gateway.crash import Crash
    from gateway.sharing import Shared
    from gateway.telemetry.genai import GenAiMetrics
    from gateway.telemetry.peers import Peers
    from gateway.traces import Traces

_log = logging.getLogger("gateway")


class App:
    """One serving process. `async with App(settings) as app:` listens until left.

    `replica_id` names this process to the ledger, the same after a restart, so that it finds its own journal.
    `reuse_port`: several processes share the ports; `worker` is then the directory that they share, and which of
    them this is. `webhook_loopback`: tests receive alerts at 127.0.0.1.
    `read` gives the configuration as it is now, `siblings` tells the other processes to take it over too.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        replica_id: str,
        reuse_port: bool = False,
        worker: tuple[Path, int] | None = None,
        reconcile_every_s: float = RECONCILE_EVERY_S,
        access_log: bool = True,
        webhook_loopback: bool = False,
        read: Read | None = None,
        siblings: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings = settings
        self.clock = SystemClock()
        self._replica_id = replica_id
        self._reuse_port = reuse_port
        self._worker = worker
        self._peers: Peers | None = None
        self._reconcile_every_s = reconcile_every_s
        self._stack = AsyncExitStack()
        self._draining = False
        self._write_access = access_log
        self._webhook_loopback = webhook_loopback
        self._traces: Traces | None = None
        self._genai: GenAiMetrics | None = None
        self._randomness = Randomness()
        self._secrets = settings.revealed()
        self.health: dict[str, health.HealthState] = {}
        self._replicas: Shared | None = None
        self.metrics = Metrics(settings.catalog, version=__version__)
        self.gpu = GpuTier(lambda: self.settings.catalog, self.metrics, self.clock.monotonic)
        self.watch = Watch()
        self._failed_rules: dict[tuple[str, ...], float] = {}
        self.metrics.gauge(
            "tollhouse_rule_failures_total",
            "Requests on which a rule could not be evaluated, so that it did not match.",
            lambda: self._failed_rules,
            ("rule",),
            only_grows=True,
        )
        self.overlay = Overlay(read, lambda: self.settings, self._use, self.metrics)
        self._on_request = Reload(self.overlay.reread if self.overlay.on else None, siblings)
        self.requests = Tasks(_fault)  # attempts and settlements: drained at the end
        self.jobs = Tasks(_fault)  # run for ever: cancelled at the end
        self._following = Following(self.jobs)
        self._litellm = Litellm(self._secrets, self.jobs.watch)
        self.edge: Edge
        self.ledger: SqlLedger
        self.reconcile: Reconcile
        self.database: Database
        self.prices: OwnPrices
        self.events: BreakerEvents
        self.refused: RefusedSums
        self.alerts: Alerts
        self.resumes: Resumes
        self.admin_port = 0

    @property
    def base_url(self) -> str:
        return f"http://{self.settings.listen.host}:{self.edge.port}/v1"

    async def __aenter__(self) -> App:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._draining = True
        await self.edge.drain(self.settings.drain_s)
        cut = await self.requests.drain(SETTLE_S)
        if cut:
            _log.warning("%d attempts were still running at the end and were cut", cut)
        await self._stack.aclose()

    def reload(self, read: Callable[[], Settings]) -> tuple[str, ...]:
        """Take over what `reload.LIVE` names of the settings that `read` gives, between two requests; returns what
        else has changed. Raises `ConfigError`, and everything stays as it is."""
        return self.overlay.reload(read)

    def _use(self, settings: Settings) -> None:
        self.settings = settings
        self._secrets.clear()
        self._secrets.update(settings.revealed())  # the senders hold this very dict
        self.prices.use(settings.prices)
        self.metrics.use_catalog(settings.catalog)
        self._litellm.use(settings.catalog)

    async def quiet(self, timeout_s: float = 30.0) -> None:
        """Wait until every attempt so far is posted: what the ledger says is then complete."""
        await self.requests.drain(timeout_s)
        await self.ledger.idle()

    async def _start(self) -> None:
        settings, stack = self.settings, self._stack
        pepper = ensure_pepper(settings)
        self.database = open_database(settings.database_url, self.clock)
        stack.push_async_callback(self.database.close)
        crash = _crash(settings)
        if crash is not None:
            self.database = crash.database(self.database)
        if self.database.sqlite_path is not None:
            stack.callback(ServingLock.take(self.database.sqlite_path).release)
        await schema.check(self.database)
        self.prices = OwnPrices(self.database, settings.prices)
        await self.overlay.begin(self.database)
        settings = self.settings
        self.refused = RefusedSums(self.database, self.clock.now_ms)
        stack.push_async_callback(self.refused.flush)
        self.events = BreakerEvents(self.database)
        self.alerts = Alerts(SqlOutbox(self.database), self.events, self.metrics, self.requests)
        self.ledger = await SqlLedger.open(
            self.database,
            replica_id=self._replica_id,
            journal_dir=settings.state_dir / "journal",
            task_default=settings.task_default,
            make_journal=Journal if crash is None else crash.journal,
        )
        stack.push_async_callback(self.ledger.close)
        self.resumes = Resumes(self.events, self.watch.forgive, self.ledger.revision_changed)
        await self.prices.turn()
        keys = await SqlKeyStore.open(self.database, self.store_changed)
        stack.push_async_callback(keys.close)
        upstreams, http = await open_upstreams(settings.catalog, self._secrets, self._litellm, stack)
        upstream: Upstream = upstreams if crash is None else crash.upstream(upstreams)
        catalog, groups = lambda: self.settings.catalog, self.gpu.groups
        self.fleets = await keep_fleets(
            groups, http, self._secrets, catalog, self.clock, self.metrics, self.jobs, stack
        )
        self.fleets.health = self.health
        await self._start_jobs()
        if settings.telemetry.traces_url or settings.telemetry.metrics_url:
            from gateway.traces import send

            self._traces, self._genai = send(
                settings.telemetry, self._replica_id, self.metrics, self.clock.now_ms, self.jobs, stack
            )
        world = self._world(keys, upstream, pepper, *await self._shared())
        add_gauges(self.metrics, world)
        add_ledger_gauges(self.metrics, self.ledger)
        if self._worker is not None:
            from gateway.telemetry.peers import Peers

            self._peers = Peers(*self._worker, self.metrics.read)
            await self._peers.start()
            stack.push_async_callback(self._peers.close)
        await self._start_admin(world, pepper)
        self.edge = self._edge(world)
        await self.edge.start(settings.listen.host, settings.listen.port, reuse_port=self._reuse_port)

    async def _start_jobs(self) -> None:
        settings, lookup = self.settings, UsageLookup(self._secrets)
        await lookup.start()
        self._stack.push_async_callback(lookup.stop)
        self.reconcile = Reconcile(
            uncertain=partial(uncertain, self.database),
            settle=self.ledger.settle,
            deployments=lambda: {d.name: d for d in self.settings.catalog.deployments},
            price_book=lambda: self.prices.book,
            find=lookup.find,
            now_ms=self.clock.now_ms,
            told=lambda _, nano_usd: self.metrics.correction(nano_usd),
        )
        # A grace shorter than a minute is looked after as often.
        grace_s = settings.reaper_grace_s
        reaper = Reaper(self.ledger, grace_s=grace_s, every_s=min(reaping.EVERY_S, grace_s))
        self.jobs.watch(reaper.run(), "reaper")
        self.jobs.watch(self.reconcile.run(self._reconcile_every_s), "reconcile")
        self._following.add("resumes", self.resumes.turn, "tasks that were let go on are not known")
        self.jobs.watch(self.gpu.run(), "gpu")
        self._following.add("prices", self.prices.turn, "prices are those that were known")
        self._following.add("overlay", self.overlay.turn, "the admin API's configuration is what was known")
        sweeper = Sweeper(SqlOutbox(self.database), self.events, delivered=settings.webhook is not None)
        self.jobs.watch(sweeper.run(), "sweeper")
        self.jobs.watch(self.refused.run(), "refused")
        self.jobs.watch(keep_mended(self.database, self.clock.now_ms), "sums")
        if settings.webhook is not None:
            self.alerts.deliver(
                settings.webhook, self.jobs, now_ms=self.clock.now_ms, loopback=self._webhook_loopback
            )
        self.alerts.deliver_added(
            SqlReceivers(self.database),
            self.jobs,
            pepper=ensure_pepper(settings),
            now_ms=self.clock.now_ms,
            loopback=self._webhook_loopback,
        )
        self._stack.push_async_callback(self.jobs.drain, 0.0)

    async def _shared(self) -> tuple[Limits, PrefixIndex]:
        """What replicas share through Redis if there is one: limits and lineage."""
        own = MemoryPrefixIndex(self.clock.monotonic)
        if not self.settings.redis_url:
            return MemoryLimits(), own
        from gateway.sharing import share

        self._replicas = await share(
            self.settings,
            self.health,
            own,
            self.ledger.refusals,
            replica_id=self._replica_id,
            clock=self.clock,
            jobs=self.jobs,
            stack=self._stack,
            metrics=self.metrics,
            fleets=self.fleets,
            places=self.gpu.places,
        )
        return self._replicas.limits, self._replicas.prefixes

    def _world(
        self, keys: SqlKeyStore, upstream: Upstream, pepper: bytes, limits: Limits, prefixes: PrefixIndex
    ) -> World:
        settings = self.settings
        randoms = random.Random()
        return World(
            clock=self.clock,
            keys=keys,
            ledger=self.ledger,
            task_owners=SqlTaskOwners(self.database),
            limits=limits,
            prefixes=prefixes,
            upstream=upstream,
            observer=self,
            spawn=self.requests.spawn,
            random=randoms.random,
            new_id=self.new_id,
            catalog=lambda: self.settings.catalog,
            prices=lambda: self.prices.book,
            rules=lambda: self.settings.routing.rules,
            virtual=lambda: self.settings.routing.virtual,
            rule_failed=self._rule_failed,
            health=self.health,
            health_changed=_discard if self._replicas is None else self._replicas.health_changed,
            bindings=None if self._replicas is None else self._replicas.bindings,
            learned=None if self._replicas is None else self._replicas.learned,
            retries=RetryBudget() if self._replicas is None else self._replicas.retries,
            runs=Runs() if self._replicas is None else self._replicas.runs,
            pepper=pepper,
            traceparent=None if self._traces is None else self._traces.header,
            policy=Policy(expose_cost=settings.expose_cost, key_limit=settings.limits),
            drains=Drains(DRAINS_MAX),
            breakers=settings.breakers,
            cache_rules=lambda: self.settings.cache_rules,
            caching=lambda: self.settings.caching,
            watch=self.watch,
            places=self.gpu.places,
            replicas=self.gpu.groups,
            alert=self.alerts.breaker,
            tell=self.alerts.tell,
            go_on=self.resumes.go_on,
            refused=self._hold_refused,
            streamed=self.metrics.streamed,
        )

    def store_changed(self) -> None:
        """A key, team, budget, price, webhook or task's state changed somewhere."""
        self.ledger.revision_changed()
        self._following.wake()
        self.alerts.wake()

    def _hold_refused(self, attempt: Attempt, refused: Refused, nano_usd: int | None) -> None:
        self.refused.add(attempt, refused, nano_usd)
        self.metrics.hold_refused(refused.scope.partition(":")[0], refused.unit.value, nano_usd)

    def _rule_failed(self, rule: str) -> None:
        self._failed_rules[rule,] = self._failed_rules.get((rule,), 0) + 1
        if self._failed_rules[rule,] == 1:
            _log.warning("rule %r could not be evaluated on a request; there it counts as not matched", rule)

    def new_id(self, prefix: str) -> str:
        return new_id(prefix, self.clock.now_ms(), self._randomness.take())

    # --- ports.Observer ----------------------------------------------------------------------------------

    def attempt(self, attempt: Attempt, outcome: Outcome) -> None:
        self.metrics.attempt(attempt, outcome)
        self.gpu.attempt(attempt, outcome)
        if self._genai is not None:
            self._genai.attempt(attempt, outcome)
        if self._traces is not None:
            self._traces.attempt(attempt, outcome)

    # --- listeners -----------------------------------------------------------------------------------------

    def readiness(self) -> list[str]:
        reasons = []
        if self._draining:
            reasons.append("shutting down")
        if not self.ledger.available:
            reasons.append("the ledger cannot be reached: requests are refused")
        return [*reasons, *self.overlay.reasons()]

    def _edge(self, world: World) -> Edge:
        settings = self.settings
        write: Callable[[dict[str, object]], None] | None = None
        if self._write_access and settings.log_level in (LogLevel.DEBUG, LogLevel.INFO):
            log = AccessLog(sys.stdout)
            log.start()
            self._stack.callback(log.close)
            write = log.write
        artifacts = world.shaper.artifacts
        shared = None if self._replicas is None else self._replicas.artifacts
        if shared is not None:
            artifacts.tell = shared.put
        edge = Edge(
            Gateway(world),
            options=EdgeOptions(
                body_bytes_max=settings.body_limit_bytes,
                body_timeout_s=settings.timeouts.body_s,
                keep_alive_s=settings.timeouts.keep_alive_s,
                slow_client_s=settings.timeouts.slow_client_s,
            ),
            monotonic=self.clock.monotonic,
            new_request_id=partial(self.new_id, "req"),
            readiness=self.readiness,
            on_done=partial(self._done, write),
            on_fault=_fault,
            tasks=OwnTasks(
                self.database,
                pepper=world.pepper,
                task_default=settings.task_default,
                on_change=self.store_changed,
            ),
            prefix=self._explained(),
            traced=self._traces is not None,
            artifacts=own_or_shared(artifacts.text, None if shared is None else shared.text),
        )
        self.metrics.gauge(
            "tollhouse_inflight_requests", "Requests being served.", lambda: float(edge.in_flight)
        )
        return edge

    def _explained(self) -> Explained:
        return Explained(self.database, lambda: self.settings.catalog, lambda: self.settings.cache_rules)

    def _done(self, write: Callable[[dict[str, object]], None] | None, done: Done) -> None:
        status = 499 if done.client_gone and not done.status else done.status
        duration_s, overhead_s = done.steps.elapsed_s(), done.steps.gateway_s()
        span = None if self._traces is None else self._traces.done(done, status, duration_s)
        if done.operation:
            self.metrics.request(
                operation=done.operation,
                client=done.client or "unknown",
                status=status,
                duration_s=duration_s,
                first_token_s=done.first_token_s,
                overhead_s=overhead_s,
                span=span,
                at_s=0.0 if span is None else self.clock.now_ms() / 1e3,
            )
        if done.error and is_refusal(done.error):
            self.metrics.refusal(done.error)
        if write is not None:
            write(
                {
                    "request_id": done.request_id,
                    "method": done.method,
                    "path": done.path,
                    "status": status,
                    "key_id": done.key_id,
                    "task_id": done.task_id,
                    "client": done.client,
                    "deployment": done.deployment,
                    "error": done.error,
                    "bytes_in": done.bytes_in,
                    "bytes_out": done.bytes_out,
                    "duration_ms": round(duration_s * 1e3, 2),
                    "overhead_ms": round(overhead_s * 1e3, 2),
                }
            )

    async def _scraped(self, accept: str) -> tuple[str, bytes]:
        families = self.metrics.read() if self._peers is None else await self._peers.families()
        openmetrics = wants_openmetrics(accept)
        return OPENMETRICS if openmetrics else PROMETHEUS, written(families, openmetrics=openmetrics)

    async def _start_admin(self, world: World, pepper: bytes) -> None:
        server = AdminServer(
            admin_deps(
                lambda: self.settings,
                self.database,
                world,
                pepper,
                explained=self._explained(),
                readiness=self.readiness,
                metrics=self._scraped,
                on_change=self.store_changed,
                on_fault=_fault,
                fleets=self.fleets,
                gpu=self.gpu,
                workers=None if self._peers is None else self._peers.families,
                reload=self._on_request,
                overlay=self.overlay if self.overlay.on else None,
                webhook_loopback=self._webhook_loopback,
            )
        )
        listen = self.settings.admin_listen
        await server.start(listen.host, listen.port, reuse_port=self._reuse_port)
        self._stack.push_async_callback(server.stop)
        self.admin_port = server.port


def _crash(settings: Settings) -> Crash | None:
    """Only for `make crash`: this process dies where it is told to."""
    if settings.crash_file is None:
        return None
    from gateway.crash import Crash

    _log.warning("TOLLHOUSE_CRASH_FILE is set: this process kills itself on order of %s", settings.crash_file)
    return Crash(settings.crash_file)


def _discard(_: Mapping[str, object]) -> None:
    """Nobody to share with."""


def _fault(where: str, fault: BaseException) -> None:
    _log.error("fault in %s", where, exc_info=fault)
