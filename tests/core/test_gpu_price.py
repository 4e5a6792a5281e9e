"""A server paid by the hour has a price per token like any other, and what nobody paid for is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.cache_rules import CacheRules
from gateway.core.catalog import Deployment, Provider, Tier, Wire
from gateway.core.gpu_price import GpuBill, GpuMeter, GpuPrice
from gateway.core.money import NANO_PER_USD
from gateway.core.prices import PriceBook, PriceRow, Rates, ceiling, cost
from gateway.core.switching import Pace, Side, Warm, terms_of, weigh
from gateway.core.usage import Usage

HOUR_MS = 3_600_000
OURS = GpuPrice(2_500_000_000, 16_000, 900, 400_000, utilisation_milli=600)


def test_the_hour_is_spread_over_what_a_replica_serves_in_it() -> None:
    # $2.50 over 2,160 busy seconds of the hour: 0.1157 cents a second, of 16,000, 400,000 or 900 tokens
    assert OURS.rates == Rates(input=72_338, output=1_286_009, cache_read=2_894)
    row = PriceRow("own:gpu/m", "own-1", 0, OURS.rates)
    used = Usage(input_uncached=20_000, cache_read=180_000, output=500)
    assert cost(row, used, 0).nano_usd == 2_610_685  # 1,446,760 + 520,920 + 643,004.5, rounded up once
    assert (
        ceiling(row, 0, input_bound_tokens=200_000, output_bound_tokens=500, writes=False, writes_1h=False)
        == 15_110_605
    )


def test_a_cached_token_nobody_measured_costs_like_another() -> None:
    assert GpuPrice(2_500_000_000, 16_000, 900).rates == Rates(72_338, 1_286_009, None)
    assert GpuPrice(2_500_000_000, 16_000, 900).rates.read == 72_338


@given(st.integers(0, 100 * NANO_PER_USD), st.integers(1, 100_000), st.integers(300, 1_000))
def test_a_replica_busy_for_that_share_of_the_hour_charges_what_it_costs(
    nano_usd: int, per_s: int, milli: int
) -> None:
    rates = GpuPrice(nano_usd, per_s, per_s, utilisation_milli=milli).rates
    tokens = per_s * 3_600 * milli  # in a thousand hours
    over_pico_usd = rates.input * tokens - nano_usd * 1_000 * 1_000
    assert 0 <= over_pico_usd < tokens  # less than a pico-dollar a token too much
    assert rates.output == rates.input


def test_a_rate_that_no_price_may_have_is_refused() -> None:
    with pytest.raises(ValueError, match="dearer than a price may be"):
        _ = GpuPrice(100 * NANO_PER_USD, 1, 1, utilisation_milli=1).rates


@pytest.mark.parametrize(
    ("price", "wrong"),
    [
        ((-1, 1, 1), "less than nothing"),
        ((1, 0, 1), "at least one token"),
        ((1, 1, 0), "at least one token"),
        ((1, 10, 1, 9), "cannot take longer"),
        ((1, 1, 1, None, 0), "at most 1"),
        ((1, 1, 1, None, 1_001), "at most 1"),
    ],
)
def test_a_price_that_cannot_be_is_not_built(price: tuple[int, ...], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        GpuPrice(*price)


# --- the switch arithmetic: warm on our GPU against cached at the API -------------------------------------

API = Deployment(
    "api/large", Provider("api", Wire.OPENAI, "https://api.example/v1", ""), "large", "large", "api/large"
)
GPU = Deployment(
    "gpu/m", Provider("gpu", Wire.OPENAI, "http://gpu/v1", ""), "m", "m", "own:gpu/m", tier=Tier.SMALL
)
#: $3 input, $0.30 cached, $15 output a million
BOOK = PriceBook.of(
    [
        PriceRow("api/large", "1", 0, Rates(3_000_000, 15_000_000, 300_000)),
        PriceRow("own:gpu/m", "own-1", 0, OURS.rates),
    ]
)


def side(of: Deployment, warm_tokens: int) -> Side:
    terms = terms_of(BOOK, CacheRules(), of, 0)
    assert terms is not None
    return Side(terms, Warm(warm_tokens, 60.0))


def test_warm_on_our_gpu_is_compared_with_cached_at_the_api() -> None:
    once = Pace(100_000, 0, 0, 10.0, remaining_turns=0)
    # 100k tokens read: 0.03 dollars at the API, 0.000289 here; both warm, so one turn is enough
    both_warm = weigh(side(API, 100_000), side(GPU, 100_000), once, 0.0)
    assert (both_warm.saving_nano_usd, both_warm.going_nano_usd) == (29_710_600, 0)
    assert both_warm.pays
    # cold here: the prefill of 100k tokens costs 0.0069 dollars more than reading them, still less than is saved
    cold = weigh(side(API, 100_000), side(GPU, 0), once, 0.0)
    assert (cold.going_nano_usd, cold.pays) == (6_944_400, True)


def test_an_idle_expensive_gpu_is_not_worth_leaving_a_warm_api_for() -> None:
    dear = GpuPrice(98 * NANO_PER_USD, 16_000, 900, 400_000, utilisation_milli=50)
    book = BOOK.merged([PriceRow("own:gpu/m", "own-2", 0, dear.rates)])
    terms = terms_of(book, CacheRules(), GPU, 0)
    assert terms is not None
    assert terms.read == 1_361_112  # four times what a cached token costs at the API
    found = weigh(side(API, 100_000), Side(terms, Warm()), Pace(100_000, 0, 0, 10.0, 9), 0.0)
    assert (found.pays, found.saving_nano_usd) == (False, -106_111_200)


# --- what idle time costs -----------------------------------------------------------------------------------


def test_idle_time_is_what_the_replicas_cost_beyond_what_was_charged() -> None:
    meter, prices = GpuMeter(), {"gpu/m": OURS}
    meter.tick(1_000, prices, {"gpu/m": 3})  # nothing is known of before
    meter.tick(1_000 + HOUR_MS, prices, {"gpu/m": 3})
    meter.charged("gpu/m", 2_500_000_000)
    assert meter.bills() == {"gpu/m": GpuBill(3 * HOUR_MS, 7_500_000_000, 2_500_000_000, 600)}
    bill = meter.bills()["gpu/m"]
    assert bill.idle_nano_usd == 5_000_000_000
    assert bill.utilisation == pytest.approx(0.2)  # a third of the 60 % at which its price pays for it


def test_replicas_that_come_and_go_are_counted_while_they_are_there() -> None:
    meter, prices = GpuMeter(), {"gpu/m": OURS}
    for at_ms, live in ((0, 1), (HOUR_MS // 2, 1), (HOUR_MS, 4), (HOUR_MS + 7, 0)):
        meter.tick(at_ms, prices, {"gpu/m": live} if live else {})
    bill = meter.bills()["gpu/m"]
    assert bill.replica_ms == HOUR_MS // 2 + 4 * (HOUR_MS // 2)
    assert bill.cost_nano_usd == 6_250_000_000
    assert GpuMeter().bills() == {}
    assert GpuBill(0, 0, 0, 600).utilisation == 0.0
