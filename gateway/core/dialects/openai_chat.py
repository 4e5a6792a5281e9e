"""OpenAI chat completions: POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
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
    split_writes,
    text_of,
    weight,
)
from gateway.core.dialects.facts import Facts, Spans
from gateway.core.dialects.json_slices import DuplicateMember, Span, decode, is_null, lenient, members
from gateway.core.dialects.request import MAX_N, Common, bounded, hints, locate, prompt, starts
from gateway.core.errors import InvalidRequest
from gateway.core.usage import MAX_TOKENS, Usage

BOUNDS = ("max_completion_tokens", "max_tokens")


class _Request(Common, gc=False):
    messages: list[Raw] | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    stream_options: Raw | UnsetType = UNSET
    max_completion_tokens: int | None = None
    max_tokens: int | None = None
    n: int | None = None
    reasoning_effort: str | None = None
    reasoning: Raw | UnsetType = UNSET
    # Not read; named so that their lengths are known without a second pass over the body.
    tool_choice: Raw | UnsetType = UNSET
    response_format: Raw | UnsetType = UNSET
    stop: Raw | UnsetType = UNSET
    functions: Raw | UnsetType = UNSET
    logit_bias: Raw | UnsetType = UNSET
    provider: Raw | UnsetType = UNSET
    chat_template_kwargs: Raw | UnsetType = UNSET
    extra_body: Raw | UnsetType = UNSET


class _Message(msgspec.Struct, gc=False):
    role: str | UnsetType = UNSET


class _StreamOptions(msgspec.Struct, gc=False):
    include_usage: bool | None = None


class _Effort(msgspec.Struct, gc=False):
    effort: Any = None


_REQUEST = msgspec.json.Decoder(_Request)
_MESSAGE = msgspec.json.Decoder(_Message)
_STREAM_OPTIONS = msgspec.json.Decoder(_StreamOptions)
_EFFORT = msgspec.json.Decoder(_Effort)


def read(body: bytes) -> Facts:
    request = decode(_REQUEST, body)
    spans = locate(body, request)
    messages = request.messages
    if messages is UNSET:
        raise InvalidRequest("'messages' is missing.", param="messages")
    cut = prompt(body, spans, tools=request.tools, system=("system", UNSET), messages=("messages", messages))
    n = 1 if request.n is None else request.n
    if not 1 <= n <= MAX_N:
        raise InvalidRequest(f"'n' must be from 1 to {MAX_N}.", param="n")
    effort = request.reasoning_effort or ""
    if not effort and request.reasoning is not UNSET and starts(request.reasoning, b"{"):
        effort = text_of(decode(_EFFORT, bytes(request.reasoning), "reasoning").effort)
    include_usage, include_span = _stream_options(request.stream_options, spans)
    return Facts(
        operation=Operation.CHAT,
        model=request.model or "",
        stream=request.stream is True,
        include_usage=include_usage,
        max_output_tokens=bounded(request, spans, BOUNDS),
        n=n,
        tool_count=cut.tool_count,
        message_count=cut.message_count,
        last_role=_last_role(messages),
        has_images=cut.has_images,
        long_cache_write=cut.long_cache_write,
        reasoning=effort not in ("", "none"),
        reasoning_effort=effort,
        service_tier=request.service_tier or "",
        session_hints=hints(request),
        segments=cut.segments,
        size=len(body),
        spans=Spans(spans, include_span),
    )


def _last_role(messages: list[Raw]) -> str:
    where = f"messages[{len(messages) - 1}]"
    role = decode(_MESSAGE, messages[-1], where).role
    if role is UNSET:
        raise InvalidRequest(f"'{where}.role' is missing.", param=f"{where}.role")
    return role


def _stream_options(raw: Raw | UnsetType, spans: Mapping[str, Span]) -> tuple[bool, Span | None]:
    """What stream_options.include_usage says, and where."""
    if raw is UNSET or is_null(raw):
        return False, None
    text = bytes(raw)
    # Clients send one of a few spellings, so most are known; a long one is not worth the memory.
    asked, inner = _options_seen(text) if len(text) <= 64 else _options(text)
    if inner is None:
        return asked, None
    base = spans["stream_options"][0]
    return asked, (base + inner[0], base + inner[1])


def _options(text: bytes) -> tuple[bool, Span | None]:
    options = decode(_STREAM_OPTIONS, text, "stream_options")
    try:
        inner = members(text).get("include_usage")
    except DuplicateMember as e:
        raise InvalidRequest(f"'stream_options': {e}.", param=f"stream_options.{e.name[:64]}") from None
    return options.include_usage is True, inner


_options_seen = lru_cache(maxsize=256)(_options)


# --- answers -----------------------------------------------------------------------------------------


class _Generated(msgspec.Struct, gc=False):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None


class _Choice(msgspec.Struct, gc=False):
    delta: _Generated | None = None
    message: _Generated | None = None
    finish_reason: Any = None
    usage: Any = None  # Moonshot's streams report usage here


class _Answer(msgspec.Struct, gc=False):
    id: Any = None
    model: Any = None
    choices: list[_Choice] | None = None
    usage: Any = None
    service_tier: Any = None
    error: Any = None


_ANSWER = msgspec.json.Decoder(_Answer)


def read_answer(body: bytes) -> AnswerFacts:
    answer = lenient(body, _ANSWER)
    if answer is None:
        raise malformed(body)
    choices = answer.choices or []
    return AnswerFacts(
        reading=read_usage(answer.usage, text_of(answer.service_tier)),
        finish=_finish(choices),
        response_id=text_of(answer.id),
        model=text_of(answer.model),
        error=error_of(answer.error) if answer.error else None,
        output_bytes=sum(_output(c.message) for c in choices if c.message is not None),
    )


def read_event(_name: str, data: bytes) -> EventFacts | None:
    """One event of a stream; None if it is not JSON of this dialect."""
    if data == b"[DONE]":
        return EventFacts(terminal=True)
    chunk = lenient(data, _ANSWER)
    if chunk is None:
        return None
    choices = chunk.choices or []
    usage = chunk.usage
    if usage is None and choices:
        usage = choices[-1].usage
    finish = _finish(choices)
    return EventFacts(
        output_bytes=sum([_output(c.delta) for c in choices if c.delta is not None]),
        usage=usage if isinstance(usage, dict) else None,
        priced=isinstance(chunk.usage, dict) and (chunk.choices == [] or finish != ""),
        usage_only=isinstance(chunk.usage, dict) and chunk.choices == [] and chunk.error is None,
        finish=finish,
        response_id=text_of(chunk.id),
        model=text_of(chunk.model),
        service_tier=text_of(chunk.service_tier),
        error=error_of(chunk.error) if chunk.error else None,
    )


def _finish(choices: list[_Choice]) -> str:
    """The first choice's reason that is there."""
    for choice in choices:
        if choice.finish_reason:
            return text_of(choice.finish_reason)
    return ""


