"""Folds calls that come at the same time into one flight: a batch is whatever queued during the last one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

BATCH_MAX = 256

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Batcher(Generic[Item, Answer]):
    """`fly` answers a batch, item by item, with a value or an exception.

    `unclaimed` is told of answers whose caller has gone while they flew. Owns its flights: `drain` waits for all.
    `linger_s`: a flight waits that long for company before it takes off, unless somebody drains.
    """

    def __init__(
        self,
        fly: Callable[[list[Item]], Awaitable[list[Answer | Exception]]],
        flights: int,
        name: str,
        unclaimed: Callable[[Item, Answer], None] = lambda _item, _answer: None,
        batch_max: int = BATCH_MAX,
        linger_s: float = 0.0,
    ) -> None:
        self._fly = fly
        self._flights_max = flights
        self._name = name
        self._unclaimed = unclaimed
        self._batch_max = batch_max
        self._linger_s = linger_s
        self._hurry = asyncio.Event()
        self._queue: deque[tuple[Item, asyncio.Future[Answer] | None]] = deque()
        self._flights: set[asyncio.Task[None]] = set()
        #: flights that still look at the queue; a task stays in `_flights` for a moment longer
        self._taking = 0

    @property
    def waiting(self) -> int:
        """Items that are in no flight yet."""
        return len(self._queue)

    @property
    def flying(self) -> int:
        return len(self._flights)

    def submit(self, item: Item) -> asyncio.Future[Answer]:
        """A future of the answer. An item whose future is cancelled before its flight starts is left out."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._enqueue(item, future)
        return future

    def hand_over(self, item: Item) -> None:
        """The same for who does not wait: the answer is dropped, and an error is for `fly` to tell of."""
        self._enqueue(item, None)

    def _enqueue(self, item: Item, future: asyncio.Future[Answer] | None) -> None:
        self._queue.append((item, future))
        if self._taking < self._flights_max:
            self._taking += 1
            task = asyncio.create_task(self._fly_all(), name=self._name)
            self._flights.add(task)
            task.add_done_callback(self._flights.discard)

    def fail_waiting(self, error: Callable[[], Exception]) -> None:
        """Answer everything that waits for a flight: the store is down, and waiting does not help."""
        while self._queue:
            _, future = self._queue.popleft()
            if future is not None and not future.done():
                future.set_exception(error())

    async def drain(self, within_s: float | None = None) -> None:
        """Returns when nothing is queued or flying, or when the time is over."""
        self._hurry.set()
        try:
            async with asyncio.timeout(within_s):
                while self._flights:
                    await asyncio.wait(set(self._flights))
        except TimeoutError:
            pass
        finally:
            self._hurry.clear()

    async def _fly_all(self) -> None:
        try:
            while self._queue:
                if self._linger_s and not self._hurry.is_set():
                    await self._linger()
                batch = self._take()
                if batch:
                    self._deliver(batch, await self._answers([item for item, _ in batch]))
        finally:
            self._taking -= 1

    async def _linger(self) -> None:
        try:
            async with asyncio.timeout(self._linger_s):
                await self._hurry.wait()
        except TimeoutError:
            pass

    def _take(self) -> list[tuple[Item, asyncio.Future[Answer] | None]]:
        queue = self._queue
        if len(queue) <= self._batch_max:
            batch = list(queue)
            queue.clear()
        else:
            batch = [queue.popleft() for _ in range(self._batch_max)]
        return [(item, future) for item, future in batch if future is None or not future.done()]

    async def _answers(self, items: list[Item]) -> list[Answer | Exception]:
        try:
            return await self._fly(items)
        except Exception as e:  # a mistake in `fly` must not leave its callers waiting for ever
            return [e] * len(items)

    def _deliver(
        self, batch: list[tuple[Item, asyncio.Future[Answer] | None]], answers: list[Answer | Exception]
    ) -> None:
        for (item, future), answer in zip(batch, answers, strict=True):
            if future is None:
                continue
            if isinstance(answer, Exception):
                if not future.done():
                    future.set_exception(answer)
            elif future.done():
                self._unclaimed(item, answer)
            else:
                future.set_result(answer)
