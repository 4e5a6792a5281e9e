"""Reads the four generation dialects into an `Ask`. Unknown fields are accepted; wrong known ones are a `BadRequest`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from gateway.core.catalog import Operation
from gateway.demo.models import DemoModel
from gateway.demo.prompt import (
    FILE_TOKENS,
    IMAGE_TOKENS,
    LOW_IMAGE_TOKENS,
    Ask,
    BadRequest,
    Kind,
    Part,
    Section,
    Tool,
    Ttl,
)

Body = Mapping[str, Any]


def read_ask(operation: Operation, body: Body, model: DemoModel) -> Ask:
    """The request in `body`. Raises BadRequest."""
    ask = _READERS[operation](body, model)
    if model.context_tokens and ask.max_output is not None and ask.max_output > model.context_tokens:
        raise BadRequest(f"max output tokens cannot exceed {model.context_tokens}", "max_tokens")
    return ask


@dataclass(slots=True)
class _Parts:
    """Collects parts; `message()` opens the next message."""

    parts: list[Part] = field(default_factory=list)
    number: int = -1
    section: Section = Section.TOOLS
    role: str = "tools"

    def message(self, section: Section, role: str) -> None:
        self.number += 1
        self.section, self.role = section, role

    def add(
        self,
        kind: Kind,
        text: str,
        *,
        tokens: int | None = None,
        marker: Ttl | None = None,
        openai_marker: bool = False,
    ) -> None:
        if marker and kind is Kind.THINKING:
            raise BadRequest("cache_control cannot be set on thinking blocks", "cache_control")
        if marker and not text:
            raise BadRequest("cache_control cannot be set for empty text blocks", "cache_control")
        self.parts.append(
            Part(self.section, self.number, self.role, kind, text, tokens, marker, openai_marker)
        )

    def mark_last(self, marker: Ttl | None) -> None:
        """A marker on a whole message belongs to its last part."""
        if marker and self.parts and self.parts[-1].message == self.number:
            self.parts[-1] = replace(self.parts[-1], marker=marker)


# --- one field at a time -------------------------------------------------------------------------------


def _marker(holder: Body) -> Ttl | None:
    control = holder.get("cache_control")
    if control is None:
        return None
    if not isinstance(control, Mapping) or control.get("type") != "ephemeral":
        raise BadRequest("cache_control.type must be 'ephemeral'", "cache_control")
    try:
        return Ttl(control.get("ttl") or "5m")
    except ValueError:
        raise BadRequest("cache_control.ttl must be '5m' or '1h'", "cache_control") from None


def _whole(body: Body, *names: str, least: int = 0) -> int | None:
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if type(value) is not int or value < least:
            raise BadRequest(f"{name} must be an integer of at least {least}", name)
        return value
    return None


def _items(body: Body, name: str, *, required: bool = False) -> list[Body]:
    value = body.get(name)
    if value is None and not required:
        return []
    if not isinstance(value, list) or (required and not value):
        raise BadRequest(f"{name} must be a {'non-empty ' if required else ''}list", name)
    for item in value:
        if not isinstance(item, Mapping):
            raise BadRequest(f"every element of {name} must be an object", name)
    return value


def _mapping(body: Body, name: str) -> Body:
    value = body.get(name)
    return value if isinstance(value, Mapping) else {}


def compact(value: object) -> str:
    """JSON without spaces, key order kept: how structured content is rendered into the prompt."""
    return msgspec.json.encode(value).decode()


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    return "" if value is None else compact(value)


def _choice(value: object) -> str:
    """tool_choice of any dialect as auto | none | required | a tool's name."""
    if isinstance(value, str):
        return {"any": "required"}.get(value, value)
    if not isinstance(value, Mapping):
        return "auto"
    if isinstance(value.get("function"), Mapping):
        return str(value["function"].get("name"))
    if value.get("name"):
        return str(value["name"])
    return {"any": "required", "none": "none", "required": "required"}.get(str(value.get("type")), "auto")


