"""Bodies and stream events in each dialect's exact shape, with one output token per delta event."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.core.catalog import Operation
from gateway.demo.answers import Answer, Finish
from gateway.demo.bill import Tokens
from gateway.demo.faults import FaultKind
from gateway.demo.prompt import Ask

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """Everything that is said to the caller. `usage` may be a fault's lie; the bill does not come from here."""

    ask: Ask
    request_id: str
    created_s: int
    answers: tuple[Answer, ...]
    usage: Json | None  # in the dialect's shape

    @property
    def output(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)

    def suffix(self) -> str:
        return self.request_id.rsplit("-", 1)[-1].rsplit("_", 1)[-1]


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event."""

    body: Json | str
    name: str | None = None
    token: bool = False  # carries exactly one output token
    usage: bool = False  # carries the final usage

    def encode(self, eol: bytes = b"\n") -> bytes:
        data = self.body.encode() if isinstance(self.body, str) else msgspec.json.encode(self.body)
        head = b"event: " + self.name.encode() + eol if self.name else b""
        return head + b"data: " + data + eol + eol


# --- usage -------------------------------------------------------------------------------------------------


def usage_of(operation: Operation, tokens: Tokens, fault: FaultKind = FaultKind.OK) -> Json | None:
    """The usage object, or what a usage fault makes of it."""
    if fault is FaultKind.USAGE_MISSING:
        return None
    usage = _USAGE[operation](tokens)
    if fault is FaultKind.USAGE_NEGATIVE:
        return _each_count(usage, -1, 0)
    if fault is FaultKind.USAGE_HUGE:
        return _each_count(usage, 1, 10**12)
    return usage


def _each_count(usage: Json, factor: int, plus: int) -> Json:
    return {
        k: v * factor + plus
        if type(v) is int
        else _each_count(v, factor, plus)
        if isinstance(v, Mapping)
        else v
        for k, v in usage.items()
    }


def _cache_details(tokens: Tokens) -> dict[str, Any]:
    details: dict[str, Any] = {
        "cached_tokens": tokens.cache_read,
        "cache_write_tokens": tokens.cache_write_5m + tokens.cache_write_1h,
    }
    if tokens.cache_write_1h:
        # OpenAI has one write class; LiteLLM's field tells two apart when Anthropic rules are played here.
        details["cache_creation_token_details"] = _creation(tokens)
    return details


def _creation(tokens: Tokens) -> dict[str, int]:
    return {
        "ephemeral_5m_input_tokens": tokens.cache_write_5m,
        "ephemeral_1h_input_tokens": tokens.cache_write_1h,
    }


def _chat_usage(tokens: Tokens) -> Json:
    return {
        "prompt_tokens": tokens.input_total,
        "completion_tokens": tokens.output,
        "total_tokens": tokens.input_total + tokens.output,
        "prompt_tokens_details": {"audio_tokens": 0, **_cache_details(tokens)},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }


def _responses_usage(tokens: Tokens) -> Json:
    return {
        "input_tokens": tokens.input_total,
        "input_tokens_details": _cache_details(tokens),
        "output_tokens": tokens.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens.input_total + tokens.output,
    }


def _messages_usage(tokens: Tokens) -> Json:
    return {
        "input_tokens": tokens.input_uncached,
        "cache_creation_input_tokens": tokens.cache_write_5m + tokens.cache_write_1h,
        "cache_read_input_tokens": tokens.cache_read,
        "cache_creation": _creation(tokens),
        "output_tokens": tokens.output,
        "service_tier": "standard",
    }


def _embeddings_usage(tokens: Tokens) -> Json:
    return {"prompt_tokens": tokens.input_total, "total_tokens": tokens.input_total}


_USAGE = {
    Operation.CHAT: _chat_usage,
    Operation.RESPONSES: _responses_usage,
    Operation.MESSAGES: _messages_usage,
    Operation.EMBEDDINGS: _embeddings_usage,
}


# --- errors ------------------------------------------------------------------------------------------------

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


def error_of(
    operation: Operation,
    status: int,
    message: str,
    request_id: str,
    param: str | None = None,
    code: str | None = None,
) -> Json:
    if operation.anthropic:
        error = {"type": _ANTHROPIC_TYPES.get(status, "api_error"), "message": message}
        return {"type": "error", "error": error, "request_id": request_id}
    kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_event(operation: Operation, request_id: str) -> Event:
    """An error inside a stream that already began."""
    message = "[demo] injected stream error"
    if operation is Operation.RESPONSES:
        body = {
            "type": "error",
            "code": "server_error",
            "message": message,
            "param": None,
            "sequence_number": 0,
        }
        return Event(body, "error")
    status = 529 if operation.anthropic else 500
    body_of = error_of(operation, status, message, request_id, code="server_error")
    return Event(body_of, "error" if operation.anthropic else None)


# --- chat --------------------------------------------------------------------------------------------------

_CHAT_FINISH = {Finish.STOP: "stop", Finish.TOOL: "tool_calls", Finish.LENGTH: "length"}


def _chat_call(reply: Reply, i: int, answer: Answer, arguments: str) -> dict[str, Any]:
    call_id = f"call_{reply.suffix()}{i}"
    return {"id": call_id, "type": "function", "function": {"name": answer.tool, "arguments": arguments}}


def _chat_body(reply: Reply) -> Json:
    choices = []
    for i, answer in enumerate(reply.answers):
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        if answer.tool:
            message["tool_calls"] = [_chat_call(reply, i, answer, answer.text)]
        else:
            message["content"] = answer.text
        choices.append(
            {"index": i, "message": message, "logprobs": None, "finish_reason": _CHAT_FINISH[answer.finish]}
        )
    return {
        "id": reply.request_id,
        "object": "chat.completion",
        "created": reply.created_s,
        "model": reply.ask.model_name,
        "choices": choices,
        **_given("usage", reply.usage),
        "service_tier": "default",
        "system_fingerprint": "demo",
    }


def _given(name: str, value: object) -> dict[str, object]:
    return {} if value is None else {name: value}


def _chat_stream(reply: Reply) -> Iterator[Event]:
    base = {
        "id": reply.request_id,
        "object": "chat.completion.chunk",
        "created": reply.created_s,
        "model": reply.ask.model_name,
        "service_tier": "default",
        "system_fingerprint": "demo",
        **({"usage": None} if reply.ask.include_usage else {}),
    }

    def chunk(i: int, delta: Json, finish: str | None = None, *, token: bool = False) -> Event:
        choice = {"index": i, "delta": delta, "logprobs": None, "finish_reason": finish}
        return Event({**base, "choices": [choice]}, token=token)

    for i, answer in enumerate(reply.answers):
        if answer.tool:
            call = {"index": 0, **_chat_call(reply, i, answer, "")}
            yield chunk(i, {"role": "assistant", "content": None, "tool_calls": [call]})
        else:
            yield chunk(i, {"role": "assistant", "content": "", "refusal": None})
        for token in answer.tokens:
            part = (
                {"tool_calls": [{"index": 0, "function": {"arguments": token}}]}
                if answer.tool
                else {"content": token}
            )
            yield chunk(i, part, token=True)
        yield chunk(i, {}, _CHAT_FINISH[answer.finish])
    if reply.ask.include_usage and reply.usage is not None:
        yield Event({**base, "choices": [], "usage": reply.usage}, usage=True)
    yield Event("[DONE]")


# --- responses ---------------------------------------------------------------------------------------------


def _responses_item(reply: Reply, text: str, status: str) -> dict[str, Any]:
    answer = reply.answers[0]
    if answer.tool:
        return {
            "id": f"fc_{reply.suffix()}",
            "type": "function_call",
            "call_id": f"call_{reply.suffix()}0",
            "name": answer.tool,
            "arguments": text,
            "status": status,
        }
    content = [] if status == "in_progress" else [_output_text(text)]
    return {
        "id": f"msg_{reply.suffix()}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _responses_base(reply: Reply) -> dict[str, Any]:
    return {
        "id": reply.request_id,
        "object": "response",
        "created_at": reply.created_s,
        "status": "in_progress",
        "model": reply.ask.model_name,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "max_output_tokens": reply.ask.max_output,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
        "usage": None,
        "user": None,
    }


def _responses_body(reply: Reply) -> Json:
    answer = reply.answers[0]
    cut = answer.finish is Finish.LENGTH
    status = "incomplete" if cut else "completed"
    return {
        **_responses_base(reply),
        "status": status,
        "output": [_responses_item(reply, answer.text, status)],
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "usage": reply.usage,
    }


def _responses_stream(reply: Reply) -> Iterator[Event]:
    answer = reply.answers[0]
    number = -1

    def event(kind: str, *, token: bool = False, usage: bool = False, **fields: Any) -> Event:
        nonlocal number
        number += 1
        return Event({"type": kind, "sequence_number": number, **fields}, kind, token, usage)

    final = _responses_body(reply)
    item = final["output"][0]
    at = {"item_id": item["id"], "output_index": 0}
    yield event("response.created", response=_responses_base(reply))
    yield event("response.in_progress", response=_responses_base(reply))
    yield event("response.output_item.added", output_index=0, item=_responses_item(reply, "", "in_progress"))
    if answer.tool:
        for token in answer.tokens:
            yield event("response.function_call_arguments.delta", token=True, **at, delta=token)
        yield event("response.function_call_arguments.done", **at, name=answer.tool, arguments=answer.text)
    else:
        at["content_index"] = 0
        yield event("response.content_part.added", **at, part=_output_text(""))
        for token in answer.tokens:
            yield event("response.output_text.delta", token=True, **at, delta=token, logprobs=[])
        yield event("response.output_text.done", **at, text=answer.text, logprobs=[])
        yield event("response.content_part.done", **at, part=_output_text(answer.text))
    yield event("response.output_item.done", output_index=0, item=item)
    yield event(f"response.{final['status']}", usage=True, response=final)


# --- messages ----------------------------------------------------------------------------------------------

_STOP_REASON = {Finish.STOP: "end_turn", Finish.TOOL: "tool_use", Finish.LENGTH: "max_tokens"}


def _messages_body(reply: Reply) -> Json:
    answer = reply.answers[0]
    if answer.tool:
        block: dict[str, Any] = {**_tool_use(reply), "input": _arguments(answer)}
    else:
        block = {"type": "text", "text": answer.text}
    return {
        "id": reply.request_id,
        "type": "message",
        "role": "assistant",
        "model": reply.ask.model_name,
        # max_tokens: 0 only warms the cache; there is no block then.
        "content": [block] if answer.tokens else [],
        "stop_reason": _STOP_REASON[answer.finish],
        "stop_sequence": None,
        **_given("usage", reply.usage),
    }


def _tool_use(reply: Reply) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{reply.suffix()}", "name": reply.answers[0].tool, "input": {}}


def _arguments(answer: Answer) -> Any:
    try:
        return msgspec.json.decode(answer.text)
    except msgspec.DecodeError:
        return {}  # cut by max_tokens in the middle of the arguments


def _messages_stream(reply: Reply) -> Iterator[Event]:
    answer = reply.answers[0]
    start = {**_messages_body(reply), "content": [], "stop_reason": None}
    if reply.usage is not None:
        start["usage"] = {**reply.usage, "output_tokens": 0}
    block = _tool_use(reply) if answer.tool else {"type": "text", "text": ""}
    yield Event({"type": "message_start", "message": start}, "message_start")
    if answer.tokens:
        yield Event(
            {"type": "content_block_start", "index": 0, "content_block": block}, "content_block_start"
        )
        yield Event({"type": "ping"}, "ping")
        for token in answer.tokens:
            delta = (
                {"type": "input_json_delta", "partial_json": token}
                if answer.tool
                else {"type": "text_delta", "text": token}
            )
            yield Event(
                {"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta", token=True
            )
        yield Event({"type": "content_block_stop", "index": 0}, "content_block_stop")
    end = {"stop_reason": _STOP_REASON[answer.finish], "stop_sequence": None}
    delta_event = {"type": "message_delta", "delta": end, **_given("usage", reply.usage)}
    yield Event(delta_event, "message_delta", usage=True)
    yield Event({"type": "message_stop"}, "message_stop")


_BODIES = {
    Operation.CHAT: _chat_body,
    Operation.RESPONSES: _responses_body,
    Operation.MESSAGES: _messages_body,
}
_STREAMS = {
    Operation.CHAT: _chat_stream,
    Operation.RESPONSES: _responses_stream,
    Operation.MESSAGES: _messages_stream,
}


def body_of(reply: Reply) -> Json:
    """The plain answer."""
    return _BODIES[reply.ask.operation](reply)


def stream_of(reply: Reply) -> Iterator[Event]:
    """The streamed answer."""
    return _STREAMS[reply.ask.operation](reply)
