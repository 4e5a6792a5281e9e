"""Costs equal an exact reference written from the dollar strings; ceilings hold; bad rows are told by key."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.prices import (
    Cost,
    PriceBook,
    PriceError,
    PriceRow,
    Rates,
    ceiling,
    cost,
    listed_models,
    load_price_book,
    parse_rows,
)
from gateway.core.usage import Usage

Doc = dict[str, Any]
MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
SONNET = {
    "input_usd_per_mtok": "3",
    "output_usd_per_mtok": "15",
    "cache_read_usd_per_mtok": "0.3",
    "cache_write_5m_usd_per_mtok": "3.75",
    "cache_write_1h_usd_per_mtok": "6",
}
FLAT = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"}


def row(**doc: Any) -> PriceRow:
    return parse_rows([{"price": "p/m", "rows": [{"rates": SONNET, **doc}]}])[0]


def usd(text: str) -> int:
    nano = Fraction(text) * 10**9
    assert nano.denominator == 1
    return nano.numerator


# --- examples ------------------------------------------------------------------------------------------


def test_the_worked_example_of_the_design() -> None:
    """money.md: 31,000 in of which 28,000 cached and 3,000 written, 1,200 out at $3/$15 per million."""
    used = Usage(cache_read=28_000, cache_write_5m=3_000, output=1_200)
    assert cost(row(), used, 0) == Cost(37_650_000, usd("0.111"), "p/m@1970-01-01")
    held = ceiling(
        row(), 0, input_bound_tokens=40_000, output_bound_tokens=8_192, writes=True, writes_1h=False
    )
    assert held == 272_880_000


def test_the_whole_request_costs_what_the_size_of_its_input_reaches() -> None:
    haiku = row(
        rates={"input_usd_per_mtok": "0.1", "output_usd_per_mtok": "0.5"},
        size_tiers=[
            {
                "above_input_tokens": 100_000,
                "rates": {"input_usd_per_mtok": "0.5", "output_usd_per_mtok": "2.5"},
            }
        ],
    )
    assert cost(haiku, Usage(input_uncached=100_000, output=1_000), 0).nano_usd == usd("0.0105")
    assert cost(haiku, Usage(input_uncached=1, cache_read=100_000, output=1_000), 0).nano_usd == usd(
        "0.0525005"
    )


def test_hours_of_the_day_may_wrap_midnight() -> None:
    night = row(hours=[{"from": "22:30", "to": "01:00", "rates": FLAT}])
    one_million = Usage(input_uncached=1_000_000)
    prices = {
        clock: cost(night, one_million, DAY_MS * 20_000 + ms).nano_usd
        for clock, ms in {
            "22:29": 22 * HOUR_MS + 30 * MINUTE_MS - 1,
            "22:30": 22 * HOUR_MS + 30 * MINUTE_MS,
            "00:59": HOUR_MS - 1,
            "01:00": HOUR_MS,
        }.items()
    }
    assert prices == {"22:29": usd("3"), "22:30": usd("1"), "00:59": usd("1"), "01:00": usd("3")}


def test_a_ceiling_sees_the_dearer_hour_that_a_request_may_run_into() -> None:
    peak = row(rates=FLAT, hours=[{"from": "06:00", "to": "10:00", "rates": SONNET}])

    def held(at_ms: int, run_s: int = 3600) -> int:
        return ceiling(
            peak,
            at_ms,
            input_bound_tokens=10**6,
            output_bound_tokens=0,
            writes=False,
            writes_1h=False,
            run_s=run_s,
        )

    assert held(4 * HOUR_MS) == usd("1")
    assert held(5 * HOUR_MS + 30 * MINUTE_MS) == usd("3")
    assert held(5 * HOUR_MS + 30 * MINUTE_MS, run_s=600) == usd("1")
    assert held(9 * HOUR_MS + 59 * MINUTE_MS) == usd("3")
    assert held(4 * HOUR_MS, run_s=86_400) == usd("3")


def test_a_ceiling_counts_a_lower_size_tier_that_is_dearer() -> None:
    odd = row(size_tiers=[{"above_input_tokens": 1_000, "rates": FLAT}])
    bounds: Doc = {"output_bound_tokens": 0, "writes": False, "writes_1h": False}
    assert ceiling(odd, 0, input_bound_tokens=1_001, **bounds) == usd("0.003")
    assert ceiling(odd, 0, input_bound_tokens=9_000, **bounds) == usd("0.009")


def test_a_class_without_a_price_is_never_cheaper_than_input() -> None:
    bare = Rates(10, 20)
    assert (bare.read, bare.write_5m, bare.write_1h, bare.write_12h) == (10, 10, 10, 10)
    default_write_only = Rates(10, 20, cache_read=1, cache_write_5m=13)
    assert (default_write_only.write_1h, default_write_only.write_12h) == (20, 25)
    anthropic = Rates(10, 20, cache_read=1, cache_write_5m=13, cache_write_1h=21)
    assert anthropic.write_12h == 21
    assert Rates(10, 20, cache_write_1h=21).write_5m == 21
    assert [r.prices_writes for r in (bare, default_write_only, anthropic)] == [False, True, True]


def test_service_tiers() -> None:
    tiers = row(
        service_tiers={
            "flex": {"ratio": "0.5"},
            "us": {"ratio": "1.1"},
            "fast": {"ratio": "2"},
            "slow": {"rates": FLAT},
        }
    )
    used = Usage(input_uncached=1_000_000)
    costs = {
        name: cost(tiers, used, 0, service_tier=name).nano_usd for name in ("auto", "flex", "fast+us", "slow")
    }
    assert costs == {"auto": usd("3"), "flex": usd("1.5"), "fast+us": usd("6.6"), "slow": usd("1")}


def test_a_service_tier_named_twice_counts_once() -> None:
    used = Usage(input_uncached=1_000_000)
    assert cost(
        row(service_tiers={"fast": {"ratio": "2"}}), used, 0, service_tier="fast+fast"
    ).nano_usd == usd("6")


def test_a_fraction_of_a_pico_dollar_still_rounds_up() -> None:
    halved = row(rates={**FLAT, "input_usd_per_mtok": "0.002001"}, service_tiers={"flex": {"ratio": "0.5"}})
    assert cost(halved, Usage(input_uncached=1), 0, service_tier="flex").nano_usd == 2


def test_a_ceiling_knows_which_cache_writes_may_happen() -> None:
    default_write_only = row(rates={**FLAT, "cache_write_5m_usd_per_mtok": "1.25"})

    def held(writes: bool, writes_1h: bool) -> int:
        return ceiling(
            default_write_only,
            0,
            input_bound_tokens=10**6,
            output_bound_tokens=0,
            writes=writes,
            writes_1h=writes_1h,
        )

    assert (held(False, False), held(True, False), held(True, True)) == (usd("1"), usd("1.25"), usd("2.5"))


def test_an_unknown_service_tier_costs_the_dearest_known_one_and_says_so() -> None:
    used = Usage(input_uncached=1_000_000)
    note = "service tier 'warp' has no price: charged at the dearest known tier"
    dear = row(service_tiers={"flex": {"ratio": "0.5"}, "priority": {"ratio": "2"}})
    assert cost(dear, used, 0, service_tier="warp") == Cost(usd("6"), usd("6"), "p/m@1970-01-01", note)
    assert cost(row(), used, 0, service_tier="warp") == Cost(usd("3"), usd("3"), "p/m@1970-01-01", note)


def test_batches() -> None:
    used = Usage(input_uncached=1_000_000)
    assert cost(row(batch={"ratio": "0.5"}), used, 0, batch=True).nano_usd == usd("1.5")
    assert cost(row(batch={"rates": FLAT}), used, 0, batch=True).nano_usd == usd("1")
    assert cost(row(), used, 0, batch=True).nano_usd == usd("3")


def test_a_price_per_request_is_added_once() -> None:
    per_request = row(per_request_usd="0.005")
    assert cost(per_request, Usage(), 0) == Cost(usd("0.005"), usd("0.005"), "p/m@1970-01-01")
    bounds: Doc = {
        "input_bound_tokens": 0,
        "output_bound_tokens": 1_000_000,
        "writes": True,
        "writes_1h": True,
    }
    assert ceiling(per_request, 0, **bounds) == usd("15.005")


# --- the book ------------------------------------------------------------------------------------------


def test_the_row_in_force_is_the_latest_that_has_begun() -> None:
    book = PriceBook.of(
        parse_rows(
            [
                {
                    "price": "p/m",
                    "rows": [
                        {"valid_from": "2026-09-01", "rates": FLAT},
                        {"valid_from": "2026-01-01", "valid_to": "2026-06-01", "rates": SONNET},
                    ],
                }
            ]
        )
    )
    first, second = 1_767_225_600_000, 1_788_220_800_000  # 2026-01-01, 2026-09-01
    in_june = 1_780_272_000_000

    def version(at_ms: int) -> str | None:
        found = book.find("p/m", at_ms)
        return None if found is None else found.version

    assert [version(t) for t in (first - 1, first, in_june - 1, in_june, second - 1, second)] == [
        None,
        "p/m@2026-01-01",
        "p/m@2026-01-01",
        None,
        None,
        "p/m@2026-09-01",
    ]
    assert book.find("p/other", second) is None


def test_own_rows_replace_all_shipped_rows_of_that_name() -> None:
    shipped = PriceBook.of(parse_rows([{"price": n, "rows": [{"rates": SONNET}]} for n in ("a/x", "b/y")]))
    own = parse_rows([{"price": "a/x", "rows": [{"valid_from": "2026-09-01", "rates": FLAT}]}])
    merged = shipped.merged(own)
    assert [r.version for r in merged.rows()] == ["a/x@2026-09-01", "b/y@1970-01-01"]
    assert [r.version for r in shipped.rows()] == ["a/x@1970-01-01", "b/y@1970-01-01"]


def test_rows_of_one_price_must_not_overlap() -> None:
    rows = [
        {"valid_from": "2026-01-01", "valid_to": "2026-07-01", "rates": FLAT},
        {"valid_from": "2026-06-01", "rates": FLAT},
    ]
    with pytest.raises(PriceError, match=r"price 'p/m', row 1, valid_from: this row begins before"):
        parse_rows([{"price": "p/m", "rows": rows}])


# --- reading -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rates": {**FLAT, "output_usd_per_mtok": 0.25}}, "rates.output_usd_per_mtok: must be dollars as a quoted string"),
        ({"rates": {"input_usd_per_mtok": "1"}}, "rates.output_usd_per_mtok: is missing"),
        ({"rates": {**FLAT, "input": "1"}}, "rates.input: is not known; known: cache_read_usd_per_mtok"),
        ({"rates": {**FLAT, "input_usd_per_mtok": "0.0000001"}}, "rates.input_usd_per_mtok: '0.0000001' is finer than"),
        ({"rates": {**FLAT, "input_usd_per_mtok": "100000.1"}}, "rates: input must be an integer from 0 to"),
        ({"rates": {**FLAT, "input_usd_per_mtok": "-1"}}, "rates.input_usd_per_mtok: '-1' is not a decimal number"),
        ({"rates": None}, "rates: must be a mapping, not None"),
        ({"valid_from": "soon"}, "valid_from: must be a date such as 2026-09-01, not 'soon'"),
        ({"valid_from": "2026-09-01", "valid_to": "2026-09-01"}, "row: valid_to must be later than valid_from"),
        ({"size_tiers": [{"above_input_tokens": "many", "rates": FLAT}]}, "size_tiers.0.above_input_tokens: must be a number"),
        ({"size_tiers": [{"above_input_tokens": 9, "rates": FLAT}] * 2}, "size_tiers: size tiers must rise"),
        ({"service_tiers": {"flex": {"ratio": 0.5}}}, 'service_tiers.flex.ratio: must be a quoted decimal such as "0.5"'),
        ({"service_tiers": {"flex": {"ratio": "11"}}}, "service_tiers.flex: a ratio must be from 0 to 10"),
        ({"service_tiers": {"flex": {"ratio": "1", "rates": FLAT}}}, "service_tiers.flex.ratio: must be a quoted decimal"),
        ({"batch": {}}, "batch.rates: must be a mapping"),
        ({"hours": [{"from": "25:00", "to": "01:00", "rates": FLAT}]}, "hours.0.from: must be a time of day in UTC"),
        ({"hours": [{"from": "01:00", "to": "01:00", "rates": FLAT}]}, "hours.0: an hour window must lie within a day"),
        ({"hours": [{"from": a, "to": b, "rates": FLAT} for a, b in (("01:00", "04:00"), ("03:00", "05:00"))]}, "row: hour windows must not overlap"),
        ({"per_request_usd": "free"}, "per_request_usd: 'free' is not a decimal number"),
        ({"hrs": []}, "hrs: is not known"),
    ],
)  # fmt: skip
def test_a_bad_row_is_told_by_price_row_and_key(change: Doc, message: str) -> None:
    good = {"valid_from": "2020-01-01", "valid_to": "2020-02-01", "rates": FLAT}
    with pytest.raises(PriceError) as e:
        parse_rows([{"price": "p/m", "rows": [good, {"valid_from": "2026-01-01", "rates": FLAT, **change}]}])
    assert str(e.value).startswith(f"price 'p/m', row 1, {message}")


@pytest.mark.parametrize(
    ("doc", "message"),
    [
        (None, "price '', : must be a mapping, not None"),
        ({"version": 2, "models": []}, "price '', version: must be 1, not 2"),
        ({"version": 1, "models": {}}, "price '', models: must be a list, not {}"),
        ({"version": 1, "models": [{"price": "no-slash", "rows": []}]}, "price 'no-slash', price: must be \"provider/model\""),
        ({"version": 1, "models": [{"price": "p/m", "rows": []}]}, "price 'p/m', rows: must be a list of at least one row"),
        ({"version": 1, "models": [{"price": "p/m", "rows": [{"rates": FLAT}]}] * 2}, "price 'p/m', price: is given twice"),
    ],
)  # fmt: skip
def test_a_bad_document_is_told(doc: object, message: str) -> None:
    with pytest.raises(PriceError) as e:
        load_price_book(doc)
    assert str(e.value).startswith(message)


def test_a_listed_model_must_have_a_known_tier_and_operations() -> None:
    model = {"price": "p/m", "provider": "p", "model": "m"}
    with pytest.raises(PriceError, match="price 'p/m', tier: 'huge' is not a valid Tier"):
        listed_models({"version": 1, "models": [{**model, "tier": "huge"}]})
    with pytest.raises(PriceError, match="price 'p/m', operations: 'sing' is not a valid Operation"):
        listed_models({"version": 1, "models": [{**model, "operations": ["sing"]}]})


# --- properties ----------------------------------------------------------------------------------------

dollars = st.integers(0, 200_000_000).map(lambda n: f"{n // 10**6}.{n % 10**6:06d}")
OPTIONAL = ("cache_read", "cache_write_5m", "cache_write_1h", "cache_write_12h")


@st.composite
def rates_docs(draw: st.DrawFn) -> Doc:
    names = ["input", "output", *draw(st.lists(st.sampled_from(OPTIONAL), unique=True))]
    return {f"{n}_usd_per_mtok": draw(dollars) for n in names}


@st.composite
def schedules(draw: st.DrawFn) -> Doc:
    edges = sorted(draw(st.sets(st.integers(0, 3_000), max_size=3)))
    doc: Doc = {"rates": draw(rates_docs())}
    return {**doc, "size_tiers": [{"above_input_tokens": e, "rates": draw(rates_docs())} for e in edges]}


ratios = st.integers(0, 3_000).map(lambda n: {"ratio": f"{n // 1000}.{n % 1000:03d}"})


@st.composite
def row_docs(draw: st.DrawFn) -> Doc:
    doc = draw(schedules())
    doc["service_tiers"] = draw(st.dictionaries(st.sampled_from(["flex", "priority"]), ratios | schedules()))
    if draw(st.booleans()):
        doc["batch"] = draw(ratios | schedules())
    edges = draw(
        st.sampled_from([(), ("01:00", "04:00"), ("23:00", "00:30"), ("01:00", "04:00", "06:00", "10:00")])
    )
    pairs = zip(edges[::2], edges[1::2], strict=True)
    doc["hours"] = [{"from": a, "to": b, **draw(schedules())} for a, b in pairs]
    doc["per_request_usd"] = draw(st.sampled_from(["0", "0.005"]))
    return doc


tokens = st.integers(0, 1_500)
usages = st.builds(
    Usage,
    input_uncached=tokens,
    cache_read=tokens,
    cache_write_5m=tokens,
    cache_write_1h=tokens,
    cache_write_12h=tokens,
    output=tokens,
)
instants = st.integers(0, 3 * DAY_MS)
tier_names = st.sampled_from(["", "default", "flex", "priority", "flex+priority", "warp"])


def reference_usd(doc: Doc, usage: Usage, at_ms: int, tier: str, batch: bool) -> tuple[Fraction, Fraction]:
    """(cost, list cost) in dollars, before rounding and without the price per request, from the strings alone."""
    minutes = at_ms // 1_000 % 86_400 // 60
    base = doc
    for window in doc["hours"]:
        start, end = (int(window[k][:2]) * 60 + int(window[k][3:]) for k in ("from", "to"))
        if start <= minutes < end or (start > end and not end <= minutes < start):
            base = window

    def priced(special: Doc | None) -> tuple[Fraction, Fraction]:
        ratio = Fraction(special["ratio"]) if special and "ratio" in special else Fraction(1)
        schedule = special if special and "rates" in special else base
        total = usage.input_uncached + usage.cache_read + usage.cache_write_5m
        total += usage.cache_write_1h + usage.cache_write_12h
        rates = [
            schedule["rates"],
            *(t["rates"] for t in schedule["size_tiers"] if total > t["above_input_tokens"]),
        ][-1]
        usd = {name: Fraction(rates[f"{name}_usd_per_mtok"]) / 10**6 for name in ("input", "output")}
        known = {n: Fraction(rates[k]) / 10**6 for n in OPTIONAL if (k := f"{n}_usd_per_mtok") in rates}
        writes = {n: v for n, v in known.items() if n != "cache_read"}
        top = max([usd["input"], *writes.values()])
        only_default = set(writes) == {"cache_write_5m"}
        long = {"cache_write_1h": Fraction(2), "cache_write_12h": Fraction(5, 2)}
        bill = usage.input_uncached * usd["input"] + usage.output * usd["output"]
        bill += usage.cache_read * known.get("cache_read", usd["input"])
        for name in OPTIONAL[1:]:
            unknown = max(top, long[name] * usd["input"]) if only_default and name in long else top
            # a rate is a whole number of pico-dollars per token
            unknown = Fraction(-(-unknown * 10**12 // 1), 10**12)
            bill += getattr(usage, name) * known.get(name, unknown)
        return bill * ratio, (total * usd["input"] + usage.output * usd["output"]) * ratio

    tiers = doc["service_tiers"]
    if batch:
        return priced(doc.get("batch"))
    asked = [t for t in tier.split("+") if t not in ("", "default")]
    if any(t not in tiers for t in asked):
        return max(priced(None), *(priced(t) for t in tiers.values())) if tiers else priced(None)
    ratio = Fraction(1)
    schedule: Doc | None = None
    for t in asked:
        if "ratio" in tiers[t]:
            ratio *= Fraction(tiers[t]["ratio"])
        else:
            schedule = tiers[t]
    one, listed = priced(schedule)
    return one * ratio, listed * ratio


def up(usd: Fraction) -> int:
    return -int(-usd * 10**9 // 1)


@given(row_docs(), usages, instants, tier_names, st.booleans())
def test_a_cost_is_the_exact_sum_rounded_up_once(
    doc: Doc, usage: Usage, at: int, tier: str, batch: bool
) -> None:
    priced = parse_rows([{"price": "p/m", "rows": [doc]}])[0]
    exact, listed = reference_usd(doc, usage, at, tier, batch)
    fixed = usd(doc["per_request_usd"])
    got = cost(priced, usage, at, service_tier=tier, batch=batch)
    assert got.nano_usd == up(exact) + fixed
    if tier != "warp" or batch:  # of equally dear tiers either may set the list price
        assert got.list_nano_usd == up(listed) + fixed


@given(row_docs(), usages, instants, st.integers(0, 3_600_000), tier_names, tokens, tokens, st.data())
def test_no_bill_within_the_bounds_exceeds_the_ceiling(
    doc: Doc, usage: Usage, at: int, later: int, tier: str, more_in: int, more_out: int, data: st.DataObject
) -> None:
    priced = parse_rows([{"price": "p/m", "rows": [doc]}])[0]
    writes, writes_1h = data.draw(st.sampled_from([(False, False), (True, False), (True, True)]))
    used = Usage(
        input_uncached=usage.input_uncached,
        cache_read=usage.cache_read,
        cache_write_5m=usage.cache_write_5m if writes else 0,
        cache_write_1h=usage.cache_write_1h if writes_1h else 0,
        cache_write_12h=usage.cache_write_12h if writes_1h else 0,
        output=usage.output,
    )
    bound = ceiling(
        priced,
        at,
        input_bound_tokens=used.input_total + more_in,
        output_bound_tokens=used.output + more_out,
        writes=writes,
        writes_1h=writes_1h,
        service_tier=tier,
    )
    assert cost(priced, used, at + later, service_tier=tier).nano_usd <= bound


def test_the_largest_usage_at_the_largest_price_fits_a_bigint() -> None:
    top = "100000"
    huge = row(
        rates={f"{n}_usd_per_mtok": top for n in ("input", "output", *OPTIONAL)},
        service_tiers={"dear": {"ratio": "10"}},
    )
    most = Usage(*[10**9] * 6)
    assert cost(huge, most, 0, service_tier="dear").nano_usd == 6 * 10**18 < 2**63
    with pytest.raises(ValueError, match="the input bound must be from 0 to 1000000000 tokens"):
        ceiling(huge, 0, input_bound_tokens=10**9 + 1, output_bound_tokens=0, writes=True, writes_1h=True)