def _media(out: _Parts, part: Body, marker: Ttl | None, openai_marker: bool = False) -> None:
    """An image or a file, in any dialect's spelling."""
    image = "image" in str(part.get("type"))
    detail = part.get("detail") or _mapping(part, "image_url").get("detail")
    tokens = FILE_TOKENS if not image else LOW_IMAGE_TOKENS if detail == "low" else IMAGE_TOKENS
    source = {k: v for k, v in part.items() if k not in ("cache_control", "prompt_cache_breakpoint")}
    out.add(Kind.MEDIA, compact(source), tokens=tokens, marker=marker, openai_marker=openai_marker)


def _result_text(out: _Parts, content: object, marker: Ttl | None) -> None:
    """A tool's result is one block, whatever is in it; images inside count on their own."""
    breakpoint_in = False
    if isinstance(content, list):
        texts = [_text(p.get("text")) for p in content if isinstance(p, Mapping) and "text" in p]
        # openai 2.54.0: blocks of text inside of a tool's result take a breakpoint as those of a message do
        breakpoint_in = any(isinstance(p, Mapping) and p.get("prompt_cache_breakpoint") for p in content)
        pictures = [p for p in content if isinstance(p, Mapping) and "image" in str(p.get("type"))]
        for picture in pictures:
            _media(out, picture, None)
        content = "\n".join(texts)
    # The marker may sit on an empty result: the block around it is not empty.
    out.add(Kind.TOOL_RESULT, _text(content) or " ", marker=marker, openai_marker=breakpoint_in)


def _format_schema(form: object) -> Body | None:
    """The JSON schema that the answer must satisfy, from any dialect's `format` object."""
    if not isinstance(form, Mapping):
        return None
    if form.get("type") == "json_object":
        return {"type": "object", "properties": {"demo": {"const": True}}, "required": ["demo"]}
    if form.get("type") != "json_schema":
        return None
    wrapped = form.get("json_schema")
    schema = wrapped.get("schema") if isinstance(wrapped, Mapping) else form.get("schema")
    if not isinstance(schema, Mapping):
        raise BadRequest("the response format needs a JSON schema object", "response_format")
    return schema


def _openai_root(body: Body, form: object, effort: object, verbosity: object) -> str:
    return compact([body.get("parallel_tool_calls"), form, effort, verbosity, body.get("prompt_cache_key")])


def _cache_key(body: Body) -> str:
    return _text(body.get("prompt_cache_key"))


def _implicit(body: Body) -> bool:
    return _mapping(body, "prompt_cache_options").get("mode") != "explicit"


def _add_tool(out: _Parts, tools: list[Tool], spec: Body, schema_key: str, marker: Ttl | None) -> None:
    """One tool definition: a block of its own, and callable if it has a name and a schema."""
    name = spec.get("name")
    schema = spec.get(schema_key)
    # Anthropic's plain tools may say type "custom"; OpenAI's custom tools take free text, which is not played.
    kind = spec.get("type")
    callable_ = kind in (None, "function") or (kind == "custom" and isinstance(schema, Mapping))
    if callable_ and isinstance(name, str) and (schema is None or isinstance(schema, Mapping)):
        tools.append(Tool(name, schema or {"type": "object", "properties": {}}))
    rendered = {k: v for k, v in spec.items() if k != "cache_control"}
    out.add(Kind.TOOL, compact(rendered), marker=marker)


# --- chat completions ------------------------------------------------------------------------------------


