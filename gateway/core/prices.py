"""What a call costs: dated price rows, one exact sum in pico-dollars, one rounding up to nano-dollars.

A price ("provider/model") has rows, one per period of validity. A row has a rate per token class (`core/rates`),
and may have other rates above an input size, for a service tier, for batches and for hours of the day (UTC).
A service tier that the row does not know is charged at the dearest of standard and all known tiers, and
`Cost.note` says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, date, datetime, timedelta
from itertools import pairwise
from typing import NoReturn, TypeVar

import msgspec

from gateway.core.catalog import Operation, Tier
from gateway.core.money import nano_from_pico, pico_from_usd_text
from gateway.core.rates import DAY_MIN, HourWindow, Rates, Ratio, SizedRates, dearest_input
from gateway.core.usage import MAX_TOKENS, Usage

__all__ = [
    "Cost",
    "HourWindow",
    "ListedModel",
    "PriceBook",
    "PriceError",
    "PriceRow",
    "Rates",
    "Ratio",
    "SizedRates",
    "ceiling",
    "cost",
    "listed_models",
    "load_price_book",
    "parse_row",
    "parse_rows",
]

#: Service tier names that mean the standard price. "auto" is what providers assume when nothing is asked for.
STANDARD_TIERS = frozenset({"", "auto", "default", "standard", "standard_only", "on_demand"})

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)


class PriceError(ValueError):
    """A price row is not valid. `row_index` counts the rows of that price from 0; None = the price itself."""

    def __init__(self, price: str, row_index: int | None, key: str, message: str) -> None:
        self.price, self.row_index, self.key, self.message = price, row_index, key, message
        row = "" if row_index is None else f", row {row_index}"
        super().__init__(f"price {price!r}{row}, {key}: {message}")


@dataclass(frozen=True, slots=True)
class PriceRow:
    """One price during [valid_from_ms, valid_to_ms); `valid_to_ms` None = until a later row starts.

    `hours` replace `rates` and `size_tiers` while they last. A service tier or batch given as a `Ratio` multiplies
    what the hour says; one with rates of its own has no hours.
    """

    price: str
    version: str
    valid_from_ms: int
    rates: Rates
    valid_to_ms: int | None = None
    size_tiers: tuple[tuple[int, Rates], ...] = ()
    service_tiers: Mapping[str, SizedRates | Ratio] = field(default_factory=dict)
    batch: SizedRates | Ratio | None = None
    hours: tuple[HourWindow, ...] = ()
    source: str = ""
    checked_on: str = ""
    per_request_nano_usd: int = 0

    def __post_init__(self) -> None:
        SizedRates(self.rates, self.size_tiers)
        if self.valid_to_ms is not None and self.valid_to_ms <= self.valid_from_ms:
            raise ValueError("valid_to must be later than valid_from")
        if type(self.per_request_nano_usd) is not int or self.per_request_nano_usd < 0:
            raise ValueError("a price per request must be a whole number of nano-dollars")
        for w in self.hours:
            if any(o is not w and o.covers(w.start_min) for o in self.hours):
                raise ValueError("hour windows must not overlap")

    @property
    def plain(self) -> bool:
        """One price at all hours and sizes: the common case, computed without looking for others."""
        return not self.hours and not self.size_tiers

    @property
    def prices_writes(self) -> bool:
        """The provider charges for cache writes, so unmarked requests may be billed for them too."""
        return self.rates.prices_writes

    def standard(self, minute: int) -> SizedRates:
        """The standard price at that minute of the day."""
        for w in self.hours:
            if w.covers(minute):
                return w.price
        return SizedRates(self.rates, self.size_tiers)


@dataclass(frozen=True, slots=True)
class PriceBook:
    """All rows, looked up by price and time. Immutable: a refresh swaps the whole book."""

    by_price: Mapping[str, tuple[PriceRow, ...]]

    @classmethod
    def of(cls, rows: Iterable[PriceRow]) -> PriceBook:
        """Raises `PriceError` where two rows of a price start together or overlap."""
        grouped: dict[str, list[PriceRow]] = {}
        for row in rows:
            grouped.setdefault(row.price, []).append(row)
        for price, own in grouped.items():
            own.sort(key=lambda r: r.valid_from_ms)
            for i, (a, b) in enumerate(pairwise(own), start=1):
                if a.valid_from_ms == b.valid_from_ms or (a.valid_to_ms or 0) > b.valid_from_ms:
                    raise PriceError(price, i, "valid_from", "this row begins before the one before it ends")
        return cls({price: tuple(own) for price, own in grouped.items()})

    def find(self, price: str, at_ms: int) -> PriceRow | None:
        """The row in force at that time: the latest that has begun, unless it has ended."""
        for row in reversed(self.by_price.get(price, ())):
            if row.valid_from_ms <= at_ms:
                return row if row.valid_to_ms is None or at_ms < row.valid_to_ms else None
        return None

    def rows(self) -> tuple[PriceRow, ...]:
        return tuple(row for own in self.by_price.values() for row in own)

    def merged(self, own: Iterable[PriceRow]) -> PriceBook:
        """`own` rows replace all rows of the prices that they name."""
        override = PriceBook.of(own).by_price
        return PriceBook({**self.by_price, **override})


class Cost(msgspec.Struct, frozen=True, gc=False):
    """`list_nano_usd`: the same tokens with every input token at the uncached price of the same tier and hour."""

    nano_usd: int
    list_nano_usd: int
    version: str
    note: str = ""  # what was assumed, one line


@dataclass(frozen=True, slots=True)
class _Offer:
    """One price that could apply: rates times num/den."""

    price: SizedRates
    num: int = 1
    den: int = 1

    def nano_usd(self, pico_usd: int) -> int:
        # Rounding up twice rounds as once does: ceil(ceil(x) / n) == ceil(x / n).
        return nano_from_pico(-(-pico_usd * self.num // self.den))


def cost(row: PriceRow, usage: Usage, at_ms: int, *, service_tier: str = "", batch: bool = False) -> Cost:
    """The exact cost of `usage` at that time.

    `service_tier` is what the provider said it served (several joined by "+" multiply). A batch without a known
    batch price costs the standard price.
    """
    if row.plain and not batch and service_tier in STANDARD_TIERS:
        rates, fixed = row.rates, row.per_request_nano_usd
        uncached_pico_usd = usage.input_total * rates.input + usage.output * rates.output
        exact = nano_from_pico(rates.pico_usd(usage)) + fixed
        return Cost(exact, nano_from_pico(uncached_pico_usd) + fixed, row.version)
    minute = at_ms // 60_000 % DAY_MIN
    offers, note = _offers(row, minute, service_tier, batch)

    def priced(offer: _Offer) -> tuple[int, int]:
        rates = offer.price.at(usage.input_total)
        uncached_pico_usd = usage.input_total * rates.input + usage.output * rates.output
        return offer.nano_usd(rates.pico_usd(usage)), offer.nano_usd(uncached_pico_usd)

    nano_usd, list_nano_usd = max(map(priced, offers))
    fixed = row.per_request_nano_usd
    return Cost(nano_usd + fixed, list_nano_usd + fixed, row.version, note)


def ceiling(
    row: PriceRow,
    at_ms: int,
    *,
    input_bound_tokens: int,
    output_bound_tokens: int,
    writes: bool,
    writes_1h: bool,
    service_tier: str = "",
    run_s: int = 3600,
) -> int:
    """Nano-dollars that no bill for such a request can exceed.

    The dearest over: the cache classes an input token may fall in (`writes`: it may be written to a cache, which
    a model whose row `prices_writes` may do unasked; `writes_1h`: for an hour or longer), the size tiers that up to
    `input_bound_tokens` can land in, and the hours from `at_ms` until `run_s` later.
    """
    if not 0 <= input_bound_tokens <= MAX_TOKENS:
        raise ValueError(f"the input bound must be from 0 to {MAX_TOKENS} tokens, not {input_bound_tokens}")
    if not 0 <= output_bound_tokens <= MAX_TOKENS:
        raise ValueError(f"the output bound must be from 0 to {MAX_TOKENS} tokens, not {output_bound_tokens}")
    if row.plain and service_tier in STANDARD_TIERS:
        dearest = dearest_input(row.rates, writes, writes_1h)
        pico_usd = input_bound_tokens * dearest + output_bound_tokens * row.rates.output
        return nano_from_pico(pico_usd) + row.per_request_nano_usd
    worst = 0
    for minute in _minutes_of_change(row, at_ms, run_s):
        for offer in _offers(row, minute, service_tier, batch=False)[0]:
            for input_tokens, rates in offer.price.bands(input_bound_tokens):
                pico_usd = input_tokens * dearest_input(rates, writes, writes_1h)
                worst = max(worst, offer.nano_usd(pico_usd + output_bound_tokens * rates.output))
    return worst + row.per_request_nano_usd


def _offers(row: PriceRow, minute: int, service_tier: str, batch: bool) -> tuple[Sequence[_Offer], str]:
    """The prices that may apply (more than one only if the tier is unknown), and a note if so."""
    standard = row.standard(minute)

    def offer(special: SizedRates | Ratio) -> _Offer:
        return _Offer(standard, special.num, special.den) if isinstance(special, Ratio) else _Offer(special)

    if batch:
        return [_Offer(standard) if row.batch is None else offer(row.batch)], ""
    asked = [name for name in dict.fromkeys(service_tier.split("+")) if name not in STANDARD_TIERS]
    if unknown := [name for name in asked if name not in row.service_tiers]:
        every = [_Offer(standard), *map(offer, row.service_tiers.values())]
        return every, f"service tier {unknown[0]!r} has no price: charged at the dearest known tier"
    price, num, den = standard, 1, 1
    for special in (row.service_tiers[name] for name in asked):
        if isinstance(special, Ratio):
            num, den = num * special.num, den * special.den
        else:
            price = special
    return [_Offer(price, num, den)], ""


def _minutes_of_change(row: PriceRow, at_ms: int, run_s: int) -> Iterator[int]:
    """The minute of `at_ms`, and each edge of an hour window until `run_s` later: between them no price changes."""
    first = at_ms // 60_000 % DAY_MIN
    yield first
    for w in row.hours:
        for edge in (w.start_min, w.end_min):
            if (edge - first) % DAY_MIN <= -(-run_s // 60) + 1:
                yield edge % DAY_MIN


# --- rows out of a document ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that the shipped price list knows, as the template of a deployment. None/empty = not known."""

    price: str
    provider: str
    model: str
    tier: Tier | None = None
    aliases: tuple[str, ...] = ()
    context_tokens: int | None = None
    max_output_tokens: int | None = None
    operations: tuple[Operation, ...] = ()


