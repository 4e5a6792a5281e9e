"""How fast one replica reads, reads from its cache, and writes: what is measured of it, and what follows.

    R_peak   tokens of one full chunk of prefill / seconds until the first token of its answer, on an idle replica
    cached   the same prompt a second time: its tokens / seconds until the first token
    output   tokens of many answers at once / seconds from the first token of the first to the last of the last
    tau      R_peak x T_max: so many uncached tokens a replica may have before it until another one is asked

Each includes the way to the replica and back, so none flatters it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

#: The smallest prompt of the series, as a part of the largest.
_STEPS = (8, 4, 2, 1)
#: At most so much of a prompt that nobody has sent before may come from a cache: a template's own tokens.
_STRAY_SHARE = 0.05
#: At least so much of a prompt that was just sent must come from it.
_CACHED_SHARE = 0.8


class Unmeasurable(ValueError):
    """What came back cannot be what was meant to be measured; the message says why."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer, timed. Tokens as the replica reported them; `cached_tokens` None = it reports none."""

    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    first_s: float  # from sending to the first token
    last_s: float  # from sending to the last


@dataclass(frozen=True, slots=True)
class Point:
    """Prompts of one size."""

    prompt_tokens: int
    first_s: float  # the median

    @property
    def tokens_per_s(self) -> float:
        return self.prompt_tokens / self.first_s


@dataclass(frozen=True, slots=True)
class Calibration:
    """Of one replica of a deployment; all rates in tokens per second. `cached_tokens_per_s` None = it does not report what
    it read from its cache, or has none."""

    prefill_tokens_per_s: float
    cached_tokens_per_s: float | None
    output_tokens_per_s: float
    single_output_tokens_per_s: float
    chunk_tokens: int
    upstream_model: str
    measured_at_ms: int

    def tau_tokens(self, first_token_max_s: float) -> int:
        return round(self.prefill_tokens_per_s * first_token_max_s)


def sizes(chunk_tokens: int) -> tuple[int, ...]:
    """Of the prompts, in tokens, growing to one full chunk."""
    return tuple(max(1, chunk_tokens // part) for part in _STEPS)


def point_of(answers: Sequence[Timed]) -> Point:
    """Prompts that nobody had sent before. Raises `Unmeasurable` if they came from a cache."""
    for one in answers:
        if one.cached_tokens and one.cached_tokens > one.prompt_tokens * _STRAY_SHARE:
            raise Unmeasurable(
                f"{one.cached_tokens} of {one.prompt_tokens} tokens came from a cache that cannot have held them"
            )
    middle = point_between(answers)
    if middle.first_s <= 0:
        raise Unmeasurable("the first token came in no time at all")
    return middle


def point_between(answers: Sequence[Timed]) -> Point:
    return Point(
        round(median(a.prompt_tokens for a in answers)),
        median(a.first_s for a in answers),
    )


def cached_rate(answers: Sequence[Timed]) -> float | None:
    """Of prompts that were sent just before. None if the replica does not report that it read any."""
    read = [a for a in answers if a.cached_tokens and a.cached_tokens >= a.prompt_tokens * _CACHED_SHARE]
    if not read:
        return None
    return median(a.prompt_tokens / a.first_s for a in read)


def output_rate(answers: Sequence[tuple[float, Timed]]) -> float:
    """Of answers that were made together; each with the second in which it was sent. What comes before the first token
    of each is prefill and does not count."""
    tokens = sum(max(0, a.output_tokens - 1) for _, a in answers)
    began_s = min(sent_s + a.first_s for sent_s, a in answers)
    ended_s = max(sent_s + a.last_s for sent_s, a in answers)
    if not tokens or ended_s <= began_s:
        raise Unmeasurable("the answers are too short to time; ask for more tokens")
    return tokens / (ended_s - began_s)


def calibration(
    points: Sequence[Point],
    again: Sequence[Timed],
    alone: tuple[float, Timed],
    together: Sequence[tuple[float, Timed]],
    *,
    upstream_model: str,
    now_ms: int,
) -> Calibration:
    """`points` by size; the last one is a full chunk. `again`: the prompts of the last point a second time."""
    chunk = points[-1]
    cached = cached_rate(again)
    return Calibration(
        round(chunk.tokens_per_s, 1),
        # noise must not make a token that is read dearer than one that is computed
        None if cached is None else round(max(cached, chunk.tokens_per_s), 1),
        round(max(output_rate(together), output_rate([alone])), 1),
        round(output_rate([alone]), 1),
        chunk.prompt_tokens,
        upstream_model,
        now_ms,
    )
