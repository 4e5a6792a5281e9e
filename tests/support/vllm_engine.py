"""What goes on inside of the fake vLLM: tokens, the block cache, the queue, and time in milliseconds.

A token is `TOKEN_BYTES` bytes of the rendered prompt. The cache is vLLM's as it was seen from outside (0.32, 2026-11):
whole blocks only, found by a hash over all that comes before them and the salt, at least one token always computed
anew, and the end of a prompt forgotten before its beginning.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import xxhash

TOKEN_BYTES = 4


class Aborted(Exception):
    """The engine stops: what is under way ends here."""


def tokens_of(text: bytes) -> int:
    return -(-len(text) // TOKEN_BYTES)


def rendered(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), *, opens: bool = True
) -> bytes:
    """The prompt as the model reads it: tools first, a line of its own for each role."""
    parts = (
        ["".join(["<tools>", *(json.dumps(tool) + "\n" for tool in tools), "</tools>\n"])] if tools else []
    )
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(str(part.get("text") or part.get("content") or "") for part in content)
        calls = "".join(json.dumps(call.get("function")) for call in message.get("tool_calls") or ())
        parts.append(_whole(f"<{message.get('role')}>\n{content}{calls}"))
    return ("".join(parts) + ("<assistant>\n" if opens else "")).encode()


def _whole(message: str) -> str:
    """A message ends where a token does, as those do that real templates end with a token of their own."""
    return message + " " * (-len(message.encode()) % TOKEN_BYTES) + "</>\n"


class BlockCache:
    """Which blocks are in memory. A block that a running request uses stays; the others go, longest unused first."""

    def __init__(self, block_tokens: int, capacity_blocks: int) -> None:
        self.block_tokens = block_tokens
        self.capacity_blocks = capacity_blocks
        self._used: dict[bytes, int] = {}  # by how many running requests
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # the next to go is first

    def chain(self, text: bytes, salt: str, known: Sequence[bytes] = ()) -> list[bytes]:
        """The hash of every whole block of `text`; `known` are those of its beginning."""
        size = self.block_tokens * TOKEN_BYTES
        chain = list(known)
        above = chain[-1] if chain else xxhash.xxh3_128_digest(salt.encode())
        for end in range(size * (len(chain) + 1), len(text) + 1, size):
            above = xxhash.xxh3_128_digest(above + text[end - size : end])
            chain.append(above)
        return chain

    def read(self, chain: Sequence[bytes], prompt_tokens: int) -> int:
        """Tokens of the prompt that need not be computed."""
        most = (prompt_tokens - 1) // self.block_tokens
        here = itertools.takewhile(lambda h: h in self._used or h in self._idle, chain[:most])
        return sum(1 for _ in here) * self.block_tokens

    def take(self, chain: Sequence[bytes]) -> None:
        for block in chain:
            self._used[block] = self._used.get(block, 0) + 1
            self._idle.pop(block, None)
        while self._idle and len(self._used) + len(self._idle) > self.capacity_blocks:
            self._idle.popitem(last=False)

    def give_back(self, chain: Sequence[bytes]) -> None:
        for block in reversed(chain):
            self._used[block] -= 1
            if not self._used[block]:
                del self._used[block]
                self._idle[block] = None

    @property
    def usage(self) -> float:
        """Share of the memory that running requests use; what is only remembered counts as free."""
        return min(1.0, len(self._used) / self.capacity_blocks)


@dataclass(slots=True)
class Counters:
    """Of one life of the server, as its metrics tell them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    rejected: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by reason


@dataclass(slots=True)
class Generation:
    """One answer while it is made."""

    prompt: bytes
    salt: str
    chain: list[bytes]
    block_tokens: int
    cached_tokens: int = 0
    output_tokens: int = 0
    finish: str = ""

    @property
    def prompt_tokens(self) -> int:
        return tokens_of(self.prompt)

    @property
    def created_cache_tokens(self) -> int:
        return max(0, len(self.chain) * self.block_tokens - self.cached_tokens)


