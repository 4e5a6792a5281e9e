"""Volatile lines of the system prompt: when they move, where to, in which form, and that they can be put back."""

from __future__ import annotations

import json
from itertools import pairwise
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

TURN = {"role": "user", "content": "Go on."}
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
        self.now_s = 0.0

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
            now_s=self.now_s,
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


def test_a_note_stays_where_it_was_first_said_and_nothing_is_said_twice() -> None:
    run = Run("anthropic/claude-opus-5")
    said: list[Any] = []
    outs = []
    for clock in ("9:14", "9:15", "9:15", "9:16", "9:14"):
        outs.append(msgspec.json.decode(run.send(messages(clock, *said))[0]))
        said += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": f"step {len(said)}"}]
    assert {out["system"] for out in outs} == {system("9:14")}
    first, *rest = outs[-1]["messages"]
    assert first["content"] == "Fix the build."
    told = [(n, m["content"]) for n, m in enumerate(rest) if m["role"] == "system"]
    assert told == [
        (2, "As of now:\nThe time is 9:15."),
        (7, "As of now:\nThe time is 9:16."),
        (10, "As of now:\nThe time is 9:14."),
    ]
    for before, after in pairwise(outs):
        assert after["messages"][: len(before["messages"])] == before["messages"]


def test_notes_belong_to_the_history_that_they_stand_in() -> None:
    """Forks, a rewritten history and a retry: what is said follows from what comes before it, whoever came in between."""
    run = Run("anthropic/claude-opus-5")

    def turns(*texts: str) -> list[Any]:
        return [{"role": ("assistant", "user")[n % 2], "content": text} for n, text in enumerate(texts)]

    run.send(messages("9:14"))
    left = run.send(messages("9:15", *turns("a", "left")))[0]
    right = run.send(messages("9:16", *turns("a", "right")))[0]
    told = b',{"role":"system","content":"As of now:\\nThe time is 9:1%d."}'
    assert left == messages("9:14", *turns("a", "left"))[:-2] + told % 5 + b"]}"
    assert right == messages("9:14", *turns("a", "right"))[:-2] + told % 6 + b"]}"
    assert run.send(messages("9:15", *turns("a", "left", "b", "go on")))[0].startswith(left[:-2])
    assert run.send(messages("9:16", *turns("a", "right", "b", "go on")))[0].startswith(right[:-2])
    # a compaction: nothing of it was said there
    short = run.send(messages("9:16", *turns("so far: a", "go on")))[0]
    assert short == messages("9:14", *turns("so far: a", "go on"))[:-2] + told % 6 + b"]}"
    # a retry with the line as it was says nothing, one with another says that
    assert run.send(messages("9:14", *turns("a", "left")))[0] == messages("9:14", *turns("a", "left"))
    assert run.send(messages("9:17", *turns("a", "left")))[0] == left.replace(b"9:15", b"9:17")


def test_what_is_forgotten_costs_one_miss_and_no_meaning() -> None:
    """A restart, an eviction, another replica: the prompt is the client's own, and goes on from there."""
    run = Run("anthropic/claude-opus-5")
    said = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]
    for clock in ("9:14", "9:15"):
        run.send(messages(clock))
    assert b"As of now" in run.send(messages("9:15", *said))[0]
    run.shaper = Shaper()
    body = messages("9:15", *said, *said)
    assert run.send(body)[0] == body
    out = run.send(messages("9:16", *said, *said))[0]
    assert out == body[:-2] + b',{"role":"system","content":"As of now:\\nThe time is 9:16."}]}'


def test_a_run_that_would_have_too_many_notes_begins_anew() -> None:
    run = Run("anthropic/claude-opus-5")
    said: list[Any] = []
    lengths = []
    for n in range(400):
        body = messages(f"{n % 10}:{10 + n // 10}", *said)
        out, _ = run.send(body)
        lengths.append(len(out) - len(body))
        said += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]
    falls = [n for n in range(1, 400) if lengths[n] < lengths[n - 1]]
    assert len(falls) == 1
    assert run.shaper.lineages.at(("key", "client", "s"), b"").notes.known == {}


def test_after_a_pause_that_no_cache_outlives_a_line_is_in_its_place_again() -> None:
    run = Run("anthropic/claude-opus-5")
    run.send(messages("9:14"))
    assert b"As of now" in run.send(messages("9:15"))[0]
    run.now_s += 200
    assert b"As of now" in run.send(messages("9:16"))[0]
    run.now_s += 300
    out = msgspec.json.decode(run.send(messages("9:25"))[0])
    assert out["messages"] == [{"role": "user", "content": "Fix the build."}]
    assert "9:25" in out["system"]
    assert "9:14" not in out["system"]


