"""Budgets of tenants, teams, keys and tasks."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.admin.bodies import BudgetPatch
from gateway.admin.call import PAGE, Call, Json, Reply, etag_of
from gateway.admin.problems import Fault, Problem, invalid
from gateway.admin.route import PAGED, Route, choice, text
from gateway.admin.schemas import BudgetIn
from gateway.admin.shown import BudgetOut, budget_out, budget_rule_out
from gateway.core.budget import Budget
from gateway.core.entry import Unit
from gateway.core.offices import Right


async def list_budgets(call: Call) -> Reply:
    return await call.page(call.registry.budgets, budget_out)


async def create_budget(call: Call) -> Reply:
    """Conflict if the scope has one of that unit and window."""
    wanted = BudgetIn.model_validate(call.body)
    return await call.change(
        lambda it: it.put_budget(wanted.scope, wanted.rule(wanted.zone), wanted.reason, None),
        budget_out,
        status=201,
        tag=_tag,
    )


async def set_budget(call: Call) -> Reply:
    """Give a scope a budget, or change the one of that unit and window; what was spent stays spent."""
    wanted = BudgetIn.model_validate(call.body)
    if call.if_match is not None:
        filters = {"scope": wanted.scope, "unit": wanted.unit.value, "window": wanted.window}
        page = await call.registry.budgets(filters, None, PAGE)
        if all(budget.zone != wanted.zone for budget in page.rows):
            raise Problem(412, "There is no such budget yet.", [Fault("If-Match", "names nothing")])

    def check(before: Budget, after: Budget) -> None:
        call.expect(budget_out(before), _tag)
        refuse(before, after, wanted.reason, below_spent=wanted.below_spent)

    return await call.change(
        lambda it: it.put_budget(wanted.scope, wanted.rule(wanted.zone), wanted.reason, check),
        budget_out,
        tag=_tag,
    )


async def get_budget(call: Call) -> Reply:
    body = budget_out(await call.registry.budget(call.path["budget_id"]))
    return Reply(body, etag=_tag(body))


async def change_budget(call: Call) -> Reply:
    """The entity tag is over what was decided, not over what is spent."""
    patch = BudgetPatch.model_validate(call.body)

    def change(before: Budget, now_ms: int) -> Budget:
        call.expect(budget_out(before), _tag)
        after = patched(before, patch, now_ms)
        refuse(before, after, patch.reason, below_spent=patch.below_spent)
        return after

    budget_id = call.path["budget_id"]
    return await call.change(
        lambda it: it.change_budget(budget_id, change, patch.reason), budget_out, tag=_tag
    )


async def delete_budget(call: Call) -> Reply:
    """What it counted is gone with it; what was spent stays in the ledger."""

    def expect(found: Budget) -> None:
        call.expect(budget_out(found), _tag)

    return await call.change(lambda it: it.drop_budget(call.path["budget_id"], expect), budget_out, tag=_tag)


def patched(before: Budget, patch: BudgetPatch, now_ms: int) -> Budget:
    """The budget as the patch wants it."""
    changes: dict[str, Any] = {}
    given = patch.model_fields_set
    for unit, limit in patch.limits.items():
        if unit is not before.unit:
            raise invalid(f"limit_{unit}", f"this budget is in {before.unit}")
        if patch.until is None:
            changes |= {"base_limit": limit, "override_limit": None, "override_until_ms": None}
        else:
            changes |= {"override_limit": limit, "override_until_ms": patch.until}
    if patch.until is not None and patch.until <= now_ms:
        raise invalid("until", "must be in the future")
    if "until" in given and patch.until is None:
        changes |= {"override_limit": None, "override_until_ms": None}
    for name in ("on_exceed", "mode", "landing_percent"):
        if name in given:
            changes[name] = getattr(patch, name)
    if "alerts" in given:
        changes["alert_percents"] = tuple(patch.alerts)
    return msgspec.structs.replace(before, **changes)


def raised(before: Budget, patch: BudgetPatch, now_ms: int) -> Budget:
    """As `patched`, for a patch that may only give more."""
    after = patched(before, patch, now_ms)
    if after.limit <= before.limit:
        raise invalid(f"limit_{before.unit}", "is no raise: it must be above the limit in force")
    return after


def refuse(before: Budget, after: Budget, reason: str, *, below_spent: bool) -> None:
    """A raise without a reason; a limit below what is used, unless that is meant. More is a raise, too, where the budget
    stops refusing."""
    raised = after.limit > before.limit or (before.hard and not after.hard)
    if raised and not reason.strip():
        raise invalid("reason", "a raise needs one; it is kept in the audit trail")
    used = after.spent + after.reserved
    if after.limit < before.limit and after.limit < used and not below_spent:
        shown = budget_out(before)
        message = (
            f"{shown[f'spent_{after.unit}']} is spent and {shown[f'held_{after.unit}']} held: nothing would be admitted. "
            "If that is meant, send below_spent: true"
        )
        raise Problem(409, message, [Fault(f"limit_{after.unit}", message)])


def _tag(body: Json) -> str:
    return etag_of(budget_rule_out(body))


_FILTERS = (
    text("scope", "tenant:<id>, team:<id>, key:<id> or task:<id>"),
    choice("unit", Unit),
    text("window"),
)
ROUTES = (
    Route("GET", "/budgets", list_budgets, Right.READ, "budgets", BudgetOut, params=(*_FILTERS, *PAGED), listed=True),
    Route("POST", "/budgets", create_budget, Right.CHANGE_IN_TEAM, "budgets", BudgetOut, BudgetIn, status=201, once=True),
    Route("PUT", "/budgets", set_budget, Right.CHANGE_IN_TEAM, "budgets", BudgetOut, BudgetIn, once=True, tagged=True),
    Route("GET", "/budgets/{budget_id}", get_budget, Right.READ, "budgets", BudgetOut, tagged=True),
    Route("PATCH", "/budgets/{budget_id}", change_budget, Right.CHANGE_IN_TEAM, "budgets", BudgetOut, BudgetPatch, once=True, tagged=True),
    Route("DELETE", "/budgets/{budget_id}", delete_budget, Right.CHANGE_IN_TEAM, "budgets", BudgetOut, once=True, tagged=True),
)  # fmt: skip
