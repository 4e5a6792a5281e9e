"""Prefix chains: one rolling hash per segment of a prompt, so that two requests compare in a few steps.

`chain(r)[i]` stands for segments 0 to i of request r (tools, system, then each message). An agent's next step
extends its last one, so the whole chain of step N is the beginning of step N+1's. Clients change the *form* of
old segments between steps, which must not break that (18 two-turn captures of 11 clients, 2026-11-30):
- `cache_control` (or `prompt_cache_breakpoint`) moves on to newer blocks: members of that name are left out of the hash
  of a segment that ends with an object, as one does whose last block has its marker last (where all those clients put it);
- a message that carried `cache_control` was a list of one text block and is a plain string afterwards: such a
  list is hashed as the string.
All else counts byte by byte, key order and escapes included, because it can change what the provider caches.
Each rule looks at one segment alone, never at its place, so a segment hashes alike in every request.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from gateway.core.dialects.facts import Segment, Segments
from gateway.core.generations import Generations

#: A request that equals a known one whole is its retry within this time. Later, if the known one is the first
#: request of its task, it is a second run with the same opening.
RETRY_WINDOW_S = 60.0

_MARKERS = (b'"cache_control"', b'"prompt_cache_breakpoint"')
# Inside a JSON string its quotes would be escaped, so this only ever finds a member. Values are flat objects.
_MARKER_MEMBER = re.compile(
    rb'\s*,\s*"(?:cache_control|prompt_cache_breakpoint)"\s*:\s*(?:\{[^{}]*\}|null)'
    rb'|"(?:cache_control|prompt_cache_breakpoint)"\s*:\s*(?:\{[^{}]*\}|null)\s*,?\s*'
)
# Possessive throughout: most messages do not match, and must fail without a second try.
_ONE_BLOCK_START = re.compile(
    rb'(\s*+(?:\{(?:\s*+"(?:role|name|type|id|status)"\s*+:\s*+"[^"\\]*+"\s*+,)*+\s*+"content"\s*+:\s*+)?+)'
    rb'\[\s*+\{\s*+(?:"type"\s*+:\s*+"(?:input_)?+text"\s*+,\s*+)?+"text"\s*+:\s*+(?=")'
)
_ONE_BLOCK_END = re.compile(rb'\s*+(?:,\s*+"type"\s*+:\s*+"(?:input_)?+text"\s*+)?+\}\s*+\]')
_SYSTEM_ROLE = re.compile(rb'"role"\s*:\s*"(?:system|developer)"')
_LIST_FIRST = (b'{"content":[', b'{"content": [')
#: A marker is the last member of the message, of the last tool, or of a message's last block.
_MARKED_ENDS = (b"}}", b"}}]", b"}}]}")
_ROLE_LAST = re.compile(rb'\}\s*\}\s*\],\s*"role"\s*:\s*"\w*"\s*\}')
#: Where a role stands: at the start or the end of its message.
_ROLE_REACH = 64
#: A message whose first text comes later has more in it than one block of text.
_HEAD = 96


def chain(segments: Sequence[Segment]) -> tuple[bytes, ...]:
    """The rolling hash (xxh3, 16 bytes) after each segment. Not collision-proof against its own sender."""
    keys = segments.keys if isinstance(segments, Segments) else []
    if not keys or 0 in keys:
        return _extended((), segments)
    known = _CHAINS.longest(keys)
    if len(known) < len(keys):
        known = _extended(known, segments)
        _CHAINS.keep(keys, known)
    return known


def _extended(links: tuple[bytes, ...], segments: Sequence[Segment]) -> tuple[bytes, ...]:
    """`links` of the first segments, and those of the others. A link is the hash of the one before, the kind of its
    segment and what is in it."""
    added = list(links)
    before = added[-1] if added else b""
    for i in range(len(added), len(segments)):
        segment = segments[i]
        before = xxhash.xxh3_128_digest(b"".join((before, segment.kind.encode(), digest(segment))))
        added.append(before)
    return tuple(added)


class _Chains:
    """The latest chain of each opening, so that a step costs what it adds to the one before.

    By the keys of the first segments; bounded by the number of links (about 100 bytes each), oldest first out.
    """

    _OPENING = 3

    def __init__(self, links_max: int = 200_000) -> None:
        self._links_max = links_max
        self._links = 0
        self._chains: OrderedDict[tuple[int, ...], tuple[list[int], tuple[bytes, ...]]] = OrderedDict()

    def longest(self, keys: list[int]) -> tuple[bytes, ...]:
        """The known links of these segments, if a known chain is all of them or their beginning; else none."""
        found = self._chains.get(tuple(keys[: self._OPENING]))
        if found is None:
            return ()
        known, links = found
        return links if known == keys[: len(known)] else ()

    def keep(self, keys: list[int], links: tuple[bytes, ...]) -> None:
        opening = tuple(keys[: self._OPENING])
        old = self._chains.pop(opening, None)
        self._links += len(links) - (len(old[1]) if old else 0)
        self._chains[opening] = (keys, links)
        while self._links > self._links_max and len(self._chains) > 1:
            _, (_, dropped) = self._chains.popitem(last=False)
            self._links -= len(dropped)


_CHAINS = _Chains()


#: The digest of each segment's canonical form by the key of its bytes: an agent sends its whole history with every step,
#: and only what is new has to be looked at. About 150 bytes a segment.
_DIGESTS: Generations[int, bytes] = Generations(32_768)
#: str hashes are random per process, so nobody outside can construct two segments with one hash
_SEED = hash("gateway.core.prefix") & 0xFFFF_FFFF_FFFF_FFFF


def digest(segment: Segment) -> bytes:
    """What is in a segment, whatever comes before it: 16 bytes, equal for what clients write in several forms."""
    key = segment.key or xxhash.xxh3_64_intdigest(segment.raw, _SEED)
    found = _DIGESTS.get(key)
    if found is None:
        found = xxhash.xxh3_128_digest(_canonical(segment.raw.tobytes()))
        _DIGESTS.put(key, found)
    return found


def canonical(segment: Segment) -> bytes:
    """The one form of what clients write in several, as `digest` hashes it."""
    return _canonical(segment.raw.tobytes())


def is_system(segment: Segment) -> bool:
    """A message of the system or developer role."""
    # Codex writes an id of 40 characters in front of the role. Inside of strings the quotes would be escaped.
    raw = segment.raw
    return segment.kind == "message" and (
        _is_system(raw) or _SYSTEM_ROLE.search(raw[: 4 * _ROLE_REACH]) is not None
    )


def _canonical(raw: bytes) -> bytes:
    """The one form of what clients write in several: without markers, one block of text as a string."""
    # What ends with a string is {"role":...,"content":"..."}, which has one form only, unless its role comes last.
    if raw[-2:-1] != b'"':
        marked = raw.endswith(_MARKED_ENDS)
    elif raw.startswith(_LIST_FIRST):
        marked = _ROLE_LAST.search(raw[-_ROLE_REACH:]) is not None
    else:
        return raw
    if marked and (raw.rfind(_MARKERS[0]) >= 0 or raw.rfind(_MARKERS[1]) >= 0):
        raw = _MARKER_MEMBER.sub(b"", raw)
    if raw.find(b'"text"', 0, _HEAD) >= 0:
        raw = _string_for_one_block(raw)
    return raw


def anchor(segments: Sequence[Segment]) -> int:
    """How many leading segments the next step of the same run keeps: all but system messages at the very end.

    Aider ends each request with a reminder in the system role and moves it behind the next user message.
    """
    for end in range(len(segments), 0, -1):
        last = segments[end - 1]
        if last.kind != "message":
            break
        if not _is_system(last.raw):
            return end
    return len(segments)


def longest(known: Container[bytes], links: Sequence[bytes]) -> int:
    """The number of leading segments of the longest prefix that is in `known`; 0 if none is."""
    return next((n for n in range(len(links), 0, -1) if links[n - 1] in known), 0)


def divergence(old: Sequence[bytes], new: Sequence[bytes]) -> int:
    """The index of the first segment that differs; the shorter one's length if it is a prefix of the other."""
    same, differs = 0, min(len(old), len(new)) + 1
    # bisection: equal links mean that everything before is equal too
    while differs - same > 1:
        middle = (same + differs) // 2
        if old[middle - 1] == new[middle - 1]:
            same = middle
        else:
            differs = middle
    return same


