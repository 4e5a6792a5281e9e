"""The demo agent's side of its conversation, without IO: what it asks next, and what its tools answer.

A coding agent with a system prompt of about 3,000 tokens and eight tools works on one task. Its history only
grows: every answer and every tool result is appended and nothing before it changes, so each request extends the
last one's prefix. In the messages dialect it sets cache_control like a good agent: on the system prompt, and on
the last two user messages, so that the entry of the step before is always within reach. Everything is
deterministic: the same answers lead to the same requests.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Dialect = Literal["messages", "chat"]

MAX_OUTPUT_TOKENS = 1_024
_EPHEMERAL = {"type": "ephemeral"}
_TOOLS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("list_files", "List the files below a directory, one a line, with their sizes in bytes.", ("path",)),
    ("read_file", "Read a text file from the repository and return it with line numbers.", ("path",)),
    ("search", "Search all files for a regular expression and return matching lines.", ("pattern", "path")),
    ("run_command", "Run a shell command in the repository and return its output.", ("command",)),
    ("edit_file", "Replace the one occurrence of a text in a file by another text.", ("path", "old", "new")),
    ("run_tests", "Run the test suite, or the part of it below a path, and return its report.", ("path",)),
    ("write_file", "Create a file, or replace one as a whole.", ("path", "content")),
    ("git_diff", "Show the changes of the work tree against the last commit.", ("path",)),
)
_TOPICS = (
    "reading an unknown module",
    "changing a public function",
    "adding a test",
    "running a long command",
    "meeting a failing test",
    "touching a database migration",
    "handling an error",
    "naming a variable",
    "measuring a slow path",
    "finishing the task",
)
_ADVICE = (
    "look at the callers first and write down what they rely on before you change a single line",
    "prefer the smallest change that makes the test pass, and say in one sentence why it is right",
    "never guess a path: list the directory, then open the file, then edit the one place that matters",
    "keep the output short by asking for the part that you need, because every line is read again at each step",
    "undo what turned out to be wrong instead of working around it, and check that the tree is clean",
    "stop and report when two attempts in a row failed in the same way, with what you know so far",
)


@dataclass(frozen=True, slots=True)
class Heard:
    """A model's answer, whatever the dialect. `tool_id` is "" for an answer in text."""

    text: str = ""
    tool_id: str = ""
    tool_name: str = ""
    arguments: str = ""  # JSON as the model wrote it


@dataclass(slots=True)
class Conversation:
    """`body(stream)` is the next request, `hear(answer)` appends the answer and says whether another step follows."""

    model: str
    dialect: Dialect = "messages"
    steps: int = 20
    step: int = 1  # the step that `body` is for
    _history: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("an agent needs at least one step")
        self._history.append({"role": "user", "content": [_text(task_text(self.steps))]})

    def body(self, stream: bool) -> dict[str, Any]:
        if self.dialect == "messages":
            return self._messages_body(stream)
        options = {"stream_options": {"include_usage": True}} if stream else {}
        return {
            "model": self.model,
            "max_completion_tokens": MAX_OUTPUT_TOKENS,
            "stream": stream,
            **options,
            "tools": [{"type": "function", "function": _function(tool, "parameters")} for tool in _TOOLS],
            "messages": [{"role": "system", "content": system_prompt()}, *self._history],
        }

    def _messages_body(self, stream: bool) -> dict[str, Any]:
        last_users = [i for i, message in enumerate(self._history) if message["role"] == "user"][-2:]
        messages = [_marked(m) if i in last_users else m for i, m in enumerate(self._history)]
        return {
            "model": self.model,
            "max_tokens": MAX_OUTPUT_TOKENS,
            "stream": stream,
            "tools": [_function(tool, "input_schema") for tool in _TOOLS],
            "system": [{**_text(system_prompt()), "cache_control": _EPHEMERAL}],
            "messages": messages,
        }

    def hear(self, answer: Heard) -> bool:
        if self.step >= self.steps:
            return False
        if not answer.tool_id:
            # A model that stops early is told to go on: the demo is about its length.
            self._history += [
                {"role": "assistant", "content": [_text(answer.text)]},
                {"role": "user", "content": [_text("Go on with the next step.")]},
            ]
        elif self.dialect == "messages":
            self._history += _messages_turn(answer, tool_result(self.step, answer.tool_name))
        else:
            self._history += _chat_turn(answer, tool_result(self.step, answer.tool_name))
        self.step += 1
        return True


def task_text(steps: int) -> str:
    return (
        "The report of the billing job is off by one day at the end of a month. Find out why, fix it, add a test, "
        f"and tell me what you did. (demo:tools={steps - 1})"
    )


def system_prompt() -> str:
    """About 3,000 tokens of rules, the same in every run."""
    rules = [
        f"{i + 1}. When {_TOPICS[i % len(_TOPICS)]}, {_ADVICE[(i * 7 + i // 10) % len(_ADVICE)]}."
        for i in range(100)
    ]
    return "You are a careful coding agent that works in a git repository through tools.\n" + "\n".join(rules)


def tool_result(step: int, tool_name: str) -> str:
    """What a tool prints at this step: 6 to 160 lines of made-up source and reports."""
    drawn = hashlib.sha256(f"{step}:{tool_name}".encode()).digest()
    lines = 6 + drawn[0] * 154 // 255
    return "\n".join(
        f"{n + 1:4}  {_line(hashlib.sha256(drawn + n.to_bytes(4)).digest())}" for n in range(lines)
    )


def _line(drawn: bytes) -> str:
    names = ("period", "invoice", "month_end", "ledger", "total", "cursor", "timezone", "report")
    a, b, c = (names[byte % len(names)] for byte in drawn[:3])
    forms = (
        f"def {a}_{b}({c}: int) -> int:",
        f"    {a} = {b} + {drawn[4]}  # {c}",
        f"    return {a}.{b}({c})",
        f"test_{a}_{b} ... ok ({drawn[5]} ms)",
        "",
    )
    return forms[drawn[3] % len(forms)]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    *before, last = message["content"]
    return {**message, "content": [*before, {**last, "cache_control": _EPHEMERAL}]}


def _function(tool: tuple[str, str, tuple[str, ...]], schema_key: str) -> dict[str, Any]:
    name, description, parameters = tool
    schema = {
        "type": "object",
        "properties": {p: {"type": "string", "description": f"the {p}"} for p in parameters},
        "required": list(parameters),
    }
    return {"name": name, "description": description, schema_key: schema}


def _messages_turn(answer: Heard, result: str) -> list[dict[str, Any]]:
    arguments = msgspec.json.decode(answer.arguments or "{}")
    call = {"type": "tool_use", "id": answer.tool_id, "name": answer.tool_name, "input": arguments}
    said = [_text(answer.text)] if answer.text else []
    done = {"type": "tool_result", "tool_use_id": answer.tool_id, "content": result}
    return [{"role": "assistant", "content": [*said, call]}, {"role": "user", "content": [done]}]


def _chat_turn(answer: Heard, result: str) -> list[dict[str, Any]]:
    function = {"name": answer.tool_name, "arguments": answer.arguments}
    call = {"id": answer.tool_id, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": answer.text or None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": answer.tool_id, "content": result},
    ]