class Engine:
    """Runs generations: so many at once, one prefill at a time, lower priorities first.

    `hold_at`: every answer stops after so many tokens (0: before its prefill is over) until `let_go`; how tests
    catch a request in the middle without waiting for a clock.
    """

    def __init__(
        self,
        cache: BlockCache,
        *,
        seqs_max: int,
        prefill_tokens_per_s: float | None,
        decode_tokens_per_s: float | None,
    ) -> None:
        self.cache = cache
        self.counters = Counters()
        self.running = 0
        self.hold_at: int | None = None
        self.held = 0
        self._seqs_max = seqs_max
        self._prefill_tokens_per_s = prefill_tokens_per_s
        self._decode_tokens_per_s = decode_tokens_per_s
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._prefill = asyncio.Lock()
        self._ended = asyncio.Event()
        self._moved = asyncio.Event()
        self._go = asyncio.Event()

    @property
    def waiting(self) -> int:
        return sum(1 for *_, place in self._waiting if not place.done())

    @property
    def in_flight(self) -> int:
        return self.running + self.waiting

    # --- for those who play with it -----------------------------------------------------------------------

    def abort(self) -> None:
        """Everything under way ends at once, with what it has so far."""
        self._ended.set()
        self._go.set()
        for *_, place in self._waiting:
            if not place.done():
                place.set_exception(Aborted())

    def let_go(self) -> None:
        self.hold_at = None
        self._go.set()
        self._go = asyncio.Event()

    async def until(self, *, held: int = 0, waiting: int = 0, in_flight: int | None = None) -> None:
        """Returns when so many answers are held, wait, or are in flight (exactly, if told)."""

        def reached() -> bool:
            enough = self.held >= held and self.waiting >= waiting
            return enough and (in_flight is None or self.in_flight == in_flight)

        await self.when(reached)

    async def when(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not reached():
                await self._moved.wait()

    async def idle(self) -> None:
        """Returns when nothing is under way."""
        while self.in_flight:
            await self._moved.wait()

    # --- for the server -----------------------------------------------------------------------------------

    async def generate(
        self, g: Generation, pieces: Sequence[str], priority: int, finish: str, *, kept: bool = True
    ) -> AsyncGenerator[str, None]:
        """The pieces of the answer, a token each. `g` tells how far it is, also for who stops listening.

        `kept`: the answer is text, which the next prompt may repeat, so its blocks can be read then.
        """
        try:
            async with self._place(priority):
                await self._held(0)
                async with self._prefill:
                    g.cached_tokens = self.cache.read(g.chain, g.prompt_tokens)
                    self.cache.take(g.chain)
                    try:
                        uncached = g.prompt_tokens - g.cached_tokens
                        await self._pass(uncached, self._prefill_tokens_per_s)
                    except BaseException:
                        self.cache.give_back(g.chain)
                        raise
                taken = g.chain
                self.counters.prompt_tokens += g.prompt_tokens
                self.counters.cached_tokens += g.cached_tokens
                try:
                    for n, piece in enumerate(pieces, 1):
                        await self._pass(1, self._decode_tokens_per_s)
                        g.output_tokens = n
                        self.counters.output_tokens += 1
                        if n == len(pieces):
                            g.finish = finish
                        yield piece
                        if n < len(pieces):
                            await self._held(n)
                    if kept:
                        # The last token was generated, but nobody has computed what comes after it.
                        text = g.prompt + "".join(pieces[:-1]).encode()
                        whole = self.cache.chain(text, g.salt, g.chain)
                        self.cache.take(whole[len(taken) :])
                        taken = whole
                finally:
                    self.cache.give_back(taken)
        except Aborted:
            g.finish = "abort"
        self.counters.finished[g.finish] = self.counters.finished.get(g.finish, 0) + 1

    @asynccontextmanager
    async def _place(self, priority: int) -> AsyncIterator[None]:
        if self._ended.is_set():
            raise Aborted
        if self.running >= self._seqs_max:
            place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (priority, next(self._order), place))
            self.tell()
            try:
                await place
            except BaseException:
                if place.done() and not place.cancelled() and place.exception() is None:
                    self._pass_on()  # it was given to us at the very moment in which we left
                else:
                    place.cancel()
                raise
        else:
            self.running += 1
            self.tell()
        try:
            yield
        finally:
            self._pass_on()
            self.tell()

    def _pass_on(self) -> None:
        """Our place goes to the next one who waits, or is free."""
        while self._waiting:
            *_, place = heapq.heappop(self._waiting)
            if not place.done():
                place.set_result(None)
                return
        self.running -= 1

    async def _held(self, at: int) -> None:
        if self.hold_at is None or at < self.hold_at:
            return
        go = self._go
        self.held += 1
        try:
            self.tell()
            await go.wait()
        finally:
            self.held -= 1
        if self._ended.is_set():
            raise Aborted

    async def _pass(self, tokens: int, tokens_per_s: float | None) -> None:
        """The time that so many tokens take."""
        if not self._ended.is_set():
            if tokens_per_s is None or not tokens:
                await asyncio.sleep(0)
            else:
                try:
                    async with asyncio.timeout(tokens / tokens_per_s):
                        await self._ended.wait()
                except TimeoutError:
                    return
        if self._ended.is_set():
            raise Aborted

    def tell(self) -> None:
        """Something has changed: whoever waits for that looks again."""
        self._moved.set()
        self._moved = asyncio.Event()
