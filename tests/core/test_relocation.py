"""Volatile lines of the system prompt: when they move, where to, in which form, and that they can be put back."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core import dialects
from gateway.core.catalog import Operation
from gateway.core.prefix import chain
from gateway.core.relocation import _lines_of, classes_of
from gateway.core.shaping import Level, Request, Shaped, Shaper, Transform
from tests.support.played_cache import Played, compact, rule_of, spliced

RULES = ["You are careful.", *(f"Rule {n}: say no more than is needed." for n in range(200))]
ONLY = frozenset(set(Transform) - {Transform.RELOCATE})
#: A provider that marks the end of a prompt by itself needs a mark in front of what moves there.
WITH_MARKS = ONLY - {Transform.MARKERS}


def system(clock: str, *more: str) -> str:
    return "\n".join([RULES[0], f"The time is {clock}.", *RULES[1:], *more])


def messages(clock: str, *said: Any, text: Any = None, **more: Any) -> bytes:
    turns = [{"role": "user", "content": "Fix the build."}, *said]
    return compact(
        {"model": "m", "max_tokens": 9, "system": text or system(clock), "messages": turns, **more}
    )


class Run:
    """Requests of one run towards one target, nothing but relocation done to them."""

    def __init__(
        self, target: str, operation: Operation = Operation.MESSAGES, off: frozenset[Transform] = ONLY
    ) -> None:
        self.shaper, self.target, self.operation, self.off = Shaper(), target, operation, off

    def send(self, body: bytes, session: str = "s") -> tuple[bytes, Shaped]:
        facts = dialects.read(self.operation, body)
        request = Request(
            self.operation,
            facts,
            body,
            chain(facts.segments),
            ("key", "client", session),
            rule_of(self.target),
            level=Level.RELOCATE,
            off=self.off,
        )
        shaped = self.shaper.shape(request)
        return spliced(facts, body, shaped), shaped


def test_what_a_line_says_moves_when_it_has_changed_and_not_before() -> None:
    run = Run("anthropic/claude-opus-5")
    first, second = messages("9:14"), messages("9:15")
    assert run.send(first)[0] == first
    assert run.send(first)[0] == first  # a retry shows no change
    out, shaped = run.send(second)
    assert shaped.moved == (b"The time is 9:15.",)
    # the system prompt stays what the caches of this run hold
    assert out == first[:-2] + b',{"role":"system","content":"As of now:\\nThe time is 9:15."}]}'
    assert shaped.diff == (
        "--- system prompt\n+++ end of the conversation\n@@ line 2 (clock) @@\n"
        "-The time is 9:15.\n The time is 9:14.\n+The time is 9:15."
    )
    # the same way every time; said once
    again, shaped = run.send(messages("9:16"))
    assert (again, shaped.diff) == (out.replace(b"9:15", b"9:16"), "")
    assert run.send(first)[0] == first


def test_a_run_that_begins_when_the_line_is_known_begins_without_it() -> None:
    run = Run("anthropic/claude-opus-5")
    run.send(messages("9:14"))
    run.send(messages("9:15"))
    stable = json.dumps("\n".join(RULES)).encode()
    out, shaped = run.send(messages("9:16"), "another")
    without = messages("9:16").replace(json.dumps(system("9:16")).encode(), stable)
    assert out == without[:-2] + b',{"role":"system","content":"The time is 9:16."}]}'
    assert (shaped.moved, shaped.diff) == ((b"The time is 9:16.",), "")
    answer = {"role": "assistant", "content": "Which one?"}
    outs = [
        run.send(messages(clock, answer, {"role": "user", "content": text}), session)[0]
        for clock, text, session in (
            ("9:17", "This.", "another"),
            ("9:17", "That.", "another"),
            ("9:18", "None.", "a third"),
        )
    ]
    beginnings = {out[: out.index(b"Which one?")] for out in outs}
    assert len(beginnings) == 1
    assert b"The time" not in beginnings.pop()


def test_a_longer_wording_takes_the_place() -> None:
    """Else a step in which it stays the same would read less from a cache than straight."""
    run = Run("anthropic/claude-opus-5")
    short, long = (
        messages("", text=system("-", f"Current branch: {name}")) for name in ("main", "fix-7-again")
    )
    assert run.send(short)[0] == short
    assert run.send(long)[0] == long
    out, shaped = run.send(short)
    assert shaped.moved == (b"Current branch: main",)
    assert out == long[:-2] + b',{"role":"system","content":"As of now:\\nCurrent branch: main"}]}'
    assert run.send(long)[0] == long


@pytest.mark.parametrize(
    ("line", "other", "kind"),
    [
        ("Today is 2026-11-30.", "Today is 2026-12-01.", "clock"),
        ("Now: 2026-11-30T09:14:05.123Z", "Now: 2026-11-30T09:14:06.000Z", "clock"),
        ("It is Monday, November 30, 2026", "It is Tuesday, December 1, 2026", "clock"),
        ("Working directory: /home/a", "Working directory: /srv/b", "cwd"),
        ("Current branch: main", "Current branch: fix-7", "git"),
        ("HEAD is 3fa9d2c", "HEAD is 9bc01e4", "id"),
        ("Session id: abc", "Session id: xyz", "id"),
        ("run 0f8fad5b-d9cb-469f-a165-70867728950e", "run 7c9e6679-7425-40de-944b-e07fc1f90ae7", "id"),
    ],
)
def test_the_classes_of_what_may_move(line: str, other: str, kind: str) -> None:
    run = Run("anthropic/claude-opus-5")
    for text in (line, other, line):
        run.send(messages("", text=system("-", text)))
    out, shaped = run.send(messages("", text=system("-", other)), "another")
    assert shaped.moved == (other.encode(),)
    assert kind in classes_of(other.encode())
    # it was the last line: no empty one stays behind
    assert msgspec.json.decode(out)["system"] == system("-")


@pytest.mark.parametrize("other", ["The user is Bob.", "Answer in French.", "Use 4 tools at most."])
def test_what_is_of_no_volatile_class_stays_however_often_it_changes(other: str) -> None:
    run = Run("anthropic/claude-opus-5")
    for line in ("The user is Ann.", other, "The user is Cid."):
        body = messages("", text=system("9:14", line))
        assert run.send(body)[0] == body


def test_a_volatile_line_that_never_changes_stays() -> None:
    run = Run("anthropic/claude-opus-5")
    for n in range(3):
        body = messages("", {"role": "assistant", "content": str(n)}, {"role": "user", "content": "go"})
        assert run.send(body)[0] == body


RESULT = [{"type": "tool_result", "tool_use_id": "t", "content": "9:14 cwd: /x"}]
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
NOW = "As of now:\nThe time is 9:15."
REMINDER = {"type": "text", "text": f"<system-reminder>\n{NOW}\n</system-reminder>"}


def test_without_system_turns_it_is_a_block_of_the_last_user_turn_and_never_inside_a_tool_result() -> None:
    run = Run("anthropic/claude-sonnet-5")
    run.send(messages("9:14"))
    for said, content in (
        ((), [{"type": "text", "text": "Fix the build."}, REMINDER]),
        ((CALL, {"role": "user", "content": RESULT}), [*RESULT, REMINDER]),
    ):
        out, shaped = run.send(messages("9:15", *said))
        assert shaped.applied == (Transform.RELOCATE,)
        assert msgspec.json.decode(out)["messages"][-1]["content"] == content


def test_chat_and_responses() -> None:
    said: list[dict[str, Any]] = [{"role": "user", "content": "Fix the build."}]
    tool: list[dict[str, Any]] = [*said, {"role": "assistant", "content": None, "tool_calls": [{"id": "t"}]}]
    tool.append({"role": "tool", "tool_call_id": "t", "content": "9:14"})

    def chat(clock: str, turns: list[dict[str, Any]]) -> bytes:
        return compact({"model": "m", "messages": [{"role": "system", "content": system(clock)}, *turns]})

    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    stable = {"role": "system", "content": system("9:14")}
    run = Run("vllm/m", Operation.CHAT)
    run.send(chat("9:14", said))
    out, _ = run.send(chat("9:15", tool))
    assert msgspec.json.decode(out)["messages"] == [
        stable, *tool, {"role": "user", "content": REMINDER["text"]}
    ]  # fmt: skip
    run = Run("openai/gpt-6-sol", Operation.CHAT, WITH_MARKS)
    run.send(chat("9:14", said))
    out, _ = run.send(chat("9:15", tool))
    marked = {**tool[-1], "content": [{"type": "text", "text": "9:14", **mark}]}
    found = msgspec.json.decode(out)["messages"]
    assert found[1:] == [*tool[:-1], marked, {"role": "system", "content": NOW}]
    assert found[0]["content"][0]["text"] == stable["content"]

    def responses(clock: str) -> bytes:
        return compact({"model": "m", "instructions": system(clock), "input": said})

    run = Run("openai/gpt-6-sol", Operation.RESPONSES, WITH_MARKS)
    run.send(responses("9:14"))
    found = msgspec.json.decode(run.send(responses("9:15"))[0])
    assert found["instructions"] == system("9:14")
    marked = {"role": "user", "content": [{"type": "input_text", "text": "Fix the build.", **mark}]}
    assert found["input"] == [marked, {"role": "developer", "content": NOW}]
    # without such a mark nothing moves: the next step would find nothing of this one
    run = Run("openai/gpt-6-sol", Operation.RESPONSES)
    run.send(responses("9:14"))
    assert run.send(responses("9:15"))[0] == responses("9:15")


def test_a_reminder_of_the_client_s_own_may_stand_at_the_end() -> None:
    reminder = {"role": "system", "content": "Be brief."}

    def chat(clock: str) -> bytes:
        turns = [{"role": "user", "content": "Fix the build."}, reminder]
        return compact({"model": "m", "messages": [{"role": "system", "content": system(clock)}, *turns]})

    for target, off in (("openai/gpt-6-sol", WITH_MARKS), ("vllm/m", ONLY)):
        run = Run(target, Operation.CHAT, off)
        run.send(chat("9:14"))
        *_, last, tail = msgspec.json.decode(run.send(chat("9:15"))[0])["messages"]
        assert last["role"] == "system"
        assert "Be brief." in json.dumps(last)
        assert NOW in tail["content"]


def test_nothing_moves_behind_an_answer_or_where_nothing_would_be_left() -> None:
    run = Run("anthropic/claude-opus-5")
    run.send(messages("9:14"))
    prefilled = messages("9:15", {"role": "assistant", "content": "The"})
    assert run.send(prefilled)[0] == prefilled
    run = Run("anthropic/claude-opus-5")
    for session, clock in (("s", "9:14"), ("s", "9:15"), ("another", "9:16"), ("a third", "9:17")):
        blocks = [{"type": "text", "text": f"It is {clock}."}, {"type": "text", "text": "\n".join(RULES)}]
        out = run.send(messages("", text=blocks), session)[0]
        stands = "9:14" if session == "s" else clock
        assert msgspec.json.decode(out)["system"][0]["text"] == f"It is {stands}."


def test_a_clock_in_every_message_of_the_user_is_the_user_s() -> None:
    run = Run("anthropic/claude-opus-5")
    for clock in ("9:14", "9:15"):
        body = messages(
            "-", {"role": "assistant", "content": "ok"}, {"role": "user", "content": f"It is {clock}."}
        )
        assert run.send(body)[0] == body


@settings(max_examples=80, deadline=None)
@given(
    lines=st.lists(
        st.sampled_from(
            [
                "at 9:14",
                "at 10:02",
                "C:\\new\\n",
                'say "hi"',
                "größer ✓",
                "\u2028",
                "",
                "cwd: /a",
                "cwd: /b",
                "\\",
                "x" * 1_200,
            ]
        ),
        min_size=2,
        max_size=12,
    ),
    changed=st.lists(st.sampled_from(["9:59", "/c"]), min_size=12, max_size=12),
    as_blocks=st.booleans(),
    target=st.sampled_from(["anthropic/claude-opus-5", "anthropic/claude-sonnet-5"]),
    session=st.sampled_from(["s", "another"]),
)
def test_the_model_reads_every_line_and_all_can_be_put_back(
    lines: list[str], changed: list[str], as_blocks: bool, target: str, session: str
) -> None:
    def told(texts: list[str]) -> bytes:
        text: Any = "\n".join(texts)
        if as_blocks:
            half = len(texts) // 2
            text = [{"type": "text", "text": "\n".join(part)} for part in (texts[:half], texts[half:], RULES)]
        return messages("", text=text, pad="x" * 2_000)

    run = Run(target)
    run.send(told(lines))
    others = [
        line[:3] + c if line.startswith("at") else f"cwd: {c}" if line.startswith("cwd") else line
        for line, c in zip(lines, changed, strict=False)
    ]
    run.send(told(others))
    run.send(
        told(lines)
    )  # at the latest now every line that has changed is known, whichever wording is longer
    body = told(others)
    out, shaped = run.send(body, session)
    assert len(msgspec.json.decode(out)["messages"]) in (1, 2)
    moved = [msgspec.json.decode(b'"%b"' % line, type=str) for line in shaped.moved]
    read = json.dumps(msgspec.json.decode(out)["system"]) + json.dumps(msgspec.json.decode(out)["messages"])
    assert all(json.dumps(line)[1:-1] in read for line in others)
    assert set(moved) <= {o for o, line in zip(others, lines, strict=True) if o != line}
    # the inverse: every splice taken back, in order, restores the body
    back, shift = out, 0
    for start, end, text in sorted(shaped.splices):
        at = start + shift
        assert back[at : at + len(text)] == text
        back = back[:at] + body[start:end] + back[at + len(text) :]
    assert back == body
    # what is cut is said at the end, and what is replaced is an older wording of the same line
    for start, end, text in shaped.splices:
        if start == end:
            continue
        cut = [line for line in _lines_of(body[start:end]) if line]
        assert all(line in shaped.moved for line in cut)
        assert not text or text.decode() in {json.dumps(line, ensure_ascii=False)[1:-1] for line in lines}


def test_at_the_demo_provider_a_clock_costs_the_history_at_safe_and_nothing_at_relocate() -> None:
    for model in ("demo-large", "demo-small", "demo-fast"):
        reads = {}
        for level in (Level.SAFE, Level.RELOCATE):
            played = Played(model, level)
            turns: list[dict[str, Any]] = [{"role": "user", "content": "Fix it. " * 2_000}]
            splits = []
            for step in range(6):
                body = {
                    "model": "m",
                    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
                    "messages": [{"role": "system", "content": system(f"9:1{step}")}, *turns],
                }
                splits.append(played.send(Operation.CHAT, compact(body)))
                played.now_s += 20
                turns += [
                    {"role": "assistant", "content": f"step {step}"},
                    {"role": "user", "content": f"go on {step} " * 20},
                ]
            reads[level] = [s.cache_read for s in splits]
        assert reads[Level.SAFE] == [0] * 6
        assert [r > 0 for r in reads[Level.RELOCATE]] == [False, *[True] * 5], model
        assert reads[Level.RELOCATE][-1] > 4_096


def test_moved_lines_stay_behind_an_end_that_takes_no_mark_as_long_as_they_stay_the_same() -> None:
    """OpenAI marks the end by itself, and an empty result takes no mark of ours in front of what moves."""
    played = Played("demo-fast", Level.RELOCATE)
    direct = Played("demo-fast")
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Fix it. " * 2_000}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "t", "function": {"name": "f"}}]}
    reads = []
    for clock, result in (
        ("9:14", ""),
        ("9:15", ""),
        ("9:15", "ok"),
        ("9:15", ""),
        ("9:14", "ok"),
        ("9:15", "ok"),
    ):
        body = compact({"model": "m", "messages": [{"role": "system", "content": system(clock)}, *turns]})
        splits = [p.send(Operation.CHAT, body) for p in (direct, played)]
        reads.append(splits[1].cache_read - splits[0].cache_read)
        turns += [call, {"role": "tool", "tool_call_id": "t", "content": result}]
        where = [m["content"] for m in json.loads(played.sent)["messages"][2:] if m["role"] == "system"]
        assert where == ([] if clock == "9:14" else [NOW])
    assert [read >= 0 for read in reads] == [True] * 6
