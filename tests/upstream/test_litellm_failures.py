"""How calls through litellm end badly: what the ledger may conclude, and what the client may see."""

from __future__ import annotations

import asyncio
import json
import socket
import traceback
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.core.catalog import Operation
from gateway.core.errors import (
    UpstreamError,
    UpstreamLost,
    UpstreamMalformed,
    UpstreamOverloaded,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.upstream.litellm import LitellmUpstream
from tests.support.provider_fakes import (
    SECRETS,
    ProviderFake,
    aws_events,
    aws_exception,
    call,
    data,
    deployment,
    named,
)

HELLO = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
STREAM = {**HELLO, "stream": True}
HALF: dict[str, Any] = {
    "candidates": [{"index": 0, "content": {"role": "model", "parts": [{"text": "Hel"}]}}],
    "responseId": "r",
}
PROVIDERS = ["gemini", "bedrock", "azure", "openai", "anthropic"]


def operation_of(provider: str) -> Operation:
    return Operation.MESSAGES if provider == "openai" else Operation.CHAT


@pytest.fixture
async def fake() -> AsyncIterator[ProviderFake]:
    async with ProviderFake() as provider:
        yield provider


@pytest.fixture
async def upstream() -> AsyncIterator[LitellmUpstream]:
    started = LitellmUpstream(SECRETS)
    await started.start()
    yield started
    await started.stop()


def assert_tells_no_secret(error: BaseException) -> None:
    told = "".join(traceback.format_exception(error))
    assert "canary" not in told.lower()
    assert error.__cause__ is None
    assert error.__suppress_context__ or error.__context__ is None


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("body", [HELLO, STREAM], ids=["plain", "stream"])
async def test_nobody_listens_so_nothing_is_billed(
    upstream: LitellmUpstream, provider: str, body: Any
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        where = deployment(provider, f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(UpstreamUnreachable) as raised:
            await upstream.open(call(where, operation_of(provider), body))
    assert raised.value.billed is False
    assert_tells_no_secret(raised.value)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("body", [HELLO, STREAM], ids=["plain", "stream"])
async def test_a_lost_answer_is_not_asked_for_again(
    upstream: LitellmUpstream, fake: ProviderFake, provider: str, body: Any
) -> None:
    """litellm's own client sends the request once more after a reset: the provider might bill both."""
    fake.replies(reset=True)
    with pytest.raises(UpstreamLost) as raised:
        await upstream.open(call(deployment(provider, fake.url), operation_of(provider), body))
    assert raised.value.billed is None
    assert len(fake.asked) == 1
    assert_tells_no_secret(raised.value)


async def test_a_redirect_is_not_followed(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    fake.replies({}, status=307, headers={"location": "/elsewhere"})
    with pytest.raises(UpstreamError):
        await upstream.open(call(deployment("gemini", fake.url), Operation.CHAT, HELLO))
    assert [a.path for a in fake.asked] == ["/v1beta/models/gemini-2.5-pro:generateContent"]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 429, 500, 503, 529])
async def test_a_provider_s_status_and_words_reach_the_client_in_its_dialect(
    upstream: LitellmUpstream, fake: ProviderFake, status: int
) -> None:
    google = {"error": {"code": status, "message": f"no: {SECRETS['plain']}", "status": "SOME_REASON"}}
    fake.replies(google, status=status, headers={"retry-after": "7", "x-request-id": "r-1"})
    answer = await upstream.open(call(deployment("gemini", fake.url), Operation.CHAT, HELLO))
    assert (answer.status, dict(answer.headers)) == (
        status,
        {"content-type": "application/json", "retry-after": "7", "x-request-id": "r-1"},
    )
    assert json.loads(await answer.read(10_000)) == {
        "error": {
            "message": "no: ***",
            "type": "invalid_request_error" if status < 500 else "server_error",
            "param": None,
            "code": "SOME_REASON",
        }
    }


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_errors_before_a_stream_begins_are_answers_too(
    upstream: LitellmUpstream, fake: ProviderFake, provider: str
) -> None:
    fake.replies({"message": "slow down"}, status=429)
    answer = await upstream.open(call(deployment(provider, fake.url), operation_of(provider), STREAM))
    assert answer.status == 429
    body = json.loads(await answer.read(10_000))
    assert body["error"]["message"] == "slow down"
    assert len(fake.asked) == 1


async def test_an_answer_that_is_no_answer(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    fake.replies(b"<html>", headers={"content-type": "text/html", "x-request-id": "r-2"})
    with pytest.raises(UpstreamMalformed) as raised:
        await upstream.open(call(deployment("gemini", fake.url), Operation.CHAT, HELLO))
    assert (raised.value.billed, raised.value.upstream_request_id) == (None, "r-2")
    assert_tells_no_secret(raised.value)


async def test_no_first_byte_in_time(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    fake.replies(silent=True)
    where = deployment("gemini", fake.url, first_byte_timeout_s=0.3)
    with pytest.raises(UpstreamTimeout) as raised:
        await upstream.open(call(where, Operation.CHAT, HELLO))
    assert raised.value.billed is None
    await fake.left()


async def test_slow_calls_get_the_longer_time(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    fake.replies(silent=True)
    where = deployment("gemini", fake.url, first_byte_timeout_s=60.0, slow_first_byte_timeout_s=0.3)
    with pytest.raises(UpstreamTimeout):
        await upstream.open(call(where, Operation.CHAT, HELLO, slow=True))


async def test_the_total_time_bounds_a_plain_answer(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    # the first call is slow at home
    usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
    fake.replies({"candidates": [{**HALF["candidates"][0], "finishReason": "STOP"}], "usageMetadata": usage})
    await upstream.open(call(deployment("gemini", fake.url), Operation.CHAT, HELLO))
    fake.streams(b"{", None, content_type="application/json")
    where = deployment("gemini", fake.url, total_timeout_s=0.5)
    with pytest.raises(UpstreamTimeout):
        await upstream.open(call(where, Operation.CHAT, HELLO))
    await fake.left()


async def read_until_it_breaks(upstream: LitellmUpstream, where: Any) -> tuple[list[bytes], UpstreamError]:
    answer = await upstream.open(call(where, Operation.CHAT, STREAM))
    got: list[bytes] = []

    async def read() -> None:
        async for piece in answer.chunks():
            got.append(piece)

    with pytest.raises(UpstreamError) as raised:
        await read()
    await answer.close()
    assert raised.value.billed is None
    assert_tells_no_secret(raised.value)
    return got, raised.value


async def test_a_stream_that_falls_silent(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    fake.streams(*data(HALF), None)
    got, error = await read_until_it_breaks(upstream, deployment("gemini", fake.url, idle_timeout_s=0.3))
    assert (len(got), type(error)) == (1, UpstreamTimeout)
    await fake.left()


async def test_a_stream_that_is_cut(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    fake.streams(*data(HALF), cut=True)
    got, error = await read_until_it_breaks(upstream, deployment("gemini", fake.url))
    assert (len(got), type(error)) == (1, UpstreamLost)


async def test_a_stream_that_ends_politely_but_unfinished(
    upstream: LitellmUpstream, fake: ProviderFake
) -> None:
    """litellm would say "stop", and an agent would take half an answer for a whole one."""
    fake.streams(*data(HALF))
    got, error = await read_until_it_breaks(upstream, deployment("gemini", fake.url))
    assert (len(got), type(error)) == (1, UpstreamLost)


async def test_an_error_event_inside_a_stream(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    begun = {"id": "msg_1", "type": "message", "role": "assistant", "model": "c", "content": [], "usage": {}}
    fake.streams(
        *named(
            {"type": "message_start", "message": begun},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}},
            {"type": "error", "error": {"type": "overloaded_error", "message": SECRETS["plain"]}},
        )
    )
    got, error = await read_until_it_breaks(upstream, deployment("anthropic", fake.url))
    # litellm keeps only that it was an error, not which
    assert (len(got), type(error), error.retryable) == (1, UpstreamError, True)


async def test_an_exception_frame_inside_a_bedrock_stream(
    upstream: LitellmUpstream, fake: ProviderFake
) -> None:
    fake.streams(
        *aws_events(("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": "Hel"}})),
        aws_exception("throttlingException", {"message": "slow down"}),
        content_type="application/vnd.amazon.eventstream",
    )
    got, error = await read_until_it_breaks(upstream, deployment("bedrock", fake.url))
    assert len(got) == 1
    assert isinstance(error, UpstreamOverloaded)


@pytest.mark.parametrize("provider", ["gemini", "openai", "anthropic"])
async def test_closing_a_stream_stops_the_provider(
    upstream: LitellmUpstream, fake: ProviderFake, provider: str
) -> None:
    fake.streams(b": keep-alive\n\n", None)
    answer = await upstream.open(call(deployment(provider, fake.url), operation_of(provider), STREAM))
    await answer.close()
    await answer.close()
    await fake.left()


@pytest.mark.parametrize("provider", ["gemini", "openai", "anthropic"])
async def test_cancelling_a_call_stops_the_provider(
    upstream: LitellmUpstream, fake: ProviderFake, provider: str
) -> None:
    fake.replies(silent=True)
    opening = asyncio.create_task(
        upstream.open(call(deployment(provider, fake.url), operation_of(provider), HELLO))
    )
    await fake.came.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    await fake.left()


async def test_cancelling_a_reader_stops_the_provider(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    fake.streams(*data(HALF), None)
    answer = await upstream.open(call(deployment("gemini", fake.url), Operation.CHAT, STREAM))
    first = asyncio.Event()

    async def read() -> None:
        async for _ in answer.chunks():
            first.set()

    reading = asyncio.create_task(read())
    await first.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await answer.close()
    await fake.left()


async def test_what_cannot_be_asked_of_a_provider_is_refused_before_it_is_asked(
    upstream: LitellmUpstream, fake: ProviderFake
) -> None:
    gemini = deployment("gemini", fake.url)
    claude_tool = {"type": "web_search_20250305", "name": "web_search"}
    refused = [
        (Operation.CHAT, {**HELLO, "api_base": "http://attacker"}, "api_base"),
        (Operation.CHAT, {**HELLO, "fallbacks": ["x"]}, "fallbacks"),
        (Operation.CHAT, {**HELLO, "mock_response": "free"}, "mock_response"),
        (Operation.CHAT, {**HELLO, "messages": 7}, "messages"),
        (Operation.MESSAGES, {**HELLO, "tools": [claude_tool]}, None),
        (Operation.MESSAGES, {**HELLO, "mcp_servers": [{}]}, None),
        (Operation.MESSAGES, {**HELLO, "messages": ["hello"]}, None),
    ]
    for operation, body, param in refused:
        answer = await upstream.open(call(gemini, operation, body))
        error = json.loads(await answer.read(10_000))["error"]
        assert (answer.status, error.get("param"), error["type"]) == (400, param, "invalid_request_error"), (
            body
        )
    assert fake.asked == []


async def test_a_dialect_that_is_not_served(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    answer = await upstream.open(
        call(deployment("anthropic", fake.url), Operation.EMBEDDINGS, {"input": "x"})
    )
    assert answer.status == 404
    assert fake.asked == []
