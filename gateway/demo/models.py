"""The models that the demo provider plays: whose cache rules each follows and what it bills.

This table and `bill.py` are written apart from the gateway's own price book and cost arithmetic on purpose: the
provider is the second opinion that the ledger is compared with, so the two must not share a mistake.

Cache rules as the vendors' prompt caching pages had them in November 2026 (Anthropic: "Prompt caching";
OpenAI: "Prompt caching", GPT-5.6 and later). Rates are integers in pico-dollars per token:
$3 per million tokens = 3,000,000.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MINUTE_MS = 60_000


class CacheStyle(StrEnum):
    """Who decides where a prompt may be cut for the cache."""

    EXPLICIT = "explicit"  # Anthropic: only where the caller put a cache_control marker
    IMPLICIT = "implicit"  # OpenAI 5.6+: end of the latest message, and marked content parts
    NONE = "none"


@dataclass(frozen=True, slots=True)
class CacheRules:
    """When a prefix is written to the cache and when it is found again. All positions are content blocks."""

    style: CacheStyle
    min_tokens: int = 0  # a shorter prefix is silently not cached
    max_breakpoints: int = 0  # EXPLICIT: one more is a 400; IMPLICIT: only the latest ones are written
    #: EXPLICIT: blocks examined per marker, the marked one included. IMPLICIT: earlier message ends examined.
    lookback: int = 0
    ttl_ms: int = 0  # the default life, counted again from every hit
    long_ttl_ms: int = 0  # the life of a marker with ttl "1h"; 0 = there is no such class


@dataclass(frozen=True, slots=True)
class Rates:
    """Pico-dollars per token of each class. 0 = the class does not exist for this model."""

    input_uncached: int
    cache_read: int
    cache_write_5m: int
    cache_write_1h: int
    output: int


@dataclass(frozen=True, slots=True)
class DemoModel:
    name: str
    rules: CacheRules
    rates: Rates
    context_tokens: int
    embeds: bool = False


_ANTHROPIC = CacheRules(
    CacheStyle.EXPLICIT,
    min_tokens=1_024,
    max_breakpoints=4,
    lookback=20,
    ttl_ms=5 * MINUTE_MS,
    long_ttl_ms=60 * MINUTE_MS,
)
_ANTHROPIC_SMALL = CacheRules(
    CacheStyle.EXPLICIT,
    min_tokens=4_096,
    max_breakpoints=4,
    lookback=20,
    ttl_ms=5 * MINUTE_MS,
    long_ttl_ms=60 * MINUTE_MS,
)
_OPENAI = CacheRules(
    CacheStyle.IMPLICIT, min_tokens=1_024, max_breakpoints=4, lookback=20, ttl_ms=30 * MINUTE_MS
)

DEMO_LARGE = DemoModel(
    "demo-large", _ANTHROPIC, Rates(3_000_000, 300_000, 3_750_000, 6_000_000, 15_000_000), 1_000_000
)
DEMO_SMALL = DemoModel(
    "demo-small", _ANTHROPIC_SMALL, Rates(1_000_000, 100_000, 1_250_000, 2_000_000, 5_000_000), 1_000_000
)
DEMO_FAST = DemoModel("demo-fast", _OPENAI, Rates(2_500_000, 250_000, 3_125_000, 0, 10_000_000), 1_000_000)
DEMO_EMBED = DemoModel(
    "demo-embed", CacheRules(CacheStyle.NONE), Rates(20_000, 0, 0, 0, 0), 8_192, embeds=True
)

MODELS: tuple[DemoModel, ...] = (DEMO_LARGE, DEMO_SMALL, DEMO_FAST, DEMO_EMBED)

#: Names of real model families are played too, so that a client with a fixed model name gets an answer.
_FAMILIES = (("gpt-", DEMO_FAST), ("claude-", DEMO_LARGE), ("text-embedding-", DEMO_EMBED))


def find_model(name: str) -> DemoModel | None:
    """The model that plays `name`; a "vendor/" in front is ignored. None if nothing here plays it."""
    bare = name.rsplit("/", 1)[-1]
    for model in MODELS:
        if model.name == bare:
            return model
    return next((model for prefix, model in _FAMILIES if bare.startswith(prefix)), None)
