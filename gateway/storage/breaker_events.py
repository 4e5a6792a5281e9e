"""What breakers saw and did, with the evidence; and how a task that they stopped goes on, on every replica.

A stop that only a person can end pauses the task's row, so that the next admission refuses it wherever it asks. A
resumed one counts up the revision that all replicas poll; each then forgives what it has seen of that task itself.
All methods raise `Unavailable` when the store is down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from gateway.core.task import State
from gateway.storage import audit, budget_rows, task_rows
from gateway.storage.database import Database
from gateway.storage.transact import Fetch, Row, Sql, Tx, json_text

#: How the reason of a pause begins that a breaker gave.
BREAKER_REASON = "breaker "
SHOWN_MAX = 50
_ACTOR = "breaker"
_NOW = Sql("SELECT now_ms()")
#: The same episode again, after somebody let it go on, is open again.
_RECORD = Sql(
    "INSERT INTO breaker_event (event_id, task_id, key_id, breaker, action, tripped, message, evidence, at_ms) "
    "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT (event_id) DO UPDATE SET at_ms = excluded.at_ms, "
    "message = excluded.message, evidence = excluded.evidence, resumed_at_ms = NULL, resumed_by = NULL, "
    "revision = NULL WHERE breaker_event.resumed_at_ms IS NOT NULL"
)
_OF_TASK = Sql(
    "SELECT breaker, action, tripped, message, evidence, at_ms, resumed_at_ms, resumed_by FROM breaker_event "  # noqa: S608
    f"WHERE task_id = $1 ORDER BY at_ms DESC, event_id LIMIT {SHOWN_MAX}"
)
_OPEN = Sql(
    "SELECT DISTINCT task_id FROM breaker_event WHERE task_id = ANY($1::text[]) AND resumed_at_ms IS NULL"
)
_CLEAR = Sql(
    "UPDATE breaker_event SET resumed_at_ms = $2, resumed_by = $3, revision = $4 "
    "WHERE task_id = ANY($1::text[]) AND resumed_at_ms IS NULL"
)
_RESUMED = Sql("SELECT task_id, revision FROM breaker_event WHERE revision > $1")
_REVISION = Sql("SELECT number FROM revision")
_PAUSED = Sql("SELECT state_reason FROM task WHERE task_id = $1 AND state = 'paused_loop' FOR UPDATE")
_FORGET = Sql(
    "DELETE FROM breaker_event WHERE event_id IN (SELECT event_id FROM breaker_event WHERE at_ms < $1 "
    "ORDER BY at_ms LIMIT 1000) RETURNING 1"
)


@dataclass(frozen=True, slots=True)
class BreakerEvent:
    """One episode of one breaker; `resumed_*` is of whoever let the task go on."""

    breaker: str
    action: str
    tripped: bool
    message: str
    evidence: Mapping[str, str | int]
    at_ms: int
    resumed_at_ms: int | None
    resumed_by: str | None


class BreakerEvents:
    """Every process has one; they meet in the store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def record(self, kind: str, event_id: str, body: Mapping[str, Any], tell: bool) -> None:
        """Keep an episode; with `tell`, put it into the outbox; if `body` says so, pause its task. All or nothing."""
        await self._database.write(partial(_record, kind, event_id, body, tell))

    async def go_on(self, task_id: str, reason: str) -> bool:
        """Let a task go on that a breaker has paused. False if it is not paused, or not by a breaker."""
        return await self._database.write(partial(_go_on, task_id, reason))

    async def resumed(self, since: int) -> tuple[int, frozenset[str]]:
        """The revision now, and the tasks that were let go on after the revision `since` (-1: none asked for)."""
        return await self._database.read(partial(_resumed, since))

    async def forget(self, older_than_ms: int) -> int:
        """Delete up to 1,000 episodes that began so long ago. Returns how many."""
        return await self._database.write(partial(_forget, older_than_ms))


def of_task(task_id: str) -> Tx[list[BreakerEvent]]:
    """The latest first."""
    return [_event_of(row) for row in (yield Fetch(_OF_TASK, (task_id,)))]


def open_among(task_ids: Sequence[str]) -> Tx[list[str]]:
    """Those of these tasks that have episodes which nobody has let pass."""
    return sorted(row[0] for row in (yield Fetch(_OPEN, (list(task_ids),))))


def clear(task_ids: Sequence[str], actor: str, revision: int, now_ms: int) -> Tx[None]:
    """Somebody has looked at these tasks: replicas forgive them when they see the revision."""
    yield Fetch(_CLEAR, (list(task_ids), now_ms, actor, revision))


def _record(kind: str, event_id: str, body: Mapping[str, Any], tell: bool) -> Tx[None]:
    now_ms: int = (yield Fetch(_NOW))[0][0]
    task_id = body["task_id"]
    if body.get("pauses_task"):
        reason = f"{BREAKER_REASON}{body['breaker']}: {body['message']}"
        changed = yield from task_rows.change(State.PAUSED_LOOP, {task_id: reason})
        if changed:
            said = {"state": State.PAUSED_LOOP, "reason": reason, "tasks": changed}
            yield from audit.record(_ACTOR, "task.pause", f"task:{task_id}", said)
    yield Fetch(
        _RECORD,
        (
            event_id,
            task_id,
            body["key_id"],
            body["breaker"],
            body["action"],
            body["tripped"],
            body["message"],
            json_text(body["evidence"]),
            now_ms,
        ),
    )
    if tell:
        yield from budget_rows.announce([(kind, event_id, body)], now_ms)


def _go_on(task_id: str, reason: str) -> Tx[bool]:
    rows = yield Fetch(_PAUSED, (task_id,))
    if not rows or not rows[0][0].startswith(BREAKER_REASON):
        return False
    yield from task_rows.change(State.RUNNING, {task_id: ""}, State.PAUSED_LOOP)
    said = {"reason": reason, "tasks": [task_id]}
    revision, now_ms = yield from audit.record(_ACTOR, "task.resume", f"task:{task_id}", said)
    yield from clear([task_id], _ACTOR, revision, now_ms)
    return True


def _resumed(since: int) -> Tx[tuple[int, frozenset[str]]]:
    revision: int = (yield Fetch(_REVISION))[0][0]
    if since < 0:
        return revision, frozenset()
    rows = yield Fetch(_RESUMED, (since,))
    return max(revision, *(row[1] for row in rows)) if rows else revision, frozenset(row[0] for row in rows)


def _forget(older_than_ms: int) -> Tx[int]:
    now_ms: int = (yield Fetch(_NOW))[0][0]
    return len((yield Fetch(_FORGET, (now_ms - older_than_ms,))))


def _event_of(row: Row) -> BreakerEvent:
    breaker, action, tripped, message, evidence, *times = row
    said = msgspec.json.decode(evidence, type=dict[str, str | int])
    return BreakerEvent(breaker, action, bool(tripped), message, said, *times)
