"""Connections that do not speak are closed; those that have spoken are not."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

from gateway.edge.server import EdgeOptions
from tests.support.recorder import Recorder
from tests.support.small_world import KEY, SmallWorld, deployment, provider

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
HEAD = (
    f"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {KEY}\r\n"
    f"Content-Length: {len(BODY)}\r\n\r\n"
).encode()


async def test_a_head_that_does_not_come_to_its_end() -> None:
    async with (
        Recorder() as upstream,
        SmallWorld([deployment(provider(upstream.base_url))], options=EdgeOptions(head_timeout_s=0.3)) as gw,
        asyncio.timeout(20),
    ):
        address = ("127.0.0.1", urlsplit(gw.url).port)
        dumb, half, slow_body, kept = [await asyncio.open_connection(*address) for _ in range(4)]
        half[1].write(HEAD[: len(HEAD) // 2])
        slow_body[1].write(HEAD)
        kept[1].write(HEAD + BODY)
        first = await kept[0].readuntil(b"\r\n\r\n")
        assert first.startswith(b"HTTP/1.1 200 ")
        assert (await dumb[0].read(), await half[0].read()) == (b"", b"")
        slow_body[1].write(BODY)
        assert (await slow_body[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        kept[1].write(HEAD + BODY)
        assert b"HTTP/1.1 200 " in await kept[0].readuntil(b"\r\n\r\n")
        for _, writer in (dumb, half, slow_body, kept):
            writer.close()
            await writer.wait_closed()
    assert gw.faults == []
    assert len(upstream.received) == 3
