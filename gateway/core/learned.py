"""What one process has learned of a run, in a form that another can use.

The first-seen order of a list of tools is told by a hash for each tool: another process that gets the same tools in
another order puts its own bytes into that order, and sends them only if they are then, byte for byte, what was sent first.
Of lines that may move their wording is told, and what they say since, for that has to be the same wherever a step lands.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import xxhash

from gateway.core.catalog import Operation
from gateway.core.dialects import blocks
from gateway.core.dialects.facts import Facts
from gateway.core.lineages import Lineage, Scope
from gateway.core.notes import Note
from gateway.core.relocation import Prompt, SystemText, size
from gateway.core.shaping import LEAST_BYTES, SHAPED, Shaper

_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_NOTE = msgspec.json.Decoder(tuple[bool, list[tuple[int, str]]])
_WHOLE_BYTES = 16
_TOOL_BYTES = 8
#: More tools than this are a list whose order is learned in each process alone.
TOOLS_MAX = 1_000
#: So many requests of a run ask what others know of its volatile lines; then this process has seen enough of them itself.
_ASKED_STEPS = 3


class Unknown(msgspec.Struct, frozen=True):
    """What this process has not seen of a run before this request. Names are hashes, the same in all processes."""

    run: bytes  # whose tools these are
    tools: bytes = b""  # digest of the set of tools; b"" if they are known, or there are none
    order: bytes = b""  # of these tools
    #: the system prompt without what may change; b"" if no lines may move, or all is known of them
    prompt: bytes = b""
    thread: bytes = b""  # requests of the run that have this prompt
    lines: tuple[tuple[int, int, bytes], ...] = ()  # number, size and wording of each line that may move


class Known(msgspec.Struct, frozen=True):
    """What others know of it."""

    order: bytes = b""  # in which the tools came first; b"" if nobody has told another one
    #: of each line that may move: number, wording of this run, whether that stands at the end of its text
    lines: tuple[tuple[int, bytes, bool], ...] = ()
    notes: tuple[tuple[bytes, bytes], ...] = ()  # `ToldNote.link` and `.text`


class ToldNote(msgspec.Struct, frozen=True):
    """A note of a run, for the others."""

    thread: bytes  # as in `Unknown`
    link: bytes
    text: bytes


def told_note(scope: Scope, opened: bytes, link: int, note: Note) -> ToldNote:
    return ToldNote(_name(scope, opened), b"%x" % link, msgspec.json.encode(_words(note)))


def _words(note: Note) -> tuple[bool, list[tuple[int, str]]]:
    return note.turn, [(i, line.decode()) for i, line in note.lines]


def order_of(tools: bytes) -> bytes:
    """A digest of the whole list and one of each tool; b"" if it cannot be told."""
    found = _items(tools)
    if not found or len(found) > TOOLS_MAX:
        return b""
    return xxhash.xxh3_128_digest(tools) + b"".join(
        xxhash.xxh3_64_digest(tools[start:end]) for start, end in found
    )


def in_order(tools: bytes, order: bytes) -> bytes | None:
    """The bytes of `tools` in the order that `order_of` told of another list; None if they do not become that list."""
    whole, rest = order[:_WHOLE_BYTES], order[_WHOLE_BYTES:]
    places = _items(tools)
    if not places or len(rest) != _TOOL_BYTES * len(places):
        return None
    by_digest: dict[bytes, list[bytes]] = {}
    for start, end in places:
        by_digest.setdefault(xxhash.xxh3_64_digest(tools[start:end]), []).append(tools[start:end])
    made, at = [], 0
    for number, (start, end) in enumerate(places):
        wanted = by_digest.get(rest[number * _TOOL_BYTES : (number + 1) * _TOOL_BYTES])
        if not wanted:
            return None
        made += [tools[at:start], wanted.pop()]
        at = end
    found = b"".join((*made, tools[at:]))
    return found if xxhash.xxh3_128_digest(found) == whole else None


def _items(raw: bytes) -> list[tuple[int, int]]:
    """Where each element of a JSON array stands; [] if it is none."""
    found, at = [], 0
    try:
        for item in _ITEMS.decode(raw):
            text = bytes(item)
            at = raw.index(text, at)
            found.append((at, at + len(text)))
            at += len(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return []
    return found


def unknown(
    shaper: Shaper, scope: Scope, operation: Operation, facts: Facts, body: bytes, *, tools: bool, lines: bool
) -> Unknown | None:
    """What another process may have learned of the run of this request, and this one cannot know yet."""
    shaper.moves.shared = True
    if operation not in SHAPED or len(body) < LEAST_BYTES or not len(facts.segments):
        return None
    opened, system = shaper.opened(operation, facts, body, lines)
    segment = facts.segments[0]
    named = bool(scope[-1])
    home = shaper.lineages.peek(scope, b"" if named else opened)
    digest = shaper.tools.digest(segment) if tools and segment.kind == "tools" else b""
    if home is not None and digest in home.tools:
        digest = b""
    run = shaper.lineages.peek(scope, opened)
    if (
        system is not None
        and run is not None
        and run.steps >= _ASKED_STEPS
        and not _longer(system, run.places.lines)
        and not _skipped(run, facts)
    ):
        system = None
    if not digest and system is None:
        return None
    return Unknown(
        _name(scope, b"" if named else opened),
        digest,
        order_of(segment.raw.tobytes()) if digest else b"",
        _name(scope[:-1], system.template) if system is not None else b"",
        _name(scope, opened) if system is not None else b"",
        _lines(system) if system is not None else (),
    )


def take_over(
    shaper: Shaper,
    scope: Scope,
    operation: Operation,
    facts: Facts,
    body: bytes,
    known: Known,
) -> None:
    """Go on from what another process has learned."""
    opened, system = shaper.opened(operation, facts, body, bool(known.lines))
    if known.order:
        first = in_order(facts.segments[0].raw.tobytes(), known.order)
        if first is not None:
            shaper.tools.adopt(shaper.lineages.at(scope, b"" if scope[-1] else opened).tools, first)
    if system is not None:
        _take_lines(shaper.lineages.at(scope, opened), shaper.moves.prompt(scope, system), system, known)


def _take_lines(run: Lineage, prompt: Prompt, system: SystemText, known: Known) -> None:
    places, notes = run.places, run.notes
    for i, line, at_the_end in known.lines:
        if i not in system.candidates:
            continue
        if places.lines.get(i, line) != line:
            notes.clear()
        places.lines[i] = line
        if at_the_end:
            prompt.volatile.add(i)
            places.ends.add(i)
        else:
            places.ends.discard(i)
            prompt.stands((i, line))
    for link, text in known.notes:
        turn, lines = _NOTE.decode(text)
        told = tuple((i, line.encode()) for i, line in lines if i in system.candidates)
        if int(link, 16) not in notes.known and told:
            notes.put(int(link, 16), Note(told, turn))


def _name(scope: Scope, opening: bytes) -> bytes:
    return xxhash.xxh3_128_digest("\0".join(scope).encode() + b"\0" + opening)


def _lines(text: SystemText) -> tuple[tuple[int, int, bytes], ...]:
    return tuple((i, size(text.lines[i]), text.lines[i]) for i in text.candidates)


def _skipped(run: Lineage, facts: Facts) -> bool:
    """Other processes have served steps of this run since this one did."""
    if run.outline is None:
        return True
    segments, answers, speaks = facts.segments, 0, False
    for i in range(run.notes.added(segments, run.outline.head + 1), len(segments)):
        spoke, speaks = speaks, blocks.read_message(segments[i].raw.tobytes()).assistant
        answers += speaks and not spoke
    return answers > 1


def _longer(text: SystemText, places: Mapping[int, bytes]) -> bool:
    """A line has come in a wording that takes the place of the one that stands there."""
    for i in text.candidates:
        line, stands = text.lines[i], places.get(i)
        if stands is not None and stands != line and size(line) > size(stands):
            return True
    return False
