"""Routing out of pools comes to what routing deployment by deployment comes to; and pools are those of the catalog in force."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.catalog import Catalog, Deployment, Operation, Order, Provider, Tier, Wire
from gateway.core.errors import GatewayError
from gateway.core.health import HealthState
from gateway.core.pools import CurrentPools, Pools, price_rank
from gateway.core.prices import PriceBook, PriceRow, Rates
from gateway.core.routing import Needs, Route, route
from gateway.core.rules import Caps, Decision

OPENAI = Provider("openai", Wire.OPENAI, "http://127.0.0.1:1/v1", "key")
ANTHROPIC = Provider("anthropic", Wire.ANTHROPIC, "http://127.0.0.1:1/v1", "")
NOW_S = 1_000.0
STATES = (
    HealthState(),
    HealthState(failures_in_a_row=2, window=((199, 3, 2),)),
    HealthState(ejections=1, closed_at_s=NOW_S - 61),  # well for long
    HealthState(ejections=1, closed_at_s=NOW_S - 5),  # well since lately: a part of its share
    HealthState(open_until_s=NOW_S + 5, ejections=1),
    HealthState(cooling_until_s=NOW_S + 5),
    HealthState(drained=True),
)
PLACES = ("d0", "d1", "d2", "d3", "d4", "d5")


@st.composite
def catalogs(draw: st.DrawFn) -> Catalog:
    def deployment(name: str) -> Deployment:
        provider = draw(st.sampled_from((OPENAI, OPENAI, ANTHROPIC)))
        model = draw(st.sampled_from(("m", "n")))
        return Deployment(
            name,
            provider,
            model,
            model,
            "up/m",
            draw(st.sampled_from((Tier.STANDARD, Tier.STANDARD, Tier.SMALL))),
            weight=draw(st.sampled_from((0, 1, 30, 100))),
            priority=draw(st.integers(0, 1)),
            context_tokens=draw(st.sampled_from((None, None, 500))),
        )

    return Catalog.of(tuple(deployment(name) for name in PLACES[: draw(st.integers(1, 6))]))


@given(
    catalog=catalogs(),
    model=st.sampled_from(("m", "n", "auto", "standard", "small", "fast", "none")),
    operation=st.sampled_from((Operation.CHAT, Operation.MESSAGES)),
    decision=st.sampled_from((None, Decision("r", Tier.SMALL, Caps(), "so"), Decision("r", Tier.FAST, Caps(), "so"))),
    health=st.dictionaries(st.sampled_from((*PLACES, "credential:key")), st.sampled_from(STATES), max_size=3),
    warm=st.dictionaries(st.sampled_from((*PLACES, "gone")), st.integers(0, 9), max_size=3),
    tokens=st.sampled_from((10, 500, 501)),
    pick=st.integers(0, 10_006),
)  # fmt: skip
def test_a_pool_gives_the_same_candidates_in_the_same_order(
    catalog: Catalog,
    model: str,
    operation: Operation,
    decision: Decision | None,
    health: dict[str, HealthState],
    warm: dict[str, int],
    tokens: int,
    pick: int,
) -> None:
    def found(pools: Pools | None) -> Route | str:
        more: dict[str, Any] = {"pick": (pick + 0.5) / 10_007, "now_s": NOW_S, "warm": warm}
        try:
            return route(
                model, operation, catalog, decision, health, lambda *_: True, needs=Needs(tokens), pools=pools, **more
            )  # fmt: skip
        except GatewayError as error:
            return error.message

    assert found(Pools(catalog)) == found(None)


def test_equals_by_rank_are_drawn_by_weight_and_others_come_in_its_order() -> None:
    deployments = tuple(
        Deployment(n, OPENAI, "m", "m", "up/m", weight=w) for n, w in (("a", 1), ("b", 3), ("c", 1))
    )
    pool = Pools(Catalog.of(deployments), {"a": 2.0, "b": 1.0, "c": 1.0}).of_model("m", Operation.CHAT)
    assert pool is not None
    orders = ["".join(d.name for d in pool.ordered((n + 0.5) / 100, {})) for n in range(100)]
    assert {order: orders.count(order) for order in orders} == {"bca": 75, "cba": 25}
    assert [d.name for d in pool.ordered(0.0, {"a": 5})] == ["a", "b", "c"]


def test_pools_are_made_anew_with_the_catalog_and_by_price_once_a_minute() -> None:
    cheap, dear = Rates(1, 1, 1, 1), Rates(9, 9, 9, 9)
    row = PriceRow("up/a", "up/a@1", 0, cheap)
    book = PriceBook.of(
        [row, PriceRow("up/a", "up/a@2", 120_000, dear), PriceRow("up/b", "up/b@1", 0, Rates(5, 5, 5, 5))]
    )
    a, b = (Deployment(n, OPENAI, "m", "m", f"up/{n}") for n in ("a", "b"))
    unpriced = Deployment("c", OPENAI, "m", "m", "up/c")
    catalog = Catalog.of((a, b, unpriced), order=Order.PRICE)
    assert price_rank(catalog, book, 0) == {"a": 4.0, "b": 20.0, "c": math.inf}
    current = CurrentPools()

    def first(catalog: Catalog, now_ms: int) -> str:
        pool = current.get(catalog, book, now_ms).of_tier(Tier.STANDARD, Operation.CHAT)
        assert pool is not None
        return pool.ordered(0.0, {})[0].name

    assert [first(catalog, at_ms) for at_ms in (0, 119_999, 120_000)] == ["a", "a", "b"]
    kept = current.get(catalog, book, 150_000)
    assert current.get(catalog, book, 179_999) is kept
    assert first(Catalog.of((a,), order=Order.PRICE), 179_999) == "a"
    by_weight = replace(catalog, order=Order.WEIGHT)
    kept = current.get(by_weight, book, 0)
    assert current.get(by_weight, PriceBook.of([row]), 10**9) is kept
