"""Finding values in JSON text by offset, and refusing what is too deep, without building objects.

`decode` checks the whole text once (msgspec, C speed). The text is known to be JSON afterwards, so `members`
only needs each top-level value's length, which the decoder's raw slices tell.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, repeat
from operator import add
from typing import TypeVar

import msgspec
import xxhash
from msgspec import Raw

from gateway.core.errors import InvalidRequest

Span = tuple[int, int]
T = TypeVar("T")

MAX_DEPTH = 64  # arrays and objects inside each other, the body itself included
MAX_NODES = 200_000  # arrays and objects in one body, as far as they had to be counted

_ALL = msgspec.json.Decoder(dict[str, Raw])
_ITEMS = msgspec.json.Decoder(list[Raw])

#: One member: its name, its value if that is a number, a literal or a short string, and what follows it.
_MEMBER = re.compile(
    rb'\s*+"([^"\\]*+(?:\\.[^"\\]*+)*+)"\s*+:\s*+'
    rb'(?:("[^"\\]{0,1024}+(?:\\.[^"\\]{0,1024}+){0,64}+"|[-+.0-9eE]++|true|false|null)\s*+[,}])?',
    re.DOTALL,
)
_NEXT = re.compile(rb"\s*+[,}]")
_BRACE = ord("}")
_OPEN = re.compile(rb"\[\s*+")
_GAP = re.compile(rb"\s*+,\s*+")
_CLOSE = re.compile(rb"\s*+\]")
_BATCH = 64
_PATH = re.compile(r"(.*?)(?: - at `(?:key in )?\$\.?(.*)`)?", re.DOTALL)
_BYTE = re.compile(r"(.*) \(byte (\d+)\)", re.DOTALL)


class DuplicateMember(ValueError):
    """An object has the same member twice. `name` is the member's."""

    def __init__(self, name: str) -> None:
        super().__init__(f"'{name[:64]}' appears more than once")
        self.name = name


# --- decoding ----------------------------------------------------------------------------------------


