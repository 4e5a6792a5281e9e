"""Two reads in one visit to the store: what is sent back, and in which order their rows are locked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import asyncpg

from gateway.storage.transact import FetchPair, Pair, Row, Sql, Tx
from tests.storage.worlds import TEAM, opened, rows

REPLICA = Sql("SELECT epoch, replica_id FROM replica WHERE replica_id = $1 FOR SHARE")
BUDGETS = Sql(
    "SELECT scope, limit_amount FROM budget WHERE scope = ANY($1::text[]) AND limit_amount > $2 "
    "ORDER BY scope FOR UPDATE"
)
BOTH = Pair(REPLICA, BUDGETS, columns=2)


def both(replica_id: str, scopes: list[str], above: int) -> Tx[list[tuple[object, ...]]]:
    found: list[Row] = [*(yield FetchPair(BOTH, (replica_id,), (scopes, above)))]
    return [tuple(row) for row in found]


async def test_the_row_of_the_first_goes_before_those_of_the_second(store: str, tmp_path: Path) -> None:
    async with opened(store, tmp_path, replica_id="one") as (_, database, accounts):
        await accounts.ensure_defaults()
        await accounts.set_budget(TEAM, 1_000)
        await accounts.set_budget("tenant:default", 2_000)
        scopes = [TEAM, "tenant:default"]

        assert await database.write(lambda: both("one", scopes, 0)) == [
            (1, "one"),
            (TEAM, 1_000),
            ("tenant:default", 2_000),
        ]
        assert await database.write(lambda: both("one", scopes, 5_000)) == [(1, "one")]
        assert await database.write(lambda: both("nobody", scopes, 0)) == []


async def test_nothing_of_the_second_is_locked_before_the_first_has_its_lock(
    postgres_url: str, tmp_path: Path
) -> None:
    async with opened(postgres_url, tmp_path, replica_id="one") as (_, database, accounts):
        await accounts.ensure_defaults()
        await accounts.set_budget(TEAM, 1_000)
        other = await asyncpg.connect(postgres_url)
        await other.execute("BEGIN; SELECT 1 FROM replica FOR UPDATE")
        reading = asyncio.create_task(database.write(lambda: both("one", [TEAM], 0)))
        async with asyncio.timeout(10):
            while not await rows(database, "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"):
                await asyncio.sleep(0.01)

        # What it waits for has raised the limit meanwhile: it reads what it then locks.
        await other.execute("UPDATE budget SET limit_amount = 3000 WHERE scope = $1", TEAM, timeout=5)
        await other.execute("COMMIT")
        await other.close()
        assert await reading == [(1, "one"), (TEAM, 3_000)]
