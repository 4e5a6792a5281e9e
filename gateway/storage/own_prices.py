"""Price rows that people state over the admin API: changed with an audit row, and in memory of every process.

What was charged stays explained: a row that has begun never changes but for its end. Changes of one price happen one
after the other, because counting the revision locks its row; so two rows that overlap cannot be made at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gateway.core.errors import InvalidRequest, NotFound
from gateway.core.offices import InUse
from gateway.core.price_overlay import overlaid
from gateway.core.prices import PriceBook, PriceError, PriceRow, parse_row
from gateway.storage import audit
from gateway.storage.budget_rows import fresh_id
from gateway.storage.database import Database
from gateway.storage.transact import Fetch, Row, Sql, Tx, json_text

ROWS_MAX = 5_000
#: What two clocks may differ by: a row that begins this little in the past begins now.
_SKEW_MS = 60_000

_COLUMNS = "price_id, price, valid_from_ms, valid_to_ms, body, created_at_ms, withdrawn_at_ms"
_REVISION = Sql("SELECT number FROM revision")
_CHANGED = Sql(f"SELECT {_COLUMNS} FROM own_price WHERE revision > $1")  # noqa: S608
_ALL = Sql(f"SELECT {_COLUMNS} FROM own_price WHERE withdrawn_at_ms IS NULL ORDER BY price, valid_from_ms")  # noqa: S608
_ONE = Sql(f"SELECT {_COLUMNS} FROM own_price WHERE price_id = $1 AND withdrawn_at_ms IS NULL")  # noqa: S608
_OF_PRICE = Sql(f"SELECT {_COLUMNS} FROM own_price WHERE price = $1 AND withdrawn_at_ms IS NULL")  # noqa: S608
_COUNT = Sql("SELECT count(*) FROM own_price")
_NOW = Sql("SELECT now_ms()")
_ADD = Sql(
    "INSERT INTO own_price (price_id, price, valid_from_ms, valid_to_ms, body, created_at_ms, revision) "
    "VALUES ($1, $2, $3, $4, $5, $6, $7)"
)
_CHANGE = Sql(
    "UPDATE own_price SET valid_from_ms = $2, valid_to_ms = $3, body = $4, revision = $5 WHERE price_id = $1"
)
_END = Sql("UPDATE own_price SET valid_to_ms = $2, revision = $3 WHERE price_id = $1")
_WITHDRAW = Sql("UPDATE own_price SET withdrawn_at_ms = $2, revision = $3 WHERE price_id = $1")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnPrice:
    """A price row of one's own. `body`: the row as in prices.yaml, without its times."""

    price_id: str
    price: str
    valid_from_ms: int
    valid_to_ms: int | None
    body: Mapping[str, Any]
    created_at_ms: int = 0
    withdrawn_at_ms: int | None = None

    @property
    def row(self) -> PriceRow:
        """Raises `PriceError`."""
        return parse_row(self.price, self.price_id, dict(self.body), self.valid_from_ms, self.valid_to_ms)


def own_prices() -> Tx[list[OwnPrice]]:
    return [_price_of(row) for row in (yield Fetch(_ALL))]


def own_price(price_id: str) -> Tx[OwnPrice]:
    rows = yield Fetch(_ONE, (price_id,))
    if not rows:
        raise NotFound(f"there is no price row {price_id}")
    return _price_of(rows[0])


def add(actor: str, wanted: Sequence[Mapping[str, Any]]) -> Tx[list[OwnPrice]]:
    """As `add_one` for each; all or nothing. `InvalidRequest` names the place of the one that cannot be."""
    made = []
    for n, fields in enumerate(wanted):
        try:
            made.append((yield from add_one(actor, fields)))
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=f"prices.{n}.{error.param}") from None
    return made


def add_one(actor: str, fields: Mapping[str, Any]) -> Tx[OwnPrice]:
    """`price`, `valid_from_ms` (None = now), `valid_to_ms` and `body`."""
    now_ms: int = (yield Fetch(_NOW))[0][0]
    from_ms = _from(fields["valid_from_ms"], now_ms)
    new = OwnPrice(
        fresh_id("price", now_ms), fields["price"], from_ms, fields["valid_to_ms"], fields["body"], now_ms
    )
    row = _sound(new)
    revision, _ = yield from audit.record(actor, "price.create", f"price:{new.price_id}", _said(new))
    yield from _refuse_overlap(new, row)
    if (yield Fetch(_COUNT))[0][0] >= ROWS_MAX:
        raise InvalidRequest(f"there are {ROWS_MAX} price rows already", param="price")
    yield Fetch(
        _ADD, (new.price_id, new.price, from_ms, new.valid_to_ms, json_text(new.body), now_ms, revision)
    )
    return new


