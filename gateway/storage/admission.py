"""Admission: one transaction that walks a batch of requests and commits a hold for each that fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gateway.core.budget import Budget, decide, hold
from gateway.core.entry import Attempt, Granted, Refused
from gateway.storage import budget_rows
from gateway.storage.transact import Conflict, Each, Fetch, FetchEach, Row, Sql, Tx, json_text

#: The authority's clock, whether this replica may still admit, and whether anything changed: in one look.
#: The row stays locked so that no one declares the replica dead while it admits.
_FACTS = Sql(
    "SELECT now_ms(), (SELECT number FROM revision), epoch, expires_at_ms FROM replica "
    "WHERE replica_id = $1 FOR SHARE"
)
_BUDGETED = Sql("SELECT DISTINCT scope FROM budget WHERE scope NOT LIKE 'task:%'")
_BUDGETED_TASK = Sql("SELECT 1 FROM budget WHERE scope LIKE 'task:%' LIMIT 1")
_TASK_LIMITS = Sql(
    "SELECT team_id, default_task_budget_nano_usd FROM team WHERE default_task_budget_nano_usd IS NOT NULL"
)
_HOLDS = Sql(
    "SELECT attempt_id, amount_nano_usd, remaining_nano_usd, remaining_scope, step FROM hold "
    "WHERE attempt_id = ANY($1::text[])"
)
_COUNT_STEPS = Sql(
    "INSERT INTO task (task_id, key_id, team_id, tenant_id, external_id, source, parent_task_id, state, "
    "created_at_ms, last_at_ms, steps) VALUES ($1, $2, $3, $4, $5, $6, $7, 'running', $8, $8, $9) "
    "ON CONFLICT (task_id) DO UPDATE SET steps = task.steps + excluded.steps, last_at_ms = excluded.last_at_ms "
    "RETURNING task_id, steps"
)
_INSERT_HOLD = Sql(
    "INSERT INTO hold (attempt_id, replica_id, replica_epoch, amount_nano_usd, budgets, state, step, "
    "remaining_nano_usd, remaining_scope, created_at_ms, attempt) "
    "VALUES ($1, $2, $3, $4, $5, 'held', $6, $7, $8, $9, $10)"
)


class LeaseExpired(Exception):
    """This replica's lease has run out; renew it and ask again. Nothing was committed."""


class Fenced(Exception):
    """Another process has taken over this replica's id. Nothing was committed, and nothing will be."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One wish for a hold. Amounts as in `ports.Ledger.reserve`."""

    attempt: Attempt
    scopes: tuple[str, ...]
    amount_nano_usd: int | None
    min_amount_nano_usd: int | None


@dataclass(frozen=True, slots=True)
class Lease:
    """A replica's licence to admit; `epoch` counts its starts."""

    replica_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Budgeted:
    """Where budgets are, as of a revision: without any, admission needs no look at them."""

    revision: int
    scopes: frozenset[str]  # those of tasks left out: there may be millions
    any_task: bool
    task_limits: Mapping[str, int]  # team id -> lifetime limit of each of its tasks


@dataclass(frozen=True, slots=True)
class Admitted:
    answers: list[Granted | Refused]
    budgeted: Budgeted


def admit(
    asks: Sequence[Ask], lease: Lease, budgeted: Budgeted | None, task_limit: int | None, careful: bool
) -> Tx[Admitted]:
    """Decide `asks` in order and commit their holds; every ask sees the holds granted before it.

    Not `careful`, it takes all attempts for new, and fails with `Conflict` at one that is not. `task_limit` is
    the lifetime limit of tasks whose team has none of its own. Raises `LeaseExpired`, `Fenced`.
    """
    now_ms, revision = yield from _check_lease(lease)
    if budgeted is None or budgeted.revision != revision:
        budgeted = yield from _read_budgeted(revision)
    answered: dict[str, Granted | Refused] = {}
    if careful:
        answered.update((yield from granted_before([ask.attempt.attempt_id for ask in asks])))
    new = [ask for ask in asks if ask.attempt.attempt_id not in answered]
    by_scope = yield from _lock_budgets(new, budgeted, task_limit, now_ms)

    budgets = {b.budget_id: b for found in by_scope.values() for b in found}
    granted: list[tuple[Ask, Granted, str]] = []
    touched: set[str] = set()
    where: dict[tuple[str, ...], tuple[tuple[str, ...], str]] = {}
    for ask in new:
        attempt_id = ask.attempt.attempt_id
        if careful and attempt_id in answered:  # twice in one batch
            continue
        if ask.scopes not in where:
            where[ask.scopes] = _budgets_of(ask.scopes, by_scope)
        budget_ids, places = where[ask.scopes]
        held_in = [budgets[i] for i in budget_ids]
        answer = decide(held_in, ask.amount_nano_usd, ask.min_amount_nano_usd, now_ms)
        answered[attempt_id] = answer
        if isinstance(answer, Granted):
            for b in held_in:
                budgets[b.budget_id] = hold(b, answer.amount_nano_usd)
            touched.update(budget_ids)
            granted.append((ask, answer, places))

    if not careful:
        # What was granted twice meets the unique index below; what is refused now may have been granted before.
        refused = [i for i, answer in answered.items() if isinstance(answer, Refused)]
        if refused and (yield from granted_before(refused)):
            raise Conflict("an attempt was reserved before")
    if touched:
        yield from budget_rows.write_holds(budgets[i] for i in sorted(touched))
    if granted:
        answered.update((yield from _write(granted, lease, now_ms)))
    return Admitted([answered[ask.attempt.attempt_id] for ask in asks], budgeted)


