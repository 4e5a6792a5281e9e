"""Providers that speak OpenAI's or Anthropic's own protocol over HTTP.

Everything of a request's head that does not change from call to call is rendered once per provider, operation and
replica; the rest is in `wire.py`.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from gateway import __version__
from gateway.core.catalog import Operation, Provider, Wire
from gateway.core.errors import UpstreamError
from gateway.ports import Upstream, UpstreamAnswer, UpstreamCall
from gateway.upstream.errors import classify
from gateway.upstream.wire import WireClient
from gateway.upstream.wire_pool import Origin
from gateway.upstream.wire_protocol import TimeLimits

#: Sent when the client named no version: the one that all Anthropic-compatible servers know.
ANTHROPIC_VERSION = "2023-06-01"
ERROR_BODY_BYTES_MAX = 64 << 10
WRITE_TIMEOUT_S = 30.0
#: Replicas come and go; what is dropped is rendered again.
_TARGETS_MAX = 4_096

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NOT_IN_VALUES = re.compile(r"[\r\n\0]")
_NOT_IN_TARGETS = re.compile(r"[^!-~]")
#: They decide where a request ends and to whom it goes: no call may set them.
_OURS = frozenset({"host", "content-length", "transfer-encoding", "connection", "x-client-request-id"})


@dataclass(frozen=True, slots=True)
class _Target:
    """One operation at one provider: where to send, and the lines of each call's head."""

    provider: Provider
    origin: Origin
    path: bytes  # "POST /v1/chat/completions"
    lines: Mapping[str, bytes]
    head: bytes  # all of that up to the last line that is the same for each call
    limits: TimeLimits
    slow_limits: TimeLimits


class HttpUpstream:
    """`ports.Upstream` for the wires openai, anthropic and demo.

    `credentials` maps a credential's name to its secret; only this object and the litellm adapter hold them.
    """

    def __init__(self, credentials: Mapping[str, str], *, tls: ssl.SSLContext | None = None) -> None:
        self._credentials = credentials
        self._client = WireClient(tls)
        #: by deployment, whose time limits may be its own
        self._targets: dict[tuple[str, Operation, str], _Target] = {}

    async def start(self) -> None:
        self._client.start()

    async def stop(self) -> None:
        await self._client.stop()

    async def open(self, call: UpstreamCall) -> UpstreamAnswer:
        """Send and wait for the headers. Raises `UpstreamUnreachable` (proof that nothing was sent),
        `UpstreamLost`, `UpstreamTimeout` or `UpstreamMalformed` (the answer is lost, it may be billed); cancelled,
        `Unsent` or a plain CancelledError."""
        provider = call.deployment.provider
        key = (call.deployment.name, call.operation, call.address)
        target = self._targets.get(key)
        if target is None or target.provider is not provider:  # a reload may give a name another address
            if len(self._targets) >= _TARGETS_MAX:
                self._targets.clear()
            target = _target(provider, call.operation, self._credentials, call.address)
            self._targets[key] = target
        limits = target.slow_limits if call.slow else target.limits
        return await self._client.post(target.origin, _head(target, call), call.body, limits)

    def forget(self, address: str) -> None:
        """A replica is gone: close what is kept for it. Calls that are under way go on."""
        for key in [key for key in self._targets if key[2] == address]:
            self._client.forget(self._targets.pop(key).origin)


def _head(target: _Target, call: UpstreamCall) -> bytes:
    head = _with_own(target, call) if call.headers or call.query else target.head
    return b"%sx-client-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
        head,
        call.attempt_id.encode(),
        sum(map(len, call.body)),
    )


def _with_own(target: _Target, call: UpstreamCall) -> bytes:
    """The lines of a head with what this one call has of its own."""
    own = {name.lower(): _line(name, value) for name, value in call.headers}
    if not own.keys().isdisjoint(_OURS):
        raise _unsendable()
    if call.query or not own.keys().isdisjoint(target.lines):
        path = target.path + (b"?" + _as_target(call.query).encode() if call.query else b"")
        kept = (line for name, line in target.lines.items() if name not in own)
        head = b"".join((path, b" HTTP/1.1\r\n", *kept))
    else:
        head = target.head
    return head + b"".join(own.values())


