"""The parts of reading a request that the dialects share: refusals, segments, session hints."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.core.dialects.facts import Segment, Segments
from gateway.core.dialects.json_slices import (
    MAX_DEPTH,
    MAX_NODES,
    Checked,
    DuplicateMember,
    Span,
    check_text,
    decode,
    is_null,
    items,
    members,
    plain_members,
    rest_of,
    too_many_nodes,
)
from gateway.core.dialects.media import suspect
from gateway.core.errors import InvalidRequest

MAX_MESSAGES = 10_000
MAX_TOOLS = 1_000
MAX_N = 8
MAX_DIGITS = 20
MAX_MODEL_CHARS = 256
MAX_HINT_CHARS = 512

#: A caller may not choose where a request goes or with whose credential (SSRF, credential theft).
_FORBIDDEN = frozenset({"api_base", "base_url", "api_key"})
#: Larger bodies are walked: copying them would cost more.
PLAIN_BYTES_MAX = 8 << 10


class Common(msgspec.Struct, gc=False):
    """Members that every dialect reads. Hints are `Any`: whatever is not a string is no hint."""

    model: str | UnsetType = UNSET
    stream: bool | None = None
    service_tier: str | None = None
    metadata: Raw | UnsetType = UNSET
    user: Any = None
    session_id: Any = None
    prompt_cache_key: Any = None


def locate(body: bytes, request: Common) -> dict[str, Span]:
    """Offsets of the top-level values; refuses a repeated member, a forbidden one, and a bad model."""
    try:
        spans = plain_members(body) if len(body) <= PLAIN_BYTES_MAX else None
        if spans is None:
            spans = members(body, request)
    except DuplicateMember as e:
        raise InvalidRequest(f"{e}; each member may be there only once.", param=e.name[:64]) from None
    except UnicodeDecodeError:
        raise InvalidRequest("The request body is not valid UTF-8.") from None
    if not _FORBIDDEN.isdisjoint(spans):
        name = next(filter(spans.__contains__, sorted(_FORBIDDEN)))
        raise InvalidRequest(
            f"'{name}' is not accepted: where a request goes and with which credential is configured at the gateway.",
            param=name,
        )
    model = request.model
    if model is UNSET:
        raise InvalidRequest("'model' is missing.", param="model")
    if not model or len(model) > MAX_MODEL_CHARS or not model.isprintable():
        raise InvalidRequest(
            f"'model' must be a printable name of 1 to {MAX_MODEL_CHARS} characters.", param="model"
        )
    return spans


def bounded(request: object, spans: Mapping[str, Span], names: tuple[str, ...], least: int = 1) -> int | None:
    """The smallest of the members that bound the output, None if all are absent."""
    found: int | None = None
    for name in names:
        value: int | None = getattr(request, name)
        if value is not None:
            start, end = spans[name]
            if value < least or end - start > MAX_DIGITS:
                raise InvalidRequest(
                    f"'{name}' must be an integer of at least {least} and at most {MAX_DIGITS} digits.",
                    param=name,
                )
            found = value if found is None else min(found, value)
    return found


def starts(raw: Raw, character: bytes) -> bool:
    """Whether a value is an object, a list or a string, by its first character."""
    return memoryview(raw)[0] == character[0]


# --- segments ----------------------------------------------------------------------------------------

#: The lowest bits of what is remembered about a slice; the rest counts its nodes (of tools: their number, too).
IMAGE = 1
LONG = 2
MARK_BITS = 2
#: A cache write of an hour (Anthropic) or longer (OpenAI's 12h).
_LONG_WRITE = re.compile(rb'"(?:ttl|prompt_cache_retention|retention)"\s*:\s*"(?:1h|12h|24h)"')


def _long(text: bytes) -> int:
    return LONG if b'h"' in text and _LONG_WRITE.search(text) else 0


def _check_message(text: bytes, where: str) -> int:
    if not text.startswith(b"{"):
        raise InvalidRequest(f"'{where}' must be an object.", param=where)
    count = check_text(text, MAX_DEPTH - 2, where)
    image = suspect(text)
    return count << MARK_BITS | _long(text) | image


def _check_tools(text: bytes, where: str) -> int:
    """Remembers (nodes << 10 | tools), marks below."""
    if not text.startswith(b"["):
        raise InvalidRequest(f"'{where}' must be a list of objects.", param=where)
    tools = items(text, where)
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"'{where}' has {len(tools)} tools; at most {MAX_TOOLS}.", param=where)
    for i, tool in enumerate(tools):
        if not starts(tool, b"{"):
            raise InvalidRequest(f"'{where}[{i}]' must be an object.", param=f"{where}[{i}]")
    return (check_text(text, MAX_DEPTH - 1, where) << 10 | len(tools)) << MARK_BITS | _long(text)


def _check_system(text: bytes, where: str) -> int:
    if text[:1] not in (b'"', b"["):
        raise InvalidRequest(f"'{where}' must be a string or a list.", param=where)
    return check_text(text, MAX_DEPTH - 1, where) << MARK_BITS | _long(text)


_NO_NODES: frozenset[int | None] = frozenset(range(1 << MARK_BITS))
_messages = Checked(_check_message, 32_768)
_tools = Checked(_check_tools, 1_024)
_systems = Checked(_check_system, 4_096)


class Prompt(msgspec.Struct, frozen=True):
    """The cacheable part of a request."""

    segments: Segments
    tool_count: int
    message_count: int
    has_images: bool
    long_cache_write: bool


def prompt(
    body: bytes,
    spans: Mapping[str, Span],
    *,
    tools: Raw | UnsetType,
    system: tuple[str, Raw | UnsetType],
    messages: tuple[str, list[Raw] | str],
) -> Prompt:
    """Check and cut the body; `system` and `messages` come with the names of their members."""
    segments: list[Segment] = []
    covered: list[Span] = []
    tool_count = node_count = marks_seen = 0
    if tools is not UNSET and not is_null(tools):
        view = memoryview(tools)
        (found_mark,), (key,) = _tools((view,), "tools")
        seen = found_mark or 0
        marks_seen |= seen & LONG
        tool_count, node_count = seen >> MARK_BITS & 1023, seen >> MARK_BITS + 10
        segments.append(Segment("tools", view, key))
        covered.append(spans["tools"])
    name, raw = system
    if raw is not UNSET and not is_null(raw):
        view = memoryview(raw)
        (found_mark,), (key,) = _systems((view,), name)
        seen = found_mark or 0
        marks_seen |= seen & LONG
        node_count += seen >> MARK_BITS
        segments.append(Segment("system", view, key))
        covered.append(spans[name])
    name, found = messages
    covered.append(spans[name])
    if isinstance(found, str):
        start, end = spans[name]
        view = memoryview(body)[start:end]
        segments.append(Segment("message", view))
        covered.sort()
        rest = rest_of(body, covered)
        node_count += check_text(rest, MAX_DEPTH, "")
        return Prompt(Segments(segments), tool_count, 1, False, bool((marks_seen | _long(rest)) & LONG))
    if not found:
        raise InvalidRequest(f"'{name}' must not be empty.", param=name)
    if len(found) > MAX_MESSAGES:
        raise InvalidRequest(f"'{name}' has {len(found)} messages; at most {MAX_MESSAGES}.", param=name)
    marks, keys = _messages(found, f"{name}[*]")
    distinct = set(marks)
    if not distinct <= _NO_NODES:
        node_count += sum((mark or 0) >> MARK_BITS for mark in marks)
    for mark in distinct:
        marks_seen |= mark or 0
    covered.sort()
    rest = rest_of(body, covered)
    node_count += check_text(rest, MAX_DEPTH, "")
    if node_count > MAX_NODES:
        raise too_many_nodes()
    return Prompt(
        Segments(segments, found, keys, marks, node_count),
        tool_count,
        len(found),
        bool(marks_seen & IMAGE),
        bool((marks_seen | _long(rest)) & LONG),
    )


# --- session hints -----------------------------------------------------------------------------------


class _Metadata(msgspec.Struct, gc=False):
    user_id: Any = None
    session_id: Any = None
    task_id: Any = None


_METADATA = msgspec.json.Decoder(_Metadata)


def hints(request: Common, *, user_id: bool = False, **more: object) -> dict[str, str]:
    """Named strings that may identify the session; see Facts.session_hints.

    `user_id`: metadata.user_id means a session here (Claude Code puts one there), not a person.
    """
    named: dict[str, object] = {
        "user": request.user,
        "session_id": request.session_id,
        "prompt_cache_key": request.prompt_cache_key,
        **more,
    }
    if request.metadata is not UNSET and starts(request.metadata, b"{"):
        metadata = decode(_METADATA, bytes(request.metadata), "metadata")
        named["user_id"] = metadata.user_id if user_id else None
        named["metadata.session_id"] = metadata.session_id
        named["metadata.task_id"] = metadata.task_id
    return {k: v for k, v in named.items() if isinstance(v, str) and 0 < len(v) <= MAX_HINT_CHARS}
