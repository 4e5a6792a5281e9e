"""What providers are asked and what clients get, dialect by dialect, against fakes that speak the real wire formats."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.core.catalog import Deployment, Operation
from gateway.upstream.litellm import LitellmUpstream
from tests.support.provider_fakes import SECRETS, ProviderFake, aws_events, call, data, deployment, named

# Keys in an order that no sorting would produce: caches live by it.
SCHEMA = {
    "type": "object",
    "properties": {"z": {"type": "string"}, "a": {"type": "integer"}},
    "required": ["z"],
    "additionalProperties": False,
}
MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
MARK_1H: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}

CHAT: dict[str, Any] = {
    "model": "m",
    "max_tokens": 50,
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief.", **MARK_1H}]},
        {"role": "user", "content": [{"type": "text", "text": "read both"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "read", "arguments": '{"z":"p","a":1}'},
                },
                {"id": "c2", "type": "function", "function": {"name": "read", "arguments": '{"z":"q"}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "user", "content": [{"type": "text", "text": "go on", **MARK}]},
    ],
    "tools": [
        {"type": "function", "function": {"name": "read", "description": "Read.", "parameters": SCHEMA}}
    ],
    "parallel_tool_calls": True,
    "seed": 1,
}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 50,
    "system": [{"type": "text", "text": "Be brief.", **MARK_1H}],
    "messages": [
        {"role": "user", "content": "read both"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "two files", "signature": "sig"},
                {"type": "text", "text": "reading"},
                {"type": "tool_use", "id": "c1", "name": "read", "input": {"z": "p", "a": 1}},
                {"type": "tool_use", "id": "c2", "name": "read", "input": {"z": "q"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "two"}],
                    **MARK,
                },
            ],
        },
    ],
    "tools": [{"name": "read", "description": "Read.", "input_schema": SCHEMA, **MARK}],
    "metadata": {"user_id": "u"},
}
STREAM_CHAT = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
STREAM_MESSAGES = {**MESSAGES, "stream": True}


@pytest.fixture
async def fake() -> AsyncIterator[ProviderFake]:
    async with ProviderFake() as provider:
        yield provider


@pytest.fixture
async def upstream() -> AsyncIterator[LitellmUpstream]:
    started = LitellmUpstream(SECRETS)
    await started.start()
    yield started
    await started.stop()


async def ask(
    upstream: LitellmUpstream, where: Deployment, operation: Operation, body: Any
) -> tuple[dict[str, str], bytes]:
    answer = await upstream.open(call(where, operation, body))
    content = b"".join([piece async for piece in answer.chunks()])
    await answer.close()
    assert answer.status == 200, content
    return dict(answer.headers), content


def chat_of(content: bytes) -> dict[str, Any]:
    """A chat completion without what differs from run to run."""
    chat: dict[str, Any] = json.loads(content)
    assert chat.pop("created") >= 0
    assert chat.pop("id")
    return chat


def chunks_of(content: bytes) -> list[Any]:
    """Deltas, endings and usages of a chat stream; ids and models must not change on the way."""
    lines = content.decode().removesuffix("\n\n").split("\n\n")
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert len({(c["id"], c["model"], c["object"]) for c in chunks}) == 1
    out: list[Any] = []
    for chunk in chunks:
        out += [c["finish_reason"] or c["delta"] for c in chunk["choices"]]
        out += [chunk["usage"]] if "usage" in chunk else []
    return out


def events_of(content: bytes) -> list[dict[str, Any]]:
    events = []
    for block in content.decode().removesuffix("\n\n").split("\n\n"):
        name, line = block.split("\n")
        event = json.loads(line.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def blocks_of(events: list[dict[str, Any]]) -> list[Any]:
    """The content blocks that a client puts together, checking the order of events on the way."""
    assert [events[0]["type"], events[-2]["type"], events[-1]["type"]] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    blocks: list[Any] = []
    open_at = None
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert (open_at, event["index"]) == (None, len(blocks))
            open_at = event["index"]
            blocks.append({**event["content_block"], "said": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_at
            delta = event["delta"]
            if delta["type"] == "signature_delta":
                blocks[-1]["signature"] = delta["signature"]
            else:
                blocks[-1]["said"] += (
                    delta.get("text") or delta.get("partial_json") or delta.get("thinking") or ""
                )
        else:
            assert (event["type"], event["index"]) == ("content_block_stop", open_at)
            open_at = None
    assert open_at is None
    return [{k: v for k, v in b.items() if k not in ("text", "thinking", "input")} for b in blocks]


def without_ids(value: Any) -> Any:
    """litellm makes up ids for Gemini's tool calls."""
    return json.loads(re.sub(r"call_[0-9a-f]{20,}", "call_*", json.dumps(value)))


