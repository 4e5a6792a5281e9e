"""prices: what a token costs, as the ledger will count it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from gateway.commands.opening import load_settings
from gateway.commands.output import OperatorError, dollars, moment, print_json, print_table
from gateway.core.prices import PriceRow


def prices(path: Path | None, model: str | None, as_json: bool) -> int:
    settings = load_settings(path)
    rows = [row for row in settings.prices.rows() if model is None or model.lower() in row.price.lower()]
    if not rows:
        raise OperatorError(f"there is no price for a model like {model!r}", "`tollhouse prices` lists all")
    if as_json:
        print_json([_document(row) for row in rows])
        return 0
    print_table(
        ["price", "since", "input $/M>", "cached>", "cache write>", "write 1h>", "output $/M>", "besides"],
        [
            [
                row.price,
                moment(row.valid_from_ms)[:10] if row.valid_from_ms > 0 else "ever",
                per_mtok(row.rates.input),
                per_mtok(row.rates.cache_read),
                per_mtok(row.rates.cache_write_5m),
                per_mtok(row.rates.cache_write_1h),
                per_mtok(row.rates.output),
                _besides(row),
            ]
            for row in rows
        ],
    )
    return 0


def per_mtok(pico_usd_per_token: int | None) -> str:
    """Pico-dollars per token as dollars per million tokens: 3,000,000 is "$3.00"."""
    return dollars(None if pico_usd_per_token is None else pico_usd_per_token * 1_000)


def _besides(row: PriceRow) -> str:
    """What else the price depends on, in words."""
    parts = [
        f"above {above:,} tokens: {per_mtok(r.input)}/{per_mtok(r.output)}" for above, r in row.size_tiers
    ]
    if row.service_tiers:
        parts.append("tiers " + ", ".join(row.service_tiers))
    if row.hours:
        parts.append("by hour")
    if row.per_request_nano_usd:
        parts.append(f"{dollars(row.per_request_nano_usd)} per request")
    return "; ".join(parts)


def _document(row: PriceRow) -> dict[str, object]:
    return {
        "price": row.price,
        "version": row.version,
        "valid_from_ms": row.valid_from_ms,
        "valid_to_ms": row.valid_to_ms,
        "pico_usd_per_token": asdict(row.rates),
        "size_tiers": [{"above_input_tokens": a, "pico_usd_per_token": asdict(r)} for a, r in row.size_tiers],
        "service_tiers": list(row.service_tiers),
        "per_request_nano_usd": row.per_request_nano_usd,
        "source": row.source,
        "checked_on": row.checked_on,
    }
