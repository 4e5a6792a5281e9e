"""A replica's lease: the row that says it is alive, and what becomes of holds when it is not.

Only the authority's clock decides. A replica with an expired lease is kept from admitting by the admitting
transaction itself; what it still settles is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from gateway.core.entry import Attempt, Kind, Outcome
from gateway.core.ids import RANDOM_BYTES, new_id
from gateway.core.usage import Quality, Usage
from gateway.storage import budget_rows
from gateway.storage.settlement import Ending, settle
from gateway.storage.transact import Fetch, FetchPair, Pair, Row, Sql, Tx

_REGISTER = Sql(
    "INSERT INTO replica (replica_id, epoch, started_at_ms, expires_at_ms) "
    "VALUES ($1, 1, now_ms(), now_ms() + $2) ON CONFLICT (replica_id) DO UPDATE SET "
    "epoch = replica.epoch + 1, started_at_ms = now_ms(), expires_at_ms = now_ms() + $2 RETURNING epoch"
)
#: Said once, of the runs that ended just now: those before them have ended before, however often this one starts.
_ORPHAN = Sql(
    "UPDATE hold SET orphaned_at_ms = now_ms() WHERE replica_id = $1 AND state = 'held' AND replica_epoch < $2 "
    "AND orphaned_at_ms IS NULL"
)
_EXPIRE_OTHERS = Sql("UPDATE replica SET expires_at_ms = 0 WHERE replica_id <> $1 AND expires_at_ms > 0")
_RENEW = Sql(
    "UPDATE replica SET expires_at_ms = now_ms() + $3 WHERE replica_id = $1 AND epoch = $2 RETURNING epoch"
)
#: A former run of a replica is dead since the next one started (which its holds say), its last one since its lease
#: ended.
_DEAD_HOLDS = Sql(
    "SELECT h.attempt, h.amount_nano_usd FROM hold h LEFT JOIN replica r ON r.replica_id = h.replica_id "
    "WHERE h.state = 'held' AND $1 <= now_ms() - CASE WHEN h.orphaned_at_ms IS NOT NULL THEN h.orphaned_at_ms "
    "WHEN r.epoch > h.replica_epoch THEN r.started_at_ms WHEN r.epoch = h.replica_epoch THEN r.expires_at_ms ELSE h.created_at_ms END "
    "ORDER BY h.attempt_id LIMIT 256 FOR UPDATE OF h SKIP LOCKED"
)
#: Attempt ids sort by time, so the oldest holds are found by their key.
_FORGET = Sql(
    "DELETE FROM hold WHERE attempt_id IN (SELECT attempt_id FROM hold WHERE attempt_id < $1 "
    "AND state = 'ended' ORDER BY attempt_id LIMIT 5000) RETURNING 1"
)
_FORGET_MISSES = Sql(
    "DELETE FROM prefix_miss WHERE attempt_id IN (SELECT attempt_id FROM prefix_miss "
    "WHERE at_ms < now_ms() - $1 ORDER BY at_ms LIMIT 5000) RETURNING 1"
)
#: The authority's clock, whether this replica may still admit, and whether anything changed: in one look.
#: The row stays locked so that no one declares the replica dead while it admits.
_FACTS = Sql(
    "SELECT now_ms(), (SELECT number FROM revision), epoch, expires_at_ms FROM replica "
    "WHERE replica_id = $1 FOR SHARE"
)
_FACTS_AND_BUDGETS = Pair(_FACTS, budget_rows.LOCK, columns=4)
_NOW = Sql("SELECT now_ms()")
_attempt = msgspec.json.Decoder(Attempt)


class LeaseExpired(Exception):
    """This replica's lease has run out; renew it and ask again. Nothing was committed."""


class Fenced(Exception):
    """Another process has taken over this replica's id. Nothing was committed, and nothing will be."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A replica's licence to admit; `epoch` counts its starts."""

    replica_id: str
    epoch: int


def register(replica_id: str, ttl_ms: int, alone: bool) -> Tx[Lease]:
    """Begin a run. `alone`: no other replica can be alive (SQLite), so their leases end now."""
    epoch = (yield Fetch(_REGISTER, (replica_id, ttl_ms)))[0][0]
    # Behind the lock of its row, which every admission shares: what former runs have admitted is there to be seen.
    yield Fetch(_ORPHAN, (replica_id, epoch))
    if alone:
        yield Fetch(_EXPIRE_OTHERS, (replica_id,))
    return Lease(replica_id, epoch)


def check(lease: Lease, scopes: list[str]) -> Tx[tuple[int, int, Sequence[Row]]]:
    """The authority's time, the revision, and the rows of the budgets of these scopes, which are locked; in one look.

    Raises `LeaseExpired`, `Fenced`.
    """
    rows = yield (
        FetchPair(_FACTS_AND_BUDGETS, (lease.replica_id,), (scopes,))
        if scopes
        else Fetch(_FACTS, (lease.replica_id,))
    )
    if not rows:
        raise LeaseExpired
    now_ms, revision, epoch, expires_at_ms = rows[0]
    if epoch != lease.epoch:
        raise Fenced(f"another process has registered as replica {lease.replica_id}")
    if expires_at_ms <= now_ms:
        raise LeaseExpired
    return now_ms, revision, rows[1:]


def renew(lease: Lease, ttl_ms: int) -> Tx[bool]:
    """True if the lease now lasts `ttl_ms` from now; False if another process has taken over its id."""
    return bool((yield Fetch(_RENEW, (lease.replica_id, lease.epoch, ttl_ms))))


def reap(replica_id: str, grace_ms: int) -> Tx[int]:
    """Charge up to 256 holds of replicas that are dead for `grace_ms`, at their bound. Returns how many."""
    rows = yield Fetch(_DEAD_HOLDS, (grace_ms,))
    endings = [Ending(_attempt.decode(attempt), _charge(amount)) for attempt, amount in rows]
    if endings:
        # Careful: a hold whose COMMIT was lost may have turned up after its entry; it is released, not charged.
        yield from settle(endings, replica_id, careful=True)
    return len(endings)


def forget(older_than_ms: int) -> Tx[int]:
    """Delete up to 5,000 ended holds of attempts that old; the ledger has all that they said."""
    now_ms: int = (yield Fetch(_NOW))[0][0]
    oldest_kept = new_id("att", max(0, now_ms - older_than_ms), bytes(RANDOM_BYTES))
    return len((yield Fetch(_FORGET, (oldest_kept,))))


def forget_misses(older_than_ms: int) -> Tx[int]:
    """Delete up to 5,000 explanations of attempts that old."""
    return len((yield Fetch(_FORGET_MISSES, (older_than_ms,))))


def _charge(amount_nano_usd: int) -> Outcome:
    return Outcome(
        kind=Kind.CHARGE_UNKNOWN,
        usage=Usage(),
        quality=Quality.UNKNOWN,
        cost_nano_usd=amount_nano_usd,
        list_cost_nano_usd=amount_nano_usd,
        price_version="",
        finish="error",
        status=0,
        error="replica_lost",
        latency_ms=0,
        first_token_ms=None,
        upstream_request_id="",
        note="the replica that sent this died before it knew the usage; charged at the bound",
    )
