"""Requests that no planner expects: shaped or left alone, answered, and read by the model as they were written.

Through a whole gateway, at every level, in front of the demo provider, which refuses what Anthropic refuses.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from gateway.core.catalog import OnDisconnect
from gateway.core.shaping import Level
from gateway.demo.provider import DemoProvider
from tests.support.played_cache import RULES, compact
from tests.support.recorder import Recorder
from tests.support.small_world import SmallWorld, Wire, deployment, provider

MARK = {"cache_control": {"type": "ephemeral"}}
LONG = "Never delete what you did not make. " * 200
TOOL = {"name": "f", "description": "d" * 3_000, "input_schema": {"type": "object"}}
JSON = dict[str, Any]


def body(*turns: JSON, **more: Any) -> JSON:
    said = [{"role": "user", "content": "go"}, *turns]
    return {"model": "demo-large", "max_tokens": 9, "system": LONG, "messages": said, **more}


def text(said: str, **more: Any) -> JSON:
    return {"type": "text", "text": said, **more}


def turns(n: int) -> list[JSON]:
    return [
        m
        for i in range(n)
        for m in ({"role": "assistant", "content": f"a{i}"}, {"role": "user", "content": f"u{i}"})
    ]


@pytest.fixture
async def gw() -> AsyncIterator[SmallWorld]:
    async with DemoProvider() as upstream:
        at = provider(upstream.base_url, Wire.DEMO, on_disconnect=OnDisconnect.DRAIN, cache_rules="demo")
        names = ("demo-large", "demo-fast", "demo-small")
        async with SmallWorld([deployment(at, n, n) for n in names], cache_rules=RULES) as world:
            yield world
            assert world.faults == []


async def status(gw: SmallWorld, said: JSON, path: str = "/v1/messages", **headers: str) -> set[int]:
    """Of the same request at each level."""
    found = set()
    for level in Level:
        async with gw.http.post(
            path, data=compact(said), headers={"x-cache-level": level, **headers}
        ) as answer:
            found.add(answer.status)
            await answer.read()
    return found


async def test_four_markers_are_left_and_a_fifth_is_the_provider_s_to_refuse(gw: SmallWorld) -> None:
    marked = [{"role": "user", "content": [text(str(n), **MARK)]} for n in range(5)]
    assert await status(gw, body(*marked[:4])) == {200}
    assert await status(gw, body(*marked)) == {400}


async def test_shapes_that_are_not_known(gw: SmallWorld) -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    for said in (
        body({"role": "assistant", "content": [thinking, text("so")]}, {"role": "user", "content": "on"}),
        body({"role": "user", "content": [{"type": "hologram", "data": [1]}]}),
        body({"role": "user", "content": [text("a"), {"type": "container_upload", "file_id": "x"}]}),
        body({"role": "user", "content": [text("a"), text("")]}),
        body(
            {"role": "user", "content": "line\u2028line\u2029\x85line"},
            system=f"{LONG}\u2028It is 9:14.\u2029",
        ),
        body({"role": "user", "content": ""}),
        body(tools=[TOOL, {"type": "web_search_20260209", "name": "web_search"}]),
    ):
        assert await status(gw, said) == {200}
    # a marker that Anthropic refuses is refused by Anthropic, not by a fault of ours
    assert await status(gw, body({"role": "assistant", "content": [{**thinking, **MARK}]})) == {400}


async def test_tools_that_change_in_every_turn(gw: SmallWorld) -> None:
    for n in range(12):
        tools = [{**TOOL, "name": f"f{n}"}, TOOL][:: 1 if n % 2 else -1]
        assert await status(gw, body(*turns(n), tools=tools)) == {200}


async def test_ten_thousand_messages(gw: SmallWorld) -> None:
    assert await status(gw, body(*turns(4_999))) == {200}
    assert await status(gw, body(*turns(4_998))) == {200}


async def test_histories_that_shrink_and_fork(gw: SmallWorld) -> None:
    grown = turns(30)
    for said in (grown, grown[:6], grown[:10] + turns(3)[::-1][:1] + grown[:1], grown[:29], grown):
        assert await status(gw, body(*said)) <= {200}


async def test_two_runs_under_one_session_id_do_not_mix(gw: SmallWorld) -> None:
    async with Recorder() as upstream:
        at = provider(upstream.base_url, Wire.ANTHROPIC, cache_rules="anthropic")
        async with SmallWorld([deployment(at, "m", "claude-opus-5")], cache_rules=RULES) as both:
            for n in range(3):
                for run in ("one", "two"):
                    # a clock in the system prompt and in every message, tools of their own in an order of its own
                    own = [{**TOOL, "name": f"{run}-{i}"} for i in range(3)][:: 1 if n % 2 else -1]
                    said = [{"role": "user", "content": f"{run} at 9:1{i}"} for i in range(n + 1)]
                    asked = body(*said, system=f"You are {run}. It is 9:1{n}.\n{LONG}", tools=own)
                    headers = {"x-cache-level": "relocate", "x-task-id": "same"}
                    async with both.http.post(
                        "/v1/messages", data=compact({**asked, "model": "m"}), headers=headers
                    ) as a:
                        assert a.status == 200
                        await a.read()
                    arrived = msgspec.json.decode(upstream.received[-1].body)
                    other = "two" if run == "one" else "one"
                    assert other not in json.dumps(arrived)
                    assert [t["name"] for t in arrived["tools"]] == [f"{run}-{i}" for i in (2, 1, 0)]
                    assert f"9:1{n}" in json.dumps(arrived)


LOOKS_ODD: list[Callable[[bytes], bytes]] = [
    lambda raw: raw.replace(b'"messages":', b'"mess\\u0061ges":'),
    lambda raw: json.dumps(json.loads(raw), indent=2, ensure_ascii=True).encode(),
    lambda raw: raw.replace(b",", b" , \t").replace(b"[{", b"[ {\r\n"),
    lambda raw: raw.replace(b'"role":"user","content":"go"', b'"content":"go","role":"user"'),
    lambda raw: raw.replace(b'"content":"go"', b'"content":"go","content":"went"'),
]


@pytest.mark.parametrize("odd", LOOKS_ODD)
async def test_spellings_of_json(gw: SmallWorld, odd: Callable[[bytes], bytes]) -> None:
    raw = odd(compact(body(*turns(3), tools=[TOOL])))
    for level in Level:
        async with gw.http.post("/v1/messages", data=raw, headers={"x-cache-level": level}) as answer:
            assert answer.status in (200, 400)
            await answer.read()
