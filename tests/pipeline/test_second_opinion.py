"""Vendors are asked why they did not read a prompt, where that is switched on and they can be; their word is kept."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.core.second_opinion import opinion
from gateway.core.shaping import CachingPolicy, Level
from tests.support.played_cache import RULES
from tests.support.recorder import Recorder, Script, named
from tests.support.small_world import SmallWorld, Wire, deployment, provider

ASK = CachingPolicy(level=Level.OBSERVE, diagnostics=True)
MESSAGES, RESPONSES = "/t/run/v1/messages", "/t/run/v1/responses"
RULE_TEXT = "rule\n" * 2_000
MISS = {"cache_miss_reason": {"type": "system_changed", "cache_missed_input_tokens": 2_500}}
EVENTS = {"Content-Type": "text/event-stream"}


@asynccontextmanager
async def world(
    family: str, model: str, wire: Wire, caching: CachingPolicy = ASK
) -> AsyncIterator[tuple[SmallWorld, Recorder]]:
    async with Recorder() as upstream:
        at = provider(upstream.base_url, wire, cache_rules=family)
        async with SmallWorld([deployment(at, "m", model)], cache_rules=RULES, caching=caching) as gw:
            yield gw, upstream


async def send(gw: SmallWorld, path: str, **asked: Any) -> None:
    async with gw.http.post(path, json={"model": "m", **asked}) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
    await gw.settled()


def message(number: int, read: int, diagnostics: Any = None) -> dict[str, Any]:
    usage = {"input_tokens": 2_600 - read, "cache_read_input_tokens": read, "output_tokens": 5}
    said = {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "stop_reason": "end_turn",
    }
    return {**said, "content": [], "usage": usage, "diagnostics": diagnostics}


def whole(document: dict[str, Any]) -> Script:
    return Script(200, [json.dumps(document).encode()])


def streamed(document: dict[str, Any]) -> Script:
    ends: dict[str, object] = {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn"},
        "usage": {"output_tokens": 5},
    }
    return Script(
        200, [named({"type": "message_start", "message": document}, ends, {"type": "message_stop"})], EVENTS
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_anthropic_is_told_the_answer_before_and_what_it_says_is_kept(stream: bool) -> None:
    async with world("anthropic", "claude-opus-4-8", Wire.ANTHROPIC) as (gw, upstream):
        form = streamed if stream else whole
        upstream.scripts = [form(message(1, 2_560)), form(message(2, 2_560)), form(message(3, 0, MISS))]
        marked = {"cache_control": {"type": "ephemeral"}}
        for number in (1, 2, 3):
            text = RULE_TEXT if number < 3 else RULE_TEXT.replace("rule", "9:14", 1)
            said = [{"role": "user", "content": str(n)} for n in range(number)]
            system = [{"type": "text", "text": text, **marked}]
            await send(gw, MESSAGES, max_tokens=9, stream=stream, system=system, messages=said)
        asked = [json.loads(each.body).get("diagnostics") for each in upstream.received]
        assert asked == [
            {"previous_message_id": None},
            {"previous_message_id": "msg_1"},
            {"previous_message_id": "msg_2"},
        ]
        miss = gw.ledger.entries[-1][1].miss
        assert miss is not None
        assert (miss.cause, miss.vendor) == ("system_line_changed", "system_changed, 2500 tokens")


async def test_a_clients_own_question_and_other_vendors_are_left_alone() -> None:
    said = [{"role": "user", "content": "hi"}]
    own = {"previous_message_id": "msg_of_mine"}
    async with world("anthropic", "claude-opus-4-8", Wire.ANTHROPIC) as (gw, upstream):
        await send(gw, MESSAGES, max_tokens=9, messages=said, diagnostics=own)
        assert json.loads(upstream.received[0].body)["diagnostics"] == own
    for family, caching in (("deepseek", ASK), ("anthropic", CachingPolicy())):
        async with world(family, "claude-opus-4-8", Wire.ANTHROPIC, caching) as (gw, upstream):
            await send(gw, MESSAGES, max_tokens=9, messages=said)
            assert b"diagnostics" not in upstream.received[0].body


@pytest.mark.parametrize(("model", "offered"), [("gpt-6-sol", True), ("gpt-5.4", False)])
async def test_openai_is_told_the_response_before_from_the_generation_on_that_knows_it(
    model: str, offered: bool
) -> None:
    async with world("openai", model, Wire.OPENAI) as (gw, upstream):
        usage = {"input_tokens": 2_600, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 0}}
        said = {"object": "response", "model": "m", "status": "completed", "output": [], "usage": usage}
        upstream.scripts = [whole({"id": f"resp_{number}", **said}) for number in (1, 2)]
        for _ in range(2):
            await send(gw, RESPONSES, input="hi")
        asked = [json.loads(each.body).get("prompt_cache_options") for each in upstream.received]
        assert asked == [None, {"comparison_response_id": "resp_1"} if offered else None]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"diagnostics": MISS}, "system_changed, 2500 tokens"),
        ({"type": "message_start", "message": {"diagnostics": MISS}}, "system_changed, 2500 tokens"),
        ({"diagnostics": {"cache_miss_reason": None}}, ""),
        (
            {"diagnostics": {"cache_miss_reason": {"type": "previous_message_not_found"}}},
            "previous_message_not_found",
        ),
        (
            {
                "prompt_cache_diagnostics": {
                    "type": "cache_miss",
                    "reason": "tools_changed",
                    "cache_missed_tokens": 7,
                }
            },
            "tools_changed, 7 tokens",
        ),
        (
            {"type": "response.completed", "response": {"prompt_cache_diagnostics": {"type": "cache_hit"}}},
            "cache_hit",
        ),
        ({"diagnostics": {"cache_miss_reason": {"type": "<b>\n" + "x" * 100}}}, "b" + "x" * 63),
        ({"diagnostics": "none"}, ""),
        ({}, ""),
        ([], ""),
    ],
)
def test_a_vendors_word_is_read_where_it_stands(answer: Any, said: str) -> None:
    assert opinion(json.dumps(answer).encode()) == said
    assert opinion(b"no json") == ""
