"""Worlds in which one guard of the ledger is missing. In each of them the checker must find something."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.entry import Granted, Refused, Settled
from gateway.storage.admission import Ask
from gateway.storage.ledger import SqlLedger
from gateway.storage.settlement import Ending
from gateway.storage.transact import Row
from tests.simulator.store import Sabotage


class Edited(Sabotage):
    """Statements are changed by replacing text; `hits` counts how many were."""

    def __init__(self, *replacements: tuple[str, str], drop_indexes: Sequence[str] = ()) -> None:
        self.drop_indexes = drop_indexes
        self.hits = len(drop_indexes)
        self._replacements = replacements

    def rewrite(self, text: str) -> str:
        for old, new in self._replacements:
            if old in text:
                self.hits += 1
                text = text.replace(old, new)
        return text


class Misread(Sabotage):
    """What statements with `part` in their text read is told differently."""

    def __init__(self, part: str, told: Callable[[Sequence[Row]], Sequence[Row]]) -> None:
        self.hits = 0
        self._part = part
        self._told = told

    def rows(self, text: str, rows: Sequence[Row]) -> Sequence[Row]:
        if self._part not in text:
            return rows
        self.hits += 1
        return self._told(rows)


class _AnyEpoch(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class TrustsLostCommits(SqlLedger):
    """Takes a COMMIT without an answer for done."""

    async def _look_for(
        self, asks: list[Ask], answers: list[Granted | Refused], deadline: float
    ) -> list[Granted | Refused | Exception]:
        return [*answers]


class KeepsNoJournal(SqlLedger):
    """What the store does not take is forgotten."""

    async def _to_journal(self, endings: list[Ending]) -> list[Settled | Exception]:
        return [Settled.SETTLED] * len(endings)


class GivesNothingBack(SqlLedger):
    """A hold whose caller has left stays."""

    def _give_back(self, ask: Ask, answer: Granted | Refused) -> None:
        return


@dataclass(frozen=True)
class MissingGuard:
    name: str
    expected: frozenset[str]  # rules, one of which is broken first
    sabotage: Callable[[], Edited | Misread] = Edited
    ledger: type[SqlLedger] = SqlLedger
    first: int = 0  # a seed that finds it, as schedules are made today: the search begins there

    @property
    def edits(self) -> bool:
        """It is in a statement, not in the ledger's own code."""
        return self.ledger is SqlLedger


def _with(index: int, value: Any) -> Callable[[Sequence[Row]], Sequence[Row]]:
    return lambda rows: [(*row[:index], value, *row[index + 1 :]) for row in rows]


MISSING = (
    MissingGuard(
        "the unique index on terminal entries",
        frozenset({"I2"}),
        lambda: Edited(drop_indexes=["uq_ledger_terminal"]),
        first=27,
    ),
    MissingGuard(
        "the state that a hold must have to be ended",
        frozenset({"I2", "I3"}),
        lambda: Edited(
            ("'ended' WHERE state = 'held' AND", "'ended' WHERE"),
            (" AND state = 'held' ORDER BY", " ORDER BY"),
        ),
    ),
    MissingGuard(
        "the lock on budgets",
        frozenset({"I1", "I3"}),
        lambda: Edited(("::text[]) ORDER BY budget_id FOR UPDATE", "::text[]) ORDER BY budget_id")),
    ),
    MissingGuard(
        "the fence: the epoch and the expiry of the lease",
        frozenset({"lease"}),
        lambda: Misread(
            "SELECT now_ms(), (SELECT number FROM revision), epoch, expires_at_ms",
            lambda rows: [(row[0], row[1], _AnyEpoch(), 2**62) for row in rows],
        ),
        first=46,
    ),
    MissingGuard(
        "the lock on the lease while it is used",
        frozenset({"lease"}),
        lambda: Edited((" FOR SHARE", "")),
        first=34,
    ),
    MissingGuard(
        "the look at what is posted already: replays are not idempotent",
        frozenset({"I2", "stuck"}),
        lambda: Misread(" FROM ledger WHERE attempt_id IN", lambda _: []),
    ),
    MissingGuard(
        "the look for holds after a COMMIT without an answer",
        frozenset({"I2"}),
        ledger=TrustsLostCommits,
    ),
    MissingGuard(
        "the wait for an admission under way before its hold is taken for lost",
        frozenset({"leak"}),
        lambda: Edited(("SELECT epoch FROM replica WHERE replica_id = $1 FOR UPDATE", "SELECT 1")),
    ),
    MissingGuard(
        "the limit",
        frozenset({"I1"}),
        lambda: Misread("ORDER BY budget_id", _with(6, 2**60)),
    ),
    MissingGuard(
        "the state of the task",
        frozenset({"task"}),
        lambda: Misread("RETURNING task_id, steps, state", _with(2, "running")),
    ),
    MissingGuard(
        "the tasks above a task's parent",
        frozenset({"I1"}),
        lambda: Misread("SELECT task_id, parent_task_id, source, state FROM task", lambda _: []),
        first=129,
    ),
    MissingGuard(
        "the parent that a child no longer names",
        frozenset({"I1"}),
        lambda: Misread("RETURNING task_id, steps, state, parent_task_id", _with(3, None)),
        first=28,
    ),
    MissingGuard(
        "that a task lands once per stop",
        frozenset({"task"}),
        lambda: Edited((" AND (state_reason NOT LIKE 'summed up by %'", " AND (state_reason LIKE '%'")),
    ),
    MissingGuard(
        "the moment at which a former run ended: every start puts it off",
        frozenset({"I2"}),
        lambda: Edited(("CASE WHEN h.orphaned_at_ms IS NOT NULL THEN h.orphaned_at_ms WHEN", "CASE WHEN")),
        first=21,
    ),
    MissingGuard("the journal", frozenset({"I2", "leak"}), ledger=KeepsNoJournal),
    MissingGuard(
        "the hold that comes back when its caller has left", frozenset({"leak"}), ledger=GivesNothingBack
    ),
)
