"""Simulated replicas: prefill first come first served at a fixed rate, an LRU cache of token blocks, decode beside it.

What is cached is looked up when prefill starts, and is there for others when it is over. As in vLLM, the last token is
always computed, and a request's blocks count as used again when it ends, the last one as the oldest. Left out: chunks of
several prompts in one step, memory of running requests, decode that slows down prefill.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.gpu_prompts import BLOCK_TOKENS, Run, Turn
from gateway.core.replicas.index import PrefixIndex

FIRST_TOKEN_S = 0.05
DECODE_TOKENS_PER_S = 60.0
_ENDLESS_TOKENS = 1 << 62


class Cache:
    """Token blocks, the least recently used out first; the last blocks of a prompt count as older than its first.

    A block is named by all that is before it, so a tree of runs holds the same as a list of single blocks would
    (tests/core/test_replicas_routing.py), and a prompt costs a few steps instead of one for each of its blocks.
    """

    def __init__(self, tokens: int) -> None:
        self._blocks = PrefixIndex(max(1, tokens // BLOCK_TOKENS), nodes_max=1 << 30)

    def match(self, blocks: array[int]) -> int:
        return self._blocks.match(blocks)

    def use(self, blocks: array[int]) -> None:
        self._blocks.add(blocks)


@dataclass(slots=True, eq=False)
class Request:
    """A turn on its way."""

    number: int
    turn: Turn
    arrived_s: float
    run: Run
    step: int
    cached_tokens: int = 0
    uncached_tokens: int = 0  # as true as they are known: at arrival, then at the start of prefill
    replica: int = 0


@dataclass(slots=True, eq=False)
class Engine:
    """One replica."""

    cache: Cache
    queue: deque[Request] = field(default_factory=deque)
    working: Request | None = None
    active: int = 0
    backlog: int = 0  # true uncached tokens, as far as known


class Policy(Protocol):
    """Where a request goes. It may look at `engines`; an honest one looks at `active` alone, which are own counts."""

    def pick(self, request: Request, engines: Sequence[Engine]) -> int: ...
    def first_chunk(self, request: Request, now_s: float) -> None: ...
    def ended(self, request: Request, now_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Result:
    requests: int
    prompt_tokens: int
    cached_tokens: int
    seen_tokens: int  # that some request before had: what a cache without end would have had
    first_token_s: tuple[float, ...]
    most_of_fair_share: float  # requests of the busiest replica over the mean

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def best_hit_rate(self) -> float:
        return self.seen_tokens / self.prompt_tokens

    def first_token_at(self, part: float) -> float:
        return sorted(self.first_token_s)[min(self.requests - 1, int(self.requests * part))]


class Simulation:
    """Plays runs against engines under a policy."""

    def __init__(
        self, runs: Sequence[Run], policy: Policy, engines: int, kv_tokens: int, prefill_per_s: float
    ) -> None:
        self._policy = policy
        self._engines = [Engine(Cache(kv_tokens)) for _ in range(engines)]
        self._prefill_per_s = prefill_per_s
        self._events: list[tuple[float, int, Callable[[float, Request], None], Request]] = []
        self._numbers = 0
        self._seen = Cache(_ENDLESS_TOKENS)
        self._prompt = self._cached = self._seen_tokens = 0
        self._first_s: list[float] = []
        self._per_engine = [0] * engines
        for run in runs:
            self._arrives(run, 0, run.starts_s)

    def play(self) -> Result:
        while self._events:
            now_s, _, event, request = heapq.heappop(self._events)
            event(now_s, request)
        mean = sum(self._per_engine) / len(self._per_engine)
        return Result(
            len(self._first_s),
            self._prompt,
            self._cached,
            self._seen_tokens,
            tuple(self._first_s),
            max(self._per_engine) / mean,
        )

    def _at(self, at_s: float, event: Callable[[float, Request], None], request: Request) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (at_s, self._numbers, event, request))

    def _arrives(self, run: Run, step: int, at_s: float) -> None:
        self._numbers += 1
        self._at(at_s, self._arrived, Request(self._numbers, run.turns[step], at_s, run, step))

    def _arrived(self, now_s: float, request: Request) -> None:
        blocks = request.turn.blocks
        request.replica = self._policy.pick(request, self._engines)
        self._per_engine[request.replica] += 1
        engine = self._engines[request.replica]
        request.uncached_tokens = request.turn.tokens - engine.cache.match(blocks) * BLOCK_TOKENS
        engine.active += 1
        engine.backlog += request.uncached_tokens
        engine.queue.append(request)
        self._seen_tokens += min(request.turn.tokens - 1, self._seen.match(blocks) * BLOCK_TOKENS)
        self._seen.use(blocks)
        self._prefill(engine, now_s)

    def _prefill(self, engine: Engine, now_s: float) -> None:
        if engine.working is not None or not engine.queue:
            return
        request = engine.working = engine.queue.popleft()
        tokens = request.turn.tokens
        request.cached_tokens = min(
            engine.cache.match(request.turn.blocks) * BLOCK_TOKENS,
            (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS,
        )
        engine.backlog += tokens - request.cached_tokens - request.uncached_tokens
        request.uncached_tokens = tokens - request.cached_tokens
        self._at(now_s + request.uncached_tokens / self._prefill_per_s, self._prefilled, request)

    def _prefilled(self, now_s: float, request: Request) -> None:
        engine = self._engines[request.replica]
        engine.cache.use(request.turn.blocks)
        engine.backlog -= request.uncached_tokens
        engine.working = None
        self._at(now_s + FIRST_TOKEN_S, self._began, request)
        self._prefill(engine, now_s)

    def _began(self, now_s: float, request: Request) -> None:
        self._policy.first_chunk(request, now_s)
        self._prompt += request.turn.tokens
        self._cached += request.cached_tokens
        self._first_s.append(now_s - request.arrived_s)
        self._at(now_s + request.turn.output_tokens / DECODE_TOKENS_PER_S, self._ended, request)

    def _ended(self, now_s: float, request: Request) -> None:
        engine = self._engines[request.replica]
        engine.active -= 1
        engine.cache.use(request.turn.blocks)
        self._policy.ended(request, now_s)
        if request.step + 1 < len(request.run.turns):
            self._arrives(request.run, request.step + 1, now_s + request.run.thinks_s[request.step])
