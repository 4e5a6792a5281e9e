"""What is remembered of each run of requests, so that a step costs what it adds to the one before.

A lineage is the requests of one caller and client that share their opening: the system prompt and the first message.
Tools are not part of it, so that a list of tools that comes in another order is still the same run. Bounded, in this
process; what is forgotten costs a marker that is placed by the roles alone, or an order that is learned again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.core.dialects.blocks import Message, Messages, asks_long, client_markers
from gateway.core.dialects.facts import Facts, Segment, Segments
from gateway.core.markers import Outline
from gateway.core.notes import Notes
from gateway.core.prefix import common, digest, divergence, is_system
from gateway.core.relocation import Places
from gateway.core.trimming import Trim

#: Gaps between turns from which a cache life is chosen: the latest ones.
GAPS_MAX = 16
#: A turn that comes sooner is a parallel call or a retry of the same turn.
_LEAST_GAP_S = 0.5
#: What is remembered of a segment takes about so many bytes.
_SEGMENT_BYTES = 256
Scope = tuple[str, ...]


@dataclass(slots=True, eq=False)
class Lineage:
    """One run. `steps` counts its requests; `entries` are the segments up to which the last one left cache entries."""

    task_id: str = ""  # of its last request
    steps: int = 0
    seen_s: float = 0.0
    gap_s: float = 0.0  # before its last request
    gaps_s: list[float] = field(default_factory=list)
    longest_gap_s: float = 0.0
    life: str = ""  # the longer life that was chosen for it, once and for all
    wrote_long: bool = False  # a request of it has asked for that life, or for one of an hour by itself
    links: tuple[bytes, ...] = ()
    marks: tuple[int, ...] = ()
    keys: list[int] = field(default_factory=list)
    outline: Outline | None = None
    #: lines of the system prompt that may move, and what was said of them since
    places: Places = field(default_factory=Places)
    notes: Notes = field(default_factory=Notes)
    #: by message: what is cut, () = it leaves whole
    trims: dict[int, tuple[Trim, ...]] = field(default_factory=dict)
    weight: int = 0  # of its notes, in segments
    #: first-seen tools: digest of the set -> key of their bytes
    tools: dict[bytes, int] = field(default_factory=dict)

    def entries(self, links: tuple[bytes, ...]) -> tuple[int, ...]:
        """The marks of the request before that are still where they were."""
        old = self.links
        same = len(old) if old == links[: len(old)] else divergence(old, links)
        return tuple(mark for mark in self.marks if mark < same)


def extends(segments: Segments, lineage: Lineage) -> bool:
    """The request goes on where the last one of this lineage ended, whatever its tools and system prompt are now."""
    outline, keys = lineage.outline, segments.keys
    if outline is None or 0 in keys:
        return False
    start = 0
    while start < len(keys) and (segments[start].kind != "message" or is_system(segments[start])):
        start += 1
    said = lineage.keys[outline.head + 1 :]
    return 0 < len(said) < len(keys) - start and keys[start : start + len(said)] == said


class Lineages:
    """Lineages by opening, least recently used out first: at most `lineages_max`, and `segments_max` of all together."""

    def __init__(self, lineages_max: int = 20_000, segments_max: int = 400_000) -> None:
        self._lineages_max = lineages_max
        self._segments_max = segments_max
        self._segments = 0
        self._lineages: OrderedDict[tuple[Scope, bytes], Lineage] = OrderedDict()
        self._heads: OrderedDict[bytes, float] = OrderedDict()
        self._openings: dict[tuple[int, ...], bytes] = {}
        self._messages = Messages()

    def find(self, scope: Scope, segments: Segments) -> Lineage:
        """The lineage of a request of `scope` (who asks, with what, under which session)."""
        keys = tuple(segments.keys[:3])
        known = self._openings.get(keys)
        if known is None or 0 in keys:
            known = opening(segments)
            if len(self._openings) >= self._lineages_max:
                self._openings.clear()
            self._openings[keys] = known
        return self.at(scope, known)

    def at(self, scope: Scope, opening: bytes) -> Lineage:
        key = (scope, opening)
        found = self._lineages.get(key)
        if found is not None:
            self._lineages.move_to_end(key)
            return found
        while self._lineages and (
            len(self._lineages) >= self._lineages_max or self._segments > self._segments_max
        ):
            _, dropped = self._lineages.popitem(last=False)
            self._segments -= len(dropped.keys) + dropped.weight
        found = self._lineages[key] = Lineage()
        return found

    def peek(self, scope: Scope, opening: bytes) -> Lineage | None:
        """The lineage if it is known; nothing is remembered."""
        return self._lineages.get((scope, opening))

    def weigh(self, lineage: Lineage) -> None:
        """Its notes count as segments."""
        weight = lineage.notes.size // _SEGMENT_BYTES
        self._segments += weight - lineage.weight
        lineage.weight = weight

    def arrive(self, lineage: Lineage, now_s: float) -> None:
        """A request of this run has come: once per request, whatever its attempts."""
        lineage.gap_s = gap_s = now_s - lineage.seen_s
        if lineage.steps and gap_s >= _LEAST_GAP_S:
            lineage.gaps_s.append(gap_s)
            lineage.longest_gap_s = max(lineage.longest_gap_s, gap_s)
            del lineage.gaps_s[:-GAPS_MAX]
        lineage.steps += 1
        lineage.seen_s = now_s

    def outline(self, lineage: Lineage, facts: Facts, body: bytes) -> Outline:
        """The outline of this request; valid until the next one of the same lineage asks for its own."""
        segments = facts.segments
        keys = segments.keys
        known, old = lineage.outline, lineage.keys
        same = common(old, keys)
        if known is None or not old or 0 in keys or (same < 2 and not _same_head(known, segments)):
            known, same = Outline(False, False, [], [], [], []), 0
        elif same < len(old) and old[same + 1 :] == keys[same + 1 : len(old)]:
            # One segment is another: a system prompt with a clock, a message that lost its marker.
            self._replace(known, segments, same, facts.tool_count)
            same = len(old)
        del known.messages[max(0, same - known.first) :], known.sizes[same:], known.blocks[same:]
        while known.marked and known.marked[-1] >= same:
            known.marked.pop()
        for i in range(same, len(keys)):
            self._append(known, segments, i, facts.tool_count)
        self._segments += len(keys) - len(old)
        lineage.keys, lineage.outline = keys, known
        if len(lineage.trims) > 4 * len(keys) + 64:  # of forks and rewrites that are gone
            lineage.trims = {key: trims for key in keys if (trims := lineage.trims.get(key)) is not None}
        automatic = facts.spans.members.get("cache_control")
        asked = b"null" if automatic is None else body[automatic[0] : automatic[1]]
        known.automatic = asked != b"null"
        known.automatic_long = known.automatic and asks_long(asked)
        return known

    def _append(self, outline: Outline, segments: Segments, i: int, tool_count: int) -> None:
        segment = segments[i]
        message = self._look(segment, tool_count)
        outline.tools |= segment.kind == "tools"
        outline.system |= segment.kind == "system"
        if segment.kind == "message":
            outline.messages.append(message)
        outline.sizes.append((outline.sizes[-1] if outline.sizes else 0) + len(segment.raw))
        outline.blocks.append((outline.blocks[-1] if outline.blocks else 0) + message.blocks)
        outline.marked += [i] * message.markers

    def _replace(self, outline: Outline, segments: Segments, i: int, tool_count: int) -> None:
        message = self._look(segments[i], tool_count)
        if i >= outline.first:
            outline.messages[i - outline.first] = message
        for sums, added in ((outline.sizes, len(segments[i].raw)), (outline.blocks, message.blocks)):
            more = added - (sums[i] - (sums[i - 1] if i else 0))
            if more:
                sums[i:] = [n + more for n in sums[i:]]
        outline.marked = sorted([m for m in outline.marked if m != i] + [i] * message.markers)

    def _look(self, segment: Segment, tool_count: int) -> Message:
        """What there is to know of a segment; tools and system count as messages without a role."""
        if segment.kind == "message":
            return self._messages.of(segment)
        raw = segment.raw.tobytes()
        blocks = tool_count if segment.kind == "tools" else max(1, raw.count(b'"type"'))
        return Message("", blocks, client_markers(raw))

    def head_seen(self, links: Sequence[bytes], head: int, now_s: float, life_s: float) -> bool:
        """Whether any prompt began with these tools and this system prompt at most `life_s` ago; this one does now."""
        if not 0 <= head < len(links):
            return False
        seen_s = self._heads.pop(links[head], None)
        self._heads[links[head]] = now_s
        if len(self._heads) > self._lineages_max:
            self._heads.popitem(last=False)
        return seen_s is not None and now_s - seen_s < life_s


def opening(segments: Segments) -> bytes:
    """What a lineage is known by: the first two segments that are not tools."""
    start = 1 if segments and segments[0].kind == "tools" else 0
    return b"".join(digest(segments[i]) for i in range(start, min(start + 2, len(segments))))


def first_said(segments: Segments) -> bytes:
    """A digest of the first message that is no part of the system prompt; b"" if there is none."""
    for segment in segments:
        if segment.kind == "message" and not is_system(segment):
            return digest(segment)
    return b""


def _same_head(outline: Outline, segments: Segments) -> bool:
    """Tools and system are there, or not, as they were."""
    kinds = [segments[i].kind for i in range(min(2, len(segments)))]
    return ("tools" in kinds, "system" in kinds) == (outline.tools, outline.system)
