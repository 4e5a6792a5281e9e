"""What an operator says of a server of his own (vLLM, SGLang): whose caches it keeps apart, what it takes, how long
its queue is, and what its hours cost."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gateway.core.gpu_price import GpuPrice


class CacheSalt(StrEnum):
    """Who shares cached prefixes with whom: the salt is hashed with them, so nobody else can read or probe them."""

    TENANT = "tenant"
    TEAM = "team"
    NONE = "none"  # everybody shares


class Urgency(StrEnum):
    """Whether somebody waits for an answer."""

    INTERACTIVE = "interactive"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """How calls wait for a place at a deployment. None: `waiting_max` = 4 for each place, `batch_wait_max_s` = as others.

    `batch_turn_after_s`: batch calls that have waited so long get every other place, whoever else waits.
    """

    wait_max_s: float = 10.0
    batch_wait_max_s: float | None = None
    waiting_max: int | None = None
    batch_turn_after_s: float = 5.0

    def longest_wait_s(self, urgency: Urgency) -> float:
        if urgency is Urgency.BATCH and self.batch_wait_max_s is not None:
            return self.batch_wait_max_s
        return self.wait_max_s


@dataclass(frozen=True, slots=True)
class Serving:
    """`cache_salt` None: per tenant where the provider's cache rules know a salt, else none is sent."""

    cache_salt: CacheSalt | None = None
    takes_priority: bool = False  # runs with --scheduling-policy priority
    concurrent_per_replica: int | None = None
    queue: QueuePolicy = QueuePolicy()
    gpu: GpuPrice | None = None


#: Nothing was said.
PLAIN = Serving()
