"""Changing declared values inside JSON text; every other byte stays as it is, and nothing large is copied."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from gateway.core.catalog import Operation
from gateway.core.dialects import anthropic_messages, openai_chat, openai_responses
from gateway.core.dialects.facts import Edits, Facts, Splice
from gateway.core.dialects.json_slices import DuplicateMember, members

#: operation -> members that bound the output; the first is what is inserted when none is there
_BOUNDS = {
    Operation.CHAT: openai_chat.BOUNDS,
    Operation.RESPONSES: openai_responses.BOUNDS,
    Operation.MESSAGES: anthropic_messages.BOUNDS,
}
_DICT = msgspec.json.Decoder(dict[str, Raw])


def render(facts: Facts, body: bytes, edits: Edits) -> tuple[bytes | memoryview, ...]:
    """`body` with `edits`, in pieces to be written in order; `(body,)` when nothing changes.

    Each edit replaces the member's value, or inserts the member right after the value of "model".
    """
    splices: list[Splice] = [*edits.splices]
    inserts = edits.members
    spans = facts.spans.members
    if edits.model is not None and edits.model != facts.model:
        splices.append((*spans["model"], msgspec.json.encode(edits.model)))
    if edits.include_usage and not facts.include_usage and facts.stream and facts.operation is Operation.CHAT:
        added = _ask_usage(facts, body, splices)
        inserts += added
    if edits.max_output_tokens is not None and facts.operation in _BOUNDS:
        inserts += _bound(facts, body, edits.max_output_tokens, splices)
    if inserts:
        after = spans["model"][1]
        splices.append((after, after, inserts))
    if not splices:
        return (body,)
    view, at = memoryview(body), 0
    pieces: list[bytes | memoryview] = []
    for start, end, text in sorted(splices):
        pieces += (view[at:start], text)
        at = end
    pieces.append(view[at:])
    return tuple(pieces)


def _ask_usage(facts: Facts, body: bytes, splices: list[Splice]) -> bytes:
    """Add the splice that asks for usage, or return the member to insert."""
    options = facts.spans.members.get("stream_options")
    if options is None:
        return b',"stream_options":{"include_usage":true}'
    start, end = options
    if facts.spans.include_usage is not None:
        splices.append((*facts.spans.include_usage, b"true"))
    elif body[start:end] == b"null":
        splices.append((start, end, b'{"include_usage":true}'))
    else:
        comma = b"" if body[start + 1 : end - 1].strip() == b"" else b","
        splices.append((start + 1, start + 1, b'"include_usage":true' + comma))
    return b""


def _bound(facts: Facts, body: bytes, bound: int, splices: list[Splice]) -> bytes:
    """Add the splices that set the output bound, or return the member to insert."""
    names = _BOUNDS[facts.operation]
    text = b"%d" % bound
    present = [facts.spans.members[n] for n in names if n in facts.spans.members]
    named = [s for s in present if body[s[0] : s[1]] != b"null"]
    if named:
        # A value that is already the bound keeps its spelling.
        splices += [(*s, text) for s in named if int(body[s[0] : s[1]]) != bound]
        return b""
    first = facts.spans.members.get(names[0])
    if first is not None:
        splices.append((*first, text))
        return b""
    return b',"%b":%b' % (names[0].encode(), text)


class _WithUsage(msgspec.Struct, gc=False):
    usage: msgspec.Raw = msgspec.Raw()


_WITH_USAGE = msgspec.json.Decoder(_WithUsage)


def _usage_span(text: bytes) -> tuple[int, int] | None:
    """Where the usage object stands, found without walking; None if that is not certain, or it has a cost.

    A JSON object's bytes cannot stand inside of a string (its quotes would be escaped), so if they occur once it
    is there.
    """
    try:
        usage = bytes(_WITH_USAGE.decode(text).usage)
    except (msgspec.MsgspecError, ValueError):
        return None
    if not usage.startswith(b"{") or b":" not in usage or b'"cost"' in usage:
        return None
    at = text.rfind(usage)
    return (at, at + len(usage)) if at >= 0 and text.find(usage) == at else None


def insert_cost(text: bytes, path: tuple[str, ...], cost: str) -> bytes:
    """`text` with `"cost":<cost>` in the object at `path`, replacing a cost that is there.

    `text` is returned as it is if it has no object there. `cost` is a JSON number.
    """
    quick = _usage_span(text) if path == ("usage",) else None
    if quick is not None:
        return b"".join((text[: quick[1] - 1], b',"cost":', cost.encode(), text[quick[1] - 1 :]))
    start, end = 0, len(text)
    try:
        for name in path:
            part = text[start:end]
            span = members(part, None).get(name)
            if span is None:
                return text
            start, end = start + span[0], start + span[1]
            if text[start : start + 1] != b"{":
                return text
        there = members(text[start:end], None).get("cost")
    except (DuplicateMember, ValueError, msgspec.MsgspecError):
        return text
    if there is not None:
        return b"".join((text[: start + there[0]], cost.encode(), text[start + there[1] :]))
    comma = b"" if text[start + 1 : end - 1].strip() == b"" else b","
    return b"".join((text[: end - 1], comma, b'"cost":', cost.encode(), text[end - 1 :]))
