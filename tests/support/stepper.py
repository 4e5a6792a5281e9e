"""A provider that answers piece by piece when the test says so, and knows what became of each connection."""

from __future__ import annotations

import asyncio
from types import TracebackType

from aiohttp import web


class Asked:
    """One request that arrived: `send` the pieces of its answer, then `end` it; `left` is set if the caller goes first."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.left = asyncio.Event()
        self.ended = asyncio.Event()
        self.written = 0  # bytes of the answer that the connection took
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            self._pieces.put_nowait(piece)

    def end(self) -> None:
        self._pieces.put_nowait(None)

    async def play(self, request: web.Request, content_type: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": content_type, "x-request-id": "up-1"})
        try:
            piece = await self._pieces.get()
            await response.prepare(request)
            while piece is not None:
                await response.write(piece)
                self.written += len(piece)
                piece = await self._pieces.get()
            await response.write_eof()
            self.ended.set()
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise
        return response


class Stepper:
    """`async with Stepper() as upstream:` serves any POST on `upstream.base_url`; `await upstream.asked()` is the next."""

    def __init__(self, content_type: str = "text/event-stream") -> None:
        self.base_url = ""
        self._content_type = content_type
        self._asked: asyncio.Queue[Asked] = asyncio.Queue()
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Stepper:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/{tail:.*}", self._serve)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        self._runner = runner
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        self.base_url = f"http://{host}:{port}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def asked(self) -> Asked:
        """The next request, when it has arrived."""
        return await self._asked.get()

    @property
    def waiting(self) -> int:
        """Requests that arrived and that the test has not looked at."""
        return self._asked.qsize()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        asked = Asked(await request.read())
        self._asked.put_nowait(asked)
        return await asked.play(request, self._content_type)
