"""The one place that makes tasks: it names them, keeps them from the garbage collector, and waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

#: How long tasks that were cancelled may take to end.
CANCELLED_S = 5.0


class Tasks:
    """Owner of background tasks (`ports.Spawn` is its `spawn`). `on_fault(name, exception)` hears of failures."""

    def __init__(self, on_fault: Callable[[str, BaseException], None]) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_fault = on_fault

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def watch(self, coro: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """The same for a task whose failure nobody awaits: it is reported to `on_fault`."""
        task = self.spawn(coro, name)
        task.add_done_callback(self._report)
        return task

    async def drain(self, timeout_s: float) -> int:
        """Wait for all tasks, those they start included; cancel what is left. Returns how many were cancelled.

        What the cancelled ones start on their way out (an attempt's last post) is waited for, not cancelled.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._tasks:
                    await asyncio.wait(tuple(self._tasks))
        except TimeoutError:
            pass
        left = tuple(self._tasks)
        for task in left:
            task.cancel()
        try:
            async with asyncio.timeout(CANCELLED_S):
                while self._tasks:
                    await asyncio.wait(tuple(self._tasks))
        except TimeoutError:
            pass
        return len(left)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)

    def _report(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._on_fault(task.get_name(), fault)
