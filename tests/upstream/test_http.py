"""What a call looks like on the wire, and how an HTTP error of a provider is raised."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from gateway import __version__
from gateway.core.catalog import Deployment, Operation, Provider, Wire
from gateway.core.errors import UpstreamError, UpstreamOverloaded, UpstreamUnreachable
from gateway.ports import UpstreamAnswer, UpstreamCall
from gateway.upstream.http import HttpUpstream, Upstreams
from tests.upstream.wire_server import Peer, RawServer, on_both_loops

AGENT = f"user-agent: tollhouse/{__version__}".encode()
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def provider(base_url: str, wire: Wire = Wire.OPENAI) -> Provider:
    return Provider("p", wire, base_url, "cred")


def call(
    at: Provider,
    operation: Operation = Operation.CHAT,
    headers: tuple[tuple[str, str], ...] = (),
    query: str = "",
    slow: bool = False,
    body: tuple[bytes | memoryview, ...] = (b'{"a":', memoryview(b"1}")),
) -> UpstreamCall:
    deployment = Deployment("d", at, "m", "m", "p/m")
    return UpstreamCall("att_1", deployment, operation, body, headers, stream=False, slow=slow, query=query)


class World:
    """`async with World() as w:` has a server at `w.url` and an upstream that is started."""

    def __init__(self, secret: str = "sk-1") -> None:
        self.upstream = HttpUpstream({"cred": secret})
        self.server = RawServer()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.origin.port}"

    async def __aenter__(self) -> World:
        await self.server.__aenter__()
        await self.upstream.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.upstream.stop()
        await self.server.__aexit__(None, None, None)

    async def sent(self, said: UpstreamCall) -> tuple[list[bytes], bytes]:
        """The lines of the head and the body, as the provider gets them on a connection of its own."""
        opening = asyncio.ensure_future(self.upstream.open(said))
        peer = await self.server.peer()
        head, body = await peer.request()
        await peer.say(OK.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n"))
        await (await opening).close()
        return head.removesuffix(b"\r\n\r\n").split(b"\r\n"), body


@on_both_loops
async def test_a_call_of_each_wire() -> None:
    async with World() as w:
        host = w.url.removeprefix("http://").encode()
        assert await w.sent(call(provider(f"{w.url}/v1"))) == (
            [
                b"POST /v1/chat/completions HTTP/1.1",
                b"host: " + host,
                AGENT,
                b"content-type: application/json",
                b"accept-encoding: identity",
                b"authorization: Bearer sk-1",
                b"x-client-request-id: att_1",
                b"content-length: 7",
            ],
            b'{"a":1}',
        )
        beta = (("anthropic-beta", "a,b"),)
        assert (await w.sent(call(provider(f"{w.url}/v1", Wire.ANTHROPIC), Operation.MESSAGES, beta)))[0] == [
            b"POST /v1/messages HTTP/1.1",
            b"host: " + host,
            AGENT,
            b"content-type: application/json",
            b"accept-encoding: identity",
            b"anthropic-version: 2023-06-01",
            b"x-api-key: sk-1",
            b"anthropic-beta: a,b",
            b"x-client-request-id: att_1",
            b"content-length: 7",
        ]


@on_both_loops
async def test_a_replica_is_called_at_its_own_address_until_it_is_gone() -> None:
    async with World() as w:
        at = provider("")
        replica = structs.replace(call(at), address=f"{w.url}/gpu/v1")
        with pytest.raises(UpstreamError, match="base URL is not valid"):
            await w.upstream.open(call(at))  # the provider has no address of its own

        async def served(peer: Peer | None = None) -> Peer:
            opening = asyncio.ensure_future(w.upstream.open(replica))
            peer = peer or await w.server.peer()
            head, _ = await peer.request()
            assert head.startswith(b"POST /gpu/v1/chat/completions HTTP/1.1\r\n")
            await peer.say(OK)
            answer = await opening
            assert await answer.read(10) == b"ok"
            await answer.close()
            return peer

        peer = await served()
        assert (await served(peer), w.server.accepted) == (peer, 1)
        w.upstream.forget("http://127.0.0.1:1/v1")  # never called
        w.upstream.forget(replica.address)
        await peer.gone()
        assert (await served() is peer, w.server.accepted) == (False, 2)


@on_both_loops
async def test_a_call_to_a_replica_that_is_forgotten_meanwhile_goes_on_and_its_connection_is_not_kept() -> (
    None
):
    async with World() as w:
        replica = structs.replace(call(provider("")), address=f"{w.url}/v1")
        opening = asyncio.ensure_future(w.upstream.open(replica))
        peer = await w.server.peer()
        await peer.request()
        w.upstream.forget(replica.address)
        await peer.say(OK)
        answer = await opening
        assert await answer.read(10) == b"ok"
        await answer.close()
        await peer.gone()


@on_both_loops
async def test_a_header_of_the_client_stands_in_for_ours_of_the_same_name() -> None:
    async with World() as w:
        at = provider(f"{w.url}/v1", Wire.ANTHROPIC)
        lines, _ = await w.sent(call(at, Operation.MESSAGES, (("Anthropic-Version", "2026-01-01"),)))
        assert [line for line in lines if b"ersion" in line] == [b"Anthropic-Version: 2026-01-01"]
        lines, _ = await w.sent(call(at, Operation.MESSAGES))  # and only in that call
        assert [line for line in lines if b"ersion" in line] == [b"anthropic-version: 2023-06-01"]


@on_both_loops
async def test_a_query_stays_on_its_line() -> None:
    async with World() as w:
        for base, query, line in (
            ("/v1", "beta=true&x=%20y", b"POST /v1/chat/completions?beta=true&x=%20y HTTP/1.1"),
            ("/v1", "x=1 HTTP/1.1\r\nhost: evil", b"POST /v1/chat/completions?x=1%20HTTP/1.1%0D%0Ahost:%20evil HTTP/1.1"),
            ("/\xe4/", "", b"POST /%C3%A4/chat/completions HTTP/1.1"),
            ("", "", b"POST /chat/completions HTTP/1.1"),
        ):  # fmt: skip
            lines, _ = await w.sent(call(provider(w.url + base), query=query))
            assert (lines[0], len(lines)) == (line, 8)


@on_both_loops
async def test_a_header_that_would_change_the_request_is_not_sent() -> None:
    async with World() as w:
        for name, value in (
            ("x", "a\r\nhost: evil"),
            ("x", "a\nb"),
            ("x", "a\0b"),
            ("x\r\ny", "a"),
            ("x y", "a"),
            ("", "a"),
            ("Content-Length", "0"),
            ("transfer-encoding", "chunked"),
            ("HOST", "evil"),
        ):
            with pytest.raises(UpstreamError) as error:
                await w.upstream.open(call(provider(f"{w.url}/v1"), headers=((name, value),)))
            assert (error.value.billed, error.value.retryable) == (False, False)
        assert w.server.accepted == 0
    async with World(secret="sk-1\n") as w:
        with pytest.raises(UpstreamError) as error:
            await w.upstream.open(call(provider(f"{w.url}/v1")))
        assert (error.value.billed, "sk-1" in error.value.message) == (False, False)


@on_both_loops
async def test_a_base_url_that_leads_nowhere_proves_that_nothing_was_sent() -> None:
    async with World() as w:
        for base_url in (
            "",
            "ftp://127.0.0.1/v1",
            "http://",
            "http://127.0.0.1:x/v1",
            "http://[::1/v1",
            "http://a b/",
        ):
            with pytest.raises(UpstreamError, match="the deployment's base URL is not valid") as error:
                await w.upstream.open(call(provider(base_url)))
            assert error.value.billed is False
        with pytest.raises(UpstreamUnreachable):
            await w.upstream.open(call(provider("http://127.0.0.1:1/v1")))


@on_both_loops
async def test_a_provider_that_moved_is_followed() -> None:
    async with World() as one, World() as two:
        at = provider(f"{one.url}/v1")
        await one.sent(call(at))
        opening = asyncio.ensure_future(one.upstream.open(call(replace(at, base_url=f"{two.url}/v1"))))
        peer = await two.server.peer()
        await peer.request()
        await peer.say(OK)
        await (await opening).close()


@on_both_loops
async def test_slow_calls_may_take_longer_to_begin_and_to_go_on() -> None:
    async with World() as w:
        at = replace(
            provider(f"{w.url}/v1"),
            first_byte_timeout_s=0.05,
            slow_first_byte_timeout_s=0.5,
            idle_timeout_s=0.05,
        )
        for slow, ends in ((False, "no answer from the model provider within 0.05 s"), (True, "ok")):
            opening = asyncio.ensure_future(w.upstream.open(call(at, slow=slow)))
            peer = await w.server.peer()
            await peer.request()
            speaking = asyncio.ensure_future(_slowly(peer.say, OK[:-2], OK[-2:]))
            assert await _end(opening) == ends
            speaking.cancel()


async def _slowly(say: object, *pieces: bytes) -> None:
    assert callable(say)
    for piece in pieces:
        await asyncio.sleep(0.15)
        await say(piece)


async def _end(opening: asyncio.Future[UpstreamAnswer]) -> str:
    try:
        answer = await opening
        return (await answer.read(100)).decode()
    except UpstreamError as e:
        return e.message


@on_both_loops
async def test_an_http_error_is_raised_classified_and_its_connection_kept() -> None:
    async with World() as w:
        upstreams = Upstreams(w.upstream, None)
        at = provider(f"{w.url}/v1")
        opening = asyncio.ensure_future(upstreams.open(call(at)))
        peer = await w.server.peer()
        await peer.request()
        body = b'{"error":{"message":"slow down"}}'
        await peer.say(
            b"HTTP/1.1 429 X\r\nRetry-After: 7\r\nx-request-id: up-1\r\nContent-Length: %d\r\n\r\n"
            % len(body),
            body,
        )
        with pytest.raises(UpstreamOverloaded) as overloaded:
            await opening
        e = overloaded.value
        assert (e.billed, e.retry_after_s, e.upstream_status, e.upstream_request_id) == (
            False,
            7,
            429,
            "up-1",
        )
        opening = asyncio.ensure_future(upstreams.open(call(at)))
        await peer.request()
        await peer.say(b"HTTP/1.1 500 X\r\nContent-Length: 9\r\n\r\n{")
        peer.finish()  # the status alone then decides
        with pytest.raises(UpstreamError) as error:
            await opening
        assert (error.value.billed, error.value.upstream_status, w.server.accepted) == (None, 500, 1)
        for status in (b"302", b"307"):  # an answer like any other: not followed
            opening = asyncio.ensure_future(upstreams.open(call(at)))
            peer = await w.server.peer()
            await peer.request()
            await peer.say(
                b"HTTP/1.1 %s X\r\nLocation: /v2\r\nConnection: close\r\nContent-Length: 0\r\n\r\n" % status
            )
            with pytest.raises(UpstreamError) as error:
                await opening
            assert error.value.upstream_status == int(status)
        assert w.server.accepted == 3
