"""Transactions that give scopes budgets and change or remove them; each leaves a row in the audit trail.

A task's budgets are for its lifetime, because children are carved from them. A change of a child's limit is a change
of what is carved from its parent, in the same transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from gateway.core.budget import (
    ALERT_PERCENTS,
    AMOUNT_MAX,
    Budget,
    BudgetMode,
    OnExceed,
    at,
    claim,
    first_window,
    propagate,
    settle,
)
from gateway.core.entry import Unit
from gateway.core.errors import InvalidRequest, NotFound
from gateway.core.money import usd_text
from gateway.core.task import State, landing_percent
from gateway.storage import audit, budget_rows, task_rows
from gateway.storage.budget_rows import fresh_id
from gateway.storage.transact import Fetch, FetchEach, Sql, Tx, json_text

SCOPE_KINDS = ("tenant", "team", "key", "task")

_NOW = Sql("SELECT now_ms()")
_KNOWN = {
    "tenant": Sql("SELECT 1 FROM tenant WHERE tenant_id = $1"),
    "team": Sql("SELECT 1 FROM team WHERE team_id = $1"),
    "key": Sql("SELECT 1 FROM virtual_key WHERE key_id = $1"),
}
_FIND = Sql(
    f"SELECT {budget_rows.COLUMNS} FROM budget "  # noqa: S608
    'WHERE scope = $1 AND unit = $2 AND "window" = $3 AND zone = $4'
)
_PLACE = Sql('SELECT scope, unit, "window", zone FROM budget WHERE budget_id = $1')
_ADD = Sql(
    'INSERT INTO budget (budget_id, scope, unit, "window", zone, window_start_ms, window_end_ms, limit_amount, '
    "on_exceed, mode, alert_percents, landing_percent, ancestors, carved_amount, epoch, created_at_ms) "
    "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, 0, $15)"
)
_CHANGE = Sql(
    "UPDATE budget SET limit_amount = $2, on_exceed = $3, mode = $4, alert_percents = $5, landing_percent = $6, "
    "override_limit_amount = $7, override_until_ms = $8, epoch = epoch + 1 WHERE budget_id = $1"
)
_REMOVE = Sql("DELETE FROM budget WHERE budget_id = $1")
_CARVE = Sql("UPDATE budget SET carved_amount = $2 WHERE budget_id = $1")
_SHIFT = Sql("UPDATE budget SET held_amount = held_amount + $2 WHERE budget_id = $1 RETURNING budget_id")
_LOCK_TASK = Sql("SELECT state FROM task WHERE task_id = $1 FOR UPDATE")
_CHILDREN = Sql("SELECT 1 FROM task WHERE parent_task_id = $1 AND depth > 0 AND state <> 'done' LIMIT 1")


@dataclass(frozen=True, slots=True)
class BudgetRule:
    """What a budget allows, and what happens when it is used up. ValueError for what means nothing.

    `limit` in `unit` (nano-dollars for `usd`). `landing_percent` of None: 2 % if `on_exceed` is `summarize`, else 0.
    """

    limit: int
    unit: Unit = Unit.USD
    window: str = "lifetime"
    zone: str = "UTC"
    on_exceed: OnExceed = OnExceed.ERROR
    mode: BudgetMode = BudgetMode.ENFORCE
    alert_percents: tuple[int, ...] = ALERT_PERCENTS
    landing_percent: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.limit <= AMOUNT_MAX:
            unit = "nano-dollars" if self.unit is Unit.USD else self.unit.replace("_", " ")
            raise ValueError(f"a limit must be from 0 to {AMOUNT_MAX} {unit}")
        if not all(1 <= p <= 100 for p in self.alert_percents):
            raise ValueError(f"alerts must be at 1 to 100 percent, not at {list(self.alert_percents)}")
        if not 0 <= self.landing <= 50:
            raise ValueError(f"a landing allowance must be from 0 to 50 percent, not {self.landing_percent}")
        first_window(self.window, self.zone, 0)

    @property
    def landing(self) -> int:
        if self.landing_percent is not None:
            return self.landing_percent
        return landing_percent(self.on_exceed)

    @property
    def hard(self) -> bool:
        return self.on_exceed is not OnExceed.WARN and self.mode is BudgetMode.ENFORCE


def put(actor: str, scope: str, rule: BudgetRule, reason: str = "", *, because: bool = False) -> Tx[Budget]:
    """Give a scope a budget, or change it; what was spent in the window stays spent. `because`: a raise needs a reason.
    Raises `InvalidRequest`.
    """
    yield from _refuse_unknown(scope, rule)
    now_ms: int = (yield Fetch(_NOW))[0][0]
    found = yield from _find(scope, rule.unit, rule.window, rule.zone, now_ms)
    if found is None:
        yield from _refuse_beside_children(scope)
        yield from audit.record(actor, "budget.set", scope, _body(rule, reason))
        return (yield from add(scope, rule, (), now_ms))
    before, line = found
    after = msgspec.structs.replace(
        before,
        base_limit=rule.limit,
        on_exceed=rule.on_exceed,
        mode=rule.mode,
        alert_percents=rule.alert_percents,
        landing_percent=rule.landing,
    )
    if after == before:
        return before
    if before.ancestors and not rule.hard:
        raise InvalidRequest("the budget of a child task must be hard: it is part of its parent's")
    # More is a raise, too, where the budget stops refusing.
    raised = after.limit > before.limit or (before.hard and not after.hard)
    if because and raised and not reason.strip():
        raise InvalidRequest("a raise needs a reason, which the audit trail keeps", param="reason")
    return (yield from _change(actor, before, after, line, reason, now_ms))


def adjust(
    actor: str,
    scope: str,
    limit: int,
    reason: str,
    *,
    unit: Unit,
    window: str,
    zone: str,
    until_ms: int | None,
) -> Tx[Budget]:
    """Raise or lower a limit, for good or until a time. A limit below what is spent admits nothing from now on.

    Raises `NotFound` without such a budget, `InvalidRequest`.
    """
    now_ms: int = (yield Fetch(_NOW))[0][0]
    found = yield from _find(scope, unit, window, zone, now_ms)
    if found is None:
        raise NotFound(f"{scope} has no budget in {unit} per {window} in {zone}")
    before, line = found
    if until_ms is None:
        after = msgspec.structs.replace(before, base_limit=limit, override_limit=None, override_until_ms=None)
    elif until_ms <= now_ms:
        raise InvalidRequest("an override must end in the future", param="until")
    elif before.ancestors:
        raise InvalidRequest(
            "the budget of a child task is part of its parent's, and cannot change for a time only"
        )
    else:
        after = msgspec.structs.replace(before, override_limit=limit, override_until_ms=until_ms)
    return (yield from _change(actor, before, after, line, reason, now_ms))


def amend(actor: str, budget_id: str, change: Callable[[Budget, int], Budget], reason: str) -> Tx[Budget]:
    """Change the budget of that id as `change` says, which gets it as it stands now, and the time; what it raises ends
    the transaction. Raises `NotFound`, `InvalidRequest`.
    """
    now_ms: int = (yield Fetch(_NOW))[0][0]
    places = yield Fetch(_PLACE, (budget_id,))
    found = None
    if places:
        scope, unit, window, zone = places[0]
        found = yield from _find(scope, Unit(unit), window, zone, now_ms)
    if found is None:
        raise NotFound(f"there is no budget {budget_id}")
    before, line = found
    after = change(before, now_ms)
    if after == before:
        return before
    if before.ancestors and (not after.hard or after.override_until_ms is not None):
        raise InvalidRequest(
            "the budget of a child task is part of its parent's: it stays hard, and for good"
        )
    return (yield from _change(actor, before, after, line, reason, now_ms))


def remove(actor: str, scope: str, unit: Unit, window: str, zone: str) -> Tx[None]:
    """Raises `NotFound`; `InvalidRequest` for a budget that takes part in a carve."""
    now_ms: int = (yield Fetch(_NOW))[0][0]
    found = yield from _find(scope, unit, window, zone, now_ms)
    if found is None:
        raise NotFound(f"{scope} has no budget per {window} in {zone}")
    budget, _ = found
    if budget.ancestors:
        raise InvalidRequest("the budget of a child task is part of its parent's; end the child instead")
    yield from _refuse_beside_children(scope)
    yield from audit.record(actor, "budget.remove", scope, {"unit": unit, "window": window, "zone": zone})
    yield Fetch(_REMOVE, (budget.budget_id,))


def add(scope: str, rule: BudgetRule, ancestors: Sequence[str], now_ms: int) -> Tx[Budget]:
    """A new budget, which counts from now on. `ancestors`: carved from the first of these; see `take`."""
    start_ms, end_ms = first_window(rule.window, rule.zone, now_ms)
    yield Fetch(
        _ADD,
        (
            fresh_id("bud", now_ms),
            scope,
            rule.unit.value,
            rule.window,
            rule.zone,
            start_ms,
            end_ms,
            rule.limit,
            rule.on_exceed.value,
            rule.mode.value,
            json_text(rule.alert_percents),
            rule.landing,
            json_text(ancestors),
            rule.limit if ancestors else 0,
            now_ms,
        ),
    )
    rows = yield Fetch(_FIND, (scope, rule.unit.value, rule.window, rule.zone))
    return budget_rows.budget_of(rows[0])


def take(parent: Budget, amount: int) -> Tx[None]:
    """Hold a new slice in its parent, which is locked. Raises `InvalidRequest` if there is not enough room."""
    if parent.hard and amount > parent.room:
        raise InvalidRequest(
            f"{parent.scope} has {_shown(max(0, parent.room), parent.unit)} left, which is less than "
            f"{_shown(amount, parent.unit)}",
            param="budgets",
        )
    yield Fetch(_SHIFT, (parent.budget_id, amount))


def close(ended: Iterable[Budget], locked: dict[str, Budget]) -> Tx[None]:
    """Give back to their parents what ended children did not use; what they still hold stays claimed till it settles.

    `locked`: those budgets and all that they are carved from.
    """
    for b in sorted(ended, key=lambda b: -len(b.ancestors)):
        if b.ancestors:
            locked = yield from _carve(locked, b.budget_id, 0)


def _change(
    actor: str, found: Budget, after: Budget, line: dict[str, Budget], reason: str, now_ms: int
) -> Tx[Budget]:
    """`line`: the budget and its ancestors, locked."""
    if found.ancestors and after.limit != found.limit and not (yield from _done(found)):
        parent = line[found.ancestors[0]]
        growth = max(found.held, after.limit - found.posted) - claim(found)
        if parent.hard and growth > max(0, parent.room):
            raise InvalidRequest(
                f"{parent.scope}, of which it is a part, has {_shown(max(0, parent.room), parent.unit)} left",
                param="limit",
            )
        yield from _carve(line, found.budget_id, after.limit)
    yield Fetch(
        _CHANGE,
        (
            found.budget_id,
            after.base_limit,
            after.on_exceed.value,
            after.mode.value,
            json_text(after.alert_percents),
            after.landing_percent,
            after.override_limit,
            after.override_until_ms,
        ),
    )
    rows = yield Fetch(_FIND, (found.scope, found.unit.value, found.window, found.zone))
    (changed,) = yield from budget_rows.with_earlier([at(budget_rows.budget_of(rows[0]), now_ms)], now_ms)
    body = {
        "unit": found.unit,
        "window": found.window,
        "zone": found.zone,
        "before": found.limit,
        "after": changed.limit,
        "until_ms": changed.override_until_ms,
        "spent": changed.spent,
        "held": changed.reserved,
        "on_exceed": changed.on_exceed,
        "mode": changed.mode,
        "reason": reason,
    }
    kind, _, name = found.scope.partition(":")
    if kind == "task" and changed.limit > found.limit and changed.room > 0:
        yield from task_rows.resume([name])
    action = "budget.raise" if changed.limit > found.limit else "budget.lower"
    yield from audit.record(
        actor, action if changed.limit != found.limit else "budget.set", found.scope, body
    )
    return changed


def _done(budget: Budget) -> Tx[bool]:
    """Whether its task is done, so that nothing is carved for it any more. Its row is locked after the budgets."""
    rows = yield Fetch(_LOCK_TASK, (budget.scope.partition(":")[2],))
    return bool(rows) and rows[0][0] == State.DONE


def _carve(locked: dict[str, Budget], child_id: str, carved: int) -> Tx[dict[str, Budget]]:
    """Change a child's share; what its ancestors hold follows. `locked`: as they are before; returned: after."""
    child = locked[child_id]
    after = msgspec.structs.replace(child, carved=carved)
    yield Fetch(_CARVE, (child_id, carved))
    above = {i: locked[i] for i in child.ancestors if i in locked}
    changes = propagate(above, {child.ancestors[0]: (claim(after) - claim(child), 0)})
    rows = [(i, changes[i][0]) for i in sorted(changes) if changes[i][0]]
    if rows:
        yield FetchEach(_SHIFT, rows)
    return {
        **locked,
        child_id: after,
        **{i: settle(b, -changes[i][0], 0) for i, b in above.items() if i in changes},
    }


