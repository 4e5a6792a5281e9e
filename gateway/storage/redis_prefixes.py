"""Lineage that all processes share, so that a run whose steps land on different ones stays one task.

For each key of a client, `tollhouse:{lineage:<key>}:<hash>` holds the tasks that stand at the end of a chain with that
hash: (task id, steps, seen at in ms of the server's clock), seen last at the end, as `core.prefix.End`. What a lookup
finds is judged by the same `core.prefix.same_task` as in one process. Everything expires.

Redis is asked before this process's own index is: a task that has gone on elsewhere still stands at its old end here,
and a second run with the same opening would be taken for it. The own index answers while Redis is down, and for what
is older than Redis's memory of that key (`tollhouse:{lineage:<key>}` says since when), so that losing Redis loses no
task that goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from gateway.core.prefix import End, same_task
from gateway.storage.memory import MAX_TASKS_AT_ONE_END, MemoryPrefixIndex
from gateway.storage.redis import OnRedis, RedisLine, Script, StoreLost

TIMEOUT_S = 0.02
TTL_S = 4 * 3600.0
#: A step adds a few segments to the one before; this many are looked at from the end backwards.
STEP_SEGMENTS_MAX = 32
#: The first entry of a key is put here before Redis has heard of the key; it is not older than Redis's memory.
_MARGIN_S = 1.0

SERVER_CLOCK = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
"""

#: KEYS: the memory's beginning, then ends, longest first. Answers with now, the beginning ("" if nothing is remembered),
#: who stands at the whole chain ("" if nobody), the place of the longest shorter end (0 if none), who stands there.
_FIND = """
local found = redis.call('MGET', unpack(KEYS))
for i = 3, #KEYS do
  if found[i] then
    return {now, found[1] or '', found[2] or '', i - 2, found[i]}
  end
end
return {now, found[1] or '', found[2] or '', 0, ''}
"""

#: KEYS: as above. ARGV: task, time to live in ms, most tasks at one end. The task leaves the ends that it has gone past.
_PUT = """
local task, ttl = ARGV[1], ARGV[2]
redis.call('SET', KEYS[1], string.format('%.0f', now), 'NX')
redis.call('PEXPIRE', KEYS[1], ttl)
local found = redis.call('MGET', unpack(KEYS))

local function without(packed)
  local others, steps = {}, nil
  for _, stand in ipairs(packed and cmsgpack.unpack(packed) or {}) do
    if stand[1] == task then steps = stand[2] else others[#others + 1] = stand end
  end
  return others, steps
end

local steps = 1
for i = 3, #KEYS do
  if found[i] then
    local others, before = without(found[i])
    if before then
      steps = math.max(steps, before + 1)
      if #others > 0 then
        redis.call('SET', KEYS[i], cmsgpack.pack(others), 'KEEPTTL')
      else
        redis.call('DEL', KEYS[i])
      end
    end
  end
end
local others, here = without(found[2])
others[#others + 1] = {task, here or steps, now}
if #others > tonumber(ARGV[3]) then
  table.remove(others, 1)
end
redis.call('SET', KEYS[2], cmsgpack.pack(others), 'PX', ttl)
"""

_stands = msgspec.msgpack.Decoder(list[tuple[str, int, int]])


class RedisPrefixIndex(OnRedis):
    """`ports.PrefixIndex` shared through Redis. `start` before use, `close` after.

    `clock`: Lua that sets `now` in ms; tests put their own.
    """

    def __init__(
        self,
        url: str,
        own: MemoryPrefixIndex,
        monotonic: Callable[[], float],
        *,
        timeout_s: float = TIMEOUT_S,
        ttl_s: float = TTL_S,
        clock: str = SERVER_CLOCK,
    ) -> None:
        self._find, self._put = Script(clock + _FIND), Script(clock + _PUT)
        self._own = own
        self._monotonic = monotonic
        self._ttl_ms = round(ttl_s * 1_000)
        #: what was put before this may be unknown to Redis
        self._back_s = 0.0
        self._line = RedisLine(
            url,
            (self._find, self._put),
            timeout_s=timeout_s,
            without="tasks that name themselves by nothing are recognised within one process only",
            on_up=self._note_return,
        )

    async def find(self, key_id: str, chain: Sequence[bytes]) -> tuple[int, str] | None:
        if not chain:
            return None
        try:
            now_ms, since, whole, back, shorter = await self._line.run(self._find, _keys(key_id, chain), ())
        except StoreLost:
            return self._own.known(key_id, chain)
        repeated, extended = _latest(whole), _latest(shorter)
        found = same_task(repeated, extended, now_ms / 1_000)
        if found is not None:
            return len(chain) - (0 if found is repeated else back), found.task_id
        remembers_s = (now_ms - int(since)) / 1_000 + _MARGIN_S if since else -math.inf
        before_s = max(self._back_s, self._monotonic() - remembers_s)
        return self._own.known(key_id, chain, before_s=before_s)

    def put(self, key_id: str, chain: Sequence[bytes], task_id: str) -> None:
        self._own.put(key_id, chain, task_id)
        if chain:
            self._line.tell(self._put, _keys(key_id, chain), (task_id, self._ttl_ms, MAX_TASKS_AT_ONE_END))

    def _note_return(self) -> None:
        self._back_s = self._monotonic()


def _keys(key_id: str, chain: Sequence[bytes]) -> list[bytes]:
    since = b"tollhouse:{lineage:%b}" % key_id.encode()
    end = since + b":"
    return [since, *[end + link for link in chain[: -STEP_SEGMENTS_MAX - 1 : -1]]]


def _latest(packed: bytes) -> End | None:
    if not packed:
        return None
    task_id, steps, seen_ms = _stands.decode(packed)[-1]
    return End(task_id, steps, seen_ms / 1_000)
