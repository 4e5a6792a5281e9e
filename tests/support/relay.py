"""A TCP relay on loopback that can be a broken network: it cuts connections, or goes silent and holds what is sent."""

from __future__ import annotations

import asyncio
import socket
import struct
from enum import StrEnum
from types import TracebackType

_PIECE_BYTES = 1 << 16


class Break(StrEnum):
    CUT = "cut"  # connections are reset, and new ones too
    SILENT = "silent"  # nothing arrives in either direction, and nobody is told; what was sent arrives when it is mended


class Relay:
    """`async with Relay(port) as relay:` listens on `relay.port`; `break_` it, and `mend` it."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._whole = asyncio.Event()
        self._whole.set()
        self._refuses = False
        self.cut = 0  # connections that were reset
        self.held = 0  # pieces that had to wait
        self._server: asyncio.Server
        self._open: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        self.mend()
        self._reset_all()
        if self._pumps:
            await asyncio.wait(self._pumps)

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def break_(self, how: Break) -> None:
        if how is Break.SILENT:
            self._whole.clear()
            return
        self._refuses = True
        self.cut += len(self._open) // 2
        self._reset_all()

    def mend(self) -> None:
        self._refuses = False
        self._whole.set()

    def _reset_all(self) -> None:
        for writer in self._open:
            _reset(writer)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)
        both = [writer]
        try:
            if self._refuses:
                return
            there_reader, there = await asyncio.open_connection("127.0.0.1", self._to_port)
            both.append(there)
            self._open.update(both)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, there))
                group.create_task(self._pass_on(there_reader, writer))
        except* OSError:
            pass  # one side is gone, so the other goes too
        finally:
            for end in both:
                _reset(end)
                self._open.discard(end)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Raises ConnectionError when its side ends."""
        while piece := await reader.read(_PIECE_BYTES):
            self.held += not self._whole.is_set()
            await self._whole.wait()
            writer.write(piece)
            await writer.drain()
        await self._whole.wait()  # that it has ended does not arrive either
        raise ConnectionResetError


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    except OSError:
        pass  # closed already
    writer.transport.abort()
