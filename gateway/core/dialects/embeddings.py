"""OpenAI embeddings: POST /v1/embeddings. No output tokens, no cacheable prefix, no stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway.core.catalog import Operation
from gateway.core.dialects.answers import (
    MISSING,
    AnswerFacts,
    Counts,
    Reading,
    error_of,
    malformed,
    text_of,
)
from gateway.core.dialects.facts import Facts, Segments, Spans
from gateway.core.dialects.json_slices import check_rest, decode, lenient
from gateway.core.dialects.request import Common, hints, locate
from gateway.core.errors import InvalidRequest


class _Request(Common, gc=False):
    input: str | list[str | int | list[int]] | UnsetType = UNSET


_REQUEST = msgspec.json.Decoder(_Request)


def read(body: bytes) -> Facts:
    request = decode(_REQUEST, body)
    spans = locate(body, request)
    check_rest(body, ())
    return Facts(
        operation=Operation.EMBEDDINGS,
        model=request.model or "",
        stream=False,
        include_usage=False,
        max_output_tokens=None,
        n=1,
        tool_count=0,
        message_count=_count(request.input),
        last_role="",
        has_images=False,
        long_cache_write=False,
        reasoning=False,
        reasoning_effort="",
        service_tier=request.service_tier or "",
        session_hints=hints(request),
        segments=Segments(),
        size=len(body),
        spans=Spans(spans),
    )


def _count(found: str | list[str | int | list[int]] | UnsetType) -> int:
    """How many texts are to be embedded."""
    if found is UNSET:
        raise InvalidRequest("'input' is missing.", param="input")
    if isinstance(found, str):
        return 1
    kinds = set(map(type, found))
    if len(kinds) != 1:
        raise InvalidRequest(
            "'input' must be a string, a list of strings, a list of tokens or a list of token lists, and not "
            "empty.",
            param="input",
        )
    return 1 if kinds == {int} else len(found)


class _Answer(msgspec.Struct, gc=False):
    model: Any = None
    usage: Any = None
    error: Any = None
    id: Any = None


_ANSWER = msgspec.json.Decoder(_Answer)


def read_answer(body: bytes) -> AnswerFacts:
    answer = lenient(body, _ANSWER)
    if answer is None:
        raise malformed(body)
    return AnswerFacts(
        reading=read_usage(answer.usage),
        finish="",
        response_id=text_of(answer.id),
        model=text_of(answer.model),
        error=error_of(answer.error) if answer.error else None,
        output_bytes=0,
    )


def read_usage(usage: object) -> Reading:
    """prompt_tokens is all there is (OpenAI, 2026-11)."""
    if not isinstance(usage, Mapping):
        return MISSING
    counts = Counts(usage)
    return counts.reading(input_uncached=counts.need("prompt_tokens"))