def load_price_book(doc: object) -> PriceBook:
    """The book out of the loaded prices.yaml: `{version: 1, models: [...]}`. Raises `PriceError`."""
    return PriceBook.of(parse_rows(_models(doc)))


def listed_models(doc: object) -> tuple[ListedModel, ...]:
    """The models of the loaded prices.yaml, in file order. Raises `PriceError`."""
    return tuple(_listed(entry) for entry in _entries(_models(doc)))


def parse_rows(models: object) -> tuple[PriceRow, ...]:
    """Rows out of a list of `{price: "provider/model", rows: [...]}`, the shape of prices.yaml's `models`.

    A row: `valid_from` and `valid_to` (dates, UTC; without `valid_from` the row holds since ever), `rates`,
    `size_tiers`, `service_tiers`, `batch`, `hours`, `per_request_usd`, `source`, `checked_on`. Dollars are decimal
    strings, so that no binary fraction creeps in. Raises `PriceError` that names price, row and key.
    """
    rows: list[PriceRow] = []
    seen: set[str] = set()
    for entry in _entries(models):
        at = _At(_price_name(entry))
        if at.price in seen:
            at.fail("price", "is given twice")
        seen.add(at.price)
        given = entry.get("rows")
        if not isinstance(given, list) or not given:
            at.fail("rows", "must be a list of at least one row")
        rows += [_row(_At(at.price, i), row) for i, row in enumerate(given)]
    return PriceBook.of(rows).rows()


