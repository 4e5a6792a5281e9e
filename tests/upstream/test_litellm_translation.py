"""The pure translators between messages and chat, where the providers' tests do not reach."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.catalog import Operation, Provider, Wire
from gateway.upstream import bridge_answers, bridge_chat, bridge_messages
from gateway.upstream.bridge_chat import ChunkReader, Target, Untranslatable
from gateway.upstream.bridge_errors import error_body
from gateway.upstream.litellm import serves

COMMON = frozenset({"temperature", "top_p", "stop", "tools", "tool_choice", "response_format", "max_tokens"})
OPENAI = Target(
    "openai", COMMON | {"parallel_tool_calls", "reasoning_effort", "user"}, True, False, False, True, False
)
PLAIN = Target("plain", COMMON, True, False, False, True, False)
CLAUDE = Target("bedrock", COMMON | {"reasoning_effort", "thinking"}, False, True, True, True, True)
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBO"}
PNG_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}


def messages(*content: Any, **rest: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": list(content)}], **rest}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def test_images_and_documents() -> None:
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBE"}
    body = messages(
        {"type": "image", "source": PNG},
        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
        {"type": "document", "source": pdf, "title": "a.pdf"},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "notes"}},
    )
    chat, dropped = bridge_messages.chat_body(body, OPENAI)
    parts = [
        PNG_PART,
        {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"}},
        text("notes"),
    ]
    assert (chat, dropped) == ({"messages": [{"role": "user", "content": parts}], "max_tokens": 9}, ())


def test_an_image_in_a_tool_result_moves_to_the_next_user_turn_where_tools_cannot_hold_it() -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "c1",
        "content": [text("a screen"), {"type": "image", "source": PNG}],
    }
    body = messages(result, text("what is it?"))
    tool = {"role": "tool", "tool_call_id": "c1"}
    assert bridge_messages.chat_body(body, OPENAI)[0]["messages"] == [
        {**tool, "content": "a screen"},
        {"role": "user", "content": [PNG_PART, text("what is it?")]},
    ]
    assert bridge_messages.chat_body(body, CLAUDE)[0]["messages"] == [
        {**tool, "content": [text("a screen"), PNG_PART]},
        {"role": "user", "content": [text("what is it?")]},
    ]


def test_automatic_caching_marks_the_last_block() -> None:
    body = {
        **messages(),
        "messages": [{"role": "user", "content": "hi"}],
        "cache_control": {"type": "ephemeral"},
    }
    marked = {**text("hi"), "cache_control": {"type": "ephemeral"}}
    assert bridge_messages.chat_body(body, CLAUDE)[0]["messages"] == [{"role": "user", "content": [marked]}]


@pytest.mark.parametrize(
    ("given", "target", "expected", "dropped"),
    [
        ({"tool_choice": {"type": "any"}}, OPENAI, {"tool_choice": "required"}, ()),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            OPENAI,
            {"tool_choice": "auto", "parallel_tool_calls": False},
            (),
        ),
        (
            {"tool_choice": {"type": "tool", "name": "t"}},
            OPENAI,
            {"tool_choice": {"type": "function", "function": {"name": "t"}}},
            (),
        ),
        (
            {"stop_sequences": ["x"], "temperature": 0, "top_p": 1},
            OPENAI,
            {"stop": ["x"], "temperature": 0, "top_p": 1},
            (),
        ),
        ({"top_k": 3}, CLAUDE, {"top_k": 3}, ()),
        ({"top_k": 3}, OPENAI, {}, ("top_k",)),
        ({"thinking": {"type": "adaptive"}}, CLAUDE, {"thinking": {"type": "adaptive"}}, ()),
        ({"thinking": {"type": "adaptive"}}, OPENAI, {}, ()),
        ({"thinking": {"type": "disabled"}}, OPENAI, {}, ()),
        ({"thinking": {"type": "enabled", "budget_tokens": 9000}}, OPENAI, {"reasoning_effort": "high"}, ()),
        ({"output_config": {"effort": "max"}}, OPENAI, {"reasoning_effort": "high"}, ()),
        ({"thinking": {"type": "enabled", "budget_tokens": 9000}}, PLAIN, {}, ("thinking",)),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            OPENAI,
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
                }
            },
            (),
        ),
        (
            {"context_management": {"edits": []}, "service_tier": "auto"},
            OPENAI,
            {},
            ("service_tier", "context_management"),
        ),
    ],
)
def test_parameters_of_messages(given: Any, target: Target, expected: Any, dropped: tuple[str, ...]) -> None:
    chat, left_out = bridge_messages.chat_body(messages(text("hi"), **given), target)
    assert (chat, left_out) == (
        {"messages": [{"role": "user", "content": [text("hi")]}], "max_tokens": 9, **expected},
        dropped,
    )


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"mcp_servers": [{"url": "https://example.com"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"tool_choice": {"type": "odd"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "server_tool_use"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "assistant", "content": [{"type": "compaction"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "odd", "content": []}]}, "messages.0.role"),
    ],
)
def test_what_messages_cannot_ask_of_others(given: Any, param: str) -> None:
    with pytest.raises(Untranslatable) as refused:
        bridge_messages.chat_body(messages(text("hi"), **given), OPENAI)
    assert refused.value.param == param


def test_tools_are_never_dropped_in_silence() -> None:
    no_tools = Target("plain", frozenset({"max_tokens"}), True, False, False, True, False)
    chat = {
        "messages": [],
        "tools": [{"type": "function", "function": {"name": "t"}}],
        "user": "u",
        "seed": 1,
    }
    with pytest.raises(Untranslatable) as refused:
        bridge_chat.arguments(chat, no_tools)
    assert refused.value.param == "tools"
    assert bridge_chat.arguments({**chat, "tools": None}, no_tools) == bridge_chat.Arguments(
        {"messages": []}, ("user", "seed")
    )


def test_markers_are_removed_for_a_provider_that_refuses_them_but_not_inside_schemas() -> None:
    schema = {"properties": {"cache_control": {"type": "string"}}}
    mark = {"cache_control": {"type": "ephemeral"}}
    strict = Target("azure", COMMON, True, False, False, False, False)
    chat = {
        "messages": [{"role": "user", "content": [{**text("hi"), **mark}], **mark}],
        "tools": [{"type": "function", "function": {"name": "t", "parameters": schema}, **mark}],
    }
    assert bridge_chat.arguments(chat, strict).kwargs == {
        "messages": [{"role": "user", "content": [text("hi")]}],
        "tools": [{"type": "function", "function": {"name": "t", "parameters": schema}}],
    }


@pytest.mark.parametrize(
    ("finish", "stop"),
    [
        ("stop", "end_turn"),
        ("length", "max_tokens"),
        ("tool_calls", "tool_use"),
        ("content_filter", "refusal"),
    ],
)
def test_endings(finish: str, stop: str) -> None:
    said = {"message": {"content": "x"}, "finish_reason": finish}
    assert bridge_answers.message({"choices": [said]}, 400)["stop_reason"] == stop


def test_a_plain_answer_without_usage_is_not_free() -> None:
    nothing = {"prompt_tokens": 0, "completion_tokens": 0}  # what litellm makes of silence
    chat = bridge_chat.completion(
        {"choices": [{"message": {"content": "abcde"}}], "usage": nothing}, "m", True
    )
    assert "usage" not in chat
    usage = bridge_answers.message(chat, 400)["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["estimated"]) == (100, 3, True)


def test_arguments_that_are_no_object_are_kept() -> None:
    assert bridge_answers.tool_input("") == {}
    assert bridge_answers.tool_input('{"z": 1, "a": 2}') == {"z": 1, "a": 2}
    assert bridge_answers.tool_input("[1]") == {"invalid_arguments": "[1]"}
    assert bridge_answers.tool_input('{"z": ') == {"invalid_arguments": '{"z": '}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.text("abc", min_size=1, max_size=3)), min_size=1, max_size=30),
    st.text("xyz", max_size=3),
)
def test_no_tool_argument_lands_in_another_call(pieces: list[tuple[int, str]], prose: str) -> None:
    """However parallel calls interleave, blocks are whole, in order, and one is open at a time."""
    events = bridge_answers.MessageEvents("m")
    reader = ChunkReader("m", True)
    expected: dict[int, str] = {}
    out: list[dict[str, Any]] = []
    deltas: list[Any] = [{"content": prose}] if prose else []
    for index, arguments in pieces:
        first = {} if index in expected else {"id": f"c{index}", "type": "function"}
        name = {} if index in expected else {"name": f"t{index}"}
        deltas.append(
            {"tool_calls": [{"index": index, **first, "function": {**name, "arguments": arguments}}]}
        )
        expected[index] = expected.get(index, "") + arguments
    for delta in deltas:
        chunk = reader.read({"id": "i", "choices": [{"index": 0, "delta": delta}]})
        assert chunk is not None
        out += events.feed(chunk)
    out += events.end("tool_calls", {})
    blocks: list[tuple[str, str]] = []
    is_open = False
    for event in out[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open
            is_open = True
            blocks.append((event["content_block"].get("name", "prose"), ""))
        elif event["type"] == "content_block_delta":
            assert is_open
            said = event["delta"].get("partial_json") or event["delta"].get("text")
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + said)
        else:
            is_open = False
        assert event["index"] == len(blocks) - 1
    assert not is_open
    first_index = pieces[0][0]
    order = [first_index, *sorted(set(expected) - {first_index})]
    assert blocks == ([("prose", prose)] if prose else []) + [(f"t{i}", expected[i]) for i in order]


def test_a_call_that_goes_on_after_its_block_had_to_close_is_an_error() -> None:
    events = bridge_answers.MessageEvents("m")

    def chunk(delta: Any) -> dict[str, Any]:
        return {"id": "i", "choices": [{"index": 0, "delta": delta}]}

    call = {"index": 0, "id": "c", "function": {"name": "t", "arguments": "{"}}
    events.feed(chunk({"tool_calls": [call]}))
    events.feed(chunk({"content": "oh"}))
    with pytest.raises(ValueError, match="went on"):
        events.feed(chunk({"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'{"error":{"message":"no"}}', "no"),
        (b'{"type":"error","error":{"type":"x","message":"no"}}', "no"),
        (b'[{"error":{"code":400,"message":"no","status":"S"}}]', "no"),
        (b'{"message":"no"}', "no"),
        (b'{"Message":"no"}', "no"),
        (b'{"error":"no"}', "no"),
        (b'{"detail":"no"}', "no"),
        (b"no", "no"),
        (b"", "the model provider answered with status 429"),
        (b'{"error":{"message":"key sk-secret-1 is bad"}}', "key *** is bad"),
    ],
)
def test_errors_of_every_shape(raw: bytes, message: str) -> None:
    told = json.loads(error_body(Operation.MESSAGES, 429, raw, ["sk-secret-1", ""]))
    assert told == {"type": "error", "error": {"type": "rate_limit_error", "message": message}}
    told = json.loads(error_body(Operation.CHAT, 429, raw, ["sk-secret-1", ""]))
    assert told["error"]["message"] == message


def test_what_is_served() -> None:
    def served(wire: Wire, bridge: bool) -> list[str]:
        provider = Provider("p", wire, "http://127.0.0.1", "", litellm_provider="gemini", bridge=bridge)
        return [operation.value for operation in Operation if serves(provider, operation)]

    assert served(Wire.LITELLM, False) == ["chat", "messages", "embeddings"]
    assert (served(Wire.OPENAI, True), served(Wire.OPENAI, False)) == (["messages"], [])
    assert (served(Wire.ANTHROPIC, True), served(Wire.ANTHROPIC, False)) == (["chat"], [])
    assert served(Wire.DEMO, True) == []
