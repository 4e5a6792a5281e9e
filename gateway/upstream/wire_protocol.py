"""One HTTP/1.1 connection to a provider: one request at a time, its answer buffered as it comes.

llhttp (through httptools) decides where an answer ends. This file decides everything else: what is too much,
what takes too long, and whether a connection that ends has ended an answer or cut it.
"""

from __future__ import annotations

import asyncio
import math
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import httptools

from gateway.core.errors import UpstreamError, UpstreamLost, UpstreamMalformed, UpstreamTimeout
from gateway.upstream.wire_message import headers_of, runs

#: Head of an answer, or bytes in a row that bring no body (interim answers, chunk extensions, trailers).
HEAD_BYTES_MAX = 64 << 10
#: Reading pauses above this; whoever reads takes everything, so it goes on from an empty buffer.
BUFFERED_BYTES_MAX = 256 << 10
#: A request up to this size is one write.
ONE_WRITE_BYTES_MAX = 64 << 10
#: Timers fire up to a loop's clock tick early.
TICK_S = 0.001

_PARSER_ERRORS = (httptools.HttpParserError, httptools.HttpParserUpgrade)


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds for each part of an exchange; `first_byte_s` counts from the written request to the whole head."""

    connect_s: float
    write_s: float
    first_byte_s: float
    silence_s: float  # between bytes of the body
    total_s: float


_NO_LIMITS = TimeLimits(math.inf, math.inf, math.inf, math.inf, math.inf)


class _Refused(Exception):
    """Raised inside of the parser to stop it; says what is wrong with the answer."""


class Connection(asyncio.Protocol):
    """`send` a request, then `more` until it returns b"". Between two exchanges call `rest`; `abort` at any time.

    At most one coroutine may wait at a time. `on_lost` is called once, when the connection is gone.
    """

    __slots__ = (
        "_answering",
        "_barren",
        "_buffered",
        "_deadline_s",
        "_head_size",
        "_interim",
        "_keep_alive",
        "_limits",
        "_lines",
        "_loop",
        "_lost",
        "_on_lost",
        "_parser",
        "_parts",
        "_poll",
        "_reading_paused",
        "_timer",
        "_timer_at_s",
        "_total_at_s",
        "_transport",
        "_until_eof",
        "_waiter",
        "_writing",
        "_writing_paused",
        "busy",
        "done",
        "fault",
        "headers",
        "idle_since_s",
        "status",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, on_lost: Callable[[Connection], None]) -> None:
        self._loop = loop
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._poll = select.poll()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s = 0.0
        self._deadline_s = math.inf
        self._total_at_s = math.inf
        self._limits = _NO_LIMITS
        self._waiter: asyncio.Future[None] | None = None
        self._lost = False
        self._reading_paused = False
        self._writing_paused = False
        self.idle_since_s = 0.0
        self.busy = False
        self._begin()

    def _begin(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}  # lower-case names; repeated ones are joined by ", "
        self.done = False
        self.fault: UpstreamError | None = None
        self._parts: list[bytes] = []
        self._buffered = 0
        self._lines: list[bytes] = []
        self._head_size = 0
        self._barren = 0  # bytes since the last ones of the body
        self._answering = False  # the head is complete
        self._interim = False
        self._until_eof = False
        self._keep_alive = False
        self._writing = False

    # --- for the one who asks ----------------------------------------------------------------------

    async def send(self, head: bytes, body: Sequence[bytes | memoryview], limits: TimeLimits) -> None:
        """Write the request, wait for the answer's head. Raises what went wrong, always an `UpstreamError`."""
        transport = self._transport
        if transport is None or self.busy:
            raise RuntimeError("send on a connection that is not free")
        self._begin()
        self.busy = True
        self._limits = limits
        now_s = self._loop.time()
        self._total_at_s = now_s + limits.total_s
        if len(head) + sum(map(len, body)) <= ONE_WRITE_BYTES_MAX:
            transport.write(b"".join((head, *body)))
        else:
            await self._write_large(transport, head, body)
            now_s = self._loop.time()
        if not self._answering:
            self._arm(now_s + limits.first_byte_s)
        elif not self.done:
            self._arm(now_s + limits.silence_s)
        while not self._answering:
            if self.fault is not None:
                raise self.fault
            await self._wait()

    async def _write_large(
        self, transport: asyncio.Transport, head: bytes, body: Sequence[bytes | memoryview]
    ) -> None:
        self._writing = True
        self._arm(self._loop.time() + self._limits.write_s)
        for run in runs(head, body):
            transport.write(run)
            while self._writing_paused and not self._unwanted():
                await self._wait()
            if self._unwanted():
                self._keep_alive = False
                break
        self._writing = False

    def _unwanted(self) -> bool:
        """The provider does not read the rest of the request: it is gone, or has answered or refused already."""
        return self.fault is not None or self.done or self.status >= 300

    def whole(self) -> bytes | None:
        """The whole body, if all of it has arrived in one piece and nobody has taken it; else None."""
        if not self.done or len(self._parts) != 1:
            return None
        self._buffered = 0
        return self._parts.pop()

    async def more(self) -> bytes:
        """All body bytes received so far, at least one; b"" at the end. Raises how the answer was cut."""
        while not self._parts:
            if self.done:
                return b""
            if self.fault is not None:
                raise self.fault
            await self._wait()
        parts = self._parts
        self._parts = []
        self._buffered = 0
        if self._reading_paused:
            self._resume()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def reusable(self) -> bool:
        """The answer has ended where its framing said and neither side wants to close."""
        return self.done and self._keep_alive and not self._lost and self._waiter is None

    @property
    def closed(self) -> bool:
        return self._lost or self._transport is None or self._transport.is_closing()

    def rest(self) -> None:
        """The exchange is over; another may begin."""
        self.busy = False
        self._parts = []
        if self._reading_paused:
            self._resume()
        self.idle_since_s = self._loop.time()

    @property
    def fresh(self) -> bool:
        """Idle, open, and nothing has come from the other side, also not in the kernel: no bytes, no end."""
        return not (self.closed or self._poll.poll(0))

    def abort(self) -> None:
        """Close at once; what is not yet written or read is dropped."""
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._waiter is not None:
            raise RuntimeError("two coroutines wait for one answer")
        waiter = self._waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # --- time --------------------------------------------------------------------------------------

    def _arm(self, deadline_s: float) -> None:
        """Time out at `deadline_s`. A timer that fires too early sets itself again: later ones cost nothing."""
        self._deadline_s = deadline_s = min(deadline_s, self._total_at_s)
        if self._timer is not None:
            if self._timer_at_s <= deadline_s:
                return
            self._timer.cancel()
        self._timer_at_s = deadline_s
        self._timer = self._loop.call_at(deadline_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._deadline_s == math.inf:
            return
        now_s = self._loop.time()
        if now_s + TICK_S < self._deadline_s:
            self._arm(self._deadline_s)
            return
        limits = self._limits
        if now_s + TICK_S >= self._total_at_s:
            said = f"the model provider's answer took longer than {limits.total_s:g} s"
        elif self._writing:
            said = f"the model provider did not take the request within {limits.write_s:g} s"
        elif not self._answering:
            said = f"no answer from the model provider within {limits.first_byte_s:g} s"
        else:
            said = "the model provider fell silent in the middle of its answer"
        self._fail(UpstreamTimeout(said, billed=None))

    # --- ends --------------------------------------------------------------------------------------

    def _fail(self, error: UpstreamError) -> None:
        self.abort()
        if self.busy and not self.done and self.fault is None:
            self.fault = error
            self._deadline_s = math.inf
            self._wake()

    def _fail_cut(self, why: Exception | None) -> None:
        cut = "the model provider cut the connection in the middle of its answer"
        lost = UpstreamLost(cut if self._answering else None)
        lost.__cause__ = why
        self._fail(lost)

    def _fail_malformed(self, why: str, cause: Exception | None) -> None:
        malformed = UpstreamMalformed(f"the model provider's answer {why}", billed=None)
        malformed.__cause__ = cause
        self._fail(malformed)

    def _complete(self) -> None:
        self.done = True
        self._deadline_s = math.inf

    # --- asyncio.Protocol --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # Both loops have set TCP_NODELAY.
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        if not self.busy or self.done or self.fault is not None:  # it may not become another one's answer
            self._keep_alive = False
            self.abort()
            return
        before = self._buffered
        try:
            self._parser.feed_data(data)
        except _PARSER_ERRORS as e:
            self._keep_alive = False
            why = e.__context__ if isinstance(e.__context__, _Refused) else "is not valid HTTP"
            self._fail_malformed(str(why), e)
            self._wake()
            return
        if self._buffered != before:
            self._barren = 0
        elif not self.done:
            self._barren += len(data)
            if self._barren > HEAD_BYTES_MAX:
                self._fail_malformed(_TOO_LARGE, None)
                return
        if self.done:
            self._wake()
        elif self._answering:
            if self._buffered > BUFFERED_BYTES_MAX:
                self._pause()
            elif not self._writing:
                self._arm(self._loop.time() + self._limits.silence_s)
            self._wake()

    def eof_received(self) -> None:
        """The other side ends in order. Only an answer without any framing may end like this."""
        if self._until_eof and not self.done:
            self._complete()
            self._wake()
        else:
            self._fail_cut(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._fail_cut(exc)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake()
        del self._parser  # it refers back to this object
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._wake()

    def _pause(self) -> None:
        """The reader is slow, which is no silence of the provider's: only the total time still counts."""
        if not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()
            if not self._writing:
                self._arm(self._total_at_s)

    def _resume(self) -> None:
        self._reading_paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
            if not self.done and not self._writing:
                self._arm(self._loop.time() + self._limits.silence_s)

    # --- httptools ---------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.done:
            raise _Refused("is followed by another one")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._lines += (name, value)

    def _taken_lines(self) -> list[bytes]:
        """Names and values since the last time, in turns; all heads and trailers of an answer have one limit."""
        lines, self._lines = self._lines, []
        self._head_size += sum(map(len, lines))
        if self._head_size > HEAD_BYTES_MAX:
            raise _Refused(_TOO_LARGE)
        return lines

    def on_headers_complete(self) -> None:
        lines = self._taken_lines()
        status = self._parser.get_status_code()
        if status < 200:
            if status < 100 or status == 101:
                raise _Refused(f"has the status {status}")
            self._interim = True
            return
        self.headers = headers_of(lines)
        coding = self.headers.get("transfer-encoding")
        length = self.headers.get("content-length")
        if coding is not None and (length is not None or coding.lower() != "chunked"):
            raise _Refused("is not framed in one known way")
        self.status = status
        self._answering = True
        self._until_eof = coding is None and length is None and status not in (204, 304)
        self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._buffered += len(body)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        else:
            if self._lines:  # trailers are dropped
                self._taken_lines()
            self._complete()


_TOO_LARGE = f"has more than {HEAD_BYTES_MAX >> 10} KiB of headers"
