"""Rate and concurrency limits that all replicas share, in Redis; without it, each replica keeps to its share.

A bucket is one string, "level at", in the units of `core.limits`; a limit of concurrency is a sorted set of the
requests inside, each with the time at which its place falls free unless it is renewed. The clock is the server's.
Every key expires. What one call touches has one hash tag, the scope of its last name: a key's buckets lie with its
team's (`tollhouse:{team:t}:key:k:requests`), because they are taken together or not at all.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.core.limits import Bucket, take
from gateway.storage.memory import MemoryLimits
from gateway.storage.redis import Arg, OnRedis, RedisLine, Script, StoreLost

#: A call waits no longer for Redis than this.
TIMEOUT_S = 0.05
#: The place of a request whose process has died falls free after this at the latest.
LEASE_S = 45.0
RENEW_EVERY_S = 10.0
#: Lua computes in doubles: levels stay exact below 2^53 / 60,000 units. Nobody reaches this in a minute.
UNITS_MAX = 10**11

SERVER_CLOCK = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
"""

#: KEYS: buckets. ARGV: cost and capacity of each. Answers with the place and the level of each that is too empty.
_TAKE = """
local level, at, short = {}, {}, {}
for i, key in ipairs(KEYS) do
  local cost, capacity = tonumber(ARGV[2 * i - 1]), tonumber(ARGV[2 * i])
  local full = capacity * 60000
  if not level[key] then
    local held = redis.call('GET', key)
    if held then
      local cut = string.find(held, ' ', 1, true)
      level[key], at[key] = tonumber(string.sub(held, 1, cut - 1)), tonumber(string.sub(held, cut + 1))
    else
      level[key], at[key] = full, now
    end
  end
  local passed = math.min(60000, math.max(0, now - at[key]))
  local left = math.min(full, level[key] + passed * capacity)
  at[key] = math.max(now, at[key])
  if left >= cost * 60000 then
    left = left - cost * 60000
  else
    short[#short + 1] = i
    short[#short + 1] = left
  end
  level[key] = left
end
if #short == 0 then
  for key, left in pairs(level) do
    redis.call('SET', key, string.format('%.0f %.0f', left, at[key]), 'PX', 61000)
  end
end
return short
"""

#: KEYS: sets of requests. ARGV: request, lease in ms, then how many each set may hold. Answers with the place of the
#: first that is full, or 0.
_ENTER = """
for i, key in ipairs(KEYS) do
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
  if redis.call('ZCARD', key) >= tonumber(ARGV[i + 2]) and not redis.call('ZSCORE', key, ARGV[1]) then
    return i
  end
end
for _, key in ipairs(KEYS) do
  redis.call('ZADD', key, now + ARGV[2], ARGV[1])
  redis.call('PEXPIRE', key, ARGV[2])
end
return 0
"""

#: KEYS: one set. ARGV: lease in ms, then members: requests inside, or replicas alive. Answers with how many there are.
_RENEW = """
for i = 2, #ARGV do
  redis.call('ZADD', KEYS[1], now + ARGV[1], ARGV[i])
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return redis.call('ZCARD', KEYS[1])
"""

_LEAVE = Script("""
for _, key in ipairs(KEYS) do
  redis.call('ZREM', key, ARGV[1])
end
""")
_REPLICAS = "tollhouse:{replicas}"
_RENEWED_AT_ONCE = 1_000


@dataclass(slots=True)
class _Place:
    """Where a request is inside. `sure` is False until Redis has said so or is known to be lost."""

    keys: tuple[str, ...]
    sure: bool = False


