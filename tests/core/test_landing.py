"""The record of a run, out of which its last answer is written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core import dialects, landing
from gateway.core.catalog import Operation
from gateway.core.dialects.facts import Segment

CALL = {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"cmd":"pytest"}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": [{"type": "text", "text": "Fix  the\nbuild"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "2 failed"},
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Fix the build"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "c2VjcmV0"},
            {"type": "tool_use", "id": "t1", "name": "shell", "input": {"cmd": "pytest"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "2 failed"}]},
]
RESPONSES: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix the build"}]},
    {"type": "reasoning", "encrypted_content": "gAAAA"},
    {"type": "function_call", "call_id": "f1", "name": "shell", "arguments": '{"cmd":"pytest"}'},
    {"type": "function_call_output", "call_id": "f1", "output": "2 failed"},
]


def segments(*messages: object) -> list[Segment]:
    return [Segment("message", memoryview(json.dumps(m).encode())) for m in messages]


@pytest.mark.parametrize("run", [CHAT[1:], MESSAGES, RESPONSES], ids=["chat", "messages", "responses"])
def test_what_was_said_and_done_is_in_it_and_nothing_else(run: list[dict[str, Any]]) -> None:
    text = landing.record(segments(*run), 8_000)
    assert text.startswith("user: Fix the build")
    assert text.endswith("2 failed")
    assert "shell" in text
    assert "pytest" in text
    for secret in ("c2VjcmV0", "gAAAA", "c1", "t1", "f1"):
        assert secret not in text


def test_a_long_run_keeps_its_opening_and_its_end() -> None:
    run = [{"role": "user", "content": "the task"}] + [
        {"role": "assistant", "content": f"step {i} " + "x" * 500} for i in range(100)
    ]
    text = landing.record(segments(*run), 4_000)
    assert text.startswith("user: the task\nassistant: step 0 ")
    assert "\n[...]\n" in text
    assert "step 99 " in text
    assert "step 50 " not in text
    assert len(text.encode()) <= 4_000


def test_a_long_message_is_cut_in_its_middle() -> None:
    text = landing.record(segments({"role": "user", "content": "begin " + "y" * 50_000 + " end"}), 8_000)
    assert text.startswith("user: begin yyy")
    assert " [...] " in text
    assert text.endswith("yyy end")
    assert len(text) < 2_100


@given(st.lists(st.text(max_size=400), max_size=30), st.integers(0, 3_000))
def test_it_is_never_longer_than_asked_for(said: list[str], most: int) -> None:
    text = landing.record(segments(*({"role": "user", "content": s} for s in said)), most)
    assert len(text.encode()) <= most


@pytest.mark.parametrize("operation", [Operation.CHAT, Operation.MESSAGES, Operation.RESPONSES])
@pytest.mark.parametrize("stream", [False, True])
def test_the_request_is_one_of_its_dialect_without_tools(operation: Operation, stream: bool) -> None:
    facts = dialects.read(operation, landing.request(operation, "tiny", "user: hi", 512, stream))
    assert (facts.model, facts.stream, facts.max_output_tokens, facts.tool_count) == ("tiny", stream, 512, 0)