def _read_chat(body: Body, model: DemoModel) -> Ask:
    out, tools = _Parts(), list[Tool]()
    messages = _items(body, "messages", required=True)
    specs = _items(body, "tools")
    if specs:
        out.message(Section.TOOLS, "tools")
    for spec in specs:
        function = _mapping(spec, "function") or spec
        _add_tool(out, tools, function, "parameters", _marker(spec) or _marker(function))
    leading = True
    for message in messages:
        role = message.get("role")
        if role not in ("system", "developer", "user", "assistant", "tool", "function"):
            raise BadRequest(f"messages[].role must not be {role!r}", "messages")
        leading = leading and role in ("system", "developer")
        out.message(Section.SYSTEM if leading else Section.MESSAGES, str(role))
        _chat_message(out, message)
        out.mark_last(_marker(message))
    form = body.get("response_format")
    return Ask(
        Operation.CHAT,
        model,
        str(body["model"]),
        tuple(out.parts),
        tuple(tools),
        tool_choice=_choice(body.get("tool_choice")),
        stream=bool(body.get("stream")),
        include_usage=bool(_mapping(body, "stream_options").get("include_usage")),
        max_output=_whole(body, "max_completion_tokens", "max_tokens", least=1),
        n=_whole(body, "n", least=1) or 1,
        schema=_format_schema(form),
        cache_key=_cache_key(body),
        implicit_breakpoint=_implicit(body),
        automatic=_marker(body),
        root_settings=_openai_root(body, form, body.get("reasoning_effort"), body.get("verbosity")),
        message_settings=compact([body.get("tool_choice"), body.get("thinking")]),
    )


def _chat_message(out: _Parts, message: Body) -> None:
    content = message.get("content")
    if message["role"] in ("tool", "function"):
        parts = content if isinstance(content, list) else []
        marked = next((m for p in parts if isinstance(p, Mapping) and (m := _marker(p))), None)
        _result_text(out, content, marked)
        return
    if isinstance(message.get("reasoning_content"), str):
        out.add(Kind.THINKING, message["reasoning_content"])
    if isinstance(content, str):
        out.add(Kind.TEXT, content)
    elif isinstance(content, list):
        for part in content:
            _content_part(out, part)
    elif content is not None:
        raise BadRequest("messages[].content must be a string or a list of parts", "messages")
    for call in _items(message, "tool_calls"):
        function = _mapping(call, "function") or _mapping(call, "custom")
        arguments = function.get("arguments", function.get("input"))
        out.add(Kind.TOOL_CALL, f"{function.get('name')}\n{_text(arguments)}", marker=_marker(call))


def _content_part(out: _Parts, part: object) -> None:
    """A content part of chat or responses."""
    if not isinstance(part, Mapping):
        raise BadRequest("every content part must be an object", "content")
    marker, openai_marker = _marker(part), part.get("prompt_cache_breakpoint") is not None
    if "text" in part or "refusal" in part:
        text = _text(part.get("text", part.get("refusal")))
        out.add(Kind.TEXT, text, marker=marker, openai_marker=openai_marker)
    else:
        _media(out, part, marker, openai_marker)


# --- responses -------------------------------------------------------------------------------------------


def _read_responses(body: Body, model: DemoModel) -> Ask:
    if body.get("previous_response_id") or body.get("conversation"):
        raise BadRequest("the demo provider keeps no responses: send the whole input", "previous_response_id")
    out, tools = _Parts(), list[Tool]()
    specs = _items(body, "tools")
    if specs:
        out.message(Section.TOOLS, "tools")
    for spec in specs:
        _add_tool(out, tools, spec, "parameters", _marker(spec))
    if body.get("instructions"):
        out.message(Section.SYSTEM, "system")
        out.add(Kind.TEXT, _text(body["instructions"]))
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    leading = True
    for item in _items({"input": items}, "input", required=True):
        leading = leading and item.get("role") in ("system", "developer")
        _responses_item(out, item, Section.SYSTEM if leading else Section.MESSAGES)
    form = _mapping(body, "text").get("format")
    verbosity = _mapping(body, "text").get("verbosity")
    effort = _mapping(body, "reasoning").get("effort")
    return Ask(
        Operation.RESPONSES,
        model,
        str(body["model"]),
        tuple(out.parts),
        tuple(tools),
        tool_choice=_choice(body.get("tool_choice")),
        stream=bool(body.get("stream")),
        max_output=_whole(body, "max_output_tokens", least=1),
        schema=_format_schema(form),
        cache_key=_cache_key(body),
        implicit_breakpoint=_implicit(body),
        automatic=_marker(body),
        root_settings=_openai_root(body, form, effort, verbosity),
        message_settings=compact([body.get("tool_choice"), effort]),
    )


