"""Delivers the messages of the outbox to one receiver, at least once each, signed, and never into the own network.

    claim -> judge the address -> POST, no redirects, 5 s in all -> delivered | later | dead

The URL is judged when the job is made; a name is resolved once per delivery, every address that it has is judged,
and the connection goes to those: what the name means a moment later does not matter.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Protocol

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from gateway.core.addresses import PORTS, Verdict, judge, judge_ip
from gateway.core.errors import Unavailable
from gateway.core.webhook import (
    EVENT_ID_HEADER,
    SIGNATURE_HEADER,
    Message,
    envelope,
    retry_in_ms,
    signature,
)

TIMEOUT_S = 5.0
EVERY_S = 1.0
BATCH = 20
AT_ONCE = 5
#: Long enough for a whole batch in which every delivery runs into its time-out.
LEASE_MS = 60_000
_ERROR_CHARS = 200
_log = logging.getLogger(__name__)


class Outbox(Protocol):
    """What the job needs of a store. All raise `Unavailable` when it is down."""

    async def claim(self, most: int, lease_ms: int) -> Sequence[Message]:
        """Up to `most` messages that are due; nobody else gets them for `lease_ms`."""
        ...

    async def delivered(self, message: Message) -> None: ...

    async def later(self, message: Message, delay_ms: int, error: str) -> None: ...

    async def dead(self, message: Message, error: str) -> None: ...


#: (host, port) -> addresses as text; raises OSError.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


@dataclass(slots=True)
class Counts:
    """Since the start of this process."""

    delivered: int = 0
    failed: int = 0  # attempts
    refused: int = 0  # of those, for the address
    dead: int = 0


class AddressRefused(OSError):
    """The receiver's name stands for an address that is not a public one; nothing was sent."""


class Webhooks:
    """Every replica may run one: what one of them is delivering, the others skip.

    `secret` signs; `random` is in [0, 1). `loopback` lets tests deliver to 127.0.0.1; `counts` may be shared
    by several. ValueError for a URL that may not be used, or an empty secret.
    """

    def __init__(
        self,
        outbox: Outbox,
        *,
        url: str,
        secret: bytes,
        now_ms: Callable[[], int],
        random: Callable[[], float],
        every_s: float = EVERY_S,
        lease_ms: int = LEASE_MS,
        timeout_s: float = TIMEOUT_S,
        ports: frozenset[int] = PORTS,
        loopback: bool = False,
        resolve: Resolve | None = None,
        counts: Counts | None = None,
    ) -> None:
        target = judge(url, ports=ports, loopback=loopback)
        if not target.allowed:
            raise ValueError(f"the URL of the webhook may not be used: {target.reason}")
        self._url = URL(url, encoded=True)
        if not _reads_alike(self._url, target):
            raise ValueError("the URL of the webhook may not be used: its host can be read in two ways")
        if not secret:
            raise ValueError("the secret of the webhook must not be empty")
        self._outbox = outbox
        self._secret = secret
        self._now_ms = now_ms
        self._random = random
        self._every_s = every_s
        self._lease_ms = lease_ms
        self._timeout_s = timeout_s
        self._resolver = _Judging(resolve or _resolved, loopback)
        self._session: aiohttp.ClientSession | None = None
        self.counts = counts or Counts()

    async def run(self) -> None:
        """For ever, until cancelled. A store that is down is asked again at the next turn."""
        try:
            while True:
                more = False
                try:
                    more = await self.turn() == BATCH
                except Unavailable as e:
                    _log.warning("no webhooks delivered: %s", e)
                if not more:
                    await asyncio.sleep(self._every_s)
        finally:
            await self.close()

    async def turn(self) -> int:
        """Claim what is due and try to deliver it. Returns how many messages were tried."""
        messages = await self._outbox.claim(BATCH, self._lease_ms)
        places = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for message in messages:
                group.create_task(self._deliver(message, places), name="webhook")
        return len(messages)

    async def close(self) -> None:
        """Give up the connections; `turn` makes new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _deliver(self, message: Message, places: asyncio.Semaphore) -> None:
        async with places:
            error = "it was too old to be sent" if message.expired else await self._post(message)
        try:
            await self._note(message, error)
        except Unavailable as e:
            # Its claim ends by itself, and then it is sent once more.
            _log.warning("what became of webhook %s is not noted: %s", message.event_id, e)

    async def _note(self, message: Message, error: str) -> None:
        if not error:
            self.counts.delivered += 1
            await self._outbox.delivered(message)
            return
        self.counts.failed += 1
        delay_ms = retry_in_ms(message, self._random())
        if delay_ms is not None:
            await self._outbox.later(message, delay_ms, error)
            return
        self.counts.dead += 1
        _log.error("webhook %s is given up after %d attempts: %s", message.event_id, message.attempts, error)
        await self._outbox.dead(message, error)

    async def _post(self, message: Message) -> str:
        """Send it once; returns what went wrong, "" if nothing."""
        body = envelope(message)
        headers = {
            "content-type": "application/json",
            "user-agent": "tollhouse-webhook",
            EVENT_ID_HEADER: message.event_id,
            SIGNATURE_HEADER: signature(self._secret, body, self._now_ms() // 1_000),
        }
        try:
            async with self._opened().post(
                self._url, data=body, headers=headers, allow_redirects=False
            ) as answer:
                return "" if 200 <= answer.status < 300 else f"the receiver answered {answer.status}"
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            if _has(e, AddressRefused):
                self.counts.refused += 1
            return f"{type(e).__name__}: {e}".removesuffix(": ")[:_ERROR_CHARS]

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # A connection is never used twice: each delivery resolves and judges anew.
                connector=aiohttp.TCPConnector(
                    resolver=self._resolver, use_dns_cache=False, force_close=True, limit=AT_ONCE
                ),
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,  # a proxy would resolve the name itself
                auto_decompress=False,
            )
        return self._session


class _Judging(AbstractResolver):
    """Resolves a name once and gives out its addresses only if a connection may go to all of them."""

    def __init__(self, resolve: Resolve, loopback: bool) -> None:
        self._resolve = resolve
        self._loopback = loopback

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await self._resolve(host, port)
        refused = [address for address in found if not judge_ip(address, loopback=self._loopback)]
        if refused or not found:
            raise AddressRefused(errno.EACCES, f"{host} resolves to {', '.join(refused) or 'nothing'}")
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=kind,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for address in found
            if family in (socket.AF_UNSPEC, kind := socket.AF_INET6 if ":" in address else socket.AF_INET)
        ]

    async def close(self) -> None:
        """Nothing is held."""


def _reads_alike(url: URL, target: Verdict) -> bool:
    """Whether the client that connects sees the host that was judged."""
    host = (url.host or "").removesuffix(".")
    same = host == target.host if target.address is None else ip_address(host) == target.address
    return same and url.port == target.port and url.scheme == target.scheme


async def _resolved(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _has(error: BaseException | None, kind: type[BaseException]) -> bool:
    """Whether an error of that kind is the cause."""
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__ or error.__context__
    return False
