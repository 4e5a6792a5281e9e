"""budgets: set and list."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.commands.database import Desk, at_desk
from gateway.commands.output import (
    OperatorError,
    dollars,
    moment,
    nano_from_usd,
    print_json,
    print_table,
    say,
)
from gateway.core.budget import Budget, OnExceed, resets_ms


@dataclass(frozen=True, slots=True)
class Rule:
    """When a budget starts anew, and what happens when it is used up; as asked for on the command line."""

    window: str
    zone: str
    on_exceed: str


def put(path: Path | None, scope: str, limit: str, rule: Rule, as_json: bool) -> int:
    limit_nano_usd = nano_from_usd(limit)
    try:
        on_exceed = OnExceed(rule.on_exceed)
    except ValueError:
        raise OperatorError(
            f"--on-exceed must be one of {', '.join(OnExceed)}, not {rule.on_exceed!r}"
        ) from None

    async def act(desk: Desk) -> Budget:
        # It would last until the next start only.
        same = (scope, rule.window, rule.zone)
        if any((b.scope, b.window, b.zone) == same for b in desk.settings.budgets):
            raise OperatorError(
                f"the budget of {scope} per {rule.window} is declared in {desk.settings.file}"
            )
        return await desk.accounts.set_budget(scope, limit_nano_usd, rule.window, on_exceed, rule.zone)

    budget = at_desk(path, act)
    if as_json:
        print_json(document(budget))
    else:
        say(
            f"{budget.scope} may spend {dollars(budget.limit_nano_usd)} per {budget.window}, {_left(budget)} left"
        )
    return 0


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
                dollars(b.limit_nano_usd),
                dollars(b.spent_nano_usd),
                dollars(b.reserved_nano_usd),
                _left(b),
                moment(resets_ms(b, now_ms)),
                b.on_exceed,
            ]
            for b in found
        ],
    )
    return 0


def document(budget: Budget) -> dict[str, Any]:
    return {
        "budget_id": budget.budget_id,
        "scope": budget.scope,
        "window": budget.window,
        "zone": budget.zone,
        "limit_nano_usd": budget.limit_nano_usd,
        "spent_nano_usd": budget.spent_nano_usd,
        "held_nano_usd": budget.reserved_nano_usd,
        "remaining_nano_usd": budget.room_nano_usd,
        "resets_at_ms": resets_ms(budget, time.time_ns() // 1_000_000),
        "on_exceed": budget.on_exceed,
    }


def _left(budget: Budget) -> str:
    return dollars(budget.room_nano_usd)
