"""What replicas tell one another through Redis: limits, lineage, refusals, who is well, how many retries are left, which
cache is warm where, and how long runs are."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from gateway.core.health import HealthState
from gateway.core.retries import RetryBudget
from gateway.core.runs import Runs
from gateway.fleets import Fleets
from gateway.pipeline.places import Places
from gateway.ports import Bindings, Clock, Learned, Limits, PrefixIndex
from gateway.settings import ConfigError, Problem, Settings
from gateway.storage.memory import MemoryPrefixIndex
from gateway.storage.redis_artifacts import RedisArtifacts
from gateway.storage.redis_bindings import RedisBindings
from gateway.storage.redis_health import RedisHealth
from gateway.storage.redis_learned import RedisLearned
from gateway.storage.redis_limits import RedisLimits
from gateway.storage.redis_prefixes import RedisPrefixIndex
from gateway.storage.redis_refusals import RedisRefusals
from gateway.storage.redis_replicas import RedisReplicas
from gateway.storage.redis_retries import RedisRetries
from gateway.storage.redis_runs import RedisRuns
from gateway.storage.refusals import Refusals
from gateway.tasks import Tasks
from gateway.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Shared:
    limits: Limits
    prefixes: PrefixIndex
    health_changed: Callable[[Mapping[str, HealthState]], None]
    bindings: Bindings
    learned: Learned
    artifacts: RedisArtifacts
    retries: RetryBudget
    runs: Runs


async def share(
    settings: Settings,
    states: MutableMapping[str, HealthState],
    own: MemoryPrefixIndex,
    refusals: Refusals,
    *,
    replica_id: str,
    clock: Clock,
    jobs: Tasks,
    stack: AsyncExitStack,
    metrics: Metrics,
    fleets: Fleets,
    places: Places,
) -> Shared:
    """Keep `states` and `fleets` in step with other replicas from now on, and share limits, lineage, refusals and `places`.
    `ConfigError` for a URL that cannot be used.
    """
    url = settings.redis_url or ""
    try:
        limits = RedisLimits(url, replicas_min=settings.workers)
        prefixes = RedisPrefixIndex(url, own, clock.monotonic)
        told = RedisRefusals(url, refusals)
    except ValueError as e:
        raise ConfigError([Problem(settings.file, 0, "redis_url", str(e))]) from e
    for first in (limits, prefixes, told):
        await first.start()
        stack.push_async_callback(first.close)
    places.share(limits, jobs.spawn, random.random)
    metrics.gauge(
        "tollhouse_limits_degraded",
        "1 while Redis is away and each process keeps to its share of the limits.",
        lambda: int(limits.degraded),
        across="max",
    )
    health = RedisHealth(url, states, replica_id=replica_id, now_ms=clock.now_ms, monotonic=clock.monotonic)
    bindings, learned, artifacts = RedisBindings(url), RedisLearned(url), RedisArtifacts(url)
    retries = RedisRetries(url, monotonic=clock.monotonic)
    runs = Runs()
    lengths = RedisRuns(url, runs)
    for store in (health, bindings, learned, artifacts, retries, lengths):
        await store.start()
        stack.push_async_callback(store.close)
    jobs.watch(health.run(), "shared health")
    jobs.watch(retries.run(), "shared retries")
    jobs.watch(lengths.run(), "shared runs")
    replicas = RedisReplicas(url, fleets.groups, own=replica_id, monotonic=clock.monotonic)
    stack.push_async_callback(replicas.close)
    fleets.shared = replicas
    jobs.watch(replicas.run(), "shared replicas")
    return Shared(limits, prefixes, health.changed, bindings, learned, artifacts, retries, runs)
