"""What the demo model says, in three dialects, plain and streamed."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import jsonschema
import pytest

from gateway.demo.provider import DemoProvider
from gateway.demo.schema import minimal
from tests.demo.talk import BASH, HELLO, Talk, final_usage, streamed, talking, token_events

DIALECTS = ["chat", "responses", "messages"]


def said(dialect: str, body: Any) -> str:
    """The text or the tool arguments of a plain answer."""
    if dialect == "chat":
        message = body["choices"][0]["message"]
        return str(message["content"] or message["tool_calls"][0]["function"]["arguments"])
    if dialect == "responses":
        item = body["output"][0]
        return str(item["content"][0]["text"] if item["type"] == "message" else item["arguments"])
    block = body["content"][0]
    return str(
        block["text"] if block["type"] == "text" else json.dumps(block["input"], separators=(",", ":"))
    )


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_stream_says_and_reports_what_the_plain_answer_does(
    dialect: str, tools: bool, talk: Talk
) -> None:
    body = {**HELLO[dialect], **({"tools": BASH[dialect]} if tools else {})}
    plain = await talk.post(dialect, body)
    stream = await talk.post(dialect, streamed(dialect, body))
    tokens = token_events(dialect, stream.events)
    assert "".join(tokens) == said(dialect, plain.body)
    assert final_usage(dialect, stream.events) == plain.body["usage"]
    assert [line.output for line in talk.provider.bill()] == [len(tokens)] * 2


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_two_providers_answer_alike_byte_for_byte(dialect: str) -> None:
    runs = []
    for _ in range(2):
        async with talking(DemoProvider(clock_ms=lambda: 7)) as talk:
            sent = [
                await talk.post(dialect, body) for body in (HELLO[dialect], streamed(dialect, HELLO[dialect]))
            ]
            runs.append([got.raw for got in sent] + [line.nano_usd for line in talk.provider.bill()])
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("dialect", "limit", "end"),
    [
        ("chat", {"max_completion_tokens": 5}, ("choices", 0, "finish_reason", "length")),
        ("chat", {"max_tokens": 5}, ("choices", 0, "finish_reason", "length")),
        ("responses", {"max_output_tokens": 5}, ("incomplete_details", "reason", "max_output_tokens")),
        ("messages", {"max_tokens": 5}, ("stop_reason", "max_tokens")),
    ],
)
async def test_the_output_limit_is_kept(
    dialect: str, limit: dict[str, int], end: tuple[Any, ...], talk: Talk
) -> None:
    got = (await talk.post(dialect, {**HELLO[dialect], **limit})).body
    *path, want = end
    for step in path:
        got = got[step]
    assert got == want
    assert talk.provider.bill()[0].output == 5


async def test_max_tokens_zero_warms_the_cache_and_says_nothing(talk: Talk) -> None:
    system = [{"type": "text", "text": "rule " * 2_000, "cache_control": {"type": "ephemeral"}}]
    body = {**HELLO["messages"], "system": system, "max_tokens": 0}
    first = (await talk.post("messages", body)).body
    assert (first["content"], first["usage"]["output_tokens"]) == ([], 0)
    second = (await talk.post("messages", body)).body
    assert second["usage"]["cache_read_input_tokens"] == first["usage"]["cache_creation_input_tokens"] > 2_000


async def test_usage_is_in_each_dialects_shape(talk: Talk) -> None:
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    marked = [{"type": "text", "text": "word " * 1_500, **hour}]
    ask = {"model": "demo-large", "messages": [{"role": "user", "content": marked}]}
    messages = (await talk.post("messages", {**ask, "max_tokens": 4}, key="a")).body["usage"]
    chat = (await talk.post("chat", {**ask, "max_tokens": 4}, key="b")).body["usage"]
    items = [{"role": "user", "content": [{"type": "input_text", "text": "word " * 1_500}]}]
    body = {"model": "demo-fast", "input": items, "max_output_tokens": 4}
    responses = (await talk.post("responses", body)).body["usage"]
    written = messages["cache_creation_input_tokens"]
    split = {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": written}
    assert messages == {
        "input_tokens": 3,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": 0,
        "cache_creation": split,
        "output_tokens": 4,
        "service_tier": "standard",
    }
    assert chat == {
        "prompt_tokens": written + 3,
        "completion_tokens": 4,
        "total_tokens": written + 7,
        "prompt_tokens_details": {
            "audio_tokens": 0,
            "cached_tokens": 0,
            "cache_write_tokens": written,
            "cache_creation_token_details": split,
        },
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }
    assert responses == {
        "input_tokens": written + 3,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": written},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": written + 7,
    }


async def test_message_start_has_the_input_and_chat_has_usage_only_on_request(talk: Talk) -> None:
    events = (await talk.post("messages", streamed("messages", HELLO["messages"]))).events
    assert events[0]["message"]["usage"] | {"output_tokens": None} == events[-2]["usage"] | {
        "output_tokens": None
    }
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    quiet = (await talk.post("chat", {**HELLO["chat"], "stream": True})).events
    assert all("usage" not in event for event in quiet[:-1])
    assert quiet[-1] == "[DONE]"


async def test_a_tool_is_called_once_and_then_the_answer_is_text(talk: Talk) -> None:
    first = {**HELLO["messages"], "tools": BASH["messages"]}
    call = (await talk.post("messages", first)).body["content"]
    assert (call[0]["name"], call[0]["input"]) == ("bash", {"command": "echo hi"})
    result = {"type": "tool_result", "tool_use_id": call[0]["id"], "content": "hi"}
    turns = [{"role": "assistant", "content": call}, {"role": "user", "content": [result]}]
    done = (await talk.post("messages", {**first, "messages": first["messages"] + turns})).body
    assert (done["stop_reason"], done["content"][0]["text"][:6]) == ("end_turn", "[demo]")
    none = (await talk.post("messages", {**first, "tool_choice": {"type": "none"}})).body
    assert none["stop_reason"] == "end_turn"


async def test_mini_swe_agent_comes_to_its_end(talk: Talk) -> None:
    task = "Work. To finish, run `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`."
    history: list[dict[str, Any]] = [{"role": "user", "content": task}]
    commands = []
    for _ in range(5):
        body = {"model": "demo-fast", "messages": history, "tools": BASH["chat"]}
        message = (await talk.post("chat", body)).body["choices"][0]["message"]
        if "tool_calls" not in message:
            break
        call = message["tool_calls"][0]
        commands.append(json.loads(call["function"]["arguments"])["command"])
        history += [message, {"role": "tool", "tool_call_id": call["id"], "content": "x"}]
    # mini stops at the second; an agent that only quotes the marker is let go after three more
    assert commands == ["echo hi", *["echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"] * 3]


async def test_a_forced_tool_is_called_with_valid_arguments(talk: Talk) -> None:
    schema = {
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 2}, "note": {}},
        "required": ["unit", "days"],
    }
    tools = [*BASH["responses"], {"type": "function", "name": "weather", "parameters": schema}]
    body = {**HELLO["responses"], "tools": tools, "tool_choice": {"type": "function", "name": "weather"}}
    item = (await talk.post("responses", body)).body["output"][0]
    assert (item["name"], json.loads(item["arguments"])) == ("weather", {"unit": "C", "days": 2})


async def test_directives_steer_rounds_and_length(talk: Talk) -> None:
    long = (
        await talk.post(
            "chat", {"model": "gpt-x", "messages": [{"role": "user", "content": "demo:output=777"}]}
        )
    ).body
    assert long["usage"]["completion_tokens"] == 777
    assert long["model"] == "gpt-x"


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False},
    {"type": "array", "items": {"type": "integer", "minimum": 3, "multipleOf": 2}, "minItems": 2},
    {"type": "object", "properties": {"e": {"enum": ["x", "y"]}, "c": {"const": 4}}, "required": ["e", "c"]},
    {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}], "$defs": {"node": {"type": "object", "required": ["n"],
     "properties": {"n": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}}},
    {"type": "object", "required": ["when", "id", "mail"], "properties": {
        "when": {"type": "string", "format": "date-time"}, "id": {"type": "string", "format": "uuid"},
        "mail": {"type": "string", "format": "email"}}},
    {"allOf": [{"type": "object", "properties": {"p": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}},
     "required": ["p"]}, {"properties": {"q": {"type": ["boolean", "null"]}}, "required": ["q"]}]},
    {"type": "object", "properties": {"s": {"type": "string", "minLength": 9, "maxLength": 12},
     "t": {"type": "string", "pattern": "^[0-9]{5}$"}, "u": {"type": "integer", "maximum": -3}}, "required": ["s", "t", "u"]},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "boolean"}], "minItems": 3, "items": {"type": "null"}},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS)
def test_minimal_instances_satisfy_their_schema(schema: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(
        minimal(schema)
    )


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_structured_output_in_each_dialect(dialect: str, talk: Talk) -> None:
    schema = SCHEMAS[0]
    form: dict[str, dict[str, Any]] = {
        "chat": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        "responses": {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
        "messages": {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    }
    got = await talk.post(dialect, {**HELLO[dialect], **form[dialect]})
    assert json.loads(said(dialect, got.body)) == {"a": "demo"}


async def test_several_choices_are_billed_together(talk: Talk) -> None:
    body = {**HELLO["chat"], "n": 3}
    plain = (await talk.post("chat", body)).body
    assert len({choice["message"]["content"] for choice in plain["choices"]}) == 3
    stream = (await talk.post("chat", streamed("chat", body))).events
    assert len(token_events("chat", stream)) == plain["usage"]["completion_tokens"]


async def test_images_count_by_a_fixed_formula(talk: Talk) -> None:
    url = {"url": "data:image/png;base64,AAAA"}
    prompts = []
    for parts in (
        [],
        [{"type": "image_url", "image_url": url}],
        [{"type": "image_url", "image_url": {**url, "detail": "low"}}],
    ):
        content = [{"type": "text", "text": "What is this?"}, *parts]
        got = await talk.post(
            "chat", {"model": "demo-fast", "messages": [{"role": "user", "content": content}]}
        )
        prompts.append(got.body["usage"]["prompt_tokens"])
    assert [n - prompts[0] for n in prompts] == [0, 765, 85]


async def test_embeddings_are_unit_vectors_the_same_in_both_encodings(talk: Talk) -> None:
    ask = {"model": "text-embedding-3-small", "input": ["a", "b"], "dimensions": 8}
    floats = (await talk.post("/embeddings", ask)).body
    coded = (await talk.post("/embeddings", {**ask, "encoding_format": "base64"})).body
    first = floats["data"][0]["embedding"]
    assert sum(x * x for x in first) == pytest.approx(1)
    assert list(struct.unpack("<8f", base64.b64decode(coded["data"][0]["embedding"]))) == first
    assert floats["data"][1]["embedding"] != first
    assert floats["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
    assert [(line.model, line.nano_usd) for line in talk.provider.bill()] == [("demo-embed", 40)] * 2


async def test_counting_agrees_with_the_bill(talk: Talk) -> None:
    body = {**HELLO["messages"], "tools": BASH["messages"]}
    counted = (await talk.post("/messages/count_tokens", body)).body
    await talk.post("messages", body)
    assert counted == {"input_tokens": talk.provider.bill()[0].tokens.input_total}


async def test_mistakes_get_each_dialects_error(talk: Talk) -> None:
    wrong = await talk.post(
        "messages", {"model": "demo-large", "messages": [{"role": "user", "content": "x"}]}
    )
    assert (wrong.status, wrong.body) == (
        400,
        {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "max_tokens: Field required"},
            "request_id": wrong.headers["request-id"],
        },
    )
    unknown = await talk.post("chat", {"model": "nobody", "messages": []})
    assert (unknown.status, unknown.body["error"]["code"]) == (404, "model_not_found")
    misplaced = await talk.post("/embeddings", {"model": "demo-fast", "input": "x"})
    assert (misplaced.status, misplaced.body["error"]["type"]) == (400, "invalid_request_error")
    kept = await talk.post(
        "responses", {"model": "demo-fast", "input": "x", "previous_response_id": "resp_1"}
    )
    assert (kept.status, kept.body["error"]["param"]) == (400, "previous_response_id")


async def test_it_says_plainly_that_it_is_a_demo(talk: Talk) -> None:
    about = await talk.get("/")
    assert b"There is no model behind it" in about.raw
    got = await talk.post("chat", HELLO["chat"])
    assert got.headers["x-demo-provider"] == "true"
    assert got.body["system_fingerprint"] == "demo"
    assert got.body["choices"][0]["message"]["content"].startswith("[demo]")
    models = (await talk.get("/v1/models")).body["data"]
    assert [row["id"] for row in models] == ["demo-large", "demo-small", "demo-fast", "demo-embed"]
