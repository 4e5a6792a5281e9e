"""Chat completions as Anthropic messages answers, whole or streamed. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gateway.core import bounds

_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "function_call": "tool_use",
         "content_filter": "refusal"}  # fmt: skip


def message(chat: Mapping[str, Any], input_bytes: int) -> dict[str, Any]:
    """The first choice of a chat completion as a message; `input_bytes` of request matter if no usage was told."""
    choice = (chat.get("choices") or [{}])[0]
    said = choice.get("message") or {}
    content = _thinking(said)
    text = said.get("content") or said.get("refusal")
    if text:
        content.append({"type": "text", "text": text})
    content += [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": tool_input(call["function"]["arguments"]),
        }
        for call in said.get("tool_calls") or ()
    ]
    return {
        "id": message_id(chat.get("id")),
        "type": "message",
        "role": "assistant",
        "model": chat.get("model") or "",
        "content": content,
        "stop_reason": stop_reason(choice.get("finish_reason")),
        "stop_sequence": None,
        "usage": usage(chat["usage"])
        if chat.get("usage")
        else estimated_usage(input_bytes, weight(content), 1),
    }


def _thinking(said: Mapping[str, Any]) -> list[dict[str, Any]]:
    if said.get("thinking_blocks"):
        # Gemini's blocks come without a signature, which Anthropic clients expect to find.
        return [
            {"signature": "", **block} if block.get("type") == "thinking" else dict(block)
            for block in said["thinking_blocks"]
        ]
    if said.get("reasoning_content"):
        return [{"type": "thinking", "thinking": said["reasoning_content"], "signature": ""}]
    return []


def tool_input(arguments: str) -> Any:
    """Arguments as an object, keys in the model's order; text that is not an object is kept under one name."""
    if not arguments.strip():
        return {}
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        value = None
    return value if isinstance(value, dict) else {"invalid_arguments": arguments}


def message_id(chat_id: Any) -> str:
    told = str(chat_id or "unknown")
    return told if told.startswith("msg_") else f"msg_{told.removeprefix('chatcmpl-')}"


def stop_reason(finish: Any) -> str:
    return _STOP.get(str(finish), "end_turn")


def usage(chat: Mapping[str, Any]) -> dict[str, Any]:
    """Anthropic counts cached and written tokens beside `input_tokens`, chat inside `prompt_tokens`."""
    details = chat.get("prompt_tokens_details") or {}
    read = details.get("cached_tokens") or 0
    written = details.get("cache_write_tokens") or 0
    out: dict[str, Any] = {
        "input_tokens": max(0, (chat.get("prompt_tokens") or 0) - read - written),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "output_tokens": chat.get("completion_tokens") or 0,
    }
    if split := details.get("cache_creation_token_details"):
        out["cache_creation"] = split
    if reasoning := (chat.get("completion_tokens_details") or {}).get("reasoning_tokens"):
        out["output_tokens_details"] = {"thinking_tokens": reasoning}
    return out


def estimated_usage(input_bytes: int, output_bytes: int, output_events: int) -> dict[str, Any]:
    """For a provider that told none. Messages must have a usage, and zeros in it would make the request free."""
    return {
        "input_tokens": bounds.estimate_input_tokens(input_bytes),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": bounds.estimate_output_tokens(output_bytes, output_events),
        "estimated": True,
    }


