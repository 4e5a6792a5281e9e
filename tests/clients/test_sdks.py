"""The vendors' own Python libraries with nothing changed but base URL and key: every surface, streamed or not."""

from __future__ import annotations

import base64
import json
from typing import Any

import anthropic
import openai
import pytest
from pydantic import BaseModel

from gateway.core.entry import Kind
from gateway.core.usage import Quality
from gateway.demo.provider import DemoProvider
from tests.clients.conftest import CLAUDE, EMBED, GPT
from tests.support.small_world import KEY, SmallWorld

HELLO: Any = [{"role": "user", "content": "Say hello."}]
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA, "strict": True}}]
MESSAGES_TOOLS: Any = [{"name": "bash", "description": "run", "input_schema": SCHEMA}]
PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 60).decode()


class Verdict(BaseModel):
    passed: bool
    reasons: list[str]


async def test_chat_streamed_and_not(gpt: openai.AsyncOpenAI, gw: SmallWorld) -> None:
    plain = await gpt.chat.completions.create(model=GPT, messages=HELLO)
    text, usage = "", None
    async for chunk in await gpt.chat.completions.create(
        model=GPT, messages=HELLO, stream=True, stream_options={"include_usage": True}
    ):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    # the gateway asks the provider for usage and keeps the answer from a caller who did not ask
    quiet = [
        (len(chunk.choices), chunk.usage)
        async for chunk in await gpt.chat.completions.create(model=GPT, messages=HELLO, stream=True)
    ]
    assert text.startswith("[demo] ")
    assert (text, usage) == (plain.choices[0].message.content, plain.usage)
    assert set(quiet) == {(1, None)}
    await gw.settled()
    outcomes = [outcome for _, outcome in gw.ledger.entries]
    assert [(o.kind, o.quality, o.finish) for o in outcomes] == [(Kind.POST, Quality.EXACT, "stop")] * 3
    assert len({(o.usage, o.cost_nano_usd) for o in outcomes}) == 1


async def test_what_it_cost_is_in_the_body_and_in_headers(gpt: openai.AsyncOpenAI, gw: SmallWorld) -> None:
    raw = await gpt.chat.completions.with_raw_response.create(model=GPT, messages=HELLO)
    usage = raw.parse().usage
    assert usage is not None
    await gw.settled()
    [(attempt, outcome)] = gw.ledger.entries
    cost = outcome.cost_nano_usd / 1_000_000_000
    assert usage.model_extra is not None
    assert (usage.model_extra["cost"], float(raw.headers["x-cost-usd"])) == (cost, cost)
    assert (raw.headers["x-task-id"], raw.request_id) == (attempt.task_id, attempt.request_id)


async def test_chat_calls_a_tool_and_takes_its_result(gpt: openai.AsyncOpenAI, gw: SmallWorld) -> None:
    async with gpt.chat.completions.stream(model=GPT, messages=HELLO, tools=CHAT_TOOLS) as stream:
        asked = (await stream.get_final_completion()).choices[0].message
    assert asked.tool_calls is not None
    [call] = asked.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("bash", {"command": "echo hi"})
    told: Any = [*HELLO, asked.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "hi"}]
    answer = await gpt.chat.completions.create(model=GPT, messages=told, tools=CHAT_TOOLS)
    assert (answer.choices[0].finish_reason, answer.choices[0].message.tool_calls) == ("stop", None)
    await gw.settled()
    assert len({attempt.task_id for attempt, _ in gw.ledger.entries}) == 1


async def test_chat_with_an_image_and_with_structured_output(
    gpt: openai.AsyncOpenAI, demo: DemoProvider
) -> None:
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    message: Any = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, picture]}
    seen = await gpt.chat.completions.create(model=GPT, messages=[message])
    assert seen.choices[0].message.content
    assert json.loads(demo.seen[-1].body) == {"messages": [message], "model": "demo-fast"}
    parsed = await gpt.chat.completions.parse(model=GPT, messages=HELLO, response_format=Verdict)
    assert parsed.choices[0].message.parsed == Verdict(passed=False, reasons=[])


