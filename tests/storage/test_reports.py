"""Usage by any dimension, and entries page by page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.core.errors import InvalidRequest
from gateway.core.usage import Usage
from gateway.storage import reports
from gateway.storage.database import Database
from gateway.storage.reports import Drift, UsageRow
from gateway.storage.tables import TOKEN_COLUMNS
from tests.storage.worlds import NOON_MS, TEAM, attempt, opened, outcome, reserve, run

DAY_MS = 86_400_000
MIDNIGHT_MS = NOON_MS // DAY_MS * DAY_MS


@pytest.fixture
async def played(store: str, tmp_path: Path) -> AsyncIterator[Database]:
    """Six attempts over two days: sonnet at 1,000 each, haiku at 10 each, one of them an error and a retry."""
    async with opened(store, tmp_path / "journal") as (ledger, database, accounts):
        await accounts.ensure_defaults()
        await accounts.set_budget(TEAM, 10**9)
        for day, model, extra in [
            (0, "sonnet", {}),
            (0, "sonnet", {}),
            (0, "haiku", {"tier": "small", "task_id": "task_b"}),
            (1, "sonnet", {"key_id": "key00002"}),
            (1, "haiku", {"tier": "small", "task_id": "task_b"}),
            (1, "haiku", {"tier": "small", "task_id": "task_b", "attempt_no": 2}),
        ]:
            a = attempt(
                model=model,
                started_at_ms=MIDNIGHT_MS + day * DAY_MS + 3_600_000,
                **extra,  # type: ignore[arg-type]
            )
            await reserve(ledger, a, 5_000)
            cost = 1_000 if model == "sonnet" else 10
            error = "upstream_lost" if a.attempt_no == 2 else ""
            await ledger.settle(a, outcome(cost, usage=Usage(input_uncached=cost, output=1), error=error))
        # Written now; but said to be of that time, as if they had been.
        for column, end in [("created_at_ms", "min"), ("last_at_ms", "max")]:
            of_entries = f"SELECT {end}(l.at_ms) FROM ledger l WHERE l.task_id = task.task_id"
            await run(database, f"UPDATE task SET {column} = ({of_entries})")
        yield database


def row(
    group: tuple[str | int, ...], attempts: int, cost: int, errors: int = 0, retries_cost: int = 0
) -> UsageRow:
    tokens = dict.fromkeys(TOKEN_COLUMNS, 0) | {"input_uncached": cost, "output": attempts}
    return UsageRow(group, attempts, errors, errors, retries_cost, cost, cost * 3, tokens)


async def test_tasks_are_read_from_their_own_rows_but_for_those_under_way_at_an_edge(
    played: Database,
) -> None:
    """Their rows are made wrong here, so that an answer shows where it comes from."""
    ever, both_days = (0, 2**50), (MIDNIGHT_MS, MIDNIGHT_MS + 2 * DAY_MS)
    asked = [await reports.usage(played, by=("task",), from_ms=a, to_ms=b) for a, b in (ever, both_days)]
    assert asked == [[row(("task_a",), 3, 3_000), row(("task_b",), 3, 30, 1, 10)]] * 2
    await run(played, "UPDATE task SET errors = 7")
    for (from_ms, to_ms), errors in [
        (ever, [7, 7]),
        (both_days, [7, 7]),
        ((MIDNIGHT_MS + DAY_MS, MIDNIGHT_MS + 2 * DAY_MS), [0, 1]),
        ((MIDNIGHT_MS, MIDNIGHT_MS + DAY_MS), [0, 0]),
        ((MIDNIGHT_MS + 3_600_000, MIDNIGHT_MS + 2 * DAY_MS), [0, 1]),  # it began with the time asked for
        ((MIDNIGHT_MS + 2 * DAY_MS, MIDNIGHT_MS + 3 * DAY_MS), []),
    ]:
        found = await reports.usage(played, by=("task",), from_ms=from_ms, to_ms=to_ms)
        assert [task.errors for task in found] == errors


async def usage(database: Database, *by: str, days: tuple[int, int] = (0, 2)) -> list[UsageRow]:
    start, end = (MIDNIGHT_MS + d * DAY_MS for d in days)
    return await reports.usage(database, by=by, from_ms=start, to_ms=end)


async def test_usage_by_any_dimension(played: Database) -> None:
    assert await usage(played, "model") == [row(("sonnet",), 3, 3_000), row(("haiku",), 3, 30, 1, 10)]
    assert await usage(played, "task") == [row(("task_a",), 3, 3_000), row(("task_b",), 3, 30, 1, 10)]
    assert await usage(played, "day", "tier") == [
        row((MIDNIGHT_MS, "standard"), 2, 2_000),
        row((MIDNIGHT_MS + DAY_MS, "standard"), 1, 1_000),
        row((MIDNIGHT_MS + DAY_MS, "small"), 2, 20, 1, 10),
        row((MIDNIGHT_MS, "small"), 1, 10),
    ]
    assert await usage(played, "task", "day", days=(1, 2)) == [
        row(("task_a", MIDNIGHT_MS + DAY_MS), 1, 1_000),
        row(("task_b", MIDNIGHT_MS + DAY_MS), 2, 20, 1, 10),
    ]
    assert await usage(played) == [row((), 6, 3_030, 1, 10)]
    assert await usage(played, "team", days=(2, 3)) == []
    (one_key,) = await reports.usage(played, by=("key",), from_ms=0, to_ms=2**50, key_id="key00002")
    assert one_key == row(("key00002",), 1, 1_000)
    with pytest.raises(InvalidRequest, match="cannot group by mood; choose from tenant, team"):
        await usage(played, "mood")


async def test_entries_come_page_by_page_in_order(played: Database) -> None:
    everything = await reports.entries(played)
    assert [e["at_ms"] for e in everything] == sorted(e["at_ms"] for e in everything)
    pages = []
    after = (-1, "")
    while page := await reports.entries(played, after=after, limit=4):
        pages.append(page)
        after = (page[-1]["at_ms"], page[-1]["entry_id"])
    assert [len(p) for p in pages] == [4, 2]
    assert [e for p in pages for e in p] == everything

    one = everything[0]
    assert await reports.entries(played, request_id=one["request_id"]) == [one]
    assert len(await reports.entries(played, task_id="task_b")) == 3
    assert len(await reports.entries(played, from_ms=MIDNIGHT_MS + DAY_MS)) == 3


async def test_totals_that_are_not_the_sums_of_their_entries_are_found(played: Database) -> None:
    assert await reports.drift(played) == []
    await run(played, "UPDATE budget SET posted_amount = posted_amount + 1, held_amount = 5")
    (drift,) = await reports.drift(played)
    assert drift == Drift(drift.budget_id, 0, TEAM, "usd", 3_031, 3_030, 5, 0)
