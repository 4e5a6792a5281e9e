"""Keeps what a process remembers of the store in step with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gateway.core.errors import Unavailable
from gateway.tasks import Tasks

RETRY_S = 1.0
_log = logging.getLogger("gateway")


class Following:
    """`wake` after any change in the store: whoever follows it takes over what changed."""

    def __init__(self, jobs: Tasks) -> None:
        self._jobs = jobs
        self._woken: list[asyncio.Event] = []

    def wake(self) -> None:
        for woken in self._woken:
            woken.set()

    def add(self, name: str, turn: Callable[[], Awaitable[None]], meanwhile: str) -> None:
        """Take a `turn` now and after each change. It raises `Unavailable` if the store is down, and is then asked for
        again; `meanwhile` is what holds until it can be had, for the log."""
        woken = asyncio.Event()
        self._woken.append(woken)
        self._jobs.watch(_run(woken, turn, meanwhile), name)


async def _run(woken: asyncio.Event, turn: Callable[[], Awaitable[None]], meanwhile: str) -> None:
    """For ever, until cancelled."""
    while True:
        try:
            await turn()
        except Unavailable as e:
            _log.warning("%s: %s", meanwhile, e)
            await asyncio.sleep(RETRY_S)
            continue
        await woken.wait()
        woken.clear()
