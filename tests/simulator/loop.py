"""An event loop whose time jumps to the next timer, and on which processes pause and die between two awaits.

Everything that runs does so in a context, and a context belongs to at most one `Owner`: a process on the simulated
machine. What a dead owner had in hand never runs again, no `finally` included; what a paused one has in hand waits,
while the clock goes on. Without an owner run the store's server and the provider.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import Any, Protocol, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: More turns than any schedule takes: something asks again and again without waiting.
TURNS_MAX = 400_000


class Disk(Protocol):
    """Where an owner's blocking calls go."""

    def submit(self, owner: Owner, work: Callable[[], Any], answer: asyncio.Future[Any]) -> None: ...


class Owner:
    """One process. Its threads are its `disk`: everything that blocks in it is a visit there."""

    def __init__(self, name: str, disk: Disk) -> None:
        self.name = name
        self.disk = disk
        self.paused = False
        self.dead = False
        self.parked: list[asyncio.Handle] = []
        self.tasks: list[asyncio.Task[Any]] = []

    def context(self) -> Context:
        context = copy_context()
        context.run(OWNER.set, self)
        return context


OWNER: ContextVar[Owner | None] = ContextVar("owner", default=None)


class Inline:
    """A disk that is done at once."""

    def submit(self, owner: Owner, work: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        answer.set_result(work())


class NothingHappens(Exception):
    """Everything waits, and no timer is set; or nothing ever waits."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs one coroutine to its end. `faults` are errors that nobody caught."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.faults: list[str] = []
        self._queue: deque[tuple[asyncio.Handle, Owner | None]] = deque()
        self._timers: list[tuple[float, int, asyncio.Handle, Owner | None]] = []
        self._numbers = itertools.count()
        self._turns = 0

    # --- processes -------------------------------------------------------------------------------------

    def pause(self, owner: Owner) -> None:
        owner.paused = True

    def resume(self, owner: Owner) -> None:
        owner.paused = False
        self._queue.extend((handle, owner) for handle in owner.parked)
        owner.parked.clear()

    def kill(self, owner: Owner) -> None:
        """It stops where it is. Closing its coroutines frees memory only: whatever they still start never runs."""
        owner.dead = True
        owner.parked.clear()
        for task in owner.tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
                coro = task.get_coro()
                if isinstance(coro, Coroutine):
                    coro.close()
        owner.tasks.clear()

    # --- what asyncio asks of a loop -------------------------------------------------------------------

    def time(self) -> float:
        return self.now_s

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        context = copy_context() if context is None else context
        handle = asyncio.Handle(callback, args, self, context)
        self._queue.append((handle, context.get(OWNER)))
        return handle

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        context = copy_context() if context is None else context
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle, context.get(OWNER)))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """A cancelled timer is left out when it is due."""

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        context = copy_context() if context is None else context
        title = None if name is None else str(name)
        task: asyncio.Task[T] = asyncio.Task(coro, loop=self, name=title, context=context)
        owner = context.get(OWNER)
        if owner is not None:
            if len(owner.tasks) > 64:
                owner.tasks = [t for t in owner.tasks if not t.done()]
            owner.tasks.append(task)
        return task

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        answer: asyncio.Future[T] = self.create_future()
        owner = OWNER.get()
        if owner is None:
            answer.set_result(func(*args))
        else:
            owner.disk.submit(owner, partial(func, *args), answer)
        return answer

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        task = context.get("task") or context.get("future")
        name = task.get_name() if isinstance(task, asyncio.Task) else task
        self.faults.append(f"{name}: {context.get('message')}: {context.get('exception')!r}")

    def run_until_complete(self, future: Any, context: Context | None = None) -> Any:
        task = self.create_task(future, context=context)
        asyncio._set_running_loop(self)
        try:
            while not task.done():
                self._turn()
        finally:
            asyncio._set_running_loop(None)
        return task.result()

    def _turn(self) -> None:
        self._turns += 1
        if self._turns > TURNS_MAX:
            raise NothingHappens("time does not go on: something asks again and again without waiting")
        queue, timers = self._queue, self._timers
        if not queue:
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            if not timers:
                raise NothingHappens("everything waits, and no timer is set")
            self.now_s = max(self.now_s, timers[0][0])
        while timers and timers[0][0] <= self.now_s:
            _, _, handle, owner = heapq.heappop(timers)
            queue.append((handle, owner))
        for _ in range(len(queue)):
            handle, owner = queue.popleft()
            if handle.cancelled():
                continue
            if owner is None or not (owner.dead or owner.paused):
                handle._run()
            elif not owner.dead:
                owner.parked.append(handle)
