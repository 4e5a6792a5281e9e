"""A provider that answers nobody until it is told to."""

from __future__ import annotations

import asyncio
from types import TracebackType

from aiohttp import web

_ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "demo-fast",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Yes."}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11},
}


class WaitingProvider:
    """`arrived`: the attempts that were sent since `hold_back`."""

    def __init__(self) -> None:
        self.arrived: list[str] = []
        self._gate = asyncio.Event()
        self._gate.set()
        self._runner: web.AppRunner

    async def __aenter__(self) -> WaitingProvider:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=2_048).start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    def hold_back(self) -> None:
        self.arrived.clear()
        self._gate.clear()

    def let_go(self) -> None:
        self._gate.set()

    async def _answer(self, request: web.Request) -> web.Response:
        await request.read()
        self.arrived.append(request.headers["x-client-request-id"])
        await self._gate.wait()
        return web.json_response(_ANSWER)
