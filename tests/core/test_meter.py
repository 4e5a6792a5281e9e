"""The meter reads a stream without changing it, and the same whatever way the bytes were cut."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.catalog import Operation
from gateway.core.dialects import Reading
from gateway.core.errors import UpstreamError, UpstreamMalformed, UpstreamOverloaded
from gateway.core.meter import StreamMeter, error_event, ping
from gateway.core.usage import Usage
from tests.support.material import ABSENT, SHARED

CHAT, RESPONSES, MESSAGES = Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES


@dataclass(frozen=True)
class Seen:
    """What a meter knows at the end of a stream."""

    out: bytes
    usage: Usage | None = None
    problem: str = ""
    tier: str = ""
    finish: str = ""
    response_id: str = ""
    model: str = ""
    complete: bool = False
    error: str = ""
    events: int = 0
    output: tuple[int, int] = (0, 0)  # events, bytes


def meter(
    operation: Operation,
    stream: bytes,
    cuts: tuple[int, ...] = (),
    hide: bool = False,
    cost: str | None = None,
) -> Seen:
    m = StreamMeter(operation, hide_usage=hide, price=lambda _: cost)
    out = b"".join(m.feed(stream[a:b]) for a, b in itertools.pairwise((0, *cuts, len(stream)))) + m.end()
    assert m.first_output == (m.output_events > 0)
    reading = m.reading or Reading(Usage())
    return Seen(
        out,
        m.reading.usage if m.reading else None,
        reading.problem,
        reading.service_tier,
        m.finish,
        m.response_id,
        m.model,
        m.complete,
        type(m.error).__name__ if m.error else "",
        m.events,
        (m.output_events, m.output_bytes),
    )


def data(value: Any, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def named(name: str, body: Any) -> bytes:
    return data({"type": name, **body}, name)


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    return data({"id": "c1", "model": "m1", "choices": choices, **more})


DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14}
HELLO = (
    chunk({"role": "assistant", "content": ""}) + chunk({"content": "h\u00e9"}) + chunk({"content": "llo"})
)
STOP = chunk({}, "stop")

CHAT_STREAM = b": comment\n\n" + HELLO + STOP + chunk(usage=USAGE, service_tier="flex") + DONE
CHAT_SEEN = Seen(
    CHAT_STREAM, Usage(input_uncached=10, output=4), "", "flex", "stop", "c1", "m1", True, "", 6, (2, 6)
)

MESSAGES_STREAM = b"".join(
    named(name, body)
    for name, body in [
        ("message_start", {"message": {"id": "msg_1", "model": "c", "usage": {
            "input_tokens": 3, "cache_creation_input_tokens": 50, "cache_read_input_tokens": 7, "output_tokens": 1,
            "cache_creation": {"ephemeral_5m_input_tokens": 20, "ephemeral_1h_input_tokens": 30},
            "service_tier": "standard"}}}),
        ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
        ("ping", {}),
        ("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": "hi"}}),
        ("content_block_delta", {"index": 0, "delta": {"type": "thinking_delta", "thinking": "abc"}}),
        ("content_block_start", {"index": 1, "content_block": {"type": "tool_use", "id": "t", "name": "go", "input": {}}}),
        ("content_block_delta", {"index": 1, "delta": {"type": "input_json_delta", "partial_json": "{}"}}),
        ("content_block_stop", {"index": 0}),
        ("message_delta", {"delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 12}}),
        ("message_stop", {}),
    ]
)  # fmt: skip
MESSAGES_SEEN = Seen(
    MESSAGES_STREAM, Usage(input_uncached=3, cache_read=7, cache_write_5m=20, cache_write_1h=30, output=12), "",
    "standard", "tool_use", "msg_1", "c", True, "", 9, (4, 9),
)  # fmt: skip

RESPONSES_STREAM = b"".join(
    named(name, body)
    for name, body in [
        ("response.created", {"response": {"id": "resp_1", "model": "r", "status": "in_progress", "usage": None}}),
        ("response.output_item.added", {"item": {"type": "message"}}),
        ("response.output_text.delta", {"delta": "hey"}),
        ("response.function_call_arguments.delta", {"delta": "{}"}),
        ("response.output_text.done", {"text": "hey"}),
        ("response.completed", {"response": {
            "id": "resp_1", "model": "r", "status": "completed", "service_tier": "default", "output": [],
            "usage": {"input_tokens": 100, "input_tokens_details": {"cached_tokens": 64, "cache_write_tokens": 30},
                      "output_tokens": 9, "output_tokens_details": {"reasoning_tokens": 5}}}}),
    ]
)  # fmt: skip
RESPONSES_SEEN = Seen(
    RESPONSES_STREAM, Usage(input_uncached=6, cache_read=64, cache_write_5m=30, output=9, reasoning=5), "",
    "default", "completed", "resp_1", "r", True, "", 6, (2, 5),
)  # fmt: skip

GOLDEN = [(CHAT, CHAT_SEEN), (MESSAGES, MESSAGES_SEEN), (RESPONSES, RESPONSES_SEEN)]


@pytest.mark.parametrize(("operation", "seen"), GOLDEN, ids=[o.value for o, _ in GOLDEN])
def test_a_stream_passes_unchanged_and_is_read(operation: Operation, seen: Seen) -> None:
    stream = seen.out
    assert meter(operation, stream) == seen
    assert meter(operation, stream, tuple(range(len(stream)))) == seen
    for cut in range(len(stream)):
        assert meter(operation, stream, (cut,)) == seen


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("hide", [True, False])
def test_two_cuts_anywhere_change_nothing(newline: bytes, hide: bool) -> None:
    stream = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\ndata: {"choices":[],"usage":{"prompt_tokens":1}}\n\n'
    stream = stream.replace(b"\n", newline)
    whole = meter(CHAT, stream, hide=hide, cost="1")
    assert whole.out.count(b"usage") == (0 if hide else 1)
    for cuts in itertools.combinations(range(len(stream) + 1), 2):
        assert meter(CHAT, stream, cuts, hide=hide, cost="1") == whole


@settings(max_examples=60)
@given(st.data(), st.sampled_from(GOLDEN), st.booleans(), st.sampled_from([None, "0.01"]))
def test_random_cuts_change_nothing(
    draw: st.DataObject, golden: tuple[Operation, Seen], hide: bool, cost: str | None
) -> None:
    operation, stream = golden[0], golden[1].out
    cuts = tuple(sorted(draw.draw(st.lists(st.integers(0, len(stream)), max_size=20))))
    assert meter(operation, stream, cuts, hide, cost) == meter(operation, stream, (), hide, cost)


# --- what is taken out, what is added ------------------------------------------------------------------


def test_the_usage_chunk_is_hidden_from_a_client_that_did_not_ask() -> None:
    hidden = meter(CHAT, CHAT_STREAM, hide=True, cost="0.5")
    assert hidden.out == b": comment\n\n" + HELLO + STOP + DONE
    assert (hidden.usage, hidden.complete) == (CHAT_SEEN.usage, True)


def test_usage_beside_choices_is_kept_and_null_usage_too() -> None:
    stream = chunk({"content": "a"}, usage=None) + chunk({}, "stop", usage=USAGE) + DONE
    seen = meter(CHAT, stream, hide=True)
    assert (seen.out, seen.usage) == (stream, Usage(input_uncached=10, output=4))


def test_content_that_speaks_of_usage_is_content() -> None:
    stream = chunk({"content": '"usage":{"prompt_tokens":9} "finish_reason":"stop" "error":1'}) + DONE
    seen = meter(CHAT, stream, hide=True, cost="1")
    assert (seen.out, seen.usage, seen.finish, seen.error) == (stream, None, "", "")


@pytest.mark.parametrize(
    ("golden", "before", "after"),
    [
        (GOLDEN[0], b'"total_tokens": 14}', b'"total_tokens": 14,"cost":0.5}'),
        (GOLDEN[1], b'"usage": {"output_tokens": 12}', b'"usage": {"output_tokens": 12,"cost":0.5}'),
        (GOLDEN[2], b'{"reasoning_tokens": 5}}', b'{"reasoning_tokens": 5},"cost":0.5}'),
    ],
    ids=["chat", "messages", "responses"],
)
def test_the_cost_is_added_to_the_last_usage(
    golden: tuple[Operation, Seen], before: bytes, after: bytes
) -> None:
    operation, seen = golden
    assert seen.out.count(before) == 1
    assert meter(operation, seen.out, cost="0.5").out == seen.out.replace(before, after)


def test_the_price_is_asked_with_the_merged_reading() -> None:
    asked: list[Reading] = []
    m = StreamMeter(MESSAGES, hide_usage=False, price=lambda r: asked.append(r))
    assert m.feed(MESSAGES_STREAM) == MESSAGES_STREAM
    assert [r.usage for r in asked] == [MESSAGES_SEEN.usage]


# --- usage that comes in parts ---------------------------------------------------------------------------


def test_the_last_usage_wins() -> None:
    growing = [{**USAGE, "completion_tokens": n, "total_tokens": 10 + n} for n in (1, 2, 4)]
    stream = (
        b"".join(chunk({"content": "a"}, usage=u) for u in growing) + STOP + chunk(usage=growing[-1]) + DONE
    )
    seen = meter(CHAT, stream, cost="7")
    assert (seen.usage, seen.out.count(b'"cost":7')) == (Usage(input_uncached=10, output=4), 1)


def test_messages_usage_is_merged_field_by_field() -> None:
    """vLLM: the start shows the total of the input, the delta how it splits."""
    start = {"message": {"usage": {"input_tokens": 493, "output_tokens": 0}}}
    delta = {
        "delta": {"stop_reason": "max_tokens"},
        "usage": {
            "input_tokens": 13,
            "output_tokens": 5,
            "cache_read_input_tokens": 480,
            "cache_creation": None,
        },
    }
    stream = data({"type": "message_start", **start}) + data({"type": "message_delta", **delta})
    seen = meter(MESSAGES, stream)
    assert (seen.usage, seen.finish) == (Usage(input_uncached=13, cache_read=480, output=5), "max_tokens")
    assert not seen.complete


def test_a_new_cache_total_drops_the_old_split() -> None:
    start = {"input_tokens": 1, "output_tokens": 1, "cache_creation_input_tokens": 9,
             "cache_creation": {"ephemeral_1h_input_tokens": 9}}  # fmt: skip
    delta = {"output_tokens": 2, "cache_creation_input_tokens": 4}
    stream = data({"type": "message_start", "message": {"usage": start}}) + data(
        {"type": "message_delta", "usage": delta}
    )
    assert meter(MESSAGES, stream).usage == Usage(input_uncached=1, cache_write_5m=4, output=2)


def test_moonshot_reports_usage_in_the_choice() -> None:
    stream = (
        data({"choices": [{"delta": {}, "finish_reason": "stop", "usage": {**USAGE, "cached_tokens": 6}}]})
        + DONE
    )
    seen = meter(CHAT, stream, cost="1")
    assert (seen.out, seen.usage) == (stream, Usage(input_uncached=4, cache_read=6, output=4))


# --- how streams end ---------------------------------------------------------------------------------------

NO_END = HELLO + STOP + chunk(usage=USAGE)


@pytest.mark.parametrize(
    ("operation", "stream", "complete", "finish", "tail"),
    [
        (CHAT, HELLO + STOP + DONE, True, "stop", b""),
        (CHAT, NO_END, True, "stop", b""),
        (CHAT, HELLO + STOP, False, "stop", b""),
        (CHAT, HELLO + chunk(usage=USAGE), False, "", b""),
        (CHAT, NO_END + b"data: [DONE]", True, "stop", b"data: [DONE]\n\n"),
        (CHAT, NO_END + b"data: [DONE]\n", True, "stop", b"data: [DONE]\n\n"),
        (CHAT, HELLO + b"data: [DONE]", True, "", b"data: [DONE]\n\n"),
        (CHAT, HELLO + b'data: {"choices":[{"de', False, "", b""),
        (CHAT, HELLO + chunk({}, "abort") + DONE, True, "abort", b""),
        (MESSAGES, MESSAGES_STREAM[: MESSAGES_STREAM.index(b"event: message_stop")], False, "tool_use", b""),
        (RESPONSES, data({"type": "response.incomplete", "response": {
            "status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}}), True, "max_output_tokens", b""),
        (RESPONSES, data({"type": "response.failed", "response": {"status": "failed"}}), True, "failed", b""),
        (RESPONSES, data({"type": "response.in_progress", "response": {"status": "in_progress"}}), False, "", b""),
    ],
    ids=range(13),
)  # fmt: skip
def test_complete_or_not(
    operation: Operation, stream: bytes, complete: bool, finish: str, tail: bytes
) -> None:
    for cuts in ((), tuple(range(len(stream)))):
        seen = meter(operation, stream, cuts)
        assert (seen.complete, seen.finish) == (complete, finish)
    m = StreamMeter(operation, hide_usage=False, price=lambda _: None)
    m.feed(stream)
    assert m.end() == tail


def test_usage_in_an_event_that_was_cut_counts_but_is_not_forwarded() -> None:
    seen = meter(CHAT, HELLO + STOP + chunk(usage=USAGE)[:-2])
    assert (seen.out, seen.usage, seen.complete) == (HELLO + STOP, Usage(input_uncached=10, output=4), True)


def test_nothing_at_all() -> None:
    assert meter(CHAT, b"") == Seen(b"")


# --- errors, odd events ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "event", "error"),
    [
        (CHAT, data({"error": {"message": "sk-secret", "type": "server_error"}}), UpstreamError),
        (CHAT, data({"error": {"code": 429}, "choices": []}), UpstreamOverloaded),
        (MESSAGES, data({"type": "error", "error": {"type": "overloaded_error", "message": "x"}}, "error"), UpstreamOverloaded),
        (RESPONSES, data({"type": "error", "code": "server_error", "message": "x"}), UpstreamError),
        (RESPONSES, data({"type": "response.failed", "response": {"error": {"code": "rate_limit_exceeded"}}}), UpstreamOverloaded),
    ],
    ids=range(5),
)  # fmt: skip
def test_an_error_inside_the_stream(operation: Operation, event: bytes, error: type[UpstreamError]) -> None:
    m = StreamMeter(operation, hide_usage=True, price=lambda _: "1")
    assert m.feed(event) == event
    assert type(m.error) is error
    assert "secret" not in m.error.message


ODD = [
    b"data: {not json\n\n",
    b"data: []\n\n",
    b"data: 7\n\n",
    b'data: {"choices":[{"delta":"x"}]}\n\n',
    b'data: {"usage":"much","choices":[]}\n\n',
    b'data: {"usage":{"prompt_tokens":-1}}\n\n',
    b"data: \xff\n\n",
    b"event: x\n\n",
    b'data: {"type":"message_delta","usage":7,"delta":{"stop_reason":[]}}\n\n',
    b'data: {"type":"response.completed","response":{"usage":[],"status":1}}\n\n',
    b"data: " + b"[" * 5000 + b"\n\n",
]


@pytest.mark.parametrize("operation", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("event", ODD, ids=range(len(ODD)))
def test_odd_events_pass(operation: Operation, event: bytes) -> None:
    assert meter(operation, event, hide=True, cost="1").out == event


def test_halves_of_surrogate_pairs_and_nan_are_read() -> None:
    events = [
        b'data: {"choices":[{"delta":{"content":"\\ud83d"},"logprobs":{"x":NaN}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"\\ude00"},"finish_reason":"stop"}],"x":-Infinity}\n\n',
    ]
    seen = meter(CHAT, b"".join(events) + DONE)
    assert (seen.output, seen.finish, seen.complete) == ((2, 6), "stop", True)


def test_what_counts_as_output() -> None:
    deltas: list[tuple[dict[str, Any], int]] = [
        ({"role": "assistant", "content": ""}, 0),
        ({"content": "ab"}, 2),
        ({"content": None, "reasoning_content": "abc"}, 3),
        ({"reasoning_content": "abc", "reasoning": "abc"}, 3),
        ({"reasoning": "a"}, 1),
        ({"refusal": "no"}, 2),
        ({"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "go", "arguments": ""}}]}, 2),
        ({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}, 4),
        ({"function_call": {"name": "go", "arguments": "{}"}}, 4),
        ({}, 0),
    ]
    for delta, size in deltas:
        assert meter(CHAT, chunk(delta)).output == (1 if size else 0, size), delta


def test_an_event_without_end_is_refused() -> None:
    m = StreamMeter(CHAT, hide_usage=False, price=lambda _: None)
    with pytest.raises(UpstreamMalformed):
        m.feed(b"data: " + b"x" * (1 << 20))


# --- recorded streams of a real server --------------------------------------------------------------------

RECORDED = [
    ("chat_stream.sse", CHAT, Usage(input_uncached=15, output=5), "length", (5, 55)),
    ("tool_stream.sse", CHAT, Usage(input_uncached=26, cache_read=128, output=53), "tool_calls", (15, 20)),
    (
        "messages_stream.sse",
        MESSAGES,
        Usage(input_uncached=13, cache_read=480, output=5),
        "max_tokens",
        (5, 55),
    ),
]
FOLDER = SHARED / "upstream" / "golden"


@pytest.mark.parametrize(
    ("file", "operation", "usage", "finish", "output"),
    RECORDED,
    ids=[r[0] if (FOLDER / r[0]).exists() else f"{ABSENT} ({r[0]})" for r in RECORDED],
)
def test_a_recorded_stream_of_vllm(
    file: str, operation: Operation, usage: Usage, finish: str, output: tuple[int, int]
) -> None:
    if not (FOLDER / file).exists():
        print(f"NOT CHECKED: {FOLDER / file} is not there")
        return
    stream = (FOLDER / file).read_bytes()
    for cuts in ((), tuple(range(len(stream))), tuple(range(0, len(stream), 97))):
        seen = meter(operation, stream, cuts)
        assert (seen.out, seen.usage, seen.problem) == (stream, usage, "")
        assert (seen.finish, seen.complete, seen.output) == (finish, True, output)


# --- what we say ourselves -----------------------------------------------------------------------------------


def test_events_of_our_own() -> None:
    assert [
        error_event(o, "upstream_lost", "api_error", 'cut "off"') for o in (CHAT, MESSAGES, RESPONSES)
    ] == [
        b'data: {"error":{"message":"cut \\"off\\"","type":"api_error","param":null,"code":"upstream_lost"}}\n\n',
        b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"cut \\"off\\""}}\n\n',
        b'event: error\ndata: {"type":"error","code":"upstream_lost","message":"cut \\"off\\"","param":null}\n\n',
    ]
    assert [ping(o) for o in (CHAT, MESSAGES, RESPONSES)] == [
        b": keep-alive\n\n",
        b'event: ping\ndata: {"type":"ping"}\n\n',
        b": keep-alive\n\n",
    ]