def decode(decoder: msgspec.json.Decoder[T], body: bytes, where: str = "") -> T:
    """Decode a client's JSON; anything wrong is an InvalidRequest that names the field or the byte.

    `where` is the path of `body` inside the request, when it is a part of it.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as e:
        raise _wrong_type(str(e), where) from None
    except msgspec.DecodeError as e:
        raise InvalidRequest(_malformed(str(e), body), param=where or None) from None
    except UnicodeDecodeError:
        raise not_utf8(where) from None
    except RecursionError:
        raise too_deep(where) from None


def _wrong_type(message: str, where: str) -> InvalidRequest:
    match = _PATH.fullmatch(message)
    reason, path = (match[1], match[2] or "") if match else (message, "")
    field = ".".join(p for p in (where, path) if p).replace(".[", "[")
    reason = reason.replace("`", "").replace("Expected", "expected", 1)
    if not field:
        return InvalidRequest(f"The request body must be a JSON object: {reason}.")
    return InvalidRequest(f"'{field}': {reason}.", param=field)


def _malformed(message: str, body: bytes) -> str:
    if not body.strip():
        return "The request body is empty; send a JSON object."
    if body.startswith(b"\xef\xbb\xbf"):
        return "The request body starts with a byte order mark; send JSON without one."
    if "truncated" in message:
        return f"The request body is not complete JSON: it ends at byte {len(body)}."
    match = _BYTE.fullmatch(message)
    if match is None:
        return "The request body is not valid JSON."
    at = int(match[2])
    if body[at : at + 1] in (b"N", b"I") or body[at - 1 : at + 1] == b"-I":
        return f"The request body is not valid JSON: NaN and Infinity are not numbers (byte {at})."
    reason = match[1].removeprefix("JSON is malformed: ")
    return f"The request body is not valid JSON: {reason} (byte {at})."


def not_utf8(where: str = "") -> InvalidRequest:
    place = f"'{where}'" if where else "The request body"
    return InvalidRequest(f"{place} is not valid UTF-8.", param=where or None)


def too_deep(where: str = "") -> InvalidRequest:
    place = f"'{where}'" if where else "The request body"
    return InvalidRequest(f"{place} is nested too deep; at most {MAX_DEPTH} levels.", param=where or None)


def lenient(data: bytes, decoder: msgspec.json.Decoder[T]) -> T | None:
    """A provider's JSON; None if it is none or of another shape.

    Providers do send NaN log probabilities and halves of surrogate pairs, which msgspec refuses.
    """
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    except RecursionError:
        return None
    try:
        converted: T = msgspec.convert(json.loads(data), decoder.type)
    except (ValueError, RecursionError):
        return None
    return converted


# --- offsets -----------------------------------------------------------------------------------------


def members(text: bytes, known: object = None) -> dict[str, Span]:
    """Name -> offsets of its value, for each member of the object that `text` is; `text` must be valid JSON.

    `known` is the Struct that `text` was decoded to: its Raw and list[Raw] fields give lengths, so their
    values are skipped without looking at them. Raises DuplicateMember.
    """
    found: dict[str, Span] = {}
    rest: dict[str, Raw] | None = None
    at = text.index(b"{") + 1
    while True:
        match = _MEMBER.match(text, at)
        if match is None:  # only `{}` has no member
            return found
        key = match[1]
        name = key.decode() if b"\\" not in key else msgspec.json.decode(b'"' + key + b'"', type=str)
        if name in found:
            raise DuplicateMember(name)
        if match.lastindex == 2:
            found[name] = match.span(2)
            at = match.end()
        else:
            start = match.end()
            value = getattr(known, name, None)
            if type(value) is list and value and type(value[0]) is Raw:
                end = array_end(text, start, value)
            elif type(value) is Raw:
                end = _value_end(text, start, value)
            else:
                end = None
            if end is None:
                rest = _ALL.decode(text) if rest is None else rest
                end = _value_end(text, start, rest[name])
            if end is None:  # the decoder kept another value under this name
                raise DuplicateMember(name)
            found[name] = (start, end)
            after = _NEXT.match(text, end)
            assert after is not None, "valid JSON has a comma or a brace after a value"
            at = after.end()
        if text[at - 1] == _BRACE:
            return found


def plain_members(text: bytes) -> dict[str, Span] | None:
    """What `members` returns if `text` is written as serialisers do, with nothing or one space after each comma and
    colon of its own; None if it is not, or has a member twice.

    Text that equals its members, each once, joined like that has them nowhere else: no walk is needed.
    """
    values = _ALL.decode(text)
    if not values:
        return None
    colon, comma = b'": ', b', "'
    if not text.startswith(colon, 2 + len(next(iter(values)).encode())):
        colon, comma = b'":', b',"'
    found: dict[str, Span] = {}
    written: list[bytes] = []
    start, gap = 2, len(comma)
    for name, raw in values.items():
        value = bytes(raw)
        member = name.encode() + colon + value
        end = start + len(member)
        found[name] = (end - len(value), end)
        written.append(member)
        start = end + gap
    return found if b'{"%b}' % comma.join(written) == text else None


def _value_end(text: bytes, start: int, value: Raw) -> int | None:
    """Compared, not assumed: of a repeated member the decoder keeps the last, whose length is not this one's."""
    view = memoryview(value)
    return start + len(view) if text.startswith(view, start) else None


def array_end(text: bytes, start: int, items: list[Raw]) -> int | None:
    """End of the array at `start` if it consists of just these items with equal gaps; else None."""
    opening = _OPEN.match(text, start)
    if opening is None:
        return None
    at = opening.end()
    gap = _GAP.match(text, at + len(memoryview(items[0])))
    between = gap[0] if gap else b""
    # memcmp over joined copies that stay in the processor's cache: cheaper than a step per item.
    for i in range(0, len(items), _BATCH):
        batch = items[i : i + _BATCH]
        joined = between.join((b"", *batch) if i else batch)
        if not text.startswith(joined, at):
            return None
        at += len(joined)
    closing = _CLOSE.match(text, at)
    return closing.end() if closing else None


