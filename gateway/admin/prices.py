"""Prices: those of the release and of the configuration, and rows of one's own, which go before them while they hold."""

from __future__ import annotations

import dataclasses
import difflib
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from gateway.admin.bodies import Patch
from gateway.admin.call import Call, Json, Reply, etag_of
from gateway.admin.problems import Problem, invalid
from gateway.admin.records import listed
from gateway.admin.route import PAGED, Route, moment, text
from gateway.admin.schemas import In, Instant, Name, Reason
from gateway.admin.shown import InstantOut, Out, shown
from gateway.admin.store import OwnPriceRow
from gateway.core.money import usd_text
from gateway.core.offices import Right
from gateway.core.price_overlay import overlaid
from gateway.core.prices import PriceError, PriceRow
from gateway.core.rates import Rates

ROWS_AT_ONCE = 500
Usd = Annotated[str, StringConstraints(pattern=r"^\d{1,6}(\.\d{1,9})?$")]
Word = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
Clock = Annotated[str, StringConstraints(pattern=r"^([01]\d|2[0-4]):[0-5]\d$")]
Tokens = Annotated[int, Field(ge=0, le=10**9)]


class RatesIn(In):
    """Dollars per million tokens, as texts."""

    input_usd_per_mtok: Usd
    output_usd_per_mtok: Usd
    cache_read_usd_per_mtok: Usd | None = None
    cache_write_5m_usd_per_mtok: Usd | None = None
    cache_write_1h_usd_per_mtok: Usd | None = None
    cache_write_12h_usd_per_mtok: Usd | None = None


class SizeTierIn(In):
    """Rates of whole requests whose input is larger."""

    above_input_tokens: Tokens
    rates: RatesIn


SizeTiers = Annotated[list[SizeTierIn], Field(max_length=10)]


class SpecialIn(In):
    """A multiple of the standard price ("0.5"), or rates of its own."""

    ratio: Annotated[str, StringConstraints(pattern=r"^\d{1,3}(\.\d{1,9})?$")] | None = None
    rates: RatesIn | None = None
    size_tiers: SizeTiers = Field(default_factory=list)

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.ratio is None) == (self.rates is None):
            raise ValueError("give a ratio or rates")
        return self