def common(old: list[int], new: list[int]) -> int:
    """How many leading keys are equal. All but the last few are, as a rule."""
    same = min(len(old), len(new))
    if old[:same] == new[:same]:
        return same
    low, high = 0, same - 1
    while low < high:
        middle = (low + high + 1) // 2
        if old[low:middle] == new[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class End:
    """Where a task's known requests end: the last one of a thread of that task."""

    task_id: str
    steps: int  # requests of this thread, retries not counted
    seen_at_s: float  # monotonic


def same_task(whole: End | None, shorter: End | None, now_s: float) -> End | None:
    """Whose step is a request whose whole chain ends at `whole` and which extends `shorter`?

    Within the retry window it is a retry of `whole`. After it, extending another known request says more; and
    where nothing is extended, only a task that was past its first step can have sent this (a late retry), for
    a first request is as likely a second run with the same opening.
    """
    if whole is not None and now_s - whole.seen_at_s <= RETRY_WINDOW_S:
        return whole
    if shorter is not None:
        return shorter
    return whole if whole is not None and whole.steps > 1 else None


class _TextBlock(msgspec.Struct, forbid_unknown_fields=True):
    text: msgspec.Raw
    type: str = ""


class _OneBlockMessage(msgspec.Struct):
    content: tuple[_TextBlock]


_ONE_BLOCK = msgspec.json.Decoder(tuple[_TextBlock])
_ONE_BLOCK_MESSAGE = msgspec.json.Decoder(_OneBlockMessage)


def _string_for_one_block(raw: bytes) -> bytes:
    start = _ONE_BLOCK_START.match(raw)
    if start is None:
        return raw
    try:
        if b"{" in start[1]:
            (block,) = _ONE_BLOCK_MESSAGE.decode(raw).content
        else:
            (block,) = _ONE_BLOCK.decode(raw)
    except msgspec.DecodeError:
        return raw  # more than one block, or one with members of its own
    # the text begins where the start ends, so the decoder has told where it stops
    end = _ONE_BLOCK_END.match(raw, start.end() + len(bytes(block.text)))
    return raw if end is None else b"".join((start[1], block.text, raw[end.end() :]))


def _is_system(raw: memoryview) -> bool:
    return bool(_SYSTEM_ROLE.search(raw[:_ROLE_REACH]) or _SYSTEM_ROLE.search(raw[-_ROLE_REACH:]))
