"""A client without a library: what the tests of the demo provider send and read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from gateway.demo.provider import DemoProvider

PATHS = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}
#: the three generation dialects, each with a request that says the same
HELLO: dict[str, dict[str, Any]] = {
    "chat": {"model": "demo-fast", "messages": [{"role": "user", "content": "Say hello."}]},
    "responses": {"model": "demo-fast", "input": "Say hello."},
    "messages": {
        "model": "demo-large",
        "max_tokens": 500,
        "messages": [{"role": "user", "content": "Say hello."}],
    },
}
BASH_SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": {"name": "bash", "parameters": BASH_SCHEMA}}],
    "responses": [{"type": "function", "name": "bash", "parameters": BASH_SCHEMA}],
    "messages": [{"name": "bash", "input_schema": BASH_SCHEMA}],
}


def streamed(dialect: str, body: Mapping[str, Any]) -> dict[str, Any]:
    options = {"stream_options": {"include_usage": True}} if dialect == "chat" else {}
    return {**body, "stream": True, **options}


@dataclass(frozen=True, slots=True)
class Got:
    """`body` is decoded JSON, or None if it is not JSON; `events` are the data of a stream's events."""

    status: int
    headers: Mapping[str, str]
    raw: bytes
    cut: bool  # the connection broke before the body's end

    @property
    def body(self) -> Any:
        try:
            return json.loads(self.raw)
        except ValueError:
            return None

    @property
    def events(self) -> list[Any]:
        lines = self.raw.decode().splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [d if d == "[DONE]" else json.loads(d) for d in data]


class Talk:
    def __init__(self, provider: DemoProvider, session: aiohttp.ClientSession) -> None:
        self.provider = provider
        self._session = session

    async def post(
        self, path: str, body: object, *, key: str = "k1", headers: Mapping[str, str] | None = None
    ) -> Got:
        """POST to a path below /v1; the body is read as far as it comes."""
        url = self.provider.base_url + PATHS.get(path, path)
        sent = {"authorization": f"Bearer {key}", **(headers or {})}
        raw, cut = b"", False
        async with self._session.post(url, json=body, headers=sent) as response:
            try:
                async for piece in response.content.iter_any():
                    raw += piece
            except aiohttp.ClientError:
                cut = True
            return Got(response.status, {k.lower(): v for k, v in response.headers.items()}, raw, cut)

    async def get(self, path: str) -> Got:
        async with self._session.get(self.provider.root_url + path) as response:
            return Got(response.status, dict(response.headers), await response.read(), False)

    @property
    def session(self) -> aiohttp.ClientSession:
        return self._session


@asynccontextmanager
async def talking(provider: DemoProvider) -> AsyncIterator[Talk]:
    async with provider, aiohttp.ClientSession() as session:
        yield Talk(provider, session)


def token_events(dialect: str, events: list[Any]) -> list[str]:
    """The text of each event that carries output."""
    found: list[str] = []
    for event in events:
        if not isinstance(event, dict):
            continue
        if dialect == "chat":
            for choice in event.get("choices", []):
                delta = choice["delta"]
                calls = delta.get("tool_calls") or [{}]
                text = delta.get("content") or calls[0].get("function", {}).get("arguments")
                found += [text] if text else []
        elif dialect == "responses":
            found += [event["delta"]] if event["type"].endswith(".delta") else []
        elif event["type"] == "content_block_delta":
            found.append(event["delta"].get("text") or event["delta"]["partial_json"])
    return found


def final_usage(dialect: str, events: list[Any]) -> Any:
    """The usage that the stream reports at its end."""
    if dialect == "chat":
        return next(e["usage"] for e in reversed(events) if isinstance(e, dict) and e.get("usage"))
    if dialect == "responses":
        return events[-1]["response"]["usage"]
    return next(e["usage"] for e in reversed(events) if e["type"] == "message_delta")
