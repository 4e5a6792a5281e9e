"""What lines of a system prompt say now, told once in the conversation, behind the message at which it was new.

A note is bound to what was said up to that message: whenever a request of the run has the same messages up to there, it
has the same note there, whatever came since. So notes are part of the history that a provider's cache holds, and a step
in which nothing changed has its whole past to read. A history that forks or is rewritten in front of a note has not got
it, and says anew what it has to.

A note never stands inside of a tool's result nor behind an answer that the model is to go on with. Where the provider takes
system turns in a conversation it is one; else it is at the end of a user's turn, in `<system-reminder>` tags.
"""

from __future__ import annotations

import msgspec
import xxhash

from gateway.core.catalog import Operation
from gateway.core.dialects import blocks
from gateway.core.dialects.facts import Segments, Splice
from gateway.core.prefix import common, digest

#: Stands before what lines say now.
NOW = b"As of now:"
_SYSTEM_TURNS = {Operation.MESSAGES: b"system", Operation.CHAT: b"system", Operation.RESPONSES: b"developer"}
#: Of one run, texts and what holds them.
_BYTES_MAX = 64 << 10
_NOTE_BYTES = 128

#: Line of the system prompt, by number, and what it says.
Lines = tuple[tuple[int, bytes], ...]


class Note(msgspec.Struct, frozen=True):
    lines: Lines
    turn: bool  # it is a system turn

    @property
    def text(self) -> bytes:
        return b"\\n".join((NOW, *(line for _, line in self.lines)))


class Notes:
    """Those of one run, by what was said up to where each stands."""

    __slots__ = ("_keys", "_links", "known", "size", "told")

    def __init__(self) -> None:
        self.known: dict[int, Note] = {}
        self.told = 0  # so many of them are known to other processes, too
        self.size = 0
        self._keys: list[int] = []
        self._links: list[int] = []

    def follow(self, segments: Segments, first: int) -> list[int]:
        """A hash, the same in all processes, of what is said up to each message from segment `first` on."""
        keys, links = segments.keys[first:], self._links
        same = 0 if 0 in keys else common(self._keys, keys)
        del links[same:]
        link = links[-1] if links else 0
        for i in range(same, len(keys)):
            link = xxhash.xxh3_64_intdigest(digest(segments[first + i]), seed=link)
            links.append(link)
        self._keys = keys
        return links

    def added(self, segments: Segments, first: int) -> int:
        """The first segment that the request before did not have."""
        return first + common(self._keys, segments.keys[first:])

    def put(self, link: int, note: Note) -> None:
        self.drop(link)
        self.known[link] = note
        self.size += _size(note)

    def drop(self, link: int) -> None:
        note = self.known.pop(link, None)
        if note is not None:
            self.size -= _size(note)

    @property
    def full(self) -> bool:
        return self.size > _BYTES_MAX

    def clear(self) -> None:
        self.known.clear()
        self.size = self.told = 0


def _size(note: Note) -> int:
    return _NOTE_BYTES + sum(_NOTE_BYTES + len(line) for _, line in note.lines)


def place(operation: Operation, raw: bytes, note: Note) -> tuple[Splice, ...]:
    """Splices, relative to the message `raw` behind which it stands; () if there is no place for it."""
    message = blocks.read_message(raw)
    if message.assistant or message.system or (operation is Operation.MESSAGES and message.role != "user"):
        return ()
    end = len(raw)
    if note.turn:
        return ((end, end, b',{"role":"%b","content":"%b"}' % (_SYSTEM_TURNS[operation], note.text)),)
    text = b"<system-reminder>\\n%b\\n</system-reminder>" % note.text
    if message.role != "user" or operation is Operation.RESPONSES:
        return ((end, end, b',{"role":"user","content":"%b"}' % text),)
    content = blocks.content_of(raw)
    if content is None:
        return ()
    start, end = content
    block = b'{"type":"text","text":"%b"}' % text
    if raw[start : start + 1] == b'"':
        return ((start, start, b'[{"type":"text","text":'), (end, end, b"},%b]" % block))
    if raw[start : start + 1] != b"[" or not raw[start + 1 : end - 1].strip():
        return ()
    return ((end - 1, end - 1, b"," + block),)


def with_mark(note: tuple[Splice, ...], mark: tuple[Splice, ...]) -> tuple[tuple[Splice, ...], bool]:
    """Of a message that has both: the note's splices, and whether they hold the mark now, because both make a list of one
    string."""
    if len(note) < 2 or len(mark) < 2:
        return note, False
    opening, (start, end, closing) = note
    return (opening, (start, end, mark[1][2].removesuffix(b"}]") + closing)), True
