"""Keeps bounded what nobody else takes away: alerts that were delivered, given up or have no receiver, and old episodes
of breakers."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from gateway.core.errors import Unavailable

EVERY_S = 3_600.0
DAY_MS = 86_400_000
#: Delivered and given up alerts stay for people to look at.
KEEP_ENDED_MS = 90 * DAY_MS
#: Alerts that nobody delivers, because no webhook is configured: should one be soon, it gets the latest.
KEEP_WAITING_MS = 3 * DAY_MS
KEEP_EPISODES_MS = 90 * DAY_MS
#: Whatever their age. A row is about 1 kB.
ALERTS_MAX = 200_000
_log = logging.getLogger(__name__)


class Alerts(Protocol):
    """What the sweeper needs of an outbox. Each call deletes a part and says how many; all raise `Unavailable`."""

    async def forget(self, older_than_ms: int) -> int: ...

    async def forget_waiting(self, older_than_ms: int) -> int: ...

    async def trim(self, most: int) -> int: ...


class Episodes(Protocol):
    async def forget(self, older_than_ms: int) -> int: ...


class Sweeper:
    """Every replica may run one. `delivered`: somebody delivers alerts, so those that wait are left to them."""

    def __init__(self, alerts: Alerts, episodes: Episodes, *, delivered: bool) -> None:
        self._alerts = alerts
        self._episodes = episodes
        self._delivered = delivered

    async def run(self) -> None:
        """For ever, until cancelled. A store that is down is asked again at the next turn."""
        while True:
            try:
                await self.turn()
            except Unavailable as e:
                _log.warning("nothing swept: %s", e)
            await asyncio.sleep(EVERY_S)

    async def turn(self, *, alerts_max: int = ALERTS_MAX) -> int:
        """Once. Returns how many rows were deleted."""
        swept = 0
        while n := await self._alerts.forget(KEEP_ENDED_MS):
            swept += n
        while not self._delivered and (n := await self._alerts.forget_waiting(KEEP_WAITING_MS)):
            swept += n
        while n := await self._alerts.trim(alerts_max):
            _log.error("the %d oldest alerts of more than %d were deleted unread", n, alerts_max)
            swept += n
        while n := await self._episodes.forget(KEEP_EPISODES_MS):
            swept += n
        return swept
