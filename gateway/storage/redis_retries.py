"""Retry budgets that replicas share: a tenth of the traffic of a provider and five from the start, of all of them together.

`tollhouse:{retries}` is a hash: provider -> "retries left, as of when (server's clock, ms)". Nobody waits for it: a process
goes by what it knows, tells of each retry at once and of its traffic every second, and takes over what all have left by the
answers. So retries that are made within one round trip of one another may be more than were left; what is too many is owed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gateway.core.retries import GROWS_BACK_S, LEAST, MOST, SHARE, RetryBudget
from gateway.storage.redis import Arg, OnRedis, RedisLine, Script
from gateway.storage.redis_limits import SERVER_CLOCK

TIMEOUT_S = 0.1
EVERY_S = 1.0
#: What no process has asked for so long has its first few again.
TTL_S = 3_600
_KEY = b"tollhouse:{retries}"
#: A day of no growth; Lua has no infinity to divide by.
_GROWS_BACK_MAX_S = 86_400_000.0

#: ARGV: ms for one to grow back, the least and the most of an account, seconds to live, then each provider and what is to be
#: added to its account. Answers with what each has left.
_ADD = """
local grows, least, most = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local found = {}
for i = 5, #ARGV, 2 do
  local left, at = least, now
  local held = redis.call('HGET', KEYS[1], ARGV[i])
  if held then
    local cut = string.find(held, ' ', 1, true)
    left, at = tonumber(string.sub(held, 1, cut - 1)), tonumber(string.sub(held, cut + 1))
  end
  if left < least then
    left = math.min(least, left + math.max(0, now - at) / grows)
  end
  left = math.max(-most, math.min(most, left + tonumber(ARGV[i + 1])))
  redis.call('HSET', KEYS[1], ARGV[i], string.format('%.6f %.0f', left, now))
  found[#found + 1] = string.format('%.6f', left)
end
redis.call('EXPIRE', KEYS[1], ARGV[4])
return found
"""


class RedisRetries(OnRedis, RetryBudget):
    """The accounts of all processes. `start` before use, `run` for ever, `close` after.

    While Redis is away each process has an account of its own, which goes on from what all had left. Whether a retry may be
    made changes no hold and no entry: every attempt is admitted and settled by the ledger as ever.
    """

    def __init__(
        self,
        url: str,
        *,
        monotonic: Callable[[], float],
        grows_back_s: float = GROWS_BACK_S,
        every_s: float = EVERY_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        super().__init__(grows_back_s=grows_back_s)
        self._monotonic = monotonic
        self._grows_ms = round(1_000 * min(grows_back_s, _GROWS_BACK_MAX_S))
        self._every_s = every_s
        self._add = Script(SERVER_CLOCK + _ADD)
        self._line = RedisLine(
            url, (self._add,), timeout_s=timeout_s, without="each process has a retry budget of its own"
        )
        self._untold: dict[str, float] = {}
        self._told = 0  # how often; only the answer to the last knows of all that was told

    async def run(self) -> None:
        """For ever, until cancelled."""
        while True:
            self.tell(self.names())
            await asyncio.sleep(self._every_s)

    def asked(self, name: str) -> None:
        super().asked(name)
        self._untold[name] = self._untold.get(name, 0.0) + SHARE

    def take(self, name: str, now_s: float) -> bool:
        """By what is known here; the others hear of it at once, and this process of what they have left."""
        taken = super().take(name, now_s)
        if taken:
            self._untold[name] = self._untold.get(name, 0.0) - 1.0
            self.tell((name,))
        return taken

    def tell(self, names: Sequence[str]) -> None:
        """Tell Redis of what changed in these accounts, and hear what they have. Returns at once."""
        if not self._line.up:
            self._untold.clear()  # of this process alone
            return
        if not names:
            return
        self._told += 1
        told = self._told
        args: list[Arg] = [self._grows_ms, round(LEAST), round(MOST), TTL_S]
        for name in names:
            args += name, f"{self._untold.pop(name, 0.0):.6f}"

        def heard(levels: Sequence[bytes]) -> None:
            if told == self._told:
                now_s = self._monotonic()
                for name, level in zip(names, levels, strict=True):
                    self.set_left(name, float(level) + self._untold.get(name, 0.0), now_s)

        self._line.tell(self._add, [_KEY], args, heard)