def _responses_item(out: _Parts, item: Body, section: Section) -> None:
    kind = str(item.get("type") or "message")
    if kind == "message":
        out.message(section, str(item.get("role") or "user"))
        content = item.get("content")
        for part in (
            content if isinstance(content, list) else [{"type": "input_text", "text": _text(content)}]
        ):
            _content_part(out, part)
    elif kind.endswith("_output"):
        out.message(Section.MESSAGES, "tool")
        _result_text(out, item.get("output"), _marker(item))
    elif kind.endswith("_call"):
        out.message(Section.MESSAGES, "assistant")
        arguments = item.get("arguments", item.get("input", item.get("action")))
        out.add(Kind.TOOL_CALL, f"{item.get('name')}\n{_text(arguments)}")
    else:
        # Reasoning and whatever comes later: what it says counts, its id does not.
        out.message(Section.MESSAGES, "assistant")
        out.add(Kind.THINKING, compact({k: v for k, v in item.items() if k not in ("id", "status")}))


# --- messages --------------------------------------------------------------------------------------------


def _read_messages(body: Body, model: DemoModel) -> Ask:
    ask = _read_count_tokens(body, model)
    limit = _whole(body, "max_tokens")
    if limit is None:
        raise BadRequest("max_tokens: Field required", "max_tokens")
    return replace(ask, operation=Operation.MESSAGES, max_output=limit)


def _read_count_tokens(body: Body, model: DemoModel) -> Ask:
    out, tools = _Parts(), list[Tool]()
    messages = _items(body, "messages", required=True)
    specs = _items(body, "tools")
    if specs:
        out.message(Section.TOOLS, "tools")
    for spec in specs:
        _add_tool(out, tools, spec, "input_schema", _marker(spec))
    system = body.get("system")
    if isinstance(system, str):
        system = [{"type": "text", "text": system}]
    if system:
        out.message(Section.SYSTEM, "system")
        for block in _items({"system": system}, "system"):
            out.add(Kind.TEXT, _text(block.get("text")), marker=_marker(block))
    for message in messages:
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise BadRequest(f"messages[].role must not be {role!r}", "messages")
        out.message(Section.MESSAGES, role)
        content = message.get("content")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        for block in _items({"content": content}, "content"):
            _messages_block(out, block)
    output = _mapping(body, "output_config")
    form = output.get("format") or body.get("output_format")
    thinking = body.get("thinking")
    return Ask(
        Operation.COUNT_TOKENS,
        model,
        str(body["model"]),
        tuple(out.parts),
        tuple(tools),
        tool_choice=_choice(body.get("tool_choice")),
        stream=bool(body.get("stream")),
        schema=_format_schema(form),
        automatic=_marker(body),
        root_settings=_openai_root(body, form, output.get("effort"), None),
        system_settings=_text(body.get("speed")),
        message_settings=compact([body.get("tool_choice"), thinking]),
    )


def _messages_block(out: _Parts, block: Body) -> None:
    kind, marker = str(block.get("type")), _marker(block)
    if kind == "text":
        out.add(Kind.TEXT, _text(block.get("text")), marker=marker)
    elif kind.endswith("tool_use"):
        out.add(Kind.TOOL_CALL, f"{block.get('name')}\n{compact(block.get('input'))}", marker=marker)
    elif kind.endswith("tool_result"):
        _result_text(out, block.get("content"), marker)
    elif kind in ("thinking", "redacted_thinking"):
        out.add(Kind.THINKING, _text(block.get("thinking") or block.get("data")), marker=marker)
    else:
        _media(out, block, marker)


_READERS: Mapping[Operation, Callable[[Body, DemoModel], Ask]] = {
    Operation.CHAT: _read_chat,
    Operation.RESPONSES: _read_responses,
    Operation.MESSAGES: _read_messages,
    Operation.COUNT_TOKENS: _read_count_tokens,
}
