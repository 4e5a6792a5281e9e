"""Transactions of the admin API over budgets. What is out of reach does not exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gateway.core.budget import Budget, at
from gateway.core.errors import Forbidden, NotFound
from gateway.core.offices import Page, Reach, Taken
from gateway.storage import budget_changes, budget_rows
from gateway.storage.budget_changes import BudgetRule
from gateway.storage.pages import Listing
from gateway.storage.transact import Fetch, Sql, Tx

#: (the budget as it stands, now) -> as it is to be
Change = Callable[[Budget, int], Budget]

_NOW = Sql("SELECT now_ms()")


def _within(side: str) -> str:
    owned = " OR ".join(
        f"(scope LIKE '{kind}:%' AND EXISTS (SELECT 1 FROM {table} o "  # noqa: S608
        f"WHERE o.{kind}_id = substr(scope, {len(kind) + 2}) AND o.{side}_id = {{0}}))"
        for kind, table in (("team", "team"), ("task", "task"))
    )
    key = (
        "(scope LIKE 'key:%' AND EXISTS (SELECT 1 FROM virtual_key o "  # noqa: S608
        f"WHERE o.key_id = substr(scope, 5) AND o.{side}_id = {{0}}))"
    )
    itself = "scope = 'tenant:' || CAST({0} AS TEXT) OR " if side == "tenant" else ""
    return f"({itself}{owned} OR {key})"


BUDGETS = Listing(
    f"SELECT {budget_rows.COLUMNS} FROM budget",  # noqa: S608
    ("scope", "budget_id"),
    (1, 0),
    {"scope": "scope = {}", "unit": "unit = {}", "window": '"window" = {}'},
    {"tenant": _within("tenant"), "team": _within("team")},
)
_SCOPE = Sql("SELECT scope FROM budget WHERE budget_id = $1")
_SAME = Sql('SELECT budget_id FROM budget WHERE scope = $1 AND unit = $2 AND "window" = $3 AND zone = $4')
_READ = Sql(f"SELECT {budget_rows.COLUMNS} FROM budget WHERE budget_id = $1")  # noqa: S608
_OWNERS = {
    "tenant": Sql("SELECT tenant_id, '' FROM tenant WHERE tenant_id = $1"),
    "team": Sql("SELECT tenant_id, team_id FROM team WHERE team_id = $1"),
    "key": Sql("SELECT tenant_id, team_id FROM virtual_key WHERE key_id = $1"),
    "task": Sql("SELECT tenant_id, team_id FROM task WHERE task_id = $1"),
}


def budgets(reach: Reach, filters: Mapping[str, Any], after: Any, limit: int) -> Tx[Page[Budget]]:
    """Each as it stands now."""
    now_ms: int = (yield Fetch(_NOW))[0][0]
    page = yield from BUDGETS.page(reach, filters, after, limit)
    found = [at(budget_rows.budget_of(row), now_ms) for row in page.rows]
    return Page((yield from budget_rows.with_earlier(found, now_ms)), page.after)


def budget(reach: Reach, budget_id: str) -> Tx[Budget]:
    yield from _reached(reach, budget_id)
    now_ms: int = (yield Fetch(_NOW))[0][0]
    rows = yield Fetch(_READ, (budget_id,))
    if not rows:
        raise NotFound(f"there is no budget {budget_id}")
    found = [at(budget_rows.budget_of(row), now_ms) for row in rows]
    (whole,) = yield from budget_rows.with_earlier(found, now_ms)
    return whole


def put_budget(
    actor: str, reach: Reach, scope: str, rule: BudgetRule, change: Change | None, reason: str
) -> Tx[Budget]:
    """Make a budget, or change the one of that scope, unit and window as `change` says; None: `Taken` if there is one."""
    yield from reach_scope(reach, scope, changing=True)
    same = yield Fetch(_SAME, (scope, rule.unit.value, rule.window, rule.zone))
    if not same:
        return (yield from budget_changes.put(actor, scope, rule, reason))
    if change is None:
        raise Taken("scope", f"{scope} already has a budget in {rule.unit} per {rule.window}: {same[0][0]}")
    return (yield from budget_changes.amend(actor, same[0][0], change, reason))


def change_budget(actor: str, reach: Reach, budget_id: str, change: Change, reason: str) -> Tx[Budget]:
    yield from _reached(reach, budget_id, changing=True)
    return (yield from budget_changes.amend(actor, budget_id, change, reason))


def drop_budget(actor: str, reach: Reach, budget_id: str, expect: Callable[[Budget], None]) -> Tx[Budget]:
    yield from _reached(reach, budget_id, changing=True)
    found = yield from budget(reach, budget_id)
    expect(found)
    yield from budget_changes.remove(actor, found.scope, found.unit, found.window, found.zone)
    return found


def to_rule(before: Budget, rule: BudgetRule) -> Budget:
    """The budget with all that a rule says."""
    return msgspec.structs.replace(
        before,
        base_limit=rule.limit,
        on_exceed=rule.on_exceed,
        mode=rule.mode,
        alert_percents=rule.alert_percents,
        landing_percent=rule.landing,
    )


def reach_scope(reach: Reach, scope: str, *, changing: bool = False) -> Tx[None]:
    """Raises `NotFound` for a scope out of reach; `Forbidden` for whoever would change the budgets above their own: those
    of a tenant for its admins, those of a team for its own.
    """
    if reach.everything:
        return
    kind, _, name = scope.partition(":")
    rows = (yield Fetch(_OWNERS[kind], (name,))) if kind in _OWNERS else ()
    tenant_id, team_id = rows[0] if rows else ("\0", "\0")
    if not reach.holds(tenant_id, team_id):
        raise NotFound(f"there is no {kind} {name}")
    if changing and (kind == "tenant" or (kind == "team" and reach.team_id)):
        raise Forbidden(f"the budgets of your own {kind} are set by those above it")


def _reached(reach: Reach, budget_id: str, *, changing: bool = False) -> Tx[None]:
    rows = yield Fetch(_SCOPE, (budget_id,))
    if not rows:
        raise NotFound(f"there is no budget {budget_id}")
    try:
        yield from reach_scope(reach, rows[0][0], changing=changing)
    except NotFound:
        raise NotFound(f"there is no budget {budget_id}") from None
