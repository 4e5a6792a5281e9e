"""Where a request marks its prefix for the provider's cache. Pure: rules and an outline of the prompt in, marks out.

In order of what they are worth, as far as the provider's limit leaves room beside the client's own marks:
1. the tail, the end of what the client sent: the next step reads up to there;
2. an anchor where the step before ended, if more came since than a marker looks back over: without it nothing of
   the history is found (anthropics/claude-code#63930: eleven parallel tool calls are 22 blocks);
3. the head, the end of the system prompt, which other runs share;
4. the tools, which outlive a changed system prompt.
Marks below the model's minimum are left out, and all but the head of what is probably one call alone: a write that
nobody reads costs more than no write.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from gateway.core.cache_rules import CacheRule, Life, LookbackUnit
from gateway.core.catalog import Operation
from gateway.core.dialects.blocks import Message

#: 3.5 bytes a token. Rather too many tokens than too few: a mark below the minimum costs nothing, a missing one does.
_TOKENS_NUM, _TOKENS_DEN = 2, 7
#: How far before an end that takes no mark another place is looked for.
_TAILS_MAX = 32
_UNMARKED = ("assistant", "system", "developer", "")


def estimate_tokens(size_bytes: int) -> int:
    return size_bytes * _TOKENS_NUM // _TOKENS_DEN


@dataclass(slots=True)
class Outline:
    """A prompt by its segments: tools and system if there are any, then messages. Lists have one entry per segment.

    `sizes` and `blocks` count from the beginning to the end of the segment, itself included.
    """

    tools: bool
    system: bool
    messages: list[Message]
    sizes: list[int]
    blocks: list[int]
    marked: list[int]  # segments with markers of the client's own
    automatic: bool = False  # the client asked for automatic caching, which marks the last block
    automatic_long: bool = False  # for an hour or more

    @property
    def first(self) -> int:
        """The first message's segment."""
        return self.tools + self.system

    def message(self, segment: int) -> Message:
        return self.messages[segment - self.first]

    @property
    def head(self) -> int:
        """The last segment of the system prompt, or of the tools if there is none; -1 without either."""
        if self.system:
            return self.first - 1
        end = self.first
        while end < len(self.sizes) and self.message(end).system:
            end += 1
        return end - 1

    @property
    def tail(self) -> int:
        """The last message that the next step keeps and that can be marked; -1 if there is none.

        Trailing system messages are reminders that clients move along (Aider); answers cannot carry a mark.
        """
        messages = self.messages
        at = len(messages) - 1
        while at >= 0 and messages[at].role in _UNMARKED:
            at -= 1
        return at + self.first if at >= 0 else -1

    @property
    def answered(self) -> bool:
        return any(m.role == "assistant" for m in self.messages)

    def before_last_answer(self) -> int:
        """Where the step before this one ended, judged by the roles alone; -1 if this is the first."""
        messages = self.messages
        at = len(messages) - 1
        while at >= 0 and messages[at].role != "assistant":
            at -= 1
        while at >= 0 and messages[at].role == "assistant":
            at -= 1
        return at + self.first if at >= 0 else -1


class Mark(msgspec.Struct, frozen=True, gc=False):
    """`segment` counts from the beginning of the prompt; `life` is a TTL's name, "" = the provider's default."""

    segment: int
    life: str = ""


class Plan(msgspec.Struct, frozen=True, gc=False):
    marks: tuple[Mark, ...] = ()
    why: str = ""  # one line for people: why there are none

    @property
    def long(self) -> bool:
        return any(mark.life for mark in self.marks)


