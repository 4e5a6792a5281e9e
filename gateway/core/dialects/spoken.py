"""Answers that the gateway gives by itself: a text in the caller's dialect, as if a model had said it.

Shapes as the vendors' SDKs and agents read them (OpenAI chat and responses, Anthropic messages; 2026-11). They use
nothing: all counts are 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from gateway.core.catalog import Operation

SPEAKABLE = frozenset({Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES})
_Json = dict[str, Any]


class Spoken(NamedTuple):
    """`number` makes its ids: 32 hex digits."""

    operation: Operation
    model: str  # as the client asked for it
    number: str
    created_s: int
    text: str


def body(said: Spoken, n: int = 1) -> bytes:
    """The whole answer."""
    return msgspec.json.encode(_whole(said, n))


def events(said: Spoken, n: int = 1, include_usage: bool = False) -> bytes:
    """The whole stream, from its first event to the one that ends it."""
    if said.operation is Operation.CHAT:
        return b"".join(_chat_events(said, n, include_usage))
    made = _responses_events(said) if said.operation is Operation.RESPONSES else _messages_events(said)
    return b"".join(_event(event["type"], event) for event in made)


def failed(said: Spoken, code: str) -> bytes:
    """A responses stream that fails with a message. Codex shows it as it is, and asks once only, if the code is
    "invalid_prompt" (measured with 0.171.0).
    """
    whole = {
        **_response(said, "failed", []),
        "error": {"code": code, "message": said.text},
    }
    begun = {"type": "response.created", "sequence_number": 0, "response": _response(said, "in_progress", [])}
    ended = {"type": "response.failed", "sequence_number": 1, "response": whole}
    return _event("response.created", begun) + _event("response.failed", ended)


def _whole(said: Spoken, n: int) -> _Json:
    if said.operation is Operation.RESPONSES:
        return _response(said, "completed", [_item(said, "completed", [_part(said.text)])])
    if said.operation is Operation.MESSAGES:
        return {
            **_message(said),
            "content": [{"type": "text", "text": said.text}],
            "stop_reason": "end_turn",
        }
    message = {"role": "assistant", "content": said.text, "refusal": None}
    choices = [{"index": i, "message": message, "logprobs": None, "finish_reason": "stop"} for i in range(n)]
    return {**_completion(said, "chat.completion"), "choices": choices, "usage": _CHAT_USAGE}


# --- chat -------------------------------------------------------------------------------------------------

_CHAT_USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def _completion(said: Spoken, kind: str) -> _Json:
    return {"id": f"chatcmpl-{said.number}", "object": kind, "created": said.created_s, "model": said.model}


def _chat_events(said: Spoken, n: int, include_usage: bool) -> Iterator[bytes]:
    base = _completion(said, "chat.completion.chunk")
    for i in range(n):
        for delta, finish in (({"role": "assistant", "content": said.text}, None), ({}, "stop")):
            choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": finish}
            yield _event("", {**base, "choices": [choice]})
    if include_usage:
        yield _event("", {**base, "choices": [], "usage": _CHAT_USAGE})
    yield b"data: [DONE]\n\n"


# --- messages ---------------------------------------------------------------------------------------------


def _message(said: Spoken) -> _Json:
    return {
        "id": f"msg_{said.number}",
        "type": "message",
        "role": "assistant",
        "model": said.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def _messages_events(said: Spoken) -> Iterator[_Json]:
    yield {"type": "message_start", "message": _message(said)}
    yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    yield {
        "type": "content_block_delta",
        "index": 0,
        "delta": {"type": "text_delta", "text": said.text},
    }
    yield {"type": "content_block_stop", "index": 0}
    ended = {"stop_reason": "end_turn", "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": {"input_tokens": 0, "output_tokens": 0}}
    yield {"type": "message_stop"}


# --- responses --------------------------------------------------------------------------------------------


def _response(said: Spoken, status: str, output: list[_Json]) -> _Json:
    usage = {
        "input_tokens": 0,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 0,
    }
    return {
        "id": f"resp_{said.number}",
        "object": "response",
        "created_at": said.created_s,
        "status": status,
        "model": said.model,
        "output": output,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": False,
        "temperature": None,
        "tool_choice": "none",
        "tools": [],
        "top_p": None,
        "store": False,
        "usage": usage if status == "completed" else None,
    }


def _item(said: Spoken, status: str, content: list[_Json]) -> _Json:
    return {
        "id": f"msg_{said.number}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _part(text: str) -> _Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _responses_events(said: Spoken) -> Iterator[_Json]:
    at = {"item_id": f"msg_{said.number}", "output_index": 0, "content_index": 0}
    item = _item(said, "completed", [_part(said.text)])
    begun = _response(said, "in_progress", [])
    made: list[tuple[str, _Json]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        ("response.output_item.added", {"output_index": 0, "item": _item(said, "in_progress", [])}),
        ("response.content_part.added", {**at, "part": _part("")}),
        ("response.output_text.delta", {**at, "delta": said.text, "logprobs": []}),
        ("response.output_text.done", {**at, "text": said.text, "logprobs": []}),
        ("response.content_part.done", {**at, "part": _part(said.text)}),
        ("response.output_item.done", {"output_index": 0, "item": item}),
        ("response.completed", {"response": _response(said, "completed", [item])}),
    ]
    for number, (kind, fields) in enumerate(made):
        yield {"type": kind, "sequence_number": number, **fields}


def _event(name: str, said: _Json) -> bytes:
    head = b"event: %b\n" % name.encode() if name else b""
    return b"%bdata: %b\n\n" % (head, msgspec.json.encode(said))