def _find(
    scope: str, unit: Unit, window: str, zone: str, now_ms: int
) -> Tx[tuple[Budget, dict[str, Budget]] | None]:
    """The budget as it stands now, of a rolling window with its earlier buckets; locked together with its ancestors."""
    rows = yield Fetch(_FIND, (scope, unit.value, window, zone))
    if not rows:
        return None
    budget = budget_rows.budget_of(rows[0])
    locked = yield from budget_rows.lock_by_id([budget.budget_id, *budget.ancestors], now_ms)
    if budget.budget_id not in locked:
        return None
    (whole,) = yield from budget_rows.with_earlier([locked[budget.budget_id]], now_ms)
    return whole, locked


def _refuse_unknown(scope: str, rule: BudgetRule) -> Tx[None]:
    """A budget on a team or key that does not exist limits nothing; whoever sets it has mistyped."""
    kind, _, name = scope.partition(":")
    if kind not in SCOPE_KINDS or not name:
        raise InvalidRequest(
            f"{scope!r} is not a scope: write one of {', '.join(f'{k}:<id>' for k in SCOPE_KINDS)}",
            param="scope",
        )
    if kind == "task" and (rule.window, rule.zone) != ("lifetime", "UTC"):
        raise InvalidRequest("a task's budget is for its lifetime", param="window")
    sql = _KNOWN.get(kind)
    if sql is not None and not (yield Fetch(sql, (name,))):
        raise NotFound(f"there is no {kind} {name}")


def _refuse_beside_children(scope: str) -> Tx[None]:
    """Open children have their slices; a budget in a further unit would not count what they do, and one that goes
    would leave them without a limit.
    """
    kind, _, name = scope.partition(":")
    if kind != "task":
        return
    yield Fetch(_LOCK_TASK, (name,))  # so that no child is declared meanwhile
    if (yield Fetch(_CHILDREN, (name,))):
        raise InvalidRequest("this task has children that are not done, so its set of budgets stays as it is")


def _body(rule: BudgetRule, reason: str) -> dict[str, object]:
    return {
        "limit": rule.limit,
        "unit": rule.unit,
        "window": rule.window,
        "zone": rule.zone,
        "on_exceed": rule.on_exceed,
        "mode": rule.mode,
        "reason": reason,
    }


def _shown(amount: int, unit: Unit) -> str:
    return f"${usd_text(amount)}" if unit is Unit.USD else f"{amount:,} {unit.replace('_', ' ')}"
