"""What the admin API shows of servers of one's own, over all workers of a gateway: as a scrape adds them up.

Every worker sees the same replicas, so what they cost is counted once; each has calls and charges of its own, and those
are added. A worker that has died stays in what only grows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.admin.ports import GpuCost, ReplicaState
from gateway.core.gpu_price import GpuBill
from gateway.telemetry.page import Family, Labels

_HOUR_MS = 3_600_000
#: Fields of a `ReplicaState`, and the metrics that have the same of all workers, by deployment and replica.
_OF_ALL = {
    "active": "tollhouse_replica_active",
    "backlog_tokens": "tollhouse_replica_backlog_tokens",
    "sessions": "tollhouse_replica_sessions",
    "index_bytes": "tollhouse_replica_index_bytes",
    "prompt_tokens": "tollhouse_replica_prompt_tokens_total",
    "predicted_cached_tokens": "tollhouse_replica_predicted_cached_tokens_total",
    "reported_cached_tokens": "tollhouse_replica_reported_cached_tokens_total",
    "predictions": "tollhouse_replica_predictions_total",
    "predictions_close": "tollhouse_replica_predictions_close_total",
    "restarts": "tollhouse_replica_restarts_total",
    "aborts": "tollhouse_replica_aborts_total",
    "refusals": "tollhouse_replica_refusals_total",
    "lies": "tollhouse_replica_implausible_usage_total",
}
_PICKS = "tollhouse_replica_picks_total"

_Values = Mapping[str, Mapping[Labels, float]]


def costs_of_all(costs: Sequence[GpuCost], families: Sequence[Family]) -> list[GpuCost]:
    """`costs` are those of the worker that answers; `families` are of all."""
    values = _by_name(families)
    return [_cost(cost, values) for cost in costs]


def _cost(own: GpuCost, values: _Values) -> GpuCost:
    def of_all(name: str, default: float) -> float:
        return values.get(f"tollhouse_gpu_{name}_total", {}).get((own.deployment,), default)

    hours = of_all("replica_hours", own.replica_hours)
    bill = GpuBill(
        round(hours * _HOUR_MS),
        int(of_all("cost_usd", own.cost_usd)),
        int(of_all("charged_usd", own.charged_usd)),
        round(own.sold_share * 1_000),
    )
    return own._replace(
        replica_hours=round(hours, 4),
        cost_usd=bill.cost_nano_usd,
        charged_usd=bill.charged_nano_usd,
        idle_usd=bill.idle_nano_usd,
        utilisation=round(bill.utilisation, 4),
    )


def rows_of_all(rows: Sequence[ReplicaState], families: Sequence[Family]) -> list[ReplicaState]:
    """`peer_*` is then what gateways elsewhere have told; what lies in an index is of the worker that answers."""
    values = _by_name(families)
    return [_row(row, values) for row in rows]


def _row(own: ReplicaState, values: _Values) -> ReplicaState:
    place = (own.deployment, own.replica)
    added: dict[str, Any] = {
        field: int(values[name][place]) for field, name in _OF_ALL.items() if place in values.get(name, {})
    }
    active, backlog = added.get("active", own.active), added.get("backlog_tokens", own.backlog_tokens)
    picks = {labels[2]: int(count) for labels, count in values.get(_PICKS, {}).items() if labels[:2] == place}
    return own._replace(
        **added,
        # Other workers are among the peers that a common Redis tells of.
        peer_active=max(0, own.active + own.peer_active - active),
        peer_backlog_tokens=max(0, own.backlog_tokens + own.peer_backlog_tokens - backlog),
        picks=picks or own.picks,
    )


def _by_name(families: Sequence[Family]) -> _Values:
    return {f.name: {sample.labels: sample.value for sample in f.samples} for f in families}
