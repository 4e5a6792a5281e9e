"""The test of the tests: with any one guard missing, the simulator finds something within a few hundred schedules."""

from __future__ import annotations

import sqlite3

import pytest

from tests.simulator.guards import MISSING, Edited, Misread, MissingGuard
from tests.simulator.schedule import schedule_of
from tests.simulator.world import run

SCHEDULES = 300


def broken(seed: int, guard: MissingGuard, sabotage: Edited | Misread) -> set[str]:
    """The rules that are broken without the guard; a table's own constraint may be what stops the play first."""
    try:
        result = run(schedule_of(seed, hostile=True), sabotage=sabotage, ledger=guard.ledger)
    except sqlite3.IntegrityError:
        return set()
    return {violation.rule for violation in result.violations}


@pytest.mark.parametrize("guard", MISSING, ids=lambda guard: guard.name)
def test_a_missing_guard_is_found(guard: MissingGuard) -> None:
    found: set[str] = set()
    for seed in (guard.first, *range(SCHEDULES)):
        found |= broken(seed, guard, guard.sabotage())
        if found & guard.expected:
            return
    pytest.fail(f"{SCHEDULES} schedules without it broke {found or 'no rule'}")


@pytest.mark.parametrize("guard", [g for g in MISSING if g.edits], ids=lambda guard: guard.name)
def test_it_is_the_guard_that_was_taken_away(guard: MissingGuard) -> None:
    """A statement that was reworded would no longer be the one that is changed in guards.py."""
    hits = 0
    for seed in range(8):
        sabotage = guard.sabotage()
        broken(seed, guard, sabotage)
        hits += sabotage.hits
    assert hits > 0
