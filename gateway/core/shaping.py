"""What the gateway does to a prompt on its way to a provider: named, versioned transforms, chosen by a level.

    observe    nothing is changed
    safe       only what cannot change the meaning: tools as first seen, a client's nonce left out, markers, a cache key
    relocate   volatile lines of the system prompt also move behind the stable part

Everything is a splice over the bytes as received: what no splice names stays byte for byte.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from gateway.core.beginnings import Beginnings
from gateway.core.cache_rules import CacheRule, KeyMeans, Life, Style
from gateway.core.catalog import Operation
from gateway.core.dialects import blocks
from gateway.core.dialects.facts import Facts, Segments, Splice
from gateway.core.draft import Draft, on_tools, place, put_moved
from gateway.core.draft import Transform as Transform
from gateway.core.lineages import Lineage, Lineages, Scope, extends, first_said, opening
from gateway.core.markers import Mark, Outline, better_life, plan
from gateway.core.moves import Moves
from gateway.core.notes import Note
from gateway.core.relocation import SystemText
from gateway.core.tool_sets import ToolSets
from gateway.core.trimming import Artifacts, Trim, Trimmer, TrimPolicy

#: Shorter bodies hold no prefix that any provider caches: 512 tokens of 3.5 bytes.
LEAST_BYTES = 1_792
_NONCE = b"x-anthropic-billing-header:"


class Level(StrEnum):
    OBSERVE = "observe"
    SAFE = "safe"
    RELOCATE = "relocate"


@dataclass(frozen=True, slots=True)
class CachingPolicy:
    """Which level holds for whom: the narrowest that says one, in the order request, key, team, deployment, all."""

    level: Level = Level.SAFE
    keys: Mapping[str, Level] = field(default_factory=dict)
    teams: Mapping[str, Level] = field(default_factory=dict)
    deployments: Mapping[str, Level] = field(default_factory=dict)
    off: frozenset[Transform] = frozenset()
    trim: TrimPolicy = field(default_factory=TrimPolicy)
    diagnostics: bool = False  # vendors are asked why a prompt was not read (`core.second_opinion`)

    def level_for(self, asked: Level | None, key_id: str, team_id: str, deployment: str) -> Level:
        if asked is not None:
            return asked
        return (
            self.keys.get(key_id) or self.teams.get(team_id) or self.deployments.get(deployment) or self.level
        )


class Request(msgspec.Struct, frozen=True):
    """What is to be shaped, for whom, and for which target."""

    operation: Operation
    facts: Facts
    body: bytes
    links: tuple[bytes, ...]  # `prefix.chain` of its segments
    scope: Scope  # whose run this may be; the last part names the client's session, "" if it names none
    rule: CacheRule | None
    native: bool = True  # the target takes this dialect as it is
    level: Level = Level.SAFE
    off: frozenset[Transform] = frozenset()
    trim: TrimPolicy = TrimPolicy()
    group: str = ""  # the task: names the run towards a provider that routes by key, and in addresses
    now_s: float = 0.0  # monotonic
    again: bool = False  # another attempt of a request that was shaped before


class Shaped(msgspec.Struct, frozen=True):
    """What was decided for one attempt. `splices` are over the body as received and do not overlap."""

    level: Level
    splices: tuple[Splice, ...] = ()
    members: bytes = b""  # top-level members to insert, each with the comma before it
    headers: tuple[tuple[str, str], ...] = ()
    applied: tuple[Transform, ...] = ()
    marks: tuple[Mark, ...] = ()
    why_no_marks: str = ""
    long_write: bool = False  # a marker asks for a life that is dearer to write
    #: lines of the system prompt that do not stand in their place, as JSON text without quotes
    moved: tuple[bytes, ...] = ()
    #: lines that move since this request, as a diff for people; "" if none is new
    diff: str = ""
    #: what was told of its lines at its end, for the other processes that serve this run: what the run is known by, what
    #: was said before, and the note
    note: tuple[bytes, int, Note] | None = None
    protections: tuple[str, ...] = ()  # what was said for the client, or in its place (`core.protection`)

    @property
    def added_bytes(self) -> int:
        """By how much what is inserted is longer than what it replaces; what is only dropped does not count."""
        if not self.splices:
            return len(self.members)
        grown = sum([max(0, len(text) - (end - start)) for start, end, text in self.splices])
        return grown + len(self.members)


#: Nothing was changed.
AS_IT_CAME = Shaped(Level.OBSERVE)


class Shaper:
    """Shapes requests, and remembers per run what makes the next step cheap and the same."""

    def __init__(self) -> None:
        self.lineages = Lineages()
        self.tools = ToolSets()
        self._trimmer = Trimmer()
        self._beginnings = Beginnings()
        self.moves = Moves()
        #: runs that came with a new head in their middle -> how often in a row
        self._unread: OrderedDict[tuple[Scope, bytes], int] = OrderedDict()
        self._marked: dict[tuple[int, Operation, bytes], tuple[Splice, ...]] = {}

    def shape(self, request: Request) -> Shaped:
        rule, level = request.rule, request.level
        if level is Level.OBSERVE or request.operation not in SHAPED:
            return AS_IT_CAME
        if len(request.body) < LEAST_BYTES or not len(request.facts.segments):
            return Shaped(level, why_no_marks="below the minimum")
        draft = Draft()
        lineage, system = self._lineage(request)
        if not request.again:
            self.lineages.arrive(lineage, request.now_s)
        lineage.task_id = request.group
        if request.trim.over_chars and Transform.TRIM not in request.off:
            self._trim(request, lineage, draft)
        tools = self._first_seen_tools(request, lineage, draft)
        if rule is None:
            return _done(draft, level)
        if not rule.billing_header and Transform.NONCE not in request.off:
            self._strip_nonce(request, draft)
        outline = self.lineages.outline(lineage, request.facts, request.body)
        if system is not None:
            self._move(request, rule, lineage, system, outline, draft)
        draft.continued = request.facts.n == 1 and self._continued(request, rule, lineage, outline)
        self._mark(request, rule, lineage, outline, tools, draft)
        if draft.notes or draft.cut is not None:
            put_moved(request.facts, request.body, outline.first, draft)
        return self._keyed(request, rule, draft)

    def task_of(self, scope: Scope, operation: Operation, facts: Facts, body: bytes) -> str:
        """The task of the run that this request goes on with, although its tools came in another order or volatile
        lines of its system prompt changed; "" if none is known."""
        segments = facts.segments
        if operation not in SHAPED or len(body) < LEAST_BYTES or len(segments) < 3:
            return ""
        found = self.lineages.peek(scope, opening(segments))
        if found is None and self.moves.prompts:
            system = self.moves.templates.read(operation, facts, body)
            if system is not None:
                found = self.lineages.peek(scope, _moved_opening(facts, system))
        return found.task_id if found is not None and extends(segments, found) else ""

    # --- relocation ---------------------------------------------------------------------------------------

    def _lineage(self, request: Request) -> tuple[Lineage, SystemText | None]:
        """The run that this request is of, and its system prompt if lines of it may move.

        Where they may, prompts that differ in volatile parts only belong to one run.
        """
        lines = request.level is Level.RELOCATE and Transform.RELOCATE not in request.off
        if lines:
            opened, system = self.opened(request.operation, request.facts, request.body, lines)
            if system is not None:
                return self.lineages.at(request.scope, opened), system
        return self.lineages.find(request.scope, request.facts.segments), None

    def opened(
        self, operation: Operation, facts: Facts, body: bytes, lines: bool
    ) -> tuple[bytes, SystemText | None]:
        """By what the run of a request is known, and its system prompt if `lines` of it may move."""
        system = self.moves.templates.read(operation, facts, body) if lines else None
        if system is not None and system.candidates:
            return _moved_opening(facts, system), system
        return opening(facts.segments), None

    def _move(
        self,
        request: Request,
        rule: CacheRule,
        lineage: Lineage,
        system: SystemText,
        outline: Outline,
        draft: Draft,
    ) -> None:
        """Makes the system prompt what it is in this run, and has told what lines of it say now."""
        found = self.moves.of(
            request.scope,
            request.facts,
            self.lineages,
            lineage,
            system,
            outline,
            turns=rule.mid_conversation_system is True,
            marks=_takes_marks(request, rule),
            lapsed=_lapsed(request, rule, lineage),
            surely=rule.style is Style.EXPLICIT,
        )
        if found is None:
            return
        draft.splices += found.splices
        draft.notes, draft.cut = found.notes, found.cut
        draft.moved, draft.diff = found.lines, found.diff
        if found.told is not None:
            draft.note = (_moved_opening(request.facts, system), *found.told)
        draft.applied.append(Transform.RELOCATE)

    def _first_seen_tools(self, request: Request, lineage: Lineage, draft: Draft) -> bytes | None:
        """The tools' bytes to send instead of those that came."""
        segment = request.facts.segments[0]
        if segment.kind != "tools" or Transform.TOOLS in request.off:
            return None
        # A session that its client names keeps its tools also where the system prompt changes.
        home = self.lineages.at(request.scope, b"") if request.scope[-1] else lineage
        first = self.tools.first_seen(home.tools, segment)
        if first is not None:
            draft.splices.append((*request.facts.spans.members["tools"], first))
            draft.applied.append(Transform.TOOLS)
        return first

    @property
    def artifacts(self) -> Artifacts:
        """The whole texts of what was trimmed."""
        return self._trimmer.artifacts

    def _trim(self, request: Request, lineage: Lineage, draft: Draft) -> None:
        """Long tool results, in the message in which they first appeared. What left whole before stays whole."""
        facts, body, segments = request.facts, request.body, request.facts.segments
        known, keys = lineage.trims, segments.keys
        if not known:
            known.update(dict.fromkeys(lineage.keys, ()))
        cut: list[tuple[int, tuple[Trim, ...]]] = []
        for i, key in enumerate(keys):
            trims = known.get(key)
            if trims is None:
                raw = segments[i].raw
                long = segments[i].kind == "message" and len(raw) > request.trim.over_chars
                trims = self._trimmer.trims(request.operation, raw.tobytes(), request.trim) if long else ()
                known[key] = trims
            if trims:
                cut.append((i, trims))
        if not cut:
            return
        name = "input" if request.operation is Operation.RESPONSES else "messages"
        first = sum(segments[i].kind != "message" for i in range(min(2, len(keys))))
        for i, trims in cut:
            base = blocks.offset_of(body, facts.spans.members[name], segments, i, first)
            if base is None:
                continue
            for trim in trims:
                text = self._trimmer.cut(trim, segments[i].raw, request.group, request.trim)
                draft.splices.append((base + trim.start, base + trim.end, text))
        draft.applied.append(Transform.TRIM)

    def _strip_nonce(self, request: Request, draft: Draft) -> None:
        span = request.facts.spans.members.get("system")
        if span is None or request.operation is not Operation.MESSAGES:
            return
        # It stands in the first block, which is a short one.
        if request.body.find(_NONCE, span[0], min(span[1], span[0] + 128)) < 0:
            return
        cut = blocks.first_line_block(request.body[span[0] : span[1]], _NONCE)
        if cut is not None:
            draft.splices.append((span[0] + cut[0], span[0] + cut[1], b""))
            draft.applied.append(Transform.NONCE)

    # --- markers ------------------------------------------------------------------------------------------

    def _continued(self, request: Request, rule: CacheRule, lineage: Lineage, outline: Outline) -> bool:
        """More requests with this beginning came or will come, by all that is known."""
        if request.facts.tool_count:
            return True
        who = request.scope[:-1]
        if not request.again:
            self._beginnings.saw(who, lineage.steps, outline.answered)
        return lineage.steps > 1 or outline.answered or self._beginnings.go_on(who, rule)

    def _mark(
        self,
        request: Request,
        rule: CacheRule,
        lineage: Lineage,
        outline: Outline,
        tools: bytes | None,
        draft: Draft,
    ) -> None:
        operation = request.operation
        marker = rule.markers.get(operation, "")
        head_seen = False
        if lineage.steps <= 1:
            life_s = rule.lives[0].life_s or 0 if rule.lives else 0
            head_seen = self.lineages.head_seen(request.links, outline.head, request.now_s, life_s)
        if not _takes_marks(request, rule):
            draft.why_no_marks = "requests here cannot mark" if not marker else "switched off"
            return
        life = self._life(rule, operation, lineage)
        segments = request.facts.segments
        if outline.marked and rule.implicit_breakpoints:
            outline = _own_marks(outline, marker.encode(), segments)
        plain = blocks.marker_text(marker)

        places: dict[int, tuple[Splice, ...]] = {}

        def can_mark(at: int) -> bool:
            if draft.cut is not None and at == outline.head:
                return True
            places[at] = found = self._splices(at, request, plain, tools)
            return bool(found)

        found = plan(
            rule,
            operation,
            outline,
            continued=draft.continued,
            head_seen=head_seen,
            entries=lineage.entries(request.links),
            life=life,
            can_mark=can_mark,
            notes=sorted(draft.notes) if draft.notes else (),
            shared_head=draft.cut is not None and not blocks.asks_long(segments[outline.head].raw.tobytes()),
            head_changes=self._head_changes(request, lineage, outline) and not draft.moved,
        )
        lineage.links = request.links
        ends = () if rule.style is Style.EXPLICIT else (len(segments) - 1,)
        lineage.marks = (*(m.segment for m in found.marks), *outline.marked, *ends)
        draft.why_no_marks = found.why
        placed = []
        for mark in found.marks:
            if draft.cut is not None and mark.segment == outline.head:
                draft.cut_mark = blocks.marker_text(marker, mark.life)
                placed.append(mark)
                continue
            at, where = mark.segment, places[mark.segment]
            if mark.life:
                where = self._splices(at, request, blocks.marker_text(marker, mark.life), tools)
            if place(at, where, request.facts, request.body, outline.first, tools, draft):
                placed.append(mark)
        if placed:
            draft.marks = tuple(placed)
            draft.long_write = any(mark.life for mark in placed)
            lineage.wrote_long |= draft.long_write
            draft.applied.append(Transform.MARKERS)

    def _head_changes(self, request: Request, lineage: Lineage, outline: Outline) -> bool:
        """Whether this run, in the middle of its history, has come with another head than before for a second time.

        Once is a mode that changed, a restart, or another replica; twice is a clock, and each write is lost.
        """
        if lineage.steps > 2 or not outline.answered:
            return False
        run = (request.scope, first_said(request.facts.segments))
        if lineage.steps == 2:
            self._unread.pop(run, None)
            return False
        unread = self._unread.get(run, 0)
        if not request.again:
            self._unread[run] = unread + 1
            self._unread.move_to_end(run)
            if len(self._unread) > 10_000:
                self._unread.popitem(last=False)
        return unread > 0

    def _life(self, rule: CacheRule, operation: Operation, lineage: Lineage) -> Life | None:
        """A longer life than the default one, once it has paid; from then on the run keeps it."""
        if len(rule.lives) < 2 or not (lineage.life or lineage.longest_gap_s >= (rule.lives[0].life_s or 0)):
            return None
        if rule.markers.get(operation) != "cache_control":
            return None
        menu = {life.name: life for life in rule.lives_on(operation)}
        chosen = menu.get(lineage.life) or better_life(rule, operation, lineage.gaps_s)
        if chosen is not None:
            lineage.life = chosen.name
        return chosen

    def _splices(self, at: int, request: Request, text: bytes, tools: bytes | None) -> tuple[Splice, ...]:
        """Where the mark goes, relative to its segment."""
        segment = request.facts.segments[at]
        kind = segment.kind
        if kind == "tools" and tools is not None:
            return on_tools(tools, text)
        known = (segment.key, request.operation, text)
        found = self._marked.get(known) if segment.key else None
        if found is None:
            raw = segment.raw.tobytes()
            if kind == "tools":
                found = on_tools(raw, text)
            elif kind == "system":
                # Responses: `instructions` is a string that cannot carry a mark.
                whole = (0, len(raw))
                responses = request.operation is Operation.RESPONSES
                found = () if responses else blocks.mark_content(raw, whole, request.operation, text)
            else:
                found = blocks.mark_message(raw, request.operation, text)
            if len(self._marked) >= 16_384:
                self._marked.clear()
            self._marked[known] = found
        return found

    # --- cache keys ---------------------------------------------------------------------------------------

    def _keyed(self, request: Request, rule: CacheRule, draft: Draft) -> Shaped:
        """A key that keeps a run on one server; never one that separates reuse. A salt is no matter of levels
        (`core.protection`)."""
        member, header = rule.key_on(request.operation)
        if Transform.CACHE_KEY in request.off or not request.native or not (member or header):
            return _done(draft, request.level)
        value = request.group if rule.key_means is KeyMeans.ROUTING and draft.continued else ""
        if value and member and member not in request.facts.spans.members:
            draft.members = b',"%b":%b' % (member.encode(), msgspec.json.encode(value))
            draft.applied.append(Transform.CACHE_KEY)
        elif value and header:
            draft.headers = ((header, value),)
            draft.applied.append(Transform.CACHE_KEY)
        return _done(draft, request.level)


