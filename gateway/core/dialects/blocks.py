"""What a marker planner must know of messages: roles, content blocks, markers of the client, and where a mark can go.

Everything about one message is remembered by the hash of its bytes: an agent sends its whole history with every step.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.core.catalog import Operation
from gateway.core.dialects.facts import Segment, Segments, Splice
from gateway.core.dialects.json_slices import DuplicateMember, Span, members
from gateway.core.generations import Generations

_ASSISTANT_ITEMS = ("reasoning", "function_call", "custom_tool_call", "web_search_call", "file_search_call")
#: Block types that take a marker (Anthropic and OpenAI, November 2026); whatever else there is, is left alone.
_MARKABLE = frozenset(
    {
        "text",
        "input_text",
        "image",
        "image_url",
        "input_image",
        "document",
        "input_file",
        "file",
        "tool_result",
    }
)
_LISTED_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_LONG = re.compile(rb'"ttl"\s*:\s*"(?:1h|12h)"')
_MEMBERS = (b'"cache_control"', b'"prompt_cache_breakpoint"')
_SPACE = b" \t\n\r"
_SYSTEM_ROLES = ("system", "developer")


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message, or one item of a responses input.

    `blocks`: content blocks as caches count them, tool calls and reasoning included; never too few. `markers`: the
    client's own, by their names, so never too few.
    """

    role: str  # "" = unknown
    blocks: int
    markers: int = 0
    long: bool = False  # one of its markers asks for an hour or more

    @property
    def assistant(self) -> bool:
        return self.role == "assistant"

    @property
    def system(self) -> bool:
        return self.role in _SYSTEM_ROLES


class _Message(msgspec.Struct, gc=False):
    role: Any = None
    type: Any = None
    content: Raw | UnsetType = UNSET
    tool_calls: list[Raw] | None = None
    reasoning_content: Any = None


class _Block(msgspec.Struct, gc=False):
    type: Any = None
    text: Raw | UnsetType = UNSET


_MESSAGE = msgspec.json.Decoder(_Message)
_ITEMS = msgspec.json.Decoder(list[Raw])
_BLOCK = msgspec.json.Decoder(_Block)


class Messages:
    """`Message` by the key of its segment."""

    def __init__(self, capacity: int = 32_768) -> None:
        self._memory: Generations[int, Message] = Generations(capacity)

    def of(self, segment: Segment) -> Message:
        if not segment.key:
            return read_message(segment.raw.tobytes())
        found = self._memory.get(segment.key)
        if found is None:
            found = read_message(segment.raw.tobytes())
            self._memory.put(segment.key, found)
        return found


def client_markers(raw: bytes) -> int:
    """Members of a marker's name: inside of JSON strings their quotes are escaped. Arguments of a tool that are called
    so count too, which only makes the planner add fewer."""
    return sum(raw.count(name) for name in _MEMBERS)


def asks_long(raw: bytes) -> bool:
    return _LONG.search(raw) is not None


def read_message(raw: bytes) -> Message:
    """Never raises: what has no shape that is known here has role "" and is left alone."""
    markers = client_markers(raw)
    long = markers > 0 and asks_long(raw)
    try:
        found = _MESSAGE.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Message("", 1, markers, long)
    blocks = len(found.tool_calls or ()) + isinstance(found.reasoning_content, str)
    content = found.content
    if content is not UNSET:
        head = bytes(memoryview(content)[:1])
        blocks += len(_ITEMS.decode(content)) if head == b"[" else head == b'"'
    role = found.role if isinstance(found.role, str) else ""
    if found.role is None and isinstance(found.type, str):  # an item of a responses input
        role = (
            "assistant"
            if found.type in _ASSISTANT_ITEMS
            else "tool"
            if found.type.endswith("_output")
            else ""
        )
    return Message(role, max(1, blocks), markers, long)


# --- where a mark goes ----------------------------------------------------------------------------------


def marker_text(marker: str, life: str = "") -> bytes:
    """The member that marks a block. `life` names a TTL other than the default one (cache_control only)."""
    if marker == "prompt_cache_breakpoint":
        return b',"prompt_cache_breakpoint":{"mode":"explicit"}'
    if not life:
        return b',"cache_control":{"type":"ephemeral"}'
    return b',"cache_control":{"type":"ephemeral","ttl":"%b"}' % life.encode()


def mark_message(raw: bytes, operation: Operation, text: bytes) -> tuple[Splice, ...]:
    """Splices, relative to `raw`, that put `text` on the last block of a message that can carry it; () if none can."""
    content = content_of(raw)
    if content is None and operation is Operation.RESPONSES:
        content = _output_of(raw)
    return () if content is None else mark_content(raw, content, operation, text)


