"""Prompts for simulated replicas: a generator of agent sessions, and replay of recorded block hashes.

A prompt is known twice, and never the same: the replica has its token blocks, the gateway its bytes. Bytes per token
differ from text to text (3.2 to 4.6), so that whoever predicts tokens from bytes is off by as much as in life.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.core.replicas.chain import BLOCK_BYTES, Chain

#: Tokens of a block of the simulated engine.
BLOCK_TOKENS = 64
TRACE_BLOCK_TOKENS = 512
_MASK = (1 << 64) - 1


def mixed(*parts: int) -> int:
    """A well spread 64-bit number, the same in every run of Python."""
    found = 0x9E3779B97F4A7C15
    for part in parts:
        # splitmix64
        found = (found + part + 0x9E3779B97F4A7C15) & _MASK
        found = ((found ^ found >> 30) * 0xBF58476D1CE4E5B9) & _MASK
        found = ((found ^ found >> 27) * 0x94D049BB133111EB) & _MASK
        found ^= found >> 31
    return found


class Text:
    """A growing prompt: pieces of text, each with a number. Equal numbers in equal order are equal prompts."""

    __slots__ = ("at", "blocks", "chars", "links", "tokens")

    def __init__(self, start: Text | None = None) -> None:
        self.at: int = start.at if start else 1  # stands for all pieces so far
        self.tokens: int = start.tokens if start else 0
        self.chars: int = start.chars if start else 0
        self.blocks: array[int] = start.blocks[:] if start else array("Q")
        self.links: array[int] = start.links[:] if start else array("Q")

    def add(self, piece: int, tokens: int, chars_per_token: float) -> None:
        self.at = mixed(self.at, piece)
        self.tokens += tokens
        self.chars += int(tokens * chars_per_token)
        self.blocks.extend(mixed(self.at, i, 1) for i in range(len(self.blocks), self.tokens // BLOCK_TOKENS))
        self.links.extend(mixed(self.at, i, 2) for i in range(len(self.links), self.chars // BLOCK_BYTES))


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One request."""

    session: int
    thread: int
    text: Text
    tokens: int
    chars: int
    output_tokens: int

    @property
    def blocks(self) -> array[int]:
        return self.text.blocks[: self.tokens // BLOCK_TOKENS]

    @property
    def chain(self) -> Chain:
        return Chain(self.text.links[: self.chars // BLOCK_BYTES], self.chars)


@dataclass(frozen=True, slots=True)
class Run:
    """Turns of one thread: each comes when the one before has ended, and somebody has thought."""

    starts_s: float
    turns: Sequence[Turn]
    thinks_s: Sequence[float]  # before each turn but the first


def agent_sessions(
    seed: int, sessions: int, per_s: float, tenants: int = 12, system_tokens: int = 10_000
) -> list[Run]:
    """Agents as described in the design: a system prompt per tenant, growing histories, groups of sub-agents that
    share the system prompt alone, and a compaction in 2% of the turns."""
    rng = random.Random(seed)
    systems = []
    for tenant in range(tenants):
        systems.append(Text())
        systems[-1].add(mixed(seed, 1, tenant), system_tokens, rng.uniform(3.4, 4.6))
    now_s = 0.0
    runs: list[Run] = []
    for session in range(sessions):
        now_s += rng.expovariate(per_s)
        system = systems[rng.randrange(tenants)]
        runs.extend(_session(rng, seed, session, system, now_s))
    return runs


def _session(rng: random.Random, seed: int, session: int, system: Text, now_s: float) -> Iterator[Run]:
    pieces = iter(range(1 << 30))

    def grow(text: Text, tokens: int) -> None:
        text.add(mixed(seed, 2, session, next(pieces)), tokens, rng.uniform(3.2, 4.2))

    text = Text(system)
    grow(text, rng.randint(1_000, 8_000))
    turns: list[Turn] = []
    subagents = 0
    for _ in range(max(3, int(rng.lognormvariate(3.0, 0.7)))):
        if rng.random() < 0.02:
            text = Text(system)
            grow(text, 4_000)
        grow(text, max(64, int(rng.lognormvariate(6.6, 1.0))))
        turns.append(_turn(session, session, text, min(4_000, int(rng.lognormvariate(5.7, 0.8)))))
        if rng.random() < 0.08:
            begins_s = now_s + rng.uniform(5.0, 200.0)
            for _ in range(rng.randint(2, 7)):
                subagents += 1
                yield _subagent(rng, grow, system, session, 1_000_000 * subagents + session, begins_s)
    yield Run(now_s, turns, [rng.lognormvariate(0.9, 1.0) for _ in turns[1:]])


def _subagent(
    rng: random.Random,
    grow: Callable[[Text, int], None],
    system: Text,
    session: int,
    thread: int,
    begins_s: float,
) -> Run:
    text = Text(system)
    grow(text, rng.randint(1_000, 6_000))
    turns = []
    for _ in range(rng.randint(2, 6)):
        grow(text, max(64, int(rng.lognormvariate(6.6, 0.8))))
        turns.append(_turn(session, thread, text, 300))
    return Run(begins_s, turns, [rng.lognormvariate(0.9, 1.0) for _ in turns[1:]])


def _turn(session: int, thread: int, text: Text, output_tokens: int) -> Turn:
    return Turn(session, thread, text, text.tokens, text.chars, max(1, output_tokens))


@dataclass(frozen=True, slots=True)
class Recorded:
    at_s: float
    turn: Turn


def recorded(path: Path, seed: int, limit: int) -> list[Recorded]:
    """A recorded trace: one text per request, from its hash ids.

    No sessions are recorded: a request that shares all but its last two blocks with an earlier one continues it.
    Times that are rounded to 3 s are spread over them.
    """
    rng = random.Random(seed)
    lines = path.read_text().splitlines()[:limit]
    records = [json.loads(line) for line in lines]
    coarse = all(record["timestamp"] % 1_000 == 0 for record in records)
    threads: dict[int, int] = {}
    found: list[Recorded] = []
    for n, record in enumerate(records):
        ids: list[int] = record["hash_ids"]
        text, left = Text(), int(record["input_length"])
        before: list[int] = []
        for block in ids:
            size = min(TRACE_BLOCK_TOKENS, left)
            text.add(block, size, 3.2 + mixed(block) % 1_000 / 1_000)
            left -= size
            before.append(text.at)
        # The first block is everybody's system prompt.
        thread = next((threads[at] for at in reversed(before[1:]) if at in threads), n)
        for at in before[1:-1]:
            threads.setdefault(at, thread)
        if before:
            threads[before[-1]] = thread
        at_s = record["timestamp"] / 1e3 + (rng.uniform(0.0, 3.0) if coarse else 0.0)
        found.append(
            Recorded(
                at_s, Turn(thread, thread, text, text.tokens, text.chars, max(1, record["output_length"]))
            )
        )
    return sorted(found, key=lambda r: r.at_s)


def recorded_runs(requests: Sequence[Recorded], uncached_per_s: float, load: float) -> list[Run]:
    """The trace, faster or slower, so that what no cache could save keeps all replicas busy for the part `load` of the
    time; `uncached_per_s` is what they compute together."""
    ideal = unseen_tokens([r.turn for r in requests])
    span_s = max(1e-9, requests[-1].at_s - requests[0].at_s)
    stretch = ideal / uncached_per_s / load / span_s
    return [Run((r.at_s - requests[0].at_s) * stretch, (r.turn,), ()) for r in requests]


def unseen_tokens(turns: Sequence[Turn]) -> int:
    """Tokens that no request before has had, in this order."""
    seen: set[int] = set()
    total = 0
    for turn in turns:
        blocks = turn.blocks
        total += turn.tokens - BLOCK_TOKENS * known_blocks(seen, blocks)
        seen.update(blocks)
    return total


def known_blocks(seen: set[int], blocks: Sequence[int]) -> int:
    """How many leading blocks are in a set that is closed under prefixes."""
    low, high = 0, len(blocks)
    while low < high:
        middle = (low + high + 1) // 2
        if blocks[middle - 1] in seen:
            low = middle
        else:
            high = middle - 1
    return low
