"""Clients that leave: at every event, by RST and by FIN, under each policy; and clients that do not read."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from gateway.core.catalog import OnDisconnect, Wire
from gateway.core.entry import Granted, Kind, Refused
from gateway.core.usage import Quality, Usage
from gateway.edge.server import Done, EdgeOptions
from gateway.pipeline.exchange import Policy
from tests.support.raw_client import RawClient
from tests.support.recorder import CHAT_USAGE, RESPONSES_USAGE, chat_chunks, messages_events, named, sse
from tests.support.small_world import KEY, MemoryLedger, SmallWorld, deployment, provider
from tests.support.sockets import connections, limit_send_buffers
from tests.support.stepper import Asked, Stepper

HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
#: What the streams below report: 36 uncached, 64 read from cache, 5 out.
TOLD = Usage(input_uncached=36, cache_read=64, output=5)


def _responses() -> list[bytes]:
    whole = {"id": "resp_1", "object": "response", "model": "m", "output": [], "status": "in_progress"}
    done = {**whole, "status": "completed", "usage": RESPONSES_USAGE}
    return [
        named({"type": "response.created", "response": whole}),
        named({"type": "response.output_text.delta", "delta": "Hel", "sequence_number": 1}),
        named({"type": "response.output_text.delta", "delta": "lo", "sequence_number": 2}),
        named({"type": "response.completed", "response": done}),
    ]


@dataclass(frozen=True, slots=True)
class Dialect:
    """A request that streams, the events of its answer, and after how many of them the provider has told its usage."""

    path: str
    body: bytes
    events: list[bytes]
    told_after: int
    finish: str


DIALECTS = {
    "chat": Dialect(
        "/v1/chat/completions",
        json.dumps({**HI, "stream": True, "stream_options": {"include_usage": True}}).encode(),
        [*(sse(chunk) for chunk in chat_chunks(usage=True)), b"data: [DONE]\n\n"],
        told_after=4,
        finish="stop",
    ),
    "messages": Dialect(
        "/v1/messages",
        json.dumps({**HI, "stream": True, "max_tokens": 100}).encode(),
        [named(event) for event in messages_events()],
        told_after=5,
        finish="end_turn",
    ),
    "responses": Dialect(
        "/v1/responses",
        json.dumps({"model": "m", "input": "hi", "stream": True}).encode(),
        _responses(),
        told_after=4,
        finish="completed",
    ),
}


class Dones(list[Done]):
    """Finished requests, one of which can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._grown = asyncio.Event()

    def append(self, done: Done) -> None:
        super().append(done)
        self._grown.set()

    async def next(self) -> Done:
        await self._grown.wait()
        self._grown.clear()
        return self[-1]


def world(upstream: Stepper, on_disconnect: OnDisconnect, dones: Dones, **more: object) -> SmallWorld:
    at = provider(upstream.base_url, Wire.DEMO, on_disconnect=on_disconnect)
    return SmallWorld([deployment(at)], done=dones, **more)  # type: ignore[arg-type]


async def leave(gw: SmallWorld, upstream: Stepper, dialect: Dialect, events: int, how: str) -> None:
    """One client reads so many events and leaves; returns when the provider was stopped, or read to its end."""
    policy = gw.deployments[0].provider.on_disconnect
    dones = gw.done
    assert isinstance(dones, Dones)
    async with asyncio.timeout(10), RawClient(gw.url, KEY) as client:
        await client.post(dialect.path, dialect.body)
        asked = await upstream.asked()
        asked.send(*dialect.events[:events])
        if events:
            assert (await client.head())[0] == 200
        for event in dialect.events[:events]:
            assert _without_cost(await client.event() or b"") == event
        if how == "RST":
            client.reset()
        else:
            client.finish()
        assert (await dones.next()).client_gone
        if policy is OnDisconnect.DRAIN:
            asked.send(*dialect.events[events:])
            asked.end()
            await asked.ended.wait()
        else:
            await asked.left.wait()


def _without_cost(event: bytes) -> bytes:
    return re.sub(rb',"cost":[0-9.]+', b"", event)