def item_spans(text: bytes, span: Span, items: Sequence[Raw]) -> tuple[array[int], array[int]] | None:
    """Where the items of the array at `span` begin and end; None if there are none or their gaps differ."""
    start, end = span
    if not items or array_end(text, start, [*items]) != end:
        return None
    opening = _OPEN.match(text, start)
    assert opening is not None, "array_end has found it"
    lengths = [len(memoryview(item)) for item in items]
    gap = _GAP.match(text, opening.end() + lengths[0])
    between = len(gap[0]) if gap else 0
    starts = array("I", accumulate([n + between for n in lengths[:-1]], initial=opening.end()))
    return starts, array("I", map(add, starts, lengths))


def items(raw: bytes | memoryview, where: str) -> list[Raw]:
    """The elements of an array."""
    return decode(_ITEMS, bytes(raw), where)


# --- depth -------------------------------------------------------------------------------------------

_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(b for b in range(256) if b not in b"[]{}")


def nodes(text: bytes, max_depth: int, where: str) -> int:
    """Arrays and objects in `text`, or 0 if it cannot be deep. Raises InvalidRequest above `max_depth`.

    Never recursive: strings are cut out, then innermost pairs of brackets, level by level.
    """
    if text.count(b"{") + text.count(b"[") <= max_depth:
        return 0
    outside = b"".join(text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    brackets = outside.translate(_SQUARE, _NOT_BRACKETS)
    count = len(brackets) // 2
    if count > MAX_NODES:
        raise too_many_nodes(where)
    for _ in range(max_depth):
        if not brackets:
            return count
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise too_deep(where)
    return count


def too_many_nodes(where: str = "") -> InvalidRequest:
    return InvalidRequest(f"The request has more than {MAX_NODES} arrays and objects.", param=where or None)


class Checked:
    """Remembers what `check` said about slices that it has seen, by hash.

    An agent sends its whole history with every step; only what is new has to be looked at. `check` is a pure
    function that raises InvalidRequest for a bad slice, and only good ones are remembered. Two generations
    of `capacity` slices each bound the memory (about 100 bytes a slice).
    """

    #: str hashes are random per process, so nobody outside can construct two slices with one hash
    _SEED = hash("gateway.core.dialects") & 0xFFFF_FFFF_FFFF_FFFF

    def __init__(self, check: Callable[[bytes, str], int], capacity: int = 16_384) -> None:
        self._check = check
        self._capacity = capacity
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __call__(self, slices: Sequence[memoryview | Raw], name: str) -> tuple[list[int | None], list[int]]:
        """What `check(slice, path)` says for each slice, in order, never None; and the slices' hashes."""
        hashes = list(map(xxhash.xxh3_64_intdigest, slices, repeat(self._SEED)))
        results: list[int | None] = list(map(self._young.get, hashes))
        if None in results:
            for i, result in enumerate(results):
                if result is None:
                    results[i] = self._look(hashes[i], slices[i], name.replace("*", str(i)))
        return results, hashes

    def _look(self, key: int, piece: memoryview | Raw, where: str) -> int:
        result = self._old.get(key)
        if result is None:
            result = self._check(bytes(piece), where)
        if len(self._young) >= self._capacity:
            self._old, self._young = self._young, {}
        self._young[key] = result
        return result


def check_text(text: bytes, max_depth: int, where: str) -> int:
    """UTF-8 and depth of one slice; returns its `nodes`."""
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError:
            raise not_utf8(where) from None
    return nodes(text, max_depth, where)


def rest_of(body: bytes, spans: Sequence[Span]) -> bytes:
    """What is left of the body without `spans`, which must be whole values in order."""
    pieces, at = [], 0
    for start, end in spans:
        pieces.append(body[at:start])
        at = end
    pieces.append(body[at:])
    return b"".join(pieces)


def check_rest(body: bytes, spans: Sequence[Span], max_depth: int = MAX_DEPTH) -> int:
    """`check_text` of what is left of the body."""
    return check_text(rest_of(body, spans), max_depth, "")


def is_null(raw: Raw) -> bool:
    view = memoryview(raw)
    return len(view) == 4 and bytes(view) == b"null"
