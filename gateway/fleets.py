"""Deployments with several replicas, in this process: watched, shown, counted and drained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from random import Random
from typing import TYPE_CHECKING

from gateway.admin.ports import ReplicaState
from gateway.core.catalog import Catalog
from gateway.core.health import HealthState, Result, record
from gateway.core.replicas.group import NOT_ASKED, Group, Groups, label, short_name
from gateway.core.replicas.terms import Health, ReplicaShown
from gateway.jobs.replica_watch import ReplicaWatch
from gateway.ports import Clock
from gateway.tasks import Tasks
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.page import Across
from gateway.upstream.discovery import Discovery
from gateway.upstream.http import HttpUpstream
from gateway.upstream.replicas import HttpReplicas

if TYPE_CHECKING:
    from gateway.storage.redis_replicas import RedisReplicas

_IN_USE = frozenset({Health.READY, Health.RETURNING, Health.FULL})
#: What a replica is called that is none of its deployment, or that nobody has asked yet.
UNFIT, NEW = "unfit", "new"
#: A scrape reads many metrics of the same moment.
_SAME_MOMENT_S = 0.25

_log = logging.getLogger("gateway")


class Fleets:
    """All groups of replicas, for people and for a scrape."""

    def __init__(self, groups: Groups, monotonic: Callable[[], float]) -> None:
        self.groups = groups
        self.health: dict[str, HealthState] = {}  # the pipeline's
        self._monotonic = monotonic
        self._rows: tuple[float, list[ReplicaState]] = float("-inf"), []
        self.shared: RedisReplicas | None = None  # with other processes

    def rows(self) -> list[ReplicaState]:
        """By deployment, then address; those that are gone lately are there, too."""
        now_s = self._monotonic()
        return [
            _row(group, shown)
            for group in self.groups.by_deployment.values()
            for shown in group.fleet.shown(now_s)
        ]

    def drain(self, deployment: str, replica: str, on: bool, who: str) -> str | None:
        """`replica` is an address, host and port, or the name that clients see. The address of the one that is meant;
        None if there is none.
        """
        group = self.groups.get(deployment)
        if group is None:
            return None
        now_s = self._monotonic()
        address = next((s.address for s in group.fleet.shown(now_s) if replica in names_of(s.address)), None)
        if address is None:
            return None
        group.fleet.drain(address, on)
        if self.shared is not None:
            self.shared.drained(deployment, address, on)
        if not on:
            self.back(deployment)
        _log.warning("%s: replica %s %s, by %s", deployment, address, "drained" if on else "undrained", who)
        return address

    def back(self, deployment: str) -> None:
        """One of its replicas can be used again: if it was ejected because all had failed, that is over."""
        state = self.health.get(deployment)
        if state is not None and state.open_until_s is not None and state.cause == "failures":
            self.health[deployment] = record(state, Result.OK, self._monotonic())

    def add_metrics(self, metrics: Metrics) -> None:
        """`tollhouse_replica_*`, by deployment and replica: as many as there are, and only those."""

        def gauge(
            name: str,
            text: str,
            read: Callable[[ReplicaState], float | None],
            across: Across = "max",
            *,
            only_grows: bool = False,
        ) -> None:
            def values() -> Mapping[tuple[str, ...], float]:
                found = ((row, read(row)) for row in self._now())
                return {(row.deployment, row.replica): value for row, value in found if value is not None}

            labels = ("deployment", "replica")
            metrics.gauge(
                f"tollhouse_replica_{name}", text, values, labels, only_grows=only_grows, across=across
            )

        for name, text, read, across in _GAUGES:
            gauge(name, text, read, across)
        for name, text, read, across in _COUNTERS:
            gauge(f"{name}_total", text, read, across, only_grows=True)
        metrics.gauge(
            "tollhouse_replica_picks_total",
            "Calls sent to a replica, by why it was picked: warm, released, least_loaded, explored, last_resort.",
            lambda: {
                (row.deployment, row.replica, why): float(count)
                for row in self._now()
                for why, count in row.picks.items()
            },
            ("deployment", "replica", "why"),
            only_grows=True,
        )
        metrics.gauge(
            "tollhouse_replicas_found",
            "Replicas that discovery has found, well or not.",
            lambda: {
                (name,): float(sum(s.health is not Health.GONE for s in group.fleet.shown(self._monotonic())))
                for name, group in self.groups.by_deployment.items()
            },
            ("deployment",),
            across="max",
        )
        metrics.gauge(
            "tollhouse_replicas_lookup_failed",
            "1 while the addresses of a deployment's replicas cannot be found; the last known ones stay.",
            lambda: {(n,): float(bool(g.problem)) for n, g in self.groups.by_deployment.items()},
            ("deployment",),
            across="max",
        )

    def _now(self) -> list[ReplicaState]:
        at_s, rows = self._rows
        now_s = self._monotonic()
        if now_s - at_s > _SAME_MOMENT_S:
            rows = [row for row in self.rows() if row.health != Health.GONE.value]
            self._rows = now_s, rows
        return rows


Read = Callable[[ReplicaState], float | None]
_GAUGES: tuple[tuple[str, str, Read, Across], ...] = (
    ("up", "1 if calls go to it.", lambda r: float(r.in_use), "min"),
    ("drained", "1 if a person has taken it out.", lambda r: float(r.drained), "max"),
    ("waiting", "Requests in its own queue, as it says.", lambda r: r.waiting, "max"),
    ("running", "Requests that it works on, as it says.", lambda r: r.running, "max"),
    ("kv_usage", "Share of its cache that running requests use, as it says.", lambda r: r.kv_usage, "max"),
    ("active", "Calls of this gateway that it has not answered to the end.", lambda r: r.active, "sum"),
    ("backlog_tokens", "Uncached prompt tokens sent to it whose first chunk has not come.", lambda r: r.backlog_tokens, "sum"),
    ("sessions", "Sessions whose last call went there.", lambda r: r.sessions, "sum"),
    ("index_bytes", "Memory for what its cache holds, about.", lambda r: r.index_bytes, "sum"),
)  # fmt: skip
_COUNTERS: tuple[tuple[str, str, Read, Across], ...] = (
    ("prompt_tokens", "Prompt tokens that its answers reported.", lambda r: r.prompt_tokens, "sum"),
    ("predicted_cached_tokens", "Of them, those expected in its cache.", lambda r: r.predicted_cached_tokens, "sum"),
    ("reported_cached_tokens", "Of them, those it read from its cache.", lambda r: r.reported_cached_tokens, "sum"),
    ("predictions", "Answers whose cached tokens could be held against what was expected.", lambda r: r.predictions, "sum"),
    ("predictions_close", "Of them, those less than one block of the engine apart.", lambda r: r.predictions_close, "sum"),
    ("restarts", "Times that it came back with an empty cache.", lambda r: r.restarts, "max"),
    ("aborts", "Answers that it cut short when it was shut down.", lambda r: r.aborts, "sum"),
    ("refusals", "Calls that it refused because it was full.", lambda r: r.refusals, "sum"),
    ("implausible_usage", "Answers whose usage cannot be.", lambda r: r.lies, "sum"),
)  # fmt: skip


def names_of(address: str) -> Iterator[str]:
    """What an operator may call a replica."""
    yield address
    yield label(address)
    yield short_name(address)


async def keep_fleets(
    groups: Groups,
    http: HttpUpstream,
    credentials: Mapping[str, str],
    catalog: Callable[[], Catalog],
    clock: Clock,
    metrics: Metrics,
    jobs: Tasks,
    stack: AsyncExitStack,
) -> Fleets:
    """From now on, `groups` follow the catalog and the world. Asks every replica once before it returns; `jobs` must end
    before `stack` does.
    """
    fleets = Fleets(groups, clock.monotonic)
    fleets.add_metrics(metrics)
    replicas = HttpReplicas(credentials, Discovery(), http.forget)
    await replicas.start()
    stack.push_async_callback(replicas.stop)
    watch = ReplicaWatch(
        groups,
        catalog,
        replicas,
        spawn=jobs.watch,
        monotonic=clock.monotonic,
        random=Random().random,
        back=fleets.back,
    )
    await watch.begin()
    jobs.watch(watch.run(), "replicas")
    return fleets


def _row(group: Group, shown: ReplicaShown) -> ReplicaState:
    unfit = group.unfit.get(shown.address, "")
    health = shown.health.value
    if unfit and shown.health in _IN_USE:
        health = NEW if unfit == NOT_ASKED else UNFIT
    seen = shown.seen
    return ReplicaState(
        deployment=group.deployment,
        replica=label(shown.address),
        name=short_name(shown.address),
        address=shown.address,
        health=health,
        in_use=shown.health in _IN_USE and not unfit,
        why="; ".join(filter(None, (group.silent.get(shown.address, unfit), group.problem, *shown.notes))),
        drained=shown.drained,
        version=group.versions.get(shown.address, ""),
        engine=seen.engine,
        waiting=seen.waiting,
        running=seen.running,
        kv_usage=seen.kv_usage,
        kv_tokens=seen.kv_cache_size_tokens,
        seen_age_s=None if shown.seen_age_s is None else round(shown.seen_age_s, 1),
        active=shown.active,
        backlog_tokens=shown.backlog_tokens,
        peer_active=shown.peer_active,
        peer_backlog_tokens=shown.peer_backlog_tokens,
        sessions=shown.sessions,
        prompt_tokens=shown.prompt_tokens,
        predicted_cached_tokens=shown.predicted_cached_tokens,
        reported_cached_tokens=shown.reported_cached_tokens,
        predictions=shown.predictions,
        predictions_close=shown.predictions_close,
        picks={why: count for (address, why), count in group.picks.items() if address == shown.address},
        index_blocks=shown.index_blocks,
        index_capacity_blocks=shown.index_capacity_blocks,
        index_bytes=shown.index_bytes,
        failures=shown.failures,
        aborts=shown.aborts,
        refusals=shown.refusals,
        restarts=shown.restarts,
        lies=shown.lies,
    )
