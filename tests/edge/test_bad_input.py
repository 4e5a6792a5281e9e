"""Whatever a client sends gets a 4xx in its own dialect that names the field; nothing is left behind."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import aiohttp
import pytest

from gateway.core.catalog import Wire
from gateway.edge.server import EdgeOptions
from tests.support.recorder import Recorder
from tests.support.small_world import KEY, SmallWorld, deployment, key_record, provider

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
USER = b'"messages":[{"role":"user","content":"x"}]'


@dataclass(frozen=True, slots=True)
class Bad:
    name: str
    path: str
    body: bytes
    status: int
    code: str
    param: str | None


def deep(levels: int) -> bytes:
    return b'{"model":"m","messages":[{"role":"user","content":' + b"[" * levels + b"]" * levels + b"}]}"


BAD = [
    Bad("empty body", CHAT, b"", 400, "invalid_request", None),
    Bad("not json", CHAT, b"hello", 400, "invalid_request", None),
    Bad("truncated", CHAT, b'{"model":"m","messages":[{"role":"us', 400, "invalid_request", None),
    Bad("an array", CHAT, b"[]", 400, "invalid_request", None),
    Bad("no model", CHAT, b"{" + USER + b"}", 400, "invalid_request", "model"),
    Bad("model is a number", CHAT, b'{"model":5,' + USER + b"}", 400, "invalid_request", "model"),
    Bad("no messages", CHAT, b'{"model":"m"}', 400, "invalid_request", "messages"),
    Bad("messages is text", CHAT, b'{"model":"m","messages":"x"}', 400, "invalid_request", "messages"),
    Bad(
        "stream is text",
        CHAT,
        b'{"model":"m","stream":"yes",' + USER + b"}",
        400,
        "invalid_request",
        "stream",
    ),
    Bad(
        "negative max",
        CHAT,
        b'{"model":"m","max_tokens":-1,' + USER + b"}",
        400,
        "invalid_request",
        "max_tokens",
    ),
    Bad("n too large", CHAT, b'{"model":"m","n":99,' + USER + b"}", 400, "invalid_request", "n"),
    Bad("100 deep", CHAT, deep(100), 400, "invalid_request", "messages[0]"),
    Bad("duplicate key", CHAT, b'{"model":"m","model":"n",' + USER + b"}", 400, "invalid_request", "model"),
    Bad("NaN", CHAT, b'{"model":"m","temperature":NaN,' + USER + b"}", 400, "invalid_request", None),
    Bad(
        "not utf-8",
        CHAT,
        b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}',
        400,
        "invalid_request",
        "messages[0]",
    ),
    Bad(
        "base url smuggled",
        CHAT,
        b'{"model":"m","api_base":"http://x",' + USER + b"}",
        400,
        "invalid_request",
        "api_base",
    ),
    Bad("unknown model", CHAT, b'{"model":"nope",' + USER + b"}", 404, "model_not_found", "model"),
    Bad("messages: no model", MESSAGES, b'{"max_tokens":5,' + USER + b"}", 400, "invalid_request", "model"),
    Bad(
        "messages: max_tokens text",
        MESSAGES,
        b'{"model":"m","max_tokens":"x",' + USER + b"}",
        400,
        "invalid_request",
        "max_tokens",
    ),
    Bad(
        "messages: unknown model",
        MESSAGES,
        b'{"model":"nope","max_tokens":5,' + USER + b"}",
        404,
        "model_not_found",
        "model",
    ),
    Bad("embeddings: no input", "/v1/embeddings", b'{"model":"m"}', 400, "invalid_request", "input"),
]


@pytest.mark.parametrize("bad", BAD, ids=[b.name for b in BAD])
async def test_bad_bodies(bad: Bad) -> None:
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url, Wire.DEMO))]) as gw:
        async with gw.http.post(
            bad.path, data=bad.body, headers={"Content-Type": "application/json"}
        ) as answer:
            doc = await answer.json()
            error = doc["error"]
            assert (answer.status, error["code"], error.get("param")) == (bad.status, bad.code, bad.param), (
                doc
            )
            assert answer.headers["x-should-retry"] == "false"
            assert ("type" in doc) == (bad.path == MESSAGES)  # Anthropic wraps its error, OpenAI does not
        assert upstream.received == []
        assert await gw.settled() == []
        assert gw.ledger.holds == {}
        assert gw.faults == []


async def test_keys() -> None:
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url, Wire.DEMO))]) as gw:
        body = b'{"model":"m","max_tokens":5,' + USER + b"}"
        wrong = KEY[:-1] + ("A" if KEY[-1] != "A" else "B")
        async with aiohttp.ClientSession(gw.url) as http:
            for path in (CHAT, MESSAGES, "/v1/embeddings", "/v1/models"):
                for headers, status in (
                    ({}, 401),
                    ({"Authorization": "Bearer sk-not-ours"}, 401),
                    ({"Authorization": f"Bearer {wrong}"}, 401),
                    ({"x-api-key": wrong}, 401),
                    ({"Authorization": f"Basic {KEY}"}, 401),
                ):
                    method = "GET" if path == "/v1/models" else "POST"
                    async with http.request(method, path, data=body, headers=headers) as answer:
                        doc = await answer.json()
                        assert answer.status == status
                        assert doc["error"]["code"] == "invalid_api_key"
                        assert "gw-" in doc["error"]["message"] or "gateway" in doc["error"]["message"]
            for headers in (
                {"Authorization": f"Bearer {KEY}"},
                {"x-api-key": KEY},
                {"authorization": f"bearer {KEY}"},
            ):
                for path in (CHAT, "/chat/completions", MESSAGES, "/messages"):
                    async with http.post(path, data=body, headers=headers) as answer:
                        assert answer.status == 200
    assert len(upstream.received) == 12


@pytest.mark.parametrize("change", [{"revoked_at_ms": 1}, {"expires_at_ms": 1}])
async def test_ended_keys(change: dict[str, int]) -> None:
    async with Recorder() as upstream:
        async with SmallWorld([deployment(provider(upstream.base_url))], record=key_record(**change)) as gw:
            async with gw.http.post(CHAT, data=b'{"model":"m",' + USER + b"}") as answer:
                assert answer.status == 401
    assert upstream.received == []


async def test_models_that_a_key_may_not_use_do_not_exist() -> None:
    async with Recorder() as upstream:
        up = provider(upstream.base_url)
        record = key_record(models=frozenset({"a"}), team_models=frozenset({"a", "b"}))
        async with SmallWorld([deployment(up, "a"), deployment(up, "b")], record=record) as gw:
            async with gw.http.get("/v1/models") as answer:
                assert [m["id"] for m in (await answer.json())["data"]] == ["a"]
            async with gw.http.get("/v1/models/b") as answer:
                assert answer.status == 404
            for model, status in (("a", 200), ("b", 404)):
                async with gw.http.post(
                    CHAT, data=json.dumps({"model": model, "messages": [{"role": "user", "content": "x"}]})
                ) as answer:
                    assert answer.status == status


async def test_large_bodies_are_refused_early() -> None:
    options = EdgeOptions(body_bytes_max=1 << 20)
    async with (
        Recorder() as upstream,
        SmallWorld([deployment(provider(upstream.base_url))], options=options) as gw,
    ):

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(40):
                yield b" " * (64 << 10)

        async with gw.http.post(CHAT, data=io.BytesIO(b" " * (1 << 20) + b" ")) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (413, "request_too_large")
        async with aiohttp.ClientSession(gw.url, headers={"Authorization": f"Bearer {KEY}"}) as http:
            try:
                async with http.post(CHAT, data=chunks()) as answer:
                    assert answer.status == 413
            except aiohttp.ClientConnectionError:
                pass  # the rest of the upload met a closed connection
        async with gw.http.post(
            CHAT, data=gzip.compress(b" " * 10_000_000), headers={"Content-Encoding": "gzip"}
        ) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (415, "unsupported_media_type")
    assert upstream.received == []


async def test_a_client_that_stops_in_the_middle_of_its_body() -> None:
    options = EdgeOptions(body_timeout_s=0.2)
    async with (
        Recorder() as upstream,
        SmallWorld([deployment(provider(upstream.base_url))], options=options) as gw,
    ):
        host, port = gw.url.removeprefix("http://").split(":")
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n".encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + b'{"model"')
        answer = await reader.read(4096)
        assert answer.startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head + b'{"model"')
        await writer.drain()
        writer.transport.abort()
        assert await gw.settled() == []
        assert gw.faults == []
    assert upstream.received == []


async def test_addresses_and_methods() -> None:
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url))]) as gw:
        seen = {}
        for method, path in (
            ("GET", "/v1/nothing"),
            ("POST", "/v1/completions"),
            ("GET", CHAT),
            ("DELETE", "/v1/models"),
            ("POST", "/v1/models"),
            ("HEAD", "/"),
            ("GET", "/"),
            ("HEAD", "/api/hello"),
            ("GET", "/livez"),
            ("GET", "/readyz"),
            ("GET", "/models"),
            ("GET", "/v1/models/m"),
            ("GET", "/t/some%20task/v1/models"),
        ):
            async with gw.http.request(method, path) as answer:
                seen[method, path] = answer.status
        assert seen == {
            ("GET", "/v1/nothing"): 404,
            ("POST", "/v1/completions"): 404,
            ("GET", CHAT): 405,
            ("DELETE", "/v1/models"): 405,
            ("POST", "/v1/models"): 405,
            ("HEAD", "/"): 200,
            ("GET", "/"): 200,
            ("HEAD", "/api/hello"): 200,
            ("GET", "/livez"): 200,
            ("GET", "/readyz"): 200,
            ("GET", "/models"): 200,
            ("GET", "/v1/models/m"): 200,
            ("GET", "/t/some%20task/v1/models"): 200,
        }
        gw.not_ready.append("the ledger cannot be reached")
        async with gw.http.get("/readyz") as answer:
            assert (answer.status, (await answer.json())["reasons"]) == (
                503,
                ["the ledger cannot be reached"],
            )
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
        async with gw.http.get("/v1/responses", headers=upgrade) as answer:
            assert answer.status == 426
