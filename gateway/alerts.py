"""What somebody is to be told: into the outbox beside the request that gave rise to it, and from there to a receiver."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping

from gateway.core.breakers import Mode
from gateway.core.errors import Unavailable
from gateway.jobs.webhooks import Webhooks
from gateway.settings import WebhookSpec
from gateway.storage.outbox import OutboxCounts, SqlOutbox
from gateway.tasks import Tasks
from gateway.telemetry.metrics import Metrics

COUNTED_EVERY_S = 15.0
_log = logging.getLogger("gateway")


class Alerts:
    """Every replica has one; what one of them is delivering, the others skip."""

    def __init__(self, outbox: SqlOutbox, metrics: Metrics, tasks: Tasks) -> None:
        self._outbox = outbox
        self._tasks = tasks
        self._metrics = metrics
        self._counts = OutboxCounts(0, 0, 0, 0)

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
        )
        jobs.watch(webhooks.run(), "webhooks")
        jobs.watch(self._count(), "outbox counts")
        self._metrics.gauge(
            "tollhouse_webhooks_total",
            "Attempts to deliver an alert, by how they ended.",
            lambda: {
                ("delivered",): webhooks.counts.delivered,
                ("failed",): webhooks.counts.failed,
                ("refused",): webhooks.counts.refused,
                ("dead",): webhooks.counts.dead,
            },
            ("outcome",),
            only_grows=True,
        )
        self._metrics.gauge(
            "tollhouse_outbox_messages",
            "Alerts in the database, by state.",
            lambda: {("pending",): self._counts.pending, ("dead",): self._counts.dead},
            ("state",),
        )
        self._metrics.gauge(
            "tollhouse_outbox_oldest_seconds",
            "Age of the oldest alert that waits for delivery.",
            lambda: self._counts.oldest_pending_ms / 1_000,
        )

    def breaker(self, kind: str, dedupe: str, body: Mapping[str, object]) -> None:
        """What a breaker has to say (`pipeline.exchange.World.alert`): counted, and unless it only observes, told."""
        action = str(body["action"])
        self._metrics.breaker(str(body["breaker"]), action)
        if action != Mode.OBSERVE:
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
                self._counts = await self._outbox.counts()
            except Unavailable as e:
                _log.warning("the outbox could not be counted: %s", e)
            await asyncio.sleep(COUNTED_EVERY_S)
