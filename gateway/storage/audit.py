"""The audit trail: who changed what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.storage.budget_rows import fresh_id
from gateway.storage.transact import Fetch, Sql, Tx, json_text

_NOW = Sql("SELECT now_ms()")
_BUMP = Sql("UPDATE revision SET number = number + 1 RETURNING number")
_AUDIT = Sql(
    "INSERT INTO audit (audit_id, at_ms, actor, action, subject, body) VALUES ($1, $2, $3, $4, $5, $6)"
)


def record(actor: str, action: str, subject: str, body: Mapping[str, Any]) -> Tx[tuple[int, int]]:
    """Count up the revision, by which replicas learn of the change, and write its row; returns (revision, now)."""
    revision: int = (yield Fetch(_BUMP))[0][0]
    now_ms: int = (yield Fetch(_NOW))[0][0]
    yield Fetch(_AUDIT, (fresh_id("aud", now_ms), now_ms, actor, action, subject, json_text(body)))
    return revision, now_ms
