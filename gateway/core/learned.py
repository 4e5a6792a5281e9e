"""What one process has learned of a run, in a form that another can use.

The first-seen order of a list of tools is told by a hash for each tool: another process that gets the same tools in
another order puts its own bytes into that order, and sends them only if they are then, byte for byte, what was sent first.
Of lines that may move their wording is told, for what stands in their place has to be the same wherever a step lands.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import xxhash

from gateway.core.catalog import Operation
from gateway.core.dialects.facts import Facts
from gateway.core.lineages import Scope
from gateway.core.relocation import Places, SystemText, size
from gateway.core.shaping import LEAST_BYTES, SHAPED, Shaper

_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
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
    prompt: bytes = (
        b""  # the system prompt without what may change; b"" if no lines may move, or all is known of them
    )
    thread: bytes = b""  # requests of the run that have this prompt
    lines: tuple[tuple[int, int, bytes], ...] = ()  # number, size and wording of each line that may move


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
        and not _longer(system, run.lines)
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
    order: bytes,
    lines: Sequence[tuple[int, bytes | None]],
) -> None:
    """Go on from what another process has learned: the order of the tools, and what stands in the place of each line
    that may move, by number; None = it is left out."""
    opened, system = shaper.opened(operation, facts, body, bool(lines))
    if order:
        first = in_order(facts.segments[0].raw.tobytes(), order)
        if first is not None:
            shaper.tools.adopt(shaper.lineages.at(scope, b"" if scope[-1] else opened).tools, first)
    if system is not None:
        known = shaper.volatile.setdefault((scope[:-1], system.template), set())
        places = shaper.lineages.at(scope, opened).lines
        for i, stands in lines:
            if i not in system.candidates:
                continue
            if stands is None:
                known.add(i)
            else:
                places[i] = stands


def _name(scope: Scope, opening: bytes) -> bytes:
    return xxhash.xxh3_128_digest("\0".join(scope).encode() + b"\0" + opening)


def _lines(text: SystemText) -> tuple[tuple[int, int, bytes], ...]:
    return tuple((i, size(text.lines[i]), text.lines[i]) for i in text.candidates)


def _longer(text: SystemText, places: Places) -> bool:
    """A line has come in a wording that takes the place of the one that stands there."""
    for i in text.candidates:
        line, stands = text.lines[i], places.get(i)
        if stands is not None and stands != line and size(line) > size(stands):
            return True
    return False
