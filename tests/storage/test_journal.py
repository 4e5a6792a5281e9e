"""Settlements that the store cannot take wait in a journal, and reach the ledger once."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from pathlib import Path

import pytest

from gateway.core.entry import Settled
from gateway.core.errors import LedgerUnavailable, Unavailable
from gateway.storage import reports
from gateway.storage.accounts import Accounts
from gateway.storage.database import open_database
from gateway.storage.journal import Journal, read_segment
from gateway.storage.ledger import SqlLedger
from gateway.storage.schema import migrate
from gateway.storage.settlement import Ending
from tests.storage.worlds import TEAM, attempt, granted, opened, outcome, reserve, void
from tests.support.servers import PostgresServer


def files(directory: Path) -> list[Path]:
    """What waits; what is only kept is in a directory of its own."""
    return sorted(path for path in directory.iterdir() if path.is_file())


def endings(n: int) -> list[Ending]:
    return [Ending(attempt(task_id=f"task_{i}"), outcome(i)) for i in range(n)]


async def test_what_was_appended_is_read_again_in_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "r1")
    assert not journal.pending
    written = endings(5)
    await asyncio.gather(journal.append(written[:2]), journal.append(written[2:]))

    (segment,) = await journal.close_segment()
    assert journal.pending
    assert read_segment(segment) == written
    await journal.drop(segment)
    assert (journal.pending, files(tmp_path)) == (False, [])


async def test_a_restarted_replica_finds_its_own_segments_and_no_others(tmp_path: Path) -> None:
    mine, other = endings(3), endings(1)
    for replica, records in (("r1", mine[:1]), ("r1", mine[1:]), ("r2", other)):
        journal = Journal(tmp_path, replica)
        await journal.append(records)
        await journal.close()

    segments = await Journal(tmp_path, "r1").close_segment()
    assert [e for s in segments for e in read_segment(s)] == mine


@pytest.mark.parametrize("cut", ["header", "payload", "flipped"])
async def test_a_torn_tail_loses_only_what_was_never_believed(tmp_path: Path, cut: str) -> None:
    journal = Journal(tmp_path, "r1")
    written = endings(3)
    await journal.append(written[:2])
    (segment,) = await journal.close_segment()
    whole = segment.stat().st_size
    await journal.append(written[2:])
    _, last = await journal.close_segment()
    frame = last.read_bytes()
    torn = {"header": frame[:5], "payload": frame[:-1], "flipped": frame[:-1] + b"\0"}[cut]
    with segment.open("ab") as file:
        file.write(torn)

    assert read_segment(segment) == written[:2]
    assert whole < segment.stat().st_size


async def test_a_failed_append_leaves_no_half_frame(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "r1")
    first, second = endings(2)
    await journal.append([first])
    os.close(journal._fd or 0)  # the disk is gone
    with pytest.raises(OSError, match="Bad file descriptor"):
        await journal.append([second])
    await journal.append([second])

    assert [read_segment(s) for s in await journal.close_segment()] == [[first], [second]]


async def test_an_outage_of_postgres_loses_no_entry_and_admits_nothing(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    url = own_postgres.url("postgres")
    await migrate(url)
    async with opened(url, tmp_path) as (ledger, database, accounts):
        await accounts.ensure_defaults()
        await accounts.set_budget(TEAM, 1_000)
        a, b = attempt(), attempt()
        await asyncio.gather(reserve(ledger, a, 400), reserve(ledger, b, 400))

        own_postgres.stop()
        settled = await asyncio.gather(ledger.settle(a, outcome(70)), ledger.settle(b, void()))
        assert set(settled) == {Settled.SETTLED}
        assert not ledger.available
        with pytest.raises(LedgerUnavailable):
            await asyncio.wait_for(reserve(ledger, attempt(), 10), timeout=4)
        with pytest.raises(Unavailable):
            await ledger.snapshot(TEAM)
        assert len(files(tmp_path)) == 1
        assert ledger.journal_records == 2

        own_postgres.start()
        await ledger.replay()
        assert files(tmp_path) == []
        assert ledger.journal_records == 0
        assert set(ledger.queues().values()) == {0.0}
        assert ledger.available
        assert await ledger.settle(a, outcome(70)) is Settled.ALREADY
        assert await reserve(ledger, attempt(), 930) == granted(930, 0, TEAM, step=3)
        assert sorted((e["kind"], e["amount_nano_usd"]) for e in await reports.entries(database)) == [
            ("post", 70),
            ("void", 0),
        ]
        assert await reports.drift(database) == []


async def test_the_next_run_posts_what_the_last_one_left(store: str, tmp_path: Path) -> None:
    a = attempt()
    async with opened(store, tmp_path / "journal") as (ledger, _, accounts):
        await accounts.ensure_defaults()
        await accounts.set_budget(TEAM, 1_000)
        await reserve(ledger, a, 400)
    journal = Journal(tmp_path / "journal", "r1")
    await journal.append([Ending(a, outcome(70)), Ending(a, outcome(70))])
    await journal.close()

    async with opened(store, tmp_path / "journal") as (ledger, database, _):
        assert [(e["kind"], e["amount_nano_usd"]) for e in await reports.entries(database)] == [("post", 70)]
        (budget,) = await ledger.snapshot(TEAM)
        assert (budget.posted, budget.held) == (70, 0)
        assert files(tmp_path / "journal") == []


async def test_a_locked_sqlite_file_fails_closed_and_settles_into_the_journal(
    sqlite_url: str, tmp_path: Path
) -> None:
    async with opened(sqlite_url, tmp_path / "journal") as (ledger, database, _):
        a = attempt()
        await reserve(ledger, a, 400)
        locker = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
        locker.execute("BEGIN IMMEDIATE")

        with pytest.raises(LedgerUnavailable):
            await asyncio.wait_for(reserve(ledger, attempt(), 10), timeout=4)
        assert await ledger.settle(a, outcome(70)) is Settled.SETTLED

        locker.rollback()
        locker.close()
        await ledger.replay()
        assert [e["amount_nano_usd"] for e in await reports.entries(database)] == [70]


async def test_a_settlement_that_the_store_refuses_for_itself_harms_no_other(
    store: str, tmp_path: Path
) -> None:
    async with opened(store, tmp_path / "journal") as (ledger, database, accounts):
        await accounts.ensure_defaults()
        good, bad = attempt(), attempt()
        await asyncio.gather(reserve(ledger, good, 10), reserve(ledger, bad, 10))

        answers = await asyncio.gather(
            ledger.settle(good, outcome(5)),
            ledger.settle(bad, outcome(5, latency_ms=2**63)),
            return_exceptions=True,
        )
        assert answers[0] is Settled.SETTLED
        assert isinstance(answers[1], Exception)
        assert [e["attempt_id"] for e in await reports.entries(database)] == [good.attempt_id]
        (rejected,) = files(tmp_path / "journal")
        assert read_segment(rejected) == [Ending(bad, outcome(5, latency_ms=2**63))]


async def test_an_unreachable_store_at_the_start_is_said(tmp_path: Path) -> None:
    database = open_database("postgresql://nobody@127.0.0.1:1/none")
    with pytest.raises(LedgerUnavailable, match="the ledger's database does not answer"):
        await SqlLedger.open(database, replica_id="r1", journal_dir=tmp_path)
    with pytest.raises(Unavailable):
        await Accounts(database, actor="test").list_teams()
    await database.close()
