"""What the demo model says: deterministic from the prompt, and simple enough that real agents come to an end.

- Tools offered: the first answer calls a tool (a shell-like one if there is one), and after its result the model
  answers in text. A forced tool_choice is always obeyed.
- mini-swe-agent ends only when a command prints its marker, so a prompt that mentions the marker gets it printed.
- A JSON schema asked for: the smallest JSON that satisfies it.
- Else words drawn by the prompt's digest, beginning with "[demo]".

Two directives in a system or user text steer it, the last one of each counts: `demo:tools=19` asks for 19 rounds
of tool calls, through all the offered tools in turn; `demo:output=500` asks for a text of exactly 500 tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from gateway.demo.prompt import Ask, Tool
from gateway.demo.read import compact
from gateway.demo.schema import arguments, minimal, takes_command
from gateway.demo.tokens import pieces

END_MARKER = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
MAX_OUTPUT_TOKENS = 128_000
_DIRECTIVE = re.compile(r"demo:(tools|output)=(\d{1,6})")
_SHELLS = (
    "bash",
    "Bash",
    "shell",
    "exec_command",
    "shell_command",
    "run_shell_command",
    "execute_command",
    "execute_bash",
    "terminal",
    "run_commands",
)
_WORDS = [
    "the",
    "agent",
    "reads",
    "a",
    "file",
    "and",
    "runs",
    "its",
    "tests",
    "before",
    "it",
    "edits",
    "the",
    "code",
    "again",
    "while",
    "every",
    "token",
    "is",
    "counted",
    "each",
    "prompt",
    "stays",
    "warm",
    "in",
    "cache",
    "so",
    "that",
    "no",
    "budget",
    "ever",
    "gets",
    "spent",
    "twice",
    "by",
    "mistake",
    "here",
]


class Finish(StrEnum):
    STOP = "stop"
    TOOL = "tool"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice. Each of `tokens` is streamed as one event; of a tool call they are its arguments."""

    tokens: tuple[str, ...]
    finish: Finish
    tool: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.tokens)


def answers(ask: Ask, digest: bytes) -> tuple[Answer, ...]:
    """The `n` answers to a prompt whose last block has this digest."""
    return tuple(_limited(_answer(ask, digest + bytes([i % 256])), ask.max_output) for i in range(ask.n))


def _limited(answer: Answer, max_output: int | None) -> Answer:
    limit = MAX_OUTPUT_TOKENS if max_output is None else min(max_output, MAX_OUTPUT_TOKENS)
    if len(answer.tokens) <= limit:
        return answer
    return Answer(answer.tokens[:limit], Finish.LENGTH, answer.tool)


def _answer(ask: Ask, seed: bytes) -> Answer:
    wishes = _directives(ask)
    call = _tool_call(ask, wishes.get("tools"))
    if call:
        tool, command = call
        return Answer(tuple(pieces(compact(arguments(tool.schema, command)))), Finish.TOOL, tool.name)
    if ask.schema is not None:
        return Answer(tuple(pieces(compact(minimal(ask.schema)))), Finish.STOP)
    if _wants_end_marker(ask):
        text = f"[demo] All done.\n\n```mswea_bash_command\necho {END_MARKER}\n```\n"
        return Answer(tuple(pieces(text)), Finish.STOP)
    length = wishes.get("output", 24 + seed[0] % 40)
    return Answer(_prose(seed, length), Finish.STOP)


def _directives(ask: Ask) -> dict[str, int]:
    found: dict[str, int] = {}
    for text in ask.instructions():
        if "demo:" in text:
            found.update({m[1]: int(m[2]) for m in _DIRECTIVE.finditer(text)})
    return found


def _wants_end_marker(ask: Ask) -> bool:
    return any(END_MARKER in text for text in ask.instructions())


def _tool_call(ask: Ask, rounds: int | None) -> tuple[Tool, str] | None:
    """The tool to call now and the command for it, or None to answer in text."""
    if not ask.tools or ask.tool_choice == "none":
        return None
    named = next((t for t in ask.tools if t.name == ask.tool_choice), None)
    if named:
        return named, "echo hi"
    done = ask.tool_results
    if rounds is not None and done < rounds:
        return ask.tools[done % len(ask.tools)], f"echo step {done + 1}"
    tool = _shell_like(ask.tools) or ask.tools[0]
    if rounds is None and done < 1:
        return tool, "echo hi"
    # A few tries, not for ever: another agent's prompt may merely quote the marker.
    if takes_command(tool.schema) and _wants_end_marker(ask) and done < (rounds or 1) + 3:
        return tool, f"echo {END_MARKER}"
    return (tool, "echo hi") if ask.tool_choice == "required" else None


def _shell_like(tools: tuple[Tool, ...]) -> Tool | None:
    by_name = {tool.name: tool for tool in tools}
    named = next((by_name[name] for name in _SHELLS if name in by_name), None)
    return named or next((tool for tool in tools if takes_command(tool.schema)), None)


def _prose(seed: bytes, length: int) -> tuple[str, ...]:
    """Exactly `length` tokens of words (0 is 0)."""
    tokens = pieces("[demo]")
    for word in _words(seed):
        if len(tokens) >= length:
            break
        tokens += pieces(" " + word)
    return tuple(tokens[:length])


def _words(seed: bytes) -> Iterator[str]:
    while True:
        seed = hashlib.sha256(seed).digest()
        yield from (_WORDS[byte % len(_WORDS)] for byte in seed)