def _budgets_of(scopes: tuple[str, ...], by_scope: Mapping[str, list[Budget]]) -> tuple[tuple[str, ...], str]:
    """The ids of a hold's budgets, and where it is held, as the hold's row says it."""
    found = [b for scope in dict.fromkeys(scopes) for b in by_scope.get(scope, ())]
    places = budget_rows.places_text((b.budget_id, b.window_start_ms) for b in found)
    return tuple(b.budget_id for b in found), places


def granted_before(attempt_ids: list[str]) -> Tx[dict[str, Granted]]:
    """The first answers of attempts that have a hold already, whatever became of it."""
    rows = yield Fetch(_HOLDS, (attempt_ids,))
    return {attempt_id: Granted(*answer) for attempt_id, *answer in rows}


def _check_lease(lease: Lease) -> Tx[tuple[int, int]]:
    rows = yield Fetch(_FACTS, (lease.replica_id,))
    if not rows:
        raise LeaseExpired
    now_ms, revision, epoch, expires_at_ms = rows[0]
    if epoch != lease.epoch:
        raise Fenced(f"another process has registered as replica {lease.replica_id}")
    if expires_at_ms <= now_ms:
        raise LeaseExpired
    return now_ms, revision


def _read_budgeted(revision: int) -> Tx[Budgeted]:
    scopes = frozenset(row[0] for row in (yield Fetch(_BUDGETED)))
    any_task = bool((yield Fetch(_BUDGETED_TASK)))
    limits: Sequence[Row] = yield Fetch(_TASK_LIMITS)
    return Budgeted(revision, scopes, any_task, {row[0]: row[1] for row in limits})


def _lock_budgets(
    asks: Iterable[Ask], budgeted: Budgeted, task_limit: int | None, now_ms: int
) -> Tx[dict[str, list[Budget]]]:
    wanted: set[str] = set()
    task_limits: dict[str, int] = {}
    look_at_tasks = budgeted.any_task or task_limit is not None or bool(budgeted.task_limits)
    for ask in asks:
        for scope in ask.scopes:
            if not scope.startswith("task:"):
                if scope in budgeted.scopes:
                    wanted.add(scope)
            elif look_at_tasks:
                wanted.add(scope)
        # A child's money is inside its parent's budget, which is among its scopes.
        if look_at_tasks and ask.attempt.parent_task_id is None:
            limit = budgeted.task_limits.get(ask.attempt.team_id, task_limit)
            own = f"task:{ask.attempt.task_id}"
            if limit is not None and own in ask.scopes:
                task_limits[own] = limit
    if not wanted:
        return {}
    return (yield from budget_rows.lock(wanted, now_ms, task_limits))


def _write(granted: Sequence[tuple[Ask, Granted, str]], lease: Lease, now_ms: int) -> Tx[dict[str, Granted]]:
    """Count the steps of tasks and insert the holds; returns the answers with their steps."""
    firsts: dict[str, int] = {}
    attempts: dict[str, Attempt] = {}
    for ask, _, _ in granted:
        attempt = ask.attempt
        attempts.setdefault(attempt.task_id, attempt)
        firsts[attempt.task_id] = firsts.get(attempt.task_id, 0) + (attempt.attempt_no == 1)
    rows = yield FetchEach(
        _COUNT_STEPS, [_task_row(attempts[t], now_ms, firsts[t]) for t in sorted(attempts)]
    )
    step = {task_id: steps - firsts[task_id] for task_id, steps in rows}
    answers: dict[str, Granted] = {}
    holds = []
    for ask, answer, places in granted:
        attempt = ask.attempt
        # A later attempt of a request is the same step again.
        step[attempt.task_id] += attempt.attempt_no == 1
        final = Granted(
            answer.amount_nano_usd, answer.remaining_nano_usd, answer.remaining_scope, step[attempt.task_id]
        )
        answers[attempt.attempt_id] = final
        holds.append(
            (
                attempt.attempt_id,
                lease.replica_id,
                lease.epoch,
                final.amount_nano_usd,
                places,
                final.task_step,
                final.remaining_nano_usd,
                final.remaining_scope,
                now_ms,
                json_text(attempt),
            )
        )
    yield Each(_INSERT_HOLD, holds)
    return answers


def _task_row(attempt: Attempt, now_ms: int, firsts: int) -> tuple[object, ...]:
    return (
        attempt.task_id,
        attempt.key_id,
        attempt.team_id,
        attempt.tenant_id,
        attempt.task_external_id,
        attempt.task_source,
        attempt.parent_task_id,
        now_ms,
        firsts,
    )