class HoursIn(In):
    """Other rates at hours of the day, UTC."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_by_alias=True)

    begin: Clock = Field(alias="from")
    end: Clock = Field(alias="to")
    rates: RatesIn
    size_tiers: SizeTiers = Field(default_factory=list)


class _RowIn(In):
    rates: RatesIn
    size_tiers: SizeTiers = Field(default_factory=list)
    service_tiers: Annotated[dict[Word, SpecialIn], Field(max_length=10)] = Field(default_factory=dict)
    batch: SpecialIn | None = None
    hours: Annotated[list[HoursIn], Field(max_length=24)] = Field(default_factory=list)
    per_request_usd: Usd = "0"
    source: Reason = ""


class PriceIn(_RowIn):
    """A row that holds from `valid_from` (now, if it is left out) to `valid_to`, or until the next row of that price."""

    price: Name
    valid_from: Instant | None = None
    valid_to: Instant | None = None

    def wanted(self) -> dict[str, Any]:
        """What the store takes."""
        return {
            "price": self.price,
            "valid_from_ms": self.valid_from,
            "valid_to_ms": self.valid_to,
            "body": _body(self, set(_RowIn.model_fields)),
        }


class PricesIn(In):
    prices: Annotated[list[PriceIn], Field(min_length=1, max_length=ROWS_AT_ONCE)]


class PricePatch(Patch, _RowIn):
    """Of a row that has begun only `valid_to` can change; null: until the next row."""

    valid_from: Instant | None = None
    valid_to: Instant | None = None
    rates: RatesIn = RatesIn(input_usd_per_mtok="0", output_usd_per_mtok="0")


class PriceOut(Out):
    """Dollars per million tokens, by class; null = no price of its own. `origin`: of the release, of the configuration,
    or stated over this API, and then there is a `price_id`. `deployments` are charged at it.
    """

    price: str
    price_id: str | None
    origin: Literal["release", "configuration", "api"]
    version: str
    valid_from: InstantOut
    valid_to: InstantOut
    usd_per_mtok: dict[str, str | None]
    size_tiers: list[dict[str, Any]]
    service_tiers: list[str]
    hours: int
    per_request_usd: str
    source: str
    checked_on: str
    deployments: list[str]


async def list_prices(call: Call) -> Reply:
    """By price and time, past and coming rows too; `at` leaves those that hold then."""
    wanted = call.params.get("model", "").lower()
    at_ms = call.params.get("at")
    own = await call.registry.own_prices()
    try:
        book = overlaid(call.deps.configured().prices, (price.row for price in own))
    except PriceError as error:  # somebody wrote into the table by hand
        raise Problem(409, f"The rows that were stated do not fit: {error}.") from None
    ids = {price.price_id for price in own}
    rows = [
        _price(call, row, ids)
        for row in book.rows()
        if wanted in row.price.lower() and (at_ms is None or _holds(row, at_ms))
    ]
    return await listed(call, rows)


async def create_price(call: Call) -> Reply:
    """State a price: gateways charge it within a second. What was charged before stays as it is."""
    wanted = PriceIn.model_validate(call.body)
    _refuse_unknown(call, wanted.price, "price")

    return await call.change(
        lambda it: it.add_price(wanted.wanted()), lambda made: _own(call, made), status=201
    )


async def create_prices(call: Call) -> Reply:
    """As `POST /prices` for each, all or none; `errors` names the one that cannot be."""
    wanted = PricesIn.model_validate(call.body).prices
    for n, row in enumerate(wanted):
        _refuse_unknown(call, row.price, f"prices.{n}.price")
    return await call.change(
        lambda it: it.add_prices([row.wanted() for row in wanted]),
        lambda made: {"data": [_own(call, price) for price in made]},
        status=201,
    )


async def get_price(call: Call) -> Reply:
    """One that was stated over this API."""
    shown_price = _own(call, await call.registry.own_price(call.path["price_id"]))
    return Reply(shown_price, etag=etag_of(shown_price))


async def change_price(call: Call) -> Reply:
    """A row that has begun can only end at another time; the rest of one that has not can change, too."""
    patch = PricePatch.model_validate(call.body)
    given = patch.model_fields_set

    def change(before: Any, now_ms: int) -> Any:
        del now_ms
        call.expect(_own(call, before))
        changes: dict[str, Any] = {}
        if "valid_from" in given:
            if patch.valid_from is None:
                raise invalid("valid_from", "must be an instant")
            changes["valid_from_ms"] = patch.valid_from
        if "valid_to" in given:
            changes["valid_to_ms"] = patch.valid_to
        row = given & set(_RowIn.model_fields)
        if row:
            changes["body"] = {**before.body, **_body(patch, row)}
        return dataclasses.replace(before, **changes)

    return await call.change(
        lambda it: it.change_price(call.path["price_id"], change), lambda made: _own(call, made)
    )


async def delete_price(call: Call) -> Reply:
    """It ends now, if it has begun, and what it went before holds again; else it never was."""

    def expect(found: Any) -> None:
        call.expect(_own(call, found))

    return await call.change(
        lambda it: it.drop_price(call.path["price_id"], expect), lambda gone: _own(call, gone)
    )


def _body(model: In, names: set[str]) -> dict[str, Any]:
    """As a row of prices.yaml."""
    return model.model_dump(include=names, exclude_none=True, by_alias=True)


def _refuse_unknown(call: Call, price: str, field: str) -> None:
    """A row that nothing is charged at would be a mistake that nobody sees."""
    known = {*call.deps.configured().prices.by_price, *(d.price for d in call.deps.catalog().deployments)}
    if price not in known - {""}:
        near = difflib.get_close_matches(price, sorted(known), n=1)
        raise invalid(
            field,
            f"nothing is charged at a price of that name; did you mean {near[0]}?"
            if near
            else "nothing is charged at a price of that name; GET /admin/v1/prices lists them",
        )


def _own(call: Call, price: OwnPriceRow) -> Json:
    return _price(call, price.row, {price.price_id})


def _holds(row: PriceRow, at_ms: int) -> bool:
    return row.valid_from_ms <= at_ms and (row.valid_to_ms is None or at_ms < row.valid_to_ms)


def _price(call: Call, row: PriceRow, own: set[str]) -> Json:
    listed_by = [d.name for d in call.deps.catalog().deployments if d.price == row.price]
    configured = row.version.startswith("own-")
    return shown(
        PriceOut(
            price=row.price,
            price_id=row.version if row.version in own else None,
            origin="api" if row.version in own else "configuration" if configured else "release",
            version=row.version,
            valid_from=row.valid_from_ms if row.valid_from_ms > 0 else None,
            valid_to=row.valid_to_ms,
            usd_per_mtok=_per_mtok(row.rates),
            size_tiers=[{"above_input_tokens": n, "usd_per_mtok": _per_mtok(r)} for n, r in row.size_tiers],
            service_tiers=list(row.service_tiers),
            hours=len(row.hours),
            per_request_usd=usd_text(row.per_request_nano_usd),
            source=row.source,
            checked_on=row.checked_on,
            deployments=listed_by,
        )
    )


def _per_mtok(rates: Rates) -> dict[str, str | None]:
    def text_of(pico_usd: int | None) -> str | None:
        return None if pico_usd is None else usd_text(pico_usd * 1_000)

    classes = ("input", "output", "cache_read", "cache_write_5m", "cache_write_1h", "cache_write_12h")
    return {name: text_of(getattr(rates, name)) for name in classes}


ROUTES = (
    Route("GET", "/prices", list_prices, Right.READ, "prices", PriceOut, params=(text("model"), moment("at"), *PAGED), listed=True),
    Route("POST", "/prices", create_price, Right.OPERATE, "prices", PriceOut, PriceIn, status=201, once=True),
    Route("POST", "/prices/bulk", create_prices, Right.OPERATE, "prices", body=PricesIn, status=201, once=True),
    Route("GET", "/prices/{price_id}", get_price, Right.READ, "prices", PriceOut, tagged=True),
    Route("PATCH", "/prices/{price_id}", change_price, Right.OPERATE, "prices", PriceOut, PricePatch, once=True, tagged=True),
    Route("DELETE", "/prices/{price_id}", delete_price, Right.OPERATE, "prices", PriceOut, once=True, tagged=True),
)  # fmt: skip
