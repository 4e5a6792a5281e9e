"""Webhooks that people added: changed with an audit row, and each with its own copy of every message that it wants.

    outbox -> spread: one delivery for each webhook that wants the kind -> claimed and sent as those of the outbox are

The configured webhook takes from the outbox itself; the two know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from gateway.core.errors import InvalidRequest, NotFound
from gateway.core.offices import Page, Reach
from gateway.core.webhook import TEST, Message
from gateway.storage import audit
from gateway.storage.budget_rows import fresh_id
from gateway.storage.database import Database
from gateway.storage.outbox import OutboxCounts
from gateway.storage.pages import Listing
from gateway.storage.transact import Each, Fetch, Row, Sql, Tx, json_text

WEBHOOKS_MAX = 20
#: The one of the configuration.
CONFIGURED = "configuration"

_COLUMNS = "webhook_id, name, url, kinds, enabled, secret_version, created_at_ms"
_ALL = Sql(f"SELECT {_COLUMNS} FROM webhook ORDER BY created_at_ms, webhook_id")  # noqa: S608
_ONE = Sql(f"SELECT {_COLUMNS} FROM webhook WHERE webhook_id = $1 FOR UPDATE")  # noqa: S608
_READ_ONE = Sql(f"SELECT {_COLUMNS} FROM webhook WHERE webhook_id = $1")  # noqa: S608
_ADD = Sql(
    "INSERT INTO webhook (webhook_id, name, url, kinds, enabled, secret_version, created_at_ms, revision) "
    "VALUES ($1, $2, $3, $4, $5, 1, $6, $7)"
)
_CHANGE = Sql(
    "UPDATE webhook SET name = $2, url = $3, kinds = $4, enabled = $5, secret_version = $6, revision = $7 "
    "WHERE webhook_id = $1"
)
_DROP = Sql("DELETE FROM webhook WHERE webhook_id = $1")
_DROP_DELIVERIES = Sql("DELETE FROM webhook_delivery WHERE webhook_id = $1")
#: Before the first webhook nobody spread anything; what is older than it is not for it.
_OLD = Sql("UPDATE outbox SET spread = 1 WHERE spread = 0")
_UNSPREAD = Sql(
    "SELECT outbox_id, kind, created_at_ms FROM outbox WHERE spread = 0 ORDER BY outbox_id LIMIT $1 "
    "FOR UPDATE SKIP LOCKED"
)
_SPREAD = Sql("UPDATE outbox SET spread = 1 WHERE outbox_id = ANY($1::text[])")
_DELIVERY = Sql(
    "INSERT INTO webhook_delivery (webhook_id, outbox_id, kind, created_at_ms) VALUES ($1, $2, $3, $4)"
)
_TEST = Sql(
    "INSERT INTO outbox (outbox_id, kind, dedupe, body, created_at_ms, delivered_at_ms, spread) "
    "VALUES ($1, $2, $1, $3, $4, $5, 1)"
)
_DUE = Sql(
    "SELECT 1 FROM webhook_delivery WHERE webhook_id = $1 AND delivered_at_ms IS NULL AND dead_at_ms IS NULL "
    "AND next_at_ms <= now_ms() LIMIT 1"
)
_CLAIM = Sql(
    "UPDATE webhook_delivery SET attempts = attempts + 1, next_at_ms = now_ms() + $3 "
    "WHERE webhook_id = $1 AND outbox_id IN (SELECT outbox_id FROM webhook_delivery WHERE webhook_id = $1 "
    "AND delivered_at_ms IS NULL AND dead_at_ms IS NULL AND next_at_ms <= now_ms() "
    "ORDER BY next_at_ms, outbox_id LIMIT $2 FOR UPDATE SKIP LOCKED) RETURNING outbox_id, attempts"
)
_MESSAGES = Sql(
    "SELECT outbox_id, kind, dedupe, body, created_at_ms, now_ms() - created_at_ms FROM outbox "
    "WHERE outbox_id = ANY($1::text[])"
)
_LOST = Sql("DELETE FROM webhook_delivery WHERE webhook_id = $1 AND outbox_id = ANY($2::text[])")
_DELIVERED = Sql(
    "UPDATE webhook_delivery SET delivered_at_ms = now_ms(), dead_at_ms = NULL, last_error = '' "
    "WHERE webhook_id = $1 AND outbox_id = $2 AND delivered_at_ms IS NULL"
)
#: Only while the claim is this one's.
_LATER = Sql(
    "UPDATE webhook_delivery SET next_at_ms = now_ms() + $4, last_error = $5 "
    "WHERE webhook_id = $1 AND outbox_id = $2 AND attempts = $3 AND delivered_at_ms IS NULL"
)
_DEAD = Sql(
    "UPDATE webhook_delivery SET dead_at_ms = now_ms(), last_error = $4 "
    "WHERE webhook_id = $1 AND outbox_id = $2 AND attempts = $3 AND delivered_at_ms IS NULL"
)
_SUMS = (
    "coalesce(sum(CASE WHEN delivered_at_ms IS NULL AND dead_at_ms IS NULL THEN 1 ELSE 0 END), 0), "
    "coalesce(sum(CASE WHEN delivered_at_ms IS NOT NULL THEN 1 ELSE 0 END), 0), "
    "coalesce(sum(CASE WHEN dead_at_ms IS NOT NULL THEN 1 ELSE 0 END), 0), max(delivered_at_ms)"
)
_COUNTS = Sql(f"SELECT webhook_id, {_SUMS} FROM webhook_delivery GROUP BY webhook_id")  # noqa: S608
#: Of those that somebody delivers.
_DEPTH = Sql(
    "SELECT coalesce(sum(CASE WHEN d.delivered_at_ms IS NULL AND d.dead_at_ms IS NULL THEN 1 ELSE 0 END), 0), "
    "coalesce(sum(CASE WHEN d.delivered_at_ms IS NOT NULL THEN 1 ELSE 0 END), 0), "
    "coalesce(sum(CASE WHEN d.dead_at_ms IS NOT NULL THEN 1 ELSE 0 END), 0), coalesce(now_ms() - "
    "min(CASE WHEN d.delivered_at_ms IS NULL AND d.dead_at_ms IS NULL THEN d.created_at_ms END), 0) "
    "FROM webhook_delivery d JOIN webhook w ON w.webhook_id = d.webhook_id WHERE w.enabled"
)
_OUTBOX_COUNTS = Sql(f"SELECT {_SUMS} FROM outbox")  # noqa: S608
_STATES = {
    "id": "webhook_id = {}",
    "state:pending": "delivered_at_ms IS NULL AND dead_at_ms IS NULL",
    "state:delivered": "delivered_at_ms IS NOT NULL",
    "state:dead": "dead_at_ms IS NOT NULL",
}
_SHOWN = "outbox_id, kind, created_at_ms, attempts, next_at_ms, delivered_at_ms, dead_at_ms, last_error"
DELIVERIES = Listing(
    f"SELECT {_SHOWN} FROM webhook_delivery",  # noqa: S608
    ("created_at_ms", "outbox_id"),
    (2, 0),
    _STATES,
    {},
    descending=True,
)
OUTBOX = Listing(
    f"SELECT {_SHOWN} FROM outbox",  # noqa: S608
    ("created_at_ms", "outbox_id"),
    (2, 0),
    _STATES,
    {},
    descending=True,
)
_NOW = Sql("SELECT now_ms()")


@dataclass(frozen=True, slots=True)
class Webhook:
    """A receiver. `kinds`: what it wants; empty = everything."""

    webhook_id: str
    name: str
    url: str
    kinds: tuple[str, ...]
    enabled: bool
    secret_version: int = 1
    created_at_ms: int = 0


@dataclass(frozen=True, slots=True)
class WebhookCounts:
    """Messages by what became of them."""

    pending: int = 0
    delivered: int = 0
    dead: int = 0
    last_delivered_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message on its way to one receiver."""

    delivery_id: str
    kind: str
    created_at_ms: int
    attempts: int
    next_at_ms: int
    delivered_at_ms: int | None
    dead_at_ms: int | None
    last_error: str


