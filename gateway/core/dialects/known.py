"""Reading a long request at the price of what is new in it.

An agent sends its whole history with every step. A body that begins with the same bytes as an earlier one, up to
the start of one of its messages, has the same messages up to there, so only the rest of it is read: the body without
those messages is a request of the same dialect, and its facts are those of the whole after a shift of offsets.

"The same bytes" is told by a 128-bit hash with a seed that is random per process, computed in the one pass that also
gives the hash of the whole body. What is remembered about a body are offsets and hashes, about 60 bytes a message.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import xxhash
from msgspec.structs import replace

from gateway.core.catalog import Operation
from gateway.core.dialects.facts import Facts, Offsets, Segments, Spans
from gateway.core.dialects.json_slices import MAX_NODES, Span, item_spans
from gateway.core.dialects.request import IMAGE, LONG, MARK_BITS, MAX_MESSAGES
from gateway.core.errors import InvalidRequest

#: Below this, reading costs less than remembering.
LEAST_BYTES = 8 << 10
#: str hashes are random per process, so nobody outside can construct two bodies with one hash
_SEED = hash("gateway.core.dialects.known") & 0xFFFF_FFFF_FFFF_FFFF
#: Bodies are found by what stands at each power of two in them: what differs between runs is somewhere there.
_SAMPLE_BYTES = 48
_FIRST_LEVEL = 11
#: Where in a history the next step may begin to differ, counted from its end: clients move the cache marks of their
#: last messages (two in a row, or two user messages apart), some end with a reminder that they move.
_FROM_END = (17, 7, 3, 1)
_CHECKPOINTS_MAX = 12

_LISTS = {
    Operation.CHAT: "messages",
    Operation.MESSAGES: "messages",
    Operation.COUNT_TOKENS: "messages",
    Operation.RESPONSES: "input",
}


_Sample = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """The start of a message, and what is before it."""

    at: int  # offset in the body
    count: int  # messages before it
    digest: bytes  # of the body up to there
    nodes: int
    marks: int  # IMAGE and LONG of any message before it


_START = _Checkpoint(0, 0, b"", 0, 0)


@dataclass(slots=True, eq=False)
class _Body:
    """What is remembered of the last body of one run."""

    operation: Operation
    offsets: Offsets
    keys: list[int]
    checkpoints: tuple[_Checkpoint, ...]
    samples: list[_Sample]


class KnownBodies:
    """Reads requests, and remembers how far it has read which; bounded by the number of messages."""

    def __init__(self, messages_max: int = 200_000) -> None:
        self._messages_max = messages_max
        self._messages = 0
        self._bodies: OrderedDict[int, _Body] = OrderedDict()  # by id, least recently used first
        self._samples: dict[_Sample, _Body] = {}

    def read(self, operation: Operation, body: bytes, read: Callable[[bytes], Facts]) -> Facts:
        """What `read(body)` returns or raises, with its digest."""
        name = _LISTS.get(operation)
        if len(body) < LEAST_BYTES or name is None:
            return replace(read(body), digest=xxhash.xxh3_128_digest(body, _SEED))
        view = memoryview(body)
        known = self._find(operation, body)
        matched = None if known is None else _match(known.checkpoints, view)
        if known is not None and matched is not None:
            passed, hashed = matched
            facts = _continued(known, passed[-1], name, body, read)
            if facts is not None:
                # One that begins to differ far from its end is another run with the same opening: both are kept.
                fork = len(known.keys) - passed[-1].count > _FROM_END[0]
                into = _Body(operation, known.offsets, known.keys, (), []) if fork else known
                return replace(facts, digest=self._keep(into, passed, facts.segments, view, hashed))
        facts = read(body)
        hashed = xxhash.xxh3_128(seed=_SEED)
        spans = item_spans(body, facts.spans.members[name], facts.segments.messages)
        if spans is None:
            hashed.update(body)
            return replace(facts, digest=hashed.digest())
        facts.segments.offsets = offsets = Offsets(*spans)
        return replace(
            facts,
            digest=self._keep(_Body(operation, offsets, [], (), []), (_START,), facts.segments, view, hashed),
        )

    def _find(self, operation: Operation, body: bytes) -> _Body | None:
        """A remembered body that has much in common with this one, probably."""
        for sample in _samples(body, len(body)):
            found = self._samples.get(sample)
            if found is not None and found.operation is operation:
                return found
        return None

    def _keep(
        self,
        known: _Body,
        passed: tuple[_Checkpoint, ...],
        segments: Segments,
        view: memoryview,
        hashed: xxhash.xxh3_128,
    ) -> bytes:
        """Remember this body in the place of the one that it continues; `hashed` is of what is before the last of
        `passed`. Returns the digest of the whole."""
        offsets = segments.offsets
        assert offsets is not None, "whoever keeps a body knows where its messages are"
        last = before = passed[-1]
        checkpoints = [*passed]
        for from_end in _FROM_END:
            count = len(offsets.starts) - from_end
            if count > before.count:
                hashed.update(view[before.at : offsets.starts[count]])
                marks = segments.marks[before.count - last.count : count - last.count]
                before = _Checkpoint(offsets.starts[count], count, hashed.digest(), *_seen(before, marks))
                checkpoints.append(before)
        hashed.update(view[before.at :])
        if before is not last:
            same = id(known) in self._bodies and _sampled_alike(known.samples, last.at, before.at)
            if same:
                self._messages -= len(known.keys)
            else:
                self._forget(known)
            known.offsets, known.keys = offsets, segments.keys[len(segments.head_keys) :]
            known.checkpoints = tuple(checkpoints[last is _START :][-_CHECKPOINTS_MAX:])
            self._remember(known, None if same else view[: before.at])
        elif id(known) in self._bodies:
            self._bodies.move_to_end(id(known))
        digest: bytes = hashed.digest()
        return digest

    def _remember(self, known: _Body, view: memoryview | None) -> None:
        """`view`: what samples are taken of; None = it has those that would be taken."""
        if view is not None:
            known.samples = list(_samples(view, len(view)))
            for sample in known.samples:
                self._samples[sample] = known
        self._bodies[id(known)] = known
        self._bodies.move_to_end(id(known))
        self._messages += len(known.keys)
        while self._messages > self._messages_max and len(self._bodies) > 1:
            self._forget(next(iter(self._bodies.values())))

    def _forget(self, known: _Body) -> None:
        if self._bodies.pop(id(known), None) is None:
            return
        self._messages -= len(known.keys)
        for sample in known.samples:
            if self._samples.get(sample) is known:
                del self._samples[sample]


def _samples(text: bytes | memoryview, size: int) -> Iterator[_Sample]:
    """What stands at each power of two, the deepest first."""
    for level in _levels(size):
        at = 1 << level
        yield level, bytes(text[at : at + _SAMPLE_BYTES])


def _levels(size: int) -> range:
    """Of the samples of a text of that size, the deepest first."""
    return range((size - _SAMPLE_BYTES).bit_length() - 1, _FIRST_LEVEL - 1, -1)


def _sampled_alike(samples: Sequence[_Sample], same: int, size: int) -> bool:
    """Whether a text of that `size`, whose first `same` bytes are those of the sampled one, has the same samples."""
    levels = _levels(size)
    return len(samples) == len(levels) and (not levels or (1 << levels[0]) + _SAMPLE_BYTES <= same)


def _seen(before: _Checkpoint, marks: Sequence[int | None]) -> tuple[int, int]:
    """(nodes, marks) of all that is before a checkpoint, from the one before it and the messages between."""
    nodes, seen = before.nodes, before.marks
    for mark in marks:
        nodes += (mark or 0) >> MARK_BITS
        seen |= (mark or 0) & (IMAGE | LONG)
    return nodes, seen


def _match(
    checkpoints: Sequence[_Checkpoint], view: memoryview
) -> tuple[tuple[_Checkpoint, ...], xxhash.xxh3_128] | None:
    """The checkpoints up to which `view` has the same bytes, and the hash state at the last of them."""
    # The same bytes up to a late one are the same up to all before it: only another run's body differs earlier.
    late = max(0, len(checkpoints) - len(_FROM_END))
    return _match_from(late, checkpoints, view) or (_match_from(0, checkpoints, view) if late else None)


def _match_from(
    first: int, checkpoints: Sequence[_Checkpoint], view: memoryview
) -> tuple[tuple[_Checkpoint, ...], xxhash.xxh3_128] | None:
    """`_match`, but those before the `first` are not looked at; None if that one does not match."""
    hashed, at, passed = xxhash.xxh3_128(seed=_SEED), 0, 0
    for checkpoint in checkpoints[first:]:
        further = hashed.copy()
        further.update(view[at : checkpoint.at])
        if len(view) <= checkpoint.at or further.digest() != checkpoint.digest:
            break
        hashed, at, passed = further, checkpoint.at, passed + 1
    return (tuple(checkpoints[: first + passed]), hashed) if passed else None


def _continued(
    known: _Body, passed: _Checkpoint, name: str, body: bytes, read: Callable[[bytes], Facts]
) -> Facts | None:
    """The facts of `body`, read without the messages before `passed`; None if that does not tell them.

    A refusal is no fact: the whole body has to be read, so that it names the right message and byte.
    """
    first = known.offsets.starts[0]
    cut = passed.at - first
    short = body[:first] + body[passed.at :]
    try:
        facts = read(short)
    except InvalidRequest:
        return None
    segments = facts.segments
    spans = item_spans(short, facts.spans.members[name], segments.messages)
    count = passed.count + facts.message_count
    nodes = passed.nodes + segments.nodes
    if spans is None or count > MAX_MESSAGES or nodes > MAX_NODES:
        return None
    starts, ends = known.offsets.starts[: passed.count], known.offsets.ends[: passed.count]
    starts.extend([at + cut for at in spans[0]])
    ends.extend([at + cut for at in spans[1]])
    keys = known.keys[: passed.count] + segments.keys[len(segments.head_keys) :]

    def moved(span: Span) -> Span:
        return span[0] + cut * (span[0] >= first), span[1] + cut * (span[1] >= first)

    usage = facts.spans.include_usage
    return replace(
        facts,
        message_count=count,
        has_images=facts.has_images or bool(passed.marks & IMAGE),
        long_cache_write=facts.long_cache_write or bool(passed.marks & LONG),
        segments=segments.extending(body, Offsets(starts, ends), keys, nodes),
        size=len(body),
        spans=Spans(
            {member: moved(span) for member, span in facts.spans.members.items()},
            None if usage is None else moved(usage),
        ),
    )