def change(actor: str, price_id: str, change: Callable[[OwnPrice, int], OwnPrice]) -> Tx[OwnPrice]:
    """`change` gets the row and the time. One that has begun may only end sooner or later, and never in the past."""
    before = yield from own_price(price_id)
    now_ms: int = (yield Fetch(_NOW))[0][0]
    after = change(before, now_ms)
    if after == before:
        return before
    begun = before.valid_from_ms <= now_ms
    if begun and replace(after, valid_to_ms=None) != replace(before, valid_to_ms=None):
        raise InUse(
            f"price row {price_id} has begun, and what was charged stays charged: end it, and state another one"
        )
    if not begun:
        after = replace(after, valid_from_ms=_from(after.valid_from_ms, now_ms))
    if after.valid_to_ms is not None and after.valid_to_ms < now_ms - _SKEW_MS:
        raise InvalidRequest("must not be in the past", param="valid_to")
    row = _sound(after)
    revision, _ = yield from audit.record(actor, "price.change", f"price:{price_id}", _said(after))
    yield from _refuse_overlap(after, row)
    yield Fetch(_CHANGE, (price_id, after.valid_from_ms, after.valid_to_ms, json_text(after.body), revision))
    return after


def drop(actor: str, price_id: str, expect: Callable[[OwnPrice], None]) -> Tx[OwnPrice]:
    """One that has begun ends now; one that has not is gone."""
    found = yield from own_price(price_id)
    expect(found)
    now_ms: int = (yield Fetch(_NOW))[0][0]
    if found.valid_to_ms is not None and found.valid_to_ms <= now_ms:
        return found
    revision, _ = yield from audit.record(actor, "price.delete", f"price:{price_id}", {"price": found.price})
    if found.valid_from_ms < now_ms:
        # One that a later row has ended stays ended there.
        later = [o.valid_from_ms for o in map(_price_of, (yield Fetch(_OF_PRICE, (found.price,))))]
        end_ms = min([now_ms, *(start for start in later if start > found.valid_from_ms)])
        yield Fetch(_END, (price_id, end_ms, revision))
        return replace(found, valid_to_ms=end_ms)
    yield Fetch(_WITHDRAW, (price_id, now_ms, revision))
    return replace(found, withdrawn_at_ms=now_ms)


def _from(wanted_ms: int | None, now_ms: int) -> int:
    if wanted_ms is not None and wanted_ms < now_ms - _SKEW_MS:
        raise InvalidRequest(
            "must not be in the past: what was charged stays charged; leave it out for now",
            param="valid_from",
        )
    return max(now_ms, wanted_ms or 0)


def _sound(wanted: OwnPrice) -> PriceRow:
    try:
        return wanted.row
    except PriceError as error:
        raise InvalidRequest(error.message, param=error.key) from None


def _refuse_overlap(wanted: OwnPrice, row: PriceRow) -> Tx[None]:
    """After the revision was counted, so that nobody else is in between."""
    others = [_price_of(found) for found in (yield Fetch(_OF_PRICE, (wanted.price,)))]
    try:
        PriceBook.of([row, *(o.row for o in others if o.price_id != wanted.price_id)])
    except PriceError:
        raise InvalidRequest(
            f"overlaps with another row of {wanted.price}: end that one first", param="valid_from"
        ) from None


def _said(price: OwnPrice) -> dict[str, Any]:
    return {
        "price": price.price,
        "valid_from_ms": price.valid_from_ms,
        "valid_to_ms": price.valid_to_ms,
        "row": dict(price.body),
    }


def _price_of(row: Row) -> OwnPrice:
    """A row of _COLUMNS."""
    price_id, price, from_ms, to_ms, body, created_at_ms, withdrawn_at_ms = row
    return OwnPrice(
        price_id, price, from_ms, to_ms, msgspec.json.decode(body), created_at_ms, withdrawn_at_ms
    )


class OwnPrices:
    """The price book in force: that of the configuration, and over it what people stated. `turn` after any change in the
    store takes it over.
    """

    def __init__(self, database: Database, base: PriceBook) -> None:
        self._database = database
        self._base = self.book = base
        self._rows: dict[str, PriceRow] = {}
        self._revision = -1

    def use(self, base: PriceBook) -> None:
        """Another book of the configuration."""
        self._base = base
        try:
            self.book = overlaid(base, self._rows.values())
        except PriceError as e:  # somebody wrote into the table by hand
            _log.error("prices stay as they were: %s", e)

    async def turn(self) -> None:
        """Take over what changed. Raises `Unavailable`."""
        revision, since, rows = await self._database.read(self._changes)
        if since < 0:
            self._rows.clear()
        for price in map(_price_of, rows):
            if price.withdrawn_at_ms is not None:
                self._rows.pop(price.price_id, None)
            else:
                self._rows[price.price_id] = price.row
        self._revision = revision
        if rows or since < 0:
            self.use(self._base)

    def _changes(self) -> Tx[tuple[int, int, list[Row]]]:
        revision: int = (yield Fetch(_REVISION))[0][0]
        since = self._revision if revision >= self._revision else -1  # the store may go back in time
        return revision, since, [] if revision == since else list((yield Fetch(_CHANGED, (since,))))
