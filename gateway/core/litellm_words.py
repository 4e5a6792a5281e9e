"""Words of LiteLLM's proxy for what we have under other names: how its budgets begin anew, how long its keys last.

Source: the names in its documentation of virtual keys and budgets, November 2026; there 24h, 7d, 30d and 1mo follow the
calendar.
"""

from __future__ import annotations

import re
from decimal import Decimal

_CALENDAR = {
    "1h": "hour",
    "60m": "hour",
    "1d": "day",
    "24h": "day",
    "7d": "week",
    "1w": "week",
    "30d": "month",
    "1mo": "month",
    "monthly": "month",
    "weekly": "week",
    "daily": "day",
}
_LENGTH = re.compile(r"([1-9][0-9]{0,5})(s|m|h|d|w|mo)", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 7 * 86_400, "mo": 30 * 86_400}


def window_of(budget_duration: str | None) -> str:
    """Our window for a `budget_duration`; None never begins anew. ValueError for what is no duration."""
    if budget_duration is None:
        return "lifetime"
    if budget_duration in _CALENDAR:
        return _CALENDAR[budget_duration]
    seconds = seconds_of(budget_duration)
    for unit in ("d", "h", "m"):
        number, rest = divmod(seconds, _SECONDS[unit])
        if not rest:
            return f"{number}{unit}"
    raise ValueError(f"{budget_duration!r} is not whole minutes")


def seconds_of(duration: str) -> int:
    """ "30s", "20m", "12h", "7d", "1mo". ValueError for anything else."""
    match = _LENGTH.fullmatch(duration)
    if match is None:
        raise ValueError(f'{duration!r} is not a duration such as "24h", "7d" or "1mo"')
    return int(match[1]) * _SECONDS[match[2]]


def decimal_text(number: int | float | str) -> str:
    """A number as it was written, without an exponent: 1e-06 is "0.000001". ValueError for what is no number."""
    if isinstance(number, bool):
        raise ValueError("must be a number")
    try:
        value = Decimal(str(number))
    except ArithmeticError:
        raise ValueError(f"{number!r} is not a number") from None
    if not value.is_finite() or value < 0:
        raise ValueError(f"{number!r} is not an amount")
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
