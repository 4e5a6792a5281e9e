"""Thousands of requests leave nothing behind: no task, no hold, no connection, no growing heap."""

from __future__ import annotations

import asyncio
import gc
import json
from dataclasses import dataclass

from gateway.app import DRAINS_MAX
from gateway.demo.bill import BillLine
from tests.support.raw_client import RawClient
from tests.support.running import Running, running
from tests.support.sockets import connections

CHAT = "/v1/chat/completions"
AT_ONCE = 16
#: Waits for the next request on a connection, and of periodic jobs between two turns.
COME_AND_GO = ("RequestHandler.start", "Event.wait")


def body(n: int, stream: bool) -> bytes:
    """One of twenty short conversations."""
    ask = {"role": "user", "content": f"demo:output=3 question {n % 20}"}
    return json.dumps({"model": "demo-fast", "stream": stream, "messages": [ask]}).encode()


async def send(gw: Running, count: int) -> None:
    """Plain and streamed requests, bad ones among them, and every tenth client leaves in the middle."""
    numbers = iter(range(count))

    async def client() -> None:
        for n in numbers:
            if n % 10 == 9:
                async with RawClient(gw.url, gw.key) as leaving:
                    await leaving.post(CHAT, body(n, stream=True))
                    if n % 20 == 9:
                        await leaving.head()
                    leaving.reset()
                continue
            sent = b"no JSON" if n % 10 == 8 else body(n, stream=n % 2 == 0)
            async with gw.http.post(CHAT, data=sent) as answer:
                assert answer.status == (400 if n % 10 == 8 else 200)
                await answer.read()

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(client())
    await gw.settle_all()


@dataclass(frozen=True, slots=True)
class Left:
    tasks: list[str]
    holds: int
    connections: int
    objects: int  # that the garbage collector knows


async def left(gw: Running) -> Left:
    gc.collect()
    # The provider's bill has a line for every request: that is what it is for.
    objects = sum(1 for found in gc.get_objects() if not isinstance(found, BillLine))
    names = (getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks())
    tasks = sorted(name for name in names if name not in COME_AND_GO)
    return Left(tasks, await gw.open_holds(), len(connections()), objects)


async def test_two_thousand_requests_leave_nothing_behind(sqlite_url: str) -> None:
    async with running(sqlite_url) as gw:
        await send(gw, 300)  # pools, caches and compiled queries are filled by then
        before = await left(gw)
        growths = []
        for _ in range(4):
            objects = (await left(gw)).objects
            await send(gw, 500)
            growths.append((await left(gw)).objects - objects)
        after = await left(gw)
        assert after.holds == 0
        assert after.tasks == before.tasks
        # Idle ones of clients and of provider, both ends of each, and those on which abandoned answers were read on.
        assert after.connections <= 4 * AT_ONCE + 2 * DRAINS_MAX
        # A leak grows with every request, so in every part; other tests' garbage comes when it likes.
        assert min(growths) < 250, growths
        assert gw.app.edge.in_flight == 0
