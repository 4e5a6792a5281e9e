"""Clients and providers that take their time: a keep-alive when the provider is silent, a cut when the client does
not read, an end for connections that do not speak.

One timer for all of a kind instead of one per chunk: a timer costs more than passing a chunk on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from aiohttp import web

from gateway.core.catalog import Operation
from gateway.core.meter import ping

_PINGS = {
    "openai": ping(Operation.CHAT),
    "responses": ping(Operation.RESPONSES),
    "anthropic": ping(Operation.MESSAGES),
}


class Live:
    """One stream on its way to a client. The writer says when it begins and ends a write."""

    __slots__ = ("_monotonic", "last_s", "ping", "request", "response", "since_s")

    def __init__(
        self,
        monotonic: Callable[[], float],
        request: web.BaseRequest,
        response: web.StreamResponse,
        ping: bytes,
    ) -> None:
        self._monotonic = monotonic
        self.request = request
        self.response = response
        self.ping = ping
        self.last_s = monotonic()
        self.since_s: float | None = None  # when the write under way began

    def writing(self) -> None:
        self.since_s = self._monotonic()

    def wrote(self) -> None:
        self.last_s = self._monotonic()
        self.since_s = None


class LiveStreams:
    """Sweeps all streams a few times per keep-alive interval."""

    def __init__(self, monotonic: Callable[[], float], keep_alive_s: float, slow_client_s: float) -> None:
        self._monotonic = monotonic
        self._keep_alive_s = keep_alive_s
        self._slow_client_s = slow_client_s
        self._streams: set[Live] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._sweep(), name="keep-alive")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def add(self, request: web.BaseRequest, response: web.StreamResponse, dialect: str) -> Live:
        live = Live(self._monotonic, request, response, _PINGS[dialect])
        self._streams.add(live)
        return live

    def remove(self, live: Live) -> None:
        self._streams.discard(live)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(self._keep_alive_s, self._slow_client_s) / 3)
            now_s = self._monotonic()
            for live in tuple(self._streams):
                if live.since_s is not None:
                    if now_s - live.since_s > self._slow_client_s and live.request.transport is not None:
                        live.request.transport.abort()  # cancels its handler, which settles
                elif now_s - live.last_s >= self._keep_alive_s:
                    await self._ping(live)

    async def _ping(self, live: Live) -> None:
        # Between two writes of whole events, so a ping never lands inside one. Only into an empty buffer: behind
        # bytes that the client does not read, it would not arrive, and could make the sweep wait for that client.
        transport = live.request.transport
        if transport is None or transport.get_write_buffer_size():
            return
        try:
            await live.response.write(live.ping)
        except (ConnectionError, RuntimeError):
            return  # the client left, or the stream ended since; its own handler deals with it
        live.last_s = self._monotonic()


class SilentConnections:
    """Closes connections on which no complete request head arrives in time: aiohttp waits for the first one for ever.

    Between the requests of one connection its keep-alive time-out applies.
    """

    def __init__(
        self,
        monotonic: Callable[[], float],
        head_timeout_s: float,
        connections: Callable[[], Collection[web.RequestHandler]],
    ) -> None:
        self._monotonic = monotonic
        self._head_timeout_s = head_timeout_s
        self._connections = connections
        self._spoken: set[web.RequestHandler] = set()
        self._since_s: dict[web.RequestHandler, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._sweep(), name="silent connections")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def spoke(self, connection: web.RequestHandler) -> None:
        self._spoken.add(connection)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._head_timeout_s / 4)
            now_s = self._monotonic()
            present = set(self._connections())
            self._spoken &= present
            self._since_s = {c: self._since_s.get(c, now_s) for c in present - self._spoken}
            for connection, since_s in self._since_s.items():
                if now_s - since_s > self._head_timeout_s:
                    connection.force_close()
