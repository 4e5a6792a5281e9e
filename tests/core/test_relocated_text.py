"""Whatever moves, the model reads what the client sent: played over random runs of one client, side by side."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.shaping import Level
from gateway.demo.prompt import BadRequest
from tests.support.conversations import several
from tests.support.played_cache import Played


@pytest.mark.parametrize("model", ["demo-large", "demo-small", "demo-fast"])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9))
def test_whatever_moves_the_model_reads_what_the_client_sent_and_last_what_its_lines_say_now(
    model: str, seed: int
) -> None:
    played = Played(model, Level.RELOCATE)
    for step in several(seed)[1]:
        played.now_s += step.pause_s
        try:
            played.send(step.operation, step.body, scope=("key", "client", f"run {step.run}"))
        except BadRequest:
            continue
        said, asked = _told(played.sent), _told(step.body)
        notes = [(at, text) for at, (_, text) in enumerate(said) if "As of now:" in text]
        # Every message is there, in its role and at its place; what is more are notes.
        rest = [(role, _NOTE.sub("", text)) for role, text in said if not _is_note(text)]
        assert rest[1:] == asked[1:]
        # The lines of the system prompt are the same but for the wording of those that may move.
        system_lines, asked_lines = rest[0][1].split("\n"), asked[0][1].split("\n")
        kept = [line for line in asked_lines if line not in step.lines]
        assert [line for line in system_lines if line in kept] == kept
        assert len(system_lines) == len(asked_lines)
        # And the last word on each is what it says now.
        for line in step.lines:
            subject = re.split(r"(?<=[a-z]:) |(?<=It is) ", line)[0]
            words = [w for _, text in notes for w in _words(text) if w.startswith(subject)]
            words = words or [w for w in system_lines if w.startswith(subject)]
            assert words[-1] == line, (step.run, line)


_NOTE = re.compile(r"(?:\n\n)?<system-reminder>\nAs of now:\n.*?\n</system-reminder>", re.DOTALL)


def _is_note(text: str) -> bool:
    return text.startswith("As of now:") or _NOTE.fullmatch(text) is not None


def _words(text: str) -> list[str]:
    return text[text.index("As of now:") :].replace("\n</system-reminder>", "").split("\n")[1:]


def _told(body: bytes) -> list[tuple[str, str]]:
    """Role and text of the system prompt and of each message, blocks one after the other."""
    request = json.loads(body)
    messages = request.get("messages") or request.get("input")
    found = [("system", _flat(request["system"]))] if "system" in request else []
    return found + [(m.get("role") or m["type"], _flat(m.get("content", m.get("output")))) for m in messages]


def _flat(content: Any) -> str:
    if isinstance(content, list):
        texts = [_flat(b.get("text", b.get("content", b.get("input")))) for b in content]
        return "".join(t if t.startswith("\n") else f"\n\n{t}" for t in texts).removeprefix("\n\n")
    return content if isinstance(content, str) else json.dumps(content)
