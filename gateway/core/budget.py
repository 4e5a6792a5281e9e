"""Budgets: what may be held, and how holds and costs move through them. The one place with this arithmetic.

A budget is one limit on one scope in one unit over one window. Invariant I1: `posted + held <= limit`, unless an
admin lowered the limit or a provider billed more than was held; then nothing is admitted until there is room again.

A child task's budget is carved from its parent's: of the parent it occupies

    posted(child)  as posted,  and  claim(child) = max(held(child), carved(child) - posted(child))  as held,

together `max(posted + held, carved)` of the child. `carved` is the child's limit while it is open and 0 when it is
done. So while the child keeps its own I1, what it occupies is its limit whatever it holds and spends, and its attempts
need not look at the parent: I1 of the parent was decided when the slice was carved. What the child spends moves from
held to posted in the parent, all the way up, in the settling transaction. After a breach or a lowered limit the claim
still covers what the child holds, and a child that is done claims no more than that. `propagate` is this rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from gateway.core.entry import Amounts, Granted, Refused, Unit
from gateway.core.entry import OnExceed as OnExceed
from gateway.core.money import MAX_NANO_USD
from gateway.core.windows import Rolling, bounds, bucket, parse_window, resets_at_ms

#: Shares of a limit, in percent, whose crossing by what is posted is announced once per window, unless a budget has
#: others.
ALERT_PERCENTS = (50, 80, 90, 100)
#: The largest limit and the largest hold, in any unit.
AMOUNT_MAX = MAX_NANO_USD


class BudgetMode(StrEnum):
    """A `shadow` budget never refuses: it holds and posts like any other, and counts what it would have refused."""

    ENFORCE = "enforce"
    SHADOW = "shadow"


class Budget(msgspec.Struct, frozen=True):
    """One budget and what is in its current window, or in the current bucket of a rolling one. Amounts are in `unit`.

    `[window_start_ms, window_end_ms)`; an end of None never comes. `earlier_*` is what the earlier buckets of a
    rolling window still count. `override_limit` stands in for `base_limit` until `override_until_ms`.
    """

    budget_id: str
    scope: str
    window: str  # as `parse_window` reads it, in `zone`
    zone: str
    window_start_ms: int
    window_end_ms: int | None
    base_limit: int
    posted: int = 0
    held: int = 0
    on_exceed: OnExceed = OnExceed.ERROR
    epoch: int = 0  # counts changes of the limit
    unit: Unit = Unit.USD
    mode: BudgetMode = BudgetMode.ENFORCE
    alert_percents: tuple[int, ...] = ALERT_PERCENTS
    landing_percent: int = 0
    override_limit: int | None = None
    override_until_ms: int | None = None
    ancestors: tuple[str, ...] = ()  # ids of the budgets it is carved from, the nearest first
    carved: int = 0  # its share of the nearest, while it is open
    would_refuse: int = 0  # attempts that a shadow budget would have refused in this window
    earlier_posted: int = 0
    earlier_held: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.base_limit <= AMOUNT_MAX:
            raise ValueError(f"a limit must be from 0 to {AMOUNT_MAX}, not {self.base_limit}")

    @property
    def hard(self) -> bool:
        """It refuses what does not fit."""
        return self.on_exceed is not OnExceed.WARN and self.mode is BudgetMode.ENFORCE

    @property
    def rolling(self) -> bool:
        return self.window_end_ms is not None and isinstance(parse_window(self.window, self.zone), Rolling)

    @property
    def limit(self) -> int:
        return self.base_limit if self.override_limit is None else self.override_limit

    @property
    def landing(self) -> int:
        """The part of the limit that only a landing may use: of calls at least one, for less pays for no landing."""
        kept_back = self.limit * self.landing_percent // 100
        if not kept_back and self.landing_percent and self.unit is Unit.CALLS:
            return min(1, max(0, self.limit - 1))
        return kept_back

    @property
    def spent(self) -> int:
        return self.posted + self.earlier_posted

    @property
    def reserved(self) -> int:
        return self.held + self.earlier_held

    @property
    def left(self) -> int:
        """What is neither spent nor reserved, landing included; negative after a breach or a lowered limit."""
        return self.limit - self.posted - self.held - self.earlier_posted - self.earlier_held

    @property
    def room(self) -> int:
        """What an attempt may still hold."""
        return self.left - self.landing if self.landing_percent else self.left


def counts_from_ms(budget: Budget, now_ms: int) -> int:
    """The start of the earliest bucket that still counts at `now_ms`."""
    return bounds(parse_window(budget.window, budget.zone), now_ms)[0]


def resets_ms(budget: Budget, now_ms: int) -> int | None:
    """When something next stops counting; None = never."""
    return resets_at_ms(parse_window(budget.window, budget.zone), now_ms)


def first_window(window: str, zone: str, now_ms: int) -> tuple[int, int | None]:
    """The window, or the bucket of a rolling one, in which a new budget begins. ValueError for a bad text."""
    return bucket(parse_window(window, zone), now_ms)


def in_force(budget: Budget, now_ms: int) -> Budget:
    """The budget without an override that is over."""
    if budget.override_until_ms is None or now_ms < budget.override_until_ms:
        return budget
    return msgspec.structs.replace(budget, override_limit=None, override_until_ms=None)


def at(budget: Budget, now_ms: int) -> Budget:
    """The budget as it stands at `now_ms`: itself, or empty in the next window if its window has ended; `in_force`."""
    budget = in_force(budget, now_ms)
    if budget.window_end_ms is None or now_ms < budget.window_end_ms:
        return budget
    start_ms, end_ms = first_window(budget.window, budget.zone, now_ms)
    return msgspec.structs.replace(
        budget,
        window_start_ms=start_ms,
        window_end_ms=end_ms,
        posted=0,
        held=0,
        would_refuse=0,
        earlier_posted=0,
        earlier_held=0,
    )


def decide(
    budgets: Sequence[Budget], ask: Amounts, least: Amounts, now_ms: int, landing: bool = False
) -> Granted | Refused:
    """Whether a hold fits all of its budgets, and how large it may be: in dollars and in output tokens from `least`
    to `ask`, in input tokens and calls as asked.

    What has no upper bound is held as 0, and no hard budget in its unit admits it. What is free always fits.
    `landing` may use the part of a limit that is kept back. Refused names the tightest budget of the first unit
    that does not fit.
    """
    if not budgets:
        return Granted(ask.nano_usd or 0, output_tokens=ask.output_tokens)
    tightest: dict[Unit, tuple[int, Budget]] = {}
    warned: list[Refused] = []
    for b in budgets:
        if b.mode is not BudgetMode.ENFORCE:
            continue
        if b.on_exceed is OnExceed.WARN:
            if not fits(b, ask, least):
                warned.append(refused_by(b, now_ms, landing))
            continue
        room = b.left if landing else b.room
        known = tightest.get(b.unit)
        if known is None or room < known[0]:
            tightest[b.unit] = room, b
    nano_usd, scope, output_tokens = ask.nano_usd or 0, "", ask.output_tokens
    left: dict[Unit, int] = {}
    for unit, (room, b) in tightest.items():
        amount = _fitting(unit, ask, least, room)
        if amount is None:
            return refused_by(b, now_ms, landing)
        left[unit] = room - amount
        if unit is Unit.USD:
            nano_usd, scope = amount, b.scope
        elif unit is Unit.OUTPUT_TOKENS:
            output_tokens = amount
    return Granted(
        nano_usd,
        left.get(Unit.USD),
        scope,
        0,
        output_tokens,
        left.get(Unit.INPUT_TOKENS),
        left.get(Unit.OUTPUT_TOKENS),
        left.get(Unit.CALLS),
        tuple(warned),
    )


def used_percents(budgets: Iterable[Budget]) -> tuple[tuple[str, int], ...]:
    """(scope, percent spent or held) of budgets that are half used up or more: what rules may ask for."""
    found = []
    for b in budgets:
        limit, taken = b.limit, b.posted + b.held + b.earlier_posted + b.earlier_held
        if 2 * taken >= limit > 0:
            found.append((b.scope, min(100, 100 * taken // limit)))
    return tuple(found)


def _fitting(unit: Unit, ask: Amounts, least: Amounts, room: int) -> int | None:
    """What may be held where so much room is; None if it does not fit."""
    amount = ask.of(unit)
    if not amount:
        return amount
    if amount <= room:
        return amount
    lowest = amount
    if unit is Unit.USD or unit is Unit.OUTPUT_TOKENS:
        wanted = least.of(unit)
        lowest = amount if wanted is None else min(wanted, amount)
    return room if room >= max(1, lowest) else None


def fits(budget: Budget, ask: Amounts, least: Amounts) -> bool:
    """Whether this budget alone would admit the hold if it were hard."""
    return _fitting(budget.unit, ask, least, budget.room) is not None


def stop_of(b: Budget) -> str:
    """What names one stop of a budget that many tasks share: until its next window, or until its limit changes."""
    return f"{b.scope} {b.unit} {0 if b.rolling else b.window_start_ms}.{b.epoch}"


def shared_landing(budgets: Iterable[Budget]) -> Budget | None:
    """The most used of those budgets of keys, teams and tenants that let each task under them sum up."""
    found = [
        b for b in budgets if b.hard and b.on_exceed is OnExceed.SUMMARIZE and not b.scope.startswith("task:")
    ]
    return max(found, key=_used_ppm, default=None)


def fullest(budgets: Iterable[Budget]) -> Budget:
    """The one of which the largest share is spent; there must be one."""
    return max(budgets, key=_used_ppm)


def _used_ppm(b: Budget) -> int:
    return 1_000_000 * b.spent // max(1, b.limit)


def refused_by(b: Budget, now_ms: int, landing: bool = False) -> Refused:
    """What this budget says to an ask that does not fit it."""
    kept_back = 0 if landing else b.landing
    return Refused(
        b.scope,
        b.limit,
        b.spent,
        b.reserved,
        resets_ms(b, now_ms),
        b.unit,
        b.on_exceed,
        kept_back,
        rolling=b.rolling,
    )


def held_by(ask: Amounts, granted: Granted) -> Amounts:
    """What a granted hold holds of each unit."""
    return Amounts(granted.amount_nano_usd, ask.input_tokens or 0, granted.output_tokens or 0, ask.calls)


def hold(budget: Budget, amounts: Amounts) -> Budget:
    """The budget after a hold of these amounts was granted in it."""
    amount = amounts.of(budget.unit)
    return msgspec.structs.replace(budget, held=budget.held + amount) if amount else budget


def settle(budget: Budget, hold: int, cost: int) -> Budget:
    """The budget after a hold ended at a cost. A correction settles no hold and a signed cost."""
    return msgspec.structs.replace(budget, held=budget.held - hold, posted=budget.posted + cost)


def exhausted(refused: Refused, least: Amounts) -> bool:
    """True if posted money alone leaves too little: no hold that ends can change that, only a limit or a window."""
    wanted = max(1, least.of(refused.unit) or 1)
    return refused.limit - refused.kept_back - refused.spent < wanted


def may_fit_soon(refused: Refused, least: Amounts) -> bool:
    """True if an attempt that ends may make room: only what is held leaves too little."""
    return refused.held > 0 and not refused.state and not exhausted(refused, least)


def crossed(percents: Sequence[int], limit: int, before: int, after: int) -> list[int]:
    """The percents of a limit that were reached on the way from `before` to `after`."""
    return [p for p in percents if before * 100 < limit * p <= after * 100]


def claim(budget: Budget) -> int:
    """What it occupies of the budget it is carved from, beyond what it has posted there."""
    return max(budget.held, budget.carved - budget.posted)


#: (change of held, change of posted)
Delta = tuple[int, int]


def propagate(budgets: Mapping[str, Budget], deltas: Mapping[str, Delta]) -> dict[str, Delta]:
    """All changes that follow from changes of some budgets, those included.

    `budgets`, by id, are those that change and all of their ancestors, as they are before.
    """
    changes = dict(deltas)
    for budget in sorted(budgets.values(), key=lambda b: -len(b.ancestors)):  # children before their parents
        if not budget.ancestors or budget.budget_id not in changes or budget.ancestors[0] not in budgets:
            continue
        held, posted = changes[budget.budget_id]
        after = settle(budget, -held, posted)
        above = budget.ancestors[0]
        held_above, posted_above = changes.get(above, (0, 0))
        changes[above] = held_above + claim(after) - claim(budget), posted_above + posted
    return changes
