"""Token usage as four disjoint counts.

Providers disagree: OpenAI counts cached tokens inside `prompt_tokens`, Anthropic beside `input_tokens`,
DeepSeek reports hit and miss, Gemini counts cached content inside `promptTokenCount` and thoughts beside the
candidates. `core/dialects` reads those shapes; everything after sees only this.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

#: Above this a count is a provider's mistake, not usage (the largest contexts are about 1e7 tokens).
MAX_TOKENS = 10**9
_INTEGERS = frozenset({int})


class Quality(StrEnum):
    """How well a ledger entry's amounts are known."""

    EXACT = "exact"  # the provider reported usage and a price was known
    ESTIMATED = "estimated"  # counted by us, from bytes or from part of a stream
    UNKNOWN = "unknown"  # charged at the bound, or the model has no price


# A Struct, not a dataclass: one is built for every attempt and event, and this costs a tenth.
class Usage(msgspec.Struct, frozen=True, gc=False):
    """Disjoint token counts of one attempt; each input token is in exactly one class.

    `cache_write_5m` is the provider's default write class (5 minutes at Anthropic, 30 at OpenAI);
    `reasoning` is inside `output`, kept for information only.
    """

    input_uncached: int = 0
    cache_read: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0
    cache_write_12h: int = 0
    output: int = 0
    reasoning: int = 0

    def __post_init__(self) -> None:
        counts = msgspec.structs.astuple(self)
        if not _INTEGERS.issuperset(map(type, counts)) or min(counts) < 0 or max(counts) > MAX_TOKENS:
            for name, n in zip(self.__struct_fields__, counts, strict=True):
                if type(n) is not int or not 0 <= n <= MAX_TOKENS:
                    raise ValueError(f"{name} must be an integer from 0 to {MAX_TOKENS}, not {n!r}")
        if self.reasoning > self.output:
            raise ValueError(f"reasoning ({self.reasoning}) cannot exceed output ({self.output})")

    @property
    def input_total(self) -> int:
        return (
            self.input_uncached
            + self.cache_read
            + self.cache_write_5m
            + self.cache_write_1h
            + self.cache_write_12h
        )

    @property
    def cache_write(self) -> int:
        return self.cache_write_5m + self.cache_write_1h + self.cache_write_12h
