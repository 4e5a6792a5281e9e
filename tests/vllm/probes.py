"""The same questions to any vLLM: what comes back, as shapes that two servers can be compared by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.vllm.shapes import events, shape

CITIES = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
FUNCTION = {"name": "get", "strict": True, "parameters": {**CITIES, "additionalProperties": False}}
FORCED = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required", "max_tokens": 60}
USAGE = {"stream_options": {"include_usage": True}}
#: More than any server of these tests takes (32,768 tokens).
TOO_LONG = "x " * 70_000


@dataclass(frozen=True, slots=True)
class Ask:
    path: str
    body: Mapping[str, Any] | None = None  # None: GET
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """`body` is a shape: of one document, of the events of a stream, or "" for none."""

    status: int
    content_type: str
    body: Any
    request_id: str  # as it came back, if the request brought one
    retry_after: str | None


def asks(model: str) -> dict[str, Ask]:
    chat, messages = "/v1/chat/completions", "/v1/messages"
    said = [{"role": "user", "content": "Say something."}]
    plain = {"model": model, "max_tokens": 5, "temperature": 0, "messages": said}
    streamed = {**plain, "stream": True}
    unknown, long = {**plain, "model": "nope"}, {**plain, "messages": [{"role": "user", "content": TOO_LONG}]}
    return {
        "health": Ask("/health"),
        "version": Ask("/version"),
        "models": Ask("/v1/models"),
        "tokenize text": Ask("/tokenize", {"model": model, "prompt": "Say something."}),
        "tokenize messages": Ask("/tokenize", {"model": model, "messages": said}),
        "chat": Ask(chat, plain),
        "chat with an id": Ask(chat, plain, {"x-request-id": "gw-123"}),
        "chat with salt, session and priority": Ask(
            chat, {**plain, "cache_salt": "s", "priority": 5}, {"x-session-id": "s1", "x-vllm-priority": "2"}
        ),
        "chat stream": Ask(chat, streamed),
        "chat stream with usage": Ask(chat, {**streamed, **USAGE}),
        "tool call": Ask(chat, {**plain, **FORCED}),
        "tool call stream": Ask(chat, {**streamed, **USAGE, **FORCED}),
        "messages": Ask(messages, plain),
        "messages stream": Ask(messages, streamed),
        "count tokens": Ask("/v1/messages/count_tokens", {"model": model, "messages": said}),
        "unknown model, chat": Ask(chat, unknown),
        "unknown model, messages": Ask(messages, unknown),
        "too long, chat": Ask(chat, long),
        "too long, chat stream": Ask(chat, {**long, "stream": True}),
        "too long, messages": Ask(messages, long),
    }


async def answers(url: str, model: str) -> dict[str, Answer]:
    """`url` is the root of the server, without /v1."""
    async with aiohttp.ClientSession(url) as http:
        return {name: await asked(http, ask) for name, ask in asks(model).items()}


async def asked(http: aiohttp.ClientSession, ask: Ask) -> Answer:
    method = "GET" if ask.body is None else "POST"
    async with http.request(method, ask.path, json=ask.body, headers=ask.headers) as answer:
        text = await answer.text()
        given = answer.headers.get("x-request-id", "")
        return Answer(
            answer.status,
            answer.content_type if text else "",
            _body(answer.content_type, text),
            given if given == ask.headers.get("x-request-id") else "",
            answer.headers.get("retry-after"),
        )


def _body(content_type: str, text: str) -> Any:
    if not text:
        return ""
    return events(text) if content_type == "text/event-stream" else shape(json.loads(text))
