"""Byte fidelity and parity of shaping: over captured clients, recorded runs, and conversations that Hypothesis invents.

What the model reads is compared as text in roles; what a transform did is undone from the shaped bytes alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core import dialects
from gateway.core.catalog import Operation
from gateway.core.dialects import Facts
from gateway.core.prefix import chain
from gateway.core.shaping import Level, Request, Shaped, Shaper, Transform
from gateway.core.trimming import TrimPolicy
from tests.support.agent_runs import facts_of
from tests.support.material import ABSENT, SHARED, captured
from tests.support.played_cache import Played, compact, cost, rule_of, spliced

CAPTURED = [c for c in captured() if facts_of(c) is not None and c.body is not None]
NAMES = [c.name for c in CAPTURED] or [ABSENT]
TARGETS = (
    "anthropic/claude-opus-5",
    "openai/gpt-6-sol",
    "openai/gpt-5.4",
    "vllm/m",
    "qwen/m",
    "demo/demo-large",
)
ADDED = re.compile(
    rb',"cache_control":\{"type":"ephemeral"(?:,"ttl":"1h")?\}|,"prompt_cache_breakpoint":\{"mode":"explicit"\}'
)


def shaped_by(
    shaper: Shaper,
    operation: Operation,
    body: bytes,
    target: str,
    level: Level = Level.SAFE,
    off: frozenset[Transform] = frozenset(),
    now_s: float = 0.0,
) -> tuple[bytes, Shaped]:
    facts = dialects.read(operation, body)
    request = Request(
        operation,
        facts,
        body,
        chain(facts.segments),
        ("key",),
        rule_of(target),
        level=level,
        off=off,
        group="run",
        now_s=now_s,
    )
    shaped = shaper.shape(request)
    return spliced(facts, body, shaped), shaped


FORMS = re.compile(
    rb'(?:%b)(?:\}\])?|\[\{"type":"(?:input_)?text","text":|,"prompt_cache_key":"run"' % ADDED.pattern
)


def undone(out: bytes, facts: Facts, shaped: Shaped) -> bytes:
    """The inverse of markers and cache keys: they only insert, so what they inserted is taken out again."""
    inserted = [*shaped.splices]
    if shaped.members:
        after = facts.spans.members["model"][1]
        inserted.append((after, after, shaped.members))
    found, at = out, 0
    for start, end, text in sorted(inserted):
        assert start == end, "only tools and nonces replace"
        assert FORMS.fullmatch(text), text
        assert found[start : start + len(text)] == text
        found = found[:start] + found[start + len(text) :]
        at = start
    assert at <= len(found)
    return found


# --- real clients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_real_client_s_bytes_come_out_as_they_went_in_but_for_named_transforms(name: str) -> None:
    if not CAPTURED:
        assert not SHARED.exists()
        return
    request = next(c for c in CAPTURED if c.name == name)
    operation = next(o for o in Operation if f"/v1{o.path}" == request.path)
    for body in (compact(request.body), json.dumps(request.body, indent=1).encode()):
        for target in TARGETS:
            out, shaped = shaped_by(Shaper(), operation, body, target, Level.OBSERVE)
            assert (out, shaped.applied) == (body, ())
            out, shaped = shaped_by(Shaper(), operation, body, target)
            assert set(shaped.applied) <= {Transform.MARKERS, Transform.CACHE_KEY, Transform.NONCE}
            if Transform.NONCE in shaped.applied:
                out, shaped = shaped_by(Shaper(), operation, body, target, off=frozenset({Transform.NONCE}))
            assert undone(out, dialects.read(operation, body), shaped) == body, target
            if not shaped.applied:
                assert out == body


def test_what_the_inverse_takes_back_is_really_there() -> None:
    """The captured clients do get markers, so that the test above is about something."""
    if not CAPTURED:
        return
    seen = set()
    for request in CAPTURED:
        operation = next(o for o in Operation if f"/v1{o.path}" == request.path)
        for target in TARGETS:
            seen |= set(shaped_by(Shaper(), operation, compact(request.body), target)[1].applied)
    assert seen == {Transform.MARKERS, Transform.CACHE_KEY, Transform.NONCE}


def test_the_billing_line_is_cut_out_whole_and_can_be_put_back() -> None:
    line = b'{"type":"text","text":"x-anthropic-billing-header: cc_version=2.1.332.%b;"},'
    body = b'{"model":"m","max_tokens":9,"system":[%b{"type":"text","text":"%b"}],"messages":[{"role":"user","content":"hi"}]}'
    rules = b"rule " * 400
    outs = set()
    for nonce in (b"a1b", b"c2d"):
        told = body % (line % nonce, rules)
        out, shaped = shaped_by(
            Shaper(), Operation.MESSAGES, told, "vllm/m", off=frozenset({Transform.CACHE_KEY})
        )
        assert shaped.applied == (Transform.NONCE,)
        ((start, end, text),) = shaped.splices
        assert (told[start:end], text) == (line % nonce, b"")
        assert out[:start] + line % nonce + out[start:] == told
        outs.add(out)
    assert outs == {body % (b"", rules)}


# --- invented conversations ---------------------------------------------------------------------------------

WORDS = st.sampled_from(
    [
        "word " * 300,
        "größer ✓ ",
        'quote " and \\ ',
        "\u2028line\u2029ends\x85",
        "tab\t\n",
        '{"cache_control":{}}',
        "",
        "x",
    ]
)
MARKER = st.sampled_from([{}, {}, {}, {"cache_control": {"type": "ephemeral"}}, {"cache_control": None}])


def blocks(dialect: Operation) -> st.SearchStrategy[list[dict[str, Any]]]:
    kind = "input_text" if dialect is Operation.RESPONSES else "text"
    text = st.builds(lambda t, m: {"type": kind, "text": t, **m}, WORDS, MARKER)
    strange = st.sampled_from(
        [
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "redacted_thinking", "data": "x", "cache_control": {"type": "ephemeral"}},
            {"type": "hologram", "data": [1, {"a": None}]},
            {"type": "image", "source": {"type": "url", "url": "https://h/i.png"}},
            {"type": "tool_result", "tool_use_id": "t", "content": ""},
            {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "r"}]},
            {"text": "no type"},
            {},
        ]
    )
    return st.lists(st.one_of(text, strange), max_size=4)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Operation, dict[str, Any]]:
    dialect = draw(st.sampled_from([Operation.CHAT, Operation.MESSAGES, Operation.RESPONSES]))
    roles = st.sampled_from(["user", "assistant", "system", "tool", "developer", "nobody"])
    message = st.fixed_dictionaries(
        {"role": roles, "content": st.one_of(WORDS, blocks(dialect), st.none(), st.just(7))},
        optional={"cache_control": st.just({"type": "ephemeral"}), "tool_calls": st.just([{"id": "c"}])},
    )
    odd = st.sampled_from(
        [
            {"type": "function_call_output", "call_id": "c", "output": "out"},
            {"type": "reasoning", "summary": []},
            {"content": "no role", "role": "user", "name": 'a "b"'},
        ]
    )
    said = draw(st.lists(st.one_of(message, odd), min_size=1, max_size=12))
    said[-1] = {"role": "user", **said[-1]} if dialect is not Operation.RESPONSES else said[-1]
    body: dict[str, Any] = {"model": "m"}
    tools = draw(
        st.lists(st.builds(lambda n, m: {"name": n, "input_schema": {}, **m}, WORDS, MARKER), max_size=3)
    )
    if tools:
        body["tools"] = tools
    if dialect is Operation.MESSAGES:
        body["max_tokens"] = 9
        body["system"] = draw(st.one_of(WORDS, blocks(dialect)))
    if draw(st.booleans()):
        body["cache_control"] = {"type": "ephemeral"}
    body["input" if dialect is Operation.RESPONSES else "messages"] = said
    return dialect, body


def reading(dialect: Operation, body: bytes) -> list[tuple[str, Any]]:
    """What the model reads: who says what, in order; a string and a list of that one text are the same."""
    found: list[tuple[str, Any]] = []
    said = msgspec.json.decode(body)
    for name in ("tools", "system", "instructions", "messages", "input"):
        value = said.get(name)
        for item in (
            value if isinstance(value, list) and name != "system" else [{"role": name, "content": value}]
        ):
            rest = {k: v for k, v in item.items() if k not in ("content", "cache_control")}
            found.append((json.dumps(rest), tuple(_texts(item.get("content")))))
    return found


def _texts(content: Any) -> Iterator[str]:
    for block in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        if isinstance(block, dict):
            kept = {k: v for k, v in block.items() if k not in ("cache_control", "prompt_cache_breakpoint")}
            kept["type"] = "text" if kept.get("type") == "input_text" else kept.get("type")
            yield json.dumps(kept)


@settings(max_examples=150, deadline=None)
@given(conversations(), st.sampled_from(TARGETS), st.sampled_from([Level.SAFE, Level.RELOCATE]))
def test_whatever_comes_the_model_reads_the_same(
    told: tuple[Operation, dict[str, Any]], target: str, level: Level
) -> None:
    dialect, said = told
    body = compact(said)
    shaper = Shaper()
    for _ in range(2):
        out, shaped = shaped_by(shaper, dialect, body, target, level)
        assert reading(dialect, out) == reading(dialect, body)
        assert undone(out, dialects.read(dialect, body), shaped) == body
        assert len(ADDED.findall(out)) <= max(4, len(ADDED.findall(body)))


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(6)), st.booleans(), st.booleans())
def test_shuffled_tools_leave_as_they_first_came_and_can_be_shuffled_back(
    order: Sequence[int], swap: bool, marked: bool
) -> None:
    mark = {"cache_control": {"type": "ephemeral"}} if marked else {}
    tools: list[dict[str, Any]] = [
        {
            "name": f"t{i}",
            "description": "d" * 300,
            "input_schema": {"properties": {"b": {"n": i}, "a": {"n": 1.0}}},
        }
        for i in range(6)
    ]

    def asked(listed: list[dict[str, Any]]) -> bytes:
        listed = [*listed[:-1], {**listed[-1], **mark}]
        said = [{"role": "user", "content": "go"}]
        return compact({"model": "m", "max_tokens": 9, "tools": listed, "messages": said})

    shuffled = [dict(reversed(tools[i].items())) if swap else tools[i] for i in order]
    shaper, off = Shaper(), frozenset({Transform.MARKERS})
    first, _ = shaped_by(shaper, Operation.MESSAGES, asked(tools), "demo/demo-large", off=off)
    body = asked(shuffled)
    out, shaped = shaped_by(shaper, Operation.MESSAGES, body, "demo/demo-large", off=off)
    assert first == asked(tools) == out
    assert shaped.applied == ((Transform.TOOLS,) if body != first else ())
    # the inverse: the same tools, one by one, in the order and the form in which they came
    back = {t["name"]: t for t in msgspec.json.decode(out)["tools"]}
    assert [{**back[t["name"]], **mark} for t in shuffled] == [{**t, **mark} for t in shuffled]


def test_a_tool_that_says_one_thing_twice_is_left_as_it_came() -> None:
    body = b'{"model":"m","max_tokens":9,"tools":[%b],"messages":[{"role":"user","content":"go"}],"pad":"%b"}'
    first = body % (b'{"name":"a","d":1},{"name":"b","d":2,"d":3}', b"x" * 2_000)
    other = body % (b'{"name":"b","d":3},{"name":"a","d":1}', b"x" * 2_000)
    shaper = Shaper()
    for asked in (first, other):
        assert shaped_by(shaper, Operation.MESSAGES, asked, "demo/demo-large")[0] == asked


def test_true_is_not_one() -> None:
    def asked(value: Any, *order: int) -> bytes:
        tools = [{"name": "a", "strict": value}, {"name": "b" * 2_000}]
        said = [{"role": "user", "content": "go"}]
        return compact({"model": "m", "max_tokens": 9, "tools": [tools[i] for i in order], "messages": said})

    shaper, off = Shaper(), frozenset({Transform.MARKERS})
    for asking in (asked(True, 0, 1), asked(1, 1, 0), asked(1.0, 1, 0)):
        assert shaped_by(shaper, Operation.MESSAGES, asking, "demo/demo-large", off=off)[0] == asking


# --- parity -------------------------------------------------------------------------------------------------


def sessions() -> dict[str, list[tuple[Operation, bytes]]]:
    """Captured turns of one client in their order, and recorded runs in each dialect that can say them."""
    found: dict[str, list[tuple[Operation, bytes]]] = {}
    for request in CAPTURED:
        operation = next(o for o in Operation if f"/v1{o.path}" == request.path)
        if operation is not Operation.EMBEDDINGS and operation is not Operation.COUNT_TOKENS:
            found.setdefault(request.name.split("/")[0], []).append((operation, compact(request.body)))
    for path in sorted((SHARED / "traces").glob("*-*.json")):
        trace = json.loads(path.read_text())
        said = trace["messages"]
        ends = [i for i, m in enumerate(said) if m["role"] == "assistant"]
        bodies = [compact({"model": "m", "tools": trace["tools"], "messages": said[:end]}) for end in ends]
        found[path.stem] = [(Operation.CHAT, body) for body in bodies]
        for every in (1, 3):
            found[f"{path.stem} with a clock, {every}"] = [
                (Operation.CHAT, clocked(body, f"9:{10 + n // every}")) for n, body in enumerate(bodies)
            ]
    return found


def clocked(body: bytes, time: str) -> bytes:
    """With the time in the first line of its system prompt."""
    asked = json.loads(body)
    asked["messages"][0]["content"] = f"Current time: {time}\n{asked['messages'][0]['content']}"
    return compact(asked)


SESSIONS = sessions()


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("model", ["demo-large", "demo-small", "demo-fast"])
@pytest.mark.parametrize("name", list(SESSIONS) or [ABSENT])
def test_never_fewer_cached_tokens_than_direct_and_never_dearer(name: str, model: str, level: Level) -> None:
    direct, through = Played(model), Played(model, level)
    rule = rule_of(f"demo/{model}")
    paid = [0, 0]
    for operation, body in SESSIONS.get(name, []):
        direct.now_s = through.now_s = through.now_s + 20
        plain, shaped = direct.send(operation, body), through.send(operation, body)
        assert shaped.cache_read >= plain.cache_read
        if not through.last or not through.last.moved:
            assert shaped.input_total == plain.input_total
        paid = [paid[0] + cost(plain, rule), paid[1] + cost(shaped, rule)]  # type: ignore[list-item]
    # What a clock loses at `safe` before it is noticed is in bench/replay.py.
    if len(SESSIONS.get(name, [])) >= 10 and not ("clock" in name and level is Level.SAFE):
        assert paid[1] <= paid[0]


def test_tools_whose_markers_differ_are_left_as_they_came() -> None:
    """First-seen bytes with another number of markers would move, add or drop one of the client's own."""

    def asked(tools: list[dict[str, Any]]) -> bytes:
        said = [{"role": "user", "content": "go"}]
        return compact({"model": "m", "max_tokens": 9, "tools": tools, "messages": said})

    plain: list[dict[str, Any]] = [{"name": "a", "description": "d" * 2_000}, {"name": "b"}]
    marked: list[dict[str, Any]] = [{"name": "b"}, {**plain[0], "cache_control": {"type": "ephemeral"}}]
    shaper, off = Shaper(), frozenset({Transform.MARKERS})
    for tools in (plain, marked):
        out, shaped = shaped_by(shaper, Operation.MESSAGES, asked(tools), "demo/demo-large", off=off)
        assert (out, shaped.applied) == (asked(tools), ())


