"""Mends the sums by team where they are not those of the full hourly sums.

Both are written in one transaction, but not by the version before `team_hour` was there, which may still serve while
an upgrade is rolled out. What it leaves out is found by comparing, and written anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from gateway.core.errors import Unavailable
from gateway.storage.database import Database
from gateway.storage.tables import TEAM_KEYS, USAGE_SUMS
from gateway.storage.transact import Fetch, Script, Sql, Tx

EVERY_S = 3_600.0
#: Longer than a rollout; each hour is compared as often as a sweep comes by in this time.
COMPARED_MS = 48 * 3_600_000
_log = logging.getLogger(__name__)

_BY_HOUR = (
    "(SELECT hour_ms, sum(attempts) AS n, sum(cost_nano_usd) AS cost, sum(list_cost_nano_usd) AS list_cost "
    "FROM {table} WHERE hour_ms >= $1 GROUP BY hour_ms)"
)
_DIFFERENT = Sql(
    f"SELECT u.hour_ms FROM {_BY_HOUR.format(table='usage_hour')} u "  # noqa: S608
    f"LEFT JOIN {_BY_HOUR.format(table='team_hour')} t ON t.hour_ms = u.hour_ms "
    "WHERE t.hour_ms IS NULL OR t.n <> u.n OR t.cost <> u.cost OR t.list_cost <> u.list_cost ORDER BY 1"
)
#: Whoever has added to usage_hour but not yet to team_hour waits here, and adds to what is written.
_ALONE = Script(["LOCK TABLE team_hour IN SHARE ROW EXCLUSIVE MODE"])
_KEYS = ", ".join(TEAM_KEYS)
_ANEW = Sql(
    f"INSERT INTO team_hour ({_KEYS}, {', '.join(USAGE_SUMS)}) "  # noqa: S608
    f"SELECT {_KEYS}, {', '.join(f'CAST(sum({name}) AS BIGINT)' for name in USAGE_SUMS)} FROM usage_hour "
    f"WHERE hour_ms = $1 GROUP BY {_KEYS} "
    f"ON CONFLICT ({_KEYS}) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in USAGE_SUMS)}"
)


async def keep_mended(database: Database, now_ms: Callable[[], int]) -> None:
    """For ever, until cancelled."""
    while True:
        try:
            await mend(database, now_ms() - COMPARED_MS)
        except Unavailable as e:
            _log.warning("the sums by team were not compared: %s", e)
        await asyncio.sleep(EVERY_S)


async def mend(database: Database, since_ms: int) -> list[int]:
    """Compare the hours from `since_ms` on; returns those that were written anew. Raises `Unavailable`."""

    def different() -> Tx[list[int]]:
        return [row[0] for row in (yield Fetch(_DIFFERENT, (since_ms,)))]

    def anew() -> Tx[list[int]]:
        if database.postgres_dsn is not None:
            yield _ALONE
        hours = yield from different()
        for hour_ms in hours:
            yield Fetch(_ANEW, (hour_ms,))
        return hours

    if not await database.read(different):
        return []
    mended = await database.write(anew)
    _log.warning(
        "the sums by team of %d hours were written anew: an older version has served meanwhile", len(mended)
    )
    return mended
