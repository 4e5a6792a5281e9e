"""Delivers to the webhooks that people added: one `Webhooks` for each, started, stopped and changed as they are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Protocol

from gateway.core.errors import Unavailable
from gateway.jobs.webhooks import Outbox, Webhooks

EVERY_S = 1.0
RETRY_S = 1.0
SPREAD = 200
_log = logging.getLogger(__name__)


class Receiver(Hashable, Protocol):
    """A webhook; another value is another one, also with the same id."""

    @property
    def webhook_id(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def secret_version(self) -> int: ...


class Store(Protocol):
    """All raise `Unavailable`."""

    async def receivers(self) -> Sequence[Receiver]: ...

    async def spread(self, most: int) -> int:
        """Give messages to all that want them; how many messages there were."""
        ...

    def outbox(self, webhook_id: str) -> Outbox: ...


class Receivers:
    """`make` builds the deliverer of one, or raises ValueError for a URL that may not be used (any more). Every replica may
    run one of these: what one of them is delivering, the others skip. `wake` after any change in the store.
    """

    def __init__(
        self, store: Store, make: Callable[[Receiver, Outbox], Webhooks], every_s: float = EVERY_S
    ) -> None:
        self._store = store
        self._make = make
        self._every_s = every_s
        self._woken = asyncio.Event()
        self._woken.set()
        self._running: dict[Receiver, asyncio.Task[None]] = {}

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        """For ever, until cancelled; with it end all that it started."""
        try:
            while True:
                try:
                    await self._turn()
                except Unavailable as e:
                    _log.warning("webhooks that were added are not looked after: %s", e)
                    self._woken.set()
                    await asyncio.sleep(RETRY_S)
                    continue
                with suppress(TimeoutError):
                    # Without any there is nothing to spread.
                    async with asyncio.timeout(self._every_s if self._running else None):
                        await self._woken.wait()
        finally:
            await self._stop(list(self._running))

    async def _turn(self) -> None:
        if self._woken.is_set():
            self._woken.clear()
            wanted = set(await self._store.receivers())
            await self._stop([it for it in self._running if it not in wanted])
            for it in wanted - self._running.keys():
                self._start(it)
        while self._running and await self._store.spread(SPREAD) == SPREAD:
            pass

    def _start(self, it: Receiver) -> None:
        try:
            webhooks = self._make(it, self._store.outbox(it.webhook_id))
        except ValueError as e:
            _log.error("webhook %s gets nothing: %s", it.webhook_id, e)
            return
        self._running[it] = asyncio.create_task(webhooks.run(), name=f"webhook {it.webhook_id}")

    async def _stop(self, ended: Sequence[Receiver]) -> None:
        tasks = [self._running.pop(it) for it in ended]
        for task in tasks:
            task.cancel()
        for failed in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(failed, Exception):
                _log.error("a webhook's deliveries ended", exc_info=failed)
