"""A long request is read from its first new message on, and nobody can tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.catalog import Operation
from gateway.core.dialects import Facts, anthropic_messages, openai_chat, openai_responses
from gateway.core.dialects.known import LEAST_BYTES, KnownBodies
from gateway.core.errors import InvalidRequest

READERS: dict[Operation, Callable[[bytes], Facts]] = {
    Operation.CHAT: openai_chat.read,
    Operation.RESPONSES: openai_responses.read,
    Operation.MESSAGES: partial(anthropic_messages.read, Operation.MESSAGES),
}
LIST = {Operation.CHAT: "messages", Operation.RESPONSES: "input", Operation.MESSAGES: "messages"}
IMAGE = {"role": "user", "content": [{"type": "image", "source": {"data": "AAAA"}}]}
HOUR = {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"ttl": "1h"}}]}


def said(n: int, size: int = 400) -> dict[str, Any]:
    return {"role": "user" if n % 2 else "assistant", "content": f"{n} " + 'word \\ " { é ' * (size // 14)}


def history(count: int) -> list[dict[str, Any]]:
    return [said(n) for n in range(count)]


def body(messages: list[dict[str, Any]], operation: Operation = Operation.CHAT, **more: object) -> bytes:
    tools = [
        {"type": "function", "function": {"name": f"tool{i}", "description": "d" * 99}} for i in range(5)
    ]
    before = {"model": "m", "stream": True}
    return json.dumps(
        {**before, LIST[operation]: messages, "tools": tools, **more}, ensure_ascii=False
    ).encode()


class Recorded:
    """KnownBodies, and how much of each body it read."""

    def __init__(self, operation: Operation = Operation.CHAT) -> None:
        self.operation = operation
        self.known = KnownBodies()
        self.sizes: list[int] = []

    def __call__(self, text: bytes) -> Facts:
        self.sizes.clear()
        return self.known.read(self.operation, text, self._read)

    def _read(self, text: bytes) -> Facts:
        self.sizes.append(len(text))
        return READERS[self.operation](text)


def told(facts: Facts) -> dict[str, object]:
    """Everything that facts say, but the digest."""
    names = [n for n in facts.__struct_fields__ if n not in ("segments", "digest")]
    segments = [(s.kind, bytes(s.raw), s.key) for s in facts.segments]
    return {n: getattr(facts, n) for n in names} | {"segments": segments, "keys": list(facts.segments.keys)}


@pytest.mark.parametrize("operation", READERS)
def test_a_step_is_read_from_its_first_new_message_on(operation: Operation) -> None:
    read = Recorded(operation)
    first, step = body(history(100), operation), body(history(102), operation)
    read(first)
    assert read.sizes == [len(first)]
    facts = read(step)
    assert len(read.sizes) == 1
    assert read.sizes[0] < 3_000 < len(step)
    assert told(facts) == told(READERS[operation](step))


def test_a_run_is_read_by_what_is_new_however_long_it_gets() -> None:
    """Also across each size at which one more sample of a body is taken, and after a summary made it short again."""
    read = Recorded()
    for beginning in ([], [{"role": "user", "content": "what was done so far"}]):
        read(body([*beginning, *history(40)]))
        for count in range(42, 400, 2):
            step = body([*beginning, *history(count)])
            assert told(read(step)) == told(openai_chat.read(step))
            assert len(read.sizes) == 1
            assert read.sizes[0] < 3_000


def test_the_same_again_reads_its_last_message_alone() -> None:
    read = Recorded()
    text = body(history(100))
    digest = read(text).digest
    assert read(text).digest == digest
    assert len(read.sizes) == 1
    assert read.sizes[0] < 3_000


def test_a_change_in_the_middle_is_read() -> None:
    read = Recorded()
    messages = history(100)
    whole = read(body(messages))
    messages[40] = {"role": "user", "content": "another past"}
    changed = body(messages)
    facts = read(changed)
    assert told(facts) == told(openai_chat.read(changed))
    assert facts.digest != whole.digest


def test_a_mark_that_moves_on_is_no_new_history() -> None:
    """Clients mark their last messages for the cache, and take the mark away in the next step."""
    read = Recorded(Operation.MESSAGES)
    mark = {"cache_control": {"type": "ephemeral"}}
    marked = [{"role": "user", "content": [{"type": "text", "text": "t" * 500, **mark}]}] * 2
    plain = [{"role": "user", "content": [{"type": "text", "text": "t" * 500}]}] * 2
    read(body(history(60) + marked, Operation.MESSAGES))
    step = body(history(60) + plain + marked, Operation.MESSAGES)
    facts = read(step)
    assert read.sizes[0] < len(step) // 4
    assert told(facts) == told(READERS[Operation.MESSAGES](step))


def test_marks_of_what_was_not_read_again_still_count() -> None:
    read = Recorded(Operation.MESSAGES)
    read(body([IMAGE, HOUR, *history(60)], Operation.MESSAGES))
    facts = read(body([IMAGE, HOUR, *history(62)], Operation.MESSAGES))
    assert (facts.has_images, facts.long_cache_write, facts.message_count) == (True, True, 64)


def test_what_only_the_last_messages_had_is_forgotten_with_them() -> None:
    read = Recorded(Operation.MESSAGES)
    read(body([*history(60), IMAGE], Operation.MESSAGES))
    facts = read(body([*history(60), said(60)], Operation.MESSAGES))
    assert not facts.has_images


@pytest.mark.parametrize(
    "break_it",
    [
        lambda t: t[:-1],
        lambda t: t.replace(b'"tools"', b'"messages": [], "tools"'),
        lambda t: t.replace(b'], "tools"', b',], "tools"'),
        lambda t: t.replace(b'], "tools"', b', 7], "tools"'),
        lambda t: t.replace(b'], "tools"', b', {"role": NaN}], "tools"'),
        lambda t: t.replace(b'], "tools"', b', {"role": "\xff"}], "tools"'),
        lambda t: t.replace(b'], "tools"', b', {"content": ' + b"[" * 80 + b"]" * 80 + b'}], "tools"'),
        lambda t: t.replace(b'"tools": [', b'"api_key": "k", "tools": ['),
    ],
)
def test_a_refusal_names_the_place_in_the_whole_body(break_it: Callable[[bytes], bytes]) -> None:
    read = Recorded()
    text = body(history(100))
    read(text)
    broken = break_it(body(history(101)))
    with pytest.raises(InvalidRequest) as whole:
        openai_chat.read(broken)
    with pytest.raises(InvalidRequest) as known:
        read(broken)
    assert (str(known.value), known.value.param) == (str(whole.value), whole.value.param)


def test_two_runs_with_one_opening_are_both_known() -> None:
    read = Recorded()
    fork = [
        [*history(60), *({"role": "user", "content": f"{who} {n}" * 100} for n in range(30))] for who in "ab"
    ]
    for messages in fork:
        read(body(messages))
    for messages in fork:
        step = body([*messages, said(1)])
        assert told(read(step)) == told(openai_chat.read(step))
        assert read.sizes[0] < 5_000


def test_what_is_remembered_is_bounded_by_messages() -> None:
    read = Recorded()
    read.known = KnownBodies(messages_max=250)
    runs = [[{"role": "user", "content": f"{who} {n}" * 100} for n in range(100)] for who in "abc"]
    for messages in runs:
        read(body(messages))
    read(body(runs[0]))
    assert read.sizes == [len(body(runs[0]))]  # forgotten, so read whole
    read(body(runs[2]))
    assert read.sizes[0] < 3_000


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("more"), st.integers(1, 5)),
        st.tuples(st.just("back"), st.integers(1, 40)),
        st.tuples(st.just("change"), st.integers(0, 60)),
        st.tuples(st.just("image"), st.just(0)),
        st.tuples(st.just("hour"), st.just(0)),
        st.tuples(st.just("same"), st.just(0)),
    ),
    max_size=12,
)


@given(STEPS, st.sampled_from(list(READERS)), st.sampled_from([(", ", ": "), (",", ":"), (" ,\n ", " :")]))
@settings(deadline=None, max_examples=60)
def test_facts_are_those_of_the_whole_body_whatever_was_read_before(
    steps: list[tuple[str, int]], operation: Operation, separators: tuple[str, str]
) -> None:
    read = Recorded(operation)
    messages = history(50)
    n = 1_000
    for step, number in [("same", 0), *steps]:
        n += 1
        match step:
            case "more":
                messages = [*messages, *[said(n * 10 + i) for i in range(number)]]
            case "back":
                messages = messages[:-number] or [said(n)]
            case "change":
                messages = [*messages[:number], said(n), *messages[number + 1 :]]
            case "image":
                messages = [*messages, IMAGE]
            case "hour":
                messages = [*messages, HOUR]
        text = json.dumps(
            {"model": "m", LIST[operation]: messages, "stream_options": {"include_usage": True}},
            separators=separators,
        ).encode()
        assert told(read(text)) == told(READERS[operation](text))


def test_a_short_body_is_not_remembered() -> None:
    read = Recorded()
    text = body([said(0, 100)])
    assert len(text) < LEAST_BYTES
    first = read(text)
    assert (read(text).digest, read.sizes) == (first.digest, [len(text)])
