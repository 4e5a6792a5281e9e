"""The deployments behind one name, in the form in which routing draws from them: made once per catalog, read per request.

For the plain case: the key may use whatever there is, everything in the pool is well and has room for the prompt. All others
are `core.routing`'s, which looks at each deployment.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

from gateway.core.catalog import Catalog, Deployment, Operation, Order, Tier
from gateway.core.health import HealthState, subjects
from gateway.core.prices import PriceBook

#: No request tries more: behind them the order is that of the weights.
DRAWS = 3
NO_RANK: Mapping[str, float] = MappingProxyType({})
_NEARLY_ONE = 1.0 - 2**-53


class Level:
    """Deployments between which nothing but chance decides, from place `first` of a pool on."""

    __slots__ = ("ends", "first", "heaviest", "weights")

    def __init__(self, first: int, weights: list[int]) -> None:
        self.first = first
        self.weights = weights
        self.ends: list[int] = []
        total = 0
        for weight in weights:
            total += weight
            self.ends.append(total)
        self.heaviest = sorted(range(first, first + len(weights)), key=lambda at: -weights[at - first])

    def draw(self, pick: float) -> tuple[list[int], float]:
        """Places in a random order, the first few drawn by weight, and what is left of `pick`, which is uniform again."""
        first, ends, weights = self.first, self.ends, self.weights
        total = ends[-1]
        drawn: list[int] = []
        left = list(self.heaviest)
        while total and len(drawn) < DRAWS:
            at = pick * total
            for before in sorted(drawn):  # what is drawn takes no room any more
                if at >= ends[before - first] - weights[before - first]:
                    at += weights[before - first]
            n = bisect_right(ends, at)
            if n >= len(ends) or first + n in drawn:
                break  # by rounding
            weight = weights[n]
            pick = min(max((at - ends[n] + weight) / weight, 0.0), _NEARLY_ONE)
            total -= weight
            drawn.append(first + n)
            left.remove(first + n)
        return drawn + left, pick


class Pool:
    """What serves one operation under one name. `deployments` are in the order of priority, then of rank."""

    __slots__ = ("_alone", "_at", "_levels", "deployments", "room_tokens", "subjects")

    def __init__(self, serving: list[Deployment], rank: Mapping[str, float]) -> None:
        def equal(d: Deployment) -> tuple[int, float]:
            return d.priority, rank.get(d.name, 0.0)

        self.deployments = tuple(sorted(serving, key=equal))
        #: what any of them takes; None = no window is known
        self.room_tokens = min(
            (d.context_tokens for d in serving if d.context_tokens is not None), default=None
        )
        #: the names under which `health` speaks of them
        self.subjects = frozenset(name for d in serving for name in subjects(d))
        self._at = {d.name: at for at, d in enumerate(self.deployments)}
        self._levels: list[Level] = []
        for _, same in groupby(self.deployments, key=equal):
            weights = [d.weight for d in same]
            first = self._levels[-1].first + len(self._levels[-1].weights) if self._levels else 0
            self._levels.append(Level(first, weights))
        self._alone = len(self.deployments) == 1

    def takes(self, input_tokens: int, health: Mapping[str, HealthState], now_s: float) -> bool:
        """All are well, have their whole share, and have room for the prompt."""
        if self.room_tokens is not None and input_tokens > self.room_tokens:
            return False
        if not health or self.subjects.isdisjoint(health):
            return True
        states = [health[name] for name in self.subjects & health.keys()]
        return all(state.available(now_s) and state.share(now_s) == 1.0 for state in states)

    def ordered(self, pick: float, warm: Mapping[str, int]) -> tuple[Deployment, ...]:
        """The warmest first, then by priority and rank, and among equals by a weighted draw."""
        if self._alone:
            return self.deployments
        places: list[int] = []
        for level in self._levels:
            if len(level.weights) == 1:
                places.append(level.first)
            else:
                drawn, pick = level.draw(pick)
                places += drawn
        if warm:
            held = [(tokens, self._at[name]) for name, tokens in warm.items() if tokens and name in self._at]
            if len(held) > 1:
                held.sort(key=lambda h: (h[0], -places.index(h[1])))
            for _, at in held:  # each before the last
                places.remove(at)
                places.insert(0, at)
        return tuple(map(self.deployments.__getitem__, places))


class Pools:
    """Those of one catalog, and of one ranking of its deployments: low first within a priority, unknown ones before all."""

    def __init__(self, catalog: Catalog, rank: Mapping[str, float] = NO_RANK) -> None:
        self.catalog, self.rank = catalog, rank
        self._of_tiers: dict[tuple[Tier, Operation], Pool] = {}
        self._of_models: dict[tuple[str, Operation], Pool] = {}

    def of_tier(self, tier: Tier, operation: Operation) -> Pool | None:
        """None if nothing in it serves the operation."""
        pool = self._of_tiers.get((tier, operation))
        if pool is None:
            pool = self._pool(self.catalog.by_tier.get(tier, ()), operation)
            if pool is not None:
                self._of_tiers[tier, operation] = pool
        return pool

    def of_model(self, name: str, operation: Operation) -> Pool | None:
        """None if nothing of that name serves the operation: what is not there is not kept, names come from clients."""
        pool = self._of_models.get((name, operation))
        if pool is None:
            pool = self._pool(self.catalog.by_model.get(name, ()), operation)
            if pool is not None:
                self._of_models[name, operation] = pool
        return pool

    def _pool(self, there: Sequence[Deployment], operation: Operation) -> Pool | None:
        serving = [d for d in there if d.serves(operation)]
        return Pool(serving, self.rank) if serving else None


class CurrentPools:
    """The pools of the catalog that is in force. Where they are ranked by price, prices are looked at once a minute."""

    def __init__(self) -> None:
        self._pools: Pools | None = None
        self._book: PriceBook | None = None
        self._minute = 0

    def get(self, catalog: Catalog, book: PriceBook, now_ms: int) -> Pools:
        pools = self._pools
        if pools is None or pools.catalog is not catalog:
            return self._made(catalog, book, now_ms)
        by_price = catalog.order is Order.PRICE
        if by_price and (self._book is not book or self._minute != now_ms // 60_000):
            return self._made(catalog, book, now_ms)
        return pools

    def _made(self, catalog: Catalog, book: PriceBook, now_ms: int) -> Pools:
        rank = price_rank(catalog, book, now_ms) if catalog.order is Order.PRICE else NO_RANK
        self._pools = pools = Pools(catalog, rank)
        self._book, self._minute = book, now_ms // 60_000
        return pools


def price_rank(catalog: Catalog, book: PriceBook, now_ms: int) -> dict[str, float]:
    """By price, of three tokens read for each that is written; what has no price comes last."""
    rank: dict[str, float] = {}
    for d in catalog.deployments:
        row = book.find(d.price, now_ms)
        rank[d.name] = math.inf if row is None else 3.0 * row.rates.input + row.rates.output
    return rank
