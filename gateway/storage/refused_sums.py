"""What budgets refused, summed up by hour: the holds that were asked for, and how much they would have reserved.

Most refusals cost no SQL (`storage/refusals.py`, `pipeline/repeats.py`), and counting them must not either: they gather
in memory and are written every few seconds and at the end. So these sums are exact but for a process that is killed,
which takes its last `EVERY_S` along, and for a COMMIT whose answer is lost, after which the same may be counted twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from gateway.core.entry import Attempt, Refused
from gateway.core.errors import Unavailable
from gateway.storage.database import Database
from gateway.storage.entry_rows import add_to, storable
from gateway.storage.tables import REFUSED_KEYS, REFUSED_SUMS
from gateway.storage.transact import Each, Tx

EVERY_S = 5.0
#: Different rows until they are written; what is refused beyond is counted by its team and scope alone.
ROWS_MAX = 10_000
_HOUR_MS = 3_600_000
_ADD = add_to("refused_hour", REFUSED_KEYS, REFUSED_SUMS)
_log = logging.getLogger(__name__)

_Key = tuple[Any, ...]


class RefusedSums:
    """One per process. `add` as refusals happen; `run` for ever; `flush` at the end."""

    def __init__(self, database: Database, now_ms: Callable[[], int]) -> None:
        self._database = database
        self._now_ms = now_ms
        self._sums: dict[_Key, list[int]] = {}

    def add(self, attempt: Attempt, refused: Refused, nano_usd: int | None) -> None:
        """A hold of so much (None: of no known amount) was refused by a budget, or by the state of a task."""
        a = storable(attempt)
        hour_ms = self._now_ms() // _HOUR_MS * _HOUR_MS
        kind = refused.scope.partition(":")[0]
        key: _Key = (
            *(hour_ms, a.tenant_id, a.team_id, a.key_id),
            *(a.model, a.provider, a.deployment, a.tier, a.client, kind),
        )
        if key not in self._sums and len(self._sums) >= ROWS_MAX:
            key = (hour_ms, a.tenant_id, a.team_id, *[""] * 6, kind)
        self._count(key, (1, int(nano_usd is None), nano_usd or 0))

    async def flush(self) -> None:
        """Write what has gathered. A store that is down leaves it for the next time."""
        sums, self._sums = self._sums, {}
        if not sums:
            return
        try:
            await self._database.write(lambda: _write(sums))
        except Unavailable as e:
            _log.warning("refused amounts wait for the database: %s", e)
            for key, counts in sums.items():
                self._count(key, counts)

    async def run(self) -> None:
        """For ever, until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.flush()

    def _count(self, key: _Key, counts: list[int] | tuple[int, int, int]) -> None:
        known = self._sums.setdefault(key, [0, 0, 0])
        for i, n in enumerate(counts):
            known[i] += n


def _write(sums: Mapping[_Key, list[int]]) -> Tx[None]:
    yield Each(_ADD, [(*key, *sums[key]) for key in sorted(sums)])
