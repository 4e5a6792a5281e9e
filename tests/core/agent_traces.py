"""Made-up agent runs, as the requests that a client sends in each dialect: stuck ones and legitimate ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from gateway.core import dialects
from gateway.core.catalog import Operation
from gateway.core.dialects import Facts

DIALECTS = (Operation.CHAT, Operation.MESSAGES, Operation.RESPONSES)


@dataclass(frozen=True)
class Ask:
    """One tool call with its result. `arguments` may be a text that is no JSON."""

    tool: str
    arguments: dict[str, Any] | str
    result: str
    failed: bool = False


@dataclass(frozen=True)
class Step:
    """One answer of the model: what was said to it before, what it says, what it calls, and how long all took."""

    asks: tuple[Ask, ...] = ()
    text: str = ""
    said: str = ""
    gap_s: float = 8.0


@dataclass(frozen=True)
class Trace:
    """A run. `stuck_from`: how many steps were fine before it got stuck; None = never."""

    name: str
    steps: tuple[Step, ...]
    stuck_from: int | None = None
    dialect: Operation = Operation.CHAT


def requests(trace: Trace) -> Iterator[tuple[int, Facts]]:
    """(milliseconds since the first, facts) of the request before each step, and of the one after the last."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Make the tests pass."}]
    at_ms = 0
    for n in range(len(trace.steps) + 1):
        step = trace.steps[n] if n < len(trace.steps) else Step()
        if step.said and n:
            messages.append({"role": "user", "content": step.said})
        yield at_ms, facts(trace.dialect, messages)
        messages += rendered(trace.dialect, step, n)
        at_ms += round(step.gap_s * 1_000)


def facts(dialect: Operation, messages: Sequence[dict[str, Any]]) -> Facts:
    body = {"model": "auto", "max_tokens": 500, "messages": messages}
    if dialect is Operation.RESPONSES:
        body = {"model": "auto", "input": messages}
    return dialects.read(dialect, json.dumps(body).encode())


def rendered(dialect: Operation, step: Step, n: int) -> list[dict[str, Any]]:
    """The messages of one step; ids are new in each."""
    named = [(f"call_{n}_{i}", ask) for i, ask in enumerate(step.asks)]
    match dialect:
        case Operation.CHAT:
            calls = [
                {"id": i, "type": "function", "function": {"name": a.tool, "arguments": _json(a.arguments)}}
                for i, a in named
            ]
            spoken = {"role": "assistant", "content": step.text or None}
            return [
                {**spoken, "tool_calls": calls} if calls else spoken,
                *({"role": "tool", "tool_call_id": i, "content": _told(a)} for i, a in named),
            ]
        case Operation.MESSAGES:
            text = [{"type": "text", "text": step.text}] if step.text else []
            uses = [
                {"type": "tool_use", "id": i, "name": a.tool, "input": _object(a.arguments)} for i, a in named
            ]
            results = [
                {"type": "tool_result", "tool_use_id": i, "content": a.result, "is_error": a.failed}
                for i, a in named
            ]
            answer = [{"role": "user", "content": results}] if results else []
            return [{"role": "assistant", "content": [*text, *uses]}, *answer]
    said = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": step.text}]}]
    return [
        *(said if step.text else []),
        *(
            {"type": "function_call", "call_id": i, "name": a.tool, "arguments": _json(a.arguments)}
            for i, a in named
        ),
        *({"type": "function_call_output", "call_id": i, "output": _told(a)} for i, a in named),
    ]


def _told(ask: Ask) -> str:
    """In dialects without a flag, clients say in words that a call failed."""
    return f"Error: {ask.result}" if ask.failed else ask.result