def weight(value: Any) -> int:
    """UTF-8 bytes of all strings in `value`."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, Mapping):
        value = list(value.values())
    return sum(map(weight, value)) if isinstance(value, list) else 0


class MessageEvents:
    """Chat chunks in, Anthropic stream events out; one content block is open at a time.

    Anthropic's blocks follow one another, chat's parallel tool calls may interleave. The first call of a group
    streams as it comes; the others wait for its end, so that no argument lands in another call's block.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._started = False
        self._index = -1
        self._open = ""  # type of the open block
        self._tool = -1  # chat index of the open tool block
        self._waiting: dict[int, dict[str, str]] = {}
        self._sealed: set[int] = set()

    def feed(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Raises `ValueError` when a tool call goes on after its block had to be closed."""
        events = self._start(chunk)
        choice = next((c for c in chunk["choices"] if c["index"] == 0), None)
        if choice is None:
            return events
        delta = choice["delta"]
        events += self._thinking(delta)
        text = delta.get("content") or delta.get("refusal")
        if text:
            events += self._block("text", {"type": "text", "text": ""})
            events.append(self._delta({"type": "text_delta", "text": text}))
        for call in delta.get("tool_calls") or ():
            events += self._call(call)
        return events

    def end(self, finish: Any, told: Mapping[str, Any]) -> list[dict[str, Any]]:
        """`told` is the final usage, in the shape of messages."""
        return [
            *self._start({}),
            *self._close(),
            {
                "type": "message_delta",
                "delta": {"stop_reason": stop_reason(finish), "stop_sequence": None},
                "usage": told,
            },
            {"type": "message_stop"},
        ]

    def _start(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        if self._started:
            return []
        self._started = True
        started: dict[str, Any] = {
            "id": message_id(chunk.get("id")),
            "type": "message",
            "role": "assistant",
            "model": chunk.get("model") or self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            # Chat tells its usage at the end only; message_delta repeats all counts then.
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        return [{"type": "message_start", "message": started}]

    def _thinking(self, delta: Mapping[str, Any]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        blocks = delta.get("thinking_blocks") or ()
        for block in blocks:
            if block.get("type") == "redacted_thinking":
                events += self._close()
                events += self._block("redacted_thinking", dict(block))
                continue
            events += self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            if block.get("thinking"):
                events.append(self._delta({"type": "thinking_delta", "thinking": block["thinking"]}))
            if block.get("signature"):
                events.append(self._delta({"type": "signature_delta", "signature": block["signature"]}))
        if not blocks and delta.get("reasoning_content"):
            events += self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta({"type": "thinking_delta", "thinking": delta["reasoning_content"]}))
        return events

    def _call(self, call: Mapping[str, Any]) -> list[dict[str, Any]]:
        at, function = call["index"], call.get("function") or {}
        if at in self._sealed:
            raise ValueError("a tool call went on after other content had begun")
        if self._open == "tool_use" and at != self._tool:
            waiting = self._waiting.setdefault(at, {"id": "", "name": "", "arguments": ""})
            waiting["id"] = waiting["id"] or call.get("id") or ""
            waiting["name"] += function.get("name") or ""
            waiting["arguments"] += function.get("arguments") or ""
            return []
        events: list[dict[str, Any]] = []
        if self._open != "tool_use":
            events += self._close()
            events += self._begin_tool(at, call.get("id") or "", function.get("name") or "")
        if function.get("arguments"):
            events.append(self._delta({"type": "input_json_delta", "partial_json": function["arguments"]}))
        return events

    def _begin_tool(self, at: int, call_id: str, name: str) -> list[dict[str, Any]]:
        self._tool = at
        return self._block("tool_use", {"type": "tool_use", "id": call_id, "name": name, "input": {}})

    def _block(self, kind: str, opening: dict[str, Any]) -> list[dict[str, Any]]:
        if self._open == kind:
            return []
        events = self._close()
        self._index += 1
        self._open = kind
        return [*events, {"type": "content_block_start", "index": self._index, "content_block": opening}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> list[dict[str, Any]]:
        """End the open block and, after a tool call, give out the calls that waited for it."""
        if not self._open:
            return []
        events: list[dict[str, Any]] = [{"type": "content_block_stop", "index": self._index}]
        was_tool, self._open = self._open == "tool_use", ""
        if was_tool:
            self._sealed.add(self._tool)
            waiting, self._waiting = self._waiting, {}
            for at, call in sorted(waiting.items()):
                events += self._begin_tool(at, call["id"], call["name"])
                if call["arguments"]:
                    events.append(
                        self._delta({"type": "input_json_delta", "partial_json": call["arguments"]})
                    )
                events.append({"type": "content_block_stop", "index": self._index})
                self._open = ""
                self._sealed.add(at)
        return events


def sse(events: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(
        b"event: " + str(e["type"]).encode() + b"\ndata: " + msgspec.json.encode(e) + b"\n\n" for e in events
    )
