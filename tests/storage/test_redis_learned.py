"""Replicas send the same bytes of a run: what one has learned of its tools and its volatile lines, the others know."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.storage.redis_artifacts import BYTES_MAX, RedisArtifacts
from gateway.storage.redis_learned import RedisLearned
from tests.pipeline.test_shaping import MESSAGES, RULE_TEXT, TOOLS, messages, sent
from tests.support.played_cache import RULES, compact
from tests.support.recorder import Recorder
from tests.support.servers import RedisServer
from tests.support.small_world import SmallWorld, Wire, deployment, provider

NOBODY = "redis://127.0.0.1:1/0"


@dataclass(slots=True)
class Pair:
    worlds: list[SmallWorld]
    upstream: Recorder
    stores: list[RedisLearned]

    async def send(self, number: int, body: bytes, **headers: str) -> bytes:
        arrived, _ = await sent(self.worlds[number], self.upstream, MESSAGES, body, **headers)
        return arrived


@asynccontextmanager
async def pair(url: str) -> AsyncIterator[Pair]:
    """Two replicas that share what they learn at `url`."""
    stores = [RedisLearned(url, timeout_s=5.0) for _ in range(2)]
    for store in stores:
        await store.start()
    try:
        async with Recorder() as upstream:
            at = provider(upstream.base_url, Wire.ANTHROPIC, cache_rules="anthropic")
            there = deployment(at, "m", "claude-opus-4-8")
            async with (
                SmallWorld([there], cache_rules=RULES, learned=stores[0]) as one,
                SmallWorld([there], cache_rules=RULES, learned=stores[1]) as other,
            ):
                yield Pair([one, other], upstream, stores)
    finally:
        for store in stores:
            await store.close()


def tools_in(body: bytes) -> list[str]:
    return [tool["name"] for tool in json.loads(body)["tools"]]


@pytest.mark.parametrize("session", [{}, {"x_session_id": "one"}])
async def test_tools_keep_the_order_in_which_any_replica_first_sent_them(
    own_redis: RedisServer, session: dict[str, str]
) -> None:
    async with pair(own_redis.url) as two:
        first = await two.send(0, messages(), **session)
        assert await two.send(1, messages(tools=TOOLS[::-1]), **session) == first
        assert await two.send(1, messages(tools=TOOLS[::-1]), **session) == first
        assert await two.send(0, messages(tools=TOOLS[::-1]), **session) == first

        run = {"name": "run", "description": "r", "input_schema": {"type": "object"}}
        more: list[dict[str, Any]] = [*TOOLS, run]
        assert tools_in(await two.send(1, messages(tools=more[::-1]), **session)) == ["run", "write", "read"]
        assert tools_in(await two.send(0, messages(tools=more), **session)) == ["run", "write", "read"]


async def test_without_redis_each_replica_keeps_its_own_first_order() -> None:
    async with pair(NOBODY) as two:
        assert tools_in(await two.send(0, messages())) == ["read", "write"]
        assert tools_in(await two.send(1, messages(tools=TOOLS[::-1]))) == ["write", "read"]
        assert tools_in(await two.send(1, messages())) == ["write", "read"]


async def test_another_key_of_objects_is_not_put_right_by_an_order(own_redis: RedisServer) -> None:
    async with pair(own_redis.url) as two:
        await two.send(0, messages())
        turned: list[dict[str, Any]] = [dict(reversed(tool.items())) for tool in TOOLS[::-1]]
        assert tools_in(await two.send(1, messages(tools=turned))) == ["write", "read"]


def clocked(time: str, *said: dict[str, Any]) -> bytes:
    system = f"Work with care.\nIt is {time}.\n{RULE_TEXT}"
    said = said or ({"role": "user", "content": "Fix it."},)
    return compact({"model": "m", "max_tokens": 9, "system": system, "messages": list(said)})


@pytest.mark.parametrize("up", [True, False])
async def test_what_stands_in_a_line_s_place_is_the_same_at_all_replicas(
    own_redis: RedisServer, up: bool
) -> None:
    async with pair(own_redis.url if up else NOBODY) as two:

        async def stands(number: int, time: str, session: str = "one") -> str | None:
            """What the provider gets in the place of the clock; all else of the system prompt is the same."""
            words = {"x_cache_level": "relocate", "x_session_id": session}
            arrived = json.loads(await two.send(number, clocked(time), **words))
            assert time in json.dumps(arrived)
            first = arrived["system"] if isinstance(arrived["system"], str) else arrived["system"][0]["text"]
            line = first.split("\n")[1]
            return line if "It is" in line else None

        assert await stands(0, "10:00") == "It is 10:00."
        # the other has never seen this run before, but the first one has told
        assert await stands(1, "10:01") == f"It is {'10:00' if up else '10:01'}."
        assert await stands(0, "10:02") == "It is 10:00."
        # a longer wording takes the place, and late in a run, too
        for n in range(3, 6):
            assert await stands(1, f"10:0{n}") == f"It is {'10:00' if up else '10:01'}."
        # and goes where a run has it that begins now
        assert await stands(1, "2026-11-30 10:06") is None
        if up:
            assert await stands(0, "2026-11-30 10:07:30") is None
            for number in (0, 1, 0):
                assert await stands(number, "10:08", "another") is None
            assert await stands(1, "10:00", "a third") == "It is 10:00."


async def test_what_lines_say_is_said_at_the_same_places_by_all_replicas(own_redis: RedisServer) -> None:
    """Whichever serves a step: the next one begins with the bytes of the one before."""
    async with pair(own_redis.url) as two:
        words = {"x_cache_level": "relocate", "x_session_id": "one"}
        said = [{"role": "user", "content": "Fix it."}]
        before: list[Any] = []
        for step, (number, clock) in enumerate(
            [
                (0, "0"),
                (0, "1"),
                (0, "1"),
                (0, "2"),
                (1, "2"),
                (1, "3"),
                (0, "3"),
                (0, "4"),
                (1, "3"),
                (0, "3"),
            ]
        ):
            sent = json.loads(await two.send(number, clocked(f"10:0{clock}", *said), **words))
            now = [_plain(m) for m in ({"content": sent["system"]}, *sent["messages"])]
            assert now[: len(before)] == before, step
            before = now
            said += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": f"step {step}"}]
            for store in two.stores:
                await store.idle()
        assert [text[-6:] for text in before if "As of now" in text] == [
            "10:01.",
            "10:02.",
            "10:03.",
            "10:04.",
            "10:03.",
        ]


def _plain(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "|".join(block["text"] for block in content)


async def test_an_artifact_is_read_from_any_replica(own_redis: RedisServer) -> None:
    one, other = RedisArtifacts(own_redis.url), RedisArtifacts(own_redis.url)
    nobody = RedisArtifacts(NOBODY)
    for store in (one, other, nobody):
        await store.start()
    try:
        one.put("task_1", "abc", "größer " * 1_000)
        one.put("task_1", "long", "".join(chr(0x4E00 + n * 7919 % 20_000) for n in range(BYTES_MAX)))
        nobody.put("task_1", "def", "text")
        await one.idle()
        assert await other.text("task_1", "abc") == "größer " * 1_000
        assert await other.text("task_1", "long") is None
        assert await other.text("task_2", "abc") is None
        assert await nobody.text("task_1", "abc") is None
    finally:
        for store in (one, other, nobody):
            await store.close()
