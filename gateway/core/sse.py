"""Server-sent events as bytes: whole events in, whole events out, nothing decoded that is not asked for.

Follows the WHATWG HTML standard, "Server-sent events" (2026-11): lines end in LF, CRLF or CR, an event ends
at an empty line, a leading byte order mark is ignored.
"""

from __future__ import annotations

import re

from gateway.core.errors import UpstreamMalformed

#: An event above this is refused; nothing that is streamed for reading is near it.
MAX_EVENT_BYTES = 1 << 20

#: End of an event. A CR that is the last byte so far may be half of a CRLF, so it does not end anything yet.
_END = re.compile(rb"(?:\r\n|\n|\r(?=[^\n]))(?:\r\n|\n|\r(?=[^\n]))")
_FINAL_END = re.compile(rb"(?:\r\n|\n|\r)(?:\r\n|\n|\r)\Z")
_BOM = b"\xef\xbb\xbf"


class SseSplitter:
    """Cuts a byte stream into events. Which events come out does not depend on how the bytes were cut."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are complete now, each with the empty line that ends it, byte-identical.

        A stream with bare CRs gets each event when the next begins. Raises UpstreamMalformed above 1 MiB.
        """
        if not self._held and b"\r" not in data:
            end = data.find(b"\n\n") + 2
            if end == len(data) != 1:
                return [_bounded(data)]
        held, seen = self._held, len(self._held)
        text = held + data if held else data
        events: list[bytes] = []
        start = 0
        # An end that was not complete before may begin up to three bytes before the new ones.
        search_from = max(0, seen - 3)
        while (match := _END.search(text, max(start, search_from))) is not None:
            events.append(_bounded(text[start : match.end()]))
            start = match.end()
        self._held = _bounded(text[start:])
        return events

    def rest(self) -> bytes:
        """What came after the last complete event."""
        return self._held

    def end(self) -> bytes:
        """The last event, if only the end of the stream shows that it is complete (it ends in CR), else b""."""
        if _FINAL_END.search(self._held) is None:
            return b""
        event, self._held = self._held, b""
        return event


def _bounded(event: bytes) -> bytes:
    if len(event) > MAX_EVENT_BYTES:
        raise UpstreamMalformed("The model provider sent an event of more than 1 MiB.")
    return event


def event_data(event: bytes) -> tuple[str, bytes]:
    """(event name, data) of a whole event; the name is "" if not given, data lines are joined by LF."""
    if event.startswith(b"data: ") and event.endswith(b"\n\n") and b"\r" not in event:
        data = event[6:-2]
        if b"\n" not in data:
            return "", data
    name, lines = "", []
    for line in event.removeprefix(_BOM).splitlines():
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            lines.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace")
    return name, b"\n".join(lines)
