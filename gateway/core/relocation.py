"""Lines of the system prompt that change from request to request, and their way behind the stable part.

Learned, not guessed: a line moves when two requests of one lineage differed in it and what differs is of a volatile
class: the time, the working directory, the state of git, an id. Two system prompts belong to one lineage when they are
equal but for such parts.

A run keeps each such line as it said it first, so that nothing behind it has to be read anew:
- in its place, if that is where it stood in a request of that wording when it was not known to change: caches hold it so;
- else at the end of its text, or of the last text of the system prompt if the client marks none between, so that all
  in front of it is shared with other runs, and the line itself with those that say the same.
Whenever the line says something else than before, that is said once, behind the message at which it was new, and stays
there for as long as that message does (`notes`). A longer wording than the first takes the place of that one, or a
history that is rewritten would leave less to read than straight.

Lines are compared and moved as the JSON bytes that they are, so they arrive letter by letter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec
import xxhash

from gateway.core.catalog import Operation
from gateway.core.dialects import blocks
from gateway.core.dialects.facts import Facts, Splice
from gateway.core.dialects.json_slices import Span

_MONTH = rb"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}"
_DAY = rb"(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b,? ?)?"
#: What may differ, by class. Each alternative is anchored on characters that few lines have.
CLASSES = {
    "clock": rb"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?)?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d)\b)?"
    rb"|\b\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?(?: ?[AaPp][Mm]\b)?|\b\d{1,2}[/.]\d{1,2}[/.]\d{4}\b"
    rb"|%b\b(?:%b \d{1,2}(?:,? \d{4})?|\d{1,2}\.? %b,? \d{4})\b|\b1[5-9]\d{8}(?:\d{3})?\b"
    % (_DAY, _MONTH, _MONTH),
    "cwd": rb"(?i:\b(?:cwd|(?:current |primary )?working dir(?:ectory)?|current directory|workspace|project root|git root)\b"
    rb"[^:=]{0,16}[:=]) *[^ ].*",
    "git": rb"(?i:\b(?:(?:current |git )?branch|commit|head)\b[^:=]{0,16}[:=]) *[^ ].*|^[ MADRCU?!]{1,2} [^ ]+$|\([a-z]+ -> [^)]+\)",
    "id": rb"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,64}\b"
    rb"|(?i:\b(?:session|request|trace|run|conversation|thread)[ _-]?id\b[^:=]{0,8}[:=]) *[^ ]+",
}
_VOLATILE = re.compile(rb"|".join(b"(?:%b)" % pattern for pattern in CLASSES.values()))
_HOLE = b"\0"  # no JSON string holds it unescaped
_LINES = re.compile(rb"((?:[^\\]++|\\[^n])*+)(?:\\n|\Z)")
_LONGEST_LINE = 1_000
#: More lines that may move than this are no prompt with a clock in it.
_CANDIDATES_MAX = 200
#: So many wordings of lines that stand, or stood, in their places are remembered for a system prompt.
_STOOD_MAX = 64
#: What stands in front of a text in a block that can be cut behind any line.
_PLAIN_BLOCK = re.compile(rb'\{\s*"type"\s*:\s*"((?:input_)?text)"\s*,\s*"text"\s*:\s*')
#: About what tokenizers make of a text: which of two wordings of a line is the longer one in tokens.
_PIECES = re.compile(rb" ?[A-Za-z]{1,5}| ?[0-9]{1,3}|\s{1,8}|[^\sA-Za-z0-9]{1,2}")


class Text(msgspec.Struct, frozen=True):
    """One text of a system prompt. `start` and `end` are offsets in the body, of what is between its quotes."""

    start: int
    end: int
    segment: int
    kind: bytes = b""  # of the block of text that it is or can become; b"" = it cannot be cut in two
    whole: bool = False  # a string that is the whole content
    marked: bool = False  # a marker of the client's own covers it and all before it


class SystemText(msgspec.Struct, frozen=True):
    """The lines of a system prompt, all its texts in order. `ends` says for each text how many lines end with it."""

    lines: list[bytes]
    starts: list[int]  # offsets in the body
    texts: list[Text]
    ends: list[int]
    template: bytes  # a digest of the lines with holes where they are volatile
    candidates: tuple[int, ...]  # lines with holes


class Templates:
    """Lines with holes in the place of what may differ, remembered by line."""

    def __init__(self, capacity: int = 50_000) -> None:
        self._capacity = capacity
        self._known: dict[bytes, bytes] = {}

    def read(self, operation: Operation, facts: Facts, body: bytes) -> SystemText | None:
        lines: list[bytes] = []
        starts: list[int] = []
        ends: list[int] = []
        texts = system_texts(operation, facts, body)
        for text in texts:
            start = text.start
            for line in _lines_of(body[start : text.end]):
                lines.append(line)
                starts.append(start)
                start += len(line) + 2
            ends.append(len(lines))
        if not lines:
            return None
        templates = [self._known.get(line) or self._learn(line) for line in lines]
        candidates = tuple(i for i, line in enumerate(templates) if _HOLE in line)
        template = xxhash.xxh3_128_digest(b"\n".join(templates))
        return SystemText(lines, starts, texts, ends, template, candidates[:_CANDIDATES_MAX])

    def _learn(self, line: bytes) -> bytes:
        if len(line) > _LONGEST_LINE:
            return line
        template = _VOLATILE.sub(_HOLE, line)
        if len(self._known) >= self._capacity:
            self._known.clear()
        self._known[line] = template
        return template


def _lines_of(text: bytes) -> list[bytes]:
    r"""Split at `\n`, but not at the end of an escaped backslash before an n."""
    if b"\\\\" not in text:
        return text.split(b"\\n")
    found = list(_LINES.finditer(text))
    # The pattern also matches the nothing behind a last line that no line end follows.
    if len(found) > 1 and found[-2].end() == found[-2].end(1):
        found.pop()
    return [line[1] for line in found]


class Prompt(msgspec.Struct):
    """What is known of a system prompt, whichever run showed it: the lines that are volatile, and the wordings in which a
    run has had one of them in its place."""

    volatile: set[int] = msgspec.field(default_factory=set)
    stood: dict[tuple[int, bytes], None] = msgspec.field(default_factory=dict)

    def stands(self, line: tuple[int, bytes]) -> None:
        """The latest wordings are kept: what is forgotten costs one miss."""
        self.stood.pop(line, None)
        self.stood[line] = None
        if len(self.stood) > _STOOD_MAX:
            del self.stood[next(iter(self.stood))]


class Places(msgspec.Struct):
    """Of one run, by number: the wording of each line that may move, and which stand at the end of their text."""

    lines: dict[int, bytes] = msgspec.field(default_factory=dict)
    ends: set[int] = msgspec.field(default_factory=set)


def learn(places: Places, prompt: Prompt, text: SystemText) -> tuple[list[int], bool]:
    """The lines, by number, that are volatile since this request and were not known to be; and whether the run goes on
    with another wording of a line than before, so that nothing of its caches behind that line is of use."""
    new, again = [], False
    for i in text.candidates:
        line, stands = text.lines[i], places.lines.get(i)
        # Nothing is lost by a longer wording: straight, one that is new is not read either, nor is what follows it.
        if stands is None or (stands != line and size(line) > size(stands)):
            again |= stands is not None
            begin(places, prompt, i, line)
        elif stands != line and i not in prompt.volatile:
            prompt.volatile.add(i)
            new.append(i)
    return new, again


def begin(places: Places, prompt: Prompt, i: int, line: bytes) -> None:
    """From now on the run has this wording of a line: where other runs have it, or at the end of its text."""
    places.lines[i] = line
    if i in prompt.volatile and (i, line) not in prompt.stood:
        places.ends.add(i)
    else:
        places.ends.discard(i)
        prompt.stands((i, line))


def begin_all(places: Places, prompt: Prompt, now: Mapping[int, bytes]) -> None:
    """The run goes on as if it began with what its lines say now."""
    for i, line in now.items():
        begin(places, prompt, i, line)


def size(line: bytes) -> int:
    """Of a line, in about its tokens."""
    return len(_PIECES.findall(line))


def classes_of(line: bytes) -> tuple[str, ...]:
    """For people: why a line may move."""
    return tuple(name for name, pattern in CLASSES.items() if re.search(pattern, line))


def diff(text: SystemText, stands: Mapping[int, bytes], numbers: Sequence[int]) -> str:
    """The lines that leave their place, for people: number in the system prompt, class, text, and what stands there
    instead."""
    found = ["--- system prompt", "+++ end of the conversation"]
    for i in numbers:
        line = _text(text.lines[i])
        found.append(f"@@ line {i + 1} ({', '.join(classes_of(text.lines[i]))}) @@")
        found += [f"-{line}", f" {_text(stands[i])}", f"+{line}"]
    return "\n".join(found) if len(found) > 2 else ""


def _text(line: bytes) -> str:
    return msgspec.json.decode(b'"%b"' % line, type=str)


# --- the move -------------------------------------------------------------------------------------------


class Cut(msgspec.Struct, frozen=True):
    """The block of text that is cut in two in front of the lines that stand at its end, so that a mark can go there."""

    text: Text
    at: int
    lines: bytes

    def splices(self, mark: bytes) -> list[Splice]:
        """`mark`: the member that marks the first half, or b""."""
        text, kind = self.text, self.text.kind
        middle = b'"%b},{"type":"%b","text":"%b' % (mark, kind, self.lines)
        if not text.whole:
            return [(self.at, self.at, middle)]
        start, end = text.start - 1, text.end + 1
        opening = b'[{"type":"%b","text":' % kind
        return [(start, start, opening), (self.at, self.at, middle), (end, end, b"}]")]


def replaced(text: SystemText, places: Places, head: int) -> tuple[list[Splice], Cut | None]:
    """Splices that make the system prompt what it is in this run. `head`: the segment in which a text may be cut so that
    a mark has a place, or -1; then that cut is among none of the splices."""
    splices: list[Splice] = []
    if places.ends:
        kept = _kept(text, places)
        added: dict[int, list[bytes]] = {}
        first = 0
        for n, end in enumerate(text.ends):
            moved = [i for i in text.candidates if first <= i < end and i in places.ends]
            first = end
            # A text never loses all its lines.
            if moved and kept[n] >= 0:
                added.setdefault(_target(text, kept, n), []).extend(places.lines[i] for i in moved)
                splices += _cuts(text, moved, kept[n])
            else:
                splices += _older(text, places, moved)
        cut, found = _ends(text, kept, added, head)
        splices += found
    else:
        cut = None
    return splices + _older(text, places, [i for i in text.candidates if i not in places.ends]), cut


def _older(text: SystemText, places: Places, numbers: Sequence[int]) -> list[Splice]:
    """Each line's wording of this run, in its place."""
    return [
        (text.starts[i], text.starts[i] + len(text.lines[i]), places.lines[i])
        for i in numbers
        if places.lines[i] != text.lines[i]
    ]