# --- what people do with them ---------------------------------------------------------------------------------


def webhooks() -> Tx[list[tuple[Webhook, WebhookCounts]]]:
    counts = {row[0]: WebhookCounts(*row[1:]) for row in (yield Fetch(_COUNTS))}
    found = [_webhook_of(row) for row in (yield Fetch(_ALL))]
    return [(it, counts.get(it.webhook_id, WebhookCounts())) for it in found]


def configured_counts() -> Tx[WebhookCounts]:
    """Of the configured one."""
    return WebhookCounts(*(yield Fetch(_OUTBOX_COUNTS))[0])


def webhook(webhook_id: str, sql: Sql = _READ_ONE) -> Tx[Webhook]:
    rows = yield Fetch(sql, (webhook_id,))
    if not rows:
        raise NotFound(f"there is no webhook {webhook_id}")
    return _webhook_of(rows[0])


def add(actor: str, name: str, url: str, kinds: Sequence[str], enabled: bool) -> Tx[Webhook]:
    there = [_webhook_of(row) for row in (yield Fetch(_ALL))]
    if len(there) >= WEBHOOKS_MAX:
        raise InvalidRequest(f"there are {WEBHOOKS_MAX} webhooks already", param="name")
    now_ms: int = (yield Fetch(_NOW))[0][0]
    new = Webhook(fresh_id("hook", now_ms), name, url, tuple(kinds), enabled, 1, now_ms)
    revision, _ = yield from audit.record(actor, "webhook.create", f"webhook:{new.webhook_id}", _said(new))
    if not there:
        yield Fetch(_OLD)
    yield Fetch(_ADD, (new.webhook_id, name, url, json_text(new.kinds), enabled, now_ms, revision))
    return new


