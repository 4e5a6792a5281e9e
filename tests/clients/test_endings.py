"""Answers that the gateway gives by itself, read by the vendors' own libraries."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from gateway.core.entry import OnExceed, Refused
from tests.clients.conftest import CLAUDE, GPT
from tests.support.small_world import SmallWorld

SAID = "the budget of the key k is used up: $2 spent and $0 reserved of $2; this request may cost up to $"


@pytest.fixture
def stopped(gw: SmallWorld) -> SmallWorld:
    gw.ledger.refuse = Refused("key:k", 2 * 10**9, 2 * 10**9, 0, None, on_exceed=OnExceed.SOFT_STOP)
    return gw


async def test_a_soft_stop_in_chat(stopped: SmallWorld, gpt: openai.AsyncOpenAI) -> None:
    hello: Any = [{"role": "user", "content": "Say hello."}]
    plain = await gpt.chat.completions.create(model=GPT, messages=hello, n=2)
    assert [(c.index, c.finish_reason, c.message.tool_calls) for c in plain.choices] == [
        (0, "stop", None),
        (1, "stop", None),
    ]
    assert str(plain.choices[1].message.content).startswith(SAID)
    assert (plain.model, plain.usage and plain.usage.total_tokens) == (GPT, 0)
    async with gpt.chat.completions.stream(
        model=GPT,
        messages=hello,
        stream_options={"include_usage": True},
    ) as stream:
        whole = await stream.get_final_completion()
    assert str(whole.choices[0].message.content).startswith(SAID)
    assert (whole.choices[0].finish_reason, whole.usage and whole.usage.total_tokens) == ("stop", 0)
    assert [done.status for done in stopped.done] == [200, 200]


async def test_a_soft_stop_in_responses(stopped: SmallWorld, gpt: openai.AsyncOpenAI) -> None:
    plain = await gpt.responses.create(model=GPT, input="Say hello.")
    assert (plain.status, plain.output_text.startswith(SAID)) == ("completed", True)
    async with gpt.responses.stream(model=GPT, input="Say hello.") as stream:
        whole = await stream.get_final_response()
    assert (whole.status, whole.output_text.startswith(SAID), whole.usage and whole.usage.total_tokens) == (
        "completed", True, 0,
    )  # fmt: skip


async def test_a_soft_stop_in_messages(stopped: SmallWorld, claude: anthropic.AsyncAnthropic) -> None:
    hello: Any = [{"role": "user", "content": "Say hello."}]
    plain = await claude.messages.create(model=CLAUDE, max_tokens=50, messages=hello)
    async with claude.messages.stream(model=CLAUDE, max_tokens=50, messages=hello) as stream:
        whole = await stream.get_final_message()
    for message in (plain, whole):
        (block,) = message.content
        assert (message.stop_reason, block.type, message.usage.output_tokens) == ("end_turn", "text", 0)
        assert block.type == "text"
        assert block.text.startswith(SAID)


async def test_a_stream_that_fails_for_codex_is_read_as_failed(gw: SmallWorld) -> None:
    gw.ledger.refuse = Refused("key:k", 2 * 10**9, 2 * 10**9, 0, None)
    agent = {"User-Agent": "codex_exec/0.171.0 (Linux; x86_64) xterm"}
    async with openai.AsyncOpenAI(
        base_url=f"{gw.url}/v1", api_key=gw.http.headers["Authorization"].split()[1], default_headers=agent
    ) as codex:
        events = [e async for e in await codex.responses.create(model=GPT, input="Go on.", stream=True)]
    assert [event.type for event in events] == ["response.created", "response.failed"]
    assert events[-1].type == "response.failed"
    error = events[-1].response.error
    assert error is not None
    assert (error.code, error.message.startswith(SAID)) == ("invalid_prompt", True)