# --- Gemini ----------------------------------------------------------------------------------------------


def gemini(parts: list[Any], finish: str | None = None, usage: Any = None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"index": 0, "content": {"role": "model", "parts": parts}}
    if finish:
        candidate["finishReason"] = finish
    out = {"candidates": [candidate], "modelVersion": "gemini-2.5-pro-001", "responseId": "r1"}
    return out | ({"usageMetadata": usage} if usage else {})


GEMINI_USAGE = {
    "promptTokenCount": 100,  # cached content inside
    "cachedContentTokenCount": 60,
    "candidatesTokenCount": 7,
    "thoughtsTokenCount": 5,  # beside the candidates
    "totalTokenCount": 112,
}
GEMINI_CALLS = [
    {"functionCall": {"name": "read", "args": {"z": "p", "a": 1}}, "thoughtSignature": "c2ln"},
    {"functionCall": {"name": "read", "args": {"z": "q"}}},
]
GEMINI_TOOLS = [
    {
        "function_declarations": [
            {
                "name": "read",
                "description": "Read.",
                # Gemini knows no additionalProperties
                "parameters": {k: v for k, v in SCHEMA.items() if k != "additionalProperties"},
            }
        ]
    }
]
GEMINI_AS_CHAT_USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 12,
    "total_tokens": 112,
    "prompt_tokens_details": {"cached_tokens": 60},
    "completion_tokens_details": {"reasoning_tokens": 5},
}
GEMINI_AS_MESSAGES_USAGE = {
    "input_tokens": 40,
    "cache_creation_input_tokens": 0,
    "cache_read_input_tokens": 60,
    "output_tokens": 12,
    "output_tokens_details": {"thinking_tokens": 5},
}


async def test_chat_to_gemini(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    parts = [{"text": "hm", "thought": True}, {"text": "Hello"}, *GEMINI_CALLS]
    fake.replies(gemini(parts, "STOP", GEMINI_USAGE), headers={"x-request-id": "r-1"})
    headers, content = await ask(upstream, deployment("gemini", fake.url), Operation.CHAT, CHAT)

    [asked] = fake.asked
    assert asked.path == "/v1beta/models/gemini-2.5-pro:generateContent"
    assert asked.headers["x-goog-api-key"] == SECRETS["plain"]
    assert asked.headers["User-Agent"].startswith("tollhouse/")
    assert asked.headers["x-client-request-id"] == "att_1"
    assert json.dumps(asked.body) == json.dumps(
        {
            "contents": [
                {"role": "user", "parts": [{"text": "read both"}]},
                {
                    "role": "model",
                    "parts": [
                        {"function_call": {"name": "read", "args": {"z": "p", "a": 1}}},
                        {"function_call": {"name": "read", "args": {"z": "q"}}},
                    ],
                },
                {
                    "role": "user",
                    "parts": [
                        {"function_response": {"name": "read", "response": {"content": "one"}}},
                        {"function_response": {"name": "read", "response": {"content": "two"}}},
                    ],
                },
                {"role": "user", "parts": [{"text": "go on"}]},
            ],
            "system_instruction": {"parts": [{"text": "Be brief."}]},
            "tools": GEMINI_TOOLS,
            "generationConfig": {"max_output_tokens": 50, "seed": 1},
        }
    )
    assert headers == {"content-type": "application/json", "x-request-id": "r-1"}
    assert without_ids(chat_of(content)) == {
        "object": "chat.completion",
        "model": "gemini-2.5-pro-001",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello",
                    "reasoning_content": "hm",
                    "thinking_blocks": [{"type": "thinking", "thinking": "hm"}],
                    "tool_calls": [
                        {
                            "id": "call_*__thought__c2ln",
                            "type": "function",
                            "function": {"name": "read", "arguments": '{"z": "p", "a": 1}'},
                        },
                        {
                            "id": "call_*",
                            "type": "function",
                            "function": {"name": "read", "arguments": '{"z": "q"}'},
                        },
                    ],
                },
                "finish_reason": "tool_calls",
            }
        ],
        "usage": GEMINI_AS_CHAT_USAGE,
    }


