"""A TCP relay on loopback that can be a broken network: it cuts connections, or goes silent and holds what is sent."""

from __future__ import annotations

import asyncio
from enum import StrEnum

from tests.support.tcp_proxy import PIECE_BYTES, Side, TcpProxy


class Break(StrEnum):
    CUT = "cut"  # connections are reset, and new ones too
    SILENT = "silent"  # nothing arrives in either direction, and nobody is told; what was sent arrives when it is mended
    ONE_WAY = "silent one way"  # the same, but what the client sends arrives


class Relay(TcpProxy):
    """`async with Relay(port) as relay:` listens on `relay.port`; `break_` it, and `mend` it."""

    def __init__(self, to_port: int) -> None:
        super().__init__(to_port)
        self._there, self._back = asyncio.Event(), asyncio.Event()
        self._refuses = False
        self.mend()
        self.cut = 0  # connections that were reset
        self.held = 0  # pieces that had to wait

    def break_(self, how: Break) -> None:
        if how is Break.CUT:
            self._refuses = True
            self.cut += self.reset_all()
            return
        self._back.clear()
        if how is Break.SILENT:
            self._there.clear()

    def mend(self) -> None:
        self._refuses = False
        self._there.set()
        self._back.set()

    def refuses(self) -> bool:
        return self._refuses

    async def carry(self, client: Side, server: Side) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pass_on(client.reader, server, self._there))
            group.create_task(self._pass_on(server.reader, client, self._back))

    async def _pass_on(self, reader: asyncio.StreamReader, to: Side, whole: asyncio.Event) -> None:
        """One direction. Raises ConnectionResetError when it ends, so that the other one ends too."""
        while piece := await reader.read(PIECE_BYTES):
            self.held += not whole.is_set()
            await whole.wait()
            await to.send(piece)
        await whole.wait()  # that it has ended does not arrive either
        raise ConnectionResetError
