"""Tools in the order and the bytes in which a run first sent them.

Some clients list their tools out of a hash map (openai/codex#2611, maximhq/bifrost#3362: 261 orders in 287 requests),
and the list stands in front of everything else that a provider caches. Nothing is sorted: the order of properties
decides in which order a model writes them, and models prefer the tools that come first. A list that is equal to an
earlier one of the run but for the order of its tools and of the keys in their objects is sent as that one was.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import MutableMapping
from typing import Any

import msgspec
import xxhash

from gateway.core.dialects.facts import Segment

#: Different sets of tools that a run comes back to; whoever changes them in every turn cannot be helped.
SETS_MAX = 8
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


class ToolSet(msgspec.Struct, frozen=True):
    """`digest` is of the tools whatever their order; b"" if they are not to be touched. `markers`: the client's."""

    raw: bytes
    digest: bytes
    markers: tuple[bytes, ...]


class ToolSets:
    """Tool lists by their bytes, shared by all runs of an agent; the least recently used go above `bytes_max`."""

    def __init__(self, bytes_max: int = 64 << 20) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._adopted = 0
        self._sets: OrderedDict[int, ToolSet] = OrderedDict()

    def digest(self, segment: Segment) -> bytes:
        """Of the tools whatever their order; b"" if they are not to be touched."""
        return self._of(segment).digest

    def adopt(self, known: MutableMapping[bytes, int], raw: bytes) -> None:
        """The run of `known` first sent its tools as `raw`, at another process."""
        found = read(raw)
        if found.digest and found.digest not in known:
            self._adopted -= 1  # no segment has such a key
            self._keep(self._adopted, found)
            known[found.digest] = self._adopted

    def first_seen(self, known: MutableMapping[bytes, int], segment: Segment) -> bytes | None:
        """The bytes in which the run of `known` first sent these tools; None if these are they, or its first ones."""
        now = self._of(segment)
        if not now.digest:
            return None
        key = known.get(now.digest)
        if key == segment.key:
            return None
        first = None if key is None else self._sets.get(key)
        if key is None or first is None:
            known[now.digest] = segment.key
            while len(known) > SETS_MAX:
                del known[next(iter(known))]
            return None
        self._sets.move_to_end(key)
        if first.raw == now.raw or first.markers != now.markers:
            return None
        if _has_twins(first.raw) or _has_twins(now.raw):
            return None
        return first.raw

    def _of(self, segment: Segment) -> ToolSet:
        found = self._sets.get(segment.key)
        if found is None:
            found = read(segment.raw.tobytes())
            self._keep(segment.key, found)
        else:
            self._sets.move_to_end(segment.key)
        return found

    def _keep(self, key: int, found: ToolSet) -> None:
        self._sets[key] = found
        self._bytes += len(found.raw)
        while self._bytes > self._bytes_max and len(self._sets) > 1:
            _, dropped = self._sets.popitem(last=False)
            self._bytes -= len(dropped.raw)


def read(raw: bytes) -> ToolSet:
    """Two lists have one digest if they hold the same tools: same members and values, arrays in the same order."""
    digests: list[bytes] = []
    markers: list[bytes] = []
    try:
        for item in _ITEMS.decode(raw):
            tool: Any = msgspec.json.decode(item)
            if isinstance(tool, dict) and "cache_control" in tool:
                markers.append(msgspec.json.encode(tool.pop("cache_control"), order="deterministic"))
            digests.append(xxhash.xxh3_128_digest(msgspec.json.encode(tool, order="deterministic")))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ToolSet(raw, b"", ())
    return ToolSet(raw, xxhash.xxh3_128_digest(b"".join(sorted(digests))), tuple(sorted(markers)))


def _has_twins(raw: bytes) -> bool:
    """An object with one member twice: which of them counts is for the provider to say."""

    def pairs(found: list[tuple[str, Any]]) -> None:
        if len({name for name, _ in found}) < len(found):
            raise _Twins

    try:
        json.loads(raw, object_pairs_hook=pairs)
    except _Twins:
        return True
    return False


class _Twins(Exception):
    pass