def gemini_stream() -> list[bytes]:
    return data(
        gemini([{"text": "Hel"}], None, {**GEMINI_USAGE, "candidatesTokenCount": 1}),
        gemini([{"text": "lo"}]),
        gemini(GEMINI_CALLS[:1]),
        gemini(GEMINI_CALLS[1:], "STOP", GEMINI_USAGE),
    )


async def test_chat_stream_from_gemini(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    fake.streams(*gemini_stream())
    headers, content = await ask(upstream, deployment("gemini", fake.url), Operation.CHAT, STREAM_CHAT)
    assert fake.asked[0].path == "/v1beta/models/gemini-2.5-pro:streamGenerateContent"
    assert headers == {"content-type": "text/event-stream"}

    def called(index: int, call_id: str, arguments: str) -> dict[str, Any]:
        function = {"name": "read", "arguments": arguments}
        return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}

    assert without_ids(chunks_of(content)) == [
        {"role": "assistant", "content": "Hel"},
        {"content": "lo"},
        called(0, "call_*__thought__c2ln", '{"z": "p", "a": 1}'),
        called(1, "call_*", '{"z": "q"}'),
        "tool_calls",
        GEMINI_AS_CHAT_USAGE,
    ]


async def test_a_chat_stream_tells_no_usage_unless_asked(
    upstream: LitellmUpstream, fake: ProviderFake
) -> None:
    fake.streams(*data(gemini([{"text": "Hi"}], "STOP", GEMINI_USAGE)))
    body = {**CHAT, "stream": True}
    _, content = await ask(upstream, deployment("gemini", fake.url), Operation.CHAT, body)
    assert chunks_of(content) == [{"role": "assistant", "content": "Hi"}, "stop"]


async def test_messages_stream_from_gemini(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    fake.streams(*gemini_stream())
    headers, content = await ask(
        upstream, deployment("gemini", fake.url), Operation.MESSAGES, STREAM_MESSAGES
    )

    [asked] = fake.asked
    assert asked.body["contents"][2]["parts"] == [
        {"function_response": {"name": "read", "response": {"content": "one"}}},
        {"function_response": {"name": "read", "response": {"content": "[tool error]\ntwo"}}},
    ]
    assert (asked.body["system_instruction"], asked.body["tools"]) == (
        {"parts": [{"text": "Be brief."}]},
        GEMINI_TOOLS,
    )
    assert headers == {"content-type": "text/event-stream", "x-dropped-params": "metadata"}
    events = events_of(content)
    assert without_ids(blocks_of(events)) == [
        {"type": "text", "said": "Hello"},
        {"type": "tool_use", "id": "call_*__thought__c2ln", "name": "read", "said": '{"z": "p", "a": 1}'},
        {"type": "tool_use", "id": "call_*", "name": "read", "said": '{"z": "q"}'},
    ]
    assert events[-2] == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": GEMINI_AS_MESSAGES_USAGE,
    }


async def test_a_marked_long_prompt_makes_no_cache_object_at_google(
    upstream: LitellmUpstream, fake: ProviderFake
) -> None:
    """litellm would create one for the markers: a second request, and storage billed by the hour, for no hold."""
    fake.replies(gemini([{"text": "Hi"}], "STOP", GEMINI_USAGE))
    system = [{"type": "text", "text": "All work and no play. " * 2000, **MARK}]
    await ask(upstream, deployment("gemini", fake.url), Operation.MESSAGES, {**MESSAGES, "system": system})
    assert [a.path for a in fake.asked] == ["/v1beta/models/gemini-2.5-pro:generateContent"]


