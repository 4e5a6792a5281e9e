"""A prompt as a chain of hashes of fixed blocks, the way an engine's prefix cache sees it, without its tokenizer.

`link_i = H(block_i, seed = link_(i-1))` over the canonical text of tools, system and messages, in blocks of 256 bytes
(about 64 tokens). Two prompts share their first n links if and only if they share their first n blocks, so one link
stands for all that is before it. Hosted prefixes are compared by segment (`core.prefix`); an engine caches by block,
also in the middle of a message.

The first seed is made of the model and of the `cache_salt`, and is the same in every process: links can be shared.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from gateway.core.dialects.facts import Segment, Segments
from gateway.core.prefix import canonical, common

#: Bytes of canonical text per link; 200,000 tokens are about 3,000 links.
BLOCK_BYTES = 256
#: Of all remembered threads together, 8 bytes each.
LINKS_MAX = 2_000_000
THREADS_MAX = 20_000
#: A remembered thread without its links and segments, about.
_THREAD_BYTES = 600
_SEGMENT_BYTES = 16
#: The segments that tell one thread of a session from another: tools, system, first message.
_OPENING = 3


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """One prompt. `links` must not be changed."""

    links: array[int]  # unsigned 64 bits, one per whole block
    chars: int  # bytes of the canonical text, those of a last half block included

    def __len__(self) -> int:
        return len(self.links)


EMPTY = Chain(array("Q"), 0)


def seed_of(model: str, cache_salt: str = "", adapter: str = "") -> int:
    """The seed of the first block. Prompts of another model, LoRA adapter or salt never share a block."""
    return int(xxhash.xxh3_64_intdigest("\0".join((model, adapter, cache_salt)).encode()))


def links_of(text: bytes | memoryview, seed: int, block_bytes: int = BLOCK_BYTES) -> array[int]:
    """The links of the whole blocks of `text`; `seed` is the link before it."""
    links = array("Q")
    view = memoryview(text)
    hashed, append = xxhash.xxh3_64_intdigest, links.append
    for at in range(0, len(view) - block_bytes + 1, block_bytes):
        seed = hashed(view[at : at + block_bytes], seed)
        append(seed)
    return links


@dataclass(slots=True, eq=False)
class _Known:
    """The latest prompt of one thread: the hash of each segment's bytes, and where its text ends."""

    keys: list[int]
    ends: array[int]
    chain: Chain


class Chains:
    """Makes chains, and remembers the last one of each thread: a next step costs what it adds.

    Bounded by the number of links and of threads; the least recently used are forgotten, which costs time only.
    """

    def __init__(
        self, *, links_max: int = LINKS_MAX, threads_max: int = THREADS_MAX, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self._links_max = links_max
        self._threads_max = threads_max
        self._block_bytes = block_bytes
        self._known: OrderedDict[tuple[int | str, ...], _Known] = OrderedDict()
        self._links = self._segments = 0

    def of(self, segments: Segments, thread: str, seed: int) -> Chain:
        """The chain of a request. `thread` is whatever names its lineage; a wrong one costs time only."""
        keys = segments.keys
        if not keys:
            return EMPTY
        if 0 in keys:
            return self._extended(segments, 0, array("Q"), EMPTY, seed)[0]
        name: tuple[int | str, ...] = (seed, thread, *keys[:_OPENING])
        known = self._known.get(name)
        if known is None:
            chain, ends = self._extended(segments, 0, array("Q"), EMPTY, seed)
        else:
            same = common(known.keys, keys)
            if same == len(keys) == len(known.keys):
                self._known.move_to_end(name)
                return known.chain
            chain, ends = self._extended(segments, same, known.ends, known.chain, seed)
        self._keep(name, _Known(keys, ends, chain))
        return chain

    @property
    def size_bytes(self) -> int:
        """Of all that is remembered, about."""
        return self._links * 8 + self._segments * _SEGMENT_BYTES + len(self._known) * _THREAD_BYTES

    def _extended(
        self, segments: Segments, same: int, old_ends: array[int], old: Chain, seed: int
    ) -> tuple[Chain, array[int]]:
        """The chain of all segments, when the first `same` are those of `old`."""
        block = self._block_bytes
        ends = old_ends[:same]
        at = ends[-1] if same else 0
        links = old.links[: at // block]
        pieces = [_tail(segments, same, at % block)]
        for i in range(same, len(segments)):
            text = canonical(segments[i])
            pieces.append(text)
            at += len(text)
            ends.append(at)
        links.extend(links_of(b"".join(pieces), links[-1] if links else seed, block))
        return Chain(links, at), ends

    def _keep(self, name: tuple[int | str, ...], known: _Known) -> None:
        self._forget(self._known.pop(name, None))
        self._known[name] = known
        self._links += len(known.chain)
        self._segments += len(known.keys)
        while len(self._known) > 1 and (
            self._links > self._links_max or len(self._known) > self._threads_max
        ):
            self._forget(self._known.popitem(last=False)[1])

    def _forget(self, known: _Known | None) -> None:
        if known is not None:
            self._links -= len(known.chain)
            self._segments -= len(known.keys)


def _tail(segments: Sequence[Segment], count: int, size: int) -> bytes:
    """The last `size` bytes of the text of the first `count` segments: what their last whole block has left over."""
    found = b""
    while len(found) < size:
        count -= 1
        found = canonical(segments[count]) + found
    return found[len(found) - size :]