def _output(message: _Generated) -> int:
    size = weight(message.content)
    if message.reasoning_content is not None:  # DeepSeek, vLLM before 0.12; some send both names
        size += weight(message.reasoning_content)
    elif message.reasoning is not None:
        size += weight(message.reasoning)
    if message.refusal is not None:
        size += weight(message.refusal)
    if message.tool_calls:
        size += sum(map(_call_output, message.tool_calls))
    if message.function_call is not None:
        size += _call_output({"function": message.function_call})
    return size


def _call_output(call: object) -> int:
    """Name and arguments of one tool call or a piece of them."""
    if not isinstance(call, dict):
        return 0
    size = 0
    for kind in ("function", "custom"):
        body = call.get(kind)
        if isinstance(body, dict):
            size += weight(body.get("name")) + weight(body.get("arguments")) + weight(body.get("input"))
    return size


# --- usage -------------------------------------------------------------------------------------------


def read_usage(usage: object, service_tier: str = "") -> Reading:
    """Usage of the OpenAI chat shape and of its relatives (2026-11).

    prompt_tokens includes what was read from and written to the cache:
    OpenAI prompt_tokens_details.{cached_tokens, cache_write_tokens}; litellm the same and
    cache_{read,creation}_input_tokens beside it; DeepSeek prompt_cache_hit_tokens; Moonshot cached_tokens.
    vLLM's created_cache_tokens costs nothing extra and stays uncached.
    completion_tokens includes reasoning, except where total_tokens shows that it does not (xAI; Gemini's
    OpenAI surface, which reports thoughts in the total only).
    """
    if not isinstance(usage, Mapping):
        return MISSING
    if (common := _common_usage(usage, service_tier)) is not None:
        return common
    counts = Counts(usage)
    prompt_tokens = counts.need("prompt_tokens")
    read = counts.first(
        ("cache_read_input_tokens",),
        ("prompt_tokens_details", "cached_tokens"),
        ("prompt_cache_hit_tokens",),
        ("cached_tokens",),
    )
    write = counts.first(
        ("cache_creation_input_tokens",),
        ("prompt_tokens_details", "cache_write_tokens"),
        ("prompt_tokens_details", "cache_creation_tokens"),
    )
    miss = counts.get("prompt_cache_miss_tokens")
    if miss is not None and miss + read != prompt_tokens:
        counts.problems.append("cache hit and miss do not sum")
    split = ("prompt_tokens_details", "cache_creation_token_details")
    m5, h1 = split_writes(
        counts,
        write,
        counts.get(*split, "ephemeral_5m_input_tokens"),
        counts.get(*split, "ephemeral_1h_input_tokens"),
    )
    uncached, read, written = input_classes(counts, prompt_tokens, read, m5 + h1)
    h1 = min(h1, written)
    output, reasoning = _output_tokens(counts, prompt_tokens)
    return counts.reading(
        input_uncached=uncached,
        cache_read=read,
        cache_write_5m=written - h1,
        cache_write_1h=h1,
        output=output,
        reasoning=reasoning,
        service_tier=service_tier or text_of(usage.get("service_tier")),
    )