async def test_a_thought_signature_finds_its_way_back_to_gemini(
    upstream: LitellmUpstream, fake: ProviderFake
) -> None:
    """Gemini 3 refuses a tool loop whose calls come back without their signatures; it travels in the call's id."""
    fake.replies(gemini(GEMINI_CALLS[:1], "STOP", GEMINI_USAGE))
    fake.replies(gemini([{"text": "done"}], "STOP", GEMINI_USAGE))
    where = deployment("gemini", fake.url, model="gemini-3-pro")
    begun: dict[str, Any] = {**MESSAGES, "messages": [{"role": "user", "content": "read p"}]}
    _, content = await ask(upstream, where, Operation.MESSAGES, begun)
    said = json.loads(content)["content"]
    result = {"type": "tool_result", "tool_use_id": said[0]["id"], "content": "one"}
    history = [
        *begun["messages"],
        {"role": "assistant", "content": said},
        {"role": "user", "content": [result]},
    ]
    await ask(upstream, where, Operation.MESSAGES, {**begun, "messages": history})
    called = {"name": "read", "args": {"z": "p", "a": 1}, "id": "call_*"}
    assert without_ids(fake.asked[1].body["contents"][1]) == {
        "role": "model",
        "parts": [{"function_call": called, "thoughtSignature": "c2ln"}],
    }


# --- Bedrock ---------------------------------------------------------------------------------------------

BEDROCK_USAGE = {
    "inputTokens": 10,  # beside cached and written
    "outputTokens": 7,
    "totalTokens": 117,
    "cacheReadInputTokens": 60,
    "cacheWriteInputTokens": 40,
    "cacheDetails": [{"ttl": "1h", "inputTokens": 30}, {"ttl": "5m", "inputTokens": 10}],
}
CLAUDE_AS_CHAT_USAGE = {
    "prompt_tokens": 110,
    "completion_tokens": 7,
    "total_tokens": 117,
    "prompt_tokens_details": {
        "cached_tokens": 60,
        "cache_write_tokens": 40,
        "cache_creation_token_details": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 30},
    },
}
CLAUDE_AS_MESSAGES_USAGE = {
    "input_tokens": 10,
    "cache_creation_input_tokens": 40,
    "cache_read_input_tokens": 60,
    "output_tokens": 7,
    "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 30},
}
CACHE_POINT = {"cachePoint": {"type": "default"}}
CACHE_POINT_1H = {"cachePoint": {"type": "default", "ttl": "1h"}}
BEDROCK_TOOL = {"toolSpec": {"inputSchema": {"json": SCHEMA}, "name": "read", "description": "Read."}}
BEDROCK_PATH = "/model/anthropic.claude-sonnet-4-5-20250929-v1%3A0/converse"


def bedrock_calls(*before: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": [
            *before,
            {"toolUse": {"input": {"z": "p", "a": 1}, "name": "read", "toolUseId": "c1"}},
            {"toolUse": {"input": {"z": "q"}, "name": "read", "toolUseId": "c2"}},
        ],
    }


def bedrock_result(call_id: str, text: str) -> dict[str, Any]:
    return {"toolResult": {"content": [{"text": text}], "toolUseId": call_id}}


