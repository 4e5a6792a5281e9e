"""Edits change what they declare and not one byte more."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.catalog import Operation
from gateway.core.dialects import Edits, read, render, with_cost
from tests.support.material import ABSENT, Captured, captured

CHAT, RESPONSES, MESSAGES = Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES
BOUND = {CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}


def rendered(operation: Operation, body: bytes, edits: Edits) -> bytes:
    return b"".join(render(read(operation, body), body, edits))


M = b'"messages":[{"role":"user","content":"x"}]'

SPLICES = [
    (CHAT, b'{"model":"a",%b}', Edits(model="b"), b'{"model":"b",%b}'),
    (CHAT, b'{%b , "model" :\t"a" }', Edits(model='\u00e9"'), '{%b , "model" :\t"\u00e9\\"" }'.encode()),
    (CHAT, b'{"model":"a",%b}', Edits(model="a"), b'{"model":"a",%b}'),
    (CHAT, b'{"mod\\u0065l":"\\u0061",%b}', Edits(model="a"), b'{"mod\\u0065l":"\\u0061",%b}'),
    (CHAT, b'{"mod\\u0065l":"\\u0061",%b}', Edits(model="b"), b'{"mod\\u0065l":"b",%b}'),
    # the usage chunk
    (CHAT, b'{"model":"a","stream":true,%b}', Edits(include_usage=True),
     b'{"model":"a","stream_options":{"include_usage":true},"stream":true,%b}'),
    (CHAT, b'{"model":"a","stream":true,"stream_options":null,%b}', Edits(include_usage=True),
     b'{"model":"a","stream":true,"stream_options":{"include_usage":true},%b}'),
    (CHAT, b'{"model":"a","stream":true,"stream_options": { } ,%b}', Edits(include_usage=True),
     b'{"model":"a","stream":true,"stream_options": {"include_usage":true } ,%b}'),
    (CHAT, b'{"model":"a","stream":true,"stream_options":{"x":1},%b}', Edits(include_usage=True),
     b'{"model":"a","stream":true,"stream_options":{"include_usage":true,"x":1},%b}'),
    (CHAT, b'{"model":"a","stream":true,"stream_options":{"x":1, "include_usage" : false},%b}', Edits(include_usage=True),
     b'{"model":"a","stream":true,"stream_options":{"x":1, "include_usage" : true},%b}'),
    (CHAT, b'{"model":"a","stream":true,"stream_options":{"include_usage":null},%b}', Edits(include_usage=True),
     b'{"model":"a","stream":true,"stream_options":{"include_usage":true},%b}'),
    (CHAT, b'{"model":"a","stream":true,"stream_options":{"include_usage": true},%b}', Edits(include_usage=True),
     b'{"model":"a","stream":true,"stream_options":{"include_usage": true},%b}'),
    (CHAT, b'{"model":"a",%b}', Edits(include_usage=True), b'{"model":"a",%b}'),  # no stream, no chunk
    (MESSAGES, b'{"model":"a","stream":true,%b}', Edits(include_usage=True), b'{"model":"a","stream":true,%b}'),
    # the output bound
    (CHAT, b'{"model":"a",%b}', Edits(max_output_tokens=7), b'{"model":"a","max_completion_tokens":7,%b}'),
    (MESSAGES, b'{"model":"a",%b}', Edits(max_output_tokens=7), b'{"model":"a","max_tokens":7,%b}'),
    (MESSAGES, b'{"model":"a","max_tokens":null,%b}', Edits(max_output_tokens=7), b'{"model":"a","max_tokens":7,%b}'),
    (CHAT, b'{"max_tokens": 99,"model":"a",%b}', Edits(max_output_tokens=7), b'{"max_tokens": 7,"model":"a",%b}'),
    (CHAT, b'{"max_tokens":99,"model":"a",%b,"max_completion_tokens":8}', Edits(max_output_tokens=7),
     b'{"max_tokens":7,"model":"a",%b,"max_completion_tokens":7}'),
    (CHAT, b'{"max_tokens":null,"model":"a",%b,"max_completion_tokens":8}', Edits(max_output_tokens=7),
     b'{"max_tokens":null,"model":"a",%b,"max_completion_tokens":7}'),
    (CHAT, b'{"max_tokens":7,"model":"a",%b}', Edits(max_output_tokens=7), b'{"max_tokens":7,"model":"a",%b}'),
    (Operation.COUNT_TOKENS, b'{"model":"a",%b}', Edits(max_output_tokens=7), b'{"model":"a",%b}'),
    # all at once, with odd spellings around
    (CHAT, b'{"t":1.0,"u":1E2,"v":"\\u0041\\/","stream":true,"model":"a",%b,"x":{"model":"a","max_tokens":1}}',
     Edits("b", True, 5),
     b'{"t":1.0,"u":1E2,"v":"\\u0041\\/","stream":true,"model":"b","stream_options":{"include_usage":true},'
     b'"max_completion_tokens":5,%b,"x":{"model":"a","max_tokens":1}}'),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "body", "edits", "expected"), SPLICES, ids=range(len(SPLICES)))
def test_a_splice_is_exact(operation: Operation, body: bytes, edits: Edits, expected: bytes) -> None:
    assert rendered(operation, body.replace(b"%b", M), edits) == expected.replace(b"%b", M)


def test_names_inside_messages_are_text() -> None:
    body = (
        b'{"messages":[{"model":"inner","role":"user","content":"\\"model\\":\\"x\\",\\\\"},{"max_tokens":3,"role":"user"}'
        b'],"model":"outer","stream_options":{"model":"inner"},"stream":true}'
    )
    out = rendered(CHAT, body, Edits(model="new"))
    assert out == body.replace(b'"outer"', b'"new"')


def test_responses_bound_and_string_input() -> None:
    body = b'{"input":"a \\" } ] , b","model":"m"}'
    assert rendered(RESPONSES, body, Edits(max_output_tokens=4)) == body[:-1] + b',"max_output_tokens":4}'


def test_nothing_is_copied() -> None:
    body = b'{"model":"a",' + M + b"}"
    assert render(read(CHAT, body), body, Edits()) == (body,)
    assert render(read(CHAT, body), body, Edits())[0] is body
    bounded = body[:-1] + b',"max_tokens":7}'
    assert render(read(CHAT, bounded), bounded, Edits("a", True, 7))[0] is bounded
    pieces = render(read(CHAT, body), body, Edits(model="b"))
    assert [p.obj is body if isinstance(p, memoryview) else p for p in pieces] == [True, b'"b"', True]


def edited(operation: Operation, body: dict[str, Any]) -> dict[str, Any]:
    """What all edits together must make of a parsed body."""
    out = {**body, "model": "another/model"}
    bounds = ("max_completion_tokens", "max_tokens") if operation is CHAT else (BOUND.get(operation, ""),)
    named = [b for b in bounds if body.get(b) is not None]
    if operation in BOUND:
        out |= dict.fromkeys(named or [BOUND[operation]], 12345)
    if operation is CHAT and body.get("stream"):
        out["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    return out


def without_splices(whole: bytes, pieces: tuple[bytes | memoryview, ...]) -> bool:
    """The pieces that are views on the body come in order and leave out nothing but replaced scalars."""
    at = 0
    for piece in pieces:
        if isinstance(piece, memoryview):
            start = whole.index(piece, at)
            assert start - at <= 40, whole[at:start]
            at = start + len(piece)
    return at == len(whole)


def check_all_edits(operation: Operation, body: bytes) -> None:
    found = read(operation, body)
    assert render(found, body, Edits()) == (body,)
    pieces = render(found, body, Edits("another/model", include_usage=True, max_output_tokens=12345))
    assert json.loads(b"".join(pieces)) == edited(operation, json.loads(body))
    assert without_splices(body, pieces)


PATHS = {"/v1" + operation.path: operation for operation in Operation}
OWN = Captured(
    "own", "POST", "/v1/messages", [], {"model": "m", "max_tokens": 9, "messages": [{"role": "user"}]}
)
CALLS = [c for c in captured() if c.body is not None and c.path in PATHS] or [OWN]


@pytest.mark.parametrize("call", CALLS, ids=[ABSENT] if CALLS == [OWN] else [c.name for c in CALLS])
def test_a_captured_request_passes_unchanged_and_takes_the_edits(call: Captured) -> None:
    assert call.body is not None
    operation = PATHS[call.path]
    for style in ({"separators": (",", ":"), "ensure_ascii": False}, {}, {"indent": 1}):
        check_all_edits(operation, json.dumps(call.body, **style).encode())
    facts = read(operation, json.dumps(call.body).encode())
    prompt = call.body["messages" if "messages" in call.body else "input"]
    told = (facts.message_count, facts.tool_count, facts.model, facts.stream)
    assert told == (
        1 if isinstance(prompt, str) else len(prompt),
        len(call.body.get("tools") or ()),
        call.body["model"],
        call.body.get("stream") or False,
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
NAMES = st.text() | st.sampled_from(
    ["tool_choice", "stop", "text", "é", "a\\b", 'q"', "\n", "__class__", "model "]
)
READ_BY_US = {
    "model", "messages", "input", "tools", "system", "instructions", "stream", "stream_options", "max_tokens",
    "max_completion_tokens", "max_output_tokens", "n", "reasoning", "reasoning_effort", "thinking", "output_config",
    "service_tier", "api_base", "base_url", "api_key",
}  # fmt: skip


@given(
    st.sampled_from([CHAT, RESPONSES, MESSAGES]),
    st.dictionaries(NAMES.filter(lambda name: name not in READ_BY_US), JSON, max_size=5),
    st.dictionaries(NAMES.filter(lambda name: name != "role"), JSON, max_size=3),
    st.sampled_from([(",", ":"), (", ", ": "), (" ,\n\t", "\r :")]),
    st.booleans(),
    st.sampled_from(
        [{}, {"stream": True}, {"max_tokens": 5}, {"stream": True, "stream_options": {"x": [1]}}]
    ),
    st.randoms(use_true_random=False),
)
def test_any_other_members_pass(
    operation: Operation, extra: dict[str, Any], inner: dict[str, Any], separators: tuple[str, str], ascii_only: bool,
    asked: dict[str, Any], random: Any,
) -> None:  # fmt: skip
    message = {"role": "user", **inner}
    members = list(
        {
            "model": "m",
            "input" if operation is RESPONSES else "messages": [message] * 3,
            **asked,
            **extra,
        }.items()
    )
    random.shuffle(members)
    text = json.dumps(dict(members), separators=separators, ensure_ascii=ascii_only)
    try:
        body = text.encode()
        text.encode("utf-16").decode("utf-16")
    except UnicodeError:
        return  # half of a surrogate pair: no Unicode text
    check_all_edits(operation, body)


COSTS = [
    (CHAT, b'{"usage":{"a":1 },"x":1}', b'{"usage":{"a":1 ,"cost":0.5},"x":1}'),
    (CHAT, b'{"x":{"usage":{}},"usage": {} }', b'{"x":{"usage":{}},"usage": {"cost":0.5} }'),
    (CHAT, b'{"usage":{"cost":9,"b":1}}', b'{"usage":{"cost":0.5,"b":1}}'),
    (RESPONSES, b'{"usage":{"a":{}}}', b'{"usage":{"a":{},"cost":0.5}}'),
    (MESSAGES, b'{"usage":{"a":1}}', b'{"usage":{"a":1,"cost":0.5}}'),
    (Operation.EMBEDDINGS, b'{"usage":{"a":1}}', b'{"usage":{"a":1,"cost":0.5}}'),
    (CHAT, b'{"usage":null}', None),
    (CHAT, b'{"choices":[]}', None),
    (CHAT, b"{}", None),
    (CHAT, b"<html>", None),
    (CHAT, b'{"usage":{"a":', None),
    (Operation.COUNT_TOKENS, b'{"input_tokens":4}', None),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "body", "expected"), COSTS, ids=range(len(COSTS)))
def test_the_cost_goes_into_the_usage_object(
    operation: Operation, body: bytes, expected: bytes | None
) -> None:
    assert with_cost(operation, body, "0.5") == (expected or body)