def _kept(text: SystemText, places: Places) -> list[int]:
    """Of each text the last line that stays and says something; -1 if there is none."""
    kept, first = [], 0
    for end in text.ends:
        at = end - 1
        while at >= first and (at in places.ends or not text.lines[at].strip(b" ")):
            at -= 1
        kept.append(at if at >= first else -1)
        first = end
    return kept


def _target(text: SystemText, kept: Sequence[int], n: int) -> int:
    """The text at whose end the lines of text `n` go: none that a marker of the client's own does not cover as it did."""
    texts = text.texts
    while (
        not texts[n].marked
        and n + 1 < len(texts)
        and texts[n + 1].segment == texts[n].segment
        and kept[n + 1] >= 0
    ):
        n += 1
    return n


def _cuts(text: SystemText, moved: Sequence[int], kept: int) -> list[Splice]:
    """Lines taken out, each with one line end."""
    found: list[Splice] = []
    for i in moved:
        start, stop = text.starts[i], text.starts[i] + len(text.lines[i])
        found.append((start, stop + 2, b"") if i < kept else (start - 2, stop, b""))
    return found


def _ends(
    text: SystemText, kept: Sequence[int], added: dict[int, list[bytes]], head: int
) -> tuple[Cut | None, list[Splice]]:
    found: list[Splice] = []
    cut = None
    for n, lines in added.items():
        at = text.starts[kept[n]] + len(text.lines[kept[n]])
        more = b"".join(b"\\n" + line for line in lines)
        if text.texts[n].segment == head and text.texts[n].kind and n == max(added):
            cut = Cut(text.texts[n], at, more)
        else:
            found.append((at, at, more))
    return cut, found


