"""Settlement: one transaction that ends a batch of holds, each by its one terminal entry.

Who ends a hold is decided by its state under the row's lock; that an attempt has one terminal entry and at most
one correction, whatever any process believes, by two unique indexes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import le

import msgspec

from gateway.core.catalog import Operation
from gateway.core.entry import Attempt, Kind, Outcome, Settled, Unit
from gateway.core.ids import ms_of
from gateway.core.task import LANDING_RULE
from gateway.core.usage import Quality
from gateway.storage import budget_rows, entry_rows, lines, task_rows
from gateway.storage.budget_rows import Moves, Place
from gateway.storage.entry_rows import Entry
from gateway.storage.lines import Link
from gateway.storage.tables import TOKEN_COLUMNS
from gateway.storage.transact import Fetch, Row, Sql, Tx

_END_HOLDS = Sql(
    "UPDATE hold SET state = 'ended' WHERE state = 'held' AND attempt_id IN "
    "(SELECT attempt_id FROM hold WHERE attempt_id = ANY($1::text[]) AND state = 'held' "
    "ORDER BY attempt_id FOR UPDATE) RETURNING attempt_id, budgets, step, amount_nano_usd, input_tokens, "
    "output_tokens, calls, (SELECT now_ms())"  # once, not for each row
)
#: An admission shares its replica's row until its COMMIT is decided, also if the answer to it was lost on the way.
_AFTER_ADMISSIONS = Sql("SELECT epoch FROM replica WHERE replica_id = $1 FOR UPDATE")
_ENTRIES = Sql(
    "SELECT attempt_id, kind, amount_nano_usd, list_cost_nano_usd, quality, budgets, step, "  # noqa: S608
    "charged_input_tokens, charged_output_tokens, charged_calls, error, "
    + ", ".join(TOKEN_COLUMNS)
    + " FROM ledger WHERE attempt_id = ANY($1::text[])"
)
_NOW = Sql("SELECT now_ms()")
_BY_CERTAINTY = (Quality.UNKNOWN, Quality.ESTIMATED, Quality.EXACT)


class Ending(msgspec.Struct, frozen=True, gc=False):
    """One attempt and how it ended."""

    attempt: Attempt
    outcome: Outcome


#: (nano-dollars, input tokens, output tokens, calls)
Charged = tuple[int, int, int, int]
_UNITS = (Unit.USD, Unit.INPUT_TOKENS, Unit.OUTPUT_TOKENS, Unit.CALLS)


class _Hold(msgspec.Struct, frozen=True, gc=False):
    budgets: str
    step: int
    amounts: Charged


@dataclass(slots=True)
class _Posted:
    """What the ledger says about an attempt so far."""

    charged: Charged
    list_cost_nano_usd: int
    tokens: tuple[int, ...]
    quality: Quality = Quality.UNKNOWN
    budgets: str = "[]"
    step: int = 0
    failed: bool = False
    corrected: bool = False


def settle(endings: Sequence[Ending], replica_id: str, careful: bool) -> Tx[list[Settled]]:
    """End the holds of `endings`, in which no attempt comes twice.

    Not `careful`, it takes an open hold as proof that no terminal entry exists, and fails with `Conflict` where
    that is wrong: a hold whose COMMIT was lost may turn up after its entry.
    """
    ids = [e.attempt.attempt_id for e in endings]
    rows = yield Fetch(_END_HOLDS, (ids,))
    now_ms: int = rows[0][7] if rows else (yield Fetch(_NOW))[0][0]
    ended = _holds_of(rows)
    look_at = [i for i in ids if careful or i not in ended]
    posted = (yield from _read_posted(look_at)) if look_at else {}
    known = ended.keys() | posted.keys()
    lost = [e.attempt for e in endings if e.attempt.attempt_id not in known] if len(known) < len(ids) else []
    if lost:
        late = yield from _end_late([a.attempt_id for a in lost], replica_id)
        ended.update(late)
        lost = [a for a in lost if a.attempt_id not in late]
    lost_places = (yield from _places(lost, now_ms)) if lost else {}

    entry_ids = budget_rows.fresh_ids("ent", now_ms, len(endings))
    answers: list[Settled] = []
    entries: list[Entry] = []
    released: _ByBudgets = defaultdict(list)
    posted_in: _ByBudgets = defaultdict(list)
    breaches: list[tuple[str, str, dict[str, object]]] = []
    for ending in endings:
        attempt_id = ending.attempt.attempt_id
        hold = ended.get(attempt_id)
        before = posted.get(attempt_id)
        entry: Entry | None
        if before is not None:
            entry = _correction(ending, before, next(entry_ids))
            answers.append(Settled.CORRECTED if entry else Settled.ALREADY)
        else:
            entry = _terminal(
                ending, hold, hold.budgets if hold else lost_places[attempt_id], next(entry_ids)
            )
            answers.append(Settled.SETTLED)
            if hold and hold.budgets != "[]" and not all(map(le, entry.charged, hold.amounts)):
                breaches += _breaches(entry, hold)
        if hold:
            released[hold.budgets].append(hold.amounts)
        if entry:
            entries.append(entry)
            posted_in[entry.budgets].append(entry.charged)
    if entries:
        new_misses = yield from entry_rows.write(entries, replica_id, now_ms)
    posted_in_tasks = yield from budget_rows.move(_moves(released, posted_in), now_ms)
    yield from budget_rows.announce(breaches, now_ms)
    if entries:
        yield from entry_rows.add_up(entries, new_misses, now_ms)
    if posted_in_tasks:
        yield from task_rows.follow(posted_in_tasks)
    voided = [e.attempt for e in entries if e.kind is Kind.VOID and e.attempt.rule == LANDING_RULE]
    if voided:
        yield from task_rows.not_landed(voided)
    return answers


def _end_late(attempt_ids: list[str], replica_id: str) -> Tx[dict[str, _Hold]]:
    """End holds that were not there a moment ago: this replica's admissions that are under way are waited for.

    Else a hold whose COMMIT takes longer than its caller waited would appear after its entry, and stay.
    """
    yield Fetch(_AFTER_ADMISSIONS, (replica_id,))
    return _holds_of((yield Fetch(_END_HOLDS, (attempt_ids,))))


def _holds_of(rows: Sequence[Row]) -> dict[str, _Hold]:
    return {row[0]: _Hold(row[1], row[2], tuple(row[3:7])) for row in rows}


def _read_posted(attempt_ids: list[str]) -> Tx[dict[str, _Posted]]:
    found: dict[str, _Posted] = {}
    rows = yield Fetch(_ENTRIES, (attempt_ids,))
    for row in rows:
        attempt_id, kind, amount, list_cost, quality, budgets, step, *charged, error = row[:11]
        (inputs, outputs, calls), tokens = charged, row[11:]
        so_far = found.setdefault(attempt_id, _Posted((0, 0, 0, 0), 0, (0,) * len(TOKEN_COLUMNS)))
        usd_so_far, inputs_so_far, outputs_so_far, calls_so_far = so_far.charged
        so_far.charged = (
            usd_so_far + amount,
            inputs_so_far + inputs,
            outputs_so_far + outputs,
            calls_so_far + calls,
        )
        so_far.list_cost_nano_usd += list_cost
        so_far.tokens = tuple(a + b for a, b in zip(so_far.tokens, tokens, strict=True))
        so_far.budgets, so_far.step = budgets, step
        so_far.quality = Quality(quality)
        so_far.corrected |= kind == Kind.CORRECT
        so_far.failed |= kind != Kind.CORRECT and bool(error)
    return found


def _places(lost: Sequence[Attempt], now_ms: int) -> Tx[dict[str, str]]:
    """Where attempts are posted whose holds the store has lost: in the current budgets of their scopes."""
    links = yield from lines.links({t for a in lost for t in (a.task_id, a.parent_task_id) if t})
    scopes = {a.attempt_id: _scopes(a, links) for a in lost}
    by_scope = yield from budget_rows.lock({s for found in scopes.values() for s in found}, now_ms)
    yield from entry_rows.ensure_tasks(lost, now_ms)
    return {
        a.attempt_id: budget_rows.places_text(
            map(Place.of, budget_rows.apart(b for s in scopes[a.attempt_id] for b in by_scope.get(s, ())))
        )
        for a in lost
    }


def _scopes(attempt: Attempt, links: Mapping[str, Link]) -> list[str]:
    line = lines.line_of(attempt.task_id, (attempt.parent_task_id,), links)
    scopes = [f"tenant:{attempt.tenant_id}", f"team:{attempt.team_id}", f"key:{attempt.key_id}"]
    return scopes + [f"task:{t}" for t in (attempt.task_id, *line.above)]


def _charged(ending: Ending, hold: _Hold | None) -> Charged:
    """What budgets are charged for: nothing for a void, what was held if the usage is unknown, else the usage."""
    outcome = ending.outcome
    if outcome.kind is Kind.VOID:
        return 0, 0, 0, 0
    calls = hold.amounts[3] if hold else int(ending.attempt.operation != Operation.COUNT_TOKENS)
    if outcome.kind is Kind.CHARGE_UNKNOWN and hold:
        return outcome.cost_nano_usd, hold.amounts[1], hold.amounts[2], calls
    return outcome.cost_nano_usd, outcome.usage.input_total, outcome.usage.output, calls


def _terminal(ending: Ending, hold: _Hold | None, budgets: str, entry_id: str) -> Entry:
    outcome = ending.outcome
    return Entry(
        entry_id=entry_id,
        at_ms=ms_of(ending.attempt.attempt_id),
        attempt=ending.attempt,
        outcome=outcome,
        kind=Kind.POST if outcome.kind is Kind.CORRECT else outcome.kind,
        charged=_charged(ending, hold),
        list_cost_nano_usd=outcome.list_cost_nano_usd,
        tokens=entry_rows.tokens_of(outcome),
        hold_nano_usd=hold.amounts[0] if hold else 0,
        step=hold.step if hold else 0,
        budgets=budgets,
        failed=bool(outcome.error),
    )


def _correction(ending: Ending, before: _Posted, entry_id: str) -> Entry | None:
    """The one `correct` entry, or None: nothing to correct, corrected already, or no proof of anything better.

    Proof of the amount that was guessed is a correction of 0: the counts behind it become exact, and nobody asks
    the provider again.
    """
    outcome = ending.outcome
    surer = _BY_CERTAINTY.index(outcome.quality) > _BY_CERTAINTY.index(before.quality)
    same = outcome.cost_nano_usd == before.charged[0] and not surer
    if before.corrected or outcome.kind is Kind.CHARGE_UNKNOWN or same:
        return None
    tokens = entry_rows.tokens_of(outcome)
    usd, inputs, outputs, calls = _charged(ending, None)
    usd_before, inputs_before, outputs_before, calls_before = before.charged
    return Entry(
        entry_id=entry_id,
        at_ms=ms_of(ending.attempt.attempt_id),
        attempt=ending.attempt,
        outcome=outcome,
        kind=Kind.CORRECT,
        charged=(usd - usd_before, inputs - inputs_before, outputs - outputs_before, calls - calls_before),
        list_cost_nano_usd=outcome.list_cost_nano_usd - before.list_cost_nano_usd,
        tokens=tuple(new - old for new, old in zip(tokens, before.tokens, strict=True)),
        hold_nano_usd=0,
        step=before.step,
        budgets=before.budgets,
        failed=before.failed,
    )


def _breaches(entry: Entry, hold: _Hold) -> list[tuple[str, str, dict[str, object]]]:
    """I4 is broken: the provider used more than was held. The truth is posted, and someone is told."""
    a = entry.attempt
    budgeted = {place.unit for place in budget_rows.places_of(hold.budgets)}
    return [
        (
            "bound_breach",
            f"breach/{a.attempt_id}/{unit}",
            {
                "attempt_id": a.attempt_id,
                "deployment": a.deployment,
                "price_version": entry.outcome.price_version,
                "unit": unit,
                "held": held,
                "charged": used,
            },
        )
        for unit, used, held in zip(_UNITS, entry.charged, hold.amounts, strict=True)
        if used > held and unit in budgeted
    ]


#: Amounts by the text of the budgets that they are held in or posted to: most of a batch are in the same few.
_ByBudgets = defaultdict[str, list[Charged]]


def _moves(released: _ByBudgets, posted: _ByBudgets) -> Moves:
    """Release what was held in budgets, and post what was charged to them."""
    moves = Moves()
    for budgets, holds in released.items():
        for place, amount in _in_places(budgets, holds):
            moves.add(place, -amount, 0)
    for budgets, charges in posted.items():
        for place, amount in _in_places(budgets, charges):
            moves.add(place, 0, amount)
    return moves


def _in_places(budgets: str, amounts: Sequence[Charged]) -> list[tuple[Place, int]]:
    if budgets == "[]":
        return []
    sums = dict(zip(_UNITS, map(sum, zip(*amounts, strict=True)), strict=True))
    return [(place, sums[place.unit]) for place in budget_rows.places_of(budgets) if sums[place.unit]]
