"""Which connection carries a call: kept ones if they are young and whole, else a new one to a working address."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.errors import UpstreamLost, UpstreamUnreachable
from gateway.upstream.wire import WireAnswer
from gateway.upstream.wire_pool import PLAIN_KEEPALIVE_S, TLS_KEEPALIVE_S, Origin, Pool
from gateway.upstream.wire_protocol import Connection
from tests.upstream.wire_server import LIMITS, Peer, RawServer, calling, on_both_loops

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


async def end(call: asyncio.Task[WireAnswer], peer: Peer, said: bytes = OK) -> None:
    """The provider says it, the client reads it and gives the connection back."""
    await peer.say(said)
    answer = await call
    assert await answer.read(10) == b"hi"
    await answer.close()


@on_both_loops
async def test_the_connection_used_last_is_used_again() -> None:
    async with calling() as called:
        (one, first), (two, second) = await called.asked(), await called.asked()
        await end(two, second)
        await end(one, first)
        for _ in range(3):
            call = called.post()
            await first.request()
            await end(call, first)
        assert called.server.accepted == 2


@on_both_loops
async def test_a_connection_whose_answer_was_not_whole_or_that_says_close_is_not_used_again() -> None:
    for said in (
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi",
    ):
        async with calling() as called:
            call, peer = await called.asked()
            await end(call, peer, said)
            await peer.gone()
            call, peer = await called.asked()
            await end(call, peer)
            assert called.server.accepted == 2


@on_both_loops
async def test_a_connection_that_the_provider_closed_is_never_handed_out() -> None:
    for hang_up in ("finish", "reset"):
        for rounds in range(4):  # of the loop between the provider's close and the next call: also none
            async with calling() as called:
                call, peer = await called.asked()
                await end(call, peer)
                getattr(peer, hang_up)()
                await asyncio.sleep(0)  # the provider's transport closes
                for _ in range(rounds):
                    await asyncio.sleep(0)
                call, peer = await called.asked()
                await end(call, peer)
                assert called.server.accepted == 2


@on_both_loops
async def test_bytes_that_nobody_asked_for_end_an_idle_connection() -> None:
    async with calling() as called:
        call, peer = await called.asked()
        await end(call, peer)
        await peer.say(OK)
        await peer.gone()
        call, peer = await called.asked()
        await end(call, peer)


@on_both_loops
async def test_an_answer_before_the_request_is_none() -> None:
    async with RawServer() as server:
        pool = Pool(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        await pool.connect(server.origin, 1)
        peer = await server.peer()
        await peer.say(OK)
        await peer.gone()
        await pool.stop()


@on_both_loops
async def test_a_connection_is_not_given_to_another_while_someone_waits_for_its_answer() -> None:
    async with RawServer() as server:
        pool = Pool(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        connection = await pool.connect(server.origin, 1)
        asking = asyncio.ensure_future(connection.send(b"x", (), LIMITS))
        peer = await server.peer()
        await peer.read(1)
        await peer.say(OK[:-2])
        await asking
        reading = asyncio.ensure_future(connection.more())
        await asyncio.sleep(0)
        connection.data_received(OK[-2:])  # the reader has not run yet
        pool.give(server.origin, connection)
        assert pool.take(server.origin) is None
        assert await reading == b"hi"
        await pool.stop()


@on_both_loops
async def test_a_kept_connection_that_dies_before_it_answers_is_a_lost_answer_and_is_not_asked_again() -> (
    None
):
    async with calling() as called:
        call, peer = await called.asked()
        await end(call, peer)
        call = called.post()
        await peer.request()
        peer.finish()
        with pytest.raises(UpstreamLost) as error:
            await call
        assert (error.value.billed, called.server.accepted) == (None, 1)


@on_both_loops
async def test_an_idle_connection_is_closed_when_it_is_old_and_not_handed_out_before() -> None:
    async with RawServer() as server:
        assert (PLAIN_KEEPALIVE_S, TLS_KEEPALIVE_S) == (4, 15)
        pool = Pool(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), plain_keepalive_s=0.3)
        kept = []
        for _ in range(3):
            connection = await pool.connect(server.origin, 1)
            asking = asyncio.ensure_future(connection.send(b"x", (), LIMITS))
            peer = await server.peer()
            await peer.read(1)
            await peer.say(OK)
            await asking
            assert await connection.more() == b"hi"
            kept.append((connection, peer))
        for connection, _ in kept:
            pool.give(server.origin, connection)
        kept[2][0].idle_since_s -= 0.3  # as if given back so long ago
        assert pool.take(server.origin) is kept[1][0]
        await kept[2][1].gone()
        await kept[0][1].gone()  # by the timer
        await pool.stop()


@on_both_loops
async def test_the_next_address_is_tried_when_one_refuses() -> None:
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.9", "127.0.0.1"]

    async with RawServer() as server:
        pool = Pool(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), resolve)
        origin = replace(server.origin, host="provider.test")
        await asyncio.gather(pool.connect(origin, 1), pool.connect(origin, 1))
        assert asked == ["provider.test"]  # known for a minute
        moved = replace(origin, port=1)
        for _ in range(2):
            with pytest.raises(UpstreamUnreachable):
                await pool.connect(moved, 1)
        assert asked == ["provider.test"] * 3  # asked again, because no address worked
        await pool.stop()


@on_both_loops
async def test_a_refused_connection_or_an_unknown_name_proves_that_nothing_was_sent() -> None:
    async with calling() as called:
        for host in ("127.0.0.1", "nobody.invalid", "not..a..name"):
            with pytest.raises(UpstreamUnreachable) as error:
                await called.client.post(Origin(host, 1, False), b"x", (), LIMITS)
            assert error.value.billed is False


@on_both_loops
async def test_nothing_waits_for_more_to_send() -> None:
    async with RawServer() as server:
        loop = asyncio.get_running_loop()
        gone = asyncio.Event()
        transport, connection = await loop.create_connection(
            lambda: Connection(loop, lambda _: gone.set()), server.origin.host, server.origin.port
        )
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as same:
            assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
        connection.abort()
        await gone.wait()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and certificate of "localhost", valid for a day, in one file."""
    openssl = shutil.which("openssl")
    assert openssl is not None, "the tests of TLS make a certificate with the openssl command"
    path = tmp_path_factory.mktemp("tls") / "localhost.pem"
    made = [
        openssl,
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "1",
    ]
    named = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*made, *named, "-keyout", f"{path}.key", "-out", path], check=True, capture_output=True)
    return path


