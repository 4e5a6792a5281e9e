"""Which agents and libraries are told apart, by what, and what each of them did. They are part of the release: a request
says by itself which client it is from, and nothing else hangs on that.
"""

from __future__ import annotations

from typing import Any

from gateway.admin.call import Call, Json, Reply
from gateway.admin.problems import invalid, not_found
from gateway.admin.records import listed
from gateway.admin.route import PAGED, Route, moment
from gateway.admin.shown import Out, UsdOut, shown
from gateway.core.clients import CLIENTS, is_library, signatures
from gateway.core.offices import Right
from gateway.core.usage_facts import Question, UsageBucket

_HOUR_MS = 3_600_000
_MONTH_MS = 30 * 24 * _HOUR_MS


class ClientOut(Out):
    """An agent or a library (`library`: agents on top of it may not say who they are), what it is known by, and what it
    did over [since, until), the last 30 days by default, in whole hours.
    """

    client: str
    library: bool
    known_by: list[str]
    attempts: int
    errors: int
    retries: int
    cost_usd: UsdOut
    list_cost_usd: UsdOut
    tokens: dict[str, int]


async def list_clients(call: Call) -> Reply:
    """The costliest first."""
    rows = await _clients(call)
    return await listed(call, [shown(row) for row in sorted(rows, key=lambda r: (-r.cost_usd, r.client))])


async def get_client(call: Call) -> Reply:
    for row in await _clients(call):
        if row.client == call.path["client"]:
            return Reply(shown(row))
    raise not_found(f"client: {call.path['client'][:200]}")


async def _clients(call: Call) -> list[ClientOut]:
    now_ms = call.deps.now_ms()
    until_ms = -(-call.params.get("until", now_ms) // _HOUR_MS) * _HOUR_MS
    since_ms = call.params.get("since", max(0, until_ms - _MONTH_MS)) // _HOUR_MS * _HOUR_MS
    if since_ms >= until_ms:
        raise invalid("until", "must be after since")
    question = Question(("client",), (since_ms, until_ms))
    found, _ = await call.registry.usage(question, None, 1_000)
    by_client = {bucket.group["client"]: bucket for bucket in found}
    return [_row(name, by_client.get(name)) for name in sorted(CLIENTS | by_client.keys()) if name]


def _row(name: str, did: UsageBucket | None) -> ClientOut:
    counted: Json = {}
    if did is not None:
        counted = {
            "attempts": did.attempts,
            "errors": did.errors,
            "retries": did.retries,
            "cost_usd": did.cost_nano_usd,
            "list_cost_usd": did.list_cost_nano_usd,
            "tokens": dict(did.tokens),
        }
    nothing: dict[str, Any] = {
        **dict.fromkeys(("attempts", "errors", "retries", "cost_usd", "list_cost_usd"), 0),
        "tokens": {},
    }
    return ClientOut(
        client=name, library=is_library(name), known_by=list(signatures(name)), **{**nothing, **counted}
    )


_TIMES = (moment("since"), moment("until", "exclusive"))
ROUTES = (
    Route("GET", "/clients", list_clients, Right.READ, "clients", ClientOut, params=(*_TIMES, *PAGED), listed=True),
    Route("GET", "/clients/{client}", get_client, Right.READ, "clients", ClientOut, params=_TIMES),
)  # fmt: skip