@pytest.mark.parametrize("switched_off", list(Transform))
def test_each_transform_can_be_switched_off(switched_off: Transform) -> None:
    """Two requests that call for all of them at once, at two targets; what is off does nothing, the others go on."""

    def asked(clock: str, order: int) -> bytes:
        line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.a1b;"}
        rules = {"type": "text", "text": f"It is {clock}.\n" + "Be brief. " * 900}
        call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "a", "input": {}}]}
        result = {"type": "tool_result", "tool_use_id": "t", "content": "row\n" * 5_000}
        turns = [{"role": "user", "content": "go"}, call, {"role": "user", "content": [result]}]
        tools = [{"name": "a"}, {"name": "b"}][::order]
        return compact(
            {"model": "m", "max_tokens": 9, "tools": tools, "system": [line, rules], "messages": turns}
        )

    applied: set[Transform] = set()
    for off in (frozenset[Transform](), frozenset({switched_off})):
        shaper, seen = Shaper(), set[Transform]()
        for clock, order in (("9:14", 1), ("9:15", -1)):
            body = asked(clock, order)
            facts = dialects.read(Operation.MESSAGES, body)
            request = Request(
                Operation.MESSAGES,
                facts,
                body,
                chain(facts.segments),
                ("key", "client", "s"),
                rule_of("qwen/m"),
                level=Level.RELOCATE,
                off=off,
                trim=TrimPolicy(10_000, 4_000),
                group="run",
            )
            seen |= set(shaper.shape(request).applied)
        chat = compact(
            {"model": "m", "messages": [{"role": "user", "content": "x" * 2_000}], "tools": [{"name": "a"}]}
        )
        seen |= set(shaped_by(shaper, Operation.CHAT, chat, "openai/gpt-5.4", off=off)[1].applied)
        if not off:
            applied = seen
    assert applied == set(Transform)
    assert seen == applied - {switched_off}


