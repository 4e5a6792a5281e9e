"""What a caller is told of budgets: the words of a refusal, and the headers of every answer.

Nothing in here reads as something that an agent would wait for or repeat: no rate, no length, no retry (money: What
agents feel).
"""

from __future__ import annotations

from datetime import UTC, datetime

from gateway.core.budget import exhausted
from gateway.core.entry import Amounts, Granted, Refused, Unit
from gateway.core.errors import BudgetExceeded, UnboundableRequest
from gateway.core.money import usd_text
from gateway.core.task import State

Headers = list[tuple[str, str]]

_UNIT_NAMES = {
    Unit.USD: "dollars",
    Unit.INPUT_TOKENS: "input tokens",
    Unit.OUTPUT_TOKENS: "output tokens",
    Unit.CALLS: "calls",
}
_REMAINING = {unit: f"x-budget-remaining-{unit.value.replace('_', '-')}" for unit in Unit}


def refusal_of(
    refused: Refused, ask: Amounts, least: Amounts, unbounded_by: str = "model"
) -> BudgetExceeded | UnboundableRequest:
    """Why, how much, and until when, on one line."""
    scope = refused.scope.replace(":", " ", 1)
    if refused.state and not refused.limit:
        message = f"the {scope} is {refused.state}, so it gets no answers"
        return BudgetExceeded(message, scope=refused.scope, refused=refused)
    amount, unit = ask.of(refused.unit), refused.unit
    if amount is None:
        missing = "known price or no upper bound" if unit is Unit.USD else "upper bound"
        why = f"this request has no {missing}, and the {scope} has a hard budget in {_UNIT_NAMES[unit]}"
        if unbounded_by == "tools":
            why += (
                "; it offers a tool that the provider runs itself (as web search), and what such a tool finds is billed "
                "as input without a limit: switch it off, or have server_tools_tokens_max set for this provider"
            )
        return UnboundableRequest(why, param=unbounded_by)
    ended = refused.state == State.PAUSED_BUDGET or exhausted(refused, least)
    used = _used(refused, bool(ended or refused.state or not refused.remaining))
    if refused.state:
        why = f"the task is {refused.state} until it is raised"
    else:
        why = f"this request may {'cost' if unit is Unit.USD else 'use'} up to {_shown(amount, unit)}"
    return BudgetExceeded(
        f"{used}; {why}. {_way_out(refused)}",
        scope=refused.scope,
        unit=unit,
        remaining=refused.remaining,
        resets_at=instant(refused.resets_at_ms),
        refused=refused,
        used_up=ended,
    )


def used_up(refused: Refused) -> BudgetExceeded:
    """The same for a request whose amount nobody has looked up, for what is left pays for none like it."""
    return BudgetExceeded(
        f"{_used(refused, True)}; what is left does not pay for this request. {_way_out(refused)}",
        scope=refused.scope,
        unit=refused.unit,
        remaining=refused.remaining,
        resets_at=instant(refused.resets_at_ms),
        refused=refused,
        used_up=True,
    )


def _used(refused: Refused, used_up: bool) -> str:
    unit = refused.unit
    why = "is used up" if used_up else "has too little left for this request"
    kept_back = f", {_shown(refused.kept_back, unit)} of it kept back for a last answer"
    return (
        f"the budget of the {refused.scope.replace(':', ' ', 1)} {why}: {_shown(refused.spent, unit)} spent and "
        f"{_shown(refused.held, unit)} reserved of {_shown(refused.limit, unit)}"
        f"{kept_back * bool(refused.kept_back)}"
    )


def _way_out(refused: Refused) -> str:
    resets = instant(refused.resets_at_ms)
    if resets and refused.rolling:
        return f"Its window is rolling: each amount counts for a whole window, and none comes back before {resets}."
    if resets:
        return f"It resets at {resets}."
    kind, _, name = refused.scope.partition(":")
    if kind == "task":
        return f"Ask its owner to raise it (POST /v1/tasks/{name}/budgets), or start a new task."
    return "Ask its owner to raise it."


def refusal_headers(error: BudgetExceeded) -> Headers:
    left = usd_text(error.remaining) if error.unit == "usd" else str(error.remaining)
    headers = [("x-budget-scope", error.scope), (_REMAINING[Unit(error.unit)], left)]
    if error.resets_at:
        headers.append(("x-budget-resets-at", error.resets_at))
    return headers


def granted_headers(granted: Granted) -> Headers:
    """What is left in the tightest budget of each unit once this hold is used up, and which budgets only warn."""
    headers: Headers = []
    if granted.remaining_nano_usd is not None:
        headers.append((_REMAINING[Unit.USD], usd_text(granted.remaining_nano_usd)))
        headers.append(("x-budget-scope", granted.remaining_scope))
    if granted.remaining_calls is not None:
        headers.append((_REMAINING[Unit.CALLS], str(granted.remaining_calls)))
    if granted.remaining_input_tokens is not None:
        headers.append((_REMAINING[Unit.INPUT_TOKENS], str(granted.remaining_input_tokens)))
    if granted.remaining_output_tokens is not None:
        headers.append((_REMAINING[Unit.OUTPUT_TOKENS], str(granted.remaining_output_tokens)))
    if granted.warned:
        headers.append(("x-budget-warning", ", ".join(f"{r.scope} {r.unit}" for r in granted.warned)))
    return headers


def warning_of(refused: Refused) -> tuple[str, dict[str, object]]:
    """(what is the same for the same event, body) of the alert that a budget which only warns is passed."""
    body: dict[str, object] = {
        "scope": refused.scope,
        "unit": refused.unit.value,
        "limit": refused.limit,
        "spent": refused.spent,
        "held": refused.held,
        "resets_at": instant(refused.resets_at_ms),
        "message": f"the budget of {refused.scope} is used up, and only warns",
    }
    return f"warned/{refused.scope}/{refused.unit}/{refused.limit}/{refused.resets_at_ms}", body


def _shown(amount: int, unit: Unit) -> str:
    if unit is Unit.USD:
        return f"${usd_text(amount)}"
    return f"{amount:,} {_UNIT_NAMES[unit].removesuffix('s' if amount == 1 else '')}"


def instant(at_ms: int | None) -> str | None:
    """RFC 3339 in UTC, to the second."""
    return None if at_ms is None else f"{datetime.fromtimestamp(at_ms // 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
