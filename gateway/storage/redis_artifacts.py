"""The whole texts of trimmed tool results, for every replica that is asked for one.

`tollhouse:{artifacts:<task>}` is a hash: digest -> the text, deflated. It lives an hour after its last word; the agent
sends the text again with its next step anyway, so losing it costs an answer of 404 until then.
"""

from __future__ import annotations

import zlib

from gateway.storage.redis import OnRedis, RedisLine, Script, StoreLost

TIMEOUT_S = 0.5  # nobody's model call waits for it
TTL_S = 3_600
#: A longer text, deflated, stays in the process that trimmed it.
BYTES_MAX = 1 << 20
OF_A_TASK_MAX = 64
_CHARS_MAX = 64 << 20

_PUT = Script(
    """
if redis.call('HLEN', KEYS[1]) < tonumber(ARGV[4]) then redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) end
redis.call('EXPIRE', KEYS[1], ARGV[3])
"""
)
_GET = Script("return redis.call('HGET', KEYS[1], ARGV[1])")


class RedisArtifacts(OnRedis):
    """`start` before use, `close` after."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._line = RedisLine(
            url,
            (_PUT, _GET),
            timeout_s=timeout_s,
            without="trimmed tool results are read from the process that trimmed them only",
        )

    def put(self, task_id: str, digest: str, text: str) -> None:
        """Returns at once; others can read it a moment later, unless it is too long."""
        packed = zlib.compress(text.encode(), 1)
        if len(packed) <= BYTES_MAX:
            self._line.tell(_PUT, [_key(task_id)], (digest, packed, TTL_S, OF_A_TASK_MAX))

    async def text(self, task_id: str, digest: str) -> str | None:
        try:
            packed: bytes | None = await self._line.run(_GET, [_key(task_id)], (digest,))
        except StoreLost:
            return None
        return None if packed is None else zlib.decompressobj().decompress(packed, _CHARS_MAX).decode()


def _key(task_id: str) -> bytes:
    return b"tollhouse:{artifacts:%b}" % task_id.encode()