async def test_chat_to_bedrock(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    said = [{"text": "Hello"}, {"toolUse": {"toolUseId": "t1", "name": "read", "input": {"z": "p", "a": 1}}}]
    fake.replies(
        {
            "output": {"message": {"role": "assistant", "content": said}},
            "stopReason": "tool_use",
            "usage": BEDROCK_USAGE,
            "metrics": {"latencyMs": 5},
        },
        headers={"x-amzn-requestid": "r-1"},
    )
    headers, content = await ask(upstream, deployment("bedrock", fake.url), Operation.CHAT, CHAT)

    [asked] = fake.asked
    assert asked.path == BEDROCK_PATH
    assert asked.headers["Authorization"].startswith("AWS4-HMAC-SHA256 Credential=AKIDCANARY/")
    assert json.dumps(asked.body) == json.dumps(
        {
            "messages": [
                {"role": "user", "content": [{"text": "read both"}]},
                bedrock_calls(),
                {
                    "role": "user",
                    "content": [
                        bedrock_result("c1", "one"),
                        bedrock_result("c2", "two"),
                        {"text": "go on"},
                        CACHE_POINT,
                    ],
                },
            ],
            "inferenceConfig": {"maxTokens": 50},
            "system": [{"text": "Be brief."}, CACHE_POINT_1H],
            "toolConfig": {"tools": [BEDROCK_TOOL]},
        }
    )
    assert headers == {"content-type": "application/json", "x-request-id": "r-1", "x-dropped-params": "seed"}
    assert chat_of(content) == {
        "object": "chat.completion",
        "model": "anthropic.claude-sonnet-4-5-20250929-v1:0",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello",
                    "tool_calls": [
                        {
                            "id": "t1",
                            "type": "function",
                            "function": {"name": "read", "arguments": '{"z": "p", "a": 1}'},
                        }
                    ],
                },
                "finish_reason": "tool_calls",
            }
        ],
        "usage": CLAUDE_AS_CHAT_USAGE,
    }


def bedrock_stream() -> list[bytes]:
    def delta(index: int, what: Any) -> tuple[str, Any]:
        return "contentBlockDelta", {"contentBlockIndex": index, "delta": what}

    def start(index: int, call_id: str) -> tuple[str, Any]:
        tool = {"toolUse": {"toolUseId": call_id, "name": "read"}}
        return "contentBlockStart", {"contentBlockIndex": index, "start": tool}

    return aws_events(
        ("messageStart", {"role": "assistant"}),
        delta(0, {"reasoningContent": {"text": "hm"}}),
        delta(0, {"reasoningContent": {"signature": "sig"}}),
        ("contentBlockStop", {"contentBlockIndex": 0}),
        delta(1, {"text": "Hel"}),
        delta(1, {"text": "lo"}),
        ("contentBlockStop", {"contentBlockIndex": 1}),
        start(2, "t1"),
        delta(2, {"toolUse": {"input": '{"z":'}}),
        delta(2, {"toolUse": {"input": '"p"}'}}),
        ("contentBlockStop", {"contentBlockIndex": 2}),
        start(3, "t2"),
        delta(3, {"toolUse": {"input": '{"z":"q"}'}}),
        ("contentBlockStop", {"contentBlockIndex": 3}),
        ("messageStop", {"stopReason": "tool_use"}),
        ("metadata", {"usage": BEDROCK_USAGE, "metrics": {"latencyMs": 5}}),
    )


