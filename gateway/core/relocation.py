"""Lines of the system prompt that change from request to request, and their way behind the stable part.

Learned, not guessed: a line moves when two requests of one lineage differed in it and what differs is of a volatile
class: the time, the working directory, the state of git, an id. Two system prompts belong to one lineage when they are
equal but for such parts. From then on what the line says moves in every request of that prompt, always to the same place:
behind everything that the client sent, as a system message where the provider takes one there, else at the end of the
last user turn. Tool results and answers are never touched, and nothing moves when a request ends with an answer.

What stays in the line's place is decided once for a run, so that no step reads less from a cache than it would straight:
- a run that began with the line in its place keeps there what it sent first, for its caches hold just that; what the line
  says now stands at the end, after `NOW`, where it is another thing. (Taking the line out would lose the line's own
  beginning, and leave nothing of a step behind it to read.)
- a run that begins when the line is known to be volatile has nothing there, so it shares what follows with other runs.

Lines are compared and moved as the JSON bytes that they are, so they arrive letter by letter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
#: Stands before lines of which the system prompt still has an older wording.
NOW = b"As of now:"
#: About what tokenizers make of a text: which of two wordings of a line is the longer one in tokens.
_PIECES = re.compile(rb" ?[A-Za-z]{1,5}| ?[0-9]{1,3}|\s{1,8}|[^\sA-Za-z0-9]{1,2}")
_SYSTEM_TURNS = {Operation.MESSAGES: b"system", Operation.CHAT: b"system", Operation.RESPONSES: b"developer"}


class SystemText(msgspec.Struct, frozen=True):
    """The lines of a system prompt, all its texts in order. `last` names the last line of each text."""

    lines: list[bytes]
    starts: list[int]  # offsets in the body
    last: frozenset[int]
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
        last: list[int] = []
        for start, end in system_texts(operation, facts, body):
            for line in _lines_of(body[start:end]):
                lines.append(line)
                starts.append(start)
                start += len(line) + 2
            last.append(len(lines) - 1)
        if not lines:
            return None
        templates = [self._known.get(line) or self._learn(line) for line in lines]
        candidates = tuple(i for i, line in enumerate(templates) if _HOLE in line)
        template = xxhash.xxh3_128_digest(b"\n".join(templates))
        return SystemText(lines, starts, frozenset(last), template, candidates[:_CANDIDATES_MAX])

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


#: What stands in the place of each line that may move, by number: its wording, or None where it is left out.
Places = dict[int, bytes | None]


def learn(places: Places, volatile: set[int], text: SystemText) -> list[int]:
    """The lines, by number, that are volatile since this request and were not known to be.

    `places`: of this run; `volatile`: of this prompt, whichever run showed it.
    """
    out: set[int] | None = None
    new = []
    for i in text.candidates:
        line = text.lines[i]
        if i not in places:
            if volatile and out is None:
                out = _left_out(text, volatile)
            places[i] = None if out and i in out else line
            continue
        stands = places[i]
        if stands is None or stands == line:
            continue
        # A longer wording takes the place, or steps in which it stays the same would read less than straight. Nothing
        # is lost by that: straight, a wording that is new is not read either, nor is what follows it.
        if size(line) > size(stands):
            places[i] = line
        elif i not in volatile:
            volatile.add(i)
            new.append(i)
    return new


def size(line: bytes) -> int:
    """Of a line, in about its tokens."""
    return len(_PIECES.findall(line))


def _left_out(text: SystemText, volatile: set[int]) -> set[int]:
    """The volatile lines that a run may begin without: a text never loses all its lines."""
    out: set[int] = set()
    begin = 0
    for end in sorted(text.last):
        here = {i for i in range(begin, end + 1) if i in volatile}
        if len(here) <= end - begin:
            out |= here
        begin = end + 1
    return out


def classes_of(line: bytes) -> tuple[str, ...]:
    """For people: why a line may move."""
    return tuple(name for name, pattern in CLASSES.items() if re.search(pattern, line))


def diff(text: SystemText, places: Places, numbers: Sequence[int]) -> str:
    """The lines that leave their place, for people: number in the system prompt, class, text, and what stands there
    instead."""
    found = ["--- system prompt", "+++ end of the conversation"]
    for i in numbers:
        line, stands = _text(text.lines[i]), places[i]
        found += [f"@@ line {i + 1} ({', '.join(classes_of(text.lines[i]))}) @@", f"-{line}"]
        found += [] if stands is None else [f" {_text(stands)}"]
        found.append(f"+{line}")
    return "\n".join(found) if len(found) > 2 else ""


def _text(line: bytes) -> str:
    return msgspec.json.decode(b'"%b"' % line, type=str)


# --- the move -------------------------------------------------------------------------------------------


def replaced(text: SystemText, places: Places) -> tuple[list[Splice], list[bytes]]:
    """Splices that put into each line's place what stands there in this run, and the lines as they are now: first those
    that are left out, each with one line end, then, after `NOW`, those whose older wording stays."""
    splices: list[Splice] = []
    out: list[int] = []
    older: list[bytes] = []
    for i in text.candidates:
        line, stands = text.lines[i], places[i]
        if stands is None:
            out.append(i)
        elif stands != line:
            splices.append((text.starts[i], text.starts[i] + len(line), stands))
            older.append(line)
    for run in _runs(out, text.last):
        start, stop = text.starts[run[0]], text.starts[run[-1]] + len(text.lines[run[-1]])
        # Without this a run at the end would leave an empty line behind.
        splices.append((start - 2, stop, b"") if run[-1] in text.last else (start, stop + 2, b""))
    lines = [text.lines[i] for i in out]
    return splices, [*lines, NOW, *older] if older else lines


def _runs(numbers: Sequence[int], last: frozenset[int]) -> list[list[int]]:
    """Lines that follow one another in one text."""
    runs: list[list[int]] = []
    for i in numbers:
        if runs and runs[-1][-1] == i - 1 and i - 1 not in last:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def appended(
    operation: Operation,
    facts: Facts,
    body: bytes,
    lines: Sequence[bytes],
    system_turn: bool,
    after: int | None = None,
) -> list[Splice] | None:
    """Splices that put the lines behind everything else; None if there is no place for them.

    `system_turn`: the provider takes a system message there, which nobody can mistake for the user's words. `after`: then
    it goes behind this segment, where it went in an earlier step.
    """
    name = "input" if operation is Operation.RESPONSES else "messages"
    span = facts.spans.members.get(name)
    segments = facts.segments
    if span is None or body[span[0] : span[0] + 1] != b"[":
        return None
    raw = segments[len(segments) - 1].raw.tobytes()
    message = blocks.read_message(raw)
    # Anthropic takes a system turn behind a user's only; elsewhere clients put reminders of their own at the end.
    if message.role not in ("user", "tool") and (operation is Operation.MESSAGES or not message.system):
        return None
    text = b"\\n".join(lines)
    if system_turn:
        end: int | None = span[1] - 1
        if after is not None:
            begin = blocks.offset_of(body, span, segments, after, _first_message(facts))
            end = None if begin is None else begin + len(segments[after].raw)
        turn = b',{"role":"%b","content":"%b"}' % (_SYSTEM_TURNS[operation], text)
        return None if end is None else [(end, end, turn)]
    text = b"<system-reminder>\\n%b\\n</system-reminder>" % text
    if message.role != "user" or operation is Operation.RESPONSES:
        return [(span[1] - 1, span[1] - 1, b',{"role":"user","content":"%b"}' % text)]
    content = blocks.content_of(raw)
    at = blocks.offset_of(body, span, segments, len(segments) - 1, _first_message(facts))
    if content is None or at is None:
        return None
    start, end = at + content[0], at + content[1]
    block = b'{"type":"text","text":"%b"}' % text
    if body[start : start + 1] == b'"':
        return [(start, start, b'[{"type":"text","text":'), (end, end, b"},%b]" % block)]
    if body[start : start + 1] != b"[" or not body[start + 1 : end - 1].strip():
        return None
    return [(end - 1, end - 1, b"," + block)]


def merged(marks: list[Splice], tail: Sequence[Splice]) -> list[Splice]:
    """Both on one string: its mark is inside of the first block, the moved lines are the second."""
    if len(tail) != 2:
        return [*marks, *tail]
    (start, _, opening), (end, _, closing) = tail
    kept = [s for s in marks if s[0] not in (start, end) or s[0] != s[1]]
    mark = next((s[2] for s in marks if s[0] == s[1] == end), None)
    inside = b"" if mark is None else mark.removesuffix(b"}]")
    return [*kept, (start, start, opening), (end, end, inside + closing)]


# --- where the system prompt is -------------------------------------------------------------------------


def system_texts(operation: Operation, facts: Facts, body: bytes) -> list[Span]:
    """The texts of the system prompt in their order: what is between the quotes of each."""
    members = facts.spans.members
    found: list[Span] = []
    name = "instructions" if operation is Operation.RESPONSES else "system"
    if operation is not Operation.CHAT and name in members:
        found += _texts(body, members[name])
    if operation is Operation.MESSAGES:
        return found
    span = members["input" if operation is Operation.RESPONSES else "messages"]
    segments = facts.segments
    first = _first_message(facts)
    if body[span[0] : span[0] + 1] != b"[":
        return found
    for i in range(first, len(segments)):
        raw = segments[i].raw.tobytes()
        content = blocks.content_of(raw)
        if content is None or not blocks.read_message(raw).system:
            break
        at = blocks.offset_of(body, span, segments, i, first)
        if at is not None:
            found += [(at + s, at + e) for s, e in _texts(raw, content)]
    return found


def _first_message(facts: Facts) -> int:
    segments = facts.segments
    return sum(segments[i].kind != "message" for i in range(min(2, len(segments))))


def _texts(raw: bytes, content: Span) -> list[Span]:
    start, end = content
    if raw[start : start + 1] == b'"':
        return [(start + 1, end - 1)]
    found = []
    if raw[start : start + 1] == b"[":
        for at, block in blocks.items_of(raw, content):
            inside = blocks.text_of_block(block)
            if inside is not None:
                found.append((at + inside[0] + 1, at + inside[1] - 1))
    return found
