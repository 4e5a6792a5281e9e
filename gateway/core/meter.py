"""Reads a stream on its way through: usage, finish, errors and output so far; forwards it unchanged.

Two things are changed, and only when asked: the usage chunk that the client did not ask for is taken out,
and the request's cost is added to the usage object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gateway.core.catalog import Operation
from gateway.core.dialects import ABORT, EventFacts, Reading, aborted, event_reader, read_usage
from gateway.core.dialects.anthropic_messages import merge_usage
from gateway.core.dialects.splice import insert_cost
from gateway.core.errors import GatewayError
from gateway.core.sse import SseSplitter, event_data


class StreamMeter:
    """One stream's meter. Its facts do not depend on how the bytes were cut into reads.

    `price` gives the cost in dollars as text for `usage.cost`, or None to leave the usage object alone.
    `output_bytes` counts UTF-8 bytes of text, reasoning, tool names and arguments as they came decoded: exact
    for what providers stream as deltas; a final repetition of the whole text is not counted again.
    """

    def __init__(
        self, operation: Operation, *, hide_usage: bool, price: Callable[[Reading], str | None]
    ) -> None:
        self._operation = operation
        self._read_event = event_reader(operation)
        self._hide_usage = hide_usage
        self._price = price
        self._splitter = SseSplitter()
        self._usage: Mapping[str, Any] | None = None
        self._service_tier = ""
        self.usage_events: tuple[bytes, bytes] = (b"", b"")  # the first and the last that have usage
        self._told = False  # usage came where the dialect reports the final one
        self.reading: Reading | None = None
        self.finish = ""
        self.response_id = ""
        self.model = ""
        self.complete = False
        self.aborted = (
            False  # the server has broken it off: neither its word of that nor what follows is forwarded
        )
        self.error: GatewayError | None = None
        self.events = 0  # that say something: no keep-alives
        self.output_events = 0
        self.output_bytes = 0

    @property
    def first_output(self) -> bool:
        """Generated output has come."""
        return self.output_events > 0

    @property
    def final(self) -> bool:
        """The usage is valid and all that will be billed, even if the stream ends before its last events.

        A messages stream that never reports its output has only the input of its first event, which is not final.
        """
        if self._told:
            return self._valid() and (self.complete or self.finish != "")
        return self._valid() and self.complete and not self._operation.anthropic

    def feed(self, data: bytes) -> bytes:
        """Whole events to forward now. Raises UpstreamMalformed for an event above 1 MiB."""
        events = self._splitter.feed(data)
        if len(events) == 1:
            return self._event(events[0])
        return b"".join(map(self._event, events))

    def end(self) -> bytes:
        """The upstream has ended: what may still be forwarded.

        An event that is cut off is not, but usage that can be read from it counts. A `[DONE]` without its
        empty line gets one.
        """
        last = self._splitter.end()
        if last:
            return self._event(last)
        name, data = event_data(self._splitter.rest())
        if data == b"[DONE]" and self._operation is Operation.CHAT:
            self.complete = True
            self.aborted = self.aborted or self._unfinished()
            return b"" if self.aborted else b"data: [DONE]\n\n"
        facts = self._read_event(name, data) if data else None
        if facts is not None and facts.usage is not None:
            self._take_usage(facts)
        if self._operation is Operation.CHAT and self.finish and self._valid():
            self.complete = True
        return b""

    def _event(self, event: bytes) -> bytes:
        name, data = event_data(event)
        if not data or name == "ping":  # a comment, a bare name, or Anthropic's keep-alive
            return event
        self.events += 1
        facts = self._read_event(name, data)
        if facts is None:
            return event
        if facts.output_bytes:
            self.output_events += 1
            self.output_bytes += facts.output_bytes
        if facts.usage is not None:
            self._take_usage(facts)
            self.usage_events = (self.usage_events[0] or data, data)
        self.complete = self.complete or facts.terminal
        self.finish = facts.finish or self.finish
        self.response_id = self.response_id or facts.response_id
        self.model = self.model or facts.model
        self.error = self.error or facts.error
        if self.finish == ABORT or (facts.terminal and not self.finish and self._unfinished()):
            self.aborted = True
            return b""
        if self._hide_usage and facts.usage_only:
            return b""
        return self._priced(event, data) if facts.priced else event

    def _take_usage(self, facts: EventFacts) -> None:
        """The last report wins; messages streams report in parts."""
        assert facts.usage is not None
        usage = facts.usage
        if self._operation.anthropic and self._usage is not None:
            usage = merge_usage(self._usage, usage)
        self._usage = usage
        self._told = self._told or facts.priced
        self._service_tier = facts.service_tier or self._service_tier
        self.reading = read_usage(self._operation, usage, self._service_tier)

    def _unfinished(self) -> bool:
        """At its end: no reason for it was given, and there must be one."""
        if self.error is not None or (self._operation.anthropic and not self._told):
            return False
        silent = self._operation is Operation.CHAT and not self.first_output
        return aborted(self._operation, self.finish, silent=silent)

    def _valid(self) -> bool:
        return self.reading is not None and not self.reading.problem

    def _priced(self, event: bytes, data: bytes) -> bytes:
        """`event` with the cost in its usage object; as it is if there is no price or its data is in pieces."""
        if self.reading is None or (cost := self._price(self.reading)) is None:
            return event
        at = event.find(data)
        if at < 0:
            return event
        path = ("response", "usage") if self._operation is Operation.RESPONSES else ("usage",)
        return b"".join((event[:at], insert_cost(data, path, cost), event[at + len(data) :]))


def error_event(operation: Operation, code: str, kind: str, message: str) -> bytes:
    """The event that tells a client that its stream broke, in its dialect. No clean end follows it."""
    if operation.anthropic:
        return _event_of("error", {"type": "error", "error": {"type": kind, "message": message}})
    if operation is Operation.RESPONSES:
        return _event_of("error", {"type": "error", "code": code, "message": message, "param": None})
    return _event_of("", {"error": {"message": message, "type": kind, "param": None, "code": code}})


def _event_of(name: str, body: object) -> bytes:
    head = b"event: %b\n" % name.encode() if name else b""
    return b"%bdata: %b\n\n" % (head, msgspec.json.encode(body))


def ping(operation: Operation) -> bytes:
    """A keep-alive: a comment, but an event for messages, whose clients' idle timers count events."""
    if operation.anthropic:
        return b'event: ping\ndata: {"type":"ping"}\n\n'
    return b": keep-alive\n\n"
