"""How long runs are and what rules want in them, counted by all replicas together.

`tollhouse:{runs:<kind>}` is a hash of counts: those of `core.switching.Lengths` and `Habits`, and of `core.policies.Bills`. A kind
is a key, its client and what the call is for. Every second each process adds what it has counted itself and takes over the sums; nobody waits for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from gateway.core.runs import KINDS_MAX, Runs
from gateway.storage.redis import Arg, OnRedis, RedisLine, Script

TIMEOUT_S = 0.1
EVERY_S = 1.0
#: What nobody has asked for so long is learned anew.
TTL_S = 7 * 86_400
FIELDS_MAX = 256
#: Turns after which an answer will not come any more.
LOST_AFTER = 3
SUMS_MAX = 2 * KINDS_MAX

#: ARGV: seconds to live, most fields, then each name and what is to be added to it. Answers with all names and sums.
_ADD = Script(
    """
for i = 3, #ARGV, 2 do
  if redis.call('HLEN', KEYS[1]) < tonumber(ARGV[2]) or redis.call('HEXISTS', KEYS[1], ARGV[i]) == 1 then
    redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1])
  end
end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return redis.call('HGETALL', KEYS[1])
"""
)

Counts = dict[str, int]


class RedisRuns(OnRedis):
    """Keeps the counts of `runs` in step with other replicas. `start` before use, `run` for ever, `close` after.

    Without Redis each process goes on counting by itself from what all had counted. These counts weigh whether a warm cache is
    left (`core.switching`): no hold, no entry and no refusal depends on them.
    """

    def __init__(
        self, url: str, runs: Runs, *, every_s: float = EVERY_S, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._runs = runs
        self._every_s = every_s
        self._line = RedisLine(
            url, (_ADD,), timeout_s=timeout_s, without="each process learns by itself how long runs are"
        )
        self._sums: dict[str, Counts] = {}  # as Redis said last
        self._own: dict[str, Counts] = {}  # of that, what this process has told
        self._turn = 0
        self._asked: dict[str, int] = {}  # kinds whose answer is on the way, and since which turn

    async def idle(self) -> None:
        """Returns when the sums of what was told so far are taken over."""
        await self._line.idle()
        await self._line.idle()  # an answer may have been asked about again

    async def run(self) -> None:
        """For ever, until cancelled."""
        while True:
            self.tell()
            await asyncio.sleep(self._every_s)

    def tell(self) -> None:
        """Add what is new. Returns at once; while Redis is away it is kept for later."""
        self._turn += 1
        if not self._line.up:
            self._asked.clear()
            return
        for kind in self._runs.kinds():
            if self._turn - self._asked.get(kind, -LOST_AFTER) < LOST_AFTER:
                continue  # its answer is on the way: what was told would be told twice
            counts, known = self._runs.counts(kind), self._sums.get(kind, {})
            if counts["turns"] == known.get("turns"):
                break  # nor have those behind it been asked since
            if counts["turns"] < known.get("turns", 0):  # forgotten here meanwhile, and learned anew
                known = {}
                self._own.pop(kind, None)
            self._add(kind, counts, _less(counts, known))
        if len(self._sums) > SUMS_MAX:
            self._sums = {kind: sums for kind, sums in self._sums.items() if self._runs.counts(kind)}
            self._own = {kind: own for kind, own in self._own.items() if kind in self._sums}

    def _add(self, kind: str, counts: Counts, new: Counts) -> None:
        args: list[Arg] = [TTL_S, FIELDS_MAX]
        for name, n in new.items():
            args += name, n

        def summed(flat: Sequence[bytes]) -> None:
            sums = {name.decode(): int(n) for name, n in zip(flat[::2], flat[1::2], strict=True)}
            self._asked.pop(kind, None)
            own = self._own.get(kind, {})
            self._own[kind] = _plus(own, new)
            # Redis has lost what it was told: once more, of this process.
            if sums["turns"] < self._own[kind]["turns"]:
                self._own[kind] = new
                self._add(kind, counts, own)
                return
            now = self._runs.counts(kind)
            if now:
                self._sums[kind] = sums
                self._runs.set_counts(kind, _plus(sums, _less(now, counts)))

        self._asked[kind] = self._turn
        self._line.tell(_ADD, [b"tollhouse:{runs:%b}" % kind.encode()], args, summed)


def _less(a: Mapping[str, int], b: Mapping[str, int]) -> Counts:
    return {name: n - b.get(name, 0) for name, n in a.items() if n != b.get(name, 0)}


def _plus(a: Mapping[str, int], b: Mapping[str, int]) -> Counts:
    return {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}
