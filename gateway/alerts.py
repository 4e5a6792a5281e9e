"""What somebody is to be told: into the outbox beside the request that gave rise to it, and from there to a receiver."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

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

    def __init__(self, outbox: SqlOutbox, metrics: Metrics) -> None:
        self._outbox = outbox
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

    async def _count(self) -> None:
        """For ever, until cancelled: a scrape must not wait for the database."""
        while True:
            try:
                self._counts = await self._outbox.counts()
            except Unavailable as e:
                _log.warning("the outbox could not be counted: %s", e)
            await asyncio.sleep(COUNTED_EVERY_S)
