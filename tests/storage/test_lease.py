"""Holds of dead replicas are charged at their bounds, once, and by nobody too early."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.core.entry import Kind, Settled
from gateway.core.errors import LedgerUnavailable
from gateway.jobs.reaper import Reaper
from gateway.storage import reports
from gateway.storage.database import Database
from tests.storage.worlds import TEAM, attempt, granted, opened, outcome, reserve, rows, run, void


async def entries(database: Database) -> list[tuple[str, int, str]]:
    return [(e["kind"], e["amount_nano_usd"], e["error"]) for e in await reports.entries(database)]


async def test_a_dead_replicas_hold_is_charged_at_the_bound_and_corrected_by_later_proof(
    postgres_url: str, tmp_path: Path
) -> None:
    async with (
        opened(postgres_url, tmp_path, replica_id="dies") as (dying, database, accounts),
        opened(postgres_url, tmp_path, replica_id="lives") as (living, _, _),
    ):
        await accounts.ensure_defaults()
        await accounts.set_budget(TEAM, 1_000)
        a, b = attempt(), attempt(task_id="task_b")
        await reserve(dying, a, 400)
        await reserve(living, b, 100)
        reaper = Reaper(living, grace_s=600)

        # The lease ended nine minutes ago: its owner may still come back and settle by itself.
        await run(database, "UPDATE replica SET expires_at_ms = now_ms() - 540000 WHERE replica_id = 'dies'")
        assert await reaper.turn() == 0
        await run(database, "UPDATE replica SET expires_at_ms = now_ms() - 600001 WHERE replica_id = 'dies'")
        assert sorted(await asyncio.gather(reaper.turn(), Reaper(dying).turn())) == [0, 1]

        assert await entries(database) == [("charge_unknown", 400, "replica_lost")]
        (entry,) = await reports.entries(database)
        assert (entry["quality"], entry["model"], entry["task_id"], entry["hold_nano_usd"]) == (
            "unknown",
            "sonnet",
            "task_a",
            400,
        )
        assert await reserve(living, attempt(), 501) != granted(501, 0, TEAM)  # the charge counts
        assert await dying.settle(a, outcome(70)) is Settled.CORRECTED
        assert await entries(database) == [("charge_unknown", 400, "replica_lost"), ("correct", -330, "")]
        assert await reports.drift(database) == []


async def test_a_restart_does_not_charge_at_once_what_the_last_run_held(
    postgres_url: str, tmp_path: Path
) -> None:
    async with opened(postgres_url, tmp_path) as (ledger, _, _):
        await reserve(ledger, attempt(), 400)
    async with opened(postgres_url, tmp_path) as (ledger, database, _):
        assert await ledger.reap(600_000) == 0
        await run(database, "UPDATE hold SET orphaned_at_ms = orphaned_at_ms - 600000")
        assert await ledger.reap(600_000) == 1
        assert await entries(database) == [("charge_unknown", 400, "replica_lost")]


async def test_a_replica_that_starts_again_and_again_does_not_put_off_what_its_first_run_held(
    postgres_url: str, tmp_path: Path
) -> None:
    async with opened(postgres_url, tmp_path) as (ledger, _, _):
        await reserve(ledger, attempt(), 400)
    async with opened(postgres_url, tmp_path) as (ledger, database, _):
        await reserve(ledger, attempt(), 30)
        await run(database, "UPDATE hold SET orphaned_at_ms = orphaned_at_ms - 600000")
    async with opened(postgres_url, tmp_path):
        pass
    async with opened(postgres_url, tmp_path) as (ledger, database, _):
        assert await ledger.reap(600_000) == 1
        assert await entries(database) == [("charge_unknown", 400, "replica_lost")], (
            "and not the second run's"
        )


async def test_on_sqlite_the_next_start_charges_all_holds_of_former_runs(
    sqlite_url: str, tmp_path: Path
) -> None:
    a = attempt()
    async with opened(sqlite_url, tmp_path, replica_id="yesterday") as (ledger, _, _):
        await reserve(ledger, a, 400)
        await reserve(ledger, attempt(), 30)
        await ledger.settle(a, void())
    async with opened(sqlite_url, tmp_path, replica_id="today") as (ledger, database, _):
        assert sorted(await entries(database)) == [
            ("charge_unknown", 30, "replica_lost"),
            ("void", 0, "upstream_unreachable"),
        ]
        await reserve(ledger, attempt(), 5)
        assert await ledger.reap(0) == 0  # its own, which is alive


async def test_a_hold_without_an_entry_that_is_there_already_is_released_not_charged(
    store: str, tmp_path: Path
) -> None:
    async with opened(store, tmp_path) as (ledger, database, accounts):
        await accounts.ensure_defaults()
        await accounts.set_budget(TEAM, 1_000)
        a = attempt()
        await ledger.settle(a, outcome(70))
        await reserve(ledger, a, 400)
        await run(database, "UPDATE replica SET expires_at_ms = now_ms() - 10")

        assert await ledger.reap(0) == 1
        assert await entries(database) == [("post", 70, "")]
        (budget,) = await ledger.snapshot(TEAM)
        assert (budget.posted, budget.held) == (70, 0)


async def test_an_expired_lease_is_renewed_before_anything_is_admitted(store: str, tmp_path: Path) -> None:
    async with opened(store, tmp_path) as (ledger, database, _):
        await run(database, "UPDATE replica SET expires_at_ms = 1")
        assert await reserve(ledger, attempt(), 5) == granted(5, step=1)
        assert await rows(database, "SELECT expires_at_ms > now_ms() FROM replica") in ([(True,)], [(1,)])


async def test_a_replica_whose_id_another_process_took_may_only_settle(store: str, tmp_path: Path) -> None:
    async with opened(store, tmp_path) as (ledger, database, _):
        a = attempt()
        await reserve(ledger, a, 5)
        await run(database, "UPDATE replica SET epoch = epoch + 1")

        with pytest.raises(LedgerUnavailable):
            await reserve(ledger, attempt(), 5)
        assert await ledger.settle(a, outcome(5)) is Settled.SETTLED


async def test_ended_holds_are_forgotten_after_a_day(store: str, tmp_path: Path) -> None:
    async with opened(store, tmp_path) as (ledger, database, _):
        now_ms = database.clock.now_ms()
        old, held, new = (attempt(started_at_ms=now_ms - age) for age in (86_500_000, 86_500_000, 1_000))
        await asyncio.gather(*(reserve(ledger, a, 5) for a in (old, held, new)))
        await asyncio.gather(*(ledger.settle(a, outcome(5)) for a in (old, new)))

        assert await ledger.forget_holds(86_400_000) == 1
        kept = sorted(await rows(database, "SELECT attempt_id FROM hold"))
        assert kept == sorted([(held.attempt_id,), (new.attempt_id,)])
        assert await ledger.settle(old, outcome(5, Kind.POST)) is Settled.ALREADY
