"""The audit trail: who changed what, each entry chained to the one before it (core/audit_chain.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from gateway.core.audit_chain import Broken, Chain, Link, hash_of
from gateway.storage.budget_rows import fresh_id
from gateway.storage.database import Database
from gateway.storage.transact import Fetch, Row, Sql, Tx, json_text

PAGE = 2_000

_NOW = Sql("SELECT now_ms()")
#: It locks the row until the end of the transaction: entries are written one after the other, on Postgres too.
_BUMP = Sql("UPDATE revision SET number = number + 1 RETURNING number, audit_head")
_HEAD = Sql("UPDATE revision SET audit_head = $1")
_AUDIT = Sql(
    "INSERT INTO audit (audit_id, at_ms, actor, action, subject, body, number, hash) "
    "VALUES ($1, $2, $3, $4, $5, $6, $7, $8)"
)
_CHAINED = Sql(
    "SELECT number, audit_id, at_ms, actor, action, subject, body, hash FROM audit "
    "WHERE number > $1 ORDER BY number LIMIT $2"
)
_UNCHAINED = Sql(
    "SELECT count(*), coalesce(max(at_ms), 0), "
    "(SELECT coalesce(min(at_ms), 0) FROM audit WHERE number IS NOT NULL) FROM audit WHERE number IS NULL"
)
_READ_HEAD = Sql("SELECT audit_head FROM revision")


def record(actor: str, action: str, subject: str, body: Mapping[str, Any]) -> Tx[tuple[int, int]]:
    """Count up the revision, by which replicas learn of the change, and write its row; returns (revision, now)."""
    revision, before = (yield Fetch(_BUMP))[0]
    now_ms: int = (yield Fetch(_NOW))[0][0]
    link = Link(revision, fresh_id("aud", now_ms), now_ms, actor, action, subject, json_text(body))
    head = hash_of(before, link)
    yield Fetch(_AUDIT, (link.audit_id, now_ms, actor, action, subject, link.body, revision, head))
    yield Fetch(_HEAD, (head,))
    return revision, now_ms


@dataclass(frozen=True, slots=True)
class Verified:
    """What was found. `unchained`: entries without a place in the chain, written before there was one; `late` of them are
    younger than its beginning, as those of a replica of an older version are while one still runs. `head`: the last
    hash; keep it elsewhere. `cut`: entries are missing at the end. `lost`: a hash that somebody kept is not there.
    """

    entries: int
    unchained: int
    late: bool
    head: str
    broken: Broken | None
    cut: bool
    lost: bool

    @property
    def sound(self) -> bool:
        return self.broken is None and not self.cut and not self.lost


async def verify(database: Database, known: str = "") -> Verified:
    """Read the whole trail and try every link; `known` is a hash that should be in it. Raises `Unavailable`."""
    # First: what is added meanwhile is behind it.
    (row,) = await database.read(partial(_rows, _READ_HEAD))
    wanted: str = row[0]
    chain = Chain()
    at, reached = -1, not wanted
    while rows := await database.read(partial(_rows, _CHAINED, at, PAGE)):
        links = [Link(*row) for row in rows]
        reached = reached or any(link.hash == wanted for link in links)
        chain.take(links, known)
        at = links[-1].number
    ((unchained, youngest_ms, began_ms),) = await database.read(partial(_rows, _UNCHAINED))
    return Verified(
        chain.entries,
        unchained,
        bool(began_ms) and youngest_ms > began_ms,
        chain.head,
        chain.broken,
        not reached,
        bool(known) and known not in chain.seen,
    )


def _rows(sql: Sql, *args: Any) -> Tx[list[Row]]:
    return list((yield Fetch(sql, args)))