def test_a_run_that_begins_when_the_line_is_known_has_it_at_the_end_of_the_system_prompt() -> None:
    run = Run("anthropic/claude-opus-5", off=WITH_MARKS)
    run.send(messages("9:14"))
    run.send(messages("9:15"))
    out, shaped = run.send(messages("9:16"), "another")
    stable = "\n".join(RULES)
    cut = [{"type": "text", "text": stable}, {"type": "text", "text": "\nThe time is 9:16."}]
    assert out == messages("", text=stable).replace(json.dumps(stable).encode(), compact(cut))
    # what all runs share ends with a mark of its own
    marked = run.send(messages("9:16", *[{"role": "assistant", "content": "ok"}] * 2, TURN), "another")[0]
    mark = {"cache_control": {"type": "ephemeral"}}
    assert msgspec.json.decode(marked)["system"] == [{**cut[0], **mark}, cut[1]]
    assert (shaped.moved, shaped.diff) == ((b"The time is 9:16.",), "")
    answer = {"role": "assistant", "content": "Which one?"}
    outs = [
        msgspec.json.decode(run.send(messages(clock, answer, {"role": "user", "content": text}), session)[0])
        for clock, text, session in (
            ("9:17", "This.", "another"),
            ("9:16", "That.", "another"),
            ("9:18", "None.", "a third"),
        )
    ]
    assert [out["system"][0]["text"] for out in outs] == [stable] * 3
    assert [out["system"][1]["text"][-5:] for out in outs] == ["9:16.", "9:16.", "9:18."]
    assert [out["messages"][3:] for out in outs] == [
        [{"role": "system", "content": "As of now:\nThe time is 9:17."}],
        [],
        [],
    ]
    # a run that begins with what another had in its place from the start has it there, too
    (block,) = msgspec.json.decode(run.send(messages("9:14"), "a fourth")[0])["system"]
    assert block["text"] == system("9:14")


def test_the_end_is_that_of_the_last_text_that_no_mark_of_the_client_s_own_comes_before() -> None:
    def told(clock: str, marked: int | None) -> bytes:
        texts = [f"It is {clock}.\nBe careful.", "\n".join(RULES) + "\n"]
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
        if marked is not None:
            blocks[marked]["cache_control"] = {"type": "ephemeral"}
        return messages("", text=blocks)

    rules = "\n".join(RULES)
    mark = {"cache_control": {"type": "ephemeral"}}
    for marked, texts in (
        (None, [("Be careful.", {}), (rules, {}), ("\nIt is 9:16.\n", {})]),
        (0, [("Be careful.\nIt is 9:16.", mark), (rules + "\n", {})]),
        (1, [("Be careful.", {}), (rules, {}), ("\nIt is 9:16.\n", mark)]),
    ):
        for target, off, cut in (("anthropic/claude-opus-5", WITH_MARKS, True), ("vllm/m", ONLY, False)):
            run = Run(target, off=off)
            for clock in ("9:14", "9:15"):
                run.send(told(clock, marked))
            out = msgspec.json.decode(run.send(told("9:16", marked), "another")[0])["system"]
            found = "".join(block["text"] for block in out)
            assert found == "".join(text for text, _ in texts)
            assert all("cache_control" in out[-1] for _ in range(1) if marked == 1)
            if not cut:
                assert len(out) == 2


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
    # as a run begins that has nothing to share with the ones that had it in its place
    (prompt,) = run.shaper.moves.prompts.values()
    prompt.stood.clear()
    out, shaped = run.send(messages("", text=system("-", other)), "another")
    assert shaped.moved == (other.encode(),)
    assert kind in classes_of(other.encode())
    # it was the last line: no empty one stays behind
    assert msgspec.json.decode(out)["system"] == system("-", other)


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
    for said, content in (
        ((), [{"type": "text", "text": "Fix the build."}, REMINDER]),
        ((CALL, {"role": "user", "content": RESULT}), [*RESULT, REMINDER]),
    ):
        run = Run("anthropic/claude-sonnet-5")
        run.send(messages("9:14"))
        out, shaped = run.send(messages("9:15", *said))
        assert shaped.applied == (Transform.RELOCATE,)
        last = msgspec.json.decode(out)["messages"][-1]["content"]
        assert last == content
        # and stays there, whatever form the client gives its message later
        out, _ = run.send(
            messages("9:15", *said, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "go"})
        )
        assert msgspec.json.decode(out)["messages"][len(said)]["content"] == content


