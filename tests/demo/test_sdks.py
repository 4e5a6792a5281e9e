"""The vendors' own libraries, straight against the demo provider."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from gateway.demo.provider import DemoProvider
from tests.demo.talk import BASH, BASH_SCHEMA

HELLO: Any = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
async def provider() -> AsyncIterator[DemoProvider]:
    async with DemoProvider() as provider:
        yield provider


@pytest.fixture
async def gpt(provider: DemoProvider) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=provider.base_url, api_key="k", max_retries=0) as client:
        yield client


@pytest.fixture
async def claude(provider: DemoProvider) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=provider.root_url, api_key="k", max_retries=0) as client:
        yield client


async def test_chat(gpt: openai.AsyncOpenAI) -> None:
    plain = await gpt.chat.completions.create(model="gpt-5", messages=HELLO)
    text, usage = "", None
    stream = await gpt.chat.completions.create(
        model="gpt-5", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    async for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert (text, usage) == (plain.choices[0].message.content, plain.usage)


async def test_chat_tools_and_structured_output(gpt: openai.AsyncOpenAI) -> None:
    class Verdict(BaseModel):
        passed: bool
        reasons: list[str]

    strict = {**BASH["chat"][0]["function"], "strict": True}
    tools: Any = [{"type": "function", "function": strict}]
    async with gpt.chat.completions.stream(model="demo-fast", messages=HELLO, tools=tools) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.tool_calls
    assert final.choices[0].message.tool_calls[0].function.arguments == '{"command":"echo hi"}'
    parsed = await gpt.chat.completions.parse(model="demo-fast", messages=HELLO, response_format=Verdict)
    assert parsed.choices[0].message.parsed == Verdict(passed=False, reasons=[])


async def test_responses(gpt: openai.AsyncOpenAI) -> None:
    plain = await gpt.responses.create(model="demo-fast", instructions="Be terse.", input="Say hello.")
    async with gpt.responses.stream(
        model="demo-fast", instructions="Be terse.", input="Say hello."
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert (final.output_text, final.usage, kinds[-1]) == (
        plain.output_text,
        plain.usage,
        "response.completed",
    )
    tools: Any = [{"type": "function", "name": "bash", "parameters": BASH_SCHEMA, "strict": False}]
    async with gpt.responses.stream(model="demo-fast", input="Say hello.", tools=tools) as stream:
        called = await stream.get_final_response()
    [item] = called.output
    assert item.type == "function_call"
    assert json.loads(item.arguments) == {"command": "echo hi"}


async def test_embeddings_and_models(gpt: openai.AsyncOpenAI) -> None:
    vectors = await gpt.embeddings.create(model="text-embedding-3-small", input=["a", "b"])
    assert [len(row.embedding) for row in vectors.data] == [256, 256]
    assert [model.id async for model in gpt.models.list()] == [
        "demo-large",
        "demo-small",
        "demo-fast",
        "demo-embed",
    ]
    assert (await gpt.models.retrieve("gpt-5")).id == "gpt-5"


async def test_messages(claude: anthropic.AsyncAnthropic) -> None:
    plain = await claude.messages.create(model="demo-large", max_tokens=500, messages=HELLO)
    async with claude.messages.stream(model="demo-large", max_tokens=500, messages=HELLO) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert plain.content[0].type == "text"
    assert (text, final.stop_reason) == (plain.content[0].text, "end_turn")
    assert final.usage.output_tokens == plain.usage.output_tokens
    counted = await claude.messages.count_tokens(model="demo-large", messages=HELLO)
    assert counted.input_tokens == plain.usage.input_tokens


async def test_messages_tools(claude: anthropic.AsyncAnthropic) -> None:
    tools: Any = BASH["messages"]
    async with claude.messages.stream(
        model="demo-large", max_tokens=500, messages=HELLO, tools=tools
    ) as stream:
        final = await stream.get_final_message()
    assert final.content[0].type == "tool_use"
    assert (final.content[0].input, final.stop_reason) == ({"command": "echo hi"}, "tool_use")


async def test_errors_are_understood(gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist at the demo provider"):
        await gpt.chat.completions.create(model="nobody", messages=HELLO)
    marked: Any = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}] * 5
    with pytest.raises(anthropic.BadRequestError, match="A maximum of 4 blocks"):
        await claude.messages.create(
            model="demo-large", max_tokens=5, messages=[{"role": "user", "content": marked}]
        )