def test_a_run_whose_system_prompt_changes_with_every_step_pays_for_one_lost_write_and_no_more() -> None:
    """A clock in the system prompt: what is written behind it is never read, and a write is dearer than plain input."""
    turn = [{"role": "assistant", "content": "done " * 300}, {"role": "user", "content": "next " * 300}]

    def step(shaper: Shaper, clock: str, turns: int) -> str:
        said = [{"role": "user", "content": "go"}, *turn * turns]
        system = f"It is {clock}.\n" + "Be brief. " * 2_000
        body = compact({"model": "m", "max_tokens": 9, "system": system, "messages": said})
        shaped = shaped_by(shaper, Operation.MESSAGES, body, "anthropic/claude-opus-5")[1]
        return "marked" if shaped.marks else shaped.why_no_marks

    lost = "the system prompt changes with every step, so a write would not be read again"
    shaper = Shaper()
    assert [step(shaper, f"9:{n:02d}", n) for n in range(5)] == ["one call alone", "marked", lost, lost, lost]
    # The clock stands still: from its second step on the same run is marked again.
    assert [step(shaper, "9:04", n) for n in (5, 6, 7)] == ["marked", "marked", "marked"]
    # One change of a mode, or a gateway that has just begun, is no clock.
    assert [step(Shaper(), "9:00", 5), step(shaper, "10:00", 8)] == ["marked", "marked"]
