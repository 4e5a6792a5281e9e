"""A TCP proxy in front of Postgres that cuts a connection at its COMMIT, so that nobody hears what became of it."""

from __future__ import annotations

import asyncio
import struct
from enum import StrEnum

from tests.support.tcp_proxy import PIECE_BYTES, Side, TcpProxy

#: A simple query, as asyncpg sends it: type, length, text.
_COMMIT = b"Q" + struct.pack(">i", 11) + b"COMMIT\0"


class Cut(StrEnum):
    LOST = "lost"  # the COMMIT does not arrive: it did not happen
    FORWARDED = "forwarded"  # it is sent on, and both sides are cut at once: it happened or not
    ANSWERED = "answered"  # it happened, and its answer is thrown away


class CommitCutter(TcpProxy):
    """`async with CommitCutter(port) as proxy:` listens on `proxy.port`; `cut(how, times)` at the next COMMITs."""

    def __init__(self, postgres_port: int) -> None:
        super().__init__(postgres_port)
        self.how = Cut.LOST
        self._times = 0
        self.done = 0

    def cut(self, how: Cut, times: int = 1) -> None:
        self.how, self._times = how, times

    async def carry(self, client: Side, server: Side) -> None:
        answers = asyncio.create_task(self._answers(client, server))
        try:
            await self._commits(client, server, answers)
        finally:
            await _stopped(answers)

    @staticmethod
    async def _answers(client: Side, server: Side) -> None:
        try:
            while piece := await server.reader.read(PIECE_BYTES):
                await client.send(piece)
        except OSError:
            pass
        client.reset()

    async def _commits(self, client: Side, server: Side, answers: asyncio.Task[None]) -> None:
        """Returns when the connection is over, by itself or by a cut."""
        while piece := await client.reader.read(PIECE_BYTES):
            cut = self._times > 0 and _COMMIT in piece
            if cut:
                self._times -= 1
                self.done += 1
                if self.how is Cut.LOST:
                    return
                if self.how is Cut.ANSWERED:
                    await _stopped(answers)
            await server.send(piece)
            if cut:
                if self.how is Cut.ANSWERED:
                    await server.reader.read(PIECE_BYTES)
                return


async def _stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
