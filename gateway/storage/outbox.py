"""The outbox: messages that a transaction left for somebody outside, until they are delivered or given up.

A message is claimed for a while by whoever delivers it; when that time is over and nothing was said, it is due
again. So a process that dies between delivery and mark causes a second delivery, never a lost message. Rows of
others are skipped, not waited for. All methods raise `Unavailable` when the store is down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway.core.webhook import Message
from gateway.storage import budget_rows
from gateway.storage.database import Database
from gateway.storage.transact import Fetch, Sql, Tx

_NOW = Sql("SELECT now_ms()")
_CLAIM = Sql(
    "UPDATE outbox SET attempts = attempts + 1, next_at_ms = now_ms() + $2 WHERE outbox_id IN "
    "(SELECT outbox_id FROM outbox WHERE delivered_at_ms IS NULL AND dead_at_ms IS NULL "
    "AND next_at_ms <= now_ms() ORDER BY next_at_ms, outbox_id LIMIT $1 FOR UPDATE SKIP LOCKED) "
    "RETURNING outbox_id, kind, dedupe, body, created_at_ms, attempts, now_ms() - created_at_ms"
)
_DELIVERED = Sql(
    "UPDATE outbox SET delivered_at_ms = now_ms(), dead_at_ms = NULL, last_error = '' "
    "WHERE outbox_id = $1 AND delivered_at_ms IS NULL"
)
#: Only while the claim is this one's: another may have taken over, and even delivered.
_LATER = Sql(
    "UPDATE outbox SET next_at_ms = now_ms() + $3, last_error = $4 "
    "WHERE outbox_id = $1 AND attempts = $2 AND delivered_at_ms IS NULL"
)
_DEAD = Sql(
    "UPDATE outbox SET dead_at_ms = now_ms(), last_error = $3 "
    "WHERE outbox_id = $1 AND attempts = $2 AND delivered_at_ms IS NULL"
)
_COUNTS = Sql(
    "SELECT count(*), coalesce(sum(CASE WHEN delivered_at_ms IS NOT NULL THEN 1 ELSE 0 END), 0), "
    "coalesce(sum(CASE WHEN dead_at_ms IS NOT NULL THEN 1 ELSE 0 END), 0), "
    "coalesce(now_ms() - min(CASE WHEN delivered_at_ms IS NULL AND dead_at_ms IS NULL THEN created_at_ms END), 0) "
    "FROM outbox"
)
_LIST_DEAD = Sql(
    "SELECT outbox_id, kind, dedupe, body, created_at_ms, dead_at_ms, attempts, last_error FROM outbox "
    "WHERE dead_at_ms IS NOT NULL ORDER BY dead_at_ms DESC, outbox_id LIMIT $1"
)
_FORGET = Sql(
    "DELETE FROM outbox WHERE outbox_id IN (SELECT outbox_id FROM outbox "
    "WHERE coalesce(delivered_at_ms, dead_at_ms) < $1 ORDER BY outbox_id LIMIT 1000) RETURNING 1"
)
_FORGET_DELIVERIES = Sql("DELETE FROM webhook_delivery WHERE created_at_ms < $1")
_FORGET_WAITING = Sql(
    "DELETE FROM outbox WHERE outbox_id IN (SELECT outbox_id FROM outbox WHERE delivered_at_ms IS NULL "
    "AND dead_at_ms IS NULL AND created_at_ms < $1 ORDER BY outbox_id LIMIT 1000) RETURNING 1"
)
#: Ids sort by time.
_TRIM = Sql(
    "DELETE FROM outbox WHERE outbox_id IN (SELECT outbox_id FROM outbox ORDER BY outbox_id LIMIT $1) RETURNING 1"
)
_SIZE = Sql("SELECT count(*) FROM outbox")


@dataclass(frozen=True, slots=True)
class OutboxCounts:
    """Messages by state, and the age of the oldest that still waits."""

    pending: int
    delivered: int
    dead: int
    oldest_pending_ms: int


@dataclass(frozen=True, slots=True)
class DeadMessage:
    """A message that was given up. `body` is JSON; `error` says how its last attempt failed."""

    message_id: str
    kind: str
    dedupe: str
    body: str
    created_at_ms: int
    dead_at_ms: int
    attempts: int
    error: str


class SqlOutbox:
    """What `jobs.webhooks.Outbox` promises, and what operators see of it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def put(self, messages: Sequence[tuple[str, str, Mapping[str, Any]]]) -> None:
        """Add (kind, dedupe, body); a second message of the same `dedupe` is dropped."""
        await self._database.write(partial(_put, messages))

    async def claim(self, most: int, lease_ms: int) -> Sequence[Message]:
        """Up to `most` messages that are due; nobody else gets them for `lease_ms`."""
        return await self._database.write(partial(_claim, most, lease_ms))

    async def delivered(self, message: Message) -> None:
        """Done, whoever has claimed it meanwhile."""
        await self._run(_DELIVERED, message.message_id)

    async def later(self, message: Message, delay_ms: int, error: str) -> None:
        """Not delivered: due again in `delay_ms`."""
        await self._run(_LATER, message.message_id, message.attempts, delay_ms, error)

    async def dead(self, message: Message, error: str) -> None:
        """Given up; it stays where operators see it."""
        await self._run(_DEAD, message.message_id, message.attempts, error)

    async def forget(self, older_than_ms: int) -> int:
        """Delete up to 1,000 messages that were delivered or given up that long ago. Returns how many."""
        return await self._database.write(partial(_forget, older_than_ms))

    async def forget_waiting(self, older_than_ms: int) -> int:
        """Delete up to 1,000 messages that have waited that long: for where nobody delivers. Returns how many."""
        return await self._database.write(partial(_forget_waiting, older_than_ms))

    async def trim(self, most: int) -> int:
        """Delete up to 1,000 of the oldest if there are more than `most`, whatever became of them. Returns how many."""
        return await self._database.write(partial(_trim, most))

    async def counts(self) -> OutboxCounts:
        return await self._database.read(_counts)

    async def dead_messages(self, most: int = 100) -> list[DeadMessage]:
        """Those given up, the latest first."""
        return await self._database.read(partial(_list_dead, most))

    async def _run(self, sql: Sql, *args: Any) -> None:
        def tx() -> Tx[None]:
            yield Fetch(sql, args)

        await self._database.write(tx)