def parse_row(price: str, version: str, doc: object, valid_from_ms: int, valid_to_ms: int | None) -> PriceRow:
    """One row, in the shape of prices.yaml's, its times apart. Raises `PriceError`."""
    at = _At(_price_name({"price": price}))
    found = _row(at, doc)
    try:
        return replace(found, version=version, valid_from_ms=valid_from_ms, valid_to_ms=valid_to_ms)
    except ValueError as e:
        at.fail("valid_to", str(e))


_ENTRY_KEYS = frozenset(
    {
        "price",
        "provider",
        "model",
        "tier",
        "aliases",
        "context_tokens",
        "max_output_tokens",
        "operations",
        "rows",
    }
)
_ROW_KEYS = frozenset(
    {"valid_from", "valid_to", "rates", "size_tiers", "service_tiers", "batch", "hours", "per_request_usd"}
    | {"source", "checked_on"}
)
_RATE_KEYS = {f"{f.name}_usd_per_mtok": f.name for f in fields(Rates)}
_RATIO = re.compile(r"(\d{1,3})(?:\.(\d{1,9}))?", re.ASCII)
_CLOCK = re.compile(r"([01]\d|2[0-4]):([0-5]\d)", re.ASCII)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _At:
    """Where in the document we are, for errors; and the reads that fail there."""

    price: str
    row_index: int | None = None

    def fail(self, key: str, message: str) -> NoReturn:
        raise PriceError(self.price, self.row_index, key, message)

    def mapping(self, key: str, value: object, allowed: Iterable[str] | None) -> Mapping[str, object]:
        if not isinstance(value, dict) or any(not isinstance(k, str) for k in value):
            self.fail(key, f"must be a mapping, not {value!r}")
        if allowed is not None and (unknown := sorted(set(value) - set(allowed))):
            self.fail(
                f"{key}.{unknown[0]}" if key else unknown[0],
                f"is not known; known: {', '.join(sorted(allowed))}",
            )
        return value

    def items(self, key: str, value: object) -> list[object]:
        if not isinstance(value, list):
            self.fail(key, f"must be a list, not {value!r}")
        return value

    def text(self, key: str, value: object) -> str:
        if not isinstance(value, str):
            self.fail(key, f"must be a string, not {value!r}")
        return value

    def pico_usd(self, key: str, value: object) -> int:
        if type(value) is int:
            value = str(value)
        if not isinstance(value, str):
            self.fail(key, f'must be dollars as a quoted string such as "0.25", not {value!r}')
        try:
            return pico_from_usd_text(value)
        except ValueError as e:
            self.fail(key, str(e))

    def count(self, key: str, value: object) -> int:
        if type(value) is not int or not 0 <= value <= MAX_TOKENS:
            self.fail(key, f"must be a number of tokens from 0 to {MAX_TOKENS}, not {value!r}")
        return value

    def built(self, key: str, of: type[_T], *args: object, **kwargs: object) -> _T:
        """`of(...)`, its ValueError told as ours."""
        try:
            return of(*args, **kwargs)
        except ValueError as e:
            self.fail(key, str(e))


