"""A client that leaves when and how a test says: one HTTP/1.1 request on a socket of its own."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Mapping
from types import TracebackType
from urllib.parse import urlsplit

from gateway.core.sse import SseSplitter

_LITTLE_BYTES = 4_096


class RawClient:
    """`async with RawClient(url, key) as client:` connects; leaving the block closes whatever is left.

    `deaf`: nothing is read ahead, neither by the kernel nor here, so what the test does not read stays with the sender.
    """

    def __init__(self, url: str, key: str, *, deaf: bool = False) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 0)
        self._key = key
        self._deaf = deaf
        self._splitter = SseSplitter()
        self._events: list[bytes] = []
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    async def __aenter__(self) -> RawClient:
        sock = socket.socket()
        sock.setblocking(False)
        if self._deaf:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _LITTLE_BYTES)
        try:
            await asyncio.get_running_loop().sock_connect(sock, self._address)
        except BaseException:
            sock.close()
            raise
        self._reader, self._writer = await asyncio.open_connection(
            sock=sock, limit=_LITTLE_BYTES if self._deaf else 1 << 16
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.transport.abort()
        try:
            await self._writer.wait_closed()
        except OSError:
            pass  # it broke earlier, as the test meant it to

    async def post(self, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        lines = [f"POST {path} HTTP/1.1", "Host: gateway", f"Authorization: Bearer {self._key}"]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        await self._writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers (lower-case names)."""
        text = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = text.rstrip().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines)
        return int(first.split()[1]), {name.lower(): value for name, value in pairs}

    async def body(self, length: int) -> bytes:
        """A body of known length."""
        return await self._reader.readexactly(length)

    async def chunk(self) -> bytes:
        """The next chunk of the body, b"" at its end. Raises IncompleteReadError if it is cut."""
        size = int(await self._reader.readuntil(b"\r\n"), 16)
        return (await self._reader.readexactly(size + 2))[:-2]

    async def event(self) -> bytes | None:
        """The next whole event, None at the end of the stream."""
        while not self._events:
            chunk = await self.chunk()
            if not chunk:
                return None
            self._events += self._splitter.feed(chunk)
        return self._events.pop(0)

    async def ended(self) -> bool:
        """True once the other side has closed or reset the connection; waits for it, discarding what still comes."""
        try:
            while await self._reader.read(1 << 16):
                pass
        except ConnectionError:
            pass
        return True

    def reset(self) -> None:
        """Leave with a RST."""
        sock = self._writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def finish(self) -> None:
        """Leave with a FIN: nothing more will be sent."""
        self._writer.write_eof()
