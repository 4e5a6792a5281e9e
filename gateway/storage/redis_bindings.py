"""Which deployment holds what of a task's threads, shared by replicas, so that a run that moves on finds its warm cache.

`tollhouse:{binding:<task>}` is a hash: thread -> JSON as `pipeline.runs` writes it. It lives an hour after its last
word; losing it costs a cold cache and nothing else.
"""

from __future__ import annotations

from gateway.storage.redis import OnRedis, RedisLine, Script, StoreLost

TIMEOUT_S = 0.02
TTL_S = 3_600

_PUT = Script("redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]); redis.call('EXPIRE', KEYS[1], ARGV[3])")
_GET = Script("return redis.call('HGET', KEYS[1], ARGV[1])")


class RedisBindings(OnRedis):
    """`ports.Bindings`. `start` before use, `close` after."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._line = RedisLine(
            url, (_PUT, _GET), timeout_s=timeout_s, without="a run that changes replicas finds its cache cold"
        )

    async def find(self, task_id: str, thread: bytes) -> bytes | None:
        try:
            found: bytes | None = await self._line.run(_GET, [_key(task_id)], (thread,))
        except StoreLost:
            return None
        return found

    def put(self, task_id: str, thread: bytes, binding: bytes) -> None:
        self._line.tell(_PUT, [_key(task_id)], (thread, binding, TTL_S))


def _key(task_id: str) -> bytes:
    return b"tollhouse:{binding:%b}" % task_id.encode()
