"""prices: what a token costs, as the ledger will count it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gateway.commands.opening import load_settings
from gateway.commands.output import OperatorError, complain, dollars, moment, print_json, print_table
from gateway.core.errors import Unavailable
from gateway.core.price_overlay import overlaid
from gateway.core.prices import PriceError, PriceRow
from gateway.settings import Settings
from gateway.storage import schema
from gateway.storage.database import open_database
from gateway.storage.own_prices import OwnPrice, own_prices


def prices(path: Path | None, model: str | None, as_json: bool) -> int:
    """Those of the configuration, and over them what was stated over the admin API, if there is a database."""
    settings = load_settings(path)
    stated = asyncio.run(_stated(settings))
    try:
        book = overlaid(settings.prices, (price.row for price in stated))
    except PriceError as error:  # somebody wrote into the table by hand
        raise OperatorError(f"prices that were stated over the admin API do not fit: {error}") from error
    rows = [row for row in book.rows() if model is None or model.lower() in row.price.lower()]
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


async def _stated(settings: Settings) -> Sequence[OwnPrice]:
    database = open_database(settings.database_url)
    try:
        if database.sqlite_path is not None and not database.sqlite_path.exists():
            return ()
        await schema.check(database)
        return await database.read(own_prices)
    except (schema.SchemaMismatch, Unavailable) as error:
        complain(f"only the prices of the configuration: {error}")
        return ()
    finally:
        await database.close()


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
