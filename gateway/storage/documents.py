"""Configuration documents (core/config_overlay.py) in the database: written with an audit row, and told by the revision.

Whether documents fit together is tried before they are written, on a state that `stamp` names; a write on any other state
is `Moved`. Counting the revision locks its row, so writes come one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.core.config_overlay import Document, Documents, Key, Kind, Stored, Write, ordered
from gateway.core.offices import Moved
from gateway.storage import audit
from gateway.storage.transact import Fetch, Row, Sql, Tx, json_text

_STAMP = Sql("SELECT coalesce(max(revision), 0) FROM config_document")
_ALL = Sql(
    "SELECT kind, name, body, version, created_at_ms, updated_at_ms, deleted_at_ms FROM config_document "
    "ORDER BY kind, name"
)
_PUT = Sql(
    "INSERT INTO config_document (kind, name, body, version, created_at_ms, updated_at_ms, revision) "
    "VALUES ($1, $2, $3, $4, $5, $5, $6) ON CONFLICT (kind, name) DO UPDATE SET "
    "body = excluded.body, version = excluded.version, updated_at_ms = excluded.updated_at_ms, "
    "revision = excluded.revision, deleted_at_ms = NULL, created_at_ms = "
    "CASE WHEN config_document.deleted_at_ms IS NULL THEN config_document.created_at_ms "
    "ELSE excluded.created_at_ms END RETURNING created_at_ms"
)
_DROP = Sql(
    "UPDATE config_document SET body = '{}', version = $3, updated_at_ms = $4, deleted_at_ms = $4, revision = $5 "
    "WHERE kind = $1 AND name = $2 RETURNING created_at_ms"
)


def stamp() -> Tx[int]:
    """Another one after every write."""
    found: int = (yield Fetch(_STAMP))[0][0]
    return found


def stored() -> Tx[Stored]:
    """All of it."""
    at = yield from stamp()
    versions: dict[Key, int] = {}
    documents: list[Document] = []
    for row in (yield Fetch(_ALL)):
        document = _document(row)
        versions[document.key] = document.version
        if row[6] is None:
            documents.append(document)
    return Stored(at, ordered(documents), versions)


def write(actor: str, at: int, writes: Sequence[Write]) -> Tx[Documents]:
    """All of them or none; what is written, in the order of `writes`, what is deleted with an empty body. Raises `Moved`
    if the store is not at the stamp `at`.
    """
    after: list[Document] = []
    for n, wanted in enumerate(writes):
        kind, name = wanted.key
        action = "delete" if wanted.body is None else "create" if wanted.made else "change"
        said: dict[str, Any] = {"version": wanted.version}
        if wanted.body is not None:
            said[kind.value] = dict(wanted.body)
        revision, now_ms = yield from audit.record(actor, f"{kind.value}.{action}", f"{kind}:{name}", said)
        if n == 0 and (yield from stamp()) != at:
            raise Moved
        if wanted.body is None:
            rows = yield Fetch(_DROP, (kind.value, name, wanted.version, now_ms, revision))
        else:
            row = (kind.value, name, json_text(dict(wanted.body)), wanted.version, now_ms, revision)
            rows = yield Fetch(_PUT, row)
        after.append(Document(kind, name, wanted.body or {}, wanted.version, rows[0][0], now_ms))
    return tuple(after)


def _document(row: Row) -> Document:
    kind, name, body, version, created_at_ms, updated_at_ms, _ = row
    return Document(Kind(kind), name, msgspec.json.decode(body), version, created_at_ms, updated_at_ms)
