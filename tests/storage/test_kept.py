"""Settlements are kept for a day beside the database, and posted again when it has lost them."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.core.entry import Settled
from gateway.storage import reports
from gateway.storage.journal import Journal, read_segment
from gateway.storage.kept import BYTES_MAX, FILE_BYTES, KEEP_S, Kept, kept_files
from gateway.storage.replay import Replayed, replay
from gateway.storage.settlement import Ending
from tests.storage.worlds import TEAM, attempt, opened, outcome, reserve, rows, run, void


class Clock:
    now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


def written(kept: Kept, clock: Clock, size: int) -> Path:
    """A file of its own, of this time and as large, though it takes no room on the disk."""
    kept.add([b"x"])
    kept.flush()
    path = kept_files(kept._directory.parent)[-1]
    os.truncate(path, size)
    os.utime(path, (clock.now_s, clock.now_s))
    return path


def test_files_are_kept_for_a_day_and_then_go(tmp_path: Path) -> None:
    clock = Clock()
    kept = Kept(tmp_path, "r1", clock)
    first = written(kept, clock, 1)
    clock.now_s += KEEP_S / 2
    second = written(kept, clock, 1)
    assert kept_files(tmp_path) == [first, second]
    clock.now_s += KEEP_S / 2 + 1
    third = written(kept, clock, 1)
    kept.prune()
    assert kept_files(tmp_path) == [second, third]
    assert third.stat().st_mode & 0o777 == 0o600


def test_all_files_together_are_bounded_and_the_oldest_go_first(tmp_path: Path) -> None:
    clock = Clock()
    kept = Kept(tmp_path, "r1", clock)
    paths = []
    for _ in range(BYTES_MAX // FILE_BYTES + 2):
        clock.now_s += 1
        paths.append(written(kept, clock, FILE_BYTES))
        kept._written = FILE_BYTES
    kept.prune()
    assert kept_files(tmp_path) == paths[2:]


def test_a_disk_that_stands_still_does_not_fill_the_memory(tmp_path: Path) -> None:
    kept = Kept(tmp_path, "r1")
    for _ in range(40):
        kept.add([b"x" * (1 << 20)])
    kept.flush()
    assert sum(path.stat().st_size for path in kept_files(tmp_path)) == 16 << 20


async def test_a_segment_that_was_replayed_is_kept(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "r1")
    ending = Ending(attempt(), outcome(70))
    await journal.append([ending])
    (segment,) = await journal.close_segment()
    await journal.drop(segment)
    assert not segment.exists()
    assert [read_segment(path) for path in kept_files(tmp_path)] == [[ending]]


async def test_a_database_that_lost_its_last_commits_gets_them_back_once(
    postgres_url: str, tmp_path: Path
) -> None:
    async with opened(postgres_url, tmp_path) as (ledger, _, accounts):
        await accounts.ensure_defaults()
        await accounts.set_budget(TEAM, 1_000)
        lost, unsettled, voided, corrected = (attempt() for _ in range(4))
        for a in (lost, unsettled, voided, corrected):
            await reserve(ledger, a, 200)
        for a, o in (
            (lost, outcome(70)),
            (unsettled, outcome(60)),
            (voided, void()),
            (corrected, outcome(50)),
        ):
            assert await ledger.settle(a, o) is Settled.SETTLED
        assert await ledger.settle(corrected, outcome(40)) is Settled.CORRECTED

    async with opened(postgres_url, tmp_path) as (ledger, database, _):
        # As a standby that was behind: it knows neither holds nor entries of one, and of others not how they ended.
        await run(database, "DELETE FROM hold WHERE attempt_id = $1", lost.attempt_id)
        ids = [lost.attempt_id, unsettled.attempt_id, voided.attempt_id]
        await run(database, "DELETE FROM ledger WHERE attempt_id = ANY($1::text[])", ids)
        await run(database, "UPDATE hold SET state = 'held' WHERE attempt_id = ANY($1::text[])", ids[1:])
        await run(database, "UPDATE budget SET posted_amount = 40, held_amount = 400")

        assert await replay(database, tmp_path) == Replayed(1, posted=3, known=2)
        entries = await reports.entries(database)
        assert sorted((e["kind"], e["amount_nano_usd"]) for e in entries) == [
            ("correct", -10),
            ("post", 50),
            ("post", 60),
            ("post", 70),
            ("void", 0),
        ]
        (budget,) = await ledger.snapshot(TEAM)
        assert (budget.posted, budget.held) == (170, 0)
        assert await replay(database, tmp_path) == Replayed(1, known=5)
        assert await rows(database, "SELECT count(*) FROM hold WHERE state = 'held'") == [(0,)]


async def test_only_what_began_since_a_moment_is_posted_again(postgres_url: str, tmp_path: Path) -> None:
    async with opened(postgres_url, tmp_path) as (ledger, database, accounts):
        await accounts.ensure_defaults()
        now_ms = database.clock.now_ms()
        for age_ms in (3_600_000, 60_000):
            await ledger.settle(attempt(started_at_ms=now_ms - age_ms), outcome(5))
        await ledger._journal.write_kept()
        assert await replay(database, tmp_path, now_ms - 600_000) == Replayed(1, known=1)
