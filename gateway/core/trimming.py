"""Oversized tool results, cut where they first appear.

Cutting a result later rewrites everything behind it in the provider's cache, so it is decided once, by the content, and
the same bytes leave in every later step. Head and tail stay, cut at line ends or between elements of JSON; the rest can be
read page by page from the gateway. Only where it is switched on: a model that never asks for the rest knows less.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from gateway.core.catalog import Operation
from gateway.core.dialects import blocks
from gateway.core.dialects.json_slices import DuplicateMember, Span, members

PAGE_CHARS_MAX = 64_000
_JSON = re.compile(r"\s*[\[{]")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\Z)|[\[\]{},]', re.DOTALL)
_BETWEEN = re.compile(r"[}\]],\s*")
_DECIDED_MAX = 20_000


@dataclass(frozen=True, slots=True)
class TrimPolicy:
    """`over_chars` 0 = nothing is trimmed. Of a longer result about `keep_chars` stay, three quarters of them in front."""

    over_chars: int = 0
    keep_chars: int = 8_000

    def __post_init__(self) -> None:
        if self.over_chars and not 100 <= self.keep_chars <= self.over_chars:
            raise ValueError("keep_chars must be from 100 to over_chars")


def cut(text: str, keep_chars: int) -> tuple[int, int]:
    """(end of the head, start of the tail) of a text that is longer than `keep_chars`."""
    head_max, tail_max = keep_chars - keep_chars // 4, keep_chars // 4
    tail_min = len(text) - tail_max
    head = text.rfind("\n", head_max // 2, head_max) + 1
    tail = text.find("\n", tail_min, len(text) - tail_max // 2) + 1
    if _JSON.match(text):
        head = head or _between_elements(text[:head_max])
        between = None if tail else _BETWEEN.search(text, tail_min, len(text) - tail_max // 2)
        tail = tail or (between.end() if between else 0)
    return head or head_max, tail or tail_min


def _between_elements(text: str) -> int:
    """Behind the outermost comma in the second half of a beginning of JSON, the last one of them; 0 if there is none."""
    depth, best, at = 0, 1_000, 0
    for token in _TOKEN.finditer(text):
        match token[0]:
            case "{" | "[":
                depth += 1
            case "}" | "]":
                depth -= 1
            case "," if token.start() >= len(text) // 2 and depth <= best:
                best, at = depth, token.end()
    return at


def _nobody(_task_id: str, _digest: str, _text: str) -> None:
    """No other process is asked for artifacts."""


class Artifacts:
    """The whole texts of trimmed results by task and hash, least recently used out above `chars_max` characters.

    An agent sends them again with every step, so what was dropped is back with the next one.
    """

    def __init__(self, chars_max: int = 64 << 20) -> None:
        #: told of each text that is new here: task, hash, text
        self.tell: Callable[[str, str, str], None] = _nobody
        self._chars_max = chars_max
        self._chars = 0
        self._texts: OrderedDict[tuple[str, str], str] = OrderedDict()

    def text(self, task_id: str, digest: str) -> str | None:
        return self._texts.get((task_id, digest))

    def has(self, task_id: str, digest: str) -> bool:
        found = (task_id, digest) in self._texts
        if found:
            self._texts.move_to_end((task_id, digest))
        return found

    def keep(self, task_id: str, digest: str, text: str) -> None:
        if not self.has(task_id, digest):
            self._texts[task_id, digest] = text
            self._chars += len(text)
            self.tell(task_id, digest, text)
            while self._chars > self._chars_max and len(self._texts) > 1:
                _, dropped = self._texts.popitem(last=False)
                self._chars -= len(dropped)


class Trim(msgspec.Struct, frozen=True, gc=False):
    """One result inside of a message that is too long: where its text is, quotes included, and its hash."""

    start: int
    end: int
    digest: str


class Trimmer:
    """What leaves instead of long results. Bounded: what was dropped is computed again from the request."""

    def __init__(self, bytes_max: int = 32 << 20) -> None:
        self.artifacts = Artifacts()
        self._decided: OrderedDict[str, tuple[int, int]] = OrderedDict()
        self._cut: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._bytes_max = bytes_max
        self._bytes = 0

    def trims(self, operation: Operation, raw: bytes, policy: TrimPolicy) -> tuple[Trim, ...]:
        """What is cut out of a message that is new; () if all of it is short enough."""
        found = []
        for start, end in result_texts(operation, raw):
            if end - start <= policy.over_chars:
                continue
            text = msgspec.json.decode(raw[start:end], type=str)
            if len(text) > policy.over_chars:
                digest = hashlib.sha256(text.encode()).hexdigest()[:32]
                self._decide(digest, text, policy.keep_chars)
                found.append(Trim(start, end, digest))
        return tuple(found)

    def cut(self, trim: Trim, raw: memoryview, task_id: str, policy: TrimPolicy) -> bytes:
        """The JSON text that leaves; the whole one can be asked for as long as the run goes on."""
        key = (task_id, trim.digest)
        known = self._cut.get(key)
        if known is not None and self.artifacts.has(*key):
            self._cut.move_to_end(key)
            return known
        text = msgspec.json.decode(raw[trim.start : trim.end], type=str)
        self.artifacts.keep(task_id, trim.digest, text)
        if known is not None:
            return known
        head, tail = self._decide(trim.digest, text, policy.keep_chars)
        note = (
            f"\n[... {tail - head:,} characters left out by the gateway; all of it, page by page: "
            f"GET /v1/tasks/{task_id}/artifacts/{trim.digest}?offset={head}]\n"
        )
        made = self._cut[key] = msgspec.json.encode(text[:head] + note + text[tail:])
        self._bytes += len(made)
        while self._bytes > self._bytes_max and len(self._cut) > 1:
            _, dropped = self._cut.popitem(last=False)
            self._bytes -= len(dropped)
        return made

    def _decide(self, digest: str, text: str, keep_chars: int) -> tuple[int, int]:
        """Once: another policy later does not change what has left already."""
        known = self._decided.get(digest)
        if known is None:
            known = self._decided[digest] = cut(text, keep_chars)
            if len(self._decided) > _DECIDED_MAX:
                self._decided.popitem(last=False)
        return known


def result_texts(operation: Operation, raw: bytes) -> list[Span]:
    """The texts of tool results in a message, quotes included."""
    try:
        found = members(raw)
        if operation is Operation.RESPONSES:
            span = found.get("output")
            kind = raw[slice(*found["type"])] if "type" in found else b""
            return (
                [span]
                if span and kind == b'"function_call_output"' and raw[span[0] : span[0] + 1] == b'"'
                else []
            )
        content = found.get("content")
        role = raw[slice(*found["role"])] if "role" in found else b""
        if content is None:
            return []
        if operation is Operation.CHAT:
            return _texts(raw, content) if role == b'"tool"' else []
        if raw[content[0] : content[0] + 1] != b"[":
            return []
        texts: list[Span] = []
        for at, block in blocks.items_of(raw, content):
            inside = members(block) if block.startswith(b"{") else {}
            if "content" in inside and block[slice(*inside.get("type", (0, 0)))] == b'"tool_result"':
                texts += ((at + s, at + e) for s, e in _texts(block, inside["content"]))
    except (DuplicateMember, ValueError, msgspec.MsgspecError):
        return []  # left as it is, whatever it is
    return texts


def _texts(raw: bytes, content: Span) -> list[Span]:
    first = raw[content[0] : content[0] + 1]
    if first == b'"':
        return [content]
    found = []
    if first == b"[":
        for at, block in blocks.items_of(raw, content):
            inside = blocks.text_of_block(block)
            if inside is not None:
                found.append((at + inside[0], at + inside[1]))
    return found
