"""Task states inside a transaction, each change guarded by the state before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.core.budget import Budget
from gateway.core.entry import Attempt, Refused
from gateway.core.task import (
    ALERTED_FROM_PERCENT,
    REACHED_FROM,
    State,
    landed_by,
    landing_under,
    landings_of,
)
from gateway.storage import budget_rows
from gateway.storage.transact import Each, Fetch, FetchEach, Sql, Tx


def _changes(to: State) -> Sql:
    before = ", ".join(f"'{state}'" for state in sorted(REACHED_FROM[to]))
    reason = "$2"
    if to is State.ALERTED:  # that it had its last answer under a shared budget is still so
        mark = f"'{landings_of('%')}%{landing_under('%')}'"
        reason = f"CASE WHEN state_reason LIKE {mark} THEN state_reason ELSE $2 END"
    return Sql(
        f"UPDATE task SET state = '{to}', state_reason = {reason} WHERE task_id = $1 AND state IN ({before}) "  # noqa: S608
        "AND ($3 = '' OR state = $3) RETURNING task_id"
    )


_CHANGE = {state: _changes(state) for state in State}
#: A landing that came to nothing leaves the next request its chance, unless another attempt took over.
_NOT_LANDED = Sql(
    "UPDATE task SET state_reason = 'its last answer failed' WHERE task_id = $1 AND state = 'paused_budget' AND state_reason = $2"
)
_NOT_LANDED_UNDER = Sql(
    "UPDATE task SET state_reason = '' WHERE task_id = $1 AND state IN ('running', 'alerted') AND state_reason LIKE $2"
)
_CHILDREN = Sql("SELECT task_id FROM task WHERE parent_task_id = ANY($1::text[])")
_LOCK = Sql("SELECT task_id FROM task WHERE task_id = ANY($1::text[]) ORDER BY task_id FOR UPDATE")


def change(to: State, reasons: Mapping[str, str], only: str = "") -> Tx[list[str]]:
    """Bring these tasks (id -> reason) to a state, if theirs allows it; `only`: from that state alone.

    Returns the ids of those that changed.
    """
    if not reasons:
        return []
    rows = yield FetchEach(_CHANGE[to], [(task_id, reasons[task_id], only) for task_id in sorted(reasons)])
    return [row[0] for row in rows]


def below(task_id: str) -> Tx[list[str]]:
    """The task and all below it, whether declared or named by clients, who may name them in a circle."""
    found = [task_id]
    level = found
    while level:
        rows = yield Fetch(_CHILDREN, (level,))
        level = sorted({row[0] for row in rows} - set(found))
        found = found + level
    return found


def lock_below(task_id: str, now_ms: int) -> Tx[None]:
    """Lock a task and all below it, their budgets first, both in the order of ids: as every transaction does."""
    found = yield from below(task_id)
    yield from budget_rows.lock_tasks(found, now_ms)
    yield Fetch(_LOCK, (sorted(found),))


def change_all(to: State, task_id: str, reason: str, only: str = "") -> Tx[list[str]]:
    """`change` a task and all below it, which are locked. A child that was declared meanwhile is found as well: each
    level is changed before the next is looked for, so that it either sees its parent changed or is seen.
    """
    changed: list[str] = []
    seen: set[str] = set()
    level = [task_id]
    while level:
        seen.update(level)
        changed += yield from change(to, dict.fromkeys(level, reason), only)
        rows = yield Fetch(_CHILDREN, (level,))
        level = sorted({row[0] for row in rows} - seen)
    return changed


def pause_used_up(refusals: Mapping[str, Refused], now_ms: int) -> Tx[None]:
    """Pause tasks whose own budget is used up by what was spent, and tell it once."""
    paused = yield from change(State.PAUSED_BUDGET, {t: r.unit.value for t, r in refusals.items()})
    told = []
    for task_id in paused:
        r = refusals[task_id]
        body = {"task_id": task_id, "unit": r.unit, "limit": r.limit, "spent": r.spent, "held": r.held}
        told.append(("task_paused", f"{task_id}/paused_budget/{r.unit}/{r.limit}", body))
    yield from budget_rows.announce(told, now_ms)


def resume(task_ids: Sequence[str]) -> Tx[list[str]]:
    """Let tasks go on that only waited for money. Returns the ids of those that did."""
    return (yield from change(State.RUNNING, dict.fromkeys(task_ids, ""), State.PAUSED_BUDGET))


def follow(posted: Sequence[tuple[Budget, int, list[int]]]) -> Tx[None]:
    """After a settlement: `alerted` where enough is spent, and on again where a correction gave money back.

    `posted` as `budget_rows.move` returns it.
    """
    alerted = {
        _task_of(b): f"{max(percents)}% of its {b.unit} spent"
        for b, _, percents in posted
        if percents and max(percents) >= ALERTED_FROM_PERCENT
    }
    yield from change(State.ALERTED, alerted)
    yield from resume([_task_of(b) for b, amount, _ in posted if amount < 0 and b.room > 0])


def not_landed(voided: Sequence[Attempt]) -> Tx[None]:
    """These landings were voided: another request may have the last answer of the task."""
    rows = sorted((a.task_id, landed_by(a.request_id, a.attempt_no)) for a in voided)
    if rows:
        yield Each(_NOT_LANDED, rows)
        yield Each(
            _NOT_LANDED_UNDER, [(task_id, f"{reason}{landing_under('%')}") for task_id, reason in rows]
        )


def _task_of(budget: Budget) -> str:
    return budget.scope.partition(":")[2]
