"""What an agent did last, told by its own messages: tool calls with their results, turn by turn, as hashes.

A request carries the whole history of its run, so signs of a run in circles can be read from the end of it, for
any client and on any replica. A turn is one answer of the model with the results of its calls. Two turns have the
same `sign` if they made the same calls (name and arguments) with the same results:
- arguments are compared as JSON values, so their formatting and order do not matter; a `description` beside a
  shell command is a comment of the model's, written anew each time (Claude Code, Copilot CLI: captured 2026-11);
- results are compared without what differs by itself, such as times of day (`steady`).
Nothing decoded is kept; what a message says is remembered by the hash of its bytes, since every step sends it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import xxhash
from msgspec import UNSET, Raw, UnsetType

from gateway.core.catalog import Operation
from gateway.core.dialects.facts import Segment, Segments
from gateway.core.generations import Generations
from gateway.core.steady import looks_failed, steady

#: Turns that a tail has at most, and how far back they are looked for.
TURNS_MAX = 8
_MESSAGES_MAX = 64
#: Segments that are no messages, tools and system, stand in front.
_HEAD = 2
#: Messages that a step may add to the one before and is still known to go on with it.
_STEPS_BACK = 16
_BYTES_MAX = 256 << 10  # with two whole turns at least, without which no repetition can be told
#: A message above this is not decoded; it counts as something said, which ends every repetition.
_MESSAGE_BYTES_MAX = 1 << 20
_ARGUMENT_BYTES_MAX = 32 << 10
_TOOL_CHARS_MAX = 64


class Call(msgspec.Struct, frozen=True, gc=False):
    """One tool call and what came of it. `arguments` and `result` are hashes; `result` is b"" if there is none."""

    tool: str
    arguments: bytes
    result: bytes
    failed: bool


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One answer of the model. Identical calls within it count once."""

    mark: bytes  # which turn this is: ids, names and arguments of its calls, else its text
    sign: bytes  # what it did and what came of it
    prompted: bytes  # hash of what was said to the model before it; b"" = nothing, or it opens the history
    calls: tuple[Call, ...]  # () = the model only spoke
    failed: bool  # it made calls, and none of them worked

    @property
    def tools(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(call.tool for call in self.calls))


class Tail(msgspec.Struct, frozen=True, gc=False):
    """The last turns of a request, oldest first, and the hash of what was said after them (b"" = nothing)."""

    turns: tuple[Turn, ...] = ()
    pending: bytes = b""


def tail(operation: Operation, segments: Sequence[Segment], links: Sequence[bytes] = ()) -> Tail:
    """The last `TURNS_MAX` turns of a request. Never raises: what has no known form is something said.

    With `links`, the request's prefix chain or the beginning of it, what a former request of the run has shown is not
    read again: only what was added to it is.
    """
    read = _READERS.get(operation)
    if read is None:
        return Tail()
    keys = segments.keys if isinstance(segments, Segments) else [segment.key for segment in segments]
    end = len(keys)
    kept = min(len(links), end)
    at, past = _known(read, keys, links, kept) or _from_the_end(read, segments, keys)
    if at == end:
        return _told_of(past)
    for i in range(at, end):
        if i == kept > at:
            read.keep(links[i - 1], keys[i - 1], past)
        past = _and(past, read.known(keys[i]) or read(segments[i]))
    if kept == end:
        read.keep(links[end - 1], keys[end - 1], past)
    return _told_of(past)


def _known(read: _Reader, keys: Sequence[int], links: Sequence[bytes], end: int) -> tuple[int, _Past] | None:
    """The longest beginning of a request that a former one has shown."""
    for at in range(end, max(0, end - _STEPS_BACK), -1):
        past = read.past(links[at - 1], keys[at - 1])
        if past is not None:
            return at, past
    return None


def _from_the_end(read: _Reader, segments: Sequence[Segment], keys: Sequence[int]) -> tuple[int, _Past]:
    """(where to begin to read, what stands before it): as far back as `TURNS_MAX` turns and the other bounds go."""
    taken = starts = size = 0
    later = _SILENT
    at = len(segments)
    first = sum(segment.kind != "message" for segment in segments[:_HEAD])
    while at > first:
        # By its key alone: a fork or a retry has all but its last few messages from another request.
        piece = read.known(keys[at - 1]) or read(segments[at - 1])
        size += piece.size
        whole = not (taken == _MESSAGES_MAX or (size > _BYTES_MAX and starts > 2))
        if whole and not piece.silent and later.speaks and not _same_turn(piece, later):
            starts += 1
            whole = starts <= TURNS_MAX
        if not whole:
            # What came before the first piece is not known; unless that ends a turn, neither is the whole of the
            # first one.
            ends = bool(later.results) and not later.speaks
            return at, _Past(cut=not ends, opened=True)
        at -= 1
        if not piece.silent:
            taken += 1
            later = piece
    return first, _BEGINNING


