"""A TCP proxy in front of Postgres that cuts a connection at its COMMIT, so that nobody hears what became of it."""

from __future__ import annotations

import asyncio
import socket
import struct
from enum import StrEnum
from types import TracebackType

#: A simple query, as asyncpg sends it: type, length, text.
_COMMIT = b"Q" + struct.pack(">i", 11) + b"COMMIT\0"
_PIECE_BYTES = 1 << 16


class Cut(StrEnum):
    LOST = "lost"  # the COMMIT does not arrive: it did not happen
    FORWARDED = "forwarded"  # it is sent on, and both sides are cut at once: it happened or not
    ANSWERED = "answered"  # it happened, and its answer is thrown away


class CommitCutter:
    """`async with CommitCutter(port) as proxy:` listens on `proxy.port`; `cut(how, times)` at the next COMMITs."""

    def __init__(self, postgres_port: int) -> None:
        self._postgres_port = postgres_port
        self.how = Cut.LOST
        self._times = 0
        self.done = 0
        self._server: asyncio.Server
        self._open: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> CommitCutter:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for writer in self._open:
            _reset(writer)
        if self._pumps:
            await asyncio.wait(self._pumps)

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def cut(self, how: Cut, times: int = 1) -> None:
        self.how, self._times = how, times

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._postgres_port)
        except OSError:
            _reset(writer)
            return
        both = (writer, server_writer)
        self._open.update(both)
        try:
            answers = asyncio.create_task(_pass_on(server_reader, writer))
            await self._pass_commits(reader, server_reader, server_writer, answers)
        except OSError:
            pass  # one side is gone, so the other goes too
        finally:
            answers.cancel()
            await asyncio.wait([answers])
            for end in both:
                _reset(end)
                self._open.discard(end)

    async def _pass_commits(
        self,
        client: asyncio.StreamReader,
        server_reader: asyncio.StreamReader,
        server: asyncio.StreamWriter,
        answers: asyncio.Task[None],
    ) -> None:
        """Returns when the connection is over, by itself or by a cut."""
        while piece := await client.read(_PIECE_BYTES):
            cut = self._times > 0 and _COMMIT in piece
            if cut:
                self._times -= 1
                self.done += 1
                if self.how is Cut.LOST:
                    return
                if self.how is Cut.ANSWERED:
                    answers.cancel()
                    await asyncio.wait([answers])
            server.write(piece)
            await server.drain()
            if cut:
                if self.how is Cut.ANSWERED:
                    await server_reader.read(_PIECE_BYTES)
                return


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
    except OSError:
        pass
    _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass  # closed already
    writer.transport.abort()
