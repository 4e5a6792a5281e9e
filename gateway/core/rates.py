"""Rates per token, and what can vary them: input size, a ratio, an hour of the day. Integers only.

Rates are never guessed low. Where there is no rate for a class of tokens:
- `cache_read` costs what uncached input costs;
- `cache_write_5m` (the provider's default write class) costs the dearest of input and the known write rates;
- `cache_write_1h` and `cache_write_12h` cost the same, except that where only the default write class is priced
  they cost 2 and 2.5 times the input rate (what Anthropic and OpenAI charge for theirs, November 2026).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import lru_cache

from gateway.core.usage import Usage

#: $100,000 per million tokens. With MAX_TOKENS and MAX_RATIO no cost can exceed a BIGINT of nano-dollars.
MAX_RATE_PICO_USD = 10**11
MAX_RATIO = 10
DAY_MIN = 24 * 60


@dataclass(frozen=True, slots=True)
class Rates:
    """Pico-dollars per token; None = this class has no price of its own (see the module's docstring)."""

    input: int
    output: int
    cache_read: int | None = None
    cache_write_5m: int | None = None
    cache_write_1h: int | None = None
    cache_write_12h: int | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            rate = getattr(self, f.name)
            if rate is None and f.default is None:
                continue
            if type(rate) is not int or not 0 <= rate <= MAX_RATE_PICO_USD:
                raise ValueError(f"{f.name} must be an integer from 0 to {MAX_RATE_PICO_USD}, not {rate!r}")

    @property
    def read(self) -> int:
        return self.input if self.cache_read is None else self.cache_read

    @property
    def write_5m(self) -> int:
        return self._dearest_known() if self.cache_write_5m is None else self.cache_write_5m

    @property
    def write_1h(self) -> int:
        return self._long_write(4) if self.cache_write_1h is None else self.cache_write_1h

    @property
    def write_12h(self) -> int:
        return self._long_write(5) if self.cache_write_12h is None else self.cache_write_12h

    @property
    def prices_writes(self) -> bool:
        return (self.cache_write_5m, self.cache_write_1h, self.cache_write_12h) != (None, None, None)

    def _dearest_known(self) -> int:
        return max(self.input, self.cache_write_5m or 0, self.cache_write_1h or 0, self.cache_write_12h or 0)

    def _long_write(self, half_inputs: int) -> int:
        known = self._dearest_known()
        if self.cache_write_5m is None or self.cache_write_1h is not None or self.cache_write_12h is not None:
            return known
        return max(known, -(-half_inputs * self.input // 2))

    def pico_usd(self, usage: Usage) -> int:
        # A rate that has to be looked for is looked for only where there is something to price.
        sum_ = usage.input_uncached * self.input + usage.output * self.output
        if usage.cache_read:
            sum_ += usage.cache_read * self.read
        if usage.cache_write_5m:
            sum_ += usage.cache_write_5m * self.write_5m
        if usage.cache_write_1h:
            sum_ += usage.cache_write_1h * self.write_1h
        if usage.cache_write_12h:
            sum_ += usage.cache_write_12h * self.write_12h
        return sum_


@lru_cache(4_096)  # of a price list as it was loaded: the same few Rates again and again
def dearest_input(rates: Rates, writes: bool, writes_1h: bool) -> int:
    """The dearest class that an input token may fall in."""
    dearest = max(rates.input, rates.read)
    if writes:
        dearest = max(dearest, rates.write_5m)
        if writes_1h:
            dearest = max(dearest, rates.write_1h, rates.write_12h)
    return dearest


@dataclass(frozen=True, slots=True)
class SizedRates:
    """Rates, and other rates for requests whose total input exceeds a size: the *whole* request then costs those.

    `size_tiers` are (above_input_tokens, rates) in rising order.
    """

    rates: Rates
    size_tiers: tuple[tuple[int, Rates], ...] = ()

    def __post_init__(self) -> None:
        edges = [above for above, _ in self.size_tiers]
        if edges != sorted(set(edges)) or any(above < 0 for above in edges):
            raise ValueError(f"size tiers must rise from 0, not {edges}")

    def at(self, input_total: int) -> Rates:
        reached = self.rates
        for above, rates in self.size_tiers:
            if input_total <= above:
                break
            reached = rates
        return reached

    def bands(self, input_bound: int) -> Iterator[tuple[int, Rates]]:
        """Each tier that at most `input_bound` tokens can reach, with the most input tokens possible in it."""
        rates = self.rates
        for above, next_rates in self.size_tiers:
            if input_bound <= above:
                break
            yield above, rates
            rates = next_rates
        yield input_bound, rates


@dataclass(frozen=True, slots=True)
class Ratio:
    """A price as an exact multiple of the standard one: num/den."""

    num: int
    den: int = 1

    def __post_init__(self) -> None:
        if self.den < 1 or not 0 <= self.num <= MAX_RATIO * self.den:
            raise ValueError(f"a ratio must be from 0 to {MAX_RATIO}, not {self.num}:{self.den}")


@dataclass(frozen=True, slots=True)
class HourWindow:
    """Rates from `start_min` until before `end_min`, minutes after midnight UTC; may wrap midnight."""

    start_min: int
    end_min: int
    price: SizedRates

    def __post_init__(self) -> None:
        if (
            not (0 <= self.start_min < DAY_MIN and 0 <= self.end_min <= DAY_MIN)
            or self.start_min == self.end_min
        ):
            raise ValueError(f"an hour window must lie within a day, not {self.start_min} to {self.end_min}")

    def covers(self, minute: int) -> bool:
        if self.start_min < self.end_min:
            return self.start_min <= minute < self.end_min
        return minute >= self.start_min or minute < self.end_min