class _Past(msgspec.Struct, frozen=True):
    """A history as far as it was read: its last whole turns, and the one that may still go on."""

    turns: tuple[Turn, ...] = ()
    before: bytes = b""  # what was said before the last turn
    last: tuple[_Piece, ...] = ()  # the last turn; () = there was none
    said: bytes = b""  # since then
    closed: bool = True  # another answer of the model is another turn,
    calls: bool = False  # unless neither made a call
    opened: bool = False  # a turn was seen, or may have come before all that was
    cut: bool = False  # the first turn to come is not seen whole


_BEGINNING = _Past()


def _and(past: _Past, piece: _Piece) -> _Past:
    """After one more message."""
    turns, before, last, said, closed, calls, opened, cut = (
        *(past.turns, past.before, past.last, past.said),
        *(past.closed, past.calls, past.opened, past.cut),
    )
    if piece.speaks:
        if closed or not (calls or piece.calls):
            if last:
                turns, cut = (turns, False) if cut else ((*turns, _turn(before, last))[-TURNS_MAX:], False)
            # Before the first turn stands the task, or after a compaction its summary: nobody interrupted.
            before, last, calls = said if opened else b"", (), False
            said, opened = b"", True
        return _Past(
            turns, before, (*last, piece), said, bool(piece.results), calls or bool(piece.calls), opened, cut
        )
    if piece.results:
        return _Past(turns, before, (*last, piece) if last else (), said, True, calls, opened, cut)
    if piece.silent:
        return past
    return _Past(
        turns, before, last, _hash(said + piece.said) if said else piece.said, True, calls, opened, cut
    )


def _told_of(past: _Past) -> Tail:
    """A last answer without results is one that the model is to go on with."""
    if not past.last or not past.closed or past.cut:
        return Tail(past.turns, past.said)
    return Tail((*past.turns, _turn(past.before, past.last))[-TURNS_MAX:], past.said)


class _Piece(msgspec.Struct, frozen=True, gc=False):
    """What one message contributes."""

    key: int = 0  # the hash of its bytes
    calls: tuple[tuple[str, str, bytes], ...] = ()  # (id, tool, arguments)
    results: tuple[tuple[str, tuple[bytes, bool]], ...] = ()  # (id of the call, (result, failed))
    text: bytes = b""  # of the model
    said: bytes = b""  # to the model
    speaks: bool = False  # the model, by calls or text
    silent: bool = True
    size: int = 0  # bytes of the message


_SILENT = _Piece()


def _piece(
    key: int,
    calls: Sequence[tuple[str, str, bytes]] = (),
    results: Sequence[tuple[str, tuple[bytes, bool]]] = (),
    text: bytes = b"",
    said: bytes = b"",
) -> _Piece:
    speaks = bool(calls or text)
    return _Piece(key, tuple(calls), tuple(results), text, said, speaks, not (speaks or results or said))


def _same_turn(piece: _Piece, later: _Piece) -> bool:
    """Some clients split an answer over messages, the responses dialect always does."""
    return piece.speaks and not piece.results and bool(piece.calls or later.calls)


def _turn(prompted: bytes, pieces: Sequence[_Piece]) -> Turn:
    key: tuple[bytes | int, ...] = (prompted, *[piece.key for piece in pieces])
    turn = _turns.get(key)
    if turn is None:
        turn = _made(prompted, pieces)
        _turns.put(key, turn)
    return turn


def _made(prompted: bytes, pieces: Sequence[_Piece]) -> Turn:
    results = dict(pair for piece in pieces for pair in piece.results)
    found: dict[bytes, Call] = {}
    marks = []
    for call_id, tool, arguments in (call for piece in pieces for call in piece.calls):
        result, failed = results.get(call_id, (b"", False))
        name = tool.encode("utf-8", "replace")
        marks.append(b"\0".join((call_id.encode("utf-8", "replace"), name, arguments)))
        found[b"\0".join((name, arguments, result))] = Call(tool, arguments, result, failed)
    if not found:
        text = next(piece.text for piece in pieces)
        return Turn(text, text, prompted, (), False)
    sign = _hash(b"\1".join(sorted(found)))
    failed = all(call.failed for call in found.values())
    return Turn(_hash(b"\1".join(marks)), sign, prompted, tuple(found.values()), failed)