_COMMON = frozenset(
    {
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
        "prompt_tokens_details",
        "completion_tokens_details",
    }
)


#: None of them costs anything of its own but the first two; the last two are vLLM's.
_COMMON_DETAILS = frozenset(
    {"cached_tokens", "cache_write_tokens", "audio_tokens", "created_cache_tokens", "multimodal_tokens"}
)


def _common_usage(usage: Mapping[str, Any], service_tier: str) -> Reading | None:
    """OpenAI's own shape, which is most of the traffic, read the short way.

    None for anything else, or anything odd: the long way then finds out what is wrong.
    """
    if not _COMMON.issuperset(usage):
        return None
    get = usage.get
    prompt, output = get("prompt_tokens"), get("completion_tokens")
    read = write = reasoning = 0
    details = get("prompt_tokens_details")
    if details is not None:
        if type(details) is not dict or not _COMMON_DETAILS.issuperset(details):
            return None
        read, write = details.get("cached_tokens") or 0, details.get("cache_write_tokens") or 0
    details = get("completion_tokens_details")
    if details is not None:
        if type(details) is not dict:
            return None
        reasoning = details.get("reasoning_tokens") or 0
    if not type(prompt) is type(output) is type(read) is type(write) is type(reasoning) is int:
        return None
    if (
        read < 0
        or write < 0
        or not (read + write <= prompt <= MAX_TOKENS and 0 <= reasoning <= output <= MAX_TOKENS)
    ):
        return None
    if get("total_tokens", prompt + output) != prompt + output:
        return None
    counts = Usage(prompt - read - write, read, write, output=output, reasoning=reasoning)
    return Reading(counts, "", service_tier)


def _output_tokens(counts: Counts, prompt_tokens: int) -> tuple[int, int]:
    """(output with reasoning inside, reasoning)."""
    output = counts.need("completion_tokens")
    reasoning = counts.get("completion_tokens_details", "reasoning_tokens") or 0
    total = counts.get("total_tokens")
    if total is None or total == prompt_tokens + output or counts.problems:
        return output, reasoning
    beyond = total - prompt_tokens - output
    if beyond == reasoning:
        return output + reasoning, reasoning
    if beyond > 0 and not reasoning:
        counts.problems.append("total_tokens exceeds the sum")
        return output + beyond, beyond
    counts.problems.append("total_tokens is not the sum")
    return output, reasoning
