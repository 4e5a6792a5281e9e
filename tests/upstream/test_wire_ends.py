"""Time-outs, slow readers on either side, and calls that are given up: nothing waits forever, nothing leaks."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import pytest

from gateway.core.errors import UpstreamError, UpstreamLost, UpstreamTimeout, UpstreamUnreachable
from gateway.ports import Unsent
from gateway.upstream.wire import WireClient
from gateway.upstream.wire_pool import Origin
from gateway.upstream.wire_protocol import BUFFERED_BYTES_MAX
from tests.upstream.wire_server import LIMITS, Peer, calling, on_both_loops

HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
SILENT = "the model provider fell silent in the middle of its answer"


def said(error: UpstreamError) -> tuple[type[object], str, bool | None]:
    return type(error), error.message, error.billed


@on_both_loops
async def test_no_head_in_time_even_if_bytes_keep_coming() -> None:
    for first in (b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 200 OK\r\nX-Slow: "):
        async with calling() as called:
            call, peer = await called.asked(replace(LIMITS, first_byte_s=0.1))
            await peer.say(first)
            talking = asyncio.ensure_future(_talk(peer)) if first.endswith(b": ") else None
            with pytest.raises(UpstreamTimeout) as error:
                await call
            assert said(error.value) == (
                UpstreamTimeout,
                "no answer from the model provider within 0.1 s",
                None,
            )
            await peer.gone()
            if talking is not None:
                talking.cancel()


@on_both_loops
async def test_silence_between_bytes_is_timed_anew_after_each() -> None:
    async with calling() as called:
        call, peer = await called.asked(replace(LIMITS, first_byte_s=1, silence_s=0.15))
        await peer.say(HEAD % 9)
        answer = await call
        chunks = answer.chunks()
        for part in (b"a", b"b", b"c", b"d"):  # longer than 0.15 s in all
            await peer.say(part)
            assert await anext(chunks) == part
            await asyncio.sleep(0.05)
        await peer.say(b"last")
        with pytest.raises(UpstreamTimeout) as error:
            async with asyncio.timeout(0.6):  # before the time that was set for the first byte
                await answer.read(100)
        assert said(error.value) == (UpstreamTimeout, SILENT, None)
        await peer.gone()
        await answer.close()


@on_both_loops
async def test_what_came_before_the_silence_is_not_lost() -> None:
    async with calling() as called:
        call, peer = await called.asked(replace(LIMITS, silence_s=0.05))
        await peer.say(HEAD % 9 + b"half")
        answer = await call
        await peer.gone()
        chunks = answer.chunks()
        assert await anext(chunks) == b"half"
        with pytest.raises(UpstreamTimeout, match=SILENT):
            await anext(chunks)
        await answer.close()


@on_both_loops
async def test_the_total_time_counts_whatever_comes() -> None:
    async with calling() as called:
        call, peer = await called.asked(replace(LIMITS, total_s=0.15))
        await peer.say(HEAD % 1000)
        answer = await call
        talking = asyncio.ensure_future(_talk(peer))
        with pytest.raises(UpstreamTimeout) as error:
            await answer.read(1000)
        talking.cancel()
        assert said(error.value) == (
            UpstreamTimeout, "the model provider's answer took longer than 0.15 s", None,
        )  # fmt: skip
        await answer.close()


async def _talk(peer: Peer) -> None:
    while True:
        await peer.say(b".")
        await asyncio.sleep(0.01)


@on_both_loops
async def test_an_earlier_timer_does_not_end_a_later_call() -> None:
    async with calling() as called:
        call, peer = await called.asked(replace(LIMITS, first_byte_s=0.1))
        await peer.say(HEAD % 2 + b"hi")
        await (await call).close()
        call = called.post(
            replace(LIMITS, first_byte_s=1)
        )  # on the same connection, whose timer is still set
        await peer.request()
        await asyncio.sleep(0.2)
        await peer.say(HEAD % 2 + b"hi")
        assert await (await call).read(10) == b"hi"
        call = called.post(replace(LIMITS, first_byte_s=0.1))  # where nothing was given back: a new one
        await (await called.server.peer()).request()
        with pytest.raises(UpstreamTimeout):
            await call


@on_both_loops
async def test_a_provider_that_does_not_read_the_request() -> None:
    async with calling() as called:
        big = (b"x" * 100, memoryview(b"y" * (8 << 20)), b"z" * (8 << 20))
        call = called.post(replace(LIMITS, write_s=0.1), big)
        await called.server.peer()
        with pytest.raises(UpstreamTimeout) as error:
            await call
        assert said(error.value) == (
            UpstreamTimeout, "the model provider did not take the request within 0.1 s", None,
        )  # fmt: skip


@on_both_loops
async def test_a_large_body_arrives_whole_and_in_order() -> None:
    async with calling() as called:
        body = (
            b'{"model":"',
            b"m",
            b'","x":"',
            memoryview(bytes(range(256)) * 20_000),
            b"b" * (3 << 20),
            b'"}',
        )
        call = called.post(body=body)
        peer = await called.server.peer()
        head, received = await peer.request()
        assert head == b"POST /v1/x HTTP/1.1\r\nhost: test\r\ncontent-length: %d\r\n\r\n" % sum(
            map(len, body)
        )
        assert received == b"".join(body)
        await peer.say(HEAD % 2 + b"ok")
        assert await (await call).read(10) == b"ok"


@on_both_loops
async def test_a_refusal_before_the_request_is_read_is_an_answer_and_ends_the_connection() -> None:
    async with calling() as called:
        call = called.post(body=(b"x" * (16 << 20),))
        peer = await called.server.peer()
        await peer.say(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
        answer = await call
        assert (answer.status, await answer.read(10)) == (413, b"big")
        await answer.close()
        await peer.gone()
        call, peer = await called.asked()  # on another one
        await peer.say(HEAD % 2 + b"hi")
        assert await (await call).read(10) == b"hi"


@on_both_loops
async def test_an_answer_that_goes_on_does_not_excuse_a_request_that_is_not_read() -> None:
    async with calling() as called:
        call = called.post(replace(LIMITS, write_s=0.2), (b"x" * (16 << 20),))
        peer = await called.server.peer()
        await peer.say(HEAD % 1000)
        talking = asyncio.ensure_future(_talk(peer))
        answer = await call
        with pytest.raises(UpstreamTimeout, match="did not take the request within"):
            await answer.read(1000)
        talking.cancel()
        await answer.close()


@on_both_loops
async def test_an_answer_that_begins_early_does_not_stop_the_request() -> None:
    async with calling() as called:
        body = b"x" * (16 << 20)
        call = called.post(body=(body,))
        peer = await called.server.peer()
        await peer.say(HEAD % 5 + b"he")
        assert (await peer.request())[1] == body
        await peer.say(b"llo")
        assert await (await call).read(10) == b"hello"


@on_both_loops
async def test_a_slow_reader_holds_the_provider_back_and_is_no_silence() -> None:
    async with calling() as called:
        size = 32 << 20
        call, peer = await called.asked(replace(LIMITS, silence_s=0.1))
        speaking = asyncio.ensure_future(peer.say(HEAD % size, *[b"x" * (1 << 20)] * 32))
        answer = await call
        await asyncio.sleep(0.3)
        assert not speaking.done()
        pieces = [len(piece) async for piece in answer.chunks()]
        assert sum(pieces) == size
        assert pieces[0] > BUFFERED_BYTES_MAX  # so it had paused ...
        assert max(pieces) <= BUFFERED_BYTES_MAX + (256 << 10)  # ... one read later at most
        await answer.close()
        await speaking


@on_both_loops
async def test_an_unread_answer_that_is_closed_ends_the_connection_at_once() -> None:
    async with calling() as called:
        call, peer = await called.asked()
        await peer.say(HEAD % 100 + b"half")
        answer = await call
        await answer.close()
        await answer.close()
        await peer.gone()
        with pytest.raises(RuntimeError):
            await answer.read(10)


@on_both_loops
async def test_a_call_that_is_given_up_ends_its_connection() -> None:
    async with calling() as called:
        call, peer = await called.asked()
        call.cancel()
        (error,) = await asyncio.gather(call, return_exceptions=True)
        assert type(error) is asyncio.CancelledError  # not Unsent: the provider has it
        await peer.gone()
        call = called.post(body=(b"x" * (16 << 20),))
        peer = await called.server.peer()
        await peer.read(1000)
        call.cancel()
        (error,) = await asyncio.gather(call, return_exceptions=True)
        assert type(error) is asyncio.CancelledError
        await peer.gone()


@on_both_loops
async def test_a_connection_that_cannot_be_made_in_time_proves_that_nothing_was_sent() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket.create_connection(
            full.getsockname()
        ):  # fills the backlog: the next waits for its SYN-ACK
            async with calling() as called:
                origin = Origin("127.0.0.1", full.getsockname()[1], False)
                with pytest.raises(UpstreamUnreachable) as error:
                    await called.client.post(origin, b"", (), replace(LIMITS, connect_s=0.1))
                assert error.value.billed is False
                call = asyncio.ensure_future(called.client.post(origin, b"", (), LIMITS))
                await asyncio.sleep(0.05)
                call.cancel()
                with pytest.raises(Unsent):
                    await call


@on_both_loops
async def test_stop_ends_calls_and_idle_connections_and_returns_when_they_are_gone() -> None:
    async with calling() as called:
        done, idle = await called.asked()
        await idle.say(HEAD % 2 + b"hi")
        answer = await done
        running, busy = await called.asked()
        await answer.close()
        await called.client.stop()
        with pytest.raises(UpstreamLost):
            await running
        await idle.gone()
        await busy.gone()
        with pytest.raises(RuntimeError):
            await called.client.post(called.server.origin, b"", (), LIMITS)


@on_both_loops
async def test_a_connection_that_is_made_after_stop_is_not_used() -> None:
    async with calling() as called:
        call = called.post()
        await asyncio.sleep(0)
        await called.client.stop()
        with pytest.raises(UpstreamUnreachable):
            await call
        await (await called.server.peer()).gone()


@on_both_loops
async def test_a_client_is_started_before_it_is_used() -> None:
    with pytest.raises(RuntimeError):
        await WireClient().post(Origin("127.0.0.1", 1, False), b"", (), LIMITS)