class Tls:
    """Both contexts, and the names that clients asked for."""

    def __init__(self, certificate: Path) -> None:
        self.names: list[str | None] = []
        self.server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self.server.load_cert_chain(certificate, f"{certificate}.key")
        self.server.sni_callback = lambda _socket, name, _context: self.names.append(name)
        self.client = ssl.create_default_context(cafile=str(certificate))


@on_both_loops
async def test_tls(certificate: Path) -> None:
    tls = Tls(certificate)
    async with calling(RawServer(tls.server, "localhost"), tls.client) as called:
        call, peer = await called.asked()
        await end(call, peer)
        body = b"x" * (4 << 20)
        call = called.post(body=(body,))  # on the same connection
        assert (await peer.request())[1] == body
        await end(call, peer)
        call = called.post()
        await peer.request()
        await peer.say(OK[:-1])
        answer = await call
        peer.reset()
        with pytest.raises(UpstreamLost):
            await answer.read(10)
        await answer.close()
        assert (called.server.accepted, tls.names) == (1, ["localhost"])


@on_both_loops
async def test_a_certificate_of_another_or_of_nobody_known_is_refused_before_anything_is_sent(
    certificate: Path,
) -> None:
    tls = Tls(certificate)
    for host, context in (("127.0.0.1", tls.client), ("localhost", ssl.create_default_context())):
        server = RawServer(tls.server, "localhost")
        async with calling(server, context) as called:
            with pytest.raises(UpstreamUnreachable) as error:
                await called.client.post(replace(server.origin, host=host), b"x", (), LIMITS)
            assert isinstance(error.value.__cause__, ssl.SSLCertVerificationError)
            assert error.value.billed is False


@on_both_loops
async def test_a_handshake_that_is_given_up_leaves_no_connection(certificate: Path) -> None:
    async with calling() as called:  # a server that never answers the handshake
        origin = replace(called.server.origin, tls=True)
        with pytest.raises(UpstreamUnreachable):
            await called.client.post(origin, b"x", (), replace(LIMITS, connect_s=0.1))
        await (await called.server.peer()).gone()
