"""A provider on a bare socket: the test reads what came and says every byte of what goes back."""

from __future__ import annotations

import asyncio
import functools
import inspect
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType

import pytest
import uvloop

from gateway.upstream.wire import WireAnswer, WireClient
from gateway.upstream.wire_pool import Origin
from gateway.upstream.wire_protocol import TimeLimits

LIMITS = TimeLimits(connect_s=2, write_s=2, first_byte_s=2, silence_s=2, total_s=10)


def on_both_loops(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Run the test on asyncio's own loop and on uvloop; a fault in a protocol's callback fails it."""

    @pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["own", "uv"])
    def run(new_loop: Callable[[], asyncio.AbstractEventLoop], **fixtures: object) -> None:
        faults: list[dict[str, object]] = []
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.get_loop().set_exception_handler(lambda _loop, context: faults.append(context))
            runner.run(_within(test(**fixtures)))
        assert faults == []

    functools.update_wrapper(run, test)
    own = inspect.Parameter("new_loop", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = inspect.Signature([own, *inspect.signature(test).parameters.values()])  # type: ignore[attr-defined]
    return run


async def _within(test: Awaitable[None]) -> None:
    async with asyncio.timeout(20):
        await test


class Peer:
    """The provider's end of one connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def request(self) -> tuple[bytes, bytes]:
        """(head, body) of the next request."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return head, await self._reader.readexactly(length)

    async def read(self, count: int) -> bytes:
        return await self._reader.readexactly(count)

    async def say(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()

    async def spell(self, said: bytes) -> None:
        """Byte by byte, the other side running in between."""
        for at in range(len(said)):
            await self.say(said[at : at + 1])
            await asyncio.sleep(0)

    def finish(self) -> None:
        """An orderly end (FIN) after what was said."""
        self._writer.close()

    def reset(self) -> None:
        """RST."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    async def gone(self) -> None:
        """Until the client has closed its end: at once, not when some time-out of `LIMITS` would make it."""
        try:
            async with asyncio.timeout(1):
                while await self._reader.read(1 << 16):
                    pass
        except ConnectionError:
            pass


class RawServer:
    """`async with RawServer() as server:` listens at `server.origin`; `await server.peer()` is the next connection."""

    def __init__(self, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> None:
        self._tls = tls
        self._host = host
        self._peers: asyncio.Queue[Peer] = asyncio.Queue()
        self._all: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None
        self.origin = Origin(host, 0, tls is not None)
        self.accepted = 0

    async def __aenter__(self) -> RawServer:
        self._server = await asyncio.start_server(self._serve, self._host, 0, ssl=self._tls)
        self.origin = replace(self.origin, port=self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for writer in self._all:
            writer.transport.abort()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._all.append(writer)
        self._peers.put_nowait(Peer(reader, writer))

    async def peer(self) -> Peer:
        return await self._peers.get()


class Called:
    """A client, a server, and one call at a time between them."""

    def __init__(self, client: WireClient, server: RawServer) -> None:
        self.client = client
        self.server = server

    def post(
        self, limits: TimeLimits = LIMITS, body: Sequence[bytes | memoryview] = (b"{}",)
    ) -> asyncio.Task[WireAnswer]:
        size = sum(map(len, body))
        head = b"POST /v1/x HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n" % size
        return asyncio.ensure_future(self.client.post(self.server.origin, head, body, limits))

    async def asked(self, limits: TimeLimits = LIMITS) -> tuple[asyncio.Task[WireAnswer], Peer]:
        """A call on a connection of its own that the provider has read."""
        call = self.post(limits)
        peer = await self.server.peer()
        await peer.request()
        return call, peer


@asynccontextmanager
async def calling(
    server: RawServer | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Called]:
    client = WireClient(tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    async with server or RawServer() as listening:
        client.start()
        try:
            yield Called(client, listening)
        finally:
            await client.stop()
