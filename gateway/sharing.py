"""What replicas tell one another of routing through Redis: who is well, and which cache is warm where."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from gateway.core.health import HealthState
from gateway.ports import Bindings, Clock
from gateway.storage.redis_bindings import RedisBindings
from gateway.storage.redis_health import RedisHealth
from gateway.tasks import Tasks


@dataclass(frozen=True, slots=True)
class Shared:
    health_changed: Callable[[Mapping[str, HealthState]], None]
    bindings: Bindings


async def share(
    url: str,
    states: MutableMapping[str, HealthState],
    *,
    replica_id: str,
    clock: Clock,
    jobs: Tasks,
    stack: AsyncExitStack,
) -> Shared:
    """Keep `states` in step with other replicas from now on."""
    health = RedisHealth(url, states, replica_id=replica_id, now_ms=clock.now_ms, monotonic=clock.monotonic)
    bindings = RedisBindings(url)
    for store in (health, bindings):
        await store.start()
        stack.push_async_callback(store.close)
    jobs.watch(health.run(), "shared health")
    return Shared(health.changed, bindings)
