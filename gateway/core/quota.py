"""What providers say about how much of their own limits is left: the rate-limit headers of their answers.

    OpenAI     x-ratelimit-remaining-requests, x-ratelimit-reset-requests: "1s", "6m0s", "20ms"   (also -tokens)
    Anthropic  anthropic-ratelimit-requests-remaining, anthropic-ratelimit-requests-reset: an RFC 3339 instant
Both vendors' API references, November 2026. An instant is not used: the provider's clock is not ours, and the next
429 says how long.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_NOTHING_LEFT_PAUSE_S = 5.0


_OPENAI = tuple(
    (f"x-ratelimit-remaining-{kind}", f"x-ratelimit-reset-{kind}") for kind in ("requests", "tokens")
)
_ANTHROPIC = tuple(f"anthropic-ratelimit-{kind}-remaining" for kind in ("requests", "tokens"))
_NAMES = frozenset((*(left for left, _ in _OPENAI), *_ANTHROPIC))


def used_up_for_s(headers: Mapping[str, str]) -> float | None:
    """Seconds for which nothing is left there; None if something is, or nothing is said."""
    if headers.keys().isdisjoint(_NAMES):
        return None
    for left, reset in _OPENAI:
        if headers.get(left) == "0":
            return _seconds(headers.get(reset, "")) or _NOTHING_LEFT_PAUSE_S
    for left in _ANTHROPIC:
        if headers.get(left) == "0":
            return _NOTHING_LEFT_PAUSE_S
    return None


def _seconds(text: str) -> float:
    return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))