async def test_messages_stream_from_bedrock(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    fake.streams(*bedrock_stream(), content_type="application/vnd.amazon.eventstream")
    body = {**STREAM_MESSAGES, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    headers, content = await ask(upstream, deployment("bedrock", fake.url), Operation.MESSAGES, body)

    [asked] = fake.asked
    assert asked.path == BEDROCK_PATH + "-stream"
    thinking = {"reasoningContent": {"reasoningText": {"text": "two files", "signature": "sig"}}}
    assert json.dumps(asked.body) == json.dumps(
        {
            "messages": [
                {"role": "user", "content": [{"text": "read both"}]},
                bedrock_calls(thinking, {"text": "reading"}),
                {
                    "role": "user",
                    "content": [
                        bedrock_result("c1", "one"),
                        bedrock_result("c2", "[tool error]\ntwo"),
                        CACHE_POINT,
                    ],
                },
            ],
            "inferenceConfig": {"maxTokens": 50},
            "additionalModelRequestFields": {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            "additionalModelResponseFieldPaths": ["/usage/output_tokens_details"],
            "system": [{"text": "Be brief."}, CACHE_POINT_1H],
            "toolConfig": {"tools": [BEDROCK_TOOL, CACHE_POINT]},
        }
    )
    assert headers == {"content-type": "text/event-stream", "x-dropped-params": "metadata"}
    events = events_of(content)
    assert blocks_of(events) == [
        {"type": "thinking", "said": "hm", "signature": "sig"},
        {"type": "text", "said": "Hello"},
        {"type": "tool_use", "id": "t1", "name": "read", "said": '{"z":"p"}'},
        {"type": "tool_use", "id": "t2", "name": "read", "said": '{"z":"q"}'},
    ]
    assert events[-2] == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": CLAUDE_AS_MESSAGES_USAGE,
    }


# --- Anthropic, asked in chat ----------------------------------------------------------------------------

ANTHROPIC_USAGE = {
    "input_tokens": 10,
    "cache_read_input_tokens": 60,
    "cache_creation_input_tokens": 40,
    "cache_creation": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 30},
    "output_tokens": 7,
}


def anthropic_message(content: list[Any], **changes: Any) -> dict[str, Any]:
    return {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude-sonnet-4-5",
        "content": content,
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": ANTHROPIC_USAGE,
    } | changes


async def test_chat_to_anthropic(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    said = [
        {"type": "thinking", "thinking": "hm", "signature": "sig"},
        {"type": "text", "text": "Hello"},
        {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"z": "p", "a": 1}},
    ]
    fake.replies(anthropic_message(said), headers={"request-id": "r-1"})
    late = {"role": "system", "content": "It is Monday."}
    body = {**CHAT, "messages": [*CHAT["messages"][:-1], late, CHAT["messages"][-1]]}
    headers, content = await ask(upstream, deployment("anthropic", fake.url), Operation.CHAT, body)

    [asked] = fake.asked
    assert asked.path == "/v1/messages"
    assert (asked.headers["x-api-key"], asked.headers["anthropic-version"]) == (
        SECRETS["plain"],
        "2023-06-01",
    )
    assert json.dumps(asked.body) == json.dumps(
        {
            "model": "claude-sonnet-4-5",
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "read both"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "id": "c1", "name": "read", "input": {"z": "p", "a": 1}},
                        {"type": "tool_use", "id": "c2", "name": "read", "input": {"z": "q"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": "one"},
                        {"type": "tool_result", "tool_use_id": "c2", "content": "two"},
                        # where it was said, not in front, where it would empty the cache
                        {"type": "text", "text": "<system-reminder>\nIt is Monday.\n</system-reminder>"},
                        {"type": "text", "text": "go on", **MARK},
                    ],
                },
            ],
            "max_tokens": 50,
            "tools": [{"name": "read", "input_schema": SCHEMA, "type": "custom", "description": "Read."}],
            "system": [{"type": "text", "text": "Be brief.", **MARK_1H}],
        }
    )
    assert headers == {"content-type": "application/json", "x-request-id": "r-1", "x-dropped-params": "seed"}
    assert chat_of(content) == {
        "object": "chat.completion",
        "model": "claude-sonnet-4-5",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello",
                    "reasoning_content": "hm",
                    "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "sig"}],
                    "tool_calls": [
                        {
                            "id": "toolu_1",
                            "type": "function",
                            "function": {"name": "read", "arguments": '{"z": "p", "a": 1}'},
                        }
                    ],
                },
                "finish_reason": "tool_calls",
            }
        ],
        # and no count of reasoning tokens, which Anthropic does not tell and litellm would guess
        "usage": CLAUDE_AS_CHAT_USAGE,
    }


async def test_chat_stream_from_anthropic(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    fake.streams(
        *named(
            {
                "type": "message_start",
                "message": anthropic_message(
                    [], stop_reason=None, usage={**ANTHROPIC_USAGE, "output_tokens": 1}
                ),
            },
            {"type": "ping"},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
            {"type": "content_block_stop", "index": 0},
            {
                "type": "content_block_start",
                "index": 1,
                "content_block": {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {}},
            },
            {
                "type": "content_block_delta",
                "index": 1,
                "delta": {"type": "input_json_delta", "partial_json": '{"z":'},
            },
            {
                "type": "content_block_delta",
                "index": 1,
                "delta": {"type": "input_json_delta", "partial_json": '"p"}'},
            },
            {"type": "content_block_stop", "index": 1},
            {
                "type": "message_delta",
                "delta": {"stop_reason": "tool_use", "stop_sequence": None},
                "usage": {"output_tokens": 7},
            },
            {"type": "message_stop"},
        )
    )
    _, content = await ask(upstream, deployment("anthropic", fake.url), Operation.CHAT, STREAM_CHAT)
    assert chunks_of(content) == [
        {"role": "assistant", "content": "Hello"},
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "read", "arguments": ""},
                }
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"z":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"p"}'}}]},
        "tool_calls",
        CLAUDE_AS_CHAT_USAGE,
    ]


