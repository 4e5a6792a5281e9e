"""Keeps the ledger's house: charges the holds of dead replicas, forgets what is old, makes partitions ahead."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from gateway.core.errors import Unavailable

EVERY_S = 60.0
#: How long after its lease a replica may still come back and settle by itself.
GRACE_S = 600.0
#: Ended holds answer a repeated reserve; a day is far longer than any request.
KEEP_HOLDS_S = 86_400.0
#: Why prompts were not read from a cache: as long as somebody compares one month with the next.
KEEP_MISSES_S = 62 * 86_400.0
_log = logging.getLogger(__name__)


class House(Protocol):
    """What the reaper needs of a ledger. All raise `Unavailable` when the store is down."""

    async def reap(self, grace_ms: int) -> int: ...

    async def forget_holds(self, older_than_ms: int) -> int: ...

    async def forget_misses(self, older_than_ms: int) -> int: ...

    async def ensure_partitions(self) -> None: ...


class Reaper:
    """Every replica may run one: what one of them is working on, the others skip."""

    def __init__(self, ledger: House, *, grace_s: float = GRACE_S, every_s: float = EVERY_S) -> None:
        self._ledger = ledger
        self._grace_ms = round(grace_s * 1_000)
        self._every_s = every_s

    async def run(self) -> None:
        """For ever, until cancelled. A store that is down is asked again at the next turn."""
        while True:
            try:
                await self.turn()
            except Unavailable as e:
                _log.warning("nothing reaped: %s", e)
            await asyncio.sleep(self._every_s)

    async def turn(self) -> int:
        """Once. Returns how many holds were charged at their bound."""
        charged = await self._ledger.reap(self._grace_ms)
        if charged:
            _log.error("charged %d holds of dead replicas at their bounds", charged)
        await self._ledger.forget_holds(round(KEEP_HOLDS_S * 1_000))
        await self._ledger.forget_misses(round(KEEP_MISSES_S * 1_000))
        await self._ledger.ensure_partitions()
        return charged
