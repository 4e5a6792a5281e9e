"""A small catalog and attempts of it."""

from __future__ import annotations

from gateway.core.catalog import Catalog, Deployment, Provider, Wire
from gateway.core.entry import Attempt, Kind, Outcome
from gateway.core.usage import Quality, Usage

ACME = Provider("acme", Wire.OPENAI, "http://127.0.0.1:1/v1", "acme-key")
CATALOG = Catalog.of((Deployment("large-eu", ACME, "large", "large-2026", "acme/large"),))


def attempt(
    number: int = 1,
    *,
    model: str = "large",
    team: str = "core",
    provider: str = "acme",
    operation: str = "chat",
) -> Attempt:
    return Attempt(
        attempt_id=f"att_{number:032x}",
        request_id=f"req_{number:032x}",
        tenant_id="default",
        team_id=team,
        key_id=f"key{number:05}",
        task_id=f"task_{number:032x}",
        parent_task_id=None,
        attempt_no=1,
        operation=operation,
        client="claude-code",
        model_requested="auto",
        model=model,
        upstream_model="large-2026",
        provider=provider,
        deployment="large-eu",
        tier="standard",
        rule="default",
        stream=True,
        started_at_ms=1_800_000_000_000,
    )


def outcome(
    cost_nano_usd: int = 37_650_000, *, kind: Kind = Kind.POST, error: str = "", finish: str = "stop"
) -> Outcome:
    return Outcome(
        kind=kind,
        usage=Usage(input_uncached=100, cache_read=900, cache_write_5m=50, output=20, reasoning=5),
        quality=Quality.EXACT,
        cost_nano_usd=cost_nano_usd,
        list_cost_nano_usd=cost_nano_usd * 2,
        price_version="2026-11-01",
        finish=finish,
        status=502 if error else 200,
        error=error,
        latency_ms=1_500,
        first_token_ms=400,
        upstream_request_id="up-1",
    )