def _output_of(raw: bytes) -> Span | None:
    """Where the result of a tool is, in an item that may say it as a list of blocks (openai 2.54.0,
    ResponseInputTextContent: such a block takes a breakpoint)."""
    try:
        return members(raw).get("output") if _MESSAGE.decode(raw).type in _LISTED_OUTPUTS else None
    except (msgspec.MsgspecError, DuplicateMember, ValueError):
        return None


def mark_content(raw: bytes, content: Span, operation: Operation, text: bytes) -> tuple[Splice, ...]:
    """The same for a content (or a system prompt) at `content`: a string becomes a list of one block of text."""
    start, end = content
    first = raw[start : start + 1]
    if first == b'"':
        if end - start <= 2:
            return ()  # providers refuse a marker on an empty block
        kind = b"input_text" if operation is Operation.RESPONSES else b"text"
        return ((start, start, b'[{"type":"%b","text":' % kind), (end, end, text + b"}]"))
    if first != b"[":
        return ()
    blocks = _ITEMS.decode(raw[start:end])
    # Only the last block: a mark further up would leave out what the client wrote behind it.
    if not blocks or not _takes_marker(bytes(blocks[-1])):
        return ()
    at = raw.rfind(b"}", start, end)
    return ((at, at, text),)


def mark_tools(raw: bytes, text: bytes) -> tuple[Splice, ...]:
    """A mark on the last tool: it stands for all of them."""
    at = raw.rfind(b"}")
    if at < 0 or raw[:at].rstrip(_SPACE).endswith(b"{"):
        return ()
    return ((at, at, text),)


def _takes_marker(block: bytes) -> bool:
    if not block.startswith(b"{"):
        return False
    try:
        found = _BLOCK.decode(block)
    except msgspec.MsgspecError:
        return False
    if found.type not in _MARKABLE or any(name in block for name in _MEMBERS):
        return False
    return found.text is UNSET or len(bytes(found.text)) > 2


# --- offsets --------------------------------------------------------------------------------------------


def offset_of(body: bytes, inside: Span, segments: Segments, index: int, first: int) -> int | None:
    """Where segment `index` begins; `inside` is the list that holds the segments from `first` on.

    Known for long bodies; else it walks from the nearer end of the list. None if the bytes are not where they must be.
    """
    if segments.offsets is not None:
        return segments.offsets.starts[index - first]
    if index - first < len(segments) - index:
        at = _skip(body, inside[0] + 1)
        for i in range(first, index):
            at = _skip(body, at + len(segments[i].raw))
            if body[at : at + 1] != b",":
                return None
            at = _skip(body, at + 1)
    else:
        at = inside[1] - 1
        for i in range(len(segments) - 1, index - 1, -1):
            while body[at - 1] in _SPACE:
                at -= 1
            at -= len(segments[i].raw)
            if i > index:
                while body[at - 1] in b", \t\n\r":
                    at -= 1
    return at if body.startswith(segments[index].raw, at) else None


def _skip(body: bytes, at: int) -> int:
    while body[at : at + 1] in (b" ", b"\t", b"\n", b"\r"):
        at += 1
    return at


def first_line_block(raw: bytes, start: bytes) -> Span | None:
    """The span of the first block of a list, with what is between it and the second one, if it is one line of text
    that begins with `start` and carries no marker; None if it is not, or the only one."""
    if not raw.startswith(b"["):
        return None
    items = _ITEMS.decode(raw)
    if len(items) < 2:
        return None
    first = bytes(items[0])
    try:
        block = msgspec.json.decode(first, type=dict[str, Any])
    except msgspec.MsgspecError:
        return None
    text = block.get("text")
    if block.keys() != {"type", "text"} or block["type"] != "text" or not isinstance(text, str):
        return None
    if not text.startswith(start.decode()) or "\n" in text.strip():
        return None
    at = raw.index(first)
    following = raw.index(bytes(items[1]), at + len(first))
    return at, following


# --- inside of a message --------------------------------------------------------------------------------


def content_of(raw: bytes) -> Span | None:
    """Where a message's content is."""
    try:
        return members(raw).get("content")
    except (DuplicateMember, ValueError):
        return None


def items_of(raw: bytes, span: Span) -> list[tuple[int, bytes]]:
    """The elements of the list at `span`, each with its offset."""
    found = []
    at = span[0] + 1
    for item in _ITEMS.decode(raw[span[0] : span[1]]):
        block = bytes(item)
        at = raw.index(block, at)
        found.append((at, block))
        at += len(block)
    return found


def text_of_block(block: bytes) -> Span | None:
    """Where the text of a block of text is, quotes included; None if it is no such block."""
    if not block.startswith(b"{"):
        return None
    try:
        kind = _BLOCK.decode(block).type
        span = members(block).get("text")
    except (msgspec.MsgspecError, DuplicateMember, ValueError):
        return None
    return span if kind in ("text", "input_text") and span and block[span[0] : span[0] + 1] == b'"' else None