def _json(arguments: dict[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _object(arguments: dict[str, Any] | str) -> Any:
    return {"raw": arguments} if isinstance(arguments, str) else arguments


# --- small variations -----------------------------------------------------------------------------------


def _clock(r: Random, form: int) -> str:
    """A time or a duration; one run tells it in one form."""
    return (
        f"2026-11-30T{r.randrange(24):02}:{r.randrange(60):02}:{r.randrange(60):02}.{r.randrange(1000):03}Z",
        f"{r.randrange(24):02}:{r.randrange(60):02}:{r.randrange(60):02}",
        f"17{r.randrange(10**8):08}",
        f"took {r.randrange(1, 900)} ms",
        f"in {r.random():.2f}s",
    )[form % 5]


def _hex(r: Random, n: int) -> str:
    return "".join(r.choice("0123456789abcdef") for _ in range(n))


def _id(r: Random, form: int) -> str:
    """What a failure may name anew each time."""
    uuid = "-".join(_hex(r, n) for n in (8, 4, 4, 4, 12))
    return (f"request {uuid}", f"trace id: {_hex(r, 16)}", f"at 0x{_hex(r, 12)}", f"req_{_hex(r, 10)}")[
        form % 4
    ]


def _shuffled(r: Random, arguments: dict[str, Any]) -> dict[str, Any]:
    """The same value, its members in another order."""
    return dict(r.sample(list(arguments.items()), len(arguments)))


def _work(r: Random, n: int) -> tuple[Step, ...]:
    """Steps that all differ."""
    makers: tuple[Callable[[int], Ask], ...] = (
        lambda i: Ask("read", {"path": f"src/module_{i}.py"}, f"def f_{i}(): return {i}\n" * 3),
        lambda i: Ask("bash", {"command": f"grep -rn name_{i} src"}, f"src/a.py:{i}: name_{i}"),
        lambda i: Ask("edit", {"path": f"src/m{i}.py", "old": f"a{i}", "new": f"b{i}"}, "ok"),
        lambda i: Ask("bash", {"command": f"ls dir_{i}"}, "", failed=i % 5 == 0),
    )
    return tuple(Step((r.choice(makers)(r.randrange(10**6)),), gap_s=r.uniform(2, 20)) for _ in range(n))


# --- stuck ------------------------------------------------------------------------------------------------


def _loop(r: Random, i: int) -> list[Step]:
    path = f"src/file_{r.randrange(100)}.py"
    kind = i % 8
    steps = []
    for n in range(14):
        arguments: dict[str, Any] = {"path": path, "limit": 20, "offset": 1}
        ask = Ask("read", arguments, f"class A{i}: pass")
        if kind == 1:
            ask = Ask("bash", {"command": "make"}, f"[{_clock(r, i)}] nothing to be done for 'all'")
        if kind == 2:
            ask = Ask("read", _shuffled(r, arguments), "no such line")
        if kind == 3:
            note = r.choice(("Run the tests", "Run tests again", "Verify that all pass"))
            ask = Ask("bash", {"command": "npm test", "description": note}, f"2 passing ({_clock(r, i)})")
        if kind == 4:
            ask = Ask(
                "exec_command",
                {"cmd": "cat notes.txt"},
                f"Chunk ID: {_hex(r, 6)}\nWall time: {r.random():.4f} seconds\nOutput:\nempty",
            )
        if kind == 5:
            log = "\n".join(f"{_clock(r, i)} INFO worker {k} is ready" for k in range(200))
            ask = Ask("bash", {"command": "tail -n 200 app.log"}, log)
        asks = (ask, ask) if kind == 6 else (ask, replace(ask, tool="list")) if kind == 7 else (ask,)
        text = r.choice(("Let me look again.", "", f"Attempt {n}:", "Hmm."))
        steps.append(Step(asks, text=text, gap_s=r.uniform(1, 25)))
    return steps


def _ping_pong(r: Random, i: int) -> list[Step]:
    steps = []
    for n in range(14):
        if i % 2:  # looks and tests, and changes nothing
            look = Ask("read", _shuffled(r, {"path": "a.py", "start": i}), "import b")
            tests = Ask("bash", {"command": "pytest -q"}, f"1 failed {_clock(r, i)}", failed=True)
            ask = tests if n % 2 else look
        else:  # does and undoes
            old, new = ("x = 2", "x = 1") if n % 2 else ("x = 1", "x = 2")
            ask = Ask("edit", {"path": "a.py", "old": old, "new": new}, f"edited at {_clock(r, i)}")
        steps.append(Step((ask,), gap_s=r.uniform(1, 12)))
    return steps


def _same_error(r: Random, i: int) -> list[Step]:
    what = r.choice(
        ("connection refused", "permission denied", "no module named foo", "invalid argument 'path'")
    )
    return [
        Step(
            (
                Ask(
                    "deploy" if i % 2 else "bash",
                    _shuffled(r, {"target": "staging", "force": True, "command": f"run {i}"}),
                    f"{what} ({_id(r, i)}, {_clock(r, i)})",
                    failed=True,
                ),
            ),
            text=r.choice(("", "I will try that again.", f"Try number {n}.")),
            gap_s=r.uniform(1, 20),
        )
        for n in range(14)
    ]


def _other_errors(r: Random, i: int) -> list[Step]:
    """Cut arguments, another place each time: no two calls are alike, and none works."""
    return [
        Step(
            (
                Ask(
                    "write", f'{{"path": "b.py", "text": "{"x" * r.randrange(9, 99)}', f"bad JSON ({i})", True
                ),
            ),
            gap_s=r.uniform(1, 20),
        )
        for _ in range(14)
    ]


def _monologue(r: Random, i: int) -> list[Step]:
    words = r.choice(("I have finished the task.", "Please tell me how to go on.", "The task is complete."))
    nudge = "" if i % 3 == 0 else "You did not call a tool. Call one, or say that you are done."
    return [
        Step(text=words, said=f"{nudge} ({_clock(r, i)})" if nudge else "", gap_s=r.uniform(1, 20))
        for _ in range(14)
    ]


def stuck() -> list[Trace]:
    """100 runs that make no progress: 40 loops, 25 alternations, 25 error streaks (3 of them with other arguments each
    time), 10 monologues."""
    r = Random(19)
    kinds: list[tuple[str, Callable[[Random, int], list[Step]], int]] = [
        *(("loop", _loop, i) for i in range(40)),
        *(("ping-pong", _ping_pong, i) for i in range(25)),
        *(("same error", _same_error, i) for i in range(22)),
        *(("other errors", _other_errors, i) for i in range(3)),
        *(("monologue", _monologue, i) for i in range(10)),
    ]
    traces = []
    for number, (name, make, i) in enumerate(kinds):
        before = _work(r, r.randrange(0, 9))
        steps = (*before, *make(r, i))
        traces.append(Trace(f"{name} {i}", steps, len(before), DIALECTS[number % 3]))
    return traces


# --- legitimate ---------------------------------------------------------------------------------------------


def _slow_polling(r: Random, i: int) -> list[Step]:
    job = Ask("bash", {"command": f"gh run view {i}"}, "status: in_progress")
    return [
        *(Step((job,), gap_s=r.uniform(30, 90)) for _ in range(12)),
        Step((replace(job, result="success"),)),
    ]


def _waiting_tool(r: Random, i: int) -> list[Step]:
    tool = ("BashOutput", "write_stdin", "read_bash", "team_status", "sleep")[i % 5]
    wait = Ask(tool, {"id": i}, "still running")
    check = Ask("bash", {"command": "cat out.log"}, "")
    both = i % 2 == 0  # some look at a file in between
    return [Step((check if both and n % 2 else wait,), gap_s=r.uniform(1, 9)) for n in range(16)]


def _test_runs(r: Random, i: int) -> list[Step]:
    """The same tests after each edit; the same result, too, when an edit changed nothing."""
    steps = []
    for n in range(8):
        edit = Ask("edit", {"path": f"m{i}.py", "old": f"v{n}", "new": f"v{n + 1}"}, "ok")
        left = 9 - n if i % 2 else 3
        tests = Ask(
            "bash", {"command": "pytest -q"}, f"{left} failed, {20 - left} passed {_clock(r, i)}", True
        )
        steps += [Step((edit,)), Step((tests,))]
    return steps


def _progress(r: Random, i: int) -> list[Step]:
    """One command again and again; its result tells how far it is."""
    return [
        Step(
            (Ask("bash", {"command": f"make stage{i}"}, f"{n * 7} of 90 done, {_clock(r, i)}"),),
            gap_s=r.uniform(1, 9),
        )
        for n in range(12)
    ]


def _reading(r: Random, i: int) -> list[Step]:
    files = [f"src/{i}/part_{n}.py" for n in range(12)]
    asks = [Ask("read", {"path": f}, f"# {f}" if i % 2 else "") for f in files]
    if i % 3 == 0:  # some at once
        return [Step(tuple(asks[n : n + 3])) for n in range(0, 12, 3)]
    return [Step((ask,)) for ask in asks]


def _retries_that_work(r: Random, i: int) -> list[Step]:
    call = Ask("fetch", {"url": f"https://example.com/{i}"}, f"time-out, {_id(r, i)}", failed=True)
    fails = [
        Step((replace(call, result=f"time-out, {_id(r, i)}"),), gap_s=r.uniform(1, 9))
        for _ in range(2 + i % 4)
    ]
    return [*fails, Step((replace(call, result="<html>", failed=False),)), *_work(r, 2), *fails[:2]]


def _pages(r: Random, i: int) -> list[Step]:
    day = r.randrange(1, 15)
    return [
        Step((Ask("search", {"from": f"2026-05-{day + n:02}T00:00:00Z", "page": i}, "[]"),))
        for n in range(10)
    ]


def _thinking(r: Random, i: int) -> list[Step]:
    return [Step((Ask("think", {"thought": f"Then {r.randrange(10**6)} ({n})."}, ""),)) for n in range(10)]


def _person(r: Random, i: int) -> list[Step]:
    """A person who asks the same thing in other words."""
    look = Ask("get_balance", {"account": i}, "100.00")
    asked = [
        "and now?",
        "look again",
        "once more",
        "still 100?",
        "are you sure?",
        "check it",
        "again please",
        "now?",
    ]
    return [Step((look,), text="It is 100.", said=f"{words} {r.randrange(99)}") for words in asked]


def _same_answer(r: Random, i: int) -> list[Step]:
    """A person who gets the same refusal to different questions."""
    return [Step(text="I cannot help with that.", said=f"What about {r.randrange(10**6)}?") for _ in range(8)]


def _creating(r: Random, i: int) -> list[Step]:
    return [
        Step(
            (Ask("create_row", {"table": "t"}, json.dumps({"id": f"row_{_hex(r, 12)}"})),),
            gap_s=r.uniform(1, 5),
        )
        for _ in range(10)
    ]


def legitimate() -> list[Trace]:
    """100 runs that make progress, or wait."""
    r = Random(91)
    kinds: list[tuple[str, Callable[[Random, int], list[Step]], int]] = [
        ("slow polling", _slow_polling, 12),
        ("waiting tool", _waiting_tool, 10),
        ("test runs", _test_runs, 14),
        ("progress", _progress, 8),
        ("reading", _reading, 14),
        ("retries that work", _retries_that_work, 12),
        ("pages", _pages, 6),
        ("thinking", _thinking, 6),
        ("person", _person, 6),
        ("same answer", _same_answer, 6),
        ("creating", _creating, 6),
    ]
    traces: list[Trace] = []
    for name, make, count in kinds:
        for i in range(count):
            steps = (*_work(r, r.randrange(0, 6)), *make(r, i), *_work(r, r.randrange(0, 4)))
            traces.append(Trace(f"{name} {i}", steps, None, DIALECTS[len(traces) % 3]))
    return traces
