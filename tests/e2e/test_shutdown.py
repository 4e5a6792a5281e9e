"""The end of a gateway: what runs may finish, what does not is cut, and all of it is in the ledger."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from gateway.demo.faults import Fault, FaultKind, FaultPlan
from gateway.storage import reports
from gateway.storage.database import open_database
from gateway.tasks import Tasks
from tests.storage.worlds import rows
from tests.support.raw_client import RawClient
from tests.support.running import running

CHAT = "/v1/chat/completions"


def body(stream: bool) -> bytes:
    ask = {"role": "user", "content": "demo:output=40"}
    return json.dumps({"model": "demo-fast", "stream": stream, "messages": [ask]}).encode()


async def ends(store: str) -> list[tuple[str, str, str]]:
    """(kind, quality, finish) of all entries, in order; nothing may be held any more."""
    database = open_database(store)
    try:
        assert await rows(database, "SELECT count(*) FROM hold WHERE state = 'held'") == [(0,)]
        return [(e["kind"], e["quality"], e["finish"]) for e in await reports.entries(database)]
    finally:
        await database.close()


async def test_what_runs_may_finish_and_nothing_new_begins(store: str) -> None:
    async with running(store, chunk_delay_s=0.01) as gw:
        stream = RawClient(gw.url, gw.key)
        async with stream, asyncio.timeout(20):
            await stream.post(CHAT, body(stream=True))
            await stream.head()
            idle = RawClient(gw.url, gw.key)
            async with idle:
                await idle.post(CHAT, body(stream=False))
                _, headers = await idle.head()
                await idle.body(int(headers["content-length"]))
                leaving = asyncio.create_task(gw.app.__aexit__())
                assert await idle.ended()  # it was kept alive, and is closed at once
                assert gw.app.edge.in_flight == 1
            with pytest.raises(aiohttp.ClientConnectionError):
                await gw.http.post(CHAT, data=body(stream=False))
            events = []
            while (event := await stream.event()) is not None:
                events.append(event)
            assert events[-1] == b"data: [DONE]\n\n"
            await leaving
    assert await ends(store) == [("post", "exact", "stop")] * 2


async def test_what_does_not_finish_is_cut_and_charged(store: str) -> None:
    silent = FaultPlan((Fault(FaultKind.STALL, after_events=3), Fault(FaultKind.STALL_HEADERS)))
    async with asyncio.timeout(20):
        async with running(store, faults=silent, on_disconnect="cancel_estimate", drain_s=0.2) as gw:
            async with RawClient(gw.url, gw.key) as begun, RawClient(gw.url, gw.key) as waiting:
                await begun.post(CHAT, body(stream=True))
                await begun.head()
                await waiting.post(CHAT, body(stream=True))
                while gw.provider.received < 2:
                    await asyncio.sleep(0.01)
                began_s = asyncio.get_running_loop().time()
                await gw.app.__aexit__()
                assert asyncio.get_running_loop().time() - began_s < 5.0
    assert await ends(store) == [
        ("post", "estimated", "client_gone"),
        ("charge_unknown", "unknown", "client_gone"),
    ]


async def test_tasks_that_are_cut_may_still_hand_over_what_they_know() -> None:
    tasks = Tasks(lambda _name, _fault: None)
    told = []

    async def hand_over() -> None:
        await asyncio.sleep(0.05)
        told.append("handed over")

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            tasks.spawn(hand_over(), "hand over")

    tasks.spawn(work(), "work")
    await asyncio.sleep(0)
    assert await tasks.drain(0.05) == 1
    assert (told, len(tasks)) == (["handed over"], 0)
