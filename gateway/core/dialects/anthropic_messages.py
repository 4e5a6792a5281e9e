"""Anthropic messages: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from gateway.core.catalog import Operation
from gateway.core.dialects.answers import (
    MISSING,
    AnswerFacts,
    Counts,
    EventFacts,
    Reading,
    error_of,
    malformed,
    split_writes,
    text_of,
    weight,
)
from gateway.core.dialects.facts import Facts, Spans
from gateway.core.dialects.json_slices import decode, lenient
from gateway.core.dialects.request import Common, bounded, hints, locate, prompt, starts
from gateway.core.errors import InvalidRequest
from gateway.core.usage import Usage

BOUNDS = ("max_tokens",)


class _Request(Common, gc=False):
    messages: list[Raw] | UnsetType = UNSET
    system: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    max_tokens: int | None = None
    thinking: Raw | UnsetType = UNSET
    output_config: Raw | UnsetType = UNSET
    # Not read; named so that their lengths are known without a second pass over the body.
    tool_choice: Raw | UnsetType = UNSET
    context_management: Raw | UnsetType = UNSET
    stop_sequences: Raw | UnsetType = UNSET
    mcp_servers: Raw | UnsetType = UNSET
    cache_control: Raw | UnsetType = UNSET
    diagnostics: Raw | UnsetType = UNSET
    safeguards: Raw | UnsetType = UNSET


class _Message(msgspec.Struct, gc=False):
    role: str | UnsetType = UNSET
    content: Raw | UnsetType = UNSET


class _Block(msgspec.Struct, gc=False):
    type: Any = None


class _Thinking(msgspec.Struct, gc=False):
    type: Any = None
    budget_tokens: Any = None


class _OutputConfig(msgspec.Struct, gc=False):
    effort: Any = None


_REQUEST = msgspec.json.Decoder(_Request)
_MESSAGE = msgspec.json.Decoder(_Message)
_BLOCKS = msgspec.json.Decoder(list[_Block])
_THINKING = msgspec.json.Decoder(_Thinking | None)
_OUTPUT_CONFIG = msgspec.json.Decoder(_OutputConfig | None)


def read(operation: Operation, body: bytes) -> Facts:
    request = decode(_REQUEST, body)
    spans = locate(body, request)
    messages = request.messages
    if messages is UNSET:
        raise InvalidRequest("'messages' is missing.", param="messages")
    cut = prompt(
        body,
        spans,
        tools=request.tools,
        system=("system", request.system),
        messages=("messages", messages),
    )
    thinking = None if request.thinking is UNSET else decode(_THINKING, request.thinking, "thinking")
    config = None
    if request.output_config is not UNSET:
        config = decode(_OUTPUT_CONFIG, request.output_config, "output_config")
    return Facts(
        operation=operation,
        model=request.model or "",
        stream=request.stream is True,
        include_usage=False,
        # max_tokens 0 only writes the cache (Anthropic, "pre-warm", 2026-11)
        max_output_tokens=bounded(request, spans, BOUNDS, least=0),
        n=1,
        tool_count=cut.tool_count,
        message_count=cut.message_count,
        last_role=_last_role(messages),
        has_images=cut.has_images,
        long_cache_write=cut.long_cache_write,
        reasoning=thinking is not None and thinking.type != "disabled",
        reasoning_effort=text_of(config.effort) if config else "",
        service_tier=request.service_tier or "",
        session_hints=hints(request, user_id=True),
        segments=cut.segments,
        size=len(body),
        spans=Spans(spans),
        thinking_budget=_thinking_budget(thinking),
    )


def _thinking_budget(thinking: _Thinking | None) -> int:
    """Tokens that are for thinking alone, 0 if it is not on or says none."""
    if thinking is None or thinking.type != "enabled" or type(thinking.budget_tokens) is not int:
        return 0
    return max(0, thinking.budget_tokens)


def _last_role(messages: list[Raw]) -> str:
    where = f"messages[{len(messages) - 1}]"
    message = decode(_MESSAGE, messages[-1], where)
    if message.role is UNSET:
        raise InvalidRequest(f"'{where}.role' is missing.", param=f"{where}.role")
    if message.role == "user" and message.content is not UNSET and starts(message.content, b"["):
        blocks = decode(_BLOCKS, message.content, f"{where}.content")
        if blocks and all(block.type == "tool_result" for block in blocks):
            return "tool"
    return message.role


# --- answers -----------------------------------------------------------------------------------------


class _Content(msgspec.Struct, gc=False):
    """A content block or a delta of one."""

    text: Any = None
    thinking: Any = None
    partial_json: Any = None
    name: Any = None
    input: Any = None
    stop_reason: Any = None  # of message_delta

    @property
    def size(self) -> int:
        return (
            weight(self.text)
            + weight(self.thinking)
            + weight(self.partial_json)
            + weight(self.name)
            + (len(msgspec.json.encode(self.input)) if self.input else 0)
        )


class _Answer(msgspec.Struct, gc=False):
    id: Any = None
    model: Any = None
    content: list[_Content] | None = None
    stop_reason: Any = None
    usage: Any = None
    error: Any = None
    input_tokens: Any = None  # of count_tokens


class _Event(msgspec.Struct, gc=False):
    type: Any = None
    delta: _Content | None = None
    content_block: _Content | None = None
    usage: Any = None
    message: _Answer | None = None
    error: Any = None


_ANSWER = msgspec.json.Decoder(_Answer)
_EVENT = msgspec.json.Decoder(_Event)


def read_answer(operation: Operation, body: bytes) -> AnswerFacts:
    answer = lenient(body, _ANSWER)
    if answer is None:
        raise malformed(body)
    reading = read_usage(answer.usage)
    if operation is Operation.COUNT_TOKENS:  # counting is free
        reading = Reading(Usage())
    return AnswerFacts(
        reading=reading,
        finish=text_of(answer.stop_reason),
        response_id=text_of(answer.id),
        model=text_of(answer.model),
        error=error_of(answer.error) if answer.error else None,
        output_bytes=sum(block.size for block in answer.content or ()),
    )


def read_event(name: str, data: bytes) -> EventFacts | None:
    """One event of a stream; None if it is not JSON of this dialect.

    message_start reports the input, message_delta the final output and sometimes everything again.
    """
    event = lenient(data, _EVENT)
    if event is None:
        return None
    kind = text_of(event.type) or name
    if kind == "content_block_delta":
        return EventFacts(output_bytes=event.delta.size if event.delta else 0)
    if kind == "content_block_start":
        return EventFacts(output_bytes=event.content_block.size if event.content_block else 0)
    if kind == "message_start":
        message = event.message or _Answer()
        return EventFacts(
            usage=message.usage if isinstance(message.usage, dict) else None,
            response_id=text_of(message.id),
            model=text_of(message.model),
        )
    if kind == "message_delta":
        has_usage = isinstance(event.usage, dict)
        return EventFacts(
            usage=event.usage if has_usage else None,
            priced=has_usage,
            finish=text_of(event.delta.stop_reason) if event.delta else "",
        )
    if kind == "error":
        return EventFacts(error=error_of(event.error))
    return EventFacts(terminal=kind == "message_stop")


def merge_usage(before: Mapping[str, Any], now: Mapping[str, Any]) -> Mapping[str, Any]:
    """Counts so far with those of a later event: the last event that names a count decides it."""
    merged = {**before, **{k: v for k, v in now.items() if v is not None}}
    total = now.get("cache_creation_input_tokens")
    renamed = total is not None and total != before.get("cache_creation_input_tokens")
    if renamed and now.get("cache_creation") is None:
        merged.pop("cache_creation", None)  # the split of a total that is no longer true
    return merged


def read_usage(usage: object) -> Reading:
    """Usage of the messages shape: the three input counts are disjoint (Anthropic, 2026-11).

    cache_creation_input_tokens is the total of the split in cache_creation; without a split all is 5m.
    """
    if not isinstance(usage, Mapping):
        return MISSING
    counts = Counts(usage)
    if usage.get("estimated") is True:  # the bridge says so when the provider behind it told no usage
        counts.problems.append("not told by the provider")
    m5, h1 = split_writes(
        counts,
        counts.get("cache_creation_input_tokens"),
        counts.get("cache_creation", "ephemeral_5m_input_tokens"),
        counts.get("cache_creation", "ephemeral_1h_input_tokens"),
    )
    return counts.reading(
        input_uncached=counts.need("input_tokens"),
        cache_read=counts.get("cache_read_input_tokens") or 0,
        cache_write_5m=m5,
        cache_write_1h=h1,
        output=counts.need("output_tokens"),
        reasoning=counts.get("output_tokens_details", "thinking_tokens") or 0,
        service_tier=text_of(usage.get("service_tier")),
    )
