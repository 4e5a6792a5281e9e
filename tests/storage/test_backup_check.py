"""What `tollhouse backup-check` finds in a database that came back from a backup: nothing, or exactly what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.commands.backup_check import examine
from gateway.commands.findings import Finding, State
from gateway.storage.database import open_database
from tests.storage.worlds import attempt, opened, outcome, reserve, run
from tests.support.running import settings_for


async def found(url: str, folder: Path) -> dict[str, Finding]:
    findings = await examine(settings_for(url, folder, "http://127.0.0.1:1/v1"))
    return {finding.subject: finding for finding in findings}


async def spent(url: str, folder: Path) -> list[str]:
    """Two calls that have ended, and one under way; the ids of their attempts."""
    async with opened(url, folder / "journal") as (ledger, _, accounts):
        await accounts.ensure_defaults()
        await accounts.set_budget("team:default", 9_000_000_000)
        calls = [attempt(team_id="default", tenant_id="default") for _ in range(3)]
        for call in calls:
            await reserve(ledger, call, 50_000_000)
        for call in calls[:2]:
            await ledger.settle(call, outcome(20_000_000))
        await ledger.idle()
    return [call.attempt_id for call in calls]


async def test_a_sound_one_fits_together_and_says_what_was_under_way(store: str, tmp_path: Path) -> None:
    await spent(store, tmp_path)
    findings = await found(store, tmp_path)
    assert {f.state for f in findings.values()} <= {State.OK, State.WARN}
    assert findings["ledger"].found.startswith("2 entries, the newest of ")
    assert findings["ledger"].to_do == ""
    assert findings["open holds"].state is State.WARN
    assert findings["open holds"].found.startswith("1 of 1 replicas, $0.05, the oldest of ")
    assert findings["budgets"].found == "every budget is the sum of its entries and holds"


@pytest.mark.parametrize(
    ("damage", "subjects", "said"),
    [
        (
            "UPDATE budget SET posted_amount = posted_amount + 7",
            {"budgets"},
            "40000007 posted, entries say 40000000",
        ),
        ("UPDATE usage_hour SET cost_nano_usd = 0", {"hourly sums"}, "entries say +0 attempts, $0.04 more"),
        (
            "UPDATE team_hour SET attempts = 3, cost_nano_usd = 0",
            {"sums by team"},
            "team default: entries say -1 attempts, $0.04 more",
        ),
        ("UPDATE task SET cost_nano_usd = 0", {"tasks"}, "entries say $0.04"),
        ("DELETE FROM audit WHERE action = 'budget.set'", {"audit trail"}, ""),
        (
            "DELETE FROM ledger WHERE attempt_id = '{ended}'",
            {"budgets", "hourly sums", "sums by team", "tasks", "ended attempts"},
            "attempts that ended without an entry: {ended}",
        ),
        (
            "UPDATE hold SET state = 'held' WHERE attempt_id = '{ended}'",
            {"budgets", "held attempts"},
            "attempts that are held and have ended: {ended}",
        ),
    ],
)
async def test_what_does_not_fit_is_named(
    store: str, tmp_path: Path, damage: str, subjects: set[str], said: str
) -> None:
    ended = (await spent(store, tmp_path))[0]
    database = open_database(store)
    await run(database, damage.format(ended=ended))
    await database.close()
    findings = await found(store, tmp_path)
    bad = {subject: f.found for subject, f in findings.items() if f.state is State.FAIL}
    assert bad.keys() == subjects
    assert said.format(ended=ended) in str(bad)


async def test_an_old_schema_is_to_be_migrated_first(store: str, tmp_path: Path) -> None:
    database = open_database(store)
    await run(database, "UPDATE alembic_version SET version_num = '0003'")
    await database.close()
    (finding,) = (await found(store, tmp_path)).values()
    assert (finding.state, finding.to_do) == (State.FAIL, "tollhouse migrate, then check again")
