"""Why prompts were not read from a cache: kept with the entry, reported by cause, deleted after a while."""

from __future__ import annotations

from pathlib import Path

from gateway.core.explanation import Cause, Explanation, Verdict
from gateway.storage import reports
from gateway.storage.journal import Journal, read_segment
from gateway.storage.reports import MissRow
from gateway.storage.settlement import Ending
from tests.storage.worlds import NOON_MS, attempt, opened, outcome, reserve

HOUR_MS = 3_600_000
TOOLS = Explanation(
    Verdict.MISS, Cause.TOOLS_REORDERED, "tools", 1, 120, "", 5_000, 0, 4_000, 4_000, 12_000, "req_0", 9_000
)
EXPIRED = Explanation(Verdict.PARTIAL, Cause.EXPIRED, lost_tokens=10, lost_nano_usd=30)


async def test_an_explanation_is_written_with_its_entry_and_counted_by_cause(
    store: str, tmp_path: Path
) -> None:
    async with opened(store, tmp_path) as (ledger, database, accounts):
        await accounts.ensure_defaults()
        told = [
            (TOOLS, {}),
            (TOOLS, {"task_id": "task_b"}),
            (EXPIRED, {"task_id": "task_b"}),
            (None, {}),
        ]
        attempts = [attempt(started_at_ms=NOON_MS + n, **more) for n, (_, more) in enumerate(told)]
        for a, (miss, _) in zip(attempts, told, strict=True):
            await reserve(ledger, a, 5_000)
            await ledger.settle(a, outcome(100, miss=miss))
            await ledger.settle(a, outcome(100, miss=miss))  # again: changes nothing

        first, hit = attempts[0], attempts[3]
        assert await reports.explanations(database, first.request_id) == {first.attempt_id: TOOLS}
        assert await reports.explanations(database, hit.request_id) == {}
        assert await reports.misses(database, by=("team",)) == [
            MissRow(("default",), "tools_reordered", 2, 8_000, 24_000),
            MissRow(("default",), "expired", 1, 10, 30),
        ]
        assert await reports.misses(database, by=(), task_id="task_b") == [
            MissRow((), "tools_reordered", 1, 4_000, 12_000),
            MissRow((), "expired", 1, 10, 30),
        ]
        assert await reports.misses(database, by=("day", "model"), to_ms=NOON_MS - HOUR_MS) == []
        assert await reports.misses(database, by=(), task_id="task_b", to_ms=NOON_MS) == []
        by_team = await reports.misses(database, by=("team", "tier"))

        assert await ledger.forget_misses(2**42) == 0
        assert await ledger.forget_misses(0) == 3
        assert await reports.misses(database, by=("task",)) == []
        assert await reports.misses(database, by=("team", "tier")) == by_team != []


async def test_an_explanation_waits_in_the_journal_with_its_settlement(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "r1")
    ending = Ending(attempt(), outcome(100, miss=TOOLS))
    await journal.append([ending])
    (segment,) = await journal.close_segment()
    assert list(read_segment(segment)) == [ending]
