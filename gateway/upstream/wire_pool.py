"""Connections to providers: kept alive, the youngest first, each made to one of the host's addresses.

There is no upper limit: how many calls run at once is decided by rate limits and budgets, not here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from gateway.core.errors import UpstreamUnreachable
from gateway.upstream.wire_protocol import Connection

#: A reused connection must be younger than what servers allow: uvicorn-based ones close at 5 s, hosted ones
#: after a minute or more (resilience-and-security, November 2026).
PLAIN_KEEPALIVE_S = 4.0
TLS_KEEPALIVE_S = 15.0
DNS_TTL_S = 60.0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where connections lead: host name or literal address (without brackets), port, TLS or not."""

    host: str
    port: int
    tls: bool


class _Place:
    """What is known of one origin."""

    __slots__ = ("addresses", "idle", "keepalive_s", "known_until_s", "lookup", "origin")

    def __init__(self, origin: Origin, keepalive_s: float) -> None:
        self.origin = origin
        self.keepalive_s = keepalive_s
        self.idle: deque[Connection] = deque()  # oldest first
        self.addresses: Sequence[str] = ()
        self.known_until_s = 0.0
        self.lookup = asyncio.Lock()


Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve(host: str, port: int) -> Sequence[str]:
    """The host's addresses in the system's order. Raises `OSError` if there are none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


class Pool:
    """`take` a connection (or `connect`), then `give` it back: kept if reusable, else aborted."""

    def __init__(
        self,
        tls: ssl.SSLContext,
        resolve: Resolve = resolve,
        *,
        plain_keepalive_s: float = PLAIN_KEEPALIVE_S,
        tls_keepalive_s: float = TLS_KEEPALIVE_S,
    ) -> None:
        self._tls = tls
        self._plain_keepalive_s = plain_keepalive_s
        self._tls_keepalive_s = tls_keepalive_s
        self._resolve = resolve
        self._loop = asyncio.get_running_loop()
        self._places: dict[Origin, _Place] = {}
        self._open: set[Connection] = set()
        self._all_gone = asyncio.Event()
        self._sweep: asyncio.TimerHandle | None = None
        self._stopped = False

    def take(self, origin: Origin) -> Connection | None:
        """The connection that was used last and is neither too old nor closed by the provider, or None."""
        place = self._places.get(origin)
        if place is None:
            return None
        oldest_s = self._loop.time() - place.keepalive_s
        while place.idle:
            connection = place.idle.pop()
            if connection.idle_since_s > oldest_s and connection.fresh:
                return connection
            connection.abort()
        return None

    def give(self, origin: Origin, connection: Connection) -> None:
        place = self._places.get(origin)
        if self._stopped or place is None or not connection.reusable:
            connection.abort()
            return
        connection.rest()
        place.idle.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(place.keepalive_s, self._close_old)

    def forget(self, origin: Origin) -> None:
        """Drop its idle connections, and those in use when they are given back."""
        place = self._places.pop(origin, None)
        while place is not None and place.idle:
            place.idle.pop().abort()

    async def connect(self, origin: Origin, connect_s: float) -> Connection:
        """A new connection, TLS included, within `connect_s`. Raises `UpstreamUnreachable`: nothing was sent."""
        try:
            async with asyncio.timeout(connect_s):
                return await self._connect(self._place(origin))
        except (OSError, TimeoutError, UnicodeError) as e:
            raise UpstreamUnreachable(billed=False) from e

    async def stop(self) -> None:
        """Close all connections at once, those in use included; returns when they are gone."""
        self._stopped = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in tuple(self._open):
            connection.abort()
        while self._open:
            self._all_gone.clear()
            await self._all_gone.wait()

    def _place(self, origin: Origin) -> _Place:
        place = self._places.get(origin)
        if place is None:
            keepalive_s = self._tls_keepalive_s if origin.tls else self._plain_keepalive_s
            place = self._places[origin] = _Place(origin, keepalive_s)
        return place

    async def _connect(self, place: _Place) -> Connection:
        refusal: OSError | None = None
        for address in await self._addresses(place):
            try:
                return await self._connect_to(place.origin, address)
            except ssl.SSLError:
                raise  # someone is there, but not the one we want
            except OSError as e:
                refusal = e
        place.known_until_s = 0.0  # perhaps it has moved
        raise refusal or OSError(f"no address for {place.origin.host}")

    async def _connect_to(self, origin: Origin, address: str) -> Connection:
        connection = Connection(self._loop, self._forget)
        await self._loop.create_connection(
            lambda: connection,
            address,
            origin.port,
            ssl=self._tls if origin.tls else None,
            server_hostname=origin.host if origin.tls else None,
        )
        if self._stopped or connection.closed:  # nothing has been sent on it
            connection.abort()
            raise ConnectionAbortedError("closed while connecting")
        self._open.add(connection)
        return connection

    async def _addresses(self, place: _Place) -> Sequence[str]:
        with contextlib.suppress(ValueError):
            return (str(ipaddress.ip_address(place.origin.host)),)
        async with place.lookup:
            if self._loop.time() >= place.known_until_s:
                place.addresses = await self._resolve(place.origin.host, place.origin.port)
                place.known_until_s = self._loop.time() + DNS_TTL_S
            return place.addresses

    def _forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._all_gone.set()

    def _close_old(self) -> None:
        self._sweep = None
        now_s = self._loop.time()
        next_s: float | None = None
        for place in self._places.values():
            while place.idle and place.idle[0].idle_since_s + place.keepalive_s <= now_s:
                place.idle.popleft().abort()
            if place.idle:
                end_s = place.idle[0].idle_since_s + place.keepalive_s
                next_s = end_s if next_s is None else min(next_s, end_s)
        if next_s is not None:
            self._sweep = self._loop.call_at(next_s, self._close_old)
