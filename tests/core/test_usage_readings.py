"""Each provider's usage becomes the same disjoint counts, and what is odd is said, never raised."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.catalog import Operation
from gateway.core.dialects import (
    Reading,
    read_answer,
    read_bedrock_usage,
    read_gemini_usage,
    read_usage,
)
from gateway.core.errors import UpstreamError, UpstreamMalformed, UpstreamOverloaded, UpstreamRefused
from gateway.core.usage import Usage

CHAT, RESPONSES, MESSAGES = Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES


def chat(prompt: int = 100, completion: int = 10, **more: Any) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        **more,
    }


EXACT = [
    ("openai", CHAT, chat(), Usage(100, output=10)),
    ("openai cached and written", CHAT,
     chat(prompt_tokens_details={"cached_tokens": 60, "cache_write_tokens": 30, "audio_tokens": 0},
          completion_tokens_details={"reasoning_tokens": 7}),
     Usage(10, cache_read=60, cache_write_5m=30, output=10, reasoning=7)),
    ("vllm", CHAT, chat(prompt_tokens_details={"cached_tokens": 32, "created_cache_tokens": 60},
                        completion_tokens_details=None), Usage(68, cache_read=32, output=10)),
    ("deepseek", CHAT, chat(prompt_cache_hit_tokens=64, prompt_cache_miss_tokens=36), Usage(36, cache_read=64, output=10)),
    ("moonshot", CHAT, chat(cached_tokens=64), Usage(36, cache_read=64, output=10)),
    ("litellm for anthropic", CHAT,
     chat(cache_read_input_tokens=50, cache_creation_input_tokens=30, prompt_tokens_details={
         "cached_tokens": 50, "cache_write_tokens": 30, "cache_creation_tokens": 30,
         "cache_creation_token_details": {"ephemeral_5m_input_tokens": 10, "ephemeral_1h_input_tokens": 20}}),
     Usage(20, cache_read=50, cache_write_5m=10, cache_write_1h=20, output=10)),
    ("xai: reasoning beside completion", CHAT,
     {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 150,
      "completion_tokens_details": {"reasoning_tokens": 40}}, Usage(100, output=50, reasoning=40)),
    ("no total", CHAT, {"prompt_tokens": 5, "completion_tokens": 0}, Usage(5)),
    ("responses", RESPONSES,
     {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 40},
      "output_tokens": 10, "output_tokens_details": {"reasoning_tokens": 10}},
     Usage(0, cache_read=60, cache_write_5m=40, output=10, reasoning=10)),
    ("anthropic", MESSAGES,
     {"input_tokens": 3, "cache_read_input_tokens": 60, "cache_creation_input_tokens": 40, "output_tokens": 10,
      "cache_creation": {"ephemeral_5m_input_tokens": 25, "ephemeral_1h_input_tokens": 15}},
     Usage(3, cache_read=60, cache_write_5m=25, cache_write_1h=15, output=10)),
    ("anthropic without a split", MESSAGES,
     {"input_tokens": 3, "cache_creation_input_tokens": 40, "cache_creation": None, "output_tokens": 10},
     Usage(3, cache_write_5m=40, output=10)),
    ("anthropic, split only", MESSAGES,
     {"input_tokens": 3, "cache_creation": {"ephemeral_1h_input_tokens": 40}, "output_tokens": 10},
     Usage(3, cache_write_1h=40, output=10)),
    ("embeddings", Operation.EMBEDDINGS, {"prompt_tokens": 8, "total_tokens": 8}, Usage(8)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("operation", "usage", "expected"), [e[1:] for e in EXACT], ids=[e[0] for e in EXACT]
)
def test_a_consistent_report_is_exact(operation: Operation, usage: dict[str, Any], expected: Usage) -> None:
    assert read_usage(operation, usage) == Reading(expected)


def test_gemini_and_bedrock() -> None:
    assert read_gemini_usage(
        {"promptTokenCount": 100, "cachedContentTokenCount": 60, "toolUsePromptTokenCount": 5,
         "candidatesTokenCount": 10, "thoughtsTokenCount": 30, "totalTokenCount": 145}
    ) == Reading(Usage(45, cache_read=60, output=40, reasoning=30))  # fmt: skip
    assert read_gemini_usage({"promptTokenCount": 4}) == Reading(Usage(4))
    assert read_bedrock_usage(
        {"inputTokens": 3, "outputTokens": 10, "cacheReadInputTokens": 60, "cacheWriteInputTokens": 40}
    ) == Reading(Usage(3, cache_read=60, cache_write_5m=40, output=10))
    assert read_bedrock_usage(None).problem == read_gemini_usage([]).problem == "missing"


ODD = [
    (CHAT, None, Usage(), "missing"),
    (CHAT, [1], Usage(), "missing"),
    (CHAT, {}, Usage(), "prompt_tokens missing; completion_tokens missing"),
    (CHAT, chat(completion=-5), Usage(100), "negative completion_tokens"),
    (CHAT, chat(prompt=99 * 10**9), Usage(0, output=10), "prompt_tokens too large; total_tokens too large"),
    (CHAT, {"prompt_tokens": "7", "completion_tokens": 1.5}, Usage(), "prompt_tokens is not an integer; completion_tokens is not an integer"),
    (CHAT, {"prompt_tokens": True, "completion_tokens": 1}, Usage(output=1), "prompt_tokens is not an integer"),
    (CHAT, chat(prompt_tokens_details={"cached_tokens": 101}), Usage(0, cache_read=100, output=10), "cached exceeds prompt"),
    (CHAT, chat(prompt_tokens_details={"cached_tokens": 60, "cache_write_tokens": 50}),
     Usage(0, cache_read=50, cache_write_5m=50, output=10), "cached and written exceed prompt"),
    (CHAT, chat(prompt_tokens_details={"cached_tokens": -1}), Usage(100, output=10), "negative cached_tokens"),
    (CHAT, chat(prompt_tokens_details=7), Usage(100, output=10), "prompt_tokens_details is not an object"),
    (CHAT, chat(completion_tokens_details={"reasoning_tokens": 11}), Usage(100, output=10, reasoning=10), "reasoning exceeds output"),
    (CHAT, chat(prompt_cache_hit_tokens=64, prompt_cache_miss_tokens=30), Usage(36, cache_read=64, output=10), "cache hit and miss do not sum"),
    (CHAT, chat(total_tokens=105), Usage(100, output=10), "total_tokens is not the sum"),
    # Gemini's OpenAI surface: thoughts only in the total
    (CHAT, chat(total_tokens=150), Usage(100, output=50, reasoning=40), "total_tokens exceeds the sum"),
    (MESSAGES, {"output_tokens": 5}, Usage(output=5), "input_tokens missing"),
    (MESSAGES, {"input_tokens": 1, "output_tokens": 1, "cache_creation_input_tokens": 10,
                "cache_creation": {"ephemeral_5m_input_tokens": 4, "ephemeral_1h_input_tokens": 2}},
     Usage(1, cache_write_5m=4, cache_write_1h=6, output=1), "cache write split does not sum"),
    (MESSAGES, {"input_tokens": 1, "output_tokens": 1, "cache_creation_input_tokens": 1,
                "cache_creation": {"ephemeral_5m_input_tokens": 4}},
     Usage(1, cache_write_5m=4, output=1), "cache write split does not sum"),
    (RESPONSES, {"input_tokens": 5, "output_tokens": 10**10}, Usage(5), "output_tokens too large"),
    (Operation.EMBEDDINGS, {"total_tokens": 5}, Usage(), "prompt_tokens missing"),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "usage", "expected", "problem"), ODD, ids=range(len(ODD)))
def test_an_odd_report_says_why(operation: Operation, usage: object, expected: Usage, problem: str) -> None:
    assert read_usage(operation, usage) == Reading(expected, problem)


COUNT = st.none() | st.integers(-5, 2 * 10**9) | st.floats() | st.text(max_size=2) | st.booleans()
NAMES = [
    "prompt_tokens", "completion_tokens", "total_tokens", "cached_tokens", "prompt_cache_hit_tokens",
    "prompt_cache_miss_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens",
    "output_tokens", "cache_write_tokens", "reasoning_tokens", "ephemeral_5m_input_tokens",
    "ephemeral_1h_input_tokens", "promptTokenCount", "cachedContentTokenCount", "candidatesTokenCount",
    "thoughtsTokenCount", "toolUsePromptTokenCount", "inputTokens", "outputTokens", "cacheReadInputTokens",
]  # fmt: skip
OBJECT = st.dictionaries(st.sampled_from(NAMES), COUNT)
DETAILS = ["prompt_tokens_details", "completion_tokens_details", "input_tokens_details", "output_tokens_details",
           "cache_creation"]  # fmt: skip
REPORT = st.builds(
    lambda top, details: {**top, **details}, OBJECT, st.dictionaries(st.sampled_from(DETAILS), OBJECT | COUNT)
)


@given(REPORT)
def test_no_report_raises_or_gives_an_impossible_count(usage: dict[str, Any]) -> None:
    for operation in Operation:
        read_usage(operation, usage)  # Usage refuses negative, huge and inconsistent counts
    read_gemini_usage(usage)
    read_bedrock_usage(usage)


# --- whole answers ---------------------------------------------------------------------------------------


def answer(operation: Operation, body: dict[str, Any]) -> tuple[Any, ...]:
    found = read_answer(operation, json.dumps(body).encode())
    return found.reading, found.finish, found.response_id, found.model, found.error, found.output_bytes


def test_whole_answers() -> None:
    call = {"id": "call_1", "function": {"name": "go", "arguments": "{}"}}
    assert answer(CHAT, {
        "id": "c", "model": "m", "service_tier": "flex", "usage": chat(),
        "choices": [{"message": {"content": "hé", "tool_calls": [call]}, "finish_reason": "tool_calls"}],
    }) == (Reading(Usage(100, output=10), "", "flex"), "tool_calls", "c", "m", None, 7)  # fmt: skip
    assert answer(RESPONSES, {
        "id": "r", "model": "m", "status": "completed", "usage": {"input_tokens": 1, "output_tokens": 2},
        "output": [{"type": "reasoning", "summary": [{"text": "abc"}]},
                   {"type": "message", "content": [{"type": "output_text", "text": "hi"}]},
                   {"type": "function_call", "name": "go", "arguments": "{}"}],
    }) == (Reading(Usage(1, output=2)), "completed", "r", "m", None, 9)  # fmt: skip
    assert answer(MESSAGES, {
        "id": "m", "model": "c", "stop_reason": "end_turn",
        "usage": {"input_tokens": 1, "output_tokens": 2, "service_tier": "priority"},
        "content": [{"type": "thinking", "thinking": "abc"}, {"type": "text", "text": "hi"},
                    {"type": "tool_use", "name": "go", "input": {"a": 1}}],
    }) == (Reading(Usage(1, output=2), "", "priority"), "end_turn", "m", "c", None, 14)  # fmt: skip
    assert answer(Operation.EMBEDDINGS, {"model": "e", "data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 3}}) == (
        Reading(Usage(3)), "", "", "e", None, 0)  # fmt: skip
    assert answer(Operation.COUNT_TOKENS, {"input_tokens": 3}) == (Reading(Usage()), "", "", "", None, 0)
    assert answer(CHAT, {"choices": []})[0] == Reading(Usage(), "missing")


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"<!doctype html><p>502", "HTML"),
        (b'{"choices":[{"mes', "not complete JSON"),
        (b"[]", "not complete JSON"),
        (b"null", "not complete JSON"),
        (b'"text"', "not complete JSON"),
        (b"\xff\xfe", "not complete JSON"),
        (b"[" * 5000, "not complete JSON"),
    ],
)
def test_no_answer_at_all(operation: Operation, body: bytes, message: str) -> None:
    with pytest.raises(UpstreamMalformed, match=message):
        read_answer(operation, body)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        ({"type": "overloaded_error", "message": "sk-1"}, UpstreamOverloaded, "(overloaded_error)"),
        ({"code": 503}, UpstreamOverloaded, "(503)"),
        ({"type": "invalid_request_error", "code": "context_length"}, UpstreamRefused, "(invalid_request_error, context_length)"),
        ({"type": "server_error"}, UpstreamError, "(server_error)"),
        ({"type": "key sk-1 is bad", "code": None}, UpstreamError, "in its answer."),
        ("it broke sk-1", UpstreamError, "in its answer."),
    ],
)  # fmt: skip
def test_an_error_inside_a_good_status(error: object, kind: type[UpstreamError], message: str) -> None:
    found = read_answer(CHAT, json.dumps({"error": error}).encode()).error
    assert type(found) is kind
    assert message in found.message
    assert "sk-1" not in found.message
