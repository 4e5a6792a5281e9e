"""What a request tells of the last turns of its own run."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core import dialects
from gateway.core.catalog import Operation
from gateway.core.dialects import Segment
from gateway.core.prefix import anchor, chain
from gateway.core.steady import looks_failed, steady
from gateway.core.tail import TURNS_MAX, Tail, Turn, tail
from tests.core.agent_traces import DIALECTS, Ask, Step, facts, rendered
from tests.support.agent_runs import facts_of
from tests.support.material import ABSENT, Captured, captured

USER: dict[str, Any] = {"role": "user", "content": "go"}
LS = Ask("bash", {"command": "ls"}, "a.py")
CAT = Ask("read", {"path": "a.py"}, "no such file", failed=True)


def history(dialect: Operation, *steps: Step) -> list[dict[str, Any]]:
    messages = [USER]
    for n, step in enumerate(steps):
        if step.said:
            messages.append({"role": "user", "content": step.said})
        messages += rendered(dialect, step, n)
    return messages


def of(dialect: Operation, messages: list[dict[str, Any]]) -> Tail:
    return tail(dialect, facts(dialect, messages).segments)


def chat(*messages: dict[str, Any]) -> Tail:
    return of(Operation.CHAT, [USER, *messages])


def called(
    arguments: str, result: str, call_id: str = "c1", tool: str = "bash"
) -> tuple[dict[str, Any], ...]:
    call = {"id": call_id, "type": "function", "function": {"name": tool, "arguments": arguments}}
    return (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "content": result},
    )


def told(turns: tuple[Turn, ...]) -> list[tuple[tuple[str, ...], bool]]:
    return [(turn.tools, turn.failed) for turn in turns]


# --- three dialects, one story -------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
def test_turns_are_read_alike_in_every_dialect(dialect: Operation) -> None:
    both = Step((LS, CAT), text="Looking.")
    seen = of(
        dialect, history(dialect, Step((LS,)), Step((CAT,)), Step(text="Done."), Step((LS,), said="more"))
    )
    assert told(seen.turns) == [(("bash",), False), (("read",), True), ((), False), (("bash",), False)]
    assert [bool(turn.prompted) for turn in seen.turns] == [False, False, False, True]
    assert seen.turns[0].sign == seen.turns[3].sign  # the same call, the same result
    assert seen.turns[0].mark != seen.turns[3].mark  # but another one
    (turn,) = of(dialect, history(dialect, both)).turns
    assert told((turn,)) == [(("bash", "read"), False)]


def test_arguments_are_the_same_value_in_every_dialect() -> None:
    hashes = {of(d, history(d, Step((LS,)))).turns[0].calls[0].arguments for d in DIALECTS}
    assert len(hashes) == 1


@pytest.mark.parametrize("dialect", DIALECTS)
def test_identical_calls_of_one_turn_count_once(dialect: Operation) -> None:
    once = of(dialect, history(dialect, Step((LS,)))).turns[0]
    twice = of(dialect, history(dialect, Step((LS, LS, LS)))).turns[0]
    assert (len(twice.calls), twice.sign) == (1, once.sign)


CAPTURED = captured()


@pytest.mark.parametrize("requests", [CAPTURED], ids=["captured" if CAPTURED else ABSENT])
def test_captured_clients_are_understood(requests: list[Captured]) -> None:
    found = {}
    for request in requests:
        read = facts_of(request)
        if read is not None and (turns := tail(read.operation, read.segments).turns):
            found[request.name] = told(turns)
    one_call = {
        "claude-code/02-second-turn": "Bash",
        "cline/02-second-turn": "run_commands",
        "codex/02-second-turn": "exec_command",
        "copilot-cli/02-chat-second": "bash",
        "copilot-cli/03-responses-second": "bash",
        "copilot-cli/04-messages-second": "bash",
        "mini-swe-agent/02-chat-second": "bash",
        "mini-swe-agent/03-messages-second": "bash",
        "mini-swe-agent/04-responses-second": "bash",
        "openai-agents/02-responses-second": "bash",
        "openai-agents/03-chat-second": "bash",
        "opencode/03-chat-second-turn": "bash",
        "opencode/04-responses-turn": "bash",
        "opencode/05-messages-turn": "bash",
    }
    expected = {name: [((tool,), False)] for name, tool in one_call.items()} if requests else {}
    assert {name: found[name] for name in one_call if name in found} == expected


def test_calls_of_other_kinds_are_calls() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done!"},
        {"type": "local_shell_call", "call_id": "c2", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "c2", "output": "a.py"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"query": "x"}},
        {
            "type": "mcp_call",
            "id": "m1",
            "name": "ask",
            "arguments": "{}",
            "output": "42",
            "status": "completed",
        },
        {"type": "mcp_call", "id": "m2", "name": "ask", "arguments": "{}", "output": "", "status": "failed"},
    ]
    assert told(of(Operation.RESPONSES, items).turns) == [
        (("apply_patch",), False),
        (("local_shell_call",), False),
        (("web_search_call",), False),
        (("ask",), False),
        (("ask",), True),
    ]
    old_call = {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}
    old_result = {"role": "function", "name": "f", "content": "Error: no"}
    assert told(chat(old_call, old_result).turns) == [(("f",), True)]
    server = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
                {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "result"}]},
                {"type": "text", "text": "Found."},
            ],
        },
        USER,
    ]
    assert told(of(Operation.MESSAGES, server).turns) == [(("web_search",), False)]


def test_the_same_bytes_are_read_in_their_own_dialect() -> None:
    """One message that says two things, if it is read as chat or as messages."""
    use = {"type": "tool_use", "id": "t", "name": "of messages", "input": {}}
    call = {"id": "t", "type": "function", "function": {"name": "of chat", "arguments": "{}"}}
    both = [
        {"role": "assistant", "content": [use], "tool_calls": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]},
    ]
    segments = [
        Segment("message", memoryview(json.dumps(message).encode()), 7 + n) for n, message in enumerate(both)
    ]
    assert [
        tail(dialect, segments).turns[0].tools
        for dialect in (Operation.CHAT, Operation.MESSAGES, Operation.CHAT)
    ] == [("of chat",), ("of messages",), ("of chat",)]


# --- what makes two turns the same ----------------------------------------------------------------------


def sign(arguments: str, result: str, tool: str = "bash") -> bytes:
    return chat(*called(arguments, result, tool=tool)).turns[0].sign


def test_arguments_are_compared_as_values() -> None:
    same = sign('{"a": 1, "b": {"c": [1, 2], "d": null}}', "")
    assert sign('{"b":{"d":null,"c":[1,2]},"a":1}', "") == same
    assert sign('{"b":{"d":null,"c":[2,1]},"a":1}', "") != same
    assert sign('{"b":{"d":null,"c":[1,2]},"a":1}', "", tool="sh") != same
    assert sign("cut off {", "") == sign("cut off {", "") != sign("cut off [", "")


def test_a_description_is_a_comment_only_beside_a_command() -> None:
    assert sign('{"command":"ls","description":"List"}', "") == sign(
        '{"command":"ls","description":"Again"}', ""
    )
    assert sign('{"command":"ls","description":"x"}', "") != sign('{"command":"pwd","description":"x"}', "")
    assert sign('{"title":"t","description":"one"}', "") != sign('{"title":"t","description":"two"}', "")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("at 2026-11-30T13:20:00Z", "at 2026-11-30T13:20:01Z"),
        ("at 2026-11-30 13:20:00,123+01:00 ok", "at 2026-12-01 00:00:01,9+01:00 ok"),
        ("[13:20:00.5] up", "[3:20:59] up"),
        ('{"ts": 1790000000}', '{"ts": 1790000123.25}'),
        ('{"ts_ms": 1790000000000}', '{"ts_ms": 1790000000999}'),
        ("5 passed in 0.12s", "5 passed in 11.4s"),
        ("real 0m1.204s", "real 2m0.1s"),
        ("took 350 ms", "took 4 ms"),
        ("Chunk ID: 5f3a2b\nOutput: hi", "Chunk ID: 00c1ff\nOutput: hi"),
        ("Error: time-out, request 0b9f7c7e-1f1e-4a5b-9c55-0123456789ab", f"Error: time-out, request {'0b9f7c7e'}-{'f' * 4}-{'4' * 4}-{'a' * 4}-{'b' * 12}"),
        ("Error at 0x7f00aa10", "Error at 0x1"),
        ("Error: see /tmp/tmpa81b", "Error: see /tmp/tmp99zz"),
        ("Error: pid 4711 died", "Error: pid 12 died"),
    ],
)  # fmt: skip
def test_results_are_the_same_but_for_times_and_for_ids_of_failures(one: str, other: str) -> None:
    assert sign("{}", one) == sign("{}", other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("3 failed, 17 passed", "2 failed, 18 passed"),
        ("37 of 90 done", "38 of 90 done"),
        ("delivered on 2026-05-02", "delivered on 2026-05-03"),  # a date is what was asked for
        ('{"id": "0b9f7c7e-1f1e-4a5b-9c55-0123456789ab"}', '{"id": "0b9f7c7e-1f1e-4a5b-9c55-0123456789ac"}'),
        ("line 12", "line 13"),
        ("order 1790000000999 shipped", "order 2790000000999 shipped"),
        ("order 91790000000999 shipped", "order 91790000000111 shipped"),  # a clock in the middle of a number
        ("", "a"),
    ],
)
def test_numbers_dates_and_made_ids_are_results(one: str, other: str) -> None:
    assert sign("{}", one) != sign("{}", other)


def test_a_long_result_is_compared_in_its_ends_and_its_words() -> None:
    log = [f"2026-11-30T13:{n % 60:02}:00Z INFO took {n} ms to start worker" for n in range(400)]
    later = [line.replace("T13:", "T14:").replace("took ", "took 77") for line in log]
    assert sign("{}", "\n".join([*log, "3 failed"])) == sign("{}", "\n".join([*later, "3 failed"]))
    assert sign("{}", "\n".join([*log, "3 failed"])) != sign("{}", "\n".join([*later, "2 failed"]))
    assert sign("{}", "\n".join([*log, "3 failed"])) != sign(
        "{}", "\n".join([*log[:200], "x", *log[200:], "3 failed"])
    )


def test_what_a_client_rewrites_between_steps_changes_nothing() -> None:
    result = {
        "type": "tool_result",
        "tool_use_id": "t1",
        "content": "hi",
        "cache_control": {"type": "ephemeral"},
    }
    use = {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "echo hi"}}
    reminder = {"type": "text", "text": "<system-reminder>It is 12:00.</system-reminder>"}
    one: list[dict[str, Any]] = [
        USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    other: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "go"}]},
        {"role": "assistant", "content": [{**use, "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "user",
            "content": [
                {**result, "content": [{"type": "text", "text": "hi"}], "cache_control": None},
                reminder,
            ],
        },
    ]
    assert of(Operation.MESSAGES, one) == of(Operation.MESSAGES, other)


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ("Error: no such file", True),
        ("<tool_use_error>String not found</tool_use_error>", True),
        ("Traceback (most recent call last):", True),
        ("ModuleNotFoundError: No module named 'x'", True),
        ("fatal: not a git repository", True),
        ("bash: foo: command not found", True),
        ("Process exited with code 1\nOutput:", True),
        ("Process exited with code 0\nOutput:", False),
        ("<returncode>1</returncode>", True),
        ("<returncode>0</returncode>", False),
        ("a\n" * 300 + "exit code: 2", True),
        ('{"success": false}', True),
        ('{"is_error": true}', True),
        ("def handle_error(): ...", False),
        ("0 errors", False),
        ("12 passed, 1 failed", False),
        ("", False),
    ],
)
def test_failures_are_told_from_words(text: str, failed: bool) -> None:
    assert looks_failed(json.dumps(text)[1:-1].encode()) is failed


# --- what is said to the model ---------------------------------------------------------------------------


def test_what_is_said_between_turns_belongs_to_the_next() -> None:
    answer = {"role": "assistant", "content": "done"}
    nudge = {"role": "user", "content": "Call a tool. (12:00:01)"}
    again = {"role": "user", "content": "Call a tool. (12:00:09)"}
    seen = chat(answer, nudge, answer, again)
    assert [turn.sign for turn in seen.turns] == [seen.turns[0].sign] * 2
    assert [turn.prompted for turn in seen.turns] == [b"", seen.pending]
    assert chat(answer, nudge, answer, {"role": "user", "content": "Stop."}).pending != seen.turns[1].prompted
    # Reminders in the system role are the client's.
    reminder = {"role": "system", "content": "Follow the format."}
    assert chat(answer, nudge, reminder, answer, reminder, again) == seen


def test_an_answer_that_is_to_be_continued_is_no_turn() -> None:
    seen = chat(*called("{}", "ok"), {"role": "assistant", "content": "The answer is"})
    assert told(seen.turns) == [(("bash",), False)]


def test_an_answer_split_over_messages_is_one_turn() -> None:
    seen = chat({"role": "assistant", "content": "Let me look."}, *called("{}", "ok"))
    assert told(seen.turns) == [(("bash",), False)]


# --- bounds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
def test_only_the_end_of_a_history_is_looked_at(dialect: Operation) -> None:
    steps = [Step((Ask("read", {"path": f"f{n}"}, f"text {n}"),)) for n in range(600)]
    messages = history(dialect, *steps)
    seen = of(dialect, messages)
    assert [turn.calls[0].arguments for turn in seen.turns] == [
        of(dialect, history(dialect, step)).turns[0].calls[0].arguments for step in steps[-TURNS_MAX:]
    ]
    # What lies before does not even have to be readable.
    early = [USER, *({"role": "assistant", "content": 7} for _ in range(600))]
    assert of(dialect, early + messages[1:]) == seen


def test_what_cannot_be_read_ends_a_repetition() -> None:
    odd = {"role": "assistant", "content": "x", "tool_calls": "none"}
    seen = chat(*called("{}", "ok"), odd, *called("{}", "ok", "c2"))
    assert [bool(turn.prompted) for turn in seen.turns] == [False, True]
    image = {"type": "image", "source": {"data": "A" * (1 << 20)}}
    small, huge = Step((LS,)), [{"type": "tool_result", "tool_use_id": "call_0_0", "content": [image]}]
    messages = history(Operation.MESSAGES, small, small)
    messages[2] = {"role": "user", "content": huge}
    assert [bool(turn.prompted) for turn in of(Operation.MESSAGES, messages).turns] == [False, True]


def test_large_messages_make_a_short_tail() -> None:
    large = [Step((Ask("read", {"path": f"f{n}"}, "x" * 100_000),)) for n in range(6)]
    seen = of(Operation.CHAT, history(Operation.CHAT, *large))
    assert [turn.tools for turn in seen.turns] == [("read",)] * 3
    # What came before is not known, so of the turn that is cut nothing is told.
    wide = Step(tuple(Ask("read", {"path": f"f{n}"}, "x") for n in range(70)))
    seen = of(Operation.CHAT, history(Operation.CHAT, wide, Step((LS,))))
    assert [turn.tools for turn in seen.turns] == [("bash",)]
    half = Step(tuple(Ask("read", {"path": f"f{n}"}, "x") for n in range(40)))  # 24 of its calls are in reach
    seen = of(Operation.RESPONSES, history(Operation.RESPONSES, half))
    assert seen.turns == ()


# --- a run, step by step -----------------------------------------------------------------------------------

_said = st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": st.sampled_from("ab")})
_spoken = st.fixed_dictionaries({"role": st.just("assistant"), "content": st.sampled_from(["", "I see."])})
_asked = st.builds(
    lambda tool, result, n: list(called("{}", result, f"c{n}", tool))[: 1 + (n > 0)],
    st.sampled_from(["bash", "read"]),
    st.sampled_from(["ok", "no such file"]),
    st.integers(0, 2),
)
_growth = st.lists(st.one_of(_said, _spoken, _asked), min_size=1, max_size=4)


def flat(grown: list[Any]) -> list[dict[str, Any]]:
    return [m for part in grown for m in (part if isinstance(part, list) else [part])]


@given(st.lists(_growth, min_size=1, max_size=6), _growth)
def test_a_run_that_is_followed_tells_what_its_whole_history_does(
    steps: list[list[Any]], other: list[Any]
) -> None:
    messages = [USER]
    for step in [*steps, other]:
        if step is other:
            messages = messages[: len(messages) // 2]  # and one that forks off it
        messages = messages + flat(step)
        segments = facts(Operation.CHAT, messages).segments
        links = chain(segments)[: anchor(segments)]
        followed, read = tail(Operation.CHAT, segments, links), tail(Operation.CHAT, segments)
        # Where a history is longer than what is looked at, one that was followed is known further back.
        assert (followed.turns[len(followed.turns) - len(read.turns) :], followed.pending) == (
            read.turns,
            read.pending,
        )
        if sum(message["role"] == "assistant" for message in messages) <= TURNS_MAX:
            assert followed == read
        assert tail(Operation.CHAT, segments, links) == followed  # a retry


def test_a_run_that_is_followed_is_known_beyond_the_bytes_that_are_read_at_once() -> None:
    large = [Step((Ask("read", {"path": f"f{n}"}, "y" * 100_000),)) for n in range(6)]
    for known in range(1, 7):
        segments = facts(Operation.CHAT, history(Operation.CHAT, *large[:known])).segments
        followed = tail(Operation.CHAT, segments, chain(segments))
    assert len(tail(Operation.CHAT, segments).turns) == 3
    assert [turn.tools for turn in followed.turns] == [("read",)] * 6


def test_requests_without_messages_have_no_tail() -> None:
    assert tail(Operation.EMBEDDINGS, ()) == Tail()
    assert of(Operation.RESPONSES, [USER]).turns == ()
    whole = dialects.read(Operation.RESPONSES, b'{"model":"m","input":"hi"}')
    assert tail(Operation.RESPONSES, whole.segments).turns == ()


_names = st.sampled_from(
    (
        *("role", "type", "content", "text", "tool_calls", "function", "arguments", "name", "id", "output"),
        *("tool_call_id", "tool_use_id", "call_id", "input", "is_error", "action", "status"),
    )
)
_words = st.sampled_from(["assistant", "tool", "user", "c1", "{", ""])
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | _words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=5),
    max_leaves=12,
)
_types = st.sampled_from(
    ["message", "function_call", "function_call_output", "tool_use", "x_call", "reasoning"]
)


@given(
    st.sampled_from(DIALECTS),
    st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["assistant", "tool", "user", "system"])},
            optional={
                "type": _types,
                "content": _json,
                "tool_calls": _json,
                "output": _json,
                "call_id": _json,
            },
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_no_message_makes_it_fail(dialect: Operation, messages: list[dict[str, Any]]) -> None:
    segments = [Segment("message", memoryview(json.dumps(message).encode())) for message in messages]
    assert len(tail(dialect, segments).turns) <= TURNS_MAX


@given(st.binary(max_size=400), st.booleans())
def test_no_text_makes_it_fail(text: bytes, failed: bool) -> None:
    assert steady(steady(text, failed), failed) is not None
    assert looks_failed(text) in (True, False)
