"""What a scrape can read of routing (health, places, retries) and of the ledger's writing."""

from __future__ import annotations

from gateway.core.health import Status
from gateway.pipeline.exchange import World
from gateway.storage.ledger import SqlLedger
from gateway.telemetry.metrics import Metrics


def add_gauges(metrics: Metrics, world: World) -> None:
    """Subjects are deployments, and credentials as "credential:<name>"."""

    def available() -> dict[tuple[str, ...], float]:
        now_s = world.clock.monotonic()
        found: dict[tuple[str, ...], float] = {(d.name,): 1.0 for d in world.catalog().deployments}
        for name, state in world.health.items():
            found[name,] = float(state.status(now_s) is Status.CLOSED)
        return found

    def status() -> dict[tuple[str, ...], float]:
        now_s = world.clock.monotonic()
        found = {d.name: Status.CLOSED for d in world.catalog().deployments}
        found |= {name: state.status(now_s) for name, state in world.health.items()}
        return {(name, is_now.value): 1.0 for name, is_now in found.items()}

    metrics.gauge(
        "tollhouse_deployment_status",
        "1 for the status that it has: closed (in use), open (ejected), cooling, half_open, probing, drained.",
        status,
        ("subject", "status"),
        across="max",
    )
    metrics.gauge(
        "tollhouse_deployment_available",
        "1 if calls go there; 0 while it is ejected, cools, is probed or was drained.",
        available,
        ("subject",),
        across="min",
    )
    metrics.gauge(
        "tollhouse_deployment_places",
        "Calls inside of a deployment with a limit, and waiting for it.",
        world.places.counts,
        ("deployment", "where"),
    )
    metrics.gauge(
        "tollhouse_retries_refused_total",
        "Attempts that were not tried again because the retry budget was used up.",
        lambda: float(world.retries.refused),
        only_grows=True,
    )
    metrics.gauge(
        "tollhouse_answers_given_again_total",
        "Requests that were answered from the response cache.",
        lambda: float(world.answers.given),
        only_grows=True,
    )


def add_ledger_gauges(metrics: Metrics, ledger: SqlLedger) -> None:
    """How well the ledger reaches its store."""
    metrics.gauge(
        "tollhouse_held_usd_total",
        "Money held for attempts before they were sent; what they cost then is tollhouse_cost_usd_total.",
        lambda: ledger.held_nano_usd,
        only_grows=True,
        nano=True,
    )
    metrics.gauge(
        "tollhouse_ledger_available",
        "1 if holds can be made; 0 while the store cannot be reached and requests are refused.",
        lambda: float(ledger.available),
        across="min",
    )
    metrics.gauge(
        "tollhouse_ledger_queue",
        "Holds (admit) and settlements (settle): those that wait, and transactions under way (flights).",
        ledger.queues,
        ("batcher", "what"),
    )
    metrics.gauge(
        "tollhouse_journal_records",
        "Settlements of this process that wait for the store.",
        lambda: float(ledger.journal_records),
    )
