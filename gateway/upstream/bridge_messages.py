"""Anthropic messages requests as chat completion requests. Pure.

litellm's own adapter for this pair is not used (1.106.6, read 2026-11): it may answer `context_management` with
model calls of its own, sends OpenAI targets to the Responses API, and drops markers.
Key order of tool schemas and tool inputs is kept, because providers cache by the rendered bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gateway.upstream.bridge_chat import Target, Untranslatable

_EFFORT_OF_ANTHROPIC = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
#: They steer billing, tracing or the server's own editing; a provider of another dialect has no counterpart.
_HINTS = ("metadata", "service_tier", "context_management", "inference_geo", "speed", "diagnostics")
_KNOWN = frozenset(
    {
        "model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream",
        "temperature", "top_p", "top_k", "thinking", "output_config", "output_format", "cache_control",
    }
)  # fmt: skip


def chat_body(body: Mapping[str, Any], target: Target) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The chat request that asks the same, and the names of the parameters that were left out.

    Raises `Untranslatable` for what changes the answer and has no counterpart: server tools, MCP servers,
    containers, unknown content blocks.
    """
    dropped = [name for name in _HINTS if body.get(name) is not None]
    for name, value in body.items():
        if name not in _KNOWN and name not in _HINTS and value is not None:
            raise Untranslatable(f"'{name}' cannot be translated for provider '{target.provider}'", name)
    out: dict[str, Any] = {"messages": list(_messages(body, target))}
    for theirs, ours in (
        ("max_tokens", "max_tokens"),
        ("stop_sequences", "stop"),
        ("temperature", "temperature"),
    ):
        if body.get(theirs) is not None:
            out[ours] = body[theirs]
    if body.get("top_p") is not None:
        out["top_p"] = body["top_p"]
    if body.get("top_k") is not None:
        if "top_k" in target.supported or target.thinking_blocks:
            out["top_k"] = body["top_k"]
        else:
            dropped.append("top_k")
    if body.get("tools"):
        out["tools"] = [_tool(tool, i) for i, tool in enumerate(body["tools"])]
    if body.get("tool_choice"):
        out |= _tool_choice(body["tool_choice"])
    out |= _reasoning(body, target, dropped)
    config = body.get("output_config") or {}
    if form := config.get("format") or body.get("output_format"):
        out["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": form.get("schema") or {}, "strict": True},
        }
    return out, tuple(dropped)


def _reasoning(body: Mapping[str, Any], target: Target, dropped: list[str]) -> dict[str, Any]:
    thinking = body.get("thinking") or {}
    effort = (body.get("output_config") or {}).get("effort")
    if thinking.get("type") == "disabled" or not (thinking or effort):
        return {}
    if thinking and target.claude:
        return {"thinking": thinking}
    if thinking.get("type") == "adaptive" and not effort:
        return {}  # the model decides, which is what the others do by themselves
    if thinking.get("type") == "enabled" and "thinking" in target.supported:
        return {"thinking": {"type": "enabled", "budget_tokens": thinking.get("budget_tokens") or 1024}}
    if "reasoning_effort" in target.supported:
        return {
            "reasoning_effort": _EFFORT_OF_ANTHROPIC.get(str(effort))
            or _effort(thinking.get("budget_tokens"))
        }
    dropped.extend(
        name for name, given in (("thinking", thinking), ("output_config.effort", effort)) if given
    )
    return {}


def _effort(budget_tokens: Any) -> str:
    """The budgets that litellm gives to the same words, the other way round."""
    if not isinstance(budget_tokens, int):
        return "medium"
    return "low" if budget_tokens <= 1024 else "medium" if budget_tokens <= 4096 else "high"


# --- tools -----------------------------------------------------------------------------------------------


