"""Money is integers. Prices are pico-dollars per token, costs are nano-dollars, and there is one rounding.

1 USD = 1e9 nano-dollars = 1e12 pico-dollars. $3 per million tokens = 3,000,000 pico-dollars per token.
A BIGINT of nano-dollars holds 9.2e9 USD.
"""

from __future__ import annotations

PICO_PER_NANO = 1_000
NANO_PER_USD = 1_000_000_000
PICO_PER_USD = 1_000_000_000_000
#: The largest amount that a BIGINT column holds; anything above is refused, never wrapped.
MAX_NANO_USD = 2**63 - 1


def nano_from_pico(pico_usd: int) -> int:
    """Round a sum of pico-dollars up to whole nano-dollars: the only rounding there is."""
    return -(-pico_usd // PICO_PER_NANO)


def usd_text(nano_usd: int) -> str:
    """Nano-dollars as an exact decimal number of dollars without exponent: 37_650_000 -> '0.03765'."""
    if nano_usd < 0:
        return "-" + usd_text(-nano_usd)
    whole, frac = divmod(nano_usd, NANO_PER_USD)
    return f"{whole}.{frac:09d}".rstrip("0") if frac else str(whole)


def pico_from_usd_text(text: str) -> int:
    """An exact decimal number of dollars as pico-dollars: '0.25' -> 250_000_000_000.

    Raises ValueError for anything but digits with at most 12 decimals.
    """
    whole, dot, frac = text.partition(".")
    if not (whole + frac).isascii() or not whole.isdigit() or (dot and not frac.isdigit()):
        raise ValueError(f"{text!r} is not a decimal number of dollars such as '0.25'")
    if len(frac) > 12:
        raise ValueError(f"{text!r} is finer than a pico-dollar")
    return int(whole) * PICO_PER_USD + int(frac.ljust(12, "0"))