def _put(messages: Sequence[tuple[str, str, Mapping[str, Any]]]) -> Tx[None]:
    now_ms: int = (yield Fetch(_NOW))[0][0]
    yield from budget_rows.announce(messages, now_ms)


def _claim(most: int, lease_ms: int) -> Tx[list[Message]]:
    return [Message(*row) for row in (yield Fetch(_CLAIM, (most, lease_ms)))]


def _forget(older_than_ms: int) -> Tx[int]:
    now_ms: int = (yield Fetch(_NOW))[0][0]
    yield Fetch(_FORGET_DELIVERIES, (now_ms - older_than_ms,))
    return len((yield Fetch(_FORGET, (now_ms - older_than_ms,))))


def _forget_waiting(older_than_ms: int) -> Tx[int]:
    now_ms: int = (yield Fetch(_NOW))[0][0]
    return len((yield Fetch(_FORGET_WAITING, (now_ms - older_than_ms,))))


def _trim(most: int) -> Tx[int]:
    there: int = (yield Fetch(_SIZE))[0][0]
    return len((yield Fetch(_TRIM, (min(1_000, there - most),)))) if there > most else 0


def _counts() -> Tx[OutboxCounts]:
    ((total, delivered, dead, oldest_ms),) = yield Fetch(_COUNTS)
    # A message may be delivered by one after another gave it up; `delivered` clears that, so the two are disjoint.
    return OutboxCounts(total - delivered - dead, delivered, dead, oldest_ms)


def _list_dead(most: int) -> Tx[list[DeadMessage]]:
    return [DeadMessage(*row) for row in (yield Fetch(_LIST_DEAD, (most,)))]
