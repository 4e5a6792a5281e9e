"""What each dialect reads out of a request, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.catalog import Operation
from gateway.core.dialects import Facts, json_slices, read
from gateway.core.errors import InvalidRequest

CHAT, RESPONSES, MESSAGES = Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES


def facts(operation: Operation, body: dict[str, Any]) -> dict[str, Any]:
    """The facts that differ from those of a bare request, segments as (kind, text)."""
    found = read(operation, json.dumps(body).encode())
    bare = {
        "model": "m",
        "stream": False,
        "include_usage": False,
        "max_output_tokens": None,
        "n": 1,
        "tool_count": 0,
        "message_count": 1,
        "last_role": "user",
        "has_images": False,
        "reasoning": False,
        "reasoning_effort": "",
        "service_tier": "",
        "session_hints": {},
    }
    told = {name: getattr(found, name) for name in bare}
    return {name: value for name, value in told.items() if value != bare[name]}


def cut(found: Facts) -> list[tuple[str, str]]:
    return [(s.kind, s.raw.tobytes().decode()) for s in found.segments]


def test_a_chat_request_in_full() -> None:
    body = {
        "model": "auto",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "tool", "content": "t", "tool_call_id": "1"},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 50,
        "max_completion_tokens": 40,
        "n": 2,
        "reasoning_effort": "high",
        "service_tier": "flex",
        "user": "u1",
        "prompt_cache_key": "k1",
        "metadata": {"session_id": "s1", "task_id": "t1", "user_id": "a person here", "other": 1},
    }
    assert facts(CHAT, body) == {
        "model": "auto", "stream": True, "include_usage": True, "max_output_tokens": 40, "n": 2, "tool_count": 1,
        "message_count": 2, "last_role": "tool", "reasoning": True, "reasoning_effort": "high",
        "service_tier": "flex",
        "session_hints": {
            "user": "u1", "prompt_cache_key": "k1", "metadata.session_id": "s1", "metadata.task_id": "t1",
        },
    }  # fmt: skip


def test_a_messages_request_in_full() -> None:
    body = {
        "model": "c",
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "user", "content": [{"type": "tool_result", "content": "x"}, {"type": "tool_result"}]},
        ],
        "system": [{"type": "text", "text": "s"}],
        "tools": [{"name": "a"}, {"name": "b"}],
        "max_tokens": 128_000,
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "xhigh"},
        "metadata": {"user_id": '{"session_id":"s"}'},
    }
    assert facts(MESSAGES, body) == {
        "model": "c", "max_output_tokens": 128_000, "tool_count": 2, "message_count": 2, "last_role": "tool",
        "reasoning": True, "reasoning_effort": "xhigh", "session_hints": {"user_id": '{"session_id":"s"}'},
    }  # fmt: skip


def test_a_responses_request_in_full() -> None:
    body = {
        "model": "r",
        "instructions": "be",
        "input": [{"role": "user", "content": "x"}, {"type": "function_call_output", "output": "y"}],
        "max_output_tokens": 9,
        "reasoning": {"effort": "low", "summary": "auto"},
        "conversation": {"id": "conv_1"},
        "previous_response_id": "resp_1",
        "session_id": "s2",
    }
    assert facts(RESPONSES, body) == {
        "model": "r", "max_output_tokens": 9, "message_count": 2, "last_role": "function_call_output",
        "reasoning": True, "reasoning_effort": "low",
        "session_hints": {"conversation": "conv_1", "previous_response_id": "resp_1", "session_id": "s2"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("operation", "extra", "told"),
    [
        (CHAT, {"stream": None, "n": None, "max_tokens": None, "tools": None, "stream_options": None}, {}),
        (CHAT, {"stream_options": {"include_usage": None}, "user": 7, "metadata": None}, {}),
        (CHAT, {"user": "x" * 513, "session_id": ""}, {}),
        (CHAT, {"reasoning_effort": "none"}, {"reasoning_effort": "none"}),
        (CHAT, {"reasoning": {"effort": "low"}}, {"reasoning": True, "reasoning_effort": "low"}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, {"has_images": True}),
        (CHAT, {"messages": [{"role": "user", "content": 'write "image_url" here'}]}, {}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, {"has_images": True}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result"}, {"type": "text"}]}]}, {}),
        (MESSAGES, {"messages": [{"role": "user", "content": []}]}, {}),
        (MESSAGES, {"max_tokens": 0}, {"max_output_tokens": 0}),  # a request that warms the cache
        (MESSAGES, {"thinking": {"type": "disabled"}, "system": None}, {}),
        (RESPONSES, {"input": "hello", "reasoning": None}, {}),
        (RESPONSES, {"input": [{"type": "message", "role": "developer"}]}, {"last_role": "developer"}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, {"has_images": True}),
    ],
)  # fmt: skip
def test_what_counts_as_told(operation: Operation, extra: dict[str, Any], told: dict[str, Any]) -> None:
    prompt = "input" if operation is RESPONSES else "messages"
    assert facts(operation, {"model": "m", prompt: [{"role": "user", "content": "x"}], **extra}) == told


@pytest.mark.parametrize(("found", "count"), [("a", 1), (["a", "b"], 2), ([1, 2, 3], 1), ([[1], [2, 3]], 2)])
def test_embeddings_take_texts_and_tokens(found: object, count: int) -> None:
    body = {"model": "m", "input": found}
    assert facts(Operation.EMBEDDINGS, body) == (
        {"last_role": ""} | ({"message_count": count} if count > 1 else {})
    )


def test_segments_are_the_received_bytes_in_prompt_order() -> None:
    body = (
        b'{ "messages" : [ {"role":"user","content":"\\u00e9"} ,\n {"content":"\xc3\xa9", "role" : "user"}\t] ,'
        b'"system":[{"text": "a"}], "model":"m", "tools" : [ {"b":1,"a":1.0} ] }'
    )
    found = read(MESSAGES, body)
    assert cut(found) == [
        ("tools", '[ {"b":1,"a":1.0} ]'),
        ("system", '[{"text": "a"}]'),
        ("message", '{"role":"user","content":"\\u00e9"}'),
        ("message", '{"content":"é", "role" : "user"}'),
    ]
    assert found.size == len(body)
    whole = read(RESPONSES, b'{"input": "a\\"b", "model": "m", "instructions": "i"}')
    assert cut(whole) == [("system", '"i"'), ("message", '"a\\"b"')]


def nested(depth: int) -> bytes:
    """A chat body that is `depth` levels deep: body, list, message, then lists."""
    inner = b"[" * (depth - 3) + b"]" * (depth - 3)
    return b'{"model":"m","messages":[{"role":"user","content":' + inner + b"}]}"


def test_sixty_four_levels_are_enough_and_strings_are_no_levels() -> None:
    assert read(CHAT, nested(64)).message_count == 1
    brackets = json.dumps([{"role": "user", "content": "[{" * 5000 + '\\" [' * 99 + "\\\\"}]).encode()
    assert read(CHAT, b'{"model":"m","messages":' + brackets + b"}").message_count == 1
    wide = json.dumps([{"role": "user", "content": [[{}], [[]]] * 500}]).encode()
    assert read(CHAT, b'{"model":"m","messages":' + wide + b"}").message_count == 1


def depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=25,
)


NAMES = st.sampled_from(["a", "b", "c d", 'e"f', "g\\", "\u00fc", ': "x', ","])
MEMBERS = st.lists(st.tuples(NAMES, JSON), max_size=5)
SEPARATORS = st.sampled_from([(", ", ": "), (",", ":"), (",", ": "), (" ,", " : ")])


@given(MEMBERS, SEPARATORS, st.booleans())
def test_members_that_need_no_walk_are_where_a_walk_finds_them(
    pairs: list[tuple[str, object]], separators: tuple[str, str], escaped: bool
) -> None:
    comma, colon = separators

    def written(value: object) -> str:
        return json.dumps(value, separators=separators, ensure_ascii=escaped)

    text = "{" + comma.join(f"{written(name)}{colon}{written(value)}" for name, value in pairs) + "}"
    try:
        walked = json_slices.members(text.encode())
    except json_slices.DuplicateMember:
        walked = None
    assert json_slices.plain_members(text.encode()) in (None, walked)


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
def test_what_serialisers_write_needs_no_walk(separators: tuple[str, str]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": 'a, "b": c'}], "n": 1, "user": None}
    text = json.dumps(body, separators=separators).encode()
    found = json_slices.plain_members(text)
    assert found is not None
    assert {name: json.loads(text[start:end]) for name, (start, end) in found.items()} == body


@given(JSON, st.integers(min_value=1, max_value=5))
def test_depth_is_counted_as_a_parser_would(value: object, limit: int) -> None:
    text = json.dumps(value).encode()
    if depth(value) <= limit:
        assert json_slices.nodes(text, limit, "x") >= 0
    else:
        with pytest.raises(InvalidRequest, match="nested too deep"):
            json_slices.nodes(text, limit, "x")


ONE = b'"messages":[{"role":"user","content":"x"}]'

BAD: list[tuple[Operation, bytes, str | None, str]] = [
    (CHAT, b"", None, "body is empty"),
    (CHAT, b"  \n", None, "body is empty"),
    (CHAT, b"[]", None, "must be a JSON object: expected object, got array"),
    (CHAT, b"null", None, "must be a JSON object: expected object, got null"),
    (CHAT, b"hello", None, "not valid JSON: invalid character (byte 0)"),
    (CHAT, b"\xef\xbb\xbf{}", None, "byte order mark"),
    (CHAT, b'{"model":"m",' + ONE[:20], None, "not complete JSON: it ends at byte 33"),
    (CHAT, b'{"model":"m",' + ONE + b"} {}", None, "trailing characters (byte 58)"),
    (CHAT, b'{"model":"m",' + ONE + b',"temperature":NaN}', None, "NaN and Infinity are not numbers (byte 70)"),
    (CHAT, b'{"model":"m",' + ONE + b',"top_p":-Infinity}', None, "NaN and Infinity are not numbers"),
    (CHAT, b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}', "messages[0]", "not valid UTF-8"),
    (CHAT, b'{"model":"m",' + ONE + b',"x":"\xff"}', None, "not valid UTF-8"),
    (CHAT, b'{"model":"\xff",' + ONE + b"}", None, "not valid UTF-8"),
    (CHAT, b'{"\xff":1,"model":"m",' + ONE + b"}", None, "not valid UTF-8"),
    (CHAT, b"{" + ONE + b"}", "model", "'model' is missing"),
    (CHAT, b"{}", "model", "'model' is missing"),
    (CHAT, b'{"model":null,' + ONE + b"}", "model", "'model': expected str, got null"),
    (CHAT, b'{"model":"",' + ONE + b"}", "model", "1 to 256 characters"),
    (CHAT, b'{"model":"' + b"x" * 257 + b'",' + ONE + b"}", "model", "1 to 256 characters"),
    (CHAT, b'{"model":"a\\nb",' + ONE + b"}", "model", "printable"),
    (CHAT, b'{"model":"m"}', "messages", "'messages' is missing"),
    (CHAT, b'{"model":"m","messages":[]}', "messages", "must not be empty"),
    (CHAT, b'{"model":"m","messages":"x"}', "messages", "'messages': expected array, got str"),
    (CHAT, b'{"model":"m","messages":[{"role":"user"},7]}', "messages[1]", "must be an object"),
    (CHAT, b'{"model":"m","messages":[{"content":"x"}]}', "messages[0].role", "is missing"),
    (CHAT, b'{"model":"m","messages":[{"role":1}]}', "messages[0].role", "expected str, got int"),
    (CHAT, b'{"model":"m","messages":[' + b",".join([b"{}"] * 10_001) + b"]}", "messages", "at most 10000"),
    (CHAT, b'{"model":"m","stream":1,' + ONE + b"}", "stream", "'stream': expected bool | null, got int"),
    (CHAT, b'{"model":"m","stream":"true",' + ONE + b"}", "stream", "got str"),
    (CHAT, b'{"model":"m","n":0,' + ONE + b"}", "n", "from 1 to 8"),
    (CHAT, b'{"model":"m","n":9,' + ONE + b"}", "n", "from 1 to 8"),
    (CHAT, b'{"model":"m","n":true,' + ONE + b"}", "n", "got bool"),
    (CHAT, b'{"model":"m","max_tokens":0,' + ONE + b"}", "max_tokens", "at least 1"),
    (CHAT, b'{"model":"m","max_tokens":-5,' + ONE + b"}", "max_tokens", "at least 1"),
    (CHAT, b'{"model":"m","max_tokens":1.5,' + ONE + b"}", "max_tokens", "got float"),
    (CHAT, b'{"model":"m","max_tokens":"9",' + ONE + b"}", "max_tokens", "got str"),
    (CHAT, b'{"model":"m","max_completion_tokens":' + b"9" * 21 + b"," + ONE + b"}", "max_completion_tokens", "20 digits"),
    (CHAT, b'{"model":"m","max_tokens":' + b"9" * 5000 + b"," + ONE + b"}", "max_tokens", "max_tokens"),
    (MESSAGES, b'{"model":"m","max_tokens":-1,' + ONE + b"}", "max_tokens", "at least 0"),
    (CHAT, b'{"model":"m","tools":{},' + ONE + b"}", "tools", "list of objects"),
    (CHAT, b'{"model":"m","tools":[{},"x"],' + ONE + b"}", "tools[1]", "must be an object"),
    (CHAT, b'{"model":"m","tools":[' + b",".join([b"{}"] * 1001) + b"]," + ONE + b"}", "tools", "at most 1000"),
    (CHAT, b'{"model":"m","stream_options":[],' + ONE + b"}", "stream_options", "expected object, got array"),
    (CHAT, b'{"model":"m","stream_options":{"include_usage":1},' + ONE + b"}", "stream_options.include_usage", "got int"),
    (CHAT, b'{"model":"m","stream_options":{"include_usage":true,"include_usage":false},' + ONE + b"}",
     "stream_options.include_usage", "more than once"),
    (CHAT, b'{"model":"m","reasoning_effort":3,' + ONE + b"}", "reasoning_effort", "got int"),
    (MESSAGES, b'{"model":"m","system":7,' + ONE + b"}", "system", "string or a list"),
    (MESSAGES, b'{"model":"m","messages":[{"role":"user","content":[7]}]}', "messages[0].content[0]", "expected object"),
    (RESPONSES, b'{"model":"m","input":7}', "input", "'input': expected"),
    (RESPONSES, b'{"model":"m","input":["x"]}', "input[0]", "must be an object"),
    (RESPONSES, b'{"model":"m","input":"x","reasoning":{"effort":1}}', "reasoning.effort", "got int"),
    (Operation.EMBEDDINGS, b'{"model":"m"}', "input", "is missing"),
    (Operation.EMBEDDINGS, b'{"model":"m","input":[]}', "input", "not empty"),
    (Operation.EMBEDDINGS, b'{"model":"m","input":["a",1]}', "input", "list of strings"),
    (Operation.EMBEDDINGS, b'{"model":"m","input":[1.5]}', "input[0]", "got float"),
    # where a request goes is the gateway's choice
    (CHAT, b'{"model":"m","api_base":"http://169.254.169.254",' + ONE + b"}", "api_base", "not accepted"),
    (CHAT, b'{"model":"m","base_url":null,' + ONE + b"}", "base_url", "not accepted"),
    (CHAT, b'{"model":"m",' + ONE + b',"api\\u005fkey":"x"}', "api_key", "not accepted"),
    # repeated members: two readers of the body would see two requests
    (CHAT, b'{"model":"m","model":"m",' + ONE + b"}", "model", "more than once"),
    (CHAT, b'{"model":"m",' + ONE + b',"mod\\u0065l":"x"}', "model", "more than once"),
    (CHAT, b'{"model":"m",' + ONE + b',"messages":[{"role":"user","content":"yy"}]}', "messages", "more than once"),
    (CHAT, b'{"messages":[],"model":"m",' + ONE + b"}", "messages", "more than once"),
    (CHAT, b'{"model":"m","x":{"a":[1,2]},"x":{},' + ONE + b"}", "x", "more than once"),
    (CHAT, b'{"model":"m","max_tokens":5,"max_tokens":5,' + ONE + b"}", "max_tokens", "more than once"),
    # depth, wherever it is
    (CHAT, nested(65), "messages[0]", "nested too deep"),
    (CHAT, nested(100), "messages[0]", "nested too deep"),
    (CHAT, nested(200_000), None, "nested too deep"),
    (CHAT, b'{"model":"m","x":' + b"[" * 64 + b"]" * 64 + b"," + ONE + b"}", None, "nested too deep"),
    (CHAT, b'{"model":"m","tools":[' + b'{"a":' * 63 + b"1" + b"}" * 63 + b"]," + ONE + b"}", "tools", "nested too deep"),
    (CHAT, b'{"model":"m","messages":[' + b",".join([b'{"role":"user","c":[' + b",".join([b"[]"] * 100) + b"]}"] * 2000) + b"]}",
     None, "more than 200000"),
    (CHAT, b'{"model":"m","messages":[{"role":"user","c":[' + b",".join([b"[]"] * 200_001) + b"]}]}", "messages[0]",
     "more than 200000"),
]  # fmt: skip


@pytest.mark.parametrize(("operation", "body", "param", "message"), BAD, ids=range(len(BAD)))
def test_refused_with_the_field_named(
    operation: Operation, body: bytes, param: str | None, message: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(operation, body)
    assert (refused.value.param, message in refused.value.message) == (param, True), refused.value.message


def test_a_bad_message_is_refused_again_although_good_ones_are_remembered() -> None:
    for _ in range(2):
        assert read(CHAT, nested(60)).message_count == 1
        with pytest.raises(InvalidRequest, match="nested too deep"):
            read(CHAT, nested(66))


def test_what_is_remembered_is_bounded() -> None:
    seen = json_slices.Checked(lambda text, _where: len(text), capacity=10)
    for i in range(1000):
        assert seen([memoryview(b"x" * (i % 50))], "m")[0] == [i % 50]
        assert len(seen._young) + len(seen._old) <= 20


SMUGGLED = [
    # The second list's one item has 15 bytes. Laid over the first list, they end inside a key, and what follows
    # reads as `]`, a member named ":" and the end of the body: both models would be out of sight.
    b'{"model":"cheap","messages":[{"'
    + b"a" * 13
    + b'],":":1}"}],"messages":[{"role":"user"}],"model":"dear"}',
    # the same with a value that is not a list of messages
    b'{"model":"cheap","stop":{"],":":1}"},"stop":{},' + ONE + b',"model":"dear"}',
    b'{"model":"cheap","stop":{"a":":1}"},"stop":{"],":1},' + ONE + b',"model":"dear"}',
]


@pytest.mark.parametrize("body", SMUGGLED, ids=range(len(SMUGGLED)))
def test_no_length_of_a_later_twin_hides_a_member(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="more than once"):
        read(CHAT, body)