def _models(doc: object) -> object:
    top = _At("").mapping("", doc, ("version", "models"))
    if top.get("version") != 1:
        _At("").fail("version", f"must be 1, not {top.get('version')!r}")
    return top.get("models")


def _entries(models: object) -> list[Mapping[str, object]]:
    return [_At("").mapping("models", entry, _ENTRY_KEYS) for entry in _At("").items("models", models)]


def _price_name(entry: Mapping[str, object]) -> str:
    name = entry.get("price")
    if not isinstance(name, str) or not all(name.partition("/")):
        _At(str(name)).fail("price", f'must be "provider/model", not {name!r}')
    return name


def _listed(entry: Mapping[str, object]) -> ListedModel:
    at = _At(_price_name(entry))
    provider, model = at.text("provider", entry.get("provider")), at.text("model", entry.get("model"))
    tier, context, output = entry.get("tier"), entry.get("context_tokens"), entry.get("max_output_tokens")
    return ListedModel(
        price=at.price,
        provider=provider,
        model=model,
        tier=None if tier is None else at.built("tier", Tier, tier),
        aliases=tuple(at.text("aliases", a) for a in at.items("aliases", entry.get("aliases", []))),
        context_tokens=None if context is None else at.count("context_tokens", context),
        max_output_tokens=None if output is None else at.count("max_output_tokens", output),
        operations=tuple(
            at.built("operations", Operation, o) for o in at.items("operations", entry.get("operations", []))
        ),
    )