# --- where the system prompt is -------------------------------------------------------------------------


def system_texts(operation: Operation, facts: Facts, body: bytes) -> list[Text]:
    """The texts of the system prompt in their order."""
    members = facts.spans.members
    found: list[Text] = []
    name = "instructions" if operation is Operation.RESPONSES else "system"
    segments = facts.segments
    first = first_message(facts)
    if operation is not Operation.CHAT and name in members:
        start, end = members[name]
        found += _texts(operation, body[start:end], (0, end - start), start, first - 1)
        if operation is Operation.RESPONSES:  # a string that cannot become a list
            found = [msgspec.structs.replace(text, kind=b"") for text in found]
    if operation is Operation.MESSAGES:
        return found
    span = members["input" if operation is Operation.RESPONSES else "messages"]
    if body[span[0] : span[0] + 1] != b"[":
        return found
    for i in range(first, len(segments)):
        raw = segments[i].raw.tobytes()
        content = blocks.content_of(raw)
        if content is None or not blocks.read_message(raw).system:
            break
        at = blocks.offset_of(body, span, segments, i, first)
        if at is not None:
            found += _texts(operation, raw, content, at, i)
    return found


def first_message(facts: Facts) -> int:
    """The segment of the first message."""
    segments = facts.segments
    return sum(segments[i].kind != "message" for i in range(min(2, len(segments))))


def _texts(operation: Operation, raw: bytes, content: Span, at: int, segment: int) -> list[Text]:
    """Those of a content; `raw` stands at `at` in the body."""
    start, end = content
    if raw[start : start + 1] == b'"':
        kind = b"input_text" if operation is Operation.RESPONSES else b"text"
        return [Text(at + start + 1, at + end - 1, segment, kind, whole=True)]
    found = []
    if raw[start : start + 1] == b"[":
        for offset, block in blocks.items_of(raw, content):
            inside = blocks.text_of_block(block)
            if inside is not None:
                before = _PLAIN_BLOCK.fullmatch(block, 0, inside[0])
                begin = at + offset + inside[0] + 1
                stop = at + offset + inside[1] - 1
                marked = blocks.client_markers(block) > 0
                found.append(Text(begin, stop, segment, before[1] if before else b"", marked=marked))
    return found
