"""The sums by team are those of the full hourly sums: after an upgrade, and while an older version still writes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from gateway.core.explanation import Cause, Explanation, Verdict
from gateway.storage.database import Database, open_database
from gateway.storage.rollups import mend
from gateway.storage.schema import migrate
from gateway.storage.tables import USAGE_SUMS
from tests.storage.worlds import NOON_MS, attempt, opened, outcome, reserve, rows, run

HOUR_MS = 3_600_000
_SUMS = ", ".join(f"CAST(sum({name}) AS BIGINT)" for name in USAGE_SUMS)
MISS = Explanation(Verdict.MISS, Cause.EXPIRED, lost_tokens=70, lost_nano_usd=9)


async def by_team(database: Database, table: str) -> list[tuple[Any, ...]]:
    groups = "hour_ms, tenant_id, team_id"
    return await rows(database, f"SELECT {groups}, {_SUMS} FROM {table} GROUP BY {groups} ORDER BY {groups}")


async def settle_some(url: str, folder: Path) -> None:
    async with opened(url, folder) as (ledger, _, _):
        for n in range(6):
            a = attempt(team_id=f"t{n % 2}", key_id=f"k{n % 3}", started_at_ms=NOON_MS + n // 4 * HOUR_MS)
            await reserve(ledger, a, 10_000)
            await ledger.settle(a, outcome(10**n, miss=MISS if n < 3 else None))


async def test_both_are_written_at_once(store: str, tmp_path: Path) -> None:
    await settle_some(store, tmp_path)
    database = open_database(store)
    assert await by_team(database, "team_hour") == await by_team(database, "usage_hour")
    assert len(await by_team(database, "team_hour")) == 4
    assert await mend(database, 0) == []
    await database.close()


async def test_an_upgrade_sums_up_what_is_there(store: str, tmp_path: Path) -> None:
    await settle_some(store, tmp_path)
    database = open_database(store)
    teams = await by_team(database, "team_hour")
    misses = await rows(database, "SELECT * FROM miss_hour ORDER BY team_id, key_id")
    assert sum(row[-1] for row in misses) == 3 * MISS.lost_nano_usd
    await migrate(store, "0006")
    await migrate(store)
    assert await by_team(database, "team_hour") == teams
    assert await rows(database, "SELECT * FROM miss_hour ORDER BY team_id, key_id") == misses
    await database.close()


async def test_what_an_older_version_has_left_out_is_mended(store: str, tmp_path: Path) -> None:
    await settle_some(store, tmp_path)
    database = open_database(store)
    hour_ms = NOON_MS // HOUR_MS * HOUR_MS
    values = ", ".join(f"'{name}'" for name in ("default", "t1", "k9", "m", "p", "d", "x", "c"))
    keys = "hour_ms, tenant_id, team_id, key_id, model, provider, deployment, tier, client"
    await run(
        database,
        f"INSERT INTO usage_hour ({keys}, attempts, cost_nano_usd) VALUES ({hour_ms}, {values}, 1, 500), "
        f"({hour_ms + 9 * HOUR_MS}, {values}, 1, 7)",
    )
    assert await mend(database, hour_ms + 10 * HOUR_MS) == []  # only the latest hours are compared
    found = await asyncio.gather(mend(database, 0), mend(database, 0))
    assert [hour_ms, hour_ms + 9 * HOUR_MS] in found
    assert await by_team(database, "team_hour") == await by_team(database, "usage_hour")
    assert await mend(database, 0) == []
    await database.close()


async def test_mending_loses_nothing_that_is_settled_meanwhile(postgres_url: str, tmp_path: Path) -> None:
    async with opened(postgres_url, tmp_path) as (ledger, database, _):

        async def settle(n: int) -> None:
            a = attempt(team_id=f"t{n % 3}")
            await reserve(ledger, a, 100)
            await ledger.settle(a, outcome(n))

        async def settling() -> None:
            for n in range(1, 40):
                await settle(n)

        async def mending() -> None:
            for _ in range(20):
                await run(database, "UPDATE team_hour SET attempts = attempts + 1")
                assert await mend(database, 0)

        await settle(0)  # else the first row may come between the two statements
        await asyncio.gather(settling(), mending())
        await ledger.idle()
        assert await by_team(database, "team_hour") == await by_team(database, "usage_hour")