def line(policy: OnDisconnect, dialect: Dialect, events: int) -> tuple[Kind, Quality, str, str]:
    """What the ledger must say of a client that left after so many events; after the last one it has all it came for."""
    if events == len(dialect.events):
        return Kind.POST, Quality.EXACT, dialect.finish, ""
    if policy is OnDisconnect.DRAIN or events >= dialect.told_after:
        return Kind.POST, Quality.EXACT, "client_gone", "client_gone"
    if policy is OnDisconnect.CANCEL_FREE:
        return Kind.VOID, Quality.EXACT, "client_gone", "client_gone"
    if not events:
        return Kind.CHARGE_UNKNOWN, Quality.UNKNOWN, "client_gone", "client_gone"
    return Kind.POST, Quality.ESTIMATED, "client_gone", "client_gone"


@pytest.mark.parametrize("policy", OnDisconnect)
@pytest.mark.parametrize("name", DIALECTS)
async def test_a_client_that_leaves_after_any_event(name: str, policy: OnDisconnect) -> None:
    dialect = DIALECTS[name]
    async with Stepper() as upstream, world(upstream, policy, Dones()) as gw:
        wanted, got = [], []
        for events in range(len(dialect.events) + 1):
            for how in ("RST", "FIN"):
                gw.ledger.entries.clear()
                await leave(gw, upstream, dialect, events, how)
                await gw.settled()
                got += [(events, how, o.kind, o.quality, o.finish, o.error) for _, o in gw.ledger.entries]
                wanted.append((events, how, *line(policy, dialect, events)))
                for _, outcome in gw.ledger.entries:
                    if outcome.kind is Kind.POST and outcome.quality is Quality.EXACT:
                        assert outcome.usage == TOLD
        assert got == wanted
        assert gw.ledger.holds == {}
        assert gw.faults == []
        assert upstream.waiting == 0  # nobody asked again for a client that was gone


@pytest.mark.parametrize("policy", OnDisconnect)
async def test_a_client_that_leaves_before_a_whole_answer(policy: OnDisconnect) -> None:
    async with Stepper("application/json") as upstream, world(upstream, policy, Dones()) as gw:
        dialect = replace(DIALECTS["chat"], body=json.dumps(HI).encode(), events=[])
        if policy is OnDisconnect.DRAIN:
            doc = {
                "choices": [{"message": {"content": "Hello"}, "finish_reason": "stop"}],
                "usage": CHAT_USAGE,
            }
            dialect = replace(dialect, events=[json.dumps(doc).encode()])
        await leave(gw, upstream, dialect, 0, "RST")
        (entry,) = await gw.settled()
        outcome = gw.ledger.entries[0][1]
        assert {
            OnDisconnect.DRAIN: (1, Kind.POST, "stop", ""),
            OnDisconnect.CANCEL_ESTIMATE: (1, Kind.CHARGE_UNKNOWN, "client_gone", "client_gone"),
            OnDisconnect.CANCEL_FREE: (1, Kind.VOID, "client_gone", "client_gone"),
        }[policy] == entry
        assert (outcome.usage == TOLD) == (policy is OnDisconnect.DRAIN)


async def test_nobody_tries_again_for_a_client_that_is_gone() -> None:
    async with Stepper() as upstream, world(upstream, OnDisconnect.DRAIN, Dones()) as gw:
        # The provider says nothing and ends: a failure that would be tried again for a client that waits.
        await leave(gw, upstream, replace(DIALECTS["chat"], events=[]), 0, "RST")
        assert await gw.settled() == [(1, Kind.CHARGE_UNKNOWN, "error", "upstream_lost")]
        assert upstream.waiting == 0


