"""The states of the tasks and keys that one process serves: bounded, in memory, without IO.

What is forgotten (the least recently used first) or lost with the process loses counts, never a guarantee.
"""

from __future__ import annotations

from collections import OrderedDict

from msgspec.structs import replace

from gateway.core.breakers.key import KeyState, observe_key
from gateway.core.breakers.policy import BreakerPolicy, Verdict
from gateway.core.breakers.task import Asked, Child, Ended, Signs, TaskState, forgive, observe, signs
from gateway.core.tail import Tail

TASKS_MAX = 20_000
KEYS_MAX = 10_000


class _Watched:
    __slots__ = ("depth", "running", "state")

    def __init__(self) -> None:
        self.state = TaskState()
        self.running = 0  # attempts under way
        self.depth = 0


class Watch:
    """What `observe` says about each request of each task. All times are milliseconds since 1970 UTC."""

    def __init__(self, *, tasks_max: int = TASKS_MAX, keys_max: int = KEYS_MAX) -> None:
        self._tasks: OrderedDict[str, _Watched] = OrderedDict()
        self._keys: OrderedDict[str, KeyState] = OrderedDict()
        self._tasks_max = tasks_max
        self._keys_max = keys_max

    def asked(
        self,
        task_id: str,
        tail: Tail,
        policy: BreakerPolicy,
        now_ms: int,
        *,
        parent_task_id: str | None = None,
        began_ms: int | None = None,
    ) -> tuple[Verdict, ...]:
        """A request of a task, before anything is spent on it: also what its parent has to say about it."""
        verdicts: tuple[Verdict, ...] = ()
        depth = 0
        if parent_task_id is not None:
            parent = self._watched(parent_task_id)
            parent.state, verdicts = observe(parent.state, Child(task_id), policy, now_ms)
            depth = parent.depth + 1
        watched = self._watched(task_id)
        watched.depth = depth
        asked = Asked(tail, began_ms, watched.running, depth)
        watched.state, own = observe(watched.state, asked, policy, now_ms)
        return verdicts + own if verdicts else own

    def began(self, task_id: str, task_began_ms: int | None = None) -> None:
        """An attempt goes out; `ended` is due for it, once. `task_began_ms`: as the ledger knows it, and this process
        may not, if it was started later."""
        watched = self._watched(task_id)
        watched.running += 1
        known = watched.state.began_ms
        if task_began_ms is not None and (known is None or task_began_ms < known):
            watched.state = replace(watched.state, began_ms=task_began_ms)

    def ended(self, task_id: str, ended: Ended, policy: BreakerPolicy, now_ms: int) -> tuple[Verdict, ...]:
        """An attempt has ended. What is said is news to alert about; there is nothing to refuse."""
        watched = self._watched(task_id)
        watched.running = max(0, watched.running - 1)
        watched.state, verdicts = observe(watched.state, ended, policy, now_ms)
        return verdicts

    def key_asked(
        self, key_id: str, body: bytes, retry_count: int, policy: BreakerPolicy, now_ms: int
    ) -> tuple[Verdict, ...]:
        """A request of a key; `body` and `retry_count` as `observe_key` takes them."""
        state = self._keys.get(key_id, KeyState())
        self._keys[key_id], verdicts = observe_key(state, body, retry_count, policy.retries, now_ms)
        self._keys.move_to_end(key_id)
        while len(self._keys) > self._keys_max:
            self._keys.popitem(last=False)
        return verdicts

    def forgive(self, task_id: str) -> None:
        """Let a stopped task go on (`task.forgive`); nothing happens for one that is not known."""
        watched = self._tasks.get(task_id)
        if watched is not None:
            watched.state = forgive(watched.state)

    def state(self, task_id: str) -> TaskState | None:
        """What is known about a task, for people to look at."""
        watched = self._tasks.get(task_id)
        return None if watched is None else watched.state

    def signs(self, task_id: str, policy: BreakerPolicy) -> Signs:
        """What rules may ask about a task; (0, 0) for one that is not known."""
        watched = self._tasks.get(task_id)
        return Signs(0, 0) if watched is None else signs(watched.state, policy)

    def running(self, task_id: str) -> int:
        """Attempts of a task that are under way."""
        watched = self._tasks.get(task_id)
        return 0 if watched is None else watched.running

    def _watched(self, task_id: str) -> _Watched:
        watched = self._tasks.get(task_id)
        if watched is None:
            watched = self._tasks[task_id] = _Watched()
            while len(self._tasks) > self._tasks_max:
                self._forget_one()
        else:
            self._tasks.move_to_end(task_id)
        return watched

    def _forget_one(self) -> None:
        """The least recently used; one with attempts under way only if all the older ones have some, too."""
        for task_id, watched in self._tasks.items():
            if not watched.running:
                del self._tasks[task_id]
                return
        self._tasks.popitem(last=False)
