"""A lean HTTP/1.1 client for calls to providers: POST, a body in pieces, an answer as it comes. Nothing else.

No redirects (a 3xx is an answer like any other), no cookies, no retries: every attempt must be one that the
ledger knows. aiohttp's client, which does more, costs about seven times the CPU for a small call; it remains where a
call is not on the hot path.

    wire.py            one exchange: `WireClient.post` -> `WireAnswer`
    wire_pool.py       which connection carries it
    wire_protocol.py   bytes, framing, time-outs, back-pressure
    wire_message.py    pieces of a request
"""

from __future__ import annotations

import asyncio
import ssl
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence

from gateway.core.errors import UpstreamMalformed
from gateway.ports import Unsent
from gateway.upstream.wire_pool import Origin, Pool
from gateway.upstream.wire_protocol import Connection, TimeLimits

#: At most this much is inflated at a time: a small compressed piece may hold a thousand times its size.
INFLATED_BYTES_MAX = 256 << 10


class WireClient:
    """Between `start` and `stop`, in one event loop."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._pool: Pool | None = None

    def start(self) -> None:
        if self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        self._pool = Pool(self._tls)

    async def stop(self) -> None:
        """Close idle connections and abort all calls."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.stop()

    def forget(self, origin: Origin) -> None:
        """Nobody will be called there any more: close what is idle, and what is in use when it is given back."""
        if self._pool is not None:
            self._pool.forget(origin)

    async def post(
        self, origin: Origin, head: bytes, body: Sequence[bytes | memoryview], limits: TimeLimits
    ) -> WireAnswer:
        """Send a whole request head and the body it announces, wait for the head of the answer.

        Raises `UpstreamUnreachable` (billed=False: nothing was sent), else `UpstreamLost`, `UpstreamTimeout` or
        `UpstreamMalformed` (billed=None: it may have been served). A kept connection that dies before it
        answers is a lost answer too: whether the provider had read the request cannot be known. Cancelled before
        there was a connection, it raises `Unsent`.
        """
        pool = self._pool
        if pool is None:
            raise RuntimeError("WireClient.post before start")
        connection = pool.take(origin)
        if connection is None:
            try:
                connection = await pool.connect(origin, limits.connect_s)
            except asyncio.CancelledError:
                raise Unsent from None
        try:
            await connection.send(head, body, limits)
        except BaseException:
            connection.abort()
            raise
        return WireAnswer(connection, origin, pool)


class WireAnswer:
    """`ports.UpstreamAnswer`, and its own iterator over the body: who continues it continues where it stopped."""

    __slots__ = ("_connection", "_inflate", "_origin", "_pool", "headers", "status")

    def __init__(self, connection: Connection, origin: Origin, pool: Pool) -> None:
        self._connection: Connection | None = connection
        self._origin = origin
        self._pool = pool
        self.status = connection.status
        self.headers: Mapping[str, str] = connection.headers
        coding = connection.headers.get("content-encoding")
        self._inflate = (
            None if coding is None or coding.lower() in ("", "identity") else _Inflate(coding.lower())
        )

    async def read(self, limit: int) -> bytes:
        if self._inflate is None and self._connection is not None:
            body = self._connection.whole()  # most answers are small and here already
            if body is not None:
                if len(body) > limit:
                    raise _larger(limit)
                return body
        parts: list[bytes] = []
        size = 0
        while part := await self._next():
            size += len(part)
            if size > limit:
                raise _larger(limit)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def chunks(self) -> AsyncIterator[bytes]:
        """May be abandoned and called again: it goes on where the last one stopped."""
        return self

    def __aiter__(self) -> WireAnswer:
        return self

    async def __anext__(self) -> bytes:
        data = await self._next()
        if not data:
            raise StopAsyncIteration
        return data

    async def _next(self) -> bytes:
        connection = self._connection
        if connection is None:
            raise RuntimeError("read of a closed answer")
        inflate = self._inflate
        if inflate is None:
            return await connection.more()
        while not (data := inflate.take()):
            packed = await connection.more()
            if not packed:
                inflate.end()
                return b""
            inflate.feed(packed)
        return data

    async def close(self) -> None:
        """Give the connection back if the whole body has arrived, else abort it: the provider stops at once."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._pool.give(self._origin, connection)


def _larger(limit: int) -> UpstreamMalformed:
    return UpstreamMalformed(f"the model provider's answer is larger than {limit} bytes")


class _Inflate:
    """A compressed body, although we asked for none. Raises `UpstreamMalformed` if it cannot be read."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._packed = b""
        self._full = False  # the last piece filled its bound: there may be more without more input
        self._zlib: zlib._Decompress | None = None

    def feed(self, packed: bytes) -> None:
        if self._zlib is None:
            self._zlib = zlib.decompressobj(self._window(packed))
        self._packed += packed

    def _window(self, packed: bytes) -> int:
        if self._coding in ("gzip", "x-gzip"):
            return 16 + zlib.MAX_WBITS
        if (
            self._coding == "deflate"
        ):  # with zlib's header, as the standard says, or without, as some servers do
            return zlib.MAX_WBITS if packed[0] & 0x0F == 8 else -zlib.MAX_WBITS
        raise UpstreamMalformed("the model provider compressed its answer in a way that was not asked for")

    def take(self) -> bytes:
        """Up to `INFLATED_BYTES_MAX`; b"" if more input is needed."""
        data = b""
        try:
            while self._zlib is not None and (self._packed or self._full) and not data:
                if self._zlib.eof:  # gzip allows several members one after the other
                    self._zlib = zlib.decompressobj(16 + zlib.MAX_WBITS)
                data = self._zlib.decompress(self._packed, INFLATED_BYTES_MAX)
                self._packed = self._zlib.unused_data if self._zlib.eof else self._zlib.unconsumed_tail
                self._full = len(data) == INFLATED_BYTES_MAX and not self._zlib.eof
        except zlib.error as e:
            raise UpstreamMalformed("the model provider's answer is not validly compressed") from e
        return data

    def end(self) -> None:
        if self._zlib is not None and not self._zlib.eof:
            raise UpstreamMalformed("the model provider's compressed answer breaks off")
