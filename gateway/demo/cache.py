"""Prompt caching by the published rules (see `models.py`), over rendered content blocks.

What counts is the rendered token sequence, not JSON bytes: every block is rendered to text and chained into a
rolling digest, so white space between JSON keys, string-or-list contents and the markers themselves change
nothing, and any changed character changes every digest behind it. The chain starts from the caller's credential
and the model: nothing is shared between credentials.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import xxhash

from gateway.demo.models import CacheRules, CacheStyle
from gateway.demo.prompt import MESSAGE_TOKENS, PRIMING_TOKENS, Ask, BadRequest, Kind, Section, Ttl
from gateway.demo.tokens import TokenCounts


@dataclass(frozen=True, slots=True)
class Block:
    """One position in the prompt: everything up to here has this digest and this many tokens."""

    digest: bytes
    tokens: int
    marker: Ttl | None
    openai_marker: bool
    message_end: bool
    cacheable: bool


@dataclass(frozen=True, slots=True)
class Split:
    """Where each input token is billed, and what the cache will hold once the answer begins."""

    input_uncached: int
    cache_read: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0
    #: (digest, life in ms) of entries to write, and digests of entries whose life starts anew
    writes: tuple[tuple[bytes, int], ...] = ()
    refreshes: tuple[bytes, ...] = ()

    @property
    def input_total(self) -> int:
        return self.input_uncached + self.cache_read + self.cache_write_5m + self.cache_write_1h


def render(ask: Ask, credential: bytes, counts: TokenCounts) -> tuple[Block, ...]:
    """The prompt's positions, first to last."""
    implicit = ask.model.rules.style is CacheStyle.IMPLICIT
    seed = f"{ask.model.name}\n{ask.root_settings if implicit else ''}".encode()
    digest = xxhash.xxh3_128_digest(credential + seed)
    settings = {
        Section.TOOLS: "",
        Section.SYSTEM: "" if implicit else ask.system_settings,
        Section.MESSAGES: "" if implicit else f"{ask.message_settings}{ask.has_media}",
    }
    section, message, tokens = Section.TOOLS, -1, 0
    blocks: list[Block] = []
    for i, part in enumerate(ask.parts):
        head = part.kind.encode()
        if part.message != message:
            message = part.message
            head += b"\n" + part.role.encode()
            tokens += MESSAGE_TOKENS
        while section < part.section:
            section = Section(section + 1)
            head += b"\n" + settings[section].encode()
        text_digest, count = counts.measure(part.text)
        tokens += count if part.tokens is None else part.tokens
        digest = xxhash.xxh3_128_digest(digest + text_digest + head)
        last = i + 1 == len(ask.parts) or ask.parts[i + 1].message != message
        cacheable = part.kind is not Kind.THINKING and bool(part.text)
        blocks.append(Block(digest, tokens, part.marker, part.openai_marker, last, cacheable))
    return tuple(blocks)