def _done(draft: Draft, level: Level) -> Shaped:
    return Shaped(
        level,
        tuple(sorted(draft.splices)),
        draft.members,
        draft.headers,
        tuple(draft.applied),
        draft.marks,
        draft.why_no_marks,
        draft.long_write,
        draft.moved,
        draft.diff,
        draft.note,
    )


def _own_marks(outline: Outline, marker: bytes, segments: Segments) -> Outline:
    """Without the client's markers for other providers, which mean nothing here."""
    marked = [at for at in outline.marked if marker in segments[at].raw.tobytes()]
    return outline if len(marked) == len(outline.marked) else replace(outline, marked=marked)


SHAPED = frozenset({Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES})


def _moved_opening(facts: Facts, system: SystemText) -> bytes:
    return b"moved" + system.template + first_said(facts.segments)


def _lapsed(request: Request, rule: CacheRule, lineage: Lineage) -> bool:
    """Whether the run has paused for longer than its provider's caches live."""
    if not rule.lives:
        return False
    lineage.wrote_long |= request.facts.long_cache_write
    life_s = rule.lives[-1 if lineage.wrote_long else 0].life_s
    return life_s is not None and lineage.gap_s >= life_s


def _takes_marks(request: Request, rule: CacheRule) -> bool:
    off = Transform.MARKERS in request.off
    return not off and request.operation in rule.markers and not _decides_itself(request)


def _decides_itself(request: Request) -> bool:
    """The client chose OpenAI's explicit mode: where its marks are is its business."""
    span = request.facts.spans.members.get("prompt_cache_options")
    return span is not None and b'"explicit"' in request.body[span[0] : span[1]]
