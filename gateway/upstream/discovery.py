"""Where the replicas of a deployment are: as written, by DNS, or by the endpoints of a Kubernetes Service.

Kubernetes is asked as a pod asks it: the API server under its name in the cluster, the mounted certificate of its
authority, the mounted token of the pod's service account, read anew each time because it is replaced every hour. It
needs `get` and `list` on `endpointslices` of `discovery.k8s.io` in that namespace.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec

from gateway.core.catalog import ReplicaKind, ReplicaSource
from gateway.ports import Unanswered

TIMEOUT_S = 5.0
REPLICAS_MAX = 256
_ANSWER_BYTES_MAX = 16 << 20
API = "https://kubernetes.default.svc"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_log = logging.getLogger("gateway")

Address = tuple[str, int]  # of a machine, and a port


Resolve = Callable[[str, int], Coroutine[Any, Any, Sequence[Address]]]


async def addresses(host: str, port: int) -> Sequence[Address]:
    """Of a host name, as the system resolves it; off the loop. Raises `OSError` if there are none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(str(sockaddr[0]), port) for *_, sockaddr in found]


class Discovery:
    """`find` between `start` and `stop`. `api` and `account` are where a cluster's are, but for tests."""

    def __init__(
        self,
        *,
        timeout_s: float = TIMEOUT_S,
        resolve: Resolve = addresses,
        api: str = API,
        account: Path = ACCOUNT,
    ) -> None:
        self._timeout_s = timeout_s
        self._resolve = resolve
        self._api, self._account = api, account
        self._http: aiohttp.ClientSession | None = None
        #: A resolver that hangs keeps one thread, however often it is asked.
        self._told: set[ReplicaSource] = set()  # of too many addresses
        self._lookups: dict[Address, asyncio.Future[Sequence[Address]]] = {}

    async def start(self) -> None:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s))

    async def stop(self) -> None:
        hanging = tuple(self._lookups.values())
        for lookup in hanging:
            lookup.cancel()
        await asyncio.gather(*hanging, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    async def find(self, source: ReplicaSource) -> tuple[str, ...]:
        """Base URLs, at least one and at most `REPLICAS_MAX`, each once. Raises `Unanswered`."""
        match source.kind:
            case ReplicaKind.STATIC:
                return source.urls
            case ReplicaKind.DNS:
                found = await self._resolved(source.host, int(source.port))
            case ReplicaKind.KUBERNETES:
                found = list(endpoints(await self._slices(source), source.port))
        where = source.host or source.service
        if not found:
            raise Unanswered(f"{where} has no address")
        if len(found) > REPLICAS_MAX and source not in self._told:
            self._told.add(source)
            _log.warning("%s has %d addresses; %d are used", where, len(found), REPLICAS_MAX)
        urls = (f"{source.scheme}://{_bracketed(host)}:{port}{source.path}" for host, port in sorted(found))
        return tuple(dict.fromkeys(urls))[:REPLICAS_MAX]

    async def _resolved(self, host: str, port: int) -> Sequence[Address]:
        lookup = self._lookups.get((host, port))
        if lookup is None:
            lookup = self._lookups[host, port] = asyncio.ensure_future(self._resolve(host, port))
            lookup.add_done_callback(partial(self._looked_up, (host, port)))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(lookup)
        except TimeoutError:
            raise Unanswered(f"DNS does not answer for {host} within {self._timeout_s:g} s") from None
        except (OSError, UnicodeError) as error:
            raise Unanswered(f"DNS knows no {host}: {error}") from error

    def _looked_up(self, place: Address, lookup: asyncio.Future[Sequence[Address]]) -> None:
        del self._lookups[place]
        if not lookup.cancelled():
            lookup.exception()  # seen, also where nobody waits any more

    async def _slices(self, source: ReplicaSource) -> Any:
        http = self._http
        if http is None:
            raise RuntimeError("Discovery.find before start")
        try:
            namespace = source.namespace or self._mounted("namespace")
            headers = {"Authorization": f"Bearer {self._mounted('token')}"}
            tls = ssl.create_default_context(cafile=self._account / "ca.crt")
        except OSError as error:
            raise Unanswered(
                f"there is no service account here ({self._account}: {error.strerror})"
            ) from error
        url = (
            f"{self._api}/apis/discovery.k8s.io/v1/namespaces/{quote(namespace, safe='')}/endpointslices"
            f"?labelSelector=kubernetes.io/service-name%3D{quote(source.service, safe='')}"
        )
        try:
            async with http.get(url, headers=headers, ssl=tls, allow_redirects=False) as answer:
                body = await bounded(answer, _ANSWER_BYTES_MAX)
                if answer.status != 200:
                    raise Unanswered(
                        f"the cluster answers HTTP {answer.status} about Service {namespace}/{source.service}"
                    )
                return msgspec.json.decode(body)
        except (aiohttp.ClientError, OSError) as error:
            raise Unanswered(f"the cluster's API cannot be asked: {error or type(error).__name__}") from error
        except (ValueError, msgspec.DecodeError) as error:
            raise Unanswered(f"the cluster's answer cannot be read: {error}") from error

    def _mounted(self, name: str) -> str:
        return (self._account / name).read_text("ascii").strip()


def endpoints(listed: Any, port: str) -> Iterator[Address]:
    """The ready endpoints of an EndpointSliceList (API reference of Kubernetes 1.34, discovery/v1): a condition that is not
    there counts as true. `port` is a number, a name, or "" if there is one only. Raises `Unanswered`.
    """
    try:
        for item in listed["items"]:
            number = _port(item.get("ports") or (), port)
            for endpoint in item.get("endpoints") or ():
                conditions = endpoint.get("conditions") or {}
                if conditions.get("ready", True) is not False and not conditions.get("terminating"):
                    yield str(endpoint["addresses"][0]), number
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise Unanswered("the cluster's answer is no list of EndpointSlices") from error


def _port(ports: Sequence[dict[str, Any]], wanted: str) -> int:
    fits = [p for p in ports if not wanted or wanted in (p.get("name"), str(p.get("port")))]
    if len(fits) != 1:
        known = ", ".join(f"{p.get('name') or 'unnamed'} ({p.get('port')})" for p in ports) or "none"
        raise Unanswered(f"the Service has no one port {wanted!r}, but {known}")
    return int(fits[0]["port"])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


async def bounded(answer: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole body. Raises `ValueError` above `most` bytes."""
    parts: list[bytes] = []
    size = 0
    async for part in answer.content.iter_any():
        size += len(part)
        if size > most:
            raise ValueError(f"more than {most} bytes")
        parts.append(part)
    return b"".join(parts)
