"""Servers of one's own in this process: places that follow their replicas, and what those cost beside what was charged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.admin.ports import GpuCost
from gateway.core.catalog import Catalog
from gateway.core.entry import Attempt, Outcome
from gateway.core.gpu_price import GpuMeter, GpuPrice
from gateway.core.replicas.group import Groups
from gateway.core.replicas.terms import Health
from gateway.pipeline.places import Places
from gateway.telemetry.metrics import Metrics

TICK_S = 1.0
_HOUR_MS = 3_600_000
_NO_USE = frozenset({Health.GONE, Health.UNREACHABLE, Health.DRAINED})


class GpuTier:
    """Counts once a second; `run` for ever.

    What replicas cost counts from the start of the process, and so does what was charged for their work: both are
    forgotten together. All processes see the same replicas, and each its own charges (`all_workers`).
    """

    def __init__(
        self, catalog: Callable[[], Catalog], metrics: Metrics, monotonic: Callable[[], float]
    ) -> None:
        self.groups = Groups()
        self._catalog = catalog
        self._monotonic = monotonic
        self._live: dict[str, int] = {}  # in use
        self._there: dict[str, int] = {}
        self._prices: dict[str, GpuPrice] = {}
        self.meter = GpuMeter()
        self.places = Places(live=self.live, waited=metrics.waited, monotonic=monotonic)
        self._add_metrics(metrics)
        self.tick()

    def live(self, deployment: str) -> int:
        """Replicas that are in use; of a deployment that lists none, there is one."""
        return self._live.get(deployment, 1)

    def costs(self) -> list[GpuCost]:
        """In the order of the configuration."""
        bills = self.meter.bills()
        return [
            GpuCost(
                name,
                self._there.get(name, 0),
                price.nano_usd_per_replica_hour,
                round(bills[name].replica_ms / _HOUR_MS, 4),
                bills[name].cost_nano_usd,
                bills[name].charged_nano_usd,
                bills[name].idle_nano_usd,
                round(bills[name].utilisation, 4),
                bills[name].sold_milli / 1_000,
            )
            for name, price in self._prices.items()
        ]

    def attempt(self, attempt: Attempt, outcome: Outcome) -> None:
        """An attempt has ended."""
        if attempt.deployment in self._prices:
            self.meter.charged(attempt.deployment, outcome.cost_nano_usd)

    async def run(self) -> None:
        """For ever, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Up to now, these replicas were there."""
        now_s = self._monotonic()
        there = self._there = {}
        for d in self._catalog().deployments:
            group = self.groups.get(d.name)
            if group is None:
                there[d.name] = 1 if d.replicas is None else 0
                continue
            shown = group.fleet.shown(now_s)
            there[d.name] = sum(r.health is not Health.GONE for r in shown)
            live = sum(r.health not in _NO_USE and r.address not in group.unfit for r in shown)
            if live != self._live.get(d.name):
                self._live[d.name] = live
                self.places.look(d.name)
        self._prices = {d.name: d.serving.gpu for d in self._catalog().deployments if d.serving.gpu}
        self.meter.tick(round(now_s * 1_000), self._prices, there)

    def _add_metrics(self, metrics: Metrics) -> None:
        bills = self.meter.bills
        metrics.gauge(
            "tollhouse_queue_waiting",
            "Calls that wait for a place at a deployment, by whether somebody waits for them.",
            self.places.waiting,
            ("deployment", "class"),
        )
        metrics.gauge(
            "tollhouse_gpu_replica_hours_total",
            "Hours for which replicas of a deployment with a `gpu` price were there, since this process began.",
            lambda: {(name,): bill.replica_ms / _HOUR_MS for name, bill in bills().items()},
            ("deployment",),
            only_grows=True,
            across="max",
        )
        metrics.gauge(
            "tollhouse_gpu_cost_usd_total",
            "What those hours cost.",
            lambda: {(name,): bill.cost_nano_usd for name, bill in bills().items()},
            ("deployment",),
            only_grows=True,
            across="max",
            nano=True,
        )
        metrics.gauge(
            "tollhouse_gpu_charged_usd_total",
            "What was charged for calls there; the difference to the cost is idle time.",
            lambda: {(name,): bill.charged_nano_usd for name, bill in bills().items()},
            ("deployment",),
            only_grows=True,
            nano=True,
        )
        metrics.gauge(
            "tollhouse_gpu_sold_share",
            "The share of an hour that a replica has to be busy for to charge what it costs.",
            lambda: {(name,): bill.sold_milli / 1_000 for name, bill in bills().items()},
            ("deployment",),
            across="max",
        )