# --- messages of the three dialects -------------------------------------------------------------------


class _Part(msgspec.Struct, gc=False):
    text: Raw | UnsetType = UNSET


class _Function(msgspec.Struct, gc=False):
    name: str = ""
    arguments: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET


class _ChatCall(msgspec.Struct, gc=False):
    id: str | None = None
    function: _Function | None = None
    custom: _Function | None = None


class _ChatMessage(msgspec.Struct, gc=False):
    role: str = ""
    content: Raw | UnsetType = UNSET
    tool_calls: list[_ChatCall] | None = None
    tool_call_id: str | None = None
    function_call: _Function | None = None  # before tools; its result names the function
    name: str | None = None


class _Block(msgspec.Struct, gc=False):
    type: str = ""
    text: Raw | UnsetType = UNSET
    id: str | None = None
    name: str = ""
    input: Raw | UnsetType = UNSET
    tool_use_id: str | None = None
    content: Raw | UnsetType = UNSET
    is_error: bool | None = None


class _Message(msgspec.Struct, gc=False):
    role: str = ""
    content: Raw | UnsetType = UNSET


class _Item(msgspec.Struct, gc=False):
    type: str = "message"
    role: str = ""
    content: Raw | UnsetType = UNSET
    id: str | None = None
    call_id: str | None = None
    name: str = ""
    arguments: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    action: Raw | UnsetType = UNSET
    operation: Raw | UnsetType = UNSET
    output: Raw | UnsetType = UNSET
    status: str | None = None


_PARTS = msgspec.json.Decoder(list[_Part])
_CHAT = msgspec.json.Decoder(_ChatMessage)
_MESSAGE = msgspec.json.Decoder(_Message)
_BLOCKS = msgspec.json.Decoder(list[_Block])
_ITEM = msgspec.json.Decoder(_Item)
_ANY = msgspec.json.Decoder()
_TEXT = msgspec.json.Decoder(str)
_CANONICAL = msgspec.json.Encoder(order="deterministic")


def _chat(key: int, raw: bytes) -> _Piece:
    message = _CHAT.decode(raw)
    match message.role:
        case "assistant":
            calls = [
                _call(call.id, named.name, named.input if named.arguments is UNSET else named.arguments)
                for call in message.tool_calls or ()
                if (named := call.function or call.custom) is not None
            ]
            if (old := message.function_call) is not None:
                calls.append(_call(old.name, old.name, old.arguments))
            return _piece(key, calls, text=_told(_text(message.content)))
        case "tool" | "function":
            call_id = message.tool_call_id or message.name
            return _piece(key, results=[_result(call_id, message.content)])
        case "user":
            return _piece(key, said=_told(_text(message.content)))
    return _SILENT  # system and developer


def _messages(key: int, raw: bytes) -> _Piece:
    message = _MESSAGE.decode(raw)
    if message.role not in ("assistant", "user"):
        return _SILENT
    model = message.role == "assistant"
    if message.content is UNSET or not bytes(message.content).startswith(b"["):
        text = _told(_text(message.content))
        return _piece(key, text=text) if model else _piece(key, said=text)
    blocks = _BLOCKS.decode(message.content)
    results = [
        _result(b.tool_use_id, b.content, b.is_error) for b in blocks if b.type.endswith("tool_result")
    ]
    text = _told(b"\n".join(_inside(b.text) for b in blocks if b.text is not UNSET))
    if model:
        calls = [_call(b.id, b.name, b.input) for b in blocks if b.type.endswith("tool_use")]
        return _piece(key, calls, results, text)
    # Text beside results is mostly the client's own reminder (Claude Code), new with each step.
    return _piece(key, results=results, said=b"" if results else text or _hash(raw))


def _responses(key: int, raw: bytes) -> _Piece:
    item = _ITEM.decode(raw)
    call_id = item.call_id or item.id
    failed = True if item.status == "failed" else None
    if item.type == "message":
        if item.role == "assistant":
            return _piece(key, text=_told(_text(item.content)))
        return _piece(key, said=_told(_text(item.content))) if item.role == "user" else _SILENT
    if item.type.endswith("_output"):
        return _piece(key, results=[_result(call_id, item.output, failed)])
    if not item.type.endswith("_call"):
        return _SILENT  # reasoning, compaction markers
    given = (item.arguments, item.input, item.action, item.operation)
    call = _call(call_id, item.name or item.type, next((a for a in given if a is not UNSET), UNSET))
    if item.output is UNSET and item.call_id is not None:
        return _piece(key, [call])  # its output is an item of its own
    # Calls that the provider ran itself carry their result.
    return _piece(key, [call], [_result(call_id, item.output, failed)])


