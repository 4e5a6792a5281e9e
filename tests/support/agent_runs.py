"""Agent runs as the requests that they are made of: captured from real clients, or recorded elsewhere."""

from __future__ import annotations

import json
from typing import Any

from gateway.core import dialects
from gateway.core.catalog import Operation
from gateway.core.dialects import Facts
from tests.support.material import SHARED, Captured

_OPERATIONS = {f"/v1{o.path}": o for o in Operation}


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def facts_of(request: Captured) -> Facts | None:
    """None for probes, lists of models, and APIs that are not served."""
    operation = _OPERATIONS.get(request.path)
    if operation is None or request.body is None:
        return None
    return dialects.read(operation, compact(request.body))


def recorded_runs() -> dict[str, tuple[Facts, ...]]:
    """The chat requests of each recorded run, in order; empty if the recordings are not there."""
    found = {}
    for path in sorted((SHARED / "traces").glob("*.json")):
        trace = json.loads(path.read_text())
        messages = trace["messages"]
        ends = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        found[path.stem] = tuple(chat(messages[:end], trace["tools"]) for end in ends)
    return found


def chat(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> Facts:
    body = {"model": "auto", "messages": messages, **({"tools": tools} if tools else {})}
    return dialects.read(Operation.CHAT, compact(body))
