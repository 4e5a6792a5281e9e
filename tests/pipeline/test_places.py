"""Limits of concurrency: a place is held while the provider works for the request, and not a moment longer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.core.catalog import OnDisconnect, Operation
from gateway.core.entry import Kind
from gateway.core.identity import Caller, RateLimit
from gateway.pipeline.exchange import Policy
from gateway.pipeline.serve import Gateway
from gateway.ports import Incoming
from gateway.storage.memory import MemoryLimits
from gateway.telemetry.steps import Steps
from tests.support.raw_client import RawClient
from tests.support.recorder import chat_chunks, sse
from tests.support.small_world import KEY, KEY_ID, SmallWorld, deployment, key_record, provider
from tests.support.stepper import Stepper

CHAT = "/v1/chat/completions"
HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BODY, STREAM = json.dumps(HI).encode(), json.dumps({**HI, "stream": True}).encode()
EVENTS = [*(sse(chunk) for chunk in chat_chunks(usage=True)), b"data: [DONE]\n\n"]
WHOLE = b'{"id":"c","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}'
ONE = RateLimit(concurrent=1)
SCOPES = (f"key:{KEY_ID}", "team:team1")


@asynccontextmanager
async def world(
    on_disconnect: OnDisconnect = OnDisconnect.DRAIN,
    policy: Policy | None = None,
    limit: RateLimit = ONE,
) -> AsyncIterator[tuple[Stepper, SmallWorld]]:
    """A key that may have one request under way, in a team that may have two."""
    record = key_record(limit=limit, team_limit=RateLimit(concurrent=2))
    async with Stepper() as upstream:
        at = provider(upstream.base_url, on_disconnect=on_disconnect)
        policy = policy or Policy(attempts_max=1)
        async with SmallWorld([deployment(at)], record=record, policy=policy) as gw:
            yield upstream, gw


def inside(gw: SmallWorld) -> tuple[int, int]:
    limits = gw.world.limits
    assert isinstance(limits, MemoryLimits)
    return limits.inside(SCOPES[0]), limits.inside(SCOPES[1])


async def test_a_second_request_at_once_is_refused_and_the_next_is_not() -> None:
    async with world() as (upstream, gw):
        first = asyncio.ensure_future(gw.http.post(CHAT, data=BODY))
        asked = await upstream.asked()
        assert inside(gw) == (1, 1)
        async with gw.http.post(CHAT, data=BODY) as second:
            error = (await second.json())["error"]
            assert (second.status, second.headers["retry-after"]) == (429, "1")
            assert error["code"] == "rate_limit_exceeded"
            assert error["message"] == f"the limit of 1 requests at once of key {KEY_ID} is reached"
        asked.send(WHOLE)
        asked.end()
        assert (await first).status == 200
        assert inside(gw) == (0, 0)
        third = asyncio.ensure_future(gw.http.post(CHAT, data=BODY))
        asked = await upstream.asked()
        asked.send(WHOLE)
        asked.end()
        assert (await third).status == 200
        assert await gw.settled() == [(1, Kind.POST, "", "")] * 2


async def test_a_stream_is_inside_until_its_end() -> None:
    async with world() as (upstream, gw), RawClient(gw.url, KEY) as client:
        await client.post(CHAT, STREAM)
        asked = await upstream.asked()
        asked.send(EVENTS[0])
        assert (await client.head())[0] == 200
        await client.event()
        assert inside(gw) == (1, 1)
        asked.send(*EVENTS[1:])
        asked.end()
        rest = [await client.event() for _ in EVENTS[1:]]
        assert (rest[-2], rest[-1]) == (b"data: [DONE]\n\n", None)  # usage was not asked for
        assert inside(gw) == (0, 0)


async def test_a_failed_call_leaves() -> None:
    async with world() as (upstream, gw):
        first = asyncio.ensure_future(gw.http.post(CHAT, data=BODY))
        asked = await upstream.asked()
        asked.send(b"not JSON")
        asked.end()
        assert (await first).status == 502
        assert inside(gw) == (0, 0)


async def test_who_is_refused_by_a_rate_leaves() -> None:
    async with world(limit=RateLimit(requests_per_min=1, concurrent=1)) as (_, gw):
        rate = (f"{SCOPES[0]}:requests", 1, 1)
        assert await gw.world.limits.take([rate], gw.world.clock.now_ms()) is None
        async with gw.http.post(CHAT, data=BODY) as answer:
            assert (answer.status, int(answer.headers["retry-after"]) > 30) == (429, True)
        assert inside(gw) == (0, 0)


async def test_the_limit_of_all_keys_holds_for_one_that_has_none_of_its_own() -> None:
    general = Policy(attempts_max=1, key_limit=RateLimit(concurrent=1))
    async with world(limit=RateLimit(), policy=general) as (upstream, gw):
        first = asyncio.ensure_future(gw.http.post(CHAT, data=BODY))
        asked = await upstream.asked()
        async with gw.http.post(CHAT, data=BODY) as second:
            assert second.status == 429
        asked.send(WHOLE)
        asked.end()
        assert (await first).status == 200


@pytest.mark.parametrize("events", [0, 1])
@pytest.mark.parametrize("policy", OnDisconnect)
async def test_who_is_gone_is_inside_as_long_as_the_provider_works(policy: OnDisconnect, events: int) -> None:
    async with asyncio.timeout(20), world(policy) as (upstream, gw):
        async with RawClient(gw.url, KEY) as client:
            await client.post(CHAT, STREAM)
            asked = await upstream.asked()
            asked.send(*EVENTS[:events])
            if events:
                assert (await client.head())[0] == 200
                await client.event()
            client.reset()
        while not gw.done:  # the gateway has noticed
            await asyncio.sleep(0.001)
        if policy is OnDisconnect.DRAIN:
            assert inside(gw) == (1, 1)
            asked.send(*EVENTS[events:])
            asked.end()
        else:
            await asked.left.wait()
        assert len(await gw.settled()) == 1
        assert inside(gw) == (0, 0)


async def test_a_stream_that_nobody_begins_to_read_is_posted_and_has_left() -> None:
    async with world(OnDisconnect.CANCEL_ESTIMATE) as (upstream, gw):
        record = gw.record
        caller = Caller(record.tenant_id, record.team_id, record.key_id, record)
        incoming = Incoming("req_1", Operation.CHAT, caller, {}, STREAM, "", None)
        serving = asyncio.ensure_future(Gateway(gw.world).serve(incoming, Steps(gw.world.clock.monotonic)))
        asked = await upstream.asked()
        asked.send(EVENTS[0])
        answer = await serving
        assert inside(gw) == (1, 1)
        assert answer.stream is not None
        await answer.stream.aclose()
        assert await gw.settled() == [(1, Kind.POST, "client_gone", "client_gone")]
        assert inside(gw) == (0, 0)
