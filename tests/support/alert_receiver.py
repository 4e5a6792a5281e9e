"""Somebody who gets alerts: a real server that checks each signature before it takes a message."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from types import TracebackType
from typing import Any

from aiohttp import web


class AlertReceiver:
    """`async with AlertReceiver(secret) as receiver:` takes messages at `receiver.url`."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def __aenter__(self) -> AlertReceiver:
        app = web.Application()
        app.router.add_post("/alerts", self._take)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/alerts"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def next(self) -> dict[str, Any]:
        """The next message whose signature is right."""
        async with asyncio.timeout(20):
            return await self._messages.get()

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        said = dict(part.split("=", 1) for part in request.headers["X-Tollhouse-Signature"].split(","))
        right = hmac.new(self._secret, said["t"].encode() + b"." + body, hashlib.sha256).hexdigest()
        if not hmac.compare_digest(right, said["v1"]):
            return web.Response(status=401)
        self._messages.put_nowait(json.loads(body))
        return web.Response(status=204)