def _row(at: _At, doc: object) -> PriceRow:
    row = at.mapping("", doc, _ROW_KEYS)
    valid_from = _instant(at, "valid_from", row.get("valid_from", "1970-01-01"))
    sized = _sized(at, "", row)
    tiers = at.mapping("service_tiers", row.get("service_tiers", {}), None)
    per_request_pico_usd = at.pico_usd("per_request_usd", row.get("per_request_usd", "0"))
    return at.built(
        "row",
        PriceRow,
        price=at.price,
        version=f"{at.price}@{valid_from.isoformat().removesuffix('+00:00').removesuffix('T00:00:00')}",
        valid_from_ms=(valid_from - _EPOCH) // _MS,
        valid_to_ms=(_instant(at, "valid_to", row["valid_to"]) - _EPOCH) // _MS
        if "valid_to" in row
        else None,
        rates=sized.rates,
        size_tiers=sized.size_tiers,
        service_tiers={name: _special(at, f"service_tiers.{name}", tier) for name, tier in tiers.items()},
        batch=_special(at, "batch", row["batch"]) if "batch" in row else None,
        hours=tuple(
            _hours(at, f"hours.{i}", w) for i, w in enumerate(at.items("hours", row.get("hours", [])))
        ),
        source=at.text("source", row.get("source", "")),
        checked_on=str(row.get("checked_on", "")),
        per_request_nano_usd=nano_from_pico(per_request_pico_usd),
    )


def _sized(at: _At, key: str, doc: Mapping[str, object]) -> SizedRates:
    dot = f"{key}." if key else ""
    tiers: list[tuple[int, Rates]] = []
    for i, given in enumerate(at.items(f"{dot}size_tiers", doc.get("size_tiers", []))):
        here = f"{dot}size_tiers.{i}"
        tier = at.mapping(here, given, ("above_input_tokens", "rates"))
        above = at.count(f"{here}.above_input_tokens", tier.get("above_input_tokens"))
        tiers.append((above, _rates(at, f"{here}.rates", tier.get("rates"))))
    return at.built(f"{dot}size_tiers", SizedRates, _rates(at, f"{dot}rates", doc.get("rates")), tuple(tiers))


def _rates(at: _At, key: str, doc: object) -> Rates:
    given = at.mapping(key, doc, _RATE_KEYS)
    rates: dict[str, int] = {}
    for name, value in given.items():
        pico_usd = at.pico_usd(f"{key}.{name}", value)
        per_token, rest = divmod(pico_usd, 1_000_000)
        if rest:
            at.fail(f"{key}.{name}", f"{value!r} is finer than a pico-dollar per token")
        rates[_RATE_KEYS[name]] = per_token
    for name in ("input_usd_per_mtok", "output_usd_per_mtok"):
        if name not in given:
            at.fail(f"{key}.{name}", "is missing")
    return at.built(key, Rates, **rates)


def _special(at: _At, key: str, doc: object) -> SizedRates | Ratio:
    given = at.mapping(key, doc, ("ratio", "rates", "size_tiers"))
    if "ratio" not in given:
        return _sized(at, key, given)
    text = given["ratio"]
    match = _RATIO.fullmatch(text) if isinstance(text, str) else None
    if match is None or len(given) > 1:
        at.fail(f"{key}.ratio", f'must be a quoted decimal such as "0.5", and alone, not {text!r}')
    decimals = match[2] or ""
    return at.built(key, Ratio, int(match[1] + decimals), 10 ** len(decimals))


def _hours(at: _At, key: str, doc: object) -> HourWindow:
    given = at.mapping(key, doc, ("from", "to", "rates", "size_tiers"))
    minutes: list[int] = []
    for name in ("from", "to"):
        match = _CLOCK.fullmatch(str(given.get(name)))
        if match is None:
            at.fail(f"{key}.{name}", f'must be a time of day in UTC such as "06:00", not {given.get(name)!r}')
        minutes.append(int(match[1]) * 60 + int(match[2]))
    return at.built(key, HourWindow, minutes[0], minutes[1], _sized(at, key, given))


def _instant(at: _At, key: str, value: object) -> datetime:
    """A date or time of the document, UTC unless it says otherwise; YAML loads an unquoted one as date or datetime."""
    if isinstance(value, date):
        value = value.isoformat()
    try:
        moment = datetime.fromisoformat(at.text(key, value))
    except ValueError:
        at.fail(key, f"must be a date such as 2026-09-01, not {value!r}")
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