async def test_responses_streamed_and_not(gpt: openai.AsyncOpenAI) -> None:
    plain = await gpt.responses.create(model=GPT, instructions="Be terse.", input="Say hello.")
    async with gpt.responses.stream(model=GPT, instructions="Be terse.", input="Say hello.") as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
    assert (final.output_text, final.usage) == (plain.output_text, plain.usage)
    tools: Any = [{"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}]
    [call] = (await gpt.responses.create(model=GPT, input="Say hello.", tools=tools)).output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("bash", {"command": "echo hi"})
    parsed = await gpt.responses.parse(model=GPT, input="Say hello.", text_format=Verdict)
    assert parsed.output_parsed == Verdict(passed=False, reasons=[])


async def test_embeddings_in_both_encodings(gpt: openai.AsyncOpenAI, demo: DemoProvider) -> None:
    packed = await gpt.embeddings.create(model=EMBED, input=["a", "b"])
    assert json.loads(demo.seen[-1].body)["encoding_format"] == "base64"  # the library's own default
    plain = await gpt.embeddings.create(model=EMBED, input=["a", "b"], encoding_format="float")
    assert [row.index for row in packed.data] == [0, 1]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert len(one.embedding) == 256
        assert one.embedding == pytest.approx(other.embedding, rel=1e-6)


async def test_both_libraries_list_the_models(
    gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic
) -> None:
    assert [m.id async for m in gpt.models.list()] == [GPT, CLAUDE, EMBED]
    assert [m.id async for m in claude.models.list()] == [GPT, CLAUDE, EMBED]
    assert (await gpt.models.retrieve(GPT)).id == GPT
    assert (
        await claude.models.retrieve(f"up/{CLAUDE}")
    ).id == f"up/{CLAUDE}"  # what may be asked for is there
    with pytest.raises(openai.NotFoundError, match="'gpt-6' does not exist or this key may not use it"):
        await gpt.models.retrieve("gpt-6")


async def test_messages_streamed_and_not(claude: anthropic.AsyncAnthropic, gw: SmallWorld) -> None:
    plain = await claude.messages.create(model=CLAUDE, max_tokens=500, messages=HELLO)
    async with claude.messages.stream(model=CLAUDE, max_tokens=500, messages=HELLO) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert plain.content[0].type == "text"
    assert (text, final.stop_reason) == (plain.content[0].text, "end_turn")
    assert final.usage.output_tokens == plain.usage.output_tokens
    counted = await claude.messages.count_tokens(model=CLAUDE, messages=HELLO)
    assert counted.input_tokens == plain.usage.input_tokens
    await gw.settled()
    assert [(a.operation, o.quality, o.cost_nano_usd > 0) for a, o in gw.ledger.entries] == [
        ("messages", Quality.EXACT, True),
        ("messages", Quality.EXACT, True),
        ("count_tokens", Quality.EXACT, False),
    ]


async def test_messages_call_a_tool_and_take_its_result(
    claude: anthropic.AsyncAnthropic, gw: SmallWorld
) -> None:
    async with claude.messages.stream(
        model=CLAUDE, max_tokens=500, messages=HELLO, tools=MESSAGES_TOOLS
    ) as stream:
        asked = await stream.get_final_message()
    [call] = asked.content
    assert call.type == "tool_use"
    assert (asked.stop_reason, call.name, call.input) == ("tool_use", "bash", {"command": "echo hi"})
    told: Any = [
        *HELLO,
        {"role": "assistant", "content": [call.to_dict()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "hi"}]},
    ]
    answer = await claude.messages.create(model=CLAUDE, max_tokens=500, messages=told, tools=MESSAGES_TOOLS)
    assert (answer.stop_reason, answer.content[0].type) == ("end_turn", "text")
    await gw.settled()
    assert len({attempt.task_id for attempt, _ in gw.ledger.entries}) == 1


async def test_messages_with_an_image_a_cached_system_prompt_and_structured_output(
    claude: anthropic.AsyncAnthropic, gw: SmallWorld, demo: DemoProvider
) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    looking: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    system: Any = [{"type": "text", "text": "Be terse. " * 500, "cache_control": {"type": "ephemeral"}}]
    for _ in range(2):
        answer = await claude.messages.create(model=CLAUDE, max_tokens=500, system=system, messages=looking)
    assert json.loads(demo.seen[-1].body)["messages"] == looking
    assert json.loads(demo.seen[-1].body)["system"] == system
    await gw.settled()
    first, second = [outcome.usage for _, outcome in gw.ledger.entries]
    assert first.cache_write_5m == second.cache_read == answer.usage.cache_read_input_tokens
    assert second.cache_read > 1024
    schema = {"type": "object", "properties": {"passed": {"type": "boolean"}}, "required": ["passed"]}
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    shaped = await claude.messages.create(model=CLAUDE, max_tokens=500, messages=HELLO, output_config=form)
    assert shaped.content[0].type == "text"
    assert json.loads(shaped.content[0].text) == {"passed": False}


async def test_the_key_is_taken_from_either_header_and_v1_may_be_left_out(gw: SmallWorld) -> None:
    """What each library does by default, and the other way round."""
    by_header: Any = {"Authorization": openai.Omit(), "x-api-key": KEY}
    async with (
        openai.AsyncOpenAI(base_url=gw.url, api_key="not-sent") as gpt,
        anthropic.AsyncAnthropic(base_url=gw.url, auth_token=KEY) as by_bearer,
        anthropic.AsyncAnthropic(base_url=gw.url, api_key=KEY) as by_key,
    ):
        chat = await gpt.chat.completions.create(model=GPT, messages=HELLO, extra_headers=by_header)
        response = await gpt.responses.create(model=GPT, input="Say hello.", extra_headers=by_header)
        vectors = await gpt.embeddings.create(model=EMBED, input="a", extra_headers=by_header)
        assert (len(chat.choices), response.status, len(vectors.data)) == (1, "completed", 1)
        for claude in (by_bearer, by_key):
            assert (await claude.messages.create(model=CLAUDE, max_tokens=5, messages=HELLO)).content
    assert [(done.path, done.status) for done in gw.done] == [
        ("/chat/completions", 200),
        ("/responses", 200),
        ("/embeddings", 200),
        ("/v1/messages", 200),
        ("/v1/messages", 200),
    ]


async def test_unknown_fields_and_betas_go_through(
    gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, demo: DemoProvider
) -> None:
    await gpt.chat.completions.create(model=GPT, messages=HELLO, extra_body={"new_option": {"deep": [1]}})
    assert json.loads(demo.seen[-1].body)["new_option"] == {"deep": [1]}
    await claude.beta.messages.create(
        model=CLAUDE, max_tokens=5, messages=HELLO, betas=["context-management-2025-06-27"]
    )
    assert demo.seen[-1].headers["anthropic-beta"] == "context-management-2025-06-27"
    assert demo.seen[-1].path == "/v1/messages"
