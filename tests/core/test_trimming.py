"""Oversized tool results: where they are cut, that it is decided once, and what stays as it is."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core import dialects
from gateway.core.catalog import Operation
from gateway.core.prefix import chain
from gateway.core.shaping import Level, Request, Shaped, Shaper, Transform
from gateway.core.trimming import Artifacts, Trimmer, TrimPolicy, cut, result_texts
from tests.support.played_cache import compact, rule_of, spliced

LINES = "".join(f"line {n}: something was found here\n" for n in range(1_000))
POLICY = TrimPolicy(over_chars=10_000, keep_chars=4_000)
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}


def messages(*results: Any) -> bytes:
    said: list[dict[str, Any]] = [{"role": "user", "content": LINES}]
    for result in results:
        block = {"type": "tool_result", "tool_use_id": "t", "content": result}
        said += [CALL, {"role": "user", "content": [block]}]
    return compact({"model": "m", "max_tokens": 9, "messages": said})


def shaped_by(
    shaper: Shaper,
    body: bytes,
    policy: TrimPolicy = POLICY,
    operation: Operation = Operation.MESSAGES,
    level: Level = Level.SAFE,
    off: frozenset[Transform] = frozenset({Transform.MARKERS}),
) -> tuple[bytes, Shaped]:
    facts = dialects.read(operation, body)
    request = Request(
        operation,
        facts,
        body,
        chain(facts.segments),
        ("key", "client", ""),
        rule_of("demo/demo-large"),
        level=level,
        off=off,
        trim=policy,
        group="task_1",
    )
    shaped = shaper.shape(request)
    return spliced(facts, body, shaped), shaped


def results(body: bytes) -> list[Any]:
    said = msgspec.json.decode(body)["messages"]
    return [
        m["content"][0]["content"] for m in said if m["role"] == "user" and isinstance(m["content"], list)
    ]


def test_head_and_tail_stay_and_the_rest_can_be_had() -> None:
    shaper = Shaper()
    out, shaped = shaped_by(shaper, messages(LINES))
    assert shaped.applied == (Transform.TRIM,)
    (text,) = results(out)
    head, _, tail = text.partition("\n[... ")
    digest = tail.partition("/artifacts/")[2][:32]
    whole = shaper.artifacts.text("task_1", digest)
    assert whole == LINES
    assert head.endswith("found here\n")
    note, _, tail = tail.partition("]\n")
    left_out = len(LINES) - len(head) - len(tail)
    assert note == (
        f"{left_out:,} characters left out by the gateway; all of it, page by page: "
        f"GET /v1/tasks/task_1/artifacts/{digest}?offset={len(head)}"
    )
    assert LINES.startswith(head)
    assert LINES.endswith(tail)
    assert tail.startswith("line ")
    assert 3_500 <= len(head) + len(tail) <= 4_000
    # what the user wrote is never cut, nor a short result, nor anything at observe
    assert json.dumps(LINES).encode() in out
    assert shaped_by(Shaper(), messages("short"))[0] == messages("short")
    assert shaped_by(Shaper(), messages(LINES), level=Level.OBSERVE)[0] == messages(LINES)
    assert shaped_by(Shaper(), messages(LINES), policy=TrimPolicy())[0] == messages(LINES)


def test_the_same_bytes_leave_in_every_later_step_whatever_the_policy_says_then() -> None:
    shaper = Shaper()
    first, _ = shaped_by(shaper, messages(LINES))
    later, _ = shaped_by(shaper, messages(LINES, "short", LINES + "x"))
    assert later.startswith(first[:-2])
    other = TrimPolicy(over_chars=20_000, keep_chars=9_000)
    again, _ = shaped_by(shaper, messages(LINES, "short"), policy=other)
    assert again.startswith(first[:-2])
    # another process decides the same
    assert shaped_by(Shaper(), messages(LINES))[0] == first


def test_what_left_whole_stays_whole() -> None:
    shaper = Shaper()
    shaped_by(shaper, messages(LINES), policy=TrimPolicy())
    out, _ = shaped_by(shaper, messages(LINES, LINES + "x"))
    whole, trimmed = results(out)
    assert whole == LINES
    assert len(trimmed) < 5_000


@pytest.mark.parametrize("operation", [Operation.CHAT, Operation.RESPONSES])
def test_chat_and_responses(operation: Operation) -> None:
    if operation is Operation.CHAT:
        said: list[dict[str, Any]] = [{"role": "tool", "tool_call_id": "c", "content": LINES}]
        said.append({"role": "tool", "tool_call_id": "d", "content": [{"type": "text", "text": LINES}]})
        body = compact({"model": "m", "messages": [{"role": "user", "content": LINES}, *said]})
    else:
        said = [{"type": "function_call_output", "call_id": "c", "output": LINES}]
        body = compact({"model": "m", "input": [{"role": "user", "content": LINES}, *said]})
    out, shaped = shaped_by(Shaper(), body, operation=operation)
    assert len(shaped.splices) == len(said)
    # the inverse: each text that was cut out, put back
    back = out
    for start, end, text in sorted(shaped.splices):
        assert back[start : start + len(text)] == text
        back = back[:start] + body[start:end] + back[start + len(text) :]
    assert back == body


def test_a_trimmed_tail_is_marked_too() -> None:
    facts_off: frozenset[Transform] = frozenset()
    body = compact(
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": "go"},
                {"role": "tool", "tool_call_id": "c", "content": LINES},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "description": "d" * 4_000}}],
        }
    )
    out, shaped = shaped_by(Shaper(), body, operation=Operation.CHAT, off=facts_off)
    assert set(shaped.applied) == {Transform.TRIM, Transform.MARKERS}
    (block,) = msgspec.json.decode(out)["messages"][1]["content"]
    assert block["cache_control"] == {"type": "ephemeral"}
    assert "left out by the gateway" in block["text"]


def test_json_is_cut_between_elements() -> None:
    rows = json.dumps([{"id": n, "name": f"row, {n}", "tags": ["a", "b"]} for n in range(500)])
    head, tail = cut(rows, 4_000)
    assert rows[:head].endswith("},")
    assert rows[tail:].startswith('{"id": ')
    nested = json.dumps({"data": {"text": "a,b," * 900, "more": [1, 2]}, "end": "x" * 9_000})
    assert cut(nested, 4_000)[0] <= 3_000
    pretty = json.dumps(json.loads(rows), indent=1)
    head, tail = cut(pretty, 4_000)
    assert pretty[head - 1] == pretty[tail - 1] == "\n"


@given(st.text(min_size=401, max_size=3_000), st.integers(100, 400))
def test_a_cut_is_a_cut_whatever_the_text(text: str, keep_chars: int) -> None:
    head, tail = cut(text, keep_chars)
    assert 0 < head <= keep_chars - keep_chars // 4
    assert len(text) - keep_chars // 4 <= tail <= len(text)


def test_shapes_that_are_not_known_are_left_alone() -> None:
    for raw in (
        b'{"role":"tool"}',
        b'{"role":"tool","content":7}',
        b'{"role":"tool","role":"tool","content":"x"}',
        b"[]",
    ):
        assert result_texts(Operation.CHAT, raw) == []
    assert result_texts(Operation.MESSAGES, b'{"role":"user","content":[7,{"type":"tool_result"}]}') == []


def test_artifacts_are_bounded() -> None:
    kept = Artifacts(chars_max=250)
    for n in range(4):
        kept.keep("t", str(n), "x" * 100)
    assert [kept.text("t", str(n)) is not None for n in range(4)] == [False, False, True, True]


def test_a_policy_that_keeps_more_than_it_trims_cannot_be_built() -> None:
    for over, keep in ((1_000, 2_000), (1_000, 10)):
        with pytest.raises(ValueError, match="keep_chars"):
            TrimPolicy(over, keep)


def test_what_was_dropped_is_made_again_from_the_request() -> None:
    small, large = Trimmer(bytes_max=1), Trimmer()
    raw = memoryview(compact({"role": "tool", "content": LINES}))
    other = memoryview(compact({"role": "tool", "content": LINES + "x"}))
    for text in (raw, other, raw):
        for trimmer in (small, large):
            (trim,) = trimmer.trims(Operation.CHAT, text.tobytes(), POLICY)
            made = trimmer.cut(trim, text, "task", POLICY)
            assert made == Trimmer().cut(trim, text, "task", POLICY)
            assert trimmer.artifacts.text("task", trim.digest) == msgspec.json.decode(text)["content"]
