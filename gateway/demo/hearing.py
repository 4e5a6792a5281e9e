"""The demo agent's ears: answers of both dialects, plain or streamed, as one shape. No IO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.demo.script import Dialect, Heard


@dataclass(frozen=True, slots=True)
class Counted:
    """The usage that the answer reported; cache classes are disjoint from `input_uncached`."""

    input_uncached: int = 0
    cache_read: int = 0
    cache_write: int = 0
    output: int = 0

    @property
    def input_total(self) -> int:
        return self.input_uncached + self.cache_read + self.cache_write


def hear_plain(dialect: Dialect, body: Mapping[str, Any]) -> tuple[Heard, Counted]:
    """A whole answer's body."""
    usage = body.get("usage") or {}
    if dialect == "chat":
        message = body["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        if not calls:
            return Heard(message.get("content") or ""), counted(dialect, usage)
        function = calls[0]["function"]
        heard = Heard(message.get("content") or "", calls[0]["id"], function["name"], function["arguments"])
        return heard, counted(dialect, usage)
    text = "".join(block["text"] for block in body["content"] if block["type"] == "text")
    call = next((block for block in body["content"] if block["type"] == "tool_use"), None)
    if call is None:
        return Heard(text), counted(dialect, usage)
    arguments = msgspec.json.encode(call["input"]).decode()
    return Heard(text, call["id"], call["name"], arguments), counted(dialect, usage)


def counted(dialect: Dialect, usage: Mapping[str, Any]) -> Counted:
    if dialect == "messages":
        return Counted(
            usage.get("input_tokens") or 0,
            usage.get("cache_read_input_tokens") or 0,
            usage.get("cache_creation_input_tokens") or 0,
            usage.get("output_tokens") or 0,
        )
    details = usage.get("prompt_tokens_details") or {}
    read, write = details.get("cached_tokens") or 0, details.get("cache_write_tokens") or 0
    return Counted(
        (usage.get("prompt_tokens") or 0) - read - write, read, write, usage.get("completion_tokens") or 0
    )


@dataclass(slots=True)
class StreamEar:
    """Put an answer together from the `data:` lines of its stream. `done` after the last event of the dialect."""

    dialect: Dialect
    done: bool = False
    error: str = ""
    _text: list[str] = field(default_factory=list)
    _arguments: list[str] = field(default_factory=list)
    _tool_id: str = ""
    _tool_name: str = ""
    _usage: dict[str, Any] = field(default_factory=dict)

    def line(self, line: bytes) -> None:
        """One line of the stream, with or without its end."""
        data = line.strip()
        if not data.startswith(b"data:"):
            return
        data = data[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return
        event = msgspec.json.decode(data, type=dict[str, Any])
        if event.get("error"):
            self.error = str(event["error"].get("message") or "stream error")
        elif self.dialect == "chat":
            self._chat(event)
        else:
            self._messages(event)

    def result(self) -> tuple[Heard, Counted]:
        heard = Heard("".join(self._text), self._tool_id, self._tool_name, "".join(self._arguments))
        return heard, counted(self.dialect, self._usage)

    def _chat(self, event: Mapping[str, Any]) -> None:
        self._usage.update(event.get("usage") or {})
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            self._text.append(delta.get("content") or "")
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                self._tool_id = call.get("id") or self._tool_id
                self._tool_name = function.get("name") or self._tool_name
                self._arguments.append(function.get("arguments") or "")

    def _messages(self, event: Mapping[str, Any]) -> None:
        kind = event.get("type")
        if kind == "message_start":
            self._usage.update(event["message"].get("usage") or {})
        elif kind == "content_block_start" and event["content_block"]["type"] == "tool_use":
            self._tool_id, self._tool_name = event["content_block"]["id"], event["content_block"]["name"]
        elif kind == "content_block_delta":
            self._text.append(event["delta"].get("text") or "")
            self._arguments.append(event["delta"].get("partial_json") or "")
        elif kind == "message_delta":
            self._usage.update(event.get("usage") or {})
        elif kind == "message_stop":
            self.done = True
