"""Recordings of every known shape as runs, and what their input costs in each way."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest

from gateway import settings as config
from gateway.core.catalog import Operation
from gateway.core.replay import (
    NotARun,
    Played,
    Request,
    Run,
    Theatre,
    messages_of_chat,
    run_of,
    runs_of_captures,
)

SHIPPED = config.load(config.shipped("config/gateway.yaml"), {})
NOW_MS = 1_796_000_000_000
PROBLEM = "word " * 2_000
CALL = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
TOOL = {
    "type": "function",
    "function": {"name": "read", "description": "reads", "parameters": {"type": "object"}},
}
CHAT: dict[str, Any] = {
    "tools": [TOOL],
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": PROBLEM},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "x = 1"},
        {"role": "assistant", "content": "done"},
    ],
}


def theatre(model: str) -> Theatre:
    provider, _, name = model.partition("/")
    rule, row = SHIPPED.cache_rules.find(model, NOW_MS), SHIPPED.prices.find(model, NOW_MS)
    assert rule is not None
    assert row is not None
    return Theatre(provider, name, rule, row)


def run(recording: dict[str, Any] = CHAT, *, as_messages: bool = False) -> Run:
    return run_of("r", recording, model="m", as_messages=as_messages, start_ms=NOW_MS, gap_ms=1_000)


def bodies(found: Run) -> list[dict[str, Any]]:
    return [json.loads(r.body) for r in found.requests]


def as_it_is(request: Request) -> bytes:
    return request.body


def test_each_answer_of_a_conversation_is_a_request_for_what_was_said_before_it() -> None:
    found = run()
    assert [(r.operation, r.at_ms - NOW_MS) for r in found.requests] == [
        (Operation.CHAT, 0),
        (Operation.CHAT, 1_000),
    ]
    assert bodies(found) == [
        {"model": "m", "messages": CHAT["messages"][:2], "tools": [TOOL]},
        {"model": "m", "messages": CHAT["messages"][:4], "tools": [TOOL]},
    ]


def test_where_a_provider_speaks_messages_the_same_is_said_in_messages() -> None:
    found = run(as_messages=True)
    assert {r.operation for r in found.requests} == {Operation.MESSAGES}
    assert bodies(found)[1] == {
        "model": "m",
        "max_tokens": 1_024,
        "tools": [{"name": "read", "description": "reads", "input_schema": {"type": "object"}}],
        "system": [{"type": "text", "text": "be brief"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": PROBLEM}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "read", "input": {"path": "a"}}],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "x = 1"}]},
        ],
    }
    two = [{"role": "tool", "tool_call_id": n, "content": n} for n in "ab"]
    (user,) = messages_of_chat({"messages": two})["messages"]
    assert [block["tool_use_id"] for block in user["content"]] == ["a", "b"]


def test_requests_as_they_were_sent_keep_their_dialect_and_their_times() -> None:
    body = {"model": "x", "max_tokens": 1, "messages": [{"role": "user", "content": "hi"}]}
    recording = {
        "requests": [
            {"path": "/v1/messages", "body": body, "at_ms": 5},
            {"body": {"messages": body["messages"]}},
        ]
    }
    assert [(r.operation, r.at_ms) for r in run(recording).requests] == [
        (Operation.MESSAGES, 5),
        (Operation.CHAT, NOW_MS + 1_000),
    ]


def test_captured_requests_that_continue_one_another_are_a_run() -> None:
    def captured(*texts: str, path: str = "/v1/chat/completions") -> dict[str, Any]:
        body = {"model": "x", "messages": [{"role": "user", "content": text} for text in texts]}
        return {"request": {"method": "POST", "path": path, "headers": [], "body": body}}

    found = runs_of_captures(
        [
            ("a/1", captured("one")),
            ("a/2", captured("title?")),
            ("a/3", captured("one", "two")),
            ("a/4", {"request": {"method": "GET", "path": "/v1/models", "headers": [], "body": None}}),
            ("a/5", captured("one", "two", "three")),
        ],
        model="m",
        as_messages=False,
        start_ms=0,
        gap_ms=10,
    )
    assert [(r.name, [q.at_ms for q in r.requests]) for r in found] == [("a/1", [0, 10, 20]), ("a/2", [0])]


def test_a_dialect_that_the_provider_is_not_reached_in_is_not_played() -> None:
    body = {"model": "x", "input": "hi"}
    with pytest.raises(NotARun, match="not reached in the responses dialect"):
        run({"requests": [{"path": "/v1/responses", "body": body}]}, as_messages=True)
    capture = {"request": {"method": "POST", "path": "/v1/responses", "headers": [], "body": body}}
    for as_messages, count in ((True, 0), (False, 1)):
        found = runs_of_captures([("a/1", capture)], model="m", as_messages=as_messages, start_ms=0, gap_ms=1)
        assert len(found) == count


@pytest.mark.parametrize(
    ("recording", "why"),
    [
        ({}, 'it has neither "messages" nor "requests"'),
        ({"messages": [{"role": "user", "content": "hi"}]}, "nobody answers in it"),
        ({"messages": [{"content": "hi"}]}, "it is not what it looks like: KeyError 'role'"),
        ({"messages": ["hi"]}, "it is not what it looks like: TypeError"),
        ({"requests": [5]}, "it is not what it looks like: AttributeError"),
        ({"requests": []}, "nothing is asked in it"),
        ({"requests": [{"path": "/v1/embeddings", "body": {}}]}, "/embeddings is no address of a chat"),
    ],
)
def test_what_is_no_recording_is_refused_with_what_is_wrong(recording: dict[str, Any], why: str) -> None:
    with pytest.raises(NotARun, match=why):
        run(recording)


@pytest.mark.parametrize("content", [["x"], [5], [{"text": 5}], 5, {"a": 1}])
def test_odd_contents_are_played_or_told(content: Any) -> None:
    messages = [{"role": "user", "content": content}, {"role": "assistant"}]
    for as_messages, model in ((True, "anthropic/claude-opus-5"), (False, "openai/gpt-5.6-sol")):
        with suppress(NotARun):
            found = run({"messages": messages}, as_messages=as_messages)
            assert theatre(model).play(found, "observe", as_it_is).steps == 1


def test_a_body_that_no_provider_takes_is_told() -> None:
    broken = Run("r", (Request(Operation.CHAT, b'{"model":"m","messages":5}', NOW_MS),))
    with pytest.raises(NotARun, match="a request's body is none of its dialect"):
        theatre("openai/gpt-5.6-sol").play(broken, "observe", as_it_is)


def test_what_the_provider_would_refuse_is_told_with_its_step() -> None:
    marked = {"type": "text", "text": PROBLEM, "cache_control": {"type": "ephemeral"}}
    body = {"messages": [{"role": "user", "content": [marked] * 5}]}
    sent = Run("r", (Request(Operation.MESSAGES, json.dumps(body).encode(), NOW_MS),))
    with pytest.raises(NotARun, match="the provider refuses request 1: 5 markers, and at most 4 are taken"):
        theatre("anthropic/claude-opus-5").play(sent, "observe", as_it_is)


def test_a_run_costs_between_the_best_possible_and_what_it_costs_without_a_cache() -> None:
    def marked(request: Request) -> bytes:
        return json.dumps({**json.loads(request.body), "cache_control": {"type": "ephemeral"}}).encode()

    played = theatre("anthropic/claude-sonnet-4-6").play(run(as_messages=True), "safe", marked)
    tokens = played.input_tokens
    first = 2_500 + 3 * 3 + 18 + 2  # the problem, three messages' own, the tool, the system prompt
    second = tokens - first
    new = second - first
    assert played == Played(
        "r",
        "anthropic",
        "claude-sonnet-4-6",
        "safe",
        2,
        tokens,
        first,
        True,
        tokens * 3_000,
        tokens * 3_000,  # nothing was marked as it was sent
        # both written once at 1.25, the first read at 0.1
        (first + new) * 3_750 + first * 300,
        (first + new) * 3_750 + first * 300,
    )


def test_a_gap_longer_than_a_life_is_paid_for() -> None:
    def cost(gap_ms: int) -> int:
        found = run_of("r", CHAT, model="m", as_messages=False, start_ms=NOW_MS, gap_ms=gap_ms)
        return theatre("openai/gpt-5.6-sol").play(found, "observe", as_it_is).cost_nano_usd

    assert cost(1_700_000) < cost(1_900_000)