class RedisLimits(OnRedis):
    """`ports.Limits` shared through Redis. `start` before use, `close` after.

    `replicas_min`: how many processes there are at least; more are counted through Redis itself.
    `clock`: Lua that sets `now` in ms; tests put their own.
    """

    def __init__(
        self, url: str, *, replicas_min: int = 1, timeout_s: float = TIMEOUT_S, clock: str = SERVER_CLOCK
    ) -> None:
        self._take, self._enter, self._renew = (Script(clock + body) for body in (_TAKE, _ENTER, _RENEW))
        self._line = RedisLine(
            url,
            (self._take, self._enter, self._renew, _LEAVE),
            timeout_s=timeout_s,
            without="each process now keeps to its share of the rate limits",
            on_up=self._announce,
        )
        self._local = MemoryLimits()
        self._places: dict[str, _Place] = {}
        #: places given back, when, and not yet confirmed: a request that ended while Redis was away
        self._leaving: dict[str, tuple[tuple[str, ...], float]] = {}
        self._replica = uuid.uuid4().hex
        self._replicas_min = replicas_min
        self.replicas = replicas_min
        self._timer: asyncio.TimerHandle | None = None

    @property
    def degraded(self) -> bool:
        return not self._line.up

    async def start(self) -> None:
        """Does not wait for a Redis that is down."""
        await super().start()
        self._beat()

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._line.tell(_LEAVE, (_REPLICAS,), (self._replica,))
        await super().close()

    async def take(self, buckets: Sequence[tuple[str, int, int]], now_ms: int) -> tuple[str, float] | None:
        """As `ports.Limits`. `now_ms` is used only when Redis, whose clock counts, cannot be asked."""
        if any(cost < 0 or capacity < 0 for _, cost, capacity in buckets):
            raise ValueError(f"costs and capacities must not be negative: {buckets}")
        if not buckets:
            return None
        buckets = [
            (name, min(cost, UNITS_MAX + 1), min(capacity, UNITS_MAX)) for name, cost, capacity in buckets
        ]
        try:
            args = [number for _, cost, capacity in buckets for number in (cost, capacity)]
            short = await self._line.run(self._take, _keys("", [name for name, _, _ in buckets]), args)
        except StoreLost:
            return await self._local.take([self._shared_bucket(*bucket) for bucket in buckets], now_ms)
        worst: tuple[str, float] | None = None
        for place, level in zip(short[::2], short[1::2], strict=True):
            name, cost, capacity = buckets[place - 1]
            _, wait_s = take(Bucket(level, 0), cost, capacity, 0)
            if worst is None or wait_s > worst[1]:
                worst = (name, wait_s)
        return worst

    async def enter(self, names: Sequence[tuple[str, int]], request_id: str) -> str | None:
        """As `ports.Limits`. What this process alone has inside is enough to refuse without asking."""
        caps = names if self._line.up else [(name, self._share(most)) for name, most in names]
        full = await self._local.enter(caps, request_id)
        if full is not None or not names:
            return full
        keys = _keys("in:", [name for name, _ in names])
        place = self._places[request_id] = _Place(keys)
        try:
            args: list[Arg] = [request_id, _ms(LEASE_S), *(most for _, most in names)]
            at = await self._line.run(self._enter, keys, args)
        except StoreLost:
            full = next((n for n, most in names if self._local.inside(n) > self._share(most)), None)
            if full is not None:
                self.leave(request_id)  # in Redis, too: it may have let the request in and not been heard
        else:
            if at:
                full = names[at - 1][0]
                self._places.pop(request_id, None)
                self._local.leave(request_id)
        place.sure = full is None
        return full

    def leave(self, request_id: str) -> None:
        self._local.leave(request_id)
        place = self._places.pop(request_id, None)
        if place is not None:
            self._leaving[request_id] = (place.keys, time.monotonic())
            self._give_back(request_id, place.keys)

    def renew(self) -> None:
        """Tell Redis that this process and its requests are alive. Done every `RENEW_EVERY_S` by itself."""
        self._line.tell(self._renew, (_REPLICAS,), (_ms(LEASE_S), self._replica), self._count)
        inside: dict[str, list[str]] = {}
        for request_id, place in self._places.items():
            if place.sure:
                for key in place.keys:
                    inside.setdefault(key, []).append(request_id)
        for key, ids in inside.items():
            for start in range(0, len(ids), _RENEWED_AT_ONCE):
                some = ids[start : start + _RENEWED_AT_ONCE]
                self._line.tell(self._renew, (key,), (_ms(LEASE_S), *some))

    def _beat(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(RENEW_EVERY_S, self._beat)
        if self._line.up:
            self.renew()
        over_s = time.monotonic() - LEASE_S
        for request_id in [r for r, (_, left_s) in self._leaving.items() if left_s < over_s]:
            del self._leaving[request_id]  # its lease has ended: nothing is left to give back

    def _announce(self) -> None:
        """Redis is back, perhaps empty: say who left meanwhile and who is inside."""
        for request_id, (keys, _) in self._leaving.items():
            self._give_back(request_id, keys)
        self.renew()

    def _give_back(self, request_id: str, keys: tuple[str, ...]) -> None:
        def left(_: object) -> None:
            self._leaving.pop(request_id, None)

        self._line.tell(_LEAVE, keys, (request_id,), left)

    def _count(self, alive: int) -> None:
        self.replicas = max(self._replicas_min, alive)

    def _share(self, whole: int) -> int:
        return max(min(1, whole), whole // self.replicas)

    def _shared_bucket(self, name: str, cost: int, capacity: int) -> tuple[str, int, int]:
        share = self._share(capacity)
        # What fits the whole limit must fit the share, or it would never pass while Redis is away.
        return name, min(cost, share) if cost <= capacity else cost, share


def _keys(kind: str, names: Iterable[str]) -> tuple[str, ...]:
    """ "team:t:requests" and "team:t" have the scope "team:t"."""
    names = tuple(names)
    last = names[-1].split(":")
    tag = ":".join(last[:2])
    return tuple(f"tollhouse:{{{tag}}}:{kind}{name}" for name in names)


def _ms(seconds: float) -> int:
    return round(seconds * 1_000)