def change(actor: str, webhook_id: str, change: Callable[[Webhook], Webhook]) -> Tx[Webhook]:
    before = yield from webhook(webhook_id, _ONE)
    after = change(before)
    if after == before:
        return before
    said = {**_said(after), "other_url": after.url != before.url}
    revision, _ = yield from audit.record(actor, "webhook.change", f"webhook:{webhook_id}", said)
    values = (after.name, after.url, json_text(after.kinds), after.enabled, after.secret_version)
    yield Fetch(_CHANGE, (webhook_id, *values, revision))
    return after


def drop(actor: str, webhook_id: str, expect: Callable[[Webhook], None]) -> Tx[Webhook]:
    """What it has not got is not sent to it any more."""
    found = yield from webhook(webhook_id, _ONE)
    expect(found)
    yield from audit.record(actor, "webhook.delete", f"webhook:{webhook_id}", {"name": found.name})
    yield Fetch(_DROP_DELIVERIES, (webhook_id,))
    yield Fetch(_DROP, (webhook_id,))
    return found


def test(actor: str, webhook_id: str) -> Tx[Delivery]:
    """A message to this one only, sent as any other is."""
    if webhook_id != CONFIGURED:
        found = yield from webhook(webhook_id)
        if not found.enabled:
            raise InvalidRequest(f"webhook {webhook_id} is not enabled, so nothing is sent to it")
    _, now_ms = yield from audit.record(actor, "webhook.test", f"webhook:{webhook_id}", {})
    message_id = fresh_id("evt", now_ms)
    body = json_text({"message": "somebody asked for a test of this webhook", "webhook_id": webhook_id})
    # For one of ours the message counts as delivered to the configured one, so that it does not get it.
    delivered_at_ms = None if webhook_id == CONFIGURED else now_ms
    yield Fetch(_TEST, (message_id, TEST, body, now_ms, delivered_at_ms))
    if webhook_id != CONFIGURED:
        yield Fetch(_DELIVERY, (webhook_id, message_id, TEST, now_ms))
    return Delivery(message_id, TEST, now_ms, 0, 0, None, None, "")


def deliveries(webhook_id: str, filters: Mapping[str, Any], after: Any, limit: int) -> Tx[Page[Delivery]]:
    """The latest first; `state`: pending, delivered or dead."""
    wanted: dict[str, Any] = {}
    if filters.get("state"):
        wanted[f"state:{filters['state']}"] = True
    listing = OUTBOX
    if webhook_id != CONFIGURED:
        yield from webhook(webhook_id)
        wanted["id"] = webhook_id
        listing = DELIVERIES
    page = yield from listing.page(Reach(), wanted, after, limit)
    return Page([Delivery(*row) for row in page.rows], page.after)


