"""Conversations of agents out of random numbers, for comparing what a provider reads of them straight and through a gateway.

Drawn: the dialect, sizes around every provider's minimum, where the client puts markers of its own, how the volatile lines of
the system prompt change (each step, at times, back to an older wording, to a longer one), shuffled tools, many parallel tool
calls, reminders at the end, pauses longer than a cache lives.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gateway.core.catalog import Operation
from tests.support.played_cache import compact

_MARK = {"type": "ephemeral"}
_LONG_MARK = {"type": "ephemeral", "ttl": "1h"}
_VALUES = {
    "It is {}.": ("9:14", "9:15", "9:16", "12:30", "9:59 PM", "2026-11-30 09:14:05"),
    "Working directory: {}": ("/a", "/home/somebody/project", "/b c", "/srv/x"),
    "Current branch: {}": ("main", "fix-7", "a-branch-with-a-long-name"),
    "Session id: {}": ("abc", "x-9", "3fa9d2c0"),
}


@dataclass(frozen=True, slots=True)
class Step:
    operation: Operation
    body: bytes
    pause_s: int  # since the step before
    run: int = 0  # of several
    lines: tuple[str, ...] = ()  # the volatile ones, as they are now


def conversation(seed: int) -> tuple[str, list[Step]]:
    """What is special of it, for people, and its steps."""
    draw = random.Random(seed)
    operation = draw.choice((Operation.MESSAGES, Operation.CHAT, Operation.RESPONSES))
    marks = draw.choice(_STYLES[operation])
    volatile = draw.sample(sorted(_VALUES), draw.choice((0, 1, 1, 2)))
    rules = draw.choice((150, 500, 700, 1_100, 4_300, 6_000))  # tokens, about
    tools = draw.choice((0, 0, 2, 5))
    kind = f"{operation} {marks} {'+'.join(volatile)} {rules} {tools} tools"
    return kind, list(_steps(draw, operation, marks, volatile, rules, tools))


@dataclass(frozen=True, slots=True)
class _Client:
    """What all runs of a client have in common. `wording`: what its lines say now, if that is so for all of them."""

    wording: dict[str, str]
    changes: float
    place: int
    blocks: bool
    reminder: bool
    asks: str = ""


def several(seed: int) -> tuple[str, list[Step]]:
    """Runs of one client, one after the other or side by side, whose lines are about the same things or their own."""
    draw = random.Random(seed)
    operation = draw.choice((Operation.MESSAGES, Operation.CHAT, Operation.RESPONSES))
    marks = draw.choice(_STYLES[operation])
    volatile = draw.sample(sorted(_VALUES), draw.choice((1, 1, 2)))
    rules = draw.choice((150, 700, 1_100, 4_300))
    tools = draw.choice((0, 0, 2))
    shared = {line: draw.choice(_VALUES[line]) for line in volatile}
    place, blocks = draw.randrange(3), draw.random() < 0.3
    reminder = operation is not Operation.MESSAGES and draw.random() < 0.2
    together, side_by_side = draw.random() < 0.5, draw.random() < 0.5
    kind = f"{operation} {marks} {'+'.join(volatile)} {rules} {tools} tools together {together} beside {side_by_side}"
    runs = []
    for n in range(draw.randrange(2, 6)):
        wording = shared if together else {line: draw.choice(_VALUES[line]) for line in volatile}
        asks = f"This is task {n}. "
        client = _Client(wording, draw.choice((0.0, 0.2, 0.5, 1.0)), place, blocks, reminder, asks)
        runs.append((n, _steps(draw, operation, marks, volatile, rules, tools, client)))
    steps = []
    while runs:
        at = draw.randrange(len(runs)) if side_by_side else 0
        n, run = runs[at]
        step = next(run, None)
        if step is None:
            del runs[at]
        else:
            steps.append(replace(step, run=n))
    return kind, steps


_STYLES = {
    Operation.MESSAGES: (
        "none",
        "none",
        "tail",
        "head",
        "head and tail",
        "four",
        "automatic",
        "automatic 1h",
        "tail 1h",
    ),
    Operation.CHAT: ("none", "none", "breakpoint", "breakpoints", "explicit", "tail"),
    Operation.RESPONSES: ("none", "breakpoint", "explicit"),
}


def _steps(
    draw: random.Random,
    operation: Operation,
    marks: str,
    volatile: list[str],
    rules: int,
    tools: int,
    client: _Client | None = None,
) -> Iterator[Step]:
    client = client or _Client(
        {line: draw.choice(_VALUES[line]) for line in volatile},
        draw.choice((0.2, 0.5, 1.0)),
        draw.randrange(3),
        draw.random() < 0.3,
        operation is not Operation.MESSAGES and draw.random() < 0.2,
    )
    wording, changes, place = client.wording, client.changes, client.place
    blocks, reminder = client.blocks, client.reminder
    listed = [_tool(operation, n) for n in range(tools)]
    turns: list[list[dict[str, Any]]] = [
        [_user(operation, client.asks + "Begin. " * draw.choice((1, 40, 900)), draw)]
    ]
    for step in range(draw.randrange(2, 9)):
        if step:
            for line in volatile:
                if draw.random() < changes:
                    wording[line] = draw.choice(_VALUES[line])
            turns.append(_turn(draw, operation, step, bool(tools)))
        if draw.random() < 0.3:
            draw.shuffle(listed)
        lines = [f"Rule {n}: be brief and careful." for n in range(rules // 9)]
        lines[place * len(lines) // 2 : place * len(lines) // 2] = [
            line.format(wording[line]) for line in volatile
        ]
        said = [dict(message) for turn in turns for message in turn]
        if reminder and step % 2:
            said.append({"role": "system", "content": "Remember the rules."})
        half = len(lines) // 2
        texts = ["\n".join(lines[:half]), "\n".join(lines[half:])] if blocks else ["\n".join(lines)]
        body: dict[str, Any] = {"model": "m"}
        if listed:
            body["tools"] = [dict(tool) for tool in listed]
        yield Step(
            operation,
            compact(_marked(body, operation, marks, texts, said)),
            draw.choice((5, 20, 20, 20, 400)),
            lines=tuple(line.format(wording[line]) for line in volatile),
        )


def _turn(draw: random.Random, operation: Operation, step: int, tools: bool) -> list[dict[str, Any]]:
    text = f"result {step} " * draw.choice((1, 30, 600))
    if not tools or draw.random() < 0.3:
        return [
            {"role": "assistant", "content": f"Done {step}."},
            _user(operation, f"Go on {step}. {text}", draw),
        ]
    calls = draw.choice((1, 1, 2, 9, 11, 12))
    ids = [f"c{step}-{n}" for n in range(calls)]
    texts = [draw.choice((text, text, "ok", "")) for _ in ids]
    if operation is Operation.MESSAGES:
        uses = [{"type": "tool_use", "id": i, "name": "t0", "input": {"n": i}} for i in ids]
        results = [
            {"type": "tool_result", "tool_use_id": i, "content": t} for i, t in zip(ids, texts, strict=True)
        ]
        return [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]
    if operation is Operation.RESPONSES:
        asked = [{"type": "function_call", "call_id": i, "name": "t0", "arguments": "{}"} for i in ids]
        told = [
            {"type": "function_call_output", "call_id": i, "output": t}
            for i, t in zip(ids, texts, strict=True)
        ]
        return [*asked, *told]
    called = [{"id": i, "type": "function", "function": {"name": "t0", "arguments": "{}"}} for i in ids]
    return [
        {"role": "assistant", "content": None, "tool_calls": called},
        *({"role": "tool", "tool_call_id": i, "content": t} for i, t in zip(ids, texts, strict=True)),
    ]


def _user(operation: Operation, text: str, draw: random.Random) -> dict[str, Any]:
    kind = "input_text" if operation is Operation.RESPONSES else "text"
    as_list = draw.random() < 0.4
    return {"role": "user", "content": [{"type": kind, "text": text}] if as_list else text}


def _tool(operation: Operation, n: int) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"n": {"type": "string"}}}
    named = {"name": f"t{n}", "description": f"does {n} " * 30}
    if operation is Operation.MESSAGES:
        return {**named, "input_schema": schema}
    if operation is Operation.RESPONSES:
        return {"type": "function", **named, "parameters": schema}
    return {"type": "function", "function": {**named, "parameters": schema}}


def _marked(
    body: dict[str, Any], operation: Operation, marks: str, texts: list[str], said: list[dict[str, Any]]
) -> dict[str, Any]:
    """With the system prompt, the messages, and the markers of this client."""
    system: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
    if operation is Operation.MESSAGES:
        mark = _LONG_MARK if marks.endswith("1h") else _MARK
        if marks.startswith("automatic"):
            body["cache_control"] = mark
        if "head" in marks or marks == "four":
            system[-1]["cache_control"] = mark
        if marks == "four" and body.get("tools"):
            body["tools"][-1] = {**body["tools"][-1], "cache_control": mark}
        if "tail" in marks or marks == "four":
            users = [m for m in said if m["role"] == "user"]
            for message in users[-2:] if marks == "four" else users[-1:]:
                _mark_last(message, "cache_control", mark)
        return {**body, "max_tokens": 9, "system": system, "messages": said}
    kind = "input_text" if operation is Operation.RESPONSES else "text"
    head: dict[str, Any] = {"role": "system", "content": [{"type": kind, "text": text} for text in texts]}
    if len(texts) == 1 and not marks.startswith("explicit"):
        head["content"] = texts[0]
    at = {"mode": "explicit"}
    if marks == "explicit":
        body["prompt_cache_options"] = at
    if marks in ("explicit", "breakpoint", "breakpoints"):
        users = [m for m in said if m.get("role") == "user"]
        for message in users[-4 if marks == "breakpoints" else -1 :]:
            _mark_last(message, "prompt_cache_breakpoint", at, kind)
    if marks == "tail":
        users = [m for m in said if m.get("role") == "user"]
        _mark_last(users[-1], "cache_control", _MARK)
    return {**body, "input" if operation is Operation.RESPONSES else "messages": [head, *said]}


def _mark_last(message: dict[str, Any], name: str, mark: dict[str, str], kind: str = "text") -> None:
    content = message["content"]
    own = [{"type": kind, "text": content}] if isinstance(content, str) else content
    blocks: list[dict[str, Any]] = [dict(block) for block in own]
    blocks[-1][name] = mark
    message["content"] = blocks
