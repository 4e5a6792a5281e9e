"""What gateway processes tell one another of the replicas that they share: load, where threads went, and who is drained.

`tollhouse:{replicas}:digests` is a stream: each second every process adds what `Fleet.digest` gives, and reads what the
others have added. `tollhouse:{replicas}:drained` is a hash: "deployment, new line, address" -> "1" or "0", the last word
counts. While Redis is away each process goes by what it sees itself; losing all of it costs prefill, nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from gateway.core.replicas.group import Groups
from gateway.core.replicas.terms import Digest
from gateway.storage.redis import RedisLine, Script, StoreLost

TIMEOUT_S = 0.25
EVERY_S = 1.0
#: Some seconds of what a dozen processes say; who comes later learns from what follows.
DIGESTS_MAX = 256
#: A replica that a person has taken out stays out, if nobody says otherwise.
DRAINED_TTL_S = 7 * 86_400
_DIGESTS_TTL_S = 600
_DIGESTS = b"tollhouse:{replicas}:digests"
_DRAINED = b"tollhouse:{replicas}:drained"

_PUT = Script(
    """
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'p', ARGV[2], 'd', ARGV[3], 'b', ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[5])
"""
)
_SINCE = Script("return redis.call('XRANGE', KEYS[1], ARGV[1], '+', 'COUNT', ARGV[2])")
_DRAIN = Script("redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]); redis.call('EXPIRE', KEYS[1], ARGV[3])")
_ALL = Script("return redis.call('HGETALL', KEYS[1])")

_digests = msgspec.msgpack.Decoder(Digest)
_log = logging.getLogger("gateway")


class RedisReplicas:
    """Keeps the fleets of `groups` in step with those of other processes. `run` for ever, `close` after. `own` names this
    process. Connects when there is the first fleet.
    """

    def __init__(
        self,
        url: str,
        groups: Groups,
        *,
        own: str,
        monotonic: Callable[[], float],
        every_s: float = EVERY_S,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._groups = groups.by_deployment
        self._own = own.encode()
        self._monotonic = monotonic
        self._every_s = every_s
        self._since = b"-"  # where the stream goes on
        self._spoke: set[str] = set()  # deployments whose last digest said something
        self._drained: set[bytes] = set()
        self._started = False
        self._line = RedisLine(
            url,
            (_PUT, _SINCE, _DRAIN, _ALL),
            timeout_s=timeout_s,
            without="each process picks replicas by what it has sent there itself",
        )

    async def close(self) -> None:
        if self._started:
            await self._line.close()

    async def idle(self) -> None:
        """Returns when others can hear what was said so far."""
        await self._line.idle()

    async def run(self) -> None:
        """For ever, until cancelled."""
        while True:
            await self.turn()
            await asyncio.sleep(self._every_s)

    def drained(self, deployment: str, address: str, on: bool) -> None:
        """A person takes a replica out, or puts it back. Returns at once; others follow within a second."""
        name = f"{deployment}\n{address}".encode()
        (self._drained.add if on else self._drained.discard)(name)
        self._line.tell(_DRAIN, [_DRAINED], (name, b"1" if on else b"0", DRAINED_TTL_S))

    async def turn(self) -> None:
        """Say what is new here, and take over what others have said since the last time."""
        if not self._groups:
            return
        if not self._started:
            self._started = True
            await self._line.start()
        self._say()
        try:
            await self._hear()
            await self._follow_drains()
        except StoreLost:
            return

    def _say(self) -> None:
        now_s = self._monotonic()
        for name, group in self._groups.items():
            digest = group.fleet.digest(now_s)
            says = bool(digest.placed or digest.load)
            if says or name in self._spoke:  # that nothing is in flight any more is news, too
                packed = msgspec.msgpack.encode(digest)
                self._line.tell(
                    _PUT, [_DIGESTS], (DIGESTS_MAX, self._own, name.encode(), packed, _DIGESTS_TTL_S)
                )
            (self._spoke.add if says else self._spoke.discard)(name)

    async def _hear(self) -> None:
        for entry, fields in await self._line.run(_SINCE, [_DIGESTS], (self._since, DIGESTS_MAX)):
            self._since = _behind(entry)
            said = dict(zip(fields[::2], fields[1::2], strict=True))
            group = self._groups.get(said.get(b"d", b"").decode("utf-8", "replace"))
            peer = said.get(b"p", b"")
            if group is None or peer == self._own:
                continue
            try:
                digest = _digests.decode(said.get(b"b", b""))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # of another version
            group.fleet.merge(peer.decode("utf-8", "replace"), digest, self._monotonic())

    async def _follow_drains(self) -> None:
        flat = await self._line.run(_ALL, [_DRAINED], ())
        for name, word in zip(flat[::2], flat[1::2], strict=True):
            deployment, _, address = name.decode("utf-8", "replace").partition("\n")
            group, on = self._groups.get(deployment), word == b"1"
            if group is None or not (on or name in self._drained):
                continue
            if group.fleet.drain(address, on) and on != (name in self._drained):
                _log.warning(
                    "%s: replica %s is %s elsewhere", deployment, address, "drained" if on else "undrained"
                )
                (self._drained.add if on else self._drained.discard)(name)


def _behind(entry: bytes) -> bytes:
    """The least id after this one (an exclusive range needs Redis 6.2)."""
    at_ms, _, number = entry.partition(b"-")
    return b"%b-%d" % (at_ms, int(number) + 1)
