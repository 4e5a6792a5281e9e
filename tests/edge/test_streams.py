"""Streams on the wire: whole events at once, however they come in; silence, breaks and confusion said in the dialect."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from urllib.parse import urlsplit

import pytest

from gateway.core.catalog import Wire
from gateway.core.entry import Kind
from gateway.core.sse import MAX_EVENT_BYTES, SseSplitter, event_data
from gateway.core.usage import Quality
from gateway.pipeline.exchange import Policy
from tests.support.raw_client import RawClient
from tests.support.recorder import CHAT_USAGE, Recorder, Script, chat_chunks, messages_events, named, sse
from tests.support.small_world import KEY, SmallWorld, deployment, provider
from tests.support.sockets import connections
from tests.support.stepper import Stepper

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
BODIES = {
    CHAT: json.dumps(HI).encode(),
    MESSAGES: json.dumps({**HI, "max_tokens": 100}).encode(),
    RESPONSES: json.dumps({"model": "m", "input": "hi", "stream": True}).encode(),
}
RESPONSE = {"id": "resp_1", "object": "response", "model": "m", "output": [], "status": "in_progress"}
#: The first two events of each dialect.
OPENINGS = {
    CHAT: [sse(chunk) for chunk in chat_chunks(usage=False)[:2]],
    MESSAGES: [named(event) for event in messages_events()[:2]],
    RESPONSES: [
        named({"type": "response.created", "response": RESPONSE}),
        named({"type": "response.output_text.delta", "delta": "Hel", "sequence_number": 1}),
    ],
}
EVENTS = {"Content-Type": "text/event-stream"}


def world(base_url: str, **provider_changes: object) -> SmallWorld:
    """One deployment that speaks all dialects, asked once."""
    at = replace(provider(base_url, Wire.DEMO), **provider_changes)  # type: ignore[arg-type]
    return SmallWorld([deployment(at)], policy=Policy(attempts_max=1, expose_cost=False))


def told(event: bytes | None) -> dict[str, object]:
    """What an error event says: its name and its code or type."""
    assert event is not None
    name, data = event_data(event)
    doc = json.loads(data)
    error = doc.get("error", doc)
    return {"name": name, "kind": error.get("code") or error["type"]}


async def test_events_arrive_whole_however_the_provider_cuts_them() -> None:
    events = [*(named(e) for e in messages_events()), "data: \N{GRINNING FACE}\n\n".encode()]
    stream, ends = b"".join(events), [sum(map(len, events[:n])) for n in range(len(events) + 1)]
    rnd = random.Random(1)
    async with Stepper() as upstream, world(upstream.base_url) as gw, asyncio.timeout(30):
        for _ in range(60):
            cuts = sorted(rnd.sample(range(1, len(stream)), 3))
            async with RawClient(gw.url, KEY) as client:
                await client.post(MESSAGES, BODIES[MESSAGES])
                asked = await upstream.asked()
                got = b""
                for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
                    asked.send(stream[start:end])
                    whole = max(e for e in ends if e <= end)
                    while len(got) < whole:  # all that is complete comes before the next piece is sent
                        if not got:
                            await client.head()
                        chunk = await client.chunk()
                        assert b"".join(SseSplitter().feed(chunk)) == chunk
                        got += chunk
                asked.end()
                assert got == stream
                assert await client.chunk() == b""
        assert gw.faults == []


@pytest.mark.parametrize("path", BODIES)
async def test_the_head_of_a_stream(path: str) -> None:
    async with Stepper("text/event-stream; charset=utf-8") as upstream, world(upstream.base_url) as gw:
        async with asyncio.timeout(10), RawClient(gw.url, KEY) as client:
            await client.post(path, BODIES[path])
            asked = await upstream.asked()
            asked.send(OPENINGS[path][0])  # the only event so far, and it is here at once
            status, headers = await client.head()
            assert await client.event() == OPENINGS[path][0]
            names = (
                "content-type",
                "cache-control",
                "x-accel-buffering",
                "transfer-encoding",
                "content-length",
            )
            assert (status, [headers.get(name) for name in names]) == (
                200,
                ["text/event-stream; charset=utf-8", "no-cache", "no", "chunked", None],
            )
            assert headers["x-request-id"] == headers["request-id"]
            assert headers["x-upstream-request-id"] == "up-1"
            asked.end()


async def test_no_socket_waits_to_fill_a_segment() -> None:
    async with Stepper() as upstream, world(upstream.base_url) as gw:
        async with asyncio.timeout(10), RawClient(gw.url, KEY) as client:
            await client.post(CHAT, BODIES[CHAT])
            asked = await upstream.asked()
            asked.send(OPENINGS[CHAT][0])
            await client.head()
            ours = [c for c in connections() if c.local_port == urlsplit(gw.url).port]
            theirs = [c for c in connections() if c.peer_port == urlsplit(upstream.base_url).port]
            assert ([c.no_delay for c in ours], [c.no_delay for c in theirs]) == ([True], [True])
            asked.end()


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (CHAT, {"name": "", "kind": "upstream_timeout"}),
        (MESSAGES, {"name": "error", "kind": "api_error"}),
        (RESPONSES, {"name": "error", "kind": "upstream_timeout"}),
    ],
)
async def test_a_provider_that_falls_silent(path: str, error: dict[str, object]) -> None:
    async with Stepper() as upstream:
        async with world(upstream.base_url, first_byte_timeout_s=0.3, idle_timeout_s=0.3) as gw:
            async with asyncio.timeout(10), RawClient(gw.url, KEY) as client:
                await client.post(path, BODIES[path])
                asked = await upstream.asked()
                asked.send(*OPENINGS[path])
                await client.head()
                assert [await client.event(), await client.event()] == OPENINGS[path]
                assert told(await client.event()) == error
                assert await client.event() is None
                await asked.left.wait()
            assert await gw.settled() == [(1, Kind.POST, "upstream_cut", "upstream_timeout")]
            assert gw.ledger.entries[0][1].quality is Quality.ESTIMATED


async def test_a_provider_that_says_nothing_at_all() -> None:
    async with Stepper() as upstream:
        async with world(upstream.base_url, first_byte_timeout_s=0.2, idle_timeout_s=0.2) as gw:
            async with asyncio.timeout(10), gw.http.post(CHAT, data=BODIES[CHAT]) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (504, "upstream_timeout")
            await (await upstream.asked()).left.wait()
            assert await gw.settled() == [(1, Kind.CHARGE_UNKNOWN, "error", "upstream_timeout")]


async def test_a_stream_that_only_drips_is_cut_at_its_total_time() -> None:
    async with Stepper() as upstream:
        async with world(upstream.base_url, first_byte_timeout_s=5.0, total_timeout_s=0.4) as gw:
            async with asyncio.timeout(10), RawClient(gw.url, KEY) as client:
                await client.post(CHAT, BODIES[CHAT])
                asked = await upstream.asked()
                asked.send(OPENINGS[CHAT][0])
                await client.head()
                event = await client.event()
                while event == OPENINGS[CHAT][0]:
                    asked.send(event)
                    event = await client.event()
                assert told(event) == {"name": "", "kind": "upstream_timeout"}
            assert await gw.settled() == [(1, Kind.POST, "upstream_cut", "upstream_timeout")]


async def test_json_in_place_of_a_stream() -> None:
    whole = {
        "id": "chatcmpl-1",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
        ],
        "usage": CHAT_USAGE,
    }
    said = {"error": {"message": "overloaded", "type": "server_error"}}
    async with Recorder() as upstream:
        at = provider(upstream.base_url)
        async with SmallWorld([deployment(at)]) as gw:
            upstream.scripts = [Script(200, [json.dumps(said).encode()])]
            async with gw.http.post(CHAT, data=BODIES[CHAT]) as answer:
                assert (answer.status, answer.content_type) == (200, "text/event-stream")
            upstream.scripts = [Script(200, [json.dumps(whole).encode()])]
            async with gw.http.post(CHAT, data=BODIES[CHAT]) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (502, "upstream_malformed")
            # An error costs nothing and is tried again; an answer was paid for, and the same server would do it again.
            assert await gw.settled() == [
                (1, Kind.VOID, "error", "upstream_error"),
                (2, Kind.POST, "stop", ""),
                (1, Kind.CHARGE_UNKNOWN, "error", "upstream_malformed"),
            ]


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_that_just_ends_is_no_clean_end(path: str) -> None:
    async with Stepper() as upstream, world(upstream.base_url) as gw:
        async with asyncio.timeout(10), RawClient(gw.url, KEY) as client:
            await client.post(path, BODIES[path])
            asked = await upstream.asked()
            asked.send(*OPENINGS[path])
            asked.end()
            await client.head()
            assert [await client.event(), await client.event()] == OPENINGS[path]
            assert told(await client.event())["kind"] in ("upstream_lost", "api_error")
            assert await client.event() is None
        assert await gw.settled() == [(1, Kind.POST, "upstream_cut", "upstream_lost")]


async def test_what_the_provider_says_went_wrong_is_passed_on_as_it_said_it() -> None:
    said = named({"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}})
    async with Stepper() as upstream, world(upstream.base_url) as gw:
        async with asyncio.timeout(10), RawClient(gw.url, KEY) as client:
            await client.post(MESSAGES, BODIES[MESSAGES])
            asked = await upstream.asked()
            # All in one piece: whether the error is behind other events must not depend on how they were cut.
            asked.send(b"".join([*OPENINGS[MESSAGES], said]))
            asked.end()
            await client.head()
            assert [await client.event() for _ in range(4)] == [*OPENINGS[MESSAGES], said, None]
        ((_, outcome),) = gw.ledger.entries
        assert (outcome.kind, outcome.quality, outcome.finish) == (Kind.POST, Quality.ESTIMATED, "error")
        assert outcome.usage.cache_read == 64  # the first event told the input


async def test_usage_that_is_never_told_is_not_taken_from_the_beginning() -> None:
    """A messages stream that reports 1 token of output in its first event, and nothing in its last."""
    events = messages_events()
    del events[4]["usage"]
    async with Recorder() as upstream, world(upstream.base_url) as gw:
        upstream.scripts = [Script(200, [named(*events)], EVENTS)]
        async with gw.http.post(MESSAGES, data=BODIES[MESSAGES]) as answer:
            assert await answer.read() == named(*events)
        await gw.settled()
        ((_, outcome),) = gw.ledger.entries
        assert (outcome.kind, outcome.quality, outcome.usage.output) == (Kind.POST, Quality.ESTIMATED, 2)


async def test_odd_but_valid_streams_pass_byte_by_byte() -> None:
    plain = sse(*chat_chunks(usage=False), done=True)
    streams = {
        "crlf": plain.replace(b"\n", b"\r\n"),
        "comments": plain.replace(b"data: ", b": processing\n\ndata: "),
        "byte order mark": b"\xef\xbb\xbf" + plain,
        "no space": plain.replace(b"data: ", b"data:"),
        "ids and retries": plain.replace(b"data: ", b"id: 7\nretry: 100\ndata: "),
    }
    async with Recorder() as upstream, world(upstream.base_url) as gw:
        for name, stream in streams.items():
            upstream.scripts = [Script(200, [stream], EVENTS)]
            async with gw.http.post(CHAT, data=BODIES[CHAT]) as answer:
                assert await answer.read() == stream, name
        assert await gw.settled() == [(1, Kind.POST, "stop", "")] * len(streams)


async def test_an_event_without_end_is_refused() -> None:
    async with Stepper() as upstream, world(upstream.base_url) as gw:
        async with asyncio.timeout(30), RawClient(gw.url, KEY) as client:
            await client.post(CHAT, BODIES[CHAT])
            asked = await upstream.asked()
            asked.send(OPENINGS[CHAT][0], b"data: ", *[b"x" * 65_536] * (MAX_EVENT_BYTES // 65_536 + 1))
            await client.head()
            assert await client.event() == OPENINGS[CHAT][0]
            assert told(await client.event()) == {"name": "", "kind": "upstream_malformed"}
            assert await client.event() is None
            await asked.left.wait()
        assert await gw.settled() == [(1, Kind.POST, "upstream_cut", "upstream_malformed")]


async def test_a_finished_stream_gives_both_connections_back() -> None:
    async with Recorder() as upstream, world(upstream.base_url) as gw:
        upstream_port = urlsplit(upstream.base_url).port
        for _ in range(5):
            async with gw.http.post(CHAT, data=BODIES[CHAT]) as answer:
                await answer.read()
            await gw.settled()
        seen = connections()
        assert len([c for c in seen if c.peer_port == upstream_port]) == 1
        assert len([c for c in seen if c.local_port == urlsplit(gw.url).port]) == 1
