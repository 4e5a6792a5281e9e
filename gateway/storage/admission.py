"""Admission: one transaction that walks a batch of requests and commits a hold for each that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from gateway.core.budget import (
    Budget,
    BudgetMode,
    decide,
    exhausted,
    fits,
    fullest,
    held_by,
    hold,
    refused_by,
    shared_landing,
    stop_of,
    used_percents,
)
from gateway.core.entry import Amounts, Attempt, Granted, Refused
from gateway.core.task import (
    ADMITTING,
    State,
    TaskDefault,
    admits,
    landed_by,
    landing_under,
    landings_of,
    may_land,
    may_land_under,
)
from gateway.storage import budget_rows, lines, task_rows
from gateway.storage import lease as leases
from gateway.storage.budget_rows import Place, TaskLimit
from gateway.storage.lease import Lease
from gateway.storage.lines import NO_LINE, TOO_DEEP, Line, Link
from gateway.storage.transact import Conflict, Each, Fetch, FetchEach, Row, Sql, Tx, json_text

_BUDGETED = Sql("SELECT DISTINCT scope FROM budget WHERE scope NOT LIKE 'task:%'")
_BUDGETED_TASK = Sql("SELECT 1 FROM budget WHERE scope LIKE 'task:%' LIMIT 1")
_TASK_LIMITS = Sql(
    "SELECT team_id, default_task_budget_nano_usd FROM team WHERE default_task_budget_nano_usd IS NOT NULL"
)
_HOLDS = Sql("SELECT attempt_id, answer FROM hold WHERE attempt_id = ANY($1::text[])")
#: Locked after the budgets, as everywhere.
_STATES = Sql(
    "SELECT task_id, state, state_reason, steps FROM task WHERE task_id = ANY($1::text[]) ORDER BY task_id FOR UPDATE"
)
#: The guard of "one landing per pause", whatever was read before.
_LAND = Sql(
    "UPDATE task SET state_reason = $2 WHERE task_id = $1 AND state = 'paused_budget' "
    "AND (state_reason NOT LIKE 'summed up by %' OR state_reason LIKE $3) RETURNING task_id"
)
#: Under a budget that others share, which pauses no task. Its row was read and locked (`may_land_under`).
_LAND_UNDER = Sql("UPDATE task SET state_reason = $2 WHERE task_id = $1")
_COUNT_STEPS = Sql(
    "INSERT INTO task (task_id, key_id, team_id, tenant_id, external_id, source, parent_task_id, state, "
    "created_at_ms, last_at_ms, steps) VALUES ($1, $2, $3, $4, $5, $6, $7, 'running', $8, $8, $9) "
    "ON CONFLICT (task_id) DO UPDATE SET steps = task.steps + excluded.steps, last_at_ms = excluded.last_at_ms "
    "RETURNING task_id, steps, state, parent_task_id, source, created_at_ms"
)
_INSERT_HOLD = Sql(
    "INSERT INTO hold (attempt_id, replica_id, replica_epoch, amount_nano_usd, input_tokens, output_tokens, calls, "
    "budgets, state, step, created_at_ms, attempt, answer) "
    "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, 'held', $9, $10, $11, $12)"
)
_granted = msgspec.json.Decoder(Granted)


class Ask(msgspec.Struct, frozen=True, gc=False):
    """One wish for a hold. Amounts as in `ports.Ledger.reserve`."""

    attempt: Attempt
    scopes: tuple[str, ...]
    amounts: Amounts
    least: Amounts
    landing: bool = False


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
    parents: Mapping[str, str]  # of the tasks of this batch whose rows were read and name one


def admit(
    asks: Sequence[Ask],
    lease: Lease,
    budgeted: Budgeted | None,
    task_default: TaskDefault,
    parents: Mapping[str, str],
    careful: bool,
) -> Tx[Admitted]:
    """Decide `asks` in order and commit their holds, in the budgets of their scopes and of all tasks above theirs;
    every ask sees the holds granted before it.

    Not `careful`, it takes all attempts for new, all tasks for running and `parents` for all that rows of tasks name,
    and fails with `Conflict` where that is wrong. `task_default` is the budget of tasks that nobody gave
    one. Raises `LeaseExpired`, `Fenced`.
    """
    looked_up = _to_look_up(asks, parents, careful)
    # Where no task above is to be looked for, it is known which budgets count, unless any changed meanwhile.
    wanted = None
    if budgeted is not None and not looked_up:
        wanted = _wanted(asks, {}, budgeted, task_default)
    now_ms, revision, rows = yield from leases.check(lease, wanted.scopes if wanted else [])
    if budgeted is None or budgeted.revision != revision:
        budgeted = yield from _read_budgeted(revision)
        wanted = None
    answered: dict[str, Granted | Refused] = {}
    if careful:
        answered.update((yield from granted_before([ask.attempt.attempt_id for ask in asks])))
    new = [ask for ask in asks if ask.attempt.attempt_id not in answered]
    links = (yield from lines.links(looked_up)) if looked_up else {}
    above = _lines(new, parents, links)
    if wanted is None:
        wanted = _wanted(new, above, budgeted, task_default)
        rows = (yield Fetch(budget_rows.LOCK, (wanted.scopes,))) if wanted.scopes else ()
    by_scope = (yield from budget_rows.locked(rows, now_ms, wanted.limits)) if wanted.scopes else {}
    if links and by_scope:
        # A task above may have been ended while the locks were waited for: its slice is given back by now.
        links = yield from lines.again(links)
    states = (yield from _read_states(new)) if careful else {}

    books = _Books(by_scope, above, now_ms)
    for ask in new:
        attempt_id = ask.attempt.attempt_id
        if careful and attempt_id in answered:  # twice in one batch
            continue
        under = books.landing_under(ask, states) if careful else None
        # Nearly always nobody has said anything that could stop one.
        stop = None
        if careful or above:
            stop = _stop_of(ask, states if careful else None, books.line(ask), links, under)
        answered[attempt_id] = books.answer(ask, stop)

    if not careful:
        # What was granted twice meets the unique index below; what is refused now may have been granted before.
        refused = [i for i, answer in answered.items() if isinstance(answer, Refused)]
        if refused and (yield from granted_before(refused)):
            raise Conflict("an attempt was reserved before")
    if books.touched:
        yield from budget_rows.write_holds(books.budgets[i] for i in sorted(books.touched))
    if books.shadows:
        yield from budget_rows.announce([_shadow(books.budgets[i]) for i in sorted(books.shadows)], now_ms)
    if books.granted:
        answered.update((yield from _write(books.granted, books.under, above, lease, now_ms)))
    if books.used_up:
        yield from task_rows.pause_used_up(books.used_up, now_ms)
    own = {ask.attempt.task_id for ask in new}
    named = {t: up for t in own & links.keys() if (up := links[t].above) is not None}
    return Admitted([answered[ask.attempt.attempt_id] for ask in asks], budgeted, named)


class _Books:
    """The locked budgets of a batch while it is decided."""

    def __init__(self, by_scope: Mapping[str, list[Budget]], above: _Lines, now_ms: int) -> None:
        self.budgets = {b.budget_id: b for found in by_scope.values() for b in found}
        self.granted: list[tuple[Ask, Granted, str]] = []
        self.touched: set[str] = set()
        self.shadows: set[str] = set()  # ids of shadow budgets that would have refused something
        self.used_up: dict[str, Refused] = {}  # task id -> what says that its budget is
        self._by_scope = by_scope
        self._above = above
        self._now_ms = now_ms
        self._where: dict[tuple[str, ...], tuple[tuple[str, ...], str]] = {}
        self._landed: set[str] = set()  # tasks whose landing is among the granted
        self.under: dict[str, str] = {}  # task that runs -> the stop of a shared budget under which it lands

    def line(self, ask: Ask) -> Line:
        return self._above.get(_member(ask), NO_LINE) if self._above else NO_LINE

    def landing_under(self, ask: Ask, states: _States) -> str | None:
        """The stop under which the task of this landing may sum up, though it runs; None = it must be stopped itself."""
        state, _, steps = states.get(ask.attempt.task_id, _NEW)
        if not ask.landing or state not in ADMITTING or not steps:  # what has not begun has nothing to sum up
            return None
        budget_ids, _ = self._budgets_of(_scopes(ask, self.line(ask)))
        shared = shared_landing(self.budgets[i] for i in budget_ids)
        if shared is None:
            return None
        stop = self.under[ask.attempt.task_id] = stop_of(shared)
        return stop

    def answer(self, ask: Ask, stop: tuple[str, str] | None) -> Granted | Refused:
        """Decide one ask, and hold what it is granted. `stop`: the task that admits nothing now, and its state."""
        budget_ids, places = self._budgets_of(_scopes(ask, self.line(ask)) if self._above else ask.scopes)
        held_in = [self.budgets[i] for i in budget_ids]
        answer = decide(held_in, ask.amounts, ask.least, self._now_ms, ask.landing)
        if stop is not None:
            return self._stopped(answer, budget_ids, *stop)
        if ask.landing and ask.attempt.task_id in self._landed:
            return self._stopped(answer, budget_ids, ask.attempt.task_id, State.PAUSED_BUDGET)
        if isinstance(answer, Refused):
            own = f"task:{ask.attempt.task_id}"
            # What a window or a hold may bring back is worth another try; the rest waits for a person.
            if answer.scope == own and answer.resets_at_ms is None and exhausted(answer, ask.least):
                self.used_up[ask.attempt.task_id] = answer
            return answer
        if ask.landing:
            self._landed.add(ask.attempt.task_id)
        if budget_ids:
            used = used_percents(self._hold(held_in, ask, answer))
            if used:
                answer = replace(answer, used=used)
        self.granted.append((ask, answer, places))
        return answer

    def _stopped(
        self, answer: Granted | Refused, budget_ids: tuple[str, ...], task_id: str, state: str
    ) -> Refused:
        """What a task says that admits nothing; if for want of budget, by the one that is used up the most."""
        if isinstance(answer, Refused):
            return replace(answer, state=state)
        scope = f"task:{task_id}"
        own = [b for i in budget_ids if (b := self.budgets[i]).scope == scope and b.hard]
        if state != State.PAUSED_BUDGET or not own:
            return Refused(scope, 0, 0, 0, None, state=state)
        return replace(refused_by(fullest(own), self._now_ms), state=state)

    def _hold(self, budgets: Sequence[Budget], ask: Ask, answer: Granted) -> list[Budget]:
        """The budgets as they are after it."""
        amounts = held_by(ask.amounts, answer)
        held = []
        for before in budgets:
            after = hold(before, amounts)
            if before.mode is BudgetMode.SHADOW and not fits(before, ask.amounts, ask.least):
                after = replace(after, would_refuse=after.would_refuse + 1)
                self.shadows.add(before.budget_id)
            if after is not before:
                self.budgets[before.budget_id] = after
                self.touched.add(before.budget_id)
            held.append(after)
        return held

    def _budgets_of(self, scopes: tuple[str, ...]) -> tuple[tuple[str, ...], str]:
        """The ids of a hold's budgets, and where it is held, as the hold's row says it."""
        known = self._where.get(scopes)
        if known is None:
            found = budget_rows.apart(
                b for scope in dict.fromkeys(scopes) for b in self._by_scope.get(scope, ())
            )
            known = tuple(b.budget_id for b in found), budget_rows.places_text(map(Place.of, found))
            self._where[scopes] = known
        return known


#: task id -> state, reason and steps
_States = Mapping[str, tuple[str, str, int]]
_NEW = (State.RUNNING, "", 0)


def _stop_of(
    ask: Ask, states: _States | None, line: Line, links: Mapping[str, Link], under: str | None
) -> tuple[str, str] | None:
    """The task that keeps this ask from being admitted, be it its own or one above, and its state.

    `states` of None: they were not read. `under`: the stop of a shared budget under which a landing is asked for.
    """
    own = ask.attempt.task_id
    if line.too_deep:
        return own, TOO_DEEP
    if states is not None:
        state, reason, _ = states.get(own, _NEW)
        if under is not None:
            if not may_land_under(reason, ask.attempt.request_id, under):
                return own, State.PAUSED_BUDGET
        elif ask.landing:
            if not may_land(state, reason, ask.attempt.request_id):
                return own, state
        elif not admits(state, False):
            return own, state
    for task_id in line.above:
        if task_id in links and not admits(links[task_id].state, ask.landing):
            return task_id, links[task_id].state
    return None


def _shadow(b: Budget) -> tuple[str, str, Mapping[str, object]]:
    body = {
        "scope": b.scope,
        "unit": b.unit,
        "limit": b.limit,
        "spent": b.spent,
        "held": b.reserved,
        "window_start_ms": b.window_start_ms,
    }
    return "budget_shadow", f"shadow/{b.budget_id}/{b.window_start_ms}/{b.epoch}", body


def granted_before(attempt_ids: list[str]) -> Tx[dict[str, Granted]]:
    """The first answers of attempts that have a hold already, whatever became of it."""
    rows = yield Fetch(_HOLDS, (attempt_ids,))
    return {attempt_id: _granted.decode(answer) for attempt_id, answer in rows}


def _read_states(asks: Sequence[Ask]) -> Tx[_States]:
    """Of those tasks that have a row."""
    rows = yield Fetch(_STATES, (sorted({ask.attempt.task_id for ask in asks}),))
    return {task_id: (state, reason, steps) for task_id, state, reason, steps in rows}


#: (task, parent that its client names)
_Member = tuple[str, str | None]
_Lines = Mapping[_Member, Line]


_member: Callable[[Ask], _Member] = attrgetter("attempt.task_id", "attempt.parent_task_id")


def _scopes(ask: Ask, line: Line) -> tuple[str, ...]:
    return (*ask.scopes, *(f"task:{t}" for t in line.above)) if line.above else ask.scopes


def _to_look_up(asks: Sequence[Ask], parents: Mapping[str, str], careful: bool) -> set[str]:
    """The tasks above those of `asks`, as far as they are known without a look; if `careful`, those as well."""
    found = {up for task_id, named in set(map(_member, asks)) for up in (named, parents.get(task_id)) if up}
    if careful:
        found |= {ask.attempt.task_id for ask in asks}
    return found


def _lines(asks: Iterable[Ask], parents: Mapping[str, str], links: Mapping[str, Link]) -> _Lines:
    """The lines of those that have one."""
    found = {}
    for task_id, named in set(map(_member, asks)):
        if named is not None or task_id in parents or task_id in links:
            found[task_id, named] = lines.line_of(task_id, (named, parents.get(task_id)), links)
    return found


def _read_budgeted(revision: int) -> Tx[Budgeted]:
    scopes = frozenset(row[0] for row in (yield Fetch(_BUDGETED)))
    any_task = bool((yield Fetch(_BUDGETED_TASK)))
    limits: Sequence[Row] = yield Fetch(_TASK_LIMITS)
    return Budgeted(revision, scopes, any_task, {row[0]: row[1] for row in limits})


class _Wanted(NamedTuple):
    """Scopes whose budgets count for a batch, and those of tasks that get one of their own if they have none."""

    scopes: list[str]
    limits: Mapping[str, TaskLimit]


def _wanted(asks: Iterable[Ask], above: _Lines, budgeted: Budgeted, task_default: TaskDefault) -> _Wanted:
    wanted: set[str] = set()
    task_limits: dict[str, TaskLimit] = {}
    look_at_tasks = budgeted.any_task or task_default.nano_usd is not None or bool(budgeted.task_limits)
    for ask in asks:
        line = above.get(_member(ask), NO_LINE) if above else NO_LINE
        scopes = _scopes(ask, line)
        wanted.update(budgeted.scopes.intersection(scopes))
        if look_at_tasks:
            wanted.update([scope for scope in scopes if scope.startswith("task:")])
            limit = budgeted.task_limits.get(ask.attempt.team_id, task_default.nano_usd)
            # A run and all its children share one: the top of the line has it, were it only named so far.
            top = f"task:{line.above[-1] if line.above else ask.attempt.task_id}"
            if limit is not None and top in wanted:
                task_limits[top] = TaskLimit(limit, task_default.on_exceed)
    return _Wanted(sorted(wanted), task_limits)


def _write(
    granted: Sequence[tuple[Ask, Granted, str]],
    under: Mapping[str, str],
    above: _Lines,
    lease: Lease,
    now_ms: int,
) -> Tx[dict[str, Granted]]:
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
    step: dict[str, int] = {}
    began_ms: dict[str, int] = {}
    for task_id, steps, state, parent, source, created_at_ms in rows:
        if state not in ADMITTING and not all(
            admits(state, ask.landing) for ask, _, _ in granted if ask.attempt.task_id == task_id
        ):
            raise Conflict("a task admits nothing")
        up = lines.above_of(parent, source)
        if up not in (None, task_id) and not all(
            up in above.get(_member(ask), NO_LINE).above
            for ask, _, _ in granted
            if ask.attempt.task_id == task_id
        ):
            raise Conflict("a task has a parent in whose budgets nothing was held")
        step[task_id] = steps - firsts[task_id]
        began_ms[task_id] = created_at_ms
    yield from _land([ask.attempt for ask, _, _ in granted if ask.landing], under)
    answers: dict[str, Granted] = {}
    holds = []
    replica_id, epoch = lease.replica_id, lease.epoch
    for ask, answer, places in granted:
        attempt, amounts = ask.attempt, ask.amounts
        attempt_id, task_id = attempt.attempt_id, attempt.task_id
        # A later attempt of a request is the same step again.
        if attempt.attempt_no == 1:
            step[task_id] += 1
        final = answers[attempt_id] = replace(
            answer, task_step=step[task_id], task_began_ms=began_ms[task_id]
        )
        holds.append(
            (
                attempt_id,
                replica_id,
                epoch,
                final.amount_nano_usd,
                amounts.input_tokens or 0,
                final.output_tokens or 0,
                amounts.calls,
                places,
                final.task_step,
                now_ms,
                json_text(attempt),
                json_text(final),
            )
        )
    yield Each(_INSERT_HOLD, holds)
    return answers


def _land(attempts: Sequence[Attempt], under: Mapping[str, str]) -> Tx[None]:
    """Write down whose last answers these are. Raises `Conflict` if a task had its own meanwhile."""
    own, shared = [], []
    for a in sorted(attempts, key=lambda a: a.task_id):
        by = landed_by(a.request_id, a.attempt_no)
        if a.task_id in under:
            shared.append((a.task_id, by + landing_under(under[a.task_id])))
        else:
            own.append((a.task_id, by, f"{landings_of(a.request_id)}%"))
    if shared:
        yield Each(_LAND_UNDER, shared)
    if own and len((yield FetchEach(_LAND, own))) < len(own):
        raise Conflict("a task has landed already, or has no need to")


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