# --- OpenAI and Azure, asked in messages -----------------------------------------------------------------

OPENAI_USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 12,
    "total_tokens": 112,
    "prompt_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 20},
    "completion_tokens_details": {"reasoning_tokens": 5},
}
OPENAI_AS_MESSAGES_USAGE = {
    "input_tokens": 20,
    "cache_creation_input_tokens": 20,
    "cache_read_input_tokens": 60,
    "output_tokens": 12,
    "output_tokens_details": {"thinking_tokens": 5},
}


def openai_chunk(delta: Any, finish: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "gpt-x",
        "choices": [choice],
    }


def openai_stream() -> list[bytes]:
    """Two parallel calls whose arguments interleave."""

    def called(index: int, arguments: str, call_id: str | None = None) -> dict[str, Any]:
        new = {"id": call_id, "type": "function"} if call_id else {}
        name = {"name": "read"} if call_id else {}
        return openai_chunk(
            {"tool_calls": [{"index": index, **new, "function": {**name, "arguments": arguments}}]}
        )

    return data(
        openai_chunk({"role": "assistant", "content": ""}),
        openai_chunk({"content": "Hel"}),
        openai_chunk({"content": "lo"}),
        called(0, "", "c1"),
        called(0, '{"z":'),
        called(1, '{"z":', "c2"),
        called(0, '"p"}'),
        called(1, '"q"}'),
        openai_chunk({}, "tool_calls"),
        {**openai_chunk({}), "choices": [], "usage": OPENAI_USAGE},
        b"[DONE]",
    )


