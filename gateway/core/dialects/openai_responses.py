"""OpenAI responses: POST /v1/responses, served natively."""

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
    input_classes,
    malformed,
    text_of,
    weight,
)
from gateway.core.dialects.facts import Facts, Spans
from gateway.core.dialects.json_slices import decode, lenient
from gateway.core.dialects.request import Common, bounded, hints, locate, prompt
from gateway.core.errors import InvalidRequest

BOUNDS = ("max_output_tokens",)


class _Request(Common, gc=False):
    input: list[Raw] | str | UnsetType = UNSET
    instructions: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    max_output_tokens: int | None = None
    reasoning: Raw | UnsetType = UNSET
    previous_response_id: Any = None
    conversation: Any = None
    # Not read; named so that their lengths are known without a second pass over the body.
    tool_choice: Raw | UnsetType = UNSET
    text: Raw | UnsetType = UNSET
    include: Raw | UnsetType = UNSET
    client_metadata: Raw | UnsetType = UNSET
    context_management: Raw | UnsetType = UNSET
    prompt_cache_options: Raw | UnsetType = UNSET


class _Item(msgspec.Struct, gc=False):
    role: str | None = None
    type: str | None = None


class _Reasoning(msgspec.Struct, gc=False):
    effort: str | None = None


_REQUEST = msgspec.json.Decoder(_Request)
_ITEM = msgspec.json.Decoder(_Item)
_REASONING = msgspec.json.Decoder(_Reasoning | None)


def read(body: bytes) -> Facts:
    request = decode(_REQUEST, body)
    spans = locate(body, request)
    found = request.input
    if found is UNSET:
        raise InvalidRequest("'input' is missing.", param="input")
    cut = prompt(
        body,
        spans,
        tools=request.tools,
        system=("instructions", request.instructions),
        messages=("input", found),
    )
    effort, reasoning = "", None
    if request.reasoning is not UNSET:
        reasoning = decode(_REASONING, request.reasoning, "reasoning")
        effort = (reasoning.effort if reasoning else None) or ""
    conversation = request.conversation
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    return Facts(
        operation=Operation.RESPONSES,
        model=request.model or "",
        stream=request.stream is True,
        include_usage=False,
        max_output_tokens=bounded(request, spans, BOUNDS),
        n=1,
        tool_count=cut.tool_count,
        message_count=cut.message_count,
        last_role="user" if isinstance(found, str) else _last_role(found),
        has_images=cut.has_images,
        long_cache_write=cut.long_cache_write,
        reasoning=effort not in ("", "none"),
        reasoning_effort=effort,
        service_tier=request.service_tier or "",
        session_hints=hints(
            request, conversation=conversation, previous_response_id=request.previous_response_id
        ),
        segments=cut.segments,
        size=len(body),
        spans=Spans(spans),
    )


def _last_role(found: list[Raw]) -> str:
    item = decode(_ITEM, found[-1], f"input[{len(found) - 1}]")
    return item.role or item.type or ""


# --- answers -----------------------------------------------------------------------------------------


class _Incomplete(msgspec.Struct, gc=False):
    reason: Any = None


class _Output(msgspec.Struct, gc=False):
    """An output item: a message, a reasoning summary, a tool call."""

    content: Any = None
    summary: Any = None
    name: Any = None
    arguments: Any = None
    input: Any = None
    code: Any = None

    @property
    def size(self) -> int:
        parts = 0
        for blocks in (self.content, self.summary):
            if isinstance(blocks, list):
                parts += sum(weight(b.get("text") or b.get("refusal")) for b in blocks if isinstance(b, dict))
        return parts + sum(map(weight, (self.name, self.arguments, self.input, self.code)))


class _Answer(msgspec.Struct, gc=False):
    id: Any = None
    model: Any = None
    status: Any = None
    error: Any = None
    incomplete_details: _Incomplete | None = None
    output: list[_Output] | None = None
    usage: Any = None
    service_tier: Any = None


class _Event(msgspec.Struct, gc=False):
    type: Any = None
    delta: Any = None
    code: Any = None
    error: Any = None
    response: _Answer | None = None


_ANSWER = msgspec.json.Decoder(_Answer)
_EVENT = msgspec.json.Decoder(_Event)

_TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled"})


def read_answer(body: bytes) -> AnswerFacts:
    answer = lenient(body, _ANSWER)
    if answer is None:
        raise malformed(body)
    return AnswerFacts(
        reading=read_usage(answer.usage, text_of(answer.service_tier)),
        finish=_finish(answer),
        response_id=text_of(answer.id),
        model=text_of(answer.model),
        error=error_of(answer.error) if answer.error else None,
        output_bytes=sum(item.size for item in answer.output or ()),
    )


def read_event(name: str, data: bytes) -> EventFacts | None:
    """One event of a stream; None if it is not JSON of this dialect."""
    event = lenient(data, _EVENT)
    if event is None:
        return None
    kind = text_of(event.type) or name
    if event.delta is not None:
        return EventFacts(output_bytes=weight(event.delta) if kind.endswith(".delta") else 0)
    if kind == "error":
        return EventFacts(error=error_of(event.error or {"type": "error", "code": event.code}))
    answer = event.response
    if answer is None or (kind not in _TERMINAL and kind != "response.created"):
        return EventFacts(terminal=kind in _TERMINAL)
    failed = kind == "response.failed"
    return EventFacts(
        usage=answer.usage if isinstance(answer.usage, dict) else None,
        priced=kind in _TERMINAL and isinstance(answer.usage, dict),
        terminal=kind in _TERMINAL,
        finish=_finish(answer) if kind in _TERMINAL else "",
        response_id=text_of(answer.id),
        model=text_of(answer.model),
        service_tier=text_of(answer.service_tier),
        error=error_of(answer.error) if answer.error or failed else None,
    )


def _finish(answer: _Answer) -> str:
    """The status, or for an incomplete answer the reason."""
    if answer.incomplete_details is not None and answer.incomplete_details.reason:
        return text_of(answer.incomplete_details.reason)
    return text_of(answer.status)


def read_usage(usage: object, service_tier: str = "") -> Reading:
    """Usage of the responses shape: input_tokens includes what was read and written (OpenAI, 2026-11)."""
    if not isinstance(usage, Mapping):
        return MISSING
    counts = Counts(usage)
    total = counts.need("input_tokens")
    uncached, read, written = input_classes(
        counts,
        total,
        counts.get("input_tokens_details", "cached_tokens") or 0,
        counts.get("input_tokens_details", "cache_write_tokens") or 0,
    )
    return counts.reading(
        input_uncached=uncached,
        cache_read=read,
        cache_write_5m=written,
        output=counts.need("output_tokens"),
        reasoning=counts.get("output_tokens_details", "reasoning_tokens") or 0,
        service_tier=service_tier,
    )
