"""Ways of picking a replica: those that others ship, one that knows everything, and ours."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Callable, Sequence

from bench.gpu_prompts import BLOCK_TOKENS, mixed
from bench.gpu_replicas import Engine, Policy, Request
from gateway.core.replicas.fleet import Fleet
from gateway.core.replicas.index import PrefixIndex
from gateway.core.replicas.scrape import Scrape
from gateway.core.replicas.terms import Ask, End, EndKind, FleetPolicy

#: Links of the first 1,000 tokens, about.
_SHORT_PREFIX = 16
_VIRTUAL_NODES = 160


class Quiet:
    """A policy that learns nothing from how requests go."""

    def first_chunk(self, request: Request, now_s: float) -> None:
        pass

    def ended(self, request: Request, now_s: float) -> None:
        pass


class RoundRobin(Quiet):
    def __init__(self) -> None:
        self._next = 0

    def pick(self, request: Request, engines: Sequence[Engine]) -> int:  # noqa: ARG002
        self._next += 1
        return (self._next - 1) % len(engines)


class LeastRequests(Quiet):
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def pick(self, request: Request, engines: Sequence[Engine]) -> int:  # noqa: ARG002
        return min(range(len(engines)), key=lambda i: (engines[i].active, self._rng.random()))


class BoundedHashing(Quiet):
    """A ring of virtual nodes; whoever has more than `bound` times the mean of requests in flight is passed over."""

    def __init__(self, engines: int, bound: float, key: Callable[[Request], int]) -> None:
        self._bound, self._key = bound, key
        ring = sorted((mixed(7, i, v), i) for i in range(engines) for v in range(_VIRTUAL_NODES))
        self._points = [point for point, _ in ring]
        self._owners = [owner for _, owner in ring]

    def pick(self, request: Request, engines: Sequence[Engine]) -> int:
        most = max(1.0, self._bound * (sum(e.active for e in engines) + 1) / len(engines))
        start = bisect(self._points, self._key(request))
        for step in range(len(self._owners)):
            owner = self._owners[(start + step) % len(self._owners)]
            if engines[owner].active + 1 <= most:
                return owner
        return min(range(len(engines)), key=lambda i: engines[i].active)


def by_thread(request: Request) -> int:
    """A sub-agent has a session of its own, which suits hashing best."""
    return mixed(11, request.turn.thread)


def by_short_prefix(request: Request) -> int:
    links = request.turn.chain.links[:_SHORT_PREFIX]
    return mixed(13, links[-1] if links else 0)


class CacheAware(Quiet):
    """The router of vLLM and SGLang: the longest match above a threshold, unless requests in flight are unbalanced."""

    def __init__(self, engines: int, kv_tokens: int, threshold: float, above: int, times: float) -> None:
        self._threshold, self._above, self._times = threshold, above, times
        self._indexes = [PrefixIndex(kv_tokens // BLOCK_TOKENS, 1 << 20) for _ in range(engines)]

    def pick(self, request: Request, engines: Sequence[Engine]) -> int:
        links = request.turn.chain.links
        active = [e.active for e in engines]
        matched = [index.match(links) for index in self._indexes]
        if max(active) - min(active) > self._above and max(active) > self._times * min(active):
            found = active.index(min(active))
        elif max(matched) > self._threshold * max(1, len(links)):
            found = matched.index(max(matched))
        else:
            found = min(range(len(engines)), key=lambda i: (active[i], self._indexes[i].blocks))
        self._indexes[found].add(links)
        return found


class Greedy(Quiet):
    """Knows what is cached and what is queued, in true tokens, and looks no further than this request."""

    def pick(self, request: Request, engines: Sequence[Engine]) -> int:
        blocks = request.turn.blocks
        return min(
            range(len(engines)),
            key=lambda i: (
                engines[i].backlog - engines[i].cache.match(blocks) * BLOCK_TOKENS,
                engines[i].active,
            ),
        )


class Ours:
    """The product's fleet, fed with what a gateway sees: bytes, first chunks, and the usage of each answer."""

    def __init__(self, engines: int, kv_tokens: int, prefill_per_s: float, seed: int) -> None:
        self.fleet = Fleet(FleetPolicy(r_peak_tokens_per_s=prefill_per_s))
        self._rng = random.Random(seed)
        self._addresses = [f"10.0.0.{i}:8000" for i in range(engines)]
        self.fleet.members(self._addresses, 0.0)
        for address in self._addresses:
            self.fleet.scraped(address, Scrape(kv_cache_size_tokens=kv_tokens, block_size=BLOCK_TOKENS), 0.0)

    def pick(self, request: Request, engines: Sequence[Engine]) -> int:  # noqa: ARG002
        turn = request.turn
        ask = Ask(turn.chain, f"{turn.session}/{turn.thread}", str(turn.session))
        pick = self.fleet.pick(ask, request.arrived_s, self._rng.random())
        assert pick is not None, "no replica is ever drained here"
        self.fleet.sent(str(request.number), ask, pick, request.arrived_s)
        return self._addresses.index(pick.address)

    def first_chunk(self, request: Request, now_s: float) -> None:
        self.fleet.first_chunk(str(request.number), now_s)

    def ended(self, request: Request, now_s: float) -> None:
        turn = request.turn
        end = End(EndKind.OK, turn.tokens, request.cached_tokens, turn.output_tokens)
        self.fleet.ended(str(request.number), end, now_s)


NAMES = {
    "round_robin": "round robin",
    "least_requests": "least requests",
    "session_1.25": "bounded hashing of the session, c = 1.25",
    "session_2": "bounded hashing of the session, c = 2",
    "prefix_1.25": "bounded hashing of the first 1k tokens, c = 1.25",
    "cache_aware": "cache_aware (0.3 / 8 / 1.5)",
    "greedy": "greedy, with exact knowledge",
    "ours": "ours: sticky until saturated, predicted tokens",
}


def policy(name: str, engines: int, kv_tokens: int, prefill_per_s: float, seed: int) -> Policy:
    """Of `NAMES`; a new one, without memory."""
    match name:
        case "round_robin":
            return RoundRobin()
        case "least_requests":
            return LeastRequests(seed)
        case "session_1.25":
            return BoundedHashing(engines, 1.25, by_thread)
        case "session_2":
            return BoundedHashing(engines, 2.0, by_thread)
        case "prefix_1.25":
            return BoundedHashing(engines, 1.25, by_short_prefix)
        case "cache_aware":
            return CacheAware(engines, kv_tokens, 0.3, 8, 1.5)
        case "greedy":
            return Greedy()
        case "ours":
            return Ours(engines, kv_tokens, prefill_per_s, seed)
    raise ValueError(f"no policy is called {name!r}")
