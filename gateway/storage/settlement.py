"""Settlement: one transaction that ends a batch of holds, each by its one terminal entry.

Who ends a hold is decided by its state under the row's lock; that an attempt has one terminal entry and at most
one correction, whatever any process believes, by two unique indexes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.core.entry import Attempt, Kind, Outcome, Settled
from gateway.core.ids import ms_of
from gateway.core.usage import Quality
from gateway.storage import budget_rows, entry_rows
from gateway.storage.budget_rows import Place
from gateway.storage.entry_rows import Entry
from gateway.storage.tables import TOKEN_COLUMNS
from gateway.storage.transact import Fetch, Sql, Tx

_END_HOLDS = Sql(
    "UPDATE hold SET state = 'ended' WHERE state = 'held' AND attempt_id IN "
    "(SELECT attempt_id FROM hold WHERE attempt_id = ANY($1::text[]) AND state = 'held' "
    "ORDER BY attempt_id FOR UPDATE) RETURNING attempt_id, amount_nano_usd, budgets, step, now_ms()"
)
_ENTRIES = Sql(
    "SELECT attempt_id, kind, amount_nano_usd, list_cost_nano_usd, quality, budgets, step, "  # noqa: S608
    + ", ".join(TOKEN_COLUMNS)
    + " FROM ledger WHERE attempt_id = ANY($1::text[])"
)
_NOW = Sql("SELECT now_ms()")
_BY_CERTAINTY = (Quality.UNKNOWN, Quality.ESTIMATED, Quality.EXACT)


@dataclass(frozen=True, slots=True)
class Ending:
    """One attempt and how it ended."""

    attempt: Attempt
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class _Hold:
    amount_nano_usd: int
    budgets: str
    step: int


@dataclass(slots=True)
class _Posted:
    """What the ledger says about an attempt so far."""

    amount_nano_usd: int
    list_cost_nano_usd: int
    tokens: tuple[int, ...]
    quality: Quality = Quality.UNKNOWN
    budgets: str = "[]"
    step: int = 0
    corrected: bool = False


def settle(endings: Sequence[Ending], replica_id: str, careful: bool) -> Tx[list[Settled]]:
    """End the holds of `endings`, in which no attempt comes twice.

    Not `careful`, it takes an open hold as proof that no terminal entry exists, and fails with `Conflict` where
    that is wrong: a hold whose COMMIT was lost may turn up after its entry.
    """
    ids = [e.attempt.attempt_id for e in endings]
    rows = yield Fetch(_END_HOLDS, (ids,))
    now_ms: int = rows[0][4] if rows else (yield Fetch(_NOW))[0][0]
    ended = {row[0]: _Hold(row[1], row[2], row[3]) for row in rows}
    look_at = [i for i in ids if careful or i not in ended]
    posted = (yield from _read_posted(look_at)) if look_at else {}
    lost = [
        e.attempt for e in endings if e.attempt.attempt_id not in ended and e.attempt.attempt_id not in posted
    ]
    lost_places = (yield from _places(lost, now_ms)) if lost else {}

    entry_ids = budget_rows.fresh_ids("ent", now_ms, len(endings))
    answers: list[Settled] = []
    entries: list[Entry] = []
    deltas: dict[Place, tuple[int, int]] = {}
    breaches = []
    for ending in endings:
        attempt_id = ending.attempt.attempt_id
        hold = ended.get(attempt_id)
        before = posted.get(attempt_id)
        entry: Entry | None
        if before is not None:
            entry = _correction(ending, before, next(entry_ids))
            answers.append(Settled.CORRECTED if entry else Settled.ALREADY)
        else:
            entry = _terminal(ending, hold or _Hold(0, lost_places[attempt_id], 0), next(entry_ids))
            answers.append(Settled.SETTLED)
            if hold and hold.budgets != "[]" and entry.amount_nano_usd > hold.amount_nano_usd:
                breaches.append(_breach(entry))
        if hold:
            _shift(deltas, hold.budgets, -hold.amount_nano_usd, 0)
        if entry:
            entries.append(entry)
            _shift(deltas, entry.budgets, 0, entry.amount_nano_usd)
    if entries:
        yield from entry_rows.write(entries, replica_id, now_ms)
    yield from budget_rows.move(deltas, now_ms)
    yield from budget_rows.announce(breaches, now_ms)
    if entries:
        yield from entry_rows.add_up(entries, now_ms)
    return answers


def _read_posted(attempt_ids: list[str]) -> Tx[dict[str, _Posted]]:
    found: dict[str, _Posted] = {}
    rows = yield Fetch(_ENTRIES, (attempt_ids,))
    for attempt_id, kind, amount, list_cost, quality, budgets, step, *tokens in rows:
        so_far = found.setdefault(attempt_id, _Posted(0, 0, (0,) * len(TOKEN_COLUMNS)))
        so_far.amount_nano_usd += amount
        so_far.list_cost_nano_usd += list_cost
        so_far.tokens = tuple(a + b for a, b in zip(so_far.tokens, tokens, strict=True))
        so_far.budgets, so_far.step = budgets, step
        so_far.quality = Quality(quality)
        so_far.corrected |= kind == Kind.CORRECT
    return found


def _places(lost: Sequence[Attempt], now_ms: int) -> Tx[dict[str, str]]:
    """Where attempts are posted whose holds the store has lost: in the current budgets of their scopes."""
    by_scope = yield from budget_rows.lock({s for a in lost for s in _scopes(a)}, now_ms)
    yield from entry_rows.ensure_tasks(lost, now_ms)
    return {
        a.attempt_id: budget_rows.places_text(
            (b.budget_id, b.window_start_ms) for s in _scopes(a) for b in by_scope.get(s, ())
        )
        for a in lost
    }


def _scopes(attempt: Attempt) -> list[str]:
    scopes = [f"tenant:{attempt.tenant_id}", f"team:{attempt.team_id}", f"key:{attempt.key_id}"]
    scopes += [f"task:{t}" for t in (attempt.task_id, attempt.parent_task_id) if t]
    return scopes


def _terminal(ending: Ending, hold: _Hold, entry_id: str) -> Entry:
    outcome = ending.outcome
    return Entry(
        entry_id=entry_id,
        at_ms=ms_of(ending.attempt.attempt_id),
        attempt=ending.attempt,
        outcome=outcome,
        kind=Kind.POST if outcome.kind is Kind.CORRECT else outcome.kind,
        amount_nano_usd=outcome.cost_nano_usd,
        list_cost_nano_usd=outcome.list_cost_nano_usd,
        tokens=entry_rows.tokens_of(outcome),
        hold_nano_usd=hold.amount_nano_usd,
        step=hold.step,
        budgets=hold.budgets,
    )


def _correction(ending: Ending, before: _Posted, entry_id: str) -> Entry | None:
    """The one `correct` entry, or None: nothing to correct, corrected already, or no proof of anything better.

    Proof of the amount that was guessed is a correction of 0: the counts behind it become exact, and nobody asks
    the provider again.
    """
    outcome = ending.outcome
    surer = _BY_CERTAINTY.index(outcome.quality) > _BY_CERTAINTY.index(before.quality)
    same = outcome.cost_nano_usd == before.amount_nano_usd and not surer
    if before.corrected or outcome.kind is Kind.CHARGE_UNKNOWN or same:
        return None
    tokens = entry_rows.tokens_of(outcome)
    return Entry(
        entry_id=entry_id,
        at_ms=ms_of(ending.attempt.attempt_id),
        attempt=ending.attempt,
        outcome=outcome,
        kind=Kind.CORRECT,
        amount_nano_usd=outcome.cost_nano_usd - before.amount_nano_usd,
        list_cost_nano_usd=outcome.list_cost_nano_usd - before.list_cost_nano_usd,
        tokens=tuple(new - old for new, old in zip(tokens, before.tokens, strict=True)),
        hold_nano_usd=0,
        step=before.step,
        budgets=before.budgets,
    )


def _breach(entry: Entry) -> tuple[str, str, dict[str, object]]:
    """I4 is broken: the provider billed more than was held. The truth is posted, and someone is told."""
    a = entry.attempt
    body: dict[str, object] = {
        "attempt_id": a.attempt_id,
        "deployment": a.deployment,
        "price_version": entry.outcome.price_version,
        "hold_nano_usd": entry.hold_nano_usd,
        "amount_nano_usd": entry.amount_nano_usd,
    }
    return "bound_breach", f"breach/{a.attempt_id}", body


def _shift(deltas: dict[Place, tuple[int, int]], budgets: str, held: int, posted: int) -> None:
    if budgets == "[]":
        return
    for place in budget_rows.places_of(budgets):
        held_so_far, posted_so_far = deltas.get(place, (0, 0))
        deltas[place] = (held_so_far + held, posted_so_far + posted)