def _tool(tool: Mapping[str, Any], at: int) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom") or "input_schema" not in tool:
        raise Untranslatable(
            f"tool '{tool.get('name')}' of type '{tool.get('type')}' runs only at Anthropic", f"tools.{at}"
        )
    function: dict[str, Any] = {"name": tool.get("name")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    function["parameters"] = tool["input_schema"]
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function, **_marker(tool)}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    out: dict[str, Any] = {}
    if kind == "tool":
        out["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in ("auto", "any", "none"):
        out["tool_choice"] = "required" if kind == "any" else kind
    else:
        raise Untranslatable(f"tool_choice of type '{kind}' is unknown", "tool_choice")
    if choice.get("disable_parallel_tool_use"):
        out["parallel_tool_calls"] = False
    return out


def _marker(block: Mapping[str, Any]) -> dict[str, Any]:
    return {"cache_control": block["cache_control"]} if block.get("cache_control") else {}


# --- messages --------------------------------------------------------------------------------------------


def _messages(body: Mapping[str, Any], target: Target) -> Iterator[dict[str, Any]]:
    system = body.get("system")
    if system:
        yield {
            "role": "system",
            "content": system if isinstance(system, str) else _text_parts(system, "system"),
        }
    messages = body.get("messages") or []
    if body.get("cache_control"):
        messages = _mark_last(messages, body["cache_control"])
    for at, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        where = f"messages.{at}"
        if isinstance(content, str):
            yield {"role": role, "content": content}
        elif role == "user":
            yield from _user(content or [], where, target)
        elif role == "assistant":
            yield _assistant(content or [], where, target)
        elif role == "system":
            yield {"role": "system", "content": _text_parts(content or [], where)}
        else:
            raise Untranslatable(f"role '{role}' is unknown", f"{where}.role")


def _mark_last(messages: list[Any], marker: Any) -> list[Any]:
    """Automatic caching, a top-level `cache_control`, means a marker on the last block."""
    if not messages:
        return messages
    content = messages[-1].get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
    if not blocks or blocks[-1].get("cache_control"):
        return messages
    return [
        *messages[:-1],
        {**messages[-1], "content": [*blocks[:-1], {**blocks[-1], "cache_control": marker}]},
    ]


def _text_parts(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    parts = []
    for at, block in enumerate(blocks):
        if block.get("type") != "text":
            raise Untranslatable(
                f"content of type '{block.get('type')}' cannot be translated here", f"{where}.{at}"
            )
        parts.append({"type": "text", "text": block.get("text") or "", **_marker(block)})
    return parts


def _user(blocks: list[Any], where: str, target: Target) -> Iterator[dict[str, Any]]:
    """Tool results become tool messages and go first: chat wants them right after the calls."""
    parts: list[dict[str, Any]] = []
    for at, block in enumerate(blocks):
        if block.get("type") == "tool_result":
            message, images = _tool_result(block, f"{where}.content.{at}", target)
            parts += images
            yield message
    for at, block in enumerate(blocks):
        if block.get("type") != "tool_result":
            parts.append(_part(block, f"{where}.content.{at}"))
    if parts:
        yield {"role": "user", "content": parts}


def _tool_result(
    block: Mapping[str, Any], where: str, target: Target
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    content = block.get("content")
    inner = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    parts = [_part(b, where) for b in inner]
    if block.get("is_error"):
        # Chat has no flag for a failed call, so the text says it.
        first, rest = (
            (parts[0], parts[1:])
            if parts and parts[0]["type"] == "text"
            else ({"type": "text", "text": ""}, parts)
        )
        parts = [{**first, "text": f"[tool error]\n{first['text']}"}, *rest]
    images = [] if target.tool_images else [p for p in parts if p["type"] != "text"]
    kept = [p for p in parts if p not in images]
    marker = _marker(block)
    message: dict[str, Any] = {"role": "tool", "tool_call_id": block.get("tool_use_id") or ""}
    if len(kept) == 1 and kept[0]["type"] == "text" and not kept[0].get("cache_control") and not marker:
        message["content"] = kept[0]["text"]
    else:
        message["content"] = kept or [{"type": "text", "text": ""}]
        if marker:
            message["content"] = [*message["content"][:-1], {**message["content"][-1], **marker}]
    return message, images


def _part(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = block.get("type")
    source = block.get("source") or {}
    if kind == "text":
        return {"type": "text", "text": block.get("text") or "", **_marker(block)}
    if kind == "image" and source.get("type") in ("base64", "url"):
        return {"type": "image_url", "image_url": {"url": _url(source)}, **_marker(block)}
    if kind == "document" and source.get("type") == "text":
        return {"type": "text", "text": source.get("data") or "", **_marker(block)}
    if kind == "document" and source.get("type") == "base64":
        named = {"filename": block.get("title") or "document.pdf", "file_data": _url(source)}
        return {"type": "file", "file": named, **_marker(block)}
    raise Untranslatable(f"content of type '{kind}' cannot be translated", where)


def _url(source: Mapping[str, Any]) -> str:
    if source.get("type") == "url":
        return str(source.get("url"))
    return f"data:{source.get('media_type')};base64,{source.get('data')}"


def _assistant(blocks: list[Any], where: str, target: Target) -> dict[str, Any]:
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thinking: list[dict[str, Any]] = []
    for at, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "text":
            texts.append({"type": "text", "text": block.get("text") or "", **_marker(block)})
        elif kind == "tool_use":
            arguments = msgspec.json.encode(block.get("input") or {}).decode()
            calls.append(
                {
                    "id": block.get("id") or "",
                    "type": "function",
                    "function": {"name": block.get("name") or "", "arguments": arguments},
                    **_marker(block),
                }
            )
        elif kind in ("thinking", "redacted_thinking"):
            thinking.append(dict(block))
        else:
            raise Untranslatable(f"content of type '{kind}' cannot be translated", f"{where}.content.{at}")
    message: dict[str, Any] = {"role": "assistant", "content": _flat(texts)}
    if thinking and target.thinking_blocks:
        message["thinking_blocks"] = thinking
    if calls:
        message["tool_calls"] = calls
    return message


def _flat(texts: list[dict[str, Any]]) -> Any:
    if not texts:
        return None
    if len(texts) == 1 and "cache_control" not in texts[0]:
        return texts[0]["text"]
    return texts
