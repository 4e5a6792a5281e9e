"""What a provider's answer says, as values, and the arithmetic that its usage reports share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.core.catalog import Operation
from gateway.core.errors import (
    GatewayError,
    UpstreamError,
    UpstreamMalformed,
    UpstreamOverloaded,
    UpstreamRefused,
)
from gateway.core.usage import MAX_TOKENS, Usage


class Reading(msgspec.Struct, frozen=True):
    """Usage as far as known."""

    usage: Usage
    #: "" = the report is consistent; else why it cannot be trusted. `usage` then holds what could be read,
    #: doubtful input in the dearest class that the report names
    problem: str = ""
    service_tier: str = ""


MISSING = Reading(Usage(), "missing")


class AnswerFacts(msgspec.Struct, frozen=True):
    """A complete, not streamed answer."""

    reading: Reading
    finish: str
    response_id: str
    model: str
    error: GatewayError | None  # an error object inside a 200 answer
    output_bytes: int  # UTF-8 bytes of generated text, reasoning and tool arguments


class EventFacts(msgspec.Struct, frozen=True):
    """What one event of a stream says."""

    output_bytes: int = 0  # UTF-8 bytes of generated text, reasoning and tool arguments
    usage: Mapping[str, Any] | None = None
    #: the usage member is where `usage.cost` belongs
    priced: bool = False
    #: carries nothing but usage, so a client that did not ask for usage must not see it
    usage_only: bool = False
    terminal: bool = False
    finish: str = ""
    response_id: str = ""
    model: str = ""
    service_tier: str = ""
    error: GatewayError | None = None


ABORT = "abort"


def aborted(operation: Operation, finish: str, *, silent: bool = False) -> bool:
    """Whether a whole answer with that finish reason was broken off by its server, though its status was 200.

    vLLM 0.32 does that to what runs when it is told to stop (observed 2026-11): reason "abort" at chat, none at all
    at messages, whose other answers always have one, and none in a chat stream that is `silent`: no token had come.
    """
    if finish:
        return finish == ABORT
    return operation is Operation.MESSAGES or silent


def text_of(value: object) -> str:
    """`value` if it is a string, else ""."""
    return value if isinstance(value, str) else ""


def weight(value: object) -> int:
    """UTF-8 bytes of all strings in `value`."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, list):
        return sum(map(weight, value))
    if isinstance(value, dict):
        return sum(map(weight, value.values()))
    return 0


# --- usage -------------------------------------------------------------------------------------------


class Counts:
    """Reads token counts out of a usage object; whatever is odd becomes a problem, never an exception."""

    def __init__(self, usage: Mapping[str, Any]) -> None:
        self._usage = usage
        self.problems: list[str] = []

    def get(self, *path: str) -> int | None:
        """The count at that path; None if it is absent or null, or no count at all (then also a problem)."""
        value: object = self._usage
        for name in path:
            if value is None:
                return None
            if not isinstance(value, Mapping):
                self.problems.append(f"{path[0]} is not an object")
                return None
            value = value.get(name)
        if value is None:
            return None
        name = path[-1]
        if type(value) is not int:
            self.problems.append(f"{name} is not an integer")
        elif value < 0:
            self.problems.append(f"negative {name}")
        elif value > MAX_TOKENS:
            self.problems.append(f"{name} too large")
        else:
            return value
        return None

    def need(self, *path: str) -> int:
        """Like get, but absence is a problem and counts as 0."""
        before = len(self.problems)
        value = self.get(*path)
        if value is None:
            if len(self.problems) == before:
                self.problems.append(f"{path[-1]} missing")
            return 0
        return value

    def first(self, *paths: tuple[str, ...]) -> int:
        """The first of several spellings that is there, else 0."""
        for path in paths:
            value = self.get(*path)
            if value is not None:
                return value
        return 0

    def reading(
        self,
        *,
        input_uncached: int,
        cache_read: int = 0,
        cache_write_5m: int = 0,
        cache_write_1h: int = 0,
        output: int = 0,
        reasoning: int = 0,
        service_tier: str = "",
    ) -> Reading:
        if reasoning > output:
            self.problems.append("reasoning exceeds output")
        output = min(output, MAX_TOKENS)
        usage = Usage(
            input_uncached=min(input_uncached, MAX_TOKENS),
            cache_read=min(cache_read, MAX_TOKENS),
            cache_write_5m=min(cache_write_5m, MAX_TOKENS),
            cache_write_1h=min(cache_write_1h, MAX_TOKENS),
            output=output,
            reasoning=min(reasoning, output),
        )
        return Reading(usage, "; ".join(dict.fromkeys(self.problems)), service_tier)


def split_writes(counts: Counts, total: int | None, m5: int | None, h1: int | None) -> tuple[int, int]:
    """(5m, 1h) cache writes from a total and its split; without a split everything is 5m.

    If they disagree the larger reading counts: what the split does not explain goes to the dearer class
    that it names.
    """
    if m5 is None and h1 is None:
        return total or 0, 0
    m5, h1 = m5 or 0, h1 or 0
    if total is None or total == m5 + h1:
        return m5, h1
    counts.problems.append("cache write split does not sum")
    rest = max(0, total - m5 - h1)
    return (m5, h1 + rest) if h1 else (m5 + rest, h1)


def input_classes(counts: Counts, total: int, read: int, write: int) -> tuple[int, int, int]:
    """(uncached, read, write) from a total that includes both; never negative."""
    if read > total:
        counts.problems.append("cached exceeds prompt")
    elif read + write > total:
        counts.problems.append("cached and written exceed prompt")
    write = min(write, total)
    read = min(read, total - write)
    return total - read - write, read, write


# --- errors ------------------------------------------------------------------------------------------

_LABEL = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_OVERLOADED = (
    "overload",
    "rate_limit",
    "ratelimit",
    "too_many",
    "429",
    "529",
    "503",
    "unavailable",
    "capacity",
)
_REFUSED = (
    "invalid_request",
    "badrequest",
    "bad_request",
    "400",
    "content_filter",
    "content_policy",
    "safety",
)


def error_of(error: object) -> UpstreamError:
    """An error object inside an answer whose status was 200.

    Only its type or code is kept: its message is the provider's text and may echo a secret.
    """
    labels = []
    if isinstance(error, Mapping):
        for value in (error.get("type"), error.get("code")):
            label = str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
            if _LABEL.fullmatch(label) and label not in labels:
                labels.append(label)
    known = " ".join(labels).lower()
    suffix = f" ({', '.join(labels)})" if labels else ""
    if any(word in known for word in _OVERLOADED):
        return UpstreamOverloaded(f"The model provider is overloaded or limits the gateway{suffix}.")
    if any(word in known for word in _REFUSED):
        return UpstreamRefused(
            f"The model provider refused the request{suffix}.",
            upstream_status=400,
            error_type=labels[0],
            error_code=labels[-1],
        )
    return UpstreamError(f"The model provider reported an error in its answer{suffix}.")


def malformed(body: bytes) -> UpstreamMalformed:
    """Why `body`, which is no JSON object of the expected shape, is not an answer."""
    start = body[:64].lstrip().lower()
    if not start:
        return UpstreamMalformed("The model provider's answer is empty.")
    if start.startswith(b"<"):
        return UpstreamMalformed("The model provider answered with HTML instead of JSON.")
    return UpstreamMalformed("The model provider's answer is not complete JSON of the expected shape.")
