"""The least that a request can cost: below it a budget pays for none like it, whatever else it holds."""

from __future__ import annotations

from gateway.core.money import nano_from_pico
from gateway.core.prices import PriceRow
from gateway.core.rates import SizedRates


def least_nano_usd(row: PriceRow, input_tokens: int) -> int:
    """What so many input tokens cost at least, at any hour, size and service tier; 0 if they may be free."""
    sized = [SizedRates(row.rates, row.size_tiers), *(w.price for w in row.hours)]
    num = den = 1
    for special in (*row.service_tiers.values(), *(() if row.batch is None else (row.batch,))):
        if isinstance(special, SizedRates):
            sized.append(special)
        elif special.num < special.den:  # several may multiply
            num, den = num * special.num, den * special.den
    rate = min(rates.input for s in sized for rates in (s.rates, *(r for _, r in s.size_tiers)))
    return nano_from_pico(-(-input_tokens * rate * num // den))
