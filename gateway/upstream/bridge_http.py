"""The one seam through which litellm reaches the network: every request belongs to one Exchange.

litellm repeats requests on its own (`AsyncHTTPHandler.post` once more after a reset connection, redirects, agent
loops, cache objects, context compaction: litellm 1.106.6, read 2026-11). Each repetition could bill
outside of the attempt's hold, so an Exchange carries exactly one request and refuses any other. It also keeps
the facts that litellm's exceptions lose: whether anything was sent, the provider's status, headers and error body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass

import httpx

from gateway import __version__
from gateway.core.catalog import Provider
from gateway.core.errors import (
    UpstreamError,
    UpstreamLost,
    UpstreamMalformed,
    UpstreamTimeout,
    UpstreamUnreachable,
)

ERROR_BODY_LIMIT = 256 * 1024
BODY_LIMIT = 64 * 1024 * 1024
WRITE_TIMEOUT_S = 30.0
REQUEST_ID_HEADERS = (
    "x-request-id",
    "request-id",
    "x-amzn-requestid",
    "apim-request-id",
    "x-goog-request-id",
)
#: Shorter than the idle time of common servers (uvicorn closes at 5 s), so that a pooled connection is rarely stale.
KEEPALIVE_S = 4.0

#: The exchange of the call that runs in this context.
current: ContextVar[Exchange] = ContextVar("exchange")


class Stopped(Exception):
    """Raised through litellm; the reason is in `Exchange.failure`. Not an httpx error: those litellm retries."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. `total` counts from the exchange's start, the others from their own beginning."""

    connect: float
    first_byte: float
    idle: float
    total: float

    @classmethod
    def of(cls, provider: Provider, slow: bool) -> Timeouts:
        first_byte, idle = provider.first_byte_timeout_s, provider.idle_timeout_s
        if slow:
            first_byte = provider.slow_first_byte_timeout_s
            idle = max(idle, first_byte)
        idle = min(idle, provider.event_idle_timeout_s)
        return cls(provider.connect_timeout_s, first_byte, idle, provider.total_timeout_s)


class Exchange:
    """One request to a provider and its answer, with what is known about them at any moment."""

    def __init__(
        self,
        pool: httpx.AsyncBaseTransport,
        timeouts: Timeouts,
        attempt_id: str,
        end_marks: tuple[bytes, ...] = (),
    ) -> None:
        self._pool = pool
        self._attempt_id = attempt_id
        self._timeouts = timeouts
        self._deadline = asyncio.get_running_loop().time() + timeouts.total
        self._response: httpx.Response | None = None
        self.sent = False
        self.status = 0
        self.headers: Mapping[str, str] = {}
        self.error_body = b""
        self._end_marks = end_marks
        #: the body has shown one of `end_marks`, or none was asked for
        self.ended = not end_marks
        #: why the exchange ended early; takes precedence over whatever litellm makes of it
        self.failure: UpstreamError | None = None

    @property
    def request_id(self) -> str | None:
        """The provider's own id of the request."""
        return next((self.headers[n] for n in REQUEST_ID_HEADERS if n in self.headers), None)

    @property
    def total_s(self) -> float:
        return self._timeouts.total

    def _within(self, seconds: float) -> asyncio.Timeout:
        return asyncio.timeout_at(min(asyncio.get_running_loop().time() + seconds, self._deadline))

    def _stop(self, failure: UpstreamError) -> Stopped:
        self.failure = self.failure or failure
        return Stopped(failure.message)

    async def carry(self, request: httpx.Request) -> httpx.Response:
        if self.sent:
            # Not a failure of the first request: its own outcome stands, only the repetition is refused.
            raise Stopped("one call is one request")
        self.sent = True
        try:
            async with self._within(self._timeouts.first_byte):
                response = await self._pool.handle_async_request(self._outgoing(request))
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout):
            raise self._stop(UpstreamUnreachable(billed=False)) from None
        except (TimeoutError, httpx.TimeoutException):
            raise self._stop(UpstreamTimeout()) from None
        except httpx.TransportError:
            raise self._stop(UpstreamLost()) from None
        self._response = response
        self.status = response.status_code
        self.headers = {k.lower(): v for k, v in response.headers.items()}
        body = _Body(self, response)
        if self.status >= 400:
            self.error_body = await body.start(ERROR_BODY_LIMIT)
            await self.close()
            return httpx.Response(
                self.status, headers=response.headers, content=self.error_body, request=request
            )
        return httpx.Response(
            self.status,
            headers=response.headers,
            stream=body,
            extensions=response.extensions,
            request=request,
        )

    def _outgoing(self, request: httpx.Request) -> httpx.Request:
        """What is really sent; the OpenAI SDK reads its own headers back from the request that it made."""
        headers = [(k, v) for k, v in request.headers.raw if not k.lower().startswith(b"x-stainless-")]
        out = httpx.Headers(headers)
        # Error bodies are read raw, so they must not arrive compressed.
        out["accept-encoding"] = "identity"
        out["user-agent"] = f"tollhouse/{__version__}"
        out["x-client-request-id"] = self._attempt_id
        connect = self._timeouts.connect
        timeout = {"connect": connect, "pool": connect, "write": WRITE_TIMEOUT_S, "read": None}
        extensions = {**request.extensions, "timeout": timeout}
        return httpx.Request(
            request.method, request.url, headers=out, stream=request.stream, extensions=extensions
        )

    def _watch(self, tail: bytes, piece: bytes) -> bytes:
        """Look for an end mark, also across two pieces; returns the tail to look at next time."""
        if self.ended:
            return b""
        seen = tail + piece
        self.ended = any(mark in seen for mark in self._end_marks)
        return seen[-max(map(len, self._end_marks)) :]

    async def close(self) -> None:
        """Gives the connection back if the body was read to its end, else drops it. Harmless when repeated."""
        response, self._response = self._response, None
        if response is not None:
            await response.aclose()


class _Body(httpx.AsyncByteStream):
    """The answer's body under the idle and total time-outs."""

    def __init__(self, exchange: Exchange, response: httpx.Response) -> None:
        self._exchange = exchange
        self._response = response

    async def start(self, limit: int) -> bytes:
        """At most `limit` bytes, for an error body: a body that breaks off is still that error."""
        got = bytearray()
        try:
            async for chunk in self:
                got += chunk
                if len(got) >= limit:
                    break
        except Stopped:
            self._exchange.failure = None
        return bytes(got[:limit])

    async def __aiter__(self) -> AsyncIterator[bytes]:
        exchange = self._exchange
        stream = self._response.stream
        assert isinstance(stream, httpx.AsyncByteStream)
        pieces = stream.__aiter__()
        size, tail = 0, b""
        while True:
            try:
                async with exchange._within(exchange._timeouts.idle):
                    piece = await anext(pieces)
            except StopAsyncIteration:
                return
            except (TimeoutError, httpx.TimeoutException):
                raise exchange._stop(UpstreamTimeout()) from None
            except httpx.TransportError:
                raise exchange._stop(UpstreamLost()) from None
            size += len(piece)
            tail = exchange._watch(tail, piece)
            if size > BODY_LIMIT:
                raise exchange._stop(UpstreamMalformed(f"the answer is larger than {BODY_LIMIT} bytes"))
            yield piece

    async def aclose(self) -> None:
        await self._exchange.close()


class Seam(httpx.AsyncBaseTransport):
    """What litellm is given as its transport. It owns no connections, so closing litellm's clients harms nothing."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        exchange = current.get(None)
        if exchange is None:
            raise Stopped("litellm may reach the network only within a call")
        return await exchange.carry(request)
