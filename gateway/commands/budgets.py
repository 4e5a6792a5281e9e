"""budgets: set and list."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.commands.database import Desk, at_desk
from gateway.commands.output import (
    OperatorError,
    amount,
    moment,
    ms_from_day,
    nano_from_usd,
    print_json,
    print_table,
    say,
)
from gateway.core.budget import ALERT_PERCENTS, AMOUNT_MAX, Budget, BudgetMode, OnExceed, resets_ms
from gateway.core.entry import Unit


@dataclass(frozen=True, slots=True)
class Rule:
    """When a budget starts anew, what it counts, and what happens when it is used up; as asked for on the command
    line.
    """

    window: str
    zone: str
    on_exceed: str = OnExceed.ERROR
    unit: str = Unit.USD
    shadow: bool = False
    alerts: str = ",".join(map(str, ALERT_PERCENTS))
    landing_percent: int | None = None


def put(path: Path | None, scope: str, limit: str, rule: Rule, reason: str, as_json: bool) -> int:
    unit = _unit(rule.unit)
    most = _limit(limit, unit)
    try:
        on_exceed = OnExceed(rule.on_exceed)
    except ValueError:
        raise OperatorError(
            f"--on-exceed must be one of {', '.join(OnExceed)}, not {rule.on_exceed!r}"
        ) from None
    mode = BudgetMode.SHADOW if rule.shadow else BudgetMode.ENFORCE
    alerts = _percents(rule.alerts)

    async def act(desk: Desk) -> Budget:
        # It would last until the next start only.
        same = (scope, rule.window, rule.zone, unit)
        if any((b.scope, b.window, b.zone, b.unit) == same for b in desk.settings.budgets):
            raise OperatorError(
                f"the budget of {scope} per {rule.window} is declared in {desk.settings.file}"
            )
        return await desk.accounts.set_budget(
            scope,
            most,
            rule.window,
            on_exceed,
            rule.zone,
            unit=unit,
            mode=mode,
            alert_percents=alerts,
            landing_percent=rule.landing_percent,
            reason=reason,
        )

    return _said(at_desk(path, act), as_json)


def adjust(
    path: Path | None, scope: str, limit: str, rule: Rule, reason: str, until: str | None, as_json: bool
) -> int:
    """Another limit for an existing budget, for good or until a UTC day or moment. An empty window or zone: whatever it
    has, if it is the only one of the scope in that unit."""
    unit = _unit(rule.unit)
    most = _limit(limit, unit)
    until_ms = None if until is None else ms_from_day(until)

    async def act(desk: Desk) -> Budget:
        window, zone = rule.window, rule.zone
        if not (window and zone):
            window, zone = _meant(await desk.accounts.list_budgets(), scope, unit, rule)
        return await desk.accounts.adjust_budget(
            scope, most, reason, unit=unit, window=window, zone=zone, until_ms=until_ms
        )

    return _said(at_desk(path, act), as_json)


def _meant(budgets: Sequence[Budget], scope: str, unit: Unit, rule: Rule) -> tuple[str, str]:
    """Window and zone of the one budget that may be meant."""
    found = [
        b
        for b in budgets
        if (b.scope, b.unit) == (scope, unit) and rule.window in ("", b.window) and rule.zone in ("", b.zone)
    ]
    if not found:
        raise OperatorError(
            f"{scope} has no such budget in {unit}", "tollhouse budgets list shows what there is"
        )
    if len(found) > 1:
        ways = " or ".join(f"--window {b.window} --zone {b.zone}" for b in found)
        raise OperatorError(f"{scope} has {len(found)} budgets in {unit}", f"say which: {ways}")
    return found[0].window, found[0].zone


def show(path: Path | None, as_json: bool) -> int:
    found = at_desk(path, lambda desk: desk.accounts.list_budgets())
    if as_json:
        print_json([document(b) for b in found])
        return 0
    now_ms = time.time_ns() // 1_000_000
    print_table(
        ["budget of", "window", "limit>", "spent>", "held>", "left>", "resets", "when used up"],
        [
            [
                b.scope,
                b.window if b.zone == "UTC" else f"{b.window} in {b.zone}",
                *(amount(n, b.unit) for n in (b.limit, b.spent, b.reserved, b.left)),
                moment(resets_ms(b, now_ms)),
                when_used_up(b.on_exceed, b.mode),
            ]
            for b in found
        ],
    )
    return 0


def document(budget: Budget) -> dict[str, Any]:
    """For programs; amounts end in their unit: `limit_nano_usd`, `limit_calls`."""
    unit = "nano_usd" if budget.unit is Unit.USD else budget.unit.value
    amounts = {
        "limit": budget.limit,
        "spent": budget.spent,
        "held": budget.reserved,
        "remaining": budget.left,
        "landing": budget.landing,
    }
    return {
        "budget_id": budget.budget_id,
        "scope": budget.scope,
        "unit": budget.unit,
        "window": budget.window,
        "zone": budget.zone,
        **{f"{name}_{unit}": n for name, n in amounts.items()},
        "resets_at_ms": resets_ms(budget, time.time_ns() // 1_000_000),
        "on_exceed": budget.on_exceed,
        "mode": budget.mode,
        "would_refuse": budget.would_refuse,
        "alerts": list(budget.alert_percents),
        "override_until_ms": budget.override_until_ms,
    }


def when_used_up(on_exceed: OnExceed, mode: BudgetMode) -> str:
    return on_exceed.value if mode is BudgetMode.ENFORCE else "shadow: only counts"


def _said(budget: Budget, as_json: bool) -> int:
    if as_json:
        print_json(document(budget))
    else:
        verb = "spend" if budget.unit is Unit.USD else "use"
        limit, left = amount(budget.limit, budget.unit), amount(budget.left, budget.unit)
        say(f"{budget.scope} may {verb} {limit} per {budget.window}, {left} left")
    return 0


def _percents(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(percent) for percent in text.replace(" ", "").split(",") if percent)
    except ValueError:
        raise OperatorError(f'--alerts must be percents such as "50,90", not {text!r}') from None


def _unit(text: str) -> Unit:
    try:
        return Unit(text)
    except ValueError:
        raise OperatorError(f"--unit must be one of {', '.join(Unit)}, not {text!r}") from None


def _limit(text: str, unit: Unit) -> int:
    if unit is Unit.USD:
        return nano_from_usd(text)
    digits = text.strip().replace("_", "").replace(",", "")
    if not (digits.isascii() and digits.isdigit()) or int(digits) > AMOUNT_MAX:
        raise OperatorError(f"{text!r} is not a number of {unit.replace('_', ' ')}")
    return int(digits)
