"""What somebody is to be told: into the outbox beside the request that gave rise to it, and from there to a receiver."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Mapping

from gateway.core.breakers import Mode
from gateway.core.errors import Unavailable
from gateway.core.webhook import secret_of
from gateway.jobs.receivers import Receiver, Receivers
from gateway.jobs.webhooks import Counts, Outbox, Webhooks
from gateway.settings import WebhookSpec
from gateway.storage.breaker_events import BreakerEvents
from gateway.storage.outbox import OutboxCounts, SqlOutbox
from gateway.storage.receivers import SqlReceivers
from gateway.tasks import Tasks
from gateway.telemetry.metrics import Metrics

COUNTED_EVERY_S = 15.0
#: What a breaker saw while the database was away is kept when it is back, if that is soon, and of so many at once.
RETRIES_S = (1.0, 4.0, 15.0)
WAITING_MAX = 1_000
_log = logging.getLogger("gateway")


class Alerts:
    """Every replica has one; what one of them is delivering, the others skip."""

    def __init__(self, outbox: SqlOutbox, events: BreakerEvents, metrics: Metrics, tasks: Tasks) -> None:
        self._outbox = outbox
        self._events = events
        self._tasks = tasks
        self._metrics = metrics
        self._counted: list[Callable[[], Awaitable[OutboxCounts]]] = []
        self._counts: list[OutboxCounts] = []
        self._waiting = 0
        self._sent = Counts()
        self._receivers: Receivers | None = None
        metrics.gauge(
            "tollhouse_webhooks_total",
            "Attempts to deliver an alert, by how they ended.",
            lambda: {
                ("delivered",): self._sent.delivered,
                ("failed",): self._sent.failed,
                ("refused",): self._sent.refused,
                ("dead",): self._sent.dead,
            },
            ("outcome",),
            only_grows=True,
        )
        metrics.gauge(
            "tollhouse_outbox_messages",
            "Alerts in the database for each webhook, by state.",
            lambda: {
                ("pending",): sum(c.pending for c in self._counts),
                ("dead",): sum(c.dead for c in self._counts),
            },
            ("state",),
            across="max",
        )
        metrics.gauge(
            "tollhouse_outbox_oldest_seconds",
            "Age of the oldest alert that waits for delivery.",
            lambda: max((c.oldest_pending_ms for c in self._counts), default=0) / 1_000,
            across="max",
        )

    def deliver_added(
        self,
        store: SqlReceivers,
        jobs: Tasks,
        *,
        pepper: bytes,
        now_ms: Callable[[], int],
        loopback: bool = False,
    ) -> None:
        """Start to deliver to the webhooks that people added."""

        def make(it: Receiver, outbox: Outbox) -> Webhooks:
            return Webhooks(
                outbox,
                url=it.url,
                secret=secret_of(pepper, it.webhook_id, it.secret_version).encode(),
                now_ms=now_ms,
                random=random.Random().random,
                loopback=loopback,
                counts=self._sent,
            )

        self._receivers = Receivers(store, make)
        jobs.watch(self._receivers.run(), "added webhooks")
        self._counted.append(store.counts)
        jobs.watch(self._count(), "outbox counts")

    def wake(self) -> None:
        """Something changed in the store."""
        if self._receivers is not None:
            self._receivers.wake()

    def deliver(
        self, spec: WebhookSpec, jobs: Tasks, *, now_ms: Callable[[], int], loopback: bool = False
    ) -> None:
        """Start to deliver what the outbox holds. `loopback`: for tests, a receiver at 127.0.0.1 is allowed."""
        webhooks = Webhooks(
            self._outbox,
            url=spec.url,
            secret=spec.secret.reveal().encode(),
            now_ms=now_ms,
            random=random.Random().random,
            loopback=loopback,
            counts=self._sent,
        )
        jobs.watch(webhooks.run(), "webhooks")
        self._counted.append(self._outbox.counts)

    def breaker(self, kind: str, event_id: str, body: Mapping[str, object]) -> None:
        """What a breaker has to say (`pipeline.exchange.World.alert`): counted, kept, and unless it only observes, told."""
        self._metrics.breaker(str(body["breaker"]), str(body["action"]))
        self._tasks.watch(self._keep(kind, event_id, body), "breaker")

    async def _keep(self, kind: str, event_id: str, body: Mapping[str, object]) -> None:
        for pause_s in (*RETRIES_S, None):
            try:
                await self._events.record(kind, event_id, body, tell=body["action"] != Mode.OBSERVE)
                return
            except Unavailable as e:
                if pause_s is None or self._waiting >= WAITING_MAX:
                    _log.warning("nobody will be told that %s: %s", body["message"], e)
                    return
                self._waiting += 1
                try:
                    await asyncio.sleep(pause_s)
                finally:
                    self._waiting -= 1

    def tell(self, kind: str, dedupe: str, body: Mapping[str, object]) -> None:
        """What is no breaker's (`pipeline.exchange.World.tell`)."""
        if kind == "credential_refused":  # the log has it too: there may be no receiver
            _log.warning("%s", body["message"])
        self._tasks.watch(self._put(kind, dedupe, body), "alert")

    async def _put(self, kind: str, dedupe: str, body: Mapping[str, object]) -> None:
        try:
            await self._outbox.put([(kind, dedupe, body)])
        except Unavailable as e:
            _log.warning("nobody will be told that %s: %s", body["message"], e)

    async def _count(self) -> None:
        """For ever, until cancelled: a scrape must not wait for the database."""
        while True:
            try:
                self._counts = [await counted() for counted in self._counted]
            except Unavailable as e:
                _log.warning("the outbox could not be counted: %s", e)
            await asyncio.sleep(COUNTED_EVERY_S)
