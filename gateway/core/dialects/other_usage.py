"""Usage shapes of providers that no dialect of ours speaks."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.core.dialects.answers import MISSING, Counts, Reading, input_classes


def read_gemini_usage(usage: object) -> Reading:
    """Gemini's usageMetadata (ai.google.dev, 2026-11).

    promptTokenCount includes cachedContentTokenCount; thoughtsTokenCount comes on top of
    candidatesTokenCount, toolUsePromptTokenCount on top of the prompt. A count of 0 is left out.
    """
    if not isinstance(usage, Mapping):
        return MISSING
    counts = Counts(usage)
    uncached, read, _ = input_classes(
        counts, counts.need("promptTokenCount"), counts.get("cachedContentTokenCount") or 0, 0
    )
    thoughts = counts.get("thoughtsTokenCount") or 0
    return counts.reading(
        input_uncached=uncached + (counts.get("toolUsePromptTokenCount") or 0),
        cache_read=read,
        output=(counts.get("candidatesTokenCount") or 0) + thoughts,
        reasoning=thoughts,
    )


def read_bedrock_usage(usage: object) -> Reading:
    """Bedrock Converse: inputTokens is beside what was read and written (docs.aws.amazon.com, 2026-11)."""
    if not isinstance(usage, Mapping):
        return MISSING
    counts = Counts(usage)
    return counts.reading(
        input_uncached=counts.need("inputTokens"),
        cache_read=counts.get("cacheReadInputTokens") or 0,
        cache_write_5m=counts.get("cacheWriteInputTokens") or 0,
        output=counts.need("outputTokens"),
    )
