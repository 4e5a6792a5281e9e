"""A real Redis that tests talk to beside the code under test, and whose clock they set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis import Redis

#: Lua for `clock=`: the time is what `ToldRedis.at` said last.
TOLD_CLOCK = "local now = tonumber(redis.call('GET', 'test:now'))\n"
#: Where nothing is to go wrong, a busy machine must not make it.
PATIENT_S = 10.0


@dataclass(frozen=True, slots=True)
class ToldRedis:
    url: str
    client: Redis

    def at(self, now_ms: int) -> None:
        self.client.set("test:now", now_ms)

    def keys(self) -> list[bytes]:
        """All keys of the gateway, sorted."""
        found: Any = self.client.keys("tollhouse:*")
        return sorted(found)

    def cut(self) -> None:
        """Close every connection but this one."""
        self.client.client_kill_filter(_type="normal", skipme=True)

    def stat(self, name: str) -> int:
        """A counter of `INFO stats`."""
        found: Any = self.client.info("stats")
        return int(found[name])
