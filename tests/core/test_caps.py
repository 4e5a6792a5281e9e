"""A rule lowers what a request asks of a model's thinking, in its own dialect, and never raises it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core import dialects
from gateway.core.catalog import Operation
from gateway.core.dialects import Edits
from gateway.core.dialects.caps import cap_edits

CHAT, RESPONSES, MESSAGES = Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES
SAID: dict[Operation, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 64_000},
}


def capped(operation: Operation, asked: dict[str, Any], effort: str) -> dict[str, Any]:
    """What of the request is another than it was."""
    body = json.dumps({"model": "m", **SAID[operation], **asked}).encode()
    facts = dialects.read(operation, body)
    splices, members = cap_edits(facts, body, None, effort)
    left = json.loads(b"".join(dialects.render(facts, body, Edits(splices=splices, members=members))))
    before = json.loads(body)
    return {name: value for name, value in left.items() if before.get(name) != value}


@pytest.mark.parametrize(
    ("operation", "asked", "effort", "changed"),
    [
        (CHAT, {}, "low", {"reasoning_effort": "low"}),
        (CHAT, {"reasoning_effort": "high"}, "low", {"reasoning_effort": "low"}),
        (CHAT, {"reasoning_effort": "minimal"}, "low", {}),
        (RESPONSES, {}, "low", {"reasoning": {"effort": "low"}}),
        (RESPONSES, {"reasoning": None}, "low", {"reasoning": {"effort": "low"}}),
        (
            RESPONSES,
            {"reasoning": {"summary": "auto", "effort": "high"}},
            "low",
            {"reasoning": {"summary": "auto", "effort": "low"}},
        ),
        (
            RESPONSES,
            {"reasoning": {"summary": "auto"}},
            "low",
            {"reasoning": {"summary": "auto", "effort": "low"}},
        ),
        (RESPONSES, {"reasoning": {}}, "low", {"reasoning": {"effort": "low"}}),
        (RESPONSES, {"reasoning": {"effort": "low"}}, "medium", {}),
        (MESSAGES, {}, "low", {}),
        (MESSAGES, {"thinking": {"type": "adaptive"}}, "low", {}),
        (
            MESSAGES,
            {"output_config": {"effort": "max", "format": {"type": "json_schema"}}},
            "medium",
            {"output_config": {"effort": "medium", "format": {"type": "json_schema"}}},
        ),
        (MESSAGES, {"output_config": {"effort": "high"}}, "none", {"output_config": {"effort": "low"}}),
        (MESSAGES, {"output_config": {"effort": "low"}}, "minimal", {}),
        (MESSAGES, {"output_config": {"effort": "low"}}, "high", {}),
        (
            MESSAGES,
            {"thinking": {"type": "enabled", "budget_tokens": 32_000}},
            "medium",
            {"thinking": {"type": "enabled", "budget_tokens": 4_096}},
        ),
        (
            MESSAGES,
            {"thinking": {"type": "enabled", "budget_tokens": 32_000}},
            "none",
            {"thinking": {"type": "enabled", "budget_tokens": 1_024}},
        ),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2_000}}, "medium", {}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 32_000}}, "high", {}),
        (MESSAGES, {"thinking": {"type": "disabled"}}, "low", {}),
    ],
)
def test_an_effort_is_only_lowered(
    operation: Operation, asked: dict[str, Any], effort: str, changed: dict[str, Any]
) -> None:
    assert capped(operation, asked, effort) == changed