def _call(call_id: str | None, tool: str, given: Raw | UnsetType) -> tuple[str, str, bytes]:
    return call_id or "", tool[:_TOOL_CHARS_MAX], _arguments(given)


def _result(
    call_id: str | None, content: Raw | UnsetType, is_error: bool | None = None
) -> tuple[str, tuple[bytes, bool]]:
    text = _text(content)
    failed = looks_failed(text) if is_error is None else is_error
    return call_id or "", (_hash(steady(text, failed)), failed)


def _told(text: bytes) -> bytes:
    return _hash(steady(text)) if text else b""


def _text(content: Raw | UnsetType) -> bytes:
    """The text of a content, as escaped in JSON; a content with other things than text as it stands."""
    if content is UNSET:
        return b""
    raw = bytes(content)
    if raw.startswith(b"["):
        parts = [part.text for part in _PARTS.decode(raw)]
        texts = [_inside(text) for text in parts if text is not UNSET]
        return b"\n".join(texts) if len(texts) == len(parts) else raw
    return _inside(content)


def _inside(value: Raw) -> bytes:
    raw = bytes(value)
    if raw.startswith(b'"'):
        return raw[1:-1]
    return b"" if raw == b"null" else raw


def _arguments(given: Raw | UnsetType) -> bytes:
    """The hash of a call's arguments: an object, or a string that is mostly JSON itself."""
    raw = b"" if given is UNSET else bytes(given)
    if len(raw) > _ARGUMENT_BYTES_MAX:
        return _hash(raw)
    try:
        text = _TEXT.decode(raw) if raw.startswith(b'"') else raw
        value = _ANY.decode(text)
        if isinstance(value, dict) and ("command" in value or "cmd" in value):
            value.pop("description", None)
        return _hash(_CANONICAL.encode(value))
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return _hash(raw)  # free text, or JSON that was cut off


# --- memory -------------------------------------------------------------------------------------------


def _hash(text: bytes) -> bytes:
    digest: bytes = xxhash.xxh3_64_digest(text)
    return digest


class _Reader:
    """What messages of one dialect say, by the hash of their bytes: a step sends all but two of them again."""

    def __init__(self, dialect: Operation, decode: Callable[[int, bytes], _Piece]) -> None:
        # str hashes are random per process, so nobody outside can construct two messages with one hash; and the
        # same bytes may say different things in two dialects
        self._seed = hash(dialect.value) & 0xFFFF_FFFF_FFFF_FFFF
        self._decode = decode
        self._memory: Generations[int, _Piece] = Generations(16_384)
        self._pasts: Generations[tuple[bytes, int], _Past] = Generations(4_096)

    def past(self, link: bytes, key: int) -> _Past | None:
        """The history that ends there: by the link of the prefix chain and the key of the last message."""
        return self._pasts.get((link, key)) if key else None

    def keep(self, link: bytes, key: int, past: _Past) -> None:
        if key:
            self._pasts.put((link, key), past)

    def known(self, key: int) -> _Piece | None:
        """What a message of that `Segment.key` says, if one was read lately."""
        return self._memory.get(key ^ self._seed) if key else None

    def __call__(self, segment: Segment) -> _Piece:
        key = (segment.key or xxhash.xxh3_64_intdigest(segment.raw)) ^ self._seed
        piece = self._memory.get(key)
        if piece is None:
            piece = self._look(key, segment.raw)
            self._memory.put(key, piece)
        return piece

    def _look(self, key: int, raw: memoryview) -> _Piece:
        if len(raw) <= _MESSAGE_BYTES_MAX:
            try:
                return msgspec.structs.replace(self._decode(key, bytes(raw)), size=len(raw))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                pass  # not of this dialect's form
        return msgspec.structs.replace(_piece(key, said=xxhash.xxh3_64_digest(raw)), size=len(raw))


_READERS = {
    dialect: _Reader(dialect, decode)
    for dialect, decode in (
        (Operation.CHAT, _chat),
        (Operation.MESSAGES, _messages),
        (Operation.RESPONSES, _responses),
    )
}
_turns: Generations[tuple[bytes | int, ...], Turn] = Generations(8_192)
