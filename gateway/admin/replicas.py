"""Replicas of deployments that have several, as the gateway that answers sees them: to look at, to drain."""

from __future__ import annotations

from typing import Any, get_type_hints

from pydantic import create_model

from gateway.admin.call import Call, Reply
from gateway.admin.ports import ReplicaState
from gateway.admin.problems import not_found
from gateway.admin.route import Route
from gateway.admin.schemas import In, Name
from gateway.admin.shown import Out, shown
from gateway.core.offices import Right

_FIELDS: Any = {name: (hint, ...) for name, hint in get_type_hints(ReplicaState).items()}
ReplicaOut = create_model(
    "ReplicaOut",
    __base__=Out,
    __doc__="""`replica` is host and port, `name` what clients read in `x-replica`. `health`: ready, returning (gets little at
    first), full, cooling (has failed or refused lately), unreachable, drained, gone, new (not asked yet) or unfit
    (`why` says what it serves instead). `waiting`, `running`, `kv_usage` and `kv_tokens` are what it says itself,
    `seen_age_s` ago; null if it does not. `active` and `backlog_tokens` (uncached prompt tokens whose answer has
    not begun) are calls of this gateway (all its workers), `peer_*` of others that share a Redis with it. Sums of
    tokens are since it joined: of `prompt_tokens`, how many this gateway expected in its cache and how many it read
    from there; `predictions_close` of `predictions` were less than one block apart.
    """,
    **_FIELDS,
)


class ReplicaIn(In):
    """`replica` is its address, its host and port, or its name."""

    deployment: Name
    replica: Name


def _out(row: ReplicaState) -> Out:
    return ReplicaOut.model_validate(row._asdict())


async def list_replicas(call: Call) -> Reply:
    """By deployment and address; one that is gone stays for a minute, because its cache may come back."""
    rows = [shown(_out(row)) for row in await call.deps.replicas()]
    return Reply({"data": rows, "has_more": False, "next_cursor": None})


async def drain_replica(call: Call) -> Reply:
    """Nothing new is sent there; what it works on goes on. Every gateway follows within a second if they share a Redis."""
    return await _change(call, drained=True)


async def undrain_replica(call: Call) -> Reply:
    """It gets calls again, few at first."""
    return await _change(call, drained=False)


async def _change(call: Call, *, drained: bool) -> Reply:
    wanted = ReplicaIn.model_validate(call.body)
    address = call.deps.drain_replica(wanted.deployment, wanted.replica, drained, call.admin.actor)
    if address is None:
        raise not_found(f"replica of {wanted.deployment}: {wanted.replica}")
    action = "replica.drain" if drained else "replica.undrain"
    await call.registry.note(action, wanted.deployment, {"replica": address})
    (row,) = (
        row
        for row in await call.deps.replicas()
        if (row.deployment, row.address) == (wanted.deployment, address)
    )
    return Reply(shown(_out(row)))


ROUTES = (
    Route("GET", "/replicas", list_replicas, Right.READ, "configuration", ReplicaOut, listed=True),
    Route("POST", "/replicas/drain", drain_replica, Right.OPERATE, "configuration", ReplicaOut, ReplicaIn),
    Route(
        "POST", "/replicas/undrain", undrain_replica, Right.OPERATE, "configuration", ReplicaOut, ReplicaIn
    ),
)
