"""What servers of one's own cost beside what was charged for calls there, as the gateway that answers counts it."""

from __future__ import annotations

from gateway.admin.call import Call, Reply
from gateway.admin.route import Route
from gateway.admin.shown import Out, UsdOut, shown
from gateway.core.offices import Right


class GpuCostOut(Out):
    """Of a deployment whose price is by the replica-hour, since this gateway began. `replicas` are there now, in use or not;
    `replica_hours` and `cost_usd` are what they were there for and cost; `charged_usd` is what this gateway charged for calls
    there (all its workers), and `idle_usd` the difference (negative where they were busier than their price assumes). `utilisation` is the
    share of their time that was paid for, where `sold_share` is the share at which charges pay for all of it. Other
    gateways see the same replicas and have charges of their own: the metrics tell the whole.
    """

    deployment: str
    replicas: int
    usd_per_replica_hour: UsdOut
    replica_hours: float
    cost_usd: UsdOut
    charged_usd: UsdOut
    idle_usd: UsdOut
    utilisation: float
    sold_share: float


async def list_costs(call: Call) -> Reply:
    """By deployment, in the order of the configuration; corrections that come after an attempt's end are not in it."""
    rows = [shown(GpuCostOut.model_validate(row._asdict())) for row in await call.deps.gpu_costs()]
    return Reply({"data": rows, "has_more": False, "next_cursor": None})


ROUTES = (Route("GET", "/gpu", list_costs, Right.READ, "configuration", GpuCostOut, listed=True),)