class PromptCache:
    """The entries that earlier requests wrote. `now_ms` is an argument everywhere, so tests own the clock."""

    def __init__(self, max_entries: int = 200_000) -> None:
        self._max_entries = max_entries
        self._entries: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # digest -> (expires_ms, life_ms)

    def split(self, ask: Ask, blocks: tuple[Block, ...], now_ms: int) -> Split:
        """How this prompt is billed. Changes nothing: see `begin`. Raises BadRequest on illegal markers."""
        rules = ask.model.rules
        total = (blocks[-1].tokens if blocks else 0) + PRIMING_TOKENS
        if rules.style is CacheStyle.NONE:
            return Split(total)
        if rules.style is CacheStyle.EXPLICIT:
            marks = explicit_marks(rules, blocks, ask.automatic)
            examined = {i - back for i, _ in marks for back in range(rules.lookback)}
        else:
            marks = implicit_marks(rules, blocks, ask.implicit_breakpoint)
            examined = implicit_candidates(rules, blocks, ask.implicit_breakpoint)
        marks = [(i, ttl) for i, ttl in marks if blocks[i].tokens >= rules.min_tokens]
        hit = max((i for i in examined if i >= 0 and self._alive(blocks[i].digest, now_ms)), default=-1)
        read = blocks[hit].tokens if hit >= 0 else 0
        end = max((blocks[i].tokens for i, _ in marks), default=0)
        # Anthropic, "Mixing different TTLs": 1h writes reach from the hit to the last 1h marker, 5m writes from there.
        long_end = max((blocks[i].tokens for i, ttl in marks if ttl is Ttl.LONG), default=0)
        long_write = max(0, long_end - read)
        short_write = max(0, end - max(read, long_end))
        alive = {i for i, _ in marks if self._alive(blocks[i].digest, now_ms)} | ({hit} - {-1})
        return Split(
            input_uncached=total - read - long_write - short_write,
            cache_read=read,
            cache_write_5m=short_write,
            cache_write_1h=long_write,
            # A mark inside the part that is read anyway becomes an entry too, free of charge.
            writes=tuple(
                (blocks[i].digest, rules.long_ttl_ms if ttl is Ttl.LONG else rules.ttl_ms)
                for i, ttl in marks
                if i not in alive
            ),
            refreshes=tuple(blocks[i].digest for i in sorted(alive)),
        )

    def begin(self, split: Split, now_ms: int) -> None:
        """The answer begins: from now on its prefix can be read. (A fan-out before this pays its own writes.)"""
        for digest in split.refreshes:
            entry = self._entries.get(digest)
            if entry is not None:
                self._put(digest, now_ms, entry[1])
        for digest, life_ms in split.writes:
            self._put(digest, now_ms, life_ms)

    def _put(self, digest: bytes, now_ms: int, life_ms: int) -> None:
        self._entries[digest] = (now_ms + life_ms, life_ms)
        self._entries.move_to_end(digest)
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def _alive(self, digest: bytes, now_ms: int) -> bool:
        entry = self._entries.get(digest)
        return entry is not None and now_ms < entry[0]


def explicit_marks(
    rules: CacheRules, blocks: tuple[Block, ...], automatic: Ttl | None
) -> list[tuple[int, Ttl]]:
    """Anthropic's breakpoints, in order. Raises BadRequest for a fifth one, or a 1h one after a 5m one."""
    marks = [(i, block.marker) for i, block in enumerate(blocks) if block.marker]
    if automatic:
        last = max((i for i, block in enumerate(blocks) if block.cacheable), default=-1)
        if last >= 0 and all(i != last for i, _ in marks):
            marks = sorted([*marks, (last, automatic)])
    if len(marks) > rules.max_breakpoints:
        raise BadRequest(
            f"A maximum of {rules.max_breakpoints} blocks with cache_control may be provided. Found {len(marks)}.",
            "cache_control",
        )
    ttls = [ttl for _, ttl in marks]
    if ttls != sorted(ttls, key=lambda ttl: ttl is not Ttl.LONG):
        raise BadRequest(
            "a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block",
            "cache_control",
        )
    return marks


def implicit_marks(rules: CacheRules, blocks: tuple[Block, ...], implicit: bool) -> list[tuple[int, Ttl]]:
    """OpenAI's breakpoints: the latest marked parts, and the end of the latest message."""
    marked = [i for i, block in enumerate(blocks) if block.openai_marker]
    if implicit and blocks:
        marked = sorted({*marked, len(blocks) - 1})
    return [(i, Ttl.SHORT) for i in marked[-rules.max_breakpoints :]]


def implicit_candidates(rules: CacheRules, blocks: tuple[Block, ...], implicit: bool) -> set[int]:
    """Where OpenAI looks for entries: first 2 and latest 50 marked parts, latest message, 20 message ends before."""
    marked = [i for i, block in enumerate(blocks) if block.openai_marker]
    candidates = {*marked[:2], *marked[-50:]}
    if implicit:
        ends = [i for i, block in enumerate(blocks) if block.message_end]
        candidates.update(ends[-(rules.lookback + 1) :])
    return candidates
