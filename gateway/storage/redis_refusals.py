"""Refusals that replicas tell one another through Redis, so that a storm over all of them asks the store once.

`tollhouse:{refusals}` is a sorted set of what was refused within the last second, by when. It only ever says no, and no
longer than a replica would by itself; a replica that has seen a later change of budgets passes it over. Losing it costs
each replica a question of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from gateway.core.entry import Refused
from gateway.storage.redis import OnRedis, RedisLine, Script, StoreLost
from gateway.storage.refusals import TTL_S, Refusals

TIMEOUT_S = 0.05
POLL_EVERY_S = 0.2
_KEY = b"tollhouse:{refusals}"
_MOST = 1_000

#: In microseconds: two refusals of one millisecond must not pass for one.
_CLOCK = """
local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
"""
#: ARGV: what is refused, time to live in us.
_PUT = """
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - ARGV[2])
redis.call('PEXPIRE', KEYS[1], 2 * ARGV[2] / 1000)
"""
#: ARGV: what is known is up to that, most. Answers with now, and what came after, each with its time.
_AFTER = """
return {now, redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[2])}
"""


class _Message(msgspec.Struct, array_like=True):
    scope: str
    refused: Refused
    revision: int  # of budgets, as the replica knew them


_message = msgspec.msgpack.Decoder(_Message)


class RedisRefusals(OnRedis):
    """Between `refusals` of this process and those of the others. `start` before use, `close` after."""

    def __init__(
        self,
        url: str,
        refusals: Refusals,
        *,
        timeout_s: float = TIMEOUT_S,
        poll_every_s: float = POLL_EVERY_S,
    ) -> None:
        """Raises `ValueError` for an URL that cannot be used."""
        self._refusals = refusals
        self._put, self._after = Script(_CLOCK + _PUT), Script(_CLOCK + _AFTER)
        self._poll_every_s = poll_every_s
        self._seen_us = 0
        self._polling: asyncio.Task[None] | None = None
        self._line = RedisLine(
            url,
            (self._put, self._after),
            timeout_s=timeout_s,
            without="each process finds out by itself what is refused",
        )

    async def start(self) -> None:
        """Does not wait for a Redis that is down."""
        await super().start()
        self._refusals.share = self._tell
        self._polling = asyncio.create_task(self._poll_for_ever(), name="refusals")

    async def close(self) -> None:
        self._refusals.share = None
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.wait((self._polling,))
        await super().close()

    async def poll(self) -> None:
        """Learn what others were told since the last time. Does nothing while Redis is down."""
        try:
            now_us, found = await self._line.run(self._after, (_KEY,), (self._seen_us, _MOST))
        except StoreLost:
            return
        for packed, at in zip(found[::2], found[1::2], strict=True):
            self._seen_us = max(self._seen_us, int(at))
            self._learn(packed, TTL_S - (now_us - int(at)) / 1e6)

    def _learn(self, packed: bytes, left_s: float) -> None:
        try:
            said = _message.decode(packed)
        except msgspec.MsgspecError:
            return  # of another version
        if left_s > 0:
            self._refusals.learn(said.scope, said.refused, said.revision, left_s)

    def _tell(self, scope: str, refused: Refused, revision: int) -> None:
        packed: Any = msgspec.msgpack.encode(_Message(scope, refused, revision))
        self._line.tell(self._put, (_KEY,), (packed, round(TTL_S * 1e6)))

    async def _poll_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._poll_every_s)
            await self.poll()
