"""Health that replicas share: what one of them has ejected, cooled or drained, the others leave alone a second later.

`tollhouse:{health}` is a hash: subject -> [when it was said (server's clock, ms), who said it, `core.health.Shared`].
The last word counts. While Redis is away each process goes by what it sees itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, MutableMapping

import msgspec

from gateway.core.health import HealthState, Shared, adopted, told
from gateway.storage.redis import OnRedis, RedisLine, Script, StoreLost

TIMEOUT_S = 0.1
EVERY_S = 1.0
#: Longer than any ejection; what nobody speaks of any more is forgotten, drains included after a week.
TTL_S = 7 * 86_400
_KEY = b"tollhouse:{health}"

_PUT = Script(
    """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('HSET', KEYS[1], ARGV[1], cmsgpack.pack({now, ARGV[2], ARGV[3]}))
redis.call('EXPIRE', KEYS[1], ARGV[4])
return now
"""
)
_ALL = Script("return redis.call('HGETALL', KEYS[1])")

_said = msgspec.msgpack.Decoder(tuple[int, str, str])
_shared = msgspec.json.Decoder(tuple[int, str, int, int, int, bool])


class RedisHealth(OnRedis):
    """Keeps `states` in step with other replicas. `start` before use, `run` for ever, `close` after."""

    def __init__(
        self,
        url: str,
        states: MutableMapping[str, HealthState],
        *,
        replica_id: str,
        now_ms: Callable[[], int],
        monotonic: Callable[[], float],
        every_s: float = EVERY_S,
    ) -> None:
        self._states = states
        self._own = replica_id
        self._now_ms, self._monotonic = now_ms, monotonic
        self._every_s = every_s
        self._said: dict[str, Shared] = {}  # by this process
        #: the last word that was heard of a subject, and when it was said: two may be said in one millisecond
        self._heard: dict[str, tuple[int, bytes]] = {}
        self._line = RedisLine(
            url, (_PUT, _ALL), timeout_s=TIMEOUT_S, without="each process finds out by itself who is well"
        )

    def changed(self, changes: Mapping[str, HealthState]) -> None:
        """Tell the others what matters to them. Returns at once."""
        now_s, now_ms = self._monotonic(), self._now_ms()
        for name, state in changes.items():
            word = told(state, now_s, now_ms)
            if word == self._said.get(name) or (name not in self._said and word == _NOTHING):
                continue
            self._said[name] = word
            self._line.tell(_PUT, [_KEY], (name, self._own, msgspec.json.encode(word), TTL_S))

    async def run(self) -> None:
        """For ever, until cancelled."""
        while True:
            await self.listen()
            await asyncio.sleep(self._every_s)

    async def listen(self) -> None:
        """Take over what others have said since the last time."""
        try:
            flat = await self._line.run(_ALL, [_KEY], ())
        except StoreLost:
            return
        now_s, now_ms = self._monotonic(), self._now_ms()
        for name_raw, packed in zip(flat[::2], flat[1::2], strict=True):
            name = name_raw.decode()
            at_ms, who, word_raw = _said.decode(packed)
            heard_ms, heard = self._heard.get(name, (0, b""))
            if at_ms < heard_ms or packed == heard:
                continue
            self._heard[name] = at_ms, packed
            if who == self._own:
                continue
            word = Shared(*_shared.decode(word_raw))
            self._said[name] = word
            self._states[name] = adopted(self._states.get(name, HealthState()), word, now_s, now_ms)


_NOTHING = told(HealthState(), 0.0, 0)
