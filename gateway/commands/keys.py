"""keys: make, list and end virtual keys."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gateway.commands.database import Desk, at_desk
from gateway.commands.output import moment, nano_from_usd, print_json, print_table, say
from gateway.core.identity import KeyRecord, RateLimit
from gateway.settings import ensure_pepper

_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Wanted:
    """A key as asked for on the command line; `budget` in dollars."""

    name: str
    team: str
    models: tuple[str, ...]
    budget: str | None
    window: str
    limit: RateLimit
    expires_days: int | None


def create(path: Path | None, wanted: Wanted, as_json: bool) -> int:
    budget_nano_usd = None if wanted.budget is None else nano_from_usd(wanted.budget)

    async def act(desk: Desk) -> tuple[KeyRecord, str]:
        now_ms = time.time_ns() // 1_000_000
        record, key = await desk.accounts.create_key(
            pepper=ensure_pepper(desk.settings),
            name=wanted.name,
            team_id=wanted.team,
            models=wanted.models,
            limit=wanted.limit,
            expires_at_ms=None if wanted.expires_days is None else now_ms + wanted.expires_days * _DAY_MS,
        )
        if budget_nano_usd is not None:
            await desk.accounts.set_budget(f"key:{record.key_id}", budget_nano_usd, wanted.window)
        return record, key

    record, key = at_desk(path, act)
    if as_json:
        print_json({**document(record), "key": key})
    else:
        say(key)
        say(f"key {record.key_id} of team {record.team_id}; it is shown only now")
    return 0


def show(path: Path | None, as_json: bool) -> int:
    records = at_desk(path, lambda desk: desk.accounts.list_keys())
    if as_json:
        print_json([document(r) for r in records])
        return 0
    now_ms = time.time_ns() // 1_000_000
    print_table(
        ["key", "name", "team", "models", "limits", "expires", "state"],
        [
            [
                r.key_id,
                r.name,
                r.team_id,
                models_shown(r.models),
                limit_shown(r.limit),
                moment(r.expires_at_ms),
                _state(r, now_ms),
            ]
            for r in records
        ],
    )
    return 0


def revoke(path: Path | None, key_id: str) -> int:
    record = at_desk(path, lambda desk: desk.accounts.revoke_key(key_id))
    say(f"key {record.key_id} ({record.name}) is revoked since {moment(record.revoked_at_ms)}")
    return 0


def document(record: KeyRecord) -> dict[str, Any]:
    """A key for programs, without anything secret."""
    return {
        "key_id": record.key_id,
        "name": record.name,
        "tenant": record.tenant_id,
        "team": record.team_id,
        "models": sorted(record.models),
        "limits": asdict(record.limit),
        "expires_at_ms": record.expires_at_ms,
        "revoked_at_ms": record.revoked_at_ms,
        "task_id": record.task_id,
        "labels": dict(record.labels),
    }


def models_shown(models: frozenset[str]) -> str:
    return ", ".join(sorted(models)) or "all"


def limit_shown(limit: RateLimit) -> str:
    parts = (
        (limit.requests_per_min, "requests/min"),
        (limit.tokens_per_min, "tokens/min"),
        (limit.concurrent, "at once"),
    )
    return ", ".join(f"{n:,} {unit}" for n, unit in parts if n is not None) or "-"


def _state(record: KeyRecord, now_ms: int) -> str:
    if record.revoked_at_ms is not None:
        return "revoked"
    if record.expires_at_ms is not None and record.expires_at_ms <= now_ms:
        return "expired"
    return "active"
