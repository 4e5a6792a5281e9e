"""Providers that speak OpenAI's or Anthropic's own protocol over HTTP.

One aiohttp session per process: keep-alive, no cookies, no redirects, no retries (aiohttp repeats only
idempotent methods, and every attempt must be one that the ledger knows).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from multidict import CIMultiDict
from yarl import URL

from gateway import __version__
from gateway.core.catalog import Deployment, Provider, Wire
from gateway.core.errors import (
    UpstreamError,
    UpstreamLost,
    UpstreamMalformed,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.ports import Unsent, Upstream, UpstreamAnswer, UpstreamCall
from gateway.upstream.errors import classify

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Sent when the client named no version: the one that all Anthropic-compatible servers know.
ANTHROPIC_VERSION = "2023-06-01"
#: uvicorn-based servers close idle connections at 5 s; a reused connection must be younger than that.
LOCAL_KEEPALIVE_S = 4.0
ERROR_BODY_BYTES_MAX = 64 << 10


class _Pieces(Payload):
    """A request body in several pieces, written without joining them; may be written once or more."""

    def __init__(self, pieces: tuple[bytes | memoryview, ...]) -> None:
        super().__init__(pieces, content_type="application/json")
        self.begun = False  # before, aiohttp holds back the headers too: nothing has left
        self._size = sum(len(p) for p in pieces)
        self._autoclose = True

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return b"".join(self._value).decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        self.begun = True
        for piece in self._value:
            await writer.write(piece)


class HttpUpstream:
    """`ports.Upstream` for the wires openai, anthropic and demo.

    `credentials` maps a credential's name to its secret; only this object and the litellm adapter hold them.
    """

    def __init__(self, credentials: Mapping[str, str]) -> None:
        self._credentials = credentials
        self._session: aiohttp.ClientSession | None = None
        self._headers: dict[str, CIMultiDict[str]] = {}
        self._urls: dict[str, URL] = {}

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=LOCAL_KEEPALIVE_S, ttl_dns_cache=60),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Accept"),
        )

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def open(self, call: UpstreamCall) -> UpstreamAnswer:
        """Send and wait for the headers. Raises `UpstreamUnreachable` (proof that nothing was sent),
        `UpstreamLost` or `UpstreamTimeout` (the answer is lost, it may be billed)."""
        if self._session is None:
            raise RuntimeError("HttpUpstream.open before start")
        provider = call.deployment.provider
        first_byte_s = provider.slow_first_byte_timeout_s if call.slow else provider.first_byte_timeout_s
        # The first byte is awaited by a timer of its own; between bytes a slow model may be silent as long.
        silence_s = max(provider.idle_timeout_s, first_byte_s)
        headers = self._base_headers(call.deployment).copy()
        for name, value in call.headers:
            headers[name] = value
        headers["x-client-request-id"] = call.attempt_id
        address = provider.base_url + call.operation.path
        if call.query:
            address = f"{address}?{call.query}"
        url = self._urls.get(address)
        if url is None:
            url = URL(address, encoded=True)
            if not call.query:
                self._urls[address] = url
        body = _Pieces(call.body)
        try:
            with _translated(f"no answer from the model provider within {first_byte_s:g} s"):
                async with asyncio.timeout(first_byte_s):
                    response = await self._session.post(
                        url,
                        data=body,
                        headers=headers,
                        allow_redirects=False,
                        timeout=_timeouts(provider.connect_timeout_s, provider.total_timeout_s, silence_s),
                    )
        except asyncio.CancelledError:
            if body.begun:
                raise
            raise Unsent from None
        return _HttpAnswer(response)

    def _base_headers(self, deployment: Deployment) -> CIMultiDict[str]:
        provider = deployment.provider
        headers = self._headers.get(provider.name)
        if headers is None:
            headers = self._headers[provider.name] = _auth_headers(provider, self._credentials)
        return headers


@functools.lru_cache(maxsize=256)
def _timeouts(connect_s: float, total_s: float, silence_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=total_s, sock_connect=connect_s, sock_read=silence_s)


def _auth_headers(provider: Provider, credentials: Mapping[str, str]) -> CIMultiDict[str]:
    headers = CIMultiDict(
        {
            "User-Agent": f"tollhouse/{__version__}",
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        }
    )
    secret = credentials.get(provider.credential, "")
    if provider.wire is Wire.ANTHROPIC:
        headers["anthropic-version"] = ANTHROPIC_VERSION
        if secret:
            headers["x-api-key"] = secret
    elif secret:
        headers["Authorization"] = f"Bearer {secret}"
    return headers


class _HttpAnswer:
    """`ports.UpstreamAnswer` over one aiohttp response."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers  # case-insensitive: lower-case look-ups work

    async def read(self, limit: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in self.chunks():
            size += len(part)
            if size > limit:
                raise UpstreamMalformed(f"the model provider's answer is larger than {limit} bytes")
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def chunks(self) -> AsyncIterator[bytes]:
        """May be abandoned and called again: it goes on where the last one stopped."""
        content = self._response.content
        with _translated("the model provider fell silent in the middle of its answer"):
            while True:
                data = await content.readany()
                if not data:
                    return
                yield data

    async def close(self) -> None:
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


@contextmanager
def _translated(on_timeout: str) -> Iterator[None]:
    """Turn aiohttp's exceptions into ours: no foreign exception leaves this module."""
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as e:
        raise UpstreamUnreachable(billed=False) from e
    except TimeoutError as e:  # first byte, or aiohttp's SocketTimeoutError between bytes
        raise UpstreamTimeout(on_timeout, billed=None) from e
    except aiohttp.InvalidURL as e:
        raise UpstreamError("the deployment's base URL is not valid", billed=False, retryable=True) from e
    except aiohttp.ClientPayloadError as e:
        raise UpstreamLost("the model provider cut the connection in the middle of its answer") from e
    except (aiohttp.ClientResponseError, aiohttp.http_exceptions.HttpProcessingError) as e:
        raise UpstreamMalformed("the model provider's answer is not valid HTTP", billed=None) from e
    except (aiohttp.ClientError, OSError) as e:
        raise UpstreamLost() from e


class Upstreams:
    """`ports.Upstream` for all deployments: native wires over HTTP, everything else through the bridge.

    The one place where an HTTP error answer becomes an `UpstreamError`.
    """

    def __init__(self, http: Upstream, bridge: Upstream | None) -> None:
        self._http = http
        self._bridge = bridge

    async def open(self, call: UpstreamCall) -> UpstreamAnswer:
        if call.deployment.native(call.operation):
            answer = await self._http.open(call)
        elif self._bridge is not None:
            answer = await self._bridge.open(call)
        else:
            raise UpstreamError("this deployment needs the litellm bridge, which is not loaded", billed=False)
        if 200 <= answer.status < 300:
            return answer
        try:
            body = await answer.read(ERROR_BODY_BYTES_MAX)
        except UpstreamError:
            body = b""  # the status alone then decides
        finally:
            await answer.close()
        raise classify(answer.status, answer.headers, body)
