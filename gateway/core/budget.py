"""Budgets: what may be held, and how holds and costs move through them. The one place with this arithmetic.

A budget is one limit on one scope over one window. Invariant I1: `posted + held <= limit`, unless an admin
lowered the limit or a provider billed more than was held; then nothing is admitted until there is room again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from gateway.core.entry import Granted, Refused
from gateway.core.money import MAX_NANO_USD
from gateway.core.windows import Rolling, bounds, bucket, parse_window, resets_at_ms

#: Shares of a limit, in percent, whose crossing by posted money is announced once per window.
ALERT_PERCENTS = (50, 80, 90, 100)


class OnExceed(StrEnum):
    """What a caller gets when a budget is used up (money: What agents feel). `warn` never refuses."""

    ERROR = "error"
    SUMMARIZE = "summarize"
    SOFT_STOP = "soft_stop"
    WARN = "warn"


@dataclass(frozen=True, slots=True)
class Budget:
    """One budget and what is in its current window, or in the current bucket of a rolling one.

    `[window_start_ms, window_end_ms)`; an end of None never comes. `earlier_*` is what the earlier buckets of a
    rolling window still count.
    """

    budget_id: str
    scope: str
    window: str  # as `parse_window` reads it, in `zone`
    zone: str
    window_start_ms: int
    window_end_ms: int | None
    limit_nano_usd: int
    posted_nano_usd: int = 0
    held_nano_usd: int = 0
    on_exceed: OnExceed = OnExceed.ERROR
    epoch: int = 0  # counts changes of the limit
    earlier_posted_nano_usd: int = 0
    earlier_held_nano_usd: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.limit_nano_usd <= MAX_NANO_USD:
            raise ValueError(
                f"a limit must be from 0 to {MAX_NANO_USD} nano-dollars, not {self.limit_nano_usd}"
            )

    @property
    def hard(self) -> bool:
        return self.on_exceed is not OnExceed.WARN

    @property
    def rolling(self) -> bool:
        return self.window_end_ms is not None and isinstance(parse_window(self.window, self.zone), Rolling)

    @property
    def spent_nano_usd(self) -> int:
        return self.posted_nano_usd + self.earlier_posted_nano_usd

    @property
    def reserved_nano_usd(self) -> int:
        return self.held_nano_usd + self.earlier_held_nano_usd

    @property
    def room_nano_usd(self) -> int:
        """What may still be held; negative after a breach or a lowered limit."""
        return (
            self.limit_nano_usd
            - self.posted_nano_usd
            - self.held_nano_usd
            - self.earlier_posted_nano_usd
            - self.earlier_held_nano_usd
        )


def counts_from_ms(budget: Budget, now_ms: int) -> int:
    """The start of the earliest bucket that still counts at `now_ms`."""
    return bounds(parse_window(budget.window, budget.zone), now_ms)[0]


def resets_ms(budget: Budget, now_ms: int) -> int | None:
    """When something next stops counting; None = never."""
    return resets_at_ms(parse_window(budget.window, budget.zone), now_ms)


def first_window(window: str, zone: str, now_ms: int) -> tuple[int, int | None]:
    """The window, or the bucket of a rolling one, in which a new budget begins. ValueError for a bad text."""
    return bucket(parse_window(window, zone), now_ms)


def at(budget: Budget, now_ms: int) -> Budget:
    """The budget as it stands at `now_ms`: itself, or empty in the next window if its window has ended."""
    if budget.window_end_ms is None or now_ms < budget.window_end_ms:
        return budget
    start_ms, end_ms = first_window(budget.window, budget.zone, now_ms)
    return replace(
        budget,
        window_start_ms=start_ms,
        window_end_ms=end_ms,
        posted_nano_usd=0,
        held_nano_usd=0,
        earlier_posted_nano_usd=0,
        earlier_held_nano_usd=0,
    )


def decide(
    budgets: Sequence[Budget], amount_nano_usd: int | None, min_amount_nano_usd: int | None, now_ms: int
) -> Granted | Refused:
    """Whether a hold fits all of its budgets, and how large it may be: from `min_amount` to `amount`.

    An amount of None has no upper bound: only soft budgets can admit it, and they hold nothing for it. What
    is free always fits. Refused names the tightest budget.
    """
    tightest, room = None, 0
    for b in budgets:
        if b.on_exceed is not OnExceed.WARN and (tightest is None or b.room_nano_usd < room):
            tightest, room = b, b.room_nano_usd
    if tightest is None:
        return Granted(amount_nano_usd or 0)
    if amount_nano_usd == 0:
        return Granted(0, room, tightest.scope)
    if amount_nano_usd is not None:
        least = amount_nano_usd if min_amount_nano_usd is None else min(min_amount_nano_usd, amount_nano_usd)
        if room >= max(1, least):
            held = min(amount_nano_usd, room)
            return Granted(held, room - held, tightest.scope)
    return Refused(
        tightest.scope,
        tightest.limit_nano_usd,
        tightest.spent_nano_usd,
        tightest.reserved_nano_usd,
        resets_ms(tightest, now_ms),
    )


def hold(budget: Budget, amount_nano_usd: int) -> Budget:
    """The budget after a hold of that amount was granted in it."""
    return settle(budget, -amount_nano_usd, 0)


def settle(budget: Budget, hold_nano_usd: int, cost_nano_usd: int) -> Budget:
    """The budget after a hold ended at a cost. A correction settles no hold and a signed cost."""
    # Spelled out: on the hot path, and several times as fast as dataclasses.replace.
    return Budget(
        budget.budget_id,
        budget.scope,
        budget.window,
        budget.zone,
        budget.window_start_ms,
        budget.window_end_ms,
        budget.limit_nano_usd,
        budget.posted_nano_usd + cost_nano_usd,
        budget.held_nano_usd - hold_nano_usd,
        budget.on_exceed,
        budget.epoch,
        budget.earlier_posted_nano_usd,
        budget.earlier_held_nano_usd,
    )


def exhausted(refused: Refused, min_amount_nano_usd: int | None) -> bool:
    """True if posted money alone leaves too little: no hold that ends can change that, only a limit or a window."""
    least = 1 if min_amount_nano_usd is None else max(1, min_amount_nano_usd)
    return refused.limit_nano_usd - refused.spent_nano_usd < least


def crossed(limit_nano_usd: int, before_nano_usd: int, after_nano_usd: int) -> list[int]:
    """The percents of ALERT_PERCENTS that posted money reached on its way from `before` to `after`."""
    return [p for p in ALERT_PERCENTS if before_nano_usd * 100 < limit_nano_usd * p <= after_nano_usd * 100]
