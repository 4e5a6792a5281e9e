"""Twins of the shared stores for one process: rate limits and the prefix index, bounded and without IO."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

from gateway.core.limits import Bucket, take
from gateway.core.prefix import RETRY_WINDOW_S, End, same_task


class MemoryLimits:
    """Token buckets in a dict. A bucket idle for a minute is full again, so forgetting it changes nothing."""

    degraded = False

    def __init__(self, max_buckets: int = 100_000) -> None:
        self._buckets: OrderedDict[str, Bucket] = OrderedDict()  # least recently used first
        self._max_buckets = max_buckets
        self._places: dict[str, tuple[str, ...]] = {}  # request -> where it is inside
        self._inside: dict[str, int] = {}

    async def take(self, buckets: Sequence[tuple[str, int, int]], now_ms: int) -> tuple[str, float] | None:
        """Take (name, cost, capacity per minute) from all buckets, or from none.

        Returns None when taken, else the bucket with the longest wait and that wait in seconds: the request
        fits when that one does. The wait is infinite if the cost exceeds the capacity.
        """
        taken: dict[str, Bucket] = {}
        worst: tuple[str, float] | None = None
        for name, cost, capacity in buckets:
            before = taken.get(name) or self._buckets.get(name) or Bucket.full(capacity, now_ms)
            taken[name], wait_s = take(before, cost, capacity, now_ms)
            if wait_s > 0 and (worst is None or wait_s > worst[1]):
                worst = (name, wait_s)
        if worst is not None:
            return worst
        for name, bucket in taken.items():
            self._buckets[name] = bucket
            self._buckets.move_to_end(name)
        while len(self._buckets) > self._max_buckets:
            self._buckets.popitem(last=False)
        return None

    async def enter(self, names: Sequence[tuple[str, int]], request_id: str) -> str | None:
        """Let the request in everywhere (name, how many at once), or nowhere: then the first name that is full."""
        for name, most in names:
            if self.inside(name) >= most:
                return name
        if names:
            self._places[request_id] = tuple(name for name, _ in names)
        for name, _ in names:
            self._inside[name] = self.inside(name) + 1
        return None

    def leave(self, request_id: str) -> None:
        for name in self._places.pop(request_id, ()):
            self._inside[name] -= 1
            if not self._inside[name]:
                del self._inside[name]

    def inside(self, name: str) -> int:
        """How many requests are inside."""
        return self._inside.get(name, 0)


class MemoryPrefixIndex:
    """Which task a request continues, told by its prefix chain (`gateway.core.prefix`), for clients that name none.

    Only the last request of each thread is kept, and a request continues it only by extending the whole of it.
    So two runs with the same opening separate at their first difference: the one that goes on takes the shared
    end with it, and the other finds nothing and becomes a task of its own. Where two tasks stand at the same
    end, the one seen last goes on first: the other may have ended there, and if not, they have done the same so
    far, so either may.
    """

    def __init__(
        self, monotonic: Callable[[], float], *, max_entries: int = 100_000, ttl_s: float = 4 * 3600.0
    ) -> None:
        self._monotonic = monotonic
        self._max_entries = max_entries
        self._ttl_s = ttl_s
        #: key id -> hash at the end of a chain -> the tasks that stand there, seen last at the end.
        #: Both levels are in order of last use, so what is forgotten first is at the front.
        self._keys: OrderedDict[str, OrderedDict[bytes, tuple[End, ...]]] = OrderedDict()
        self._size = 0  # hashes, over all keys

    def __len__(self) -> int:
        return self._size

    async def find(self, key_id: str, chain: Sequence[bytes]) -> tuple[int, str] | None:
        return self.known(key_id, chain)

    def known(
        self, key_id: str, chain: Sequence[bytes], *, before_s: float = math.inf
    ) -> tuple[int, str] | None:
        """(segments of the known request that this one continues or repeats, its task id), or None.

        `before_s` (monotonic): only what was put before that.
        """
        ends = self._keys.get(key_id)
        if ends is None or not chain:
            return None
        now_s = self._monotonic()
        whole = self._latest(ends, chain[-1], now_s, before_s)
        if whole is not None and now_s - whole.seen_at_s <= RETRY_WINDOW_S:
            return len(chain), whole.task_id  # as `same_task` would say, whatever it extends
        length, shorter = len(chain), None
        # Almost none of them is an end, so they are sorted out at the speed of a set.
        known = ends.keys() & set(chain[:-1])
        for length in range(len(chain) - 1, 0, -1) if known else ():
            if chain[length - 1] in known:
                shorter = self._latest(ends, chain[length - 1], now_s, before_s)
                if shorter is not None:
                    break
        found = same_task(whole, shorter, now_s)
        if found is None:
            return None
        return (len(chain) if found is whole else length), found.task_id

    def put(self, key_id: str, chain: Sequence[bytes], task_id: str) -> None:
        """Remember a request of this task; the one that it extends is forgotten."""
        if not chain:
            return
        now_s = self._monotonic()
        ends = self._keys.setdefault(key_id, OrderedDict())
        self._keys.move_to_end(key_id)
        last = chain[-1]
        here = ends.get(last, ())
        if here and here[-1].task_id == task_id:
            # It repeats its last request, so it has left what is before it already; a task stands at an end once.
            ends[last] = (*here[:-1], End(task_id, here[-1].steps, now_s))
        else:
            steps = 1
            for link in ends.keys() & set(chain[:-1]):
                steps = max(steps, 1 + self._leave(ends, link, task_id))
            others = [end for end in here if end.task_id != task_id]
            if len(others) < len(here):
                steps = max([end.steps for end in here if end.task_id == task_id])
            if not here:
                self._size += 1
            ends[last] = (*others, End(task_id, steps, now_s))[-MAX_TASKS_AT_ONE_END:]
        ends.move_to_end(last)
        self._forget(now_s)

    def _latest(
        self, ends: OrderedDict[bytes, tuple[End, ...]], link: bytes, now_s: float, before_s: float
    ) -> End | None:
        here = ends.get(link)
        if here is None:  # as almost always
            return None
        for end in reversed(here):
            if end.seen_at_s < before_s:
                return end if now_s - end.seen_at_s < self._ttl_s else None
        return None

    def _leave(self, ends: OrderedDict[bytes, tuple[End, ...]], link: bytes, task_id: str) -> int:
        """Take the task away from an end that it has gone past; returns its steps there, 0 if it was not there."""
        staying = tuple(end for end in ends[link] if end.task_id != task_id)
        steps = max((end.steps for end in ends[link] if end.task_id == task_id), default=0)
        if staying:
            ends[link] = staying
        else:
            del ends[link]
            self._size -= 1
        return steps

    def _forget(self, now_s: float) -> None:
        """Drop what is too old or too much, least recently used key first. Costs what was put, no more."""
        while self._keys:
            key_id = next(iter(self._keys))
            ends = self._keys[key_id]
            while ends:
                link = next(iter(ends))
                here = ends[link]
                if self._size <= self._max_entries and now_s - here[-1].seen_at_s < self._ttl_s:
                    return
                del ends[link]
                self._size -= 1
            del self._keys[key_id]


#: More runs than this that stand at the very same point are not told apart.
MAX_TASKS_AT_ONE_END = 16
