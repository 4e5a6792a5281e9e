"""What is being decided of one request's shape, and where its parts stand in the body."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from gateway.core.catalog import Operation
from gateway.core.dialects import blocks
from gateway.core.dialects.facts import Facts, Splice
from gateway.core.markers import Mark
from gateway.core.notes import Note, with_mark
from gateway.core.relocation import Cut


class Transform(StrEnum):
    """A change to a request. The number is its version: another number, other bytes."""

    TOOLS = "tools_first_seen@1"
    NONCE = "billing_nonce@1"
    MARKERS = "markers@1"
    CACHE_KEY = "cache_key@1"
    RELOCATE = "relocate@3"
    TRIM = "trim@1"


class Draft(msgspec.Struct):
    """What has been decided so far."""

    splices: list[Splice] = []
    members: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    applied: list[Transform] = []
    marks: tuple[Mark, ...] = ()
    why_no_marks: str = ""
    long_write: bool = False
    moved: tuple[bytes, ...] = ()
    diff: str = ""
    notes: dict[int, tuple[Splice, ...]] = {}  # by segment, relative to it
    note: tuple[bytes, int, Note] | None = None
    cut: Cut | None = None
    cut_mark: bytes = b""
    continued: bool = False


def on_tools(raw: bytes, text: bytes) -> tuple[Splice, ...]:
    """OpenAI's breakpoints go on content blocks only."""
    return () if text.startswith(b',"prompt_cache_breakpoint"') else blocks.mark_tools(raw, text)


def place(
    at: int,
    splices: tuple[Splice, ...],
    facts: Facts,
    body: bytes,
    first: int,
    tools: bytes | None,
    draft: Draft,
) -> bool:
    """Put the splices of a segment where it stands in the body; False if it is not where it must be."""
    if at >= first:
        name = "input" if facts.operation is Operation.RESPONSES else "messages"
        base = blocks.offset_of(body, facts.spans.members[name], facts.segments, at, first)
    else:
        kind = facts.segments[at].kind
        if kind == "tools" and tools is not None:
            i = next(i for i, splice in enumerate(draft.splices) if splice[2] is tools)
            start, end, _ = draft.splices[i]
            ((inside, _, text),) = splices
            draft.splices[i] = (start, end, b"".join((tools[:inside], text, tools[inside:])))
            return True
        base = facts.spans.members[kind][0]
    if base is None:
        return False
    note = draft.notes.get(at)
    if note is not None:
        draft.notes[at], both = with_mark(note, splices)
        if both:
            return True
    draft.splices += [(base + start, base + end, added) for start, end, added in splices]
    return True


def put_moved(facts: Facts, body: bytes, first: int, draft: Draft) -> None:
    """The end of the system prompt with its mark, and the notes, where they stand in the body."""
    if draft.cut is not None:
        draft.splices += draft.cut.splices(draft.cut_mark)
    inside = facts.spans.members["input" if facts.operation is Operation.RESPONSES else "messages"]
    for at, splices in draft.notes.items():
        base = blocks.offset_of(body, inside, facts.segments, at, first)
        if base is not None:
            draft.splices += [(base + start, base + end, text) for start, end, text in splices]