def _line(name: str, value: str) -> bytes:
    if _NAME.fullmatch(name) is None or _NOT_IN_VALUES.search(value) is not None:
        raise _unsendable()
    return f"{name}: {value}\r\n".encode(errors="surrogateescape")


def _unsendable() -> UpstreamError:
    return UpstreamError("a header cannot be sent to the model provider", billed=False, retryable=False)


def _target(
    provider: Provider, operation: Operation, credentials: Mapping[str, str], address: str
) -> _Target:
    origin, host, base = _place(address or provider.base_url)
    path = f"POST {base}{operation.path}".encode()
    lines = {"host": _line("host", host)}
    for name, value in _auth_headers(provider, credentials).items():
        lines[name] = _line(name, value)
    first_byte_s, slow_s = provider.first_byte_timeout_s, provider.slow_first_byte_timeout_s

    def limits(first_byte_s: float, silence_s: float) -> TimeLimits:
        silence_s = min(silence_s, provider.event_idle_timeout_s)
        return TimeLimits(
            provider.connect_timeout_s, WRITE_TIMEOUT_S, first_byte_s, silence_s, provider.total_timeout_s
        )

    return _Target(
        provider,
        origin,
        path,
        lines,
        b"".join((path, b" HTTP/1.1\r\n", *lines.values())),
        limits(first_byte_s, provider.idle_timeout_s),
        limits(slow_s, max(provider.idle_timeout_s, slow_s)),
    )


def _place(base_url: str) -> tuple[Origin, str, str]:
    """(where to connect, value of the host header, path without a slash at its end)."""
    try:
        parts = urlsplit(base_url)
        host, port, tls = parts.hostname or "", parts.port, parts.scheme == "https"
        if not host.isascii():
            host = host.encode("idna").decode()
    except ValueError as e:
        raise _bad_url() from e
    if not host or not (tls or parts.scheme == "http") or _NOT_IN_TARGETS.search(host):
        raise _bad_url()
    usual_port = 443 if tls else 80
    named = f"[{host}]" if ":" in host else host
    if port is not None and port != usual_port:
        named = f"{named}:{port}"
    return Origin(host, port or usual_port, tls), named, _as_target(parts.path.rstrip("/"))


def _as_target(text: str) -> str:
    """Percent-encode what may not stand in a request line; what is encoded already stays as it is."""
    return _NOT_IN_TARGETS.sub(lambda found: quote(found[0], errors="surrogateescape"), text)


def _bad_url() -> UpstreamError:
    return UpstreamError("the deployment's base URL is not valid", billed=False)


def _auth_headers(provider: Provider, credentials: Mapping[str, str]) -> dict[str, str]:
    headers = {
        "user-agent": f"tollhouse/{__version__}",
        "content-type": "application/json",
        "accept-encoding": "identity",
    }
    secret = credentials.get(provider.credential, "")
    if provider.wire is Wire.ANTHROPIC:
        headers["anthropic-version"] = ANTHROPIC_VERSION
        if secret:
            headers["x-api-key"] = secret
    elif secret:
        headers["authorization"] = f"Bearer {secret}"
    return headers


class Upstreams:
    """`ports.Upstream` for all deployments: native wires over HTTP, everything else through the bridge.

    The one place where an HTTP error answer becomes an `UpstreamError`. Providers echo the credentials that they were
    sent; `credentials` are taken out of their errors, whatever they look like.
    """

    def __init__(
        self, http: Upstream, bridge: Upstream | None, credentials: Mapping[str, str] | None = None
    ) -> None:
        self._credentials = {} if credentials is None else credentials
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
        for secret in self._credentials.values():
            body = body.replace(secret.encode(), b"[masked]") if secret else body
        raise classify(answer.status, answer.headers, body)