@pytest.mark.parametrize(
    ("provider", "path", "authorization", "marked"),
    [
        ("openai", "/v1/chat/completions", ("Authorization", f"Bearer {SECRETS['plain']}"), True),
        ("azure", "/openai/deployments/gpt-4.1/chat/completions", ("api-key", SECRETS["plain"]), False),
    ],
)
async def test_messages_to_openai(
    upstream: LitellmUpstream,
    fake: ProviderFake,
    provider: str,
    path: str,
    authorization: tuple[str, str],
    marked: bool,
) -> None:
    call_1 = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"z":"p"}'}}
    said = {"role": "assistant", "content": "Hello", "tool_calls": [call_1]}
    fake.replies(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "gpt-x",
            "choices": [{"index": 0, "message": said, "finish_reason": "tool_calls"}],
            "usage": OPENAI_USAGE,
        },
        headers={"x-request-id": "r-1"},
    )
    headers, content = await ask(upstream, deployment(provider, fake.url), Operation.MESSAGES, MESSAGES)

    mark, mark_1h = (MARK, MARK_1H) if marked else ({}, {})
    [asked] = fake.asked
    assert asked.path == path
    assert asked.headers[authorization[0]] == authorization[1]
    assert not [name for name in asked.headers if name.lower().startswith("x-stainless")]
    assert json.dumps(asked.body["messages"]) == json.dumps(
        [
            {"role": "system", "content": [{"type": "text", "text": "Be brief.", **mark_1h}]},
            {"role": "user", "content": "read both"},
            {
                "role": "assistant",
                "content": "reading",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "read", "arguments": '{"z":"p","a":1}'},
                    },
                    {"id": "c2", "type": "function", "function": {"name": "read", "arguments": '{"z":"q"}'}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "one"},
            {
                "role": "tool",
                "tool_call_id": "c2",
                "content": [{"type": "text", "text": "[tool error]\ntwo", **mark}],
            },
        ]
    )
    function = {"name": "read", "description": "Read.", "parameters": SCHEMA}
    assert json.dumps(asked.body["tools"]) == json.dumps([{"type": "function", "function": function, **mark}])
    assert headers == {
        "content-type": "application/json",
        "x-request-id": "r-1",
        "x-dropped-params": "metadata",
    }
    assert json.loads(content) == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "gpt-x",
        "content": [
            {"type": "text", "text": "Hello"},
            {"type": "tool_use", "id": "c1", "name": "read", "input": {"z": "p"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": OPENAI_AS_MESSAGES_USAGE,
    }


@pytest.mark.parametrize("provider", ["openai", "azure"])
async def test_messages_stream_from_openai(
    upstream: LitellmUpstream, fake: ProviderFake, provider: str
) -> None:
    fake.streams(*openai_stream())
    _, content = await ask(upstream, deployment(provider, fake.url), Operation.MESSAGES, STREAM_MESSAGES)
    # asked for, whatever the client asked: the gateway lives by it
    assert fake.asked[0].body["stream_options"] == {"include_usage": True}
    events = events_of(content)
    assert events[0] == {
        "type": "message_start",
        "message": {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "gpt-x",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        },
    }
    assert blocks_of(events) == [
        {"type": "text", "said": "Hello"},
        {"type": "tool_use", "id": "c1", "name": "read", "said": '{"z":"p"}'},
        {"type": "tool_use", "id": "c2", "name": "read", "said": '{"z":"q"}'},
    ]
    assert events[-2] == {
        "type": "message_delta",
        "delta": {"stop_reason": "tool_use", "stop_sequence": None},
        "usage": OPENAI_AS_MESSAGES_USAGE,
    }


async def test_a_provider_that_refuses_stream_options_is_not_sent_any(
    upstream: LitellmUpstream, fake: ProviderFake
) -> None:
    fake.streams(*data(openai_chunk({"content": "Hi"}, "stop"), b"[DONE]"))
    where = deployment("openai", fake.url, stream_usage=False)
    _, content = await ask(upstream, where, Operation.MESSAGES, STREAM_MESSAGES)
    assert "stream_options" not in fake.asked[0].body
    # no usage was told, and zero would make the request free
    assert events_of(content)[-2]["usage"] == {
        "input_tokens": len(json.dumps(STREAM_MESSAGES)) // 4 + 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 1,
        "estimated": True,
    }


async def test_chat_stream_from_azure(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    fake.streams(*openai_stream())
    _, content = await ask(upstream, deployment("azure", fake.url), Operation.CHAT, STREAM_CHAT)
    assert chunks_of(content)[:2] == [{"role": "assistant", "content": "Hel"}, {"content": "lo"}]
    assert chunks_of(content)[-2:] == ["tool_calls", OPENAI_USAGE]


async def test_calls_at_the_same_time_do_not_mix(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    async with ProviderFake() as other:
        fake.streams(*data(gemini([{"text": "one"}], "STOP", GEMINI_USAGE)))
        other.streams(*data(openai_chunk({"content": "two"}, "stop"), b"[DONE]"))
        (_, one), (_, two) = await asyncio.gather(
            ask(upstream, deployment("gemini", fake.url), Operation.CHAT, {**CHAT, "stream": True}),
            ask(upstream, deployment("azure", other.url), Operation.CHAT, {**CHAT, "stream": True}),
        )
    assert (chunks_of(one)[0]["content"], chunks_of(two)[0]["content"]) == ("one", "two")
    assert (len(fake.asked), len(other.asked)) == (1, 1)


async def test_embeddings_from_azure(upstream: LitellmUpstream, fake: ProviderFake) -> None:
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    items = [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}]
    fake.replies({"object": "list", "data": items, "model": "embed-x", "usage": usage})
    where = deployment("azure", fake.url, model="text-embedding-3-small")
    headers, content = await ask(
        upstream, where, Operation.EMBEDDINGS, {"model": "m", "input": ["hi"], "user": "u"}
    )
    assert fake.asked[0].path == "/openai/deployments/text-embedding-3-small/embeddings"
    assert (fake.asked[0].body["input"], headers["x-dropped-params"]) == (["hi"], "user")
    assert json.loads(content) == {"object": "list", "model": "embed-x", "data": items, "usage": usage}