class SlowLedger(MemoryLedger):
    """Holds nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def reserve(self, *ask: Any, **more: Any) -> Granted | Refused:
        self.asked.set()
        await self.may_answer.wait()
        return await super().reserve(*ask, **more)


@pytest.mark.parametrize("policy", OnDisconnect)
async def test_nothing_is_sent_for_a_client_that_left_before_its_hold(policy: OnDisconnect) -> None:
    ledger, dones = SlowLedger(), Dones()
    async with Stepper() as upstream, world(upstream, policy, dones, ledger=ledger) as gw:
        async with asyncio.timeout(10), RawClient(gw.url, KEY) as client:
            await client.post("/v1/chat/completions", DIALECTS["chat"].body)
            await ledger.asked.wait()
            client.reset()
            assert (await dones.next()).client_gone
            ledger.may_answer.set()
            assert await gw.settled() == []
        assert (upstream.waiting, ledger.holds) == (0, {})


async def test_what_was_never_sent_costs_nothing() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(
            full.getsockname()
        ):  # fills the backlog: the next one waits for its SYN-ACK
            at = provider(
                f"http://127.0.0.1:{full.getsockname()[1]}/v1", on_disconnect=OnDisconnect.CANCEL_ESTIMATE
            )
            dones = Dones()
            async with SmallWorld([deployment(at)], done=dones) as gw, RawClient(gw.url, KEY) as client:
                await client.post("/v1/chat/completions", DIALECTS["chat"].body)
                while not gw.ledger.holds:
                    await asyncio.sleep(0.01)
                client.reset()
                await dones.next()
                assert await gw.settled() == [(1, Kind.VOID, "client_gone", "client_gone")]


async def test_reading_on_is_bounded_in_number_and_time() -> None:
    dialect = DIALECTS["messages"]
    stopped = (Kind.POST, Quality.ESTIMATED, "client_gone", "client_gone")
    async with Stepper() as upstream, world(upstream, OnDisconnect.DRAIN, Dones()) as gw:
        places = 0
        while gw.world.drains.acquire():
            places += 1
        assert places == 64
        await _leave_a_silent_provider(gw, upstream, dialect)
        assert [(o.kind, o.quality, o.finish, o.error) for _, o in gw.ledger.entries] == [stopped]
    async with (
        Stepper() as upstream,
        world(upstream, OnDisconnect.DRAIN, Dones(), policy=Policy(drain_s=0.2)) as gw,
    ):
        await _leave_a_silent_provider(gw, upstream, dialect)
        assert [(o.kind, o.quality, o.finish, o.error) for _, o in gw.ledger.entries] == [stopped]


async def _leave_a_silent_provider(gw: SmallWorld, upstream: Stepper, dialect: Dialect) -> None:
    """After three events the client leaves, and the provider says nothing more until it is stopped."""
    async with asyncio.timeout(10), RawClient(gw.url, KEY) as client:
        await client.post(dialect.path, dialect.body)
        asked = await upstream.asked()
        asked.send(*dialect.events[:3])
        await client.head()
        for _ in range(3):
            await client.event()
        client.reset()
        await asked.left.wait()
        await gw.settled()


async def test_a_silent_provider_is_bridged_by_pings_that_never_land_inside_an_event() -> None:
    options = EdgeOptions(keep_alive_s=0.1)
    pings = {
        "chat": b": keep-alive\n\n",
        "responses": b": keep-alive\n\n",
        "messages": b'event: ping\ndata: {"type":"ping"}\n\n',
    }
    for name, dialect in DIALECTS.items():
        async with Stepper() as upstream, world(upstream, OnDisconnect.DRAIN, Dones(), options=options) as gw:
            async with asyncio.timeout(10), RawClient(gw.url, KEY) as client:
                await client.post(dialect.path, dialect.body)
                asked = await upstream.asked()
                first, second, *rest = dialect.events
                asked.send(first, second[: len(second) // 2])
                await client.head()
                got = [await client.event() for _ in range(4)]
                assert got == [first, pings[name], pings[name], pings[name]], name
                asked.send(second[len(second) // 2 :], *rest)
                asked.end()
                while (event := await client.event()) is not None:
                    got.append(_without_cost(event))
                assert [e for e in got if e != pings[name]] == dialect.events
            assert await gw.settled() == [(1, Kind.POST, gw.ledger.entries[0][1].finish, "")]


def _big(kilobytes: int) -> bytes:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    text = "x" * (kilobytes << 10)
    return sse({**head, "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


async def _blocked_at(asked: Asked) -> int:
    """How many bytes the provider could send before nobody took any more for a quarter of a second."""
    before = -1
    while asked.written != before:
        before = asked.written
        await asyncio.sleep(0.25)
    return before


def _port(url: str) -> int:
    return urlsplit(url).port or 0


async def test_a_client_that_does_not_read_stops_the_provider_from_sending() -> None:
    chat, big = DIALECTS["chat"], _big(64)
    async with Stepper() as upstream, world(upstream, OnDisconnect.DRAIN, Dones()) as gw:
        limit_send_buffers(_port(upstream.base_url), 64 << 10)
        limit_send_buffers(_port(gw.url), 8 << 10)
        async with asyncio.timeout(30), RawClient(gw.url, KEY, deaf=True) as client:
            await client.post(chat.path, chat.body)
            asked = await upstream.asked()
            asked.send(chat.events[0], *[big] * 600)
            await client.head()
            taken = len(await client.event() or b"")
            sent = await _blocked_at(asked)
            in_kernel = sum(c.unread_bytes + c.unsent_bytes for c in connections())
            # What is in nobody's socket is in memory: here that of the gateway, of its client and of its provider.
            assert sent - taken - in_kernel < 1 << 20
            assert sent < 600 * len(big)
            asked.send(*chat.events[1:])
            asked.end()
            assert [await client.event() for _ in range(600)] == [big] * 600
            assert [_without_cost(await client.event() or b"") for _ in chat.events[1:]] == chat.events[1:]
            assert await client.event() is None
        assert await gw.settled() == [(1, Kind.POST, "stop", "")]


async def test_a_client_that_does_not_read_for_too_long_is_cut_and_settled() -> None:
    chat, big, dones = DIALECTS["chat"], _big(64), Dones()
    options = EdgeOptions(slow_client_s=0.3)
    async with (
        Stepper() as upstream,
        world(upstream, OnDisconnect.CANCEL_ESTIMATE, dones, options=options) as gw,
    ):
        limit_send_buffers(_port(gw.url), 8 << 10)
        async with asyncio.timeout(30), RawClient(gw.url, KEY, deaf=True) as client:
            await client.post(chat.path, chat.body)
            asked = await upstream.asked()
            asked.send(*[big] * 10)
            await asked.left.wait()
            assert (await dones.next()).client_gone
        assert await gw.settled() == [(1, Kind.POST, "client_gone", "client_gone")]
        assert gw.ledger.entries[0][1].quality is Quality.ESTIMATED
        assert gw.faults == []


async def test_a_client_that_does_not_read_costs_the_others_no_ping() -> None:
    """Its buffer is not empty and not full: nobody waits for it, and nothing is added to it."""
    chat, big, ping = DIALECTS["chat"], _big(50), b": keep-alive\n\n"
    options = EdgeOptions(keep_alive_s=0.05)
    async with Stepper() as upstream, world(upstream, OnDisconnect.DRAIN, Dones(), options=options) as gw:
        limit_send_buffers(_port(gw.url), 8 << 10)
        async with (
            asyncio.timeout(30),
            RawClient(gw.url, KEY, deaf=True) as deaf,
            RawClient(gw.url, KEY) as listening,
        ):
            await deaf.post(chat.path, chat.body)
            to_deaf = await upstream.asked()
            to_deaf.send(big)
            await listening.post(chat.path, chat.body)
            to_listening = await upstream.asked()
            to_listening.send(chat.events[0])
            await listening.head()
            assert [await listening.event() for _ in range(5)] == [chat.events[0], *[ping] * 4]
            to_deaf.send(chat.events[1])
            assert [await listening.event() for _ in range(3)] == [ping] * 3
            await deaf.head()
            assert [await deaf.event(), await deaf.event()] == [big, chat.events[1]]
            to_deaf.end()
            to_listening.end()