def plan(
    rule: CacheRule,
    operation: Operation,
    outline: Outline,
    *,
    continued: bool,
    head_seen: bool = False,
    entries: Sequence[int] = (),
    life: Life | None = None,
    can_mark: Callable[[int], bool] = lambda _segment: True,
    tail: int | None = None,
    notes: Sequence[int] = (),
    shared_head: bool = False,
    head_changes: bool = False,
) -> Plan:
    """The marks to add, in prompt order.

    `continued`: more requests with this beginning came or will come (a run, not one call alone). `head_seen`: another
    prompt had the same tools and system within their life. `entries`: segments up to which an earlier request of
    this run left cache entries, if that is known. `life`: what to ask for instead of the default life. `can_mark`:
    whether a segment has a block that takes a mark. `notes`: segments behind which the gateway has put a block of its own.
    `shared_head`: lines at the end of the system prompt are this run's alone, and a mark can go in front of them, where no
    marker of the client's own is. `head_changes`: the system prompt is another one in every step, so that nothing behind
    the tools is read again.
    """
    marker = rule.markers.get(operation, "")
    if not marker or rule.max_breakpoints is None:
        return Plan(why="requests here cannot mark")
    if not rule.reads_cheaper:
        return Plan(why="a hit costs what input costs")
    implicit = rule.implicit_breakpoints
    if rule.min_prefix_tokens and estimate_tokens(outline.sizes[-1]) < rule.min_prefix_tokens:
        return Plan(why="below the minimum")
    room = rule.max_breakpoints - client_marks(outline) - outline.automatic - implicit
    if room <= 0:
        return Plan(why="the client's own markers leave no room")
    end = outline.tail if tail is None else tail
    last = outline.messages[-1] if outline.messages else None
    if head_changes:
        own = bool(outline.marked) and min(outline.marked) < outline.first
        wished: list[Sequence[int]] = [(0,)] if outline.tools and outline.head > 0 and not own else []
    else:
        # A reminder that clients move along is marked by the provider for nothing.
        ends_there = implicit > 0 and not (last is not None and last.system)
        wished = _wished(rule, outline, continued, head_seen, entries, end, ends_there, notes, shared_head)
    if not wished and head_changes:
        return Plan(why="the system prompt changes with every step, so a write would not be read again")
    if not wished:
        return Plan(why="one call alone" if not continued else "nothing is gained by another marker")
    least = -(-(rule.min_prefix_tokens or 0) * _TOKENS_DEN // _TOKENS_NUM)  # bytes
    taken: list[int] = []
    for acceptable in wished:
        for at in acceptable:
            if outline.sizes[at] >= least and can_mark(at):
                if at not in taken and len(taken) < room:
                    taken.append(at)
                break
    return Plan(tuple(_with_lives(rule, outline, sorted(taken), life)))


def client_marks(outline: Outline) -> int:
    """At least as many as the client placed: `marked` names a segment once per marker."""
    return len(outline.marked)


def _wished(
    rule: CacheRule,
    outline: Outline,
    continued: bool,
    head_seen: bool,
    entries: Sequence[int],
    tail: int,
    tail_is_implicit: bool,
    notes: Sequence[int],
    shared_head: bool,
) -> list[Sequence[int]]:
    """Acceptable segments for each mark, the most valuable mark first."""
    marked = outline.marked
    head = outline.head
    wished: list[Sequence[int]] = []
    before = -1
    for entry in entries:
        if before < entry < tail and entry > head:
            before = entry
    if before < 0:
        before = outline.before_last_answer()
    # A client that marks its own tail does so in every step; where it only marks its head, the history is ours.
    own_tail = outline.automatic or bool(marked and max(marked) > max(before, head))
    if continued and not tail_is_implicit and tail > head and not own_tail:
        # What holds no text, an empty tool result, takes no mark: then the nearest message before it.
        latest = range(tail, max(before - 1, head, outline.first - 1, tail - _TAILS_MAX), -1)
        wished.append([s for s in latest if s == tail or not outline.message(s).assistant])
    if continued and before > head:
        end = min((s for s in marked if s > before), default=tail)
        if before not in marked and _overrun(rule, outline, before, end, notes):
            wished.append([s for s in _near(rule, outline, before, end, notes) if s not in marked])
    # A head that a mark of the client's own covers, or tools that do, are the client's business.
    theirs = bool(marked and min(marked) <= head)
    if (continued or head_seen) and head >= 0 and (shared_head or not theirs):
        wished.append((head,))
        if outline.tools and head > 0 and not theirs:
            wished.append((0,))
    return wished


def _overrun(rule: CacheRule, outline: Outline, earlier: int, later: int, notes: Sequence[int]) -> bool:
    """A mark on `later` does not look back as far as an entry that ends with `earlier`."""
    if rule.lookback is None:
        return False
    added = bisect_left(notes, later) - bisect_left(notes, earlier) if notes else 0
    if rule.lookback_unit is LookbackUnit.MESSAGE_END:
        return later - earlier + added > rule.lookback
    return outline.blocks[later] - outline.blocks[earlier] + added >= rule.lookback


def _near(rule: CacheRule, outline: Outline, entry: int, end: int, notes: Sequence[int]) -> list[int]:
    """Segments from which an entry at `entry` is found, itself first; answers cannot be marked."""
    near = []
    for at in range(entry, end):
        if _overrun(rule, outline, entry, at, notes):
            break
        if not outline.message(at).assistant:
            near.append(at)
    return near


def _with_lives(rule: CacheRule, outline: Outline, segments: Sequence[int], life: Life | None) -> list[Mark]:
    """A longer life may not follow a shorter one, the client's own included."""
    if not outline.marked and not outline.automatic_long:
        name = life.name if life is not None and not outline.automatic else ""
        return [Mark(segment, name) for segment in segments]
    longs = [s for s in outline.marked if s >= outline.first and outline.message(s).long]
    last_long = len(outline.sizes) if outline.automatic_long else max(longs, default=-1)
    longer = next((x.name for x in rule.lives[1:]), "")
    marks = []
    for segment in segments:
        if segment < last_long:
            if longer:
                marks.append(Mark(segment, longer))
        else:
            marks.append(Mark(segment))
    return marks


# --- which life -----------------------------------------------------------------------------------------


def better_life(rule: CacheRule, operation: Operation, gaps_s: Sequence[float]) -> Life | None:
    """The life that will cost less for a run whose next gaps are like its last ones; None = the default life.

    In thousandths of the input price of its prompt: a gap longer than a life writes all of it again, any other reads
    it; the turns together add as much again; and now a longer life has to be written anew, where the default one
    may still be there.
    """
    menu = [life for life in rule.lives_on(operation) if life.life_s is not None]
    if len(menu) < 2 or not gaps_s or rule.read_milli is None:
        return None
    default, *others = menu
    read = rule.read_milli

    def cost(life: Life) -> int:
        lost = [gap_s >= (life.life_s or 0) for gap_s in gaps_s]
        now = life.write_milli if life is not default or lost[-1] else read
        return now + sum(life.write_milli if gone else read for gone in lost) + life.write_milli

    best = min(others, key=cost)
    return best if cost(best) < cost(default) else None
