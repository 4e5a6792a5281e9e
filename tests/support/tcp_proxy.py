"""A TCP proxy on loopback: what those that break networks and connections have in common."""

from __future__ import annotations

import asyncio
import socket
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import TracebackType
from typing import Self

PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two connections that a proxy has for each of its clients."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, piece: bytes) -> None:
        self.writer.write(piece)
        await self.writer.drain()

    def reset(self) -> None:
        """By a RST, also if it is closed already."""
        sock = self.writer.get_extra_info("socket")
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass
        self.writer.transport.abort()


class TcpProxy(ABC):
    """`async with` it: it listens on `port`. Both sides of a connection are reset when `carry` returns or fails."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._server: asyncio.Server
        self._connections: dict[asyncio.Task[None], list[Side]] = {}

    @abstractmethod
    async def carry(self, client: Side, server: Side) -> None:
        """Pass on what arrives until one side ends, and do to it what this proxy is for. May raise OSError."""

    def refuses(self) -> bool:
        """New connections are reset at once."""
        return False

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        if connections:
            await asyncio.wait(connections)

    @property
    def port(self) -> int:
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def reset_all(self) -> int:
        """How many connections there were."""
        for sides in self._connections.values():
            for side in sides:
                side.reset()
        return len(self._connections)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        sides = self._connections[task] = [Side(reader, writer)]
        try:
            if self.refuses():
                return
            sides.append(Side(*await asyncio.open_connection("127.0.0.1", self._to_port)))
            await self.carry(*sides)
        except* (OSError, asyncio.CancelledError):
            pass  # one side is gone, so the other goes too; and asyncio's streams cannot take a task that was cancelled
        finally:
            for side in sides:
                side.reset()
            del self._connections[task]
