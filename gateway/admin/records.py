"""What can only be read: the ledger, requests, the audit trail, misses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.admin.call import PAGE, Call, Json, Reply
from gateway.admin.problems import not_found
from gateway.admin.route import PAGED, Param, Route, moment, text
from gateway.admin.shown import AuditOut, entry_out, miss_out, shown
from gateway.core.errors import NotFound
from gateway.core.offices import Page, Right

_END_OF_TIME_MS = 2**53

# --- what happened --------------------------------------------------------------------------------------------


async def list_ledger(call: Call) -> Reply:
    """Entries, the latest first: one terminal one for every attempt, and corrections."""
    return await call.page(call.registry.entries, entry_out)


async def get_request(call: Call) -> Reply:
    """Every ledger entry of one request, in the order of its attempts, and how it fared with its provider's cache."""
    request_id = call.path["request_id"]
    page = await call.registry.entries({"request_id": request_id}, None, PAGE)
    if not page.rows:
        raise not_found(f"request in the ledger: {request_id[:200]}")
    try:
        prefix: Json | None = await call.deps.prefix(request_id)
    except NotFound:
        prefix = None
    rows = sorted(page.rows, key=lambda e: (e["attempt_no"], e["kind"] == "correct", e["posted_at_ms"]))
    return Reply({"request_id": request_id, "entries": [entry_out(row) for row in rows], "prefix": prefix})


async def get_prefix(call: Call) -> Reply:
    """Whether a request was read from its provider's cache, attempt by attempt, and why not."""
    request_id = call.path["request_id"]
    if not (await call.registry.entries({"request_id": request_id}, None, 1)).rows:
        raise not_found(f"request in the ledger: {request_id[:200]}")
    return Reply(await call.deps.prefix(request_id))


async def misses(call: Call) -> Reply:
    """What was lost over [since, until) by prompts that were not read from a cache, by the keys in `by` and the cause."""
    by = call.params.get("by", ("team",))
    reach = call.admin.reach
    team_id = call.params.get("team_id", "")
    if reach.team_id and team_id not in ("", reach.team_id):
        return Reply({"data": []})
    rows = await call.deps.misses(
        by=by,
        from_ms=call.params.get("since", 0),
        to_ms=call.params.get("until", _END_OF_TIME_MS),
        tenant_id=reach.tenant_id,
        team_id=reach.team_id or team_id,
        key_id=call.params.get("key_id", ""),
        task_id=call.params.get("task_id", ""),
    )
    return Reply({"data": [miss_out(by, row) for row in rows]})


async def list_audit(call: Call) -> Reply:
    """Who changed what, the latest first."""
    return await call.page(call.registry.audit, lambda entry: shown(AuditOut.of(entry)))


async def listed(call: Call, rows: Sequence[Json]) -> Reply:
    """A list that is in memory, in pages like any other."""

    async def part(_: Mapping[str, Any], after: Any, limit: int) -> Page[Json]:
        begin = after[0] if after else 0
        end = begin + limit
        return Page(rows[begin:end], (end,) if end < len(rows) else None)

    return await call.page(part, dict)


def _words(name: str) -> Param:
    """As `tollhouse usage --misses --by`; which words there are is known to the store."""

    def parse(given: str) -> tuple[str, ...]:
        found: Iterable[str] = (word.strip() for word in given.split(","))
        return tuple(dict.fromkeys(word for word in found if word))

    return Param(name, parse, {"type": "string"}, "words with commas between", many=True)


_TIMES = (moment("since"), moment("until", "exclusive"))
_LEDGER = tuple(
    text(name)
    for name in ("request_id", "task_id", "key_id", "team_id", "tenant_id", "model", "kind", "error")
)
ROUTES = (
    Route("GET", "/ledger", list_ledger, Right.READ, "requests", params=(*_LEDGER, *_TIMES, *PAGED), listed=True),
    Route("GET", "/requests/{request_id}", get_request, Right.READ, "requests"),
    Route("GET", "/requests/{request_id}/prefix", get_prefix, Right.READ, "requests"),
    Route("GET", "/misses", misses, Right.READ, "usage", params=(_words("by"), text("team_id"), text("key_id"), text("task_id"), *_TIMES)),
    Route("GET", "/audit", list_audit, Right.OPERATE, "audit", AuditOut, params=(text("actor"), text("action"), text("subject"), *_TIMES, *PAGED), listed=True),
)  # fmt: skip
