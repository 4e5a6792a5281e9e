"""What a vendor itself says of a prompt that was not read from its cache, beside what the gateway says.

Anthropic (platform.claude.com, build-with-claude/cache-diagnostics): `diagnostics.previous_message_id` names the answer
before, null on the first turn, without which nothing is kept for the second; `diagnostics.cache_miss_reason` of the answer,
or of its `message_start`, says type and `cache_missed_input_tokens`. OpenAI (developers.openai.com, guides/prompt-caching/
diagnostics): `prompt_cache_options.comparison_response_id`, GPT-5.6 and later, Responses alone; `prompt_cache_diagnostics`
of the response. Read November 2026. Neither changes what is cached, and both are free of charge.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.core.cache_rules import CacheRule
from gateway.core.catalog import Operation
from gateway.core.dialects.facts import Facts
from gateway.core.generations import Generations

THREADS_MAX = 20_000
_REASON_CHARS_MAX = 64


class _Reason(msgspec.Struct, gc=False):
    type: str = ""
    reason: str = ""
    cache_missed_input_tokens: int | None = None
    cache_missed_tokens: int | None = None


class _Diagnostics(msgspec.Struct, gc=False):
    cache_miss_reason: _Reason | None = None


class _Answer(msgspec.Struct, gc=False):
    diagnostics: _Diagnostics | None = None
    prompt_cache_diagnostics: _Reason | None = None


class _Said(_Answer, gc=False):
    """A whole answer, or the event of a stream that has it inside."""

    message: _Answer | None = None
    response: _Answer | None = None


_SAID = msgspec.json.Decoder(_Said)


class Opinions:
    """The id of the last answer of each thread at each target: what a vendor is to compare with."""

    def __init__(self) -> None:
        self._answers: Generations[tuple[str, str, str], str] = Generations(THREADS_MAX)

    def answered(self, task_id: str, thread: str, target: str, response_id: str) -> None:
        # Where an answer named no id of its own, this is that of the HTTP exchange.
        if response_id.startswith(("msg_", "resp_")):
            self._answers.put((task_id, thread, target), response_id)

    def asking(
        self, facts: Facts, rule: CacheRule | None, family: str, task_id: str, thread: str, target: str
    ) -> bytes:
        """The member to insert, with the comma before it; b"" where the vendor does not offer it or the client says
        something there itself."""
        before = self._answers.get((task_id, thread, target))
        if facts.operation is Operation.MESSAGES and family == "anthropic":
            if "diagnostics" in facts.spans.members:
                return b""
            return b',"diagnostics":{"previous_message_id":%b}' % msgspec.json.encode(before)
        if facts.operation is Operation.RESPONSES and family == "openai" and before is not None:
            explicit = rule is not None and bool(rule.markers.get(Operation.RESPONSES))
            if not explicit or "prompt_cache_options" in facts.spans.members:
                return b""
            return b',"prompt_cache_options":{"comparison_response_id":%b}' % msgspec.json.encode(before)
        return b""


def opinion(answer: bytes) -> str:
    """The vendor's reason, with its count of tokens: "tools_changed, 4096 tokens"; "" if it names none."""
    try:
        said = _SAID.decode(answer)
    except (msgspec.MsgspecError, ValueError):
        return ""
    inside: Any = said.message or said.response or said
    if inside.diagnostics is not None and inside.diagnostics.cache_miss_reason is not None:
        found = inside.diagnostics.cache_miss_reason
        reason, tokens = found.type, found.cache_missed_input_tokens
    elif inside.prompt_cache_diagnostics is not None:
        found = inside.prompt_cache_diagnostics
        reason, tokens = found.reason or found.type, found.cache_missed_tokens
    else:
        return ""
    reason = "".join(c for c in reason if c.isascii() and (c.isalnum() or c == "_"))[:_REASON_CHARS_MAX]
    return f"{reason}, {tokens} tokens" if reason and tokens is not None else reason