def _said(it: Webhook) -> dict[str, Any]:
    """Without the URL, which may be a secret."""
    return {
        "name": it.name,
        "kinds": list(it.kinds),
        "enabled": it.enabled,
        "secret_version": it.secret_version,
    }


def _webhook_of(row: Row) -> Webhook:
    webhook_id, name, url, kinds, enabled, version, created_at_ms = row
    wanted = msgspec.json.decode(kinds, type=tuple[str, ...])
    return Webhook(webhook_id, name, url, wanted, bool(enabled), version, created_at_ms)


# --- what delivers them ---------------------------------------------------------------------------------------


class SqlReceivers:
    """What `jobs.receivers` needs. All raise `Unavailable` when the store is down."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def receivers(self) -> Sequence[Webhook]:
        """Those that are enabled, without what does not matter to who delivers."""
        found = await self._database.read(_enabled)
        return [replace(it, name="", kinds=()) for it in found]

    async def spread(self, most: int) -> int:
        """Give up to `most` messages to all webhooks that want them. Returns how many messages there were."""
        return await self._database.write(partial(_spread, most))

    async def counts(self) -> OutboxCounts:
        """Over all of them, as `SqlOutbox.counts` for the configured webhook."""
        return await self._database.read(_depth)

    def outbox(self, webhook_id: str) -> Deliveries:
        return Deliveries(self._database, webhook_id)


class Deliveries:
    """`jobs.webhooks.Outbox` of one webhook."""

    def __init__(self, database: Database, webhook_id: str) -> None:
        self._database = database
        self._webhook_id = webhook_id

    async def claim(self, most: int, lease_ms: int) -> Sequence[Message]:
        # A write transaction a second for each receiver would be felt on SQLite.
        if not await self._database.read(partial(_due, self._webhook_id)):
            return []
        return await self._database.write(partial(_claim, self._webhook_id, most, lease_ms))

    async def delivered(self, message: Message) -> None:
        await self._run(_DELIVERED, message.message_id)

    async def later(self, message: Message, delay_ms: int, error: str) -> None:
        await self._run(_LATER, message.message_id, message.attempts, delay_ms, error)

    async def dead(self, message: Message, error: str) -> None:
        await self._run(_DEAD, message.message_id, message.attempts, error)

    async def _run(self, sql: Sql, *args: Any) -> None:
        def tx() -> Tx[None]:
            yield Fetch(sql, (self._webhook_id, *args))

        await self._database.write(tx)


def _enabled() -> Tx[list[Webhook]]:
    found = [_webhook_of(row) for row in (yield Fetch(_ALL))]
    return [it for it in found if it.enabled]


def _depth() -> Tx[OutboxCounts]:
    (row,) = yield Fetch(_DEPTH)
    return OutboxCounts(*row)


def _spread(most: int) -> Tx[int]:
    messages = yield Fetch(_UNSPREAD, (most,))
    if not messages:
        return 0
    receivers = yield from _enabled()
    rows = [
        (it.webhook_id, outbox_id, kind, at_ms)
        for outbox_id, kind, at_ms in messages
        for it in receivers
        if at_ms >= it.created_at_ms and (not it.kinds or kind in it.kinds)
    ]
    if rows:
        yield Each(_DELIVERY, rows)
    yield Fetch(_SPREAD, ([message[0] for message in messages],))
    return len(messages)


def _due(webhook_id: str) -> Tx[bool]:
    return bool((yield Fetch(_DUE, (webhook_id,))))


def _claim(webhook_id: str, most: int, lease_ms: int) -> Tx[list[Message]]:
    claimed = {row[0]: row[1] for row in (yield Fetch(_CLAIM, (webhook_id, most, lease_ms)))}
    rows = yield Fetch(_MESSAGES, (list(claimed),))
    lost = list(claimed.keys() - {row[0] for row in rows})
    if lost:  # their messages were swept away
        yield Fetch(_LOST, (webhook_id, lost))
    return [
        Message(message_id, kind, dedupe, body, at_ms, claimed[message_id], age_ms)
        for message_id, kind, dedupe, body, at_ms, age_ms in rows
    ]
