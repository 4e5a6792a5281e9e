"""Answers that are given again: only to who asks, only to the same request, never across tenants, at no cost."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gateway.core.entry import Kind
from gateway.core.kept_answers import Kept, KeptAnswers
from tests.pipeline.test_attempts import CHAT, OVERLOADED
from tests.support.recorder import Recorder, Script
from tests.support.small_world import SmallWorld, Wire, deployment, key_record, provider

ASK: dict[str, Any] = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}
EVENTS = {"Content-Type": "text/event-stream"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


async def asked(gw: SmallWorld, header: str | None = "60", **more: Any) -> tuple[int, str | None, str | None]:
    """(status, what is said of the cache, cost)."""
    headers = {} if header is None else {"x-response-cache": header}
    async with gw.http.post(CHAT, json=ASK | more, headers=headers) as answer:
        await answer.read()
        return answer.status, answer.headers.get("x-response-cache"), answer.headers.get("x-cost-usd")


async def test_the_same_request_is_answered_again_for_nothing() -> None:
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url))]) as gw:
        headers = {"x-response-cache": "60"}
        async with gw.http.post(CHAT, json=ASK, headers=headers) as answer:
            first, said = await answer.json(), answer.headers["x-response-cache"]
        assert (said, first["usage"]["cost"] > 0) == ("stored", True)
        async with gw.http.post(CHAT, json=ASK, headers=headers) as answer:
            second = await answer.json()
            told = {n: answer.headers[n] for n in ("x-response-cache", "x-cost-usd", "x-attempts", "age")}
        assert told == {"x-response-cache": "hit", "x-cost-usd": "0", "x-attempts": "0", "age": "0"}
        assert second["usage"].pop("cost") == 0
        del first["usage"]["cost"]
        assert second == first
        assert await gw.settled() == [(1, Kind.POST, "stop", "")], "a replay has no entry"
        assert len(upstream.received) == 1
        assert await asked(gw, messages=[{"role": "user", "content": "hi!"}]) == (200, "stored", "0.0002022")


@pytest.mark.parametrize(
    ("header", "more"),
    [(None, {}), ("off", {}), ("off", {"stream": True}), ("60", {"tools": [TOOL]})],
    ids=["nobody asked", "off", "a stream, off", "with tools"],
)
async def test_what_is_not_kept(header: str | None, more: dict[str, Any]) -> None:
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url))]) as gw:
        for _ in range(2):
            status, said, _ = await asked(gw, header, **more)
            assert (status, said) == (200, None)
        assert len(upstream.received) == 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_stream_is_given_again_as_a_stream_for_nothing(path: str) -> None:
    said = [{"role": "user", "content": "hi"}]
    asks: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": said, "stream_options": {"include_usage": True}},
        "/v1/messages": {"messages": said, "max_tokens": 9},
        "/v1/responses": {"input": "hi"},
    }
    ask = {"model": "m", "stream": True, **asks[path]}
    wire = Wire.ANTHROPIC if path == "/v1/messages" else Wire.OPENAI
    async with Recorder() as upstream:
        at = deployment(provider(upstream.base_url, wire))
        async with SmallWorld([at]) as gw:

            async def events() -> tuple[str, str, dict[str, str], bytes]:
                async with gw.http.post(path, json=ask, headers={"x-response-cache": "60"}) as answer:
                    assert answer.status == 200, await answer.text()
                    names = ("x-cost-usd", "x-attempts", "age")
                    told = {n: answer.headers[n] for n in names if n in answer.headers}
                    said = answer.headers["x-response-cache"]
                    return said, answer.headers["content-type"], told, await answer.read()

            first, second = await events(), await events()
            entries = await gw.settled()
    assert (first[0], second[:3]) == (
        "miss",
        ("hit", first[1], {"x-cost-usd": "0", "x-attempts": "0", "age": "0"}),
    )
    costs = [re.findall(rb'"cost":([0-9.]+)', each[3]) for each in (first, second)]
    assert costs[1] == [b"0"] * len(costs[0])
    assert costs[0] > [b"0"]
    free = [re.sub(rb'"cost":[0-9.]+', b"", each[3]) for each in (first, second)]
    assert free[0] == free[1]
    assert len(upstream.received) == len(entries) == 1


async def test_a_stream_that_breaks_off_or_is_left_is_not_kept() -> None:
    cut = Script(200, [b'data: {"choices":[{"delta":{"content":"so"}}]}\n\n'], EVENTS)
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url))]) as gw:
        upstream.scripts = [cut]
        assert (await asked(gw, stream=True))[1] == "miss"
        await gw.settled()
        assert (await asked(gw, stream=True))[1] == "miss"
        assert (await asked(gw, stream=True))[1] == "hit"


async def test_tools_are_kept_where_that_is_said() -> None:
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url))]) as gw:
        said = [(await asked(gw, "60, tools", tools=[TOOL]))[1] for _ in range(2)]
        assert said == ["stored", "hit"]


async def test_a_key_can_ask_for_all_its_requests_and_a_request_say_no() -> None:
    record = key_record(labels={"response_cache_s": "60"})
    async with (
        Recorder() as upstream,
        SmallWorld([deployment(provider(upstream.base_url))], record=record) as gw,
    ):
        said = [(await asked(gw, header))[1] for header in (None, None, "off")]
        assert said == ["stored", "hit", None]


async def test_another_tenant_never_gets_it_nor_a_key_that_may_not_use_the_model() -> None:
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url))]) as gw:
        assert (await asked(gw))[1] == "stored"
        keys = gw.world.keys.records  # type: ignore[attr-defined]
        (key_id,) = keys
        own = keys[key_id]
        keys[key_id] = type(own)(own.key_id, own.secret_hmac, "t2", own.team_id, own.name)
        assert (await asked(gw))[1] == "stored"
        keys[key_id] = type(own)(
            own.key_id, own.secret_hmac, own.tenant_id, own.team_id, own.name, frozenset({"other"})
        )
        assert (await asked(gw))[0] == 404


async def test_a_failure_is_not_kept_and_a_header_without_meaning_is_refused() -> None:
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url))]) as gw:
        upstream.scripts = [OVERLOADED] * 3
        assert (await asked(gw))[0] == 503
        assert (await asked(gw))[1] == "stored"
        for header in ("soon", "0.5", "100000", "60, tool", "-1", "off, tools"):
            assert (await asked(gw, header))[0] == 400, header


def test_what_is_kept_is_bounded_in_bytes_and_time() -> None:
    def kept(size: int, until_s: float = 9.0) -> Kept:
        return Kept(b"x" * size, "application/json", "d", "m", "small", ("m",), 0.0, until_s)

    answers = KeptAnswers(bytes_max=100)
    for name, size in ((b"a", 40), (b"b", 40), (b"c", 40), (b"huge", 101)):
        answers.keep(name, kept(size))
    found = [answers.find(name, 1.0) is not None for name in (b"a", b"b", b"c", b"huge")]
    assert found == [False, True, True, False]
    assert answers.find(b"b", 9.0) is None
    answers.keep(b"d", kept(60))
    assert [answers.find(name, 1.0) is not None for name in (b"c", b"d")] == [True, True], "what ended is out"
