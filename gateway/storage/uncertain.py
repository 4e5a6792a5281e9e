"""Entries that a provider may still prove better: estimated or unknown, and not corrected yet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from gateway.core.entry import Attempt, Kind, Outcome
from gateway.core.usage import Quality, Usage
from gateway.storage.database import Database
from gateway.storage.tables import TOKEN_COLUMNS, ledger
from gateway.storage.transact import Fetch, Row, Sql, Tx

#: The rest of an attempt (how its task was recognised) is on the task's row, which is there already.
_ATTEMPT = tuple(f for f in Attempt.__struct_fields__ if f in ledger.columns)
_OUTCOME = (
    "kind",
    "quality",
    "amount_nano_usd",
    "list_cost_nano_usd",
    "price_version",
    "finish",
    "status",
    "error",
    "latency_ms",
    "first_token_ms",
    "upstream_request_id",
    "service_tier",
    "note",
    "served_by",
)
_COLUMNS = ", ".join(f"l.{name}" for name in (*_ATTEMPT, *_OUTCOME, *TOKEN_COLUMNS))
_UNCERTAIN = Sql(
    f"SELECT {_COLUMNS} FROM ledger l WHERE l.at_ms >= $1 AND l.kind <> 'void' AND l.kind <> 'correct' "  # noqa: S608
    "AND l.quality <> 'exact' AND l.provider = ANY($2::text[]) AND NOT EXISTS (SELECT 1 FROM ledger c WHERE "
    "c.attempt_id = l.attempt_id AND c.at_ms = l.at_ms AND c.kind = 'correct') ORDER BY l.at_ms LIMIT $3"
)


async def uncertain(
    database: Database, providers: Sequence[str], since_ms: int, limit: int
) -> list[tuple[Attempt, Outcome]]:
    """The oldest first, begun at or after `since_ms`. Raises `Unavailable` if the store is down."""
    rows = await database.read(partial(_read, list(providers), since_ms, limit))
    return [(_attempt_of(row), _outcome_of(row[len(_ATTEMPT) :])) for row in rows]


def _read(providers: list[str], since_ms: int, limit: int) -> Tx[Sequence[Row]]:
    return (yield Fetch(_UNCERTAIN, (since_ms, providers, limit)))


def _attempt_of(row: Row) -> Attempt:
    facts: dict[str, Any] = dict(zip(_ATTEMPT, row, strict=False))
    facts["stream"] = bool(facts["stream"])  # SQLite has no booleans
    return Attempt(**facts)


def _outcome_of(row: Row) -> Outcome:
    facts: dict[str, Any] = dict(zip(_OUTCOME, row, strict=False))
    return Outcome(
        kind=Kind(facts.pop("kind")),
        usage=Usage(*row[len(_OUTCOME) :]),
        quality=Quality(facts.pop("quality")),
        cost_nano_usd=facts.pop("amount_nano_usd"),
        **facts,
    )