def test_a_mark_and_a_note_on_one_string() -> None:
    run = Run("anthropic/claude-sonnet-5", off=WITH_MARKS)
    ok: list[Any] = [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "go"}]
    for clock in ("9:14", "9:15"):
        out, _ = run.send(messages(clock, *ok))
    marked = {"type": "text", "text": "go", "cache_control": {"type": "ephemeral"}}
    assert msgspec.json.decode(out)["messages"][-1]["content"] == [marked, REMINDER]


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
    found = msgspec.json.decode(out)["messages"]
    # the provider marks the end by itself, the note with it
    assert found[1:] == [*tool, {"role": "system", "content": NOW}]
    assert found[0]["content"] == [{"type": "text", "text": stable["content"], **mark}]

    def responses(clock: str) -> bytes:
        return compact({"model": "m", "instructions": system(clock), "input": said})

    run = Run("openai/gpt-6-sol", Operation.RESPONSES, WITH_MARKS)
    run.send(responses("9:14"))
    found = msgspec.json.decode(run.send(responses("9:15"))[0])
    assert found["instructions"] == system("9:14")
    assert found["input"] == [*said, {"role": "developer", "content": NOW}]
    # `instructions` are a string that cannot be cut
    found = msgspec.json.decode(run.send(responses("9:16"), "another")[0])
    assert found["instructions"] == "\n".join(RULES) + "\nThe time is 9:16."


def test_a_reminder_of_the_client_s_own_may_stand_at_the_end() -> None:
    reminder = {"role": "system", "content": "Be brief."}

    def chat(clock: str) -> bytes:
        turns = [{"role": "user", "content": "Fix the build."}, reminder]
        return compact({"model": "m", "messages": [{"role": "system", "content": system(clock)}, *turns]})

    for target, off in (("openai/gpt-6-sol", WITH_MARKS), ("vllm/m", ONLY)):
        run = Run(target, Operation.CHAT, off)
        run.send(chat("9:14"))
        *_, note, last = msgspec.json.decode(run.send(chat("9:15"))[0])["messages"]
        # it is behind what the next step keeps, and the client moves its reminder along
        assert NOW in json.dumps(note).replace("\\n", "\n")
        assert last == reminder


def test_nothing_is_said_behind_an_answer_that_is_to_go_on_or_cut_where_nothing_would_be_left() -> None:
    run = Run("anthropic/claude-opus-5")
    run.send(messages("9:14"))
    prefill = {"role": "assistant", "content": "The"}
    told = {"role": "system", "content": NOW}
    found = msgspec.json.decode(run.send(messages("9:15", prefill))[0])["messages"]
    assert found == [{"role": "user", "content": "Fix the build."}, told, prefill]
    # nor where nobody but the model has spoken
    alone = compact({"model": "m", "max_tokens": 9, "system": system("9:15"), "messages": [prefill]})
    run.send(alone.replace(b"9:15", b"9:14"))
    assert run.send(alone)[0] == alone
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
    off=st.sampled_from([ONLY, WITH_MARKS]),
    longer=st.booleans(),
)
def test_the_model_reads_every_line_and_all_can_be_put_back(
    lines: list[str],
    changed: list[str],
    as_blocks: bool,
    target: str,
    session: str,
    off: frozenset[Transform],
    longer: bool,
) -> None:
    def told(texts: list[str]) -> bytes:
        text: Any = "\n".join(texts)
        if as_blocks:
            half = len(texts) // 2
            text = [{"type": "text", "text": "\n".join(part)} for part in (texts[:half], texts[half:], RULES)]
        return messages("", text=text, pad="x" * 2_000)

    run = Run(target, off=off)
    run.send(told(lines))
    others = [
        line[:3] + c if line.startswith("at") else f"cwd: {c}" if line.startswith("cwd") else line
        for line, c in zip(lines, changed, strict=False)
    ]
    run.send(told(others))
    run.send(
        told(lines)
    )  # at the latest now every line that has changed is known, whichever wording is longer
    if longer:  # what no run has had in its place
        others = [o if o == line else f"{o} 10:10:10" for o, line in zip(others, lines, strict=True)]
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


def test_notes_behind_an_end_that_takes_no_mark_are_read_with_what_is_in_front_of_them() -> None:
    """OpenAI marks the end by itself, and an empty result takes no mark of ours."""
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
    notes = [m["content"][-5:] for m in json.loads(played.sent)["messages"][2:] if m["role"] == "system"]
    assert notes == ["9:15.", "9:14.", "9:15."]
    assert [read >= 0 for read in reads] == [True] * 6
