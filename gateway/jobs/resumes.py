"""Lets tasks go on here that somebody let go on anywhere: this process forgets what its breakers have seen of them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol


class Resumed(Protocol):
    async def resumed(self, since: int) -> tuple[int, Collection[str]]:
        """The revision now, and the tasks let go on after the revision `since`, none if that is negative."""
        ...

    async def go_on(self, task_id: str, reason: str) -> bool: ...


class Resumes:
    """`turn` after any change in the store; `forgive` is `Watch.forgive`, `on_change` hears of tasks that go on here."""

    def __init__(
        self, store: Resumed, forgive: Callable[[str], None], on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._store = store
        self._forgive = forgive
        self._on_change = on_change
        self._revision = -1

    async def go_on(self, task_id: str, reason: str) -> bool:
        """Let a task go on that a breaker has paused. False if it is not paused by one. Raises `Unavailable`."""
        resumed = await self._store.go_on(task_id, reason)
        if resumed:
            self._forgive(task_id)
            self._on_change()
        return resumed

    async def turn(self) -> None:
        """Forgive what was let go on since the last turn; nothing at the first, when nothing was seen yet."""
        self._revision, task_ids = await self._store.resumed(self._revision)
        for task_id in task_ids:
            self._forgive(task_id)
