"""Why a request was or was not read from its provider's cache, for whoever may know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.core.cache_rules import CacheRules
from gateway.core.catalog import Catalog
from gateway.core.entry import ROUTE_NOTE
from gateway.core.errors import NotFound
from gateway.core.identity import KeyRecord
from gateway.core.misses import rules_for
from gateway.core.money import usd_text
from gateway.core.prefix_report import attempt_report
from gateway.storage import reports
from gateway.storage.database import Database

#: How long explanations are kept: as long as somebody compares one month with the next.
KEEP_MISSES_MS = 62 * 86_400_000
_ID_CHARS_MAX = 200


class Explained:
    """`catalog` and `rules` tell what the cache of a deployment does. Raises `Unavailable` when the store is down."""

    def __init__(
        self, database: Database, catalog: Callable[[], Catalog], rules: Callable[[], CacheRules]
    ) -> None:
        self._database = database
        self._catalog = catalog
        self._rules = rules

    async def request(self, request_id: str, key: KeyRecord | None = None) -> dict[str, Any]:
        """One request, attempt by attempt. With a key only its own, with that of a task only the task's and its
        children's: of all others `NotFound`, whether they exist or not.
        """
        entries = await self._entries(request_id, key)
        misses = await reports.explanations(self._database, request_id)
        now_ms = self._database.clock.now_ms()
        deployments = {d.name: d for d in self._catalog().deployments}
        return {
            "object": "request.prefix",
            "request_id": request_id,
            "task_id": entries[0]["task_id"],
            "attempts": [
                attempt_report(
                    e,
                    misses.get(e["attempt_id"]),
                    rules_for(self._rules(), deployments.get(e["deployment"]), e["at_ms"]),
                    kept=now_ms - e["at_ms"] < KEEP_MISSES_MS,
                )
                for e in entries
            ],
        }

    async def route(self, request_id: str, key: KeyRecord | None = None) -> dict[str, Any]:
        """Where one request went and why, attempt by attempt; for whom, as `request`."""
        entries = await self._entries(request_id, key)
        last = entries[-1]
        return {
            "object": "request",
            "id": request_id,
            "task_id": last["task_id"],
            "task_step": last["step"],
            "model_requested": last["model_requested"],
            "model": last["model"],
            "tier": last["tier"],
            "deployment": last["deployment"],
            "replica": last["served_by"],
            "rule": last["rule"] or None,
            "reason": reason_in(last["note"]),
            "cost_usd": usd_text(sum(e["amount_nano_usd"] for e in entries)),
            "retries_cost_usd": usd_text(sum(e["amount_nano_usd"] for e in entries[:-1])),
            "attempts": [
                {
                    "id": e["attempt_id"],
                    "no": e["attempt_no"],
                    "model": e["model"],
                    "provider": e["provider"],
                    "tier": e["tier"],
                    "deployment": e["deployment"],
                    "replica": e["served_by"],
                    "status": e["status"],
                    "finish": e["finish"],
                    "error": e["error"] or None,
                    "latency_ms": e["latency_ms"],
                    "cost_usd": usd_text(e["amount_nano_usd"]),
                }
                for e in entries
            ],
        }

    async def _entries(self, request_id: str, key: KeyRecord | None) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        if 0 < len(request_id) <= _ID_CHARS_MAX and request_id.isprintable():
            entries = await reports.entries(self._database, request_id=request_id)
        entries = [e for e in entries if e["kind"] != "correct" and (key is None or _is_own(e, key))]
        if not entries:
            raise NotFound(f"there is no request {request_id[:_ID_CHARS_MAX]}")
        return entries

    async def task(self, task_id: str) -> dict[str, Any]:
        """What a task lost to prompts that were not read from a cache, by cause, and what caches saved it."""
        rows = await reports.misses(self._database, by=(), task_id=task_id)
        cost, list_cost = await reports.task_costs(self._database, task_id)
        return {
            "saved_usd": usd_text(list_cost - cost),
            "lost_usd": usd_text(sum(row.lost_nano_usd for row in rows)),
            "misses": [
                {
                    "cause": row.cause,
                    "attempts": row.attempts,
                    "lost_tokens": row.lost_tokens,
                    "lost_usd": usd_text(row.lost_nano_usd),
                }
                for row in rows
            ],
        }


def reason_in(note: str) -> str | None:
    """Why a request was routed as it was, from its entry's note; None where nothing had to be decided."""
    _, found, reason = note.rpartition(ROUTE_NOTE)
    return reason if found else None


def _is_own(entry: dict[str, Any], key: KeyRecord) -> bool:
    if entry["key_id"] != (key.declared_by or key.key_id):
        return False
    return key.task_id is None or key.task_id in (entry["task_id"], entry["parent_task_id"])
