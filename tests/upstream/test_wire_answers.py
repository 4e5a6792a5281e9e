"""What counts as an answer, byte by byte: its framing, its head, its coding, and everything that is none."""

from __future__ import annotations

import asyncio
import gzip
import zlib

import pytest

from gateway.core.errors import UpstreamError, UpstreamLost, UpstreamMalformed
from gateway.upstream.wire import INFLATED_BYTES_MAX, WireAnswer
from gateway.upstream.wire_protocol import HEAD_BYTES_MAX
from tests.upstream.wire_server import calling, on_both_loops

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
CUT = "the model provider cut the connection in the middle of its answer"

WHOLE = {
    "content-length": (OK + b"Content-Length: 5\r\n\r\nhello", 200, b"hello"),
    "empty": (OK + b"Content-Length: 0\r\n\r\n", 200, b""),
    "chunked": (CHUNKED + b"3\r\nhel\r\n2;ext=1\r\nlo\r\n0\r\n\r\n", 200, b"hello"),
    "trailers": (CHUNKED + b"5\r\nhello\r\n0\r\nX-Trailer: t\r\n\r\n", 200, b"hello"),
    "interim": (b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\nHTTP/1.1 103 Early\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nhi", 200, b"hi"),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
    "redirect": (b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 2\r\n\r\nno", 307, b"no"),
    "http/1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nhi", 200, b"hi"),
    "error": (b"HTTP/1.1 529 \r\nContent-Length: 4\r\n\r\nbusy", 529, b"busy"),
}  # fmt: skip


async def outcome(call: asyncio.Task[WireAnswer], limit: int = 1 << 20) -> tuple[int, bytes] | UpstreamError:
    """(status, body), or the error, wherever it was raised."""
    try:
        answer = await call
    except UpstreamError as e:
        return e
    try:
        return answer.status, await answer.read(limit)
    except UpstreamError as e:
        return e
    finally:
        await answer.close()


def said(error: object) -> tuple[type[object], str, bool | None]:
    assert isinstance(error, UpstreamError)
    return type(error), error.message, error.billed


@on_both_loops
async def test_an_answer_is_the_same_in_one_piece_and_byte_by_byte() -> None:
    for answer, status, body in WHOLE.values():
        async with calling() as called:
            call, peer = await called.asked()
            await peer.say(answer)
            assert await outcome(call) == (status, body)
        async with calling() as called:
            call, peer = await called.asked()
            spelling = asyncio.ensure_future(peer.spell(answer))
            assert await outcome(call) == (status, body)
            await spelling


@on_both_loops
async def test_an_answer_that_ends_before_its_framing_says_so_is_lost() -> None:
    for name in ("content-length", "chunked", "trailers", "interim"):
        answer = WHOLE[name][0]
        final = (
            answer.rindex(b"HTTP/1.1 200") + answer[answer.rindex(b"HTTP/1.1 200") :].index(b"\r\n\r\n") + 4
        )
        for end in (0, 1, final - 1, final, final + 1, len(answer) - 1):
            for hang_up in ("finish", "reset"):
                async with calling() as called:
                    call, peer = await called.asked()
                    await peer.say(answer[:end])
                    if end >= final:
                        await call  # else a reset may overtake the bytes before it
                    getattr(peer, hang_up)()
                    message = (
                        CUT
                        if end >= final
                        else "The model provider closed the connection before it answered."
                    )
                    assert said(await outcome(call)) == (UpstreamLost, message, None), (name, end, hang_up)


@on_both_loops
async def test_an_answer_without_framing_ends_with_the_connection_but_not_with_a_reset() -> None:
    async with calling() as called:
        call, peer = await called.asked()
        await peer.say(OK + b"\r\nhel", b"lo")
        peer.finish()
        assert await outcome(call) == (200, b"hello")
        call, peer = await called.asked()  # on another connection
        await peer.say(OK + b"\r\nhello")
        answer = await call
        assert await answer.chunks().__anext__() == b"hello"
        peer.reset()
        with pytest.raises(UpstreamLost, match=CUT):
            await answer.read(100)
        await answer.close()


MALFORMED = {
    "garbage": b"\x15\x03\x03\x00\x02\x02\x50",
    "html": b"<html><body>proxy error</body></html>",
    "http/2": b"HTTP/2 200\r\n\r\n",
    "status": b"HTTP/1.1 20x OK\r\n\r\n",
    "status below all": b"HTTP/1.1 099 X\r\nContent-Length: 2\r\n\r\nhi",
    "switching to nothing": b"HTTP/1.1 101 X\r\n\r\n" + OK + b"Content-Length: 2\r\n\r\nhi",
    "switching": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    "both framings": CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n") + b"5\r\nhello\r\n0\r\n\r\n",
    "both framings, turned": OK + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "two lengths": OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    "negative length": OK + b"Content-Length: -5\r\n\r\nhello",
    "enormous length": OK + b"Content-Length: 99999999999999999999999\r\n\r\nhello",
    "unknown framing": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    "folded length": OK + b"Content-Length:\r\n 5\r\nContent-Length: 7\r\n\r\nhello",
    "bad chunk size": CHUNKED + b"xyz\r\nhello\r\n0\r\n\r\n",
    "enormous chunk": CHUNKED + b"fffffffffffffffff\r\nhello",
    "chunk longer than said": CHUNKED + b"3\r\nhello\r\n0\r\n\r\n",
    "header bomb": OK + b"".join(b"X-%d: %s\r\n" % (i, b"a" * 1000) for i in range(70)) + b"\r\n",
    "endless header": OK + b"X: " + b"a" * (HEAD_BYTES_MAX + 1),
    "endless interim answers": b"HTTP/1.1 100 Continue\r\n\r\n" * 3000,
    "trailer bomb": CHUNKED + b"5\r\nhello\r\n0\r\n" + b"X-T: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n" * 2000 + b"\r\n",
    "endless chunk extension": CHUNKED + b"5;" + b"a" * (2 * HEAD_BYTES_MAX),
}  # fmt: skip


@on_both_loops
async def test_what_is_not_an_answer_is_malformed_and_ends_the_connection() -> None:
    for name, answer in MALFORMED.items():
        async with calling() as called:
            call, peer = await called.asked()
            speaking = asyncio.ensure_future(
                peer.say(*(answer[i : i + 700] for i in range(0, len(answer), 700)))
            )
            error = await outcome(call)
            assert (type(error), getattr(error, "billed", 0)) == (UpstreamMalformed, None), name
            await peer.gone()
            await asyncio.gather(speaking, return_exceptions=True)


@on_both_loops
async def test_bytes_after_an_answer_are_never_part_of_another() -> None:
    more = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged"
    for answer, _, body in (WHOLE["content-length"], WHOLE["chunked"]):
        for extra in (more, b"x", more[:9]):
            async with calling() as called:
                call, peer = await called.asked()
                await peer.say(answer + extra)
                assert await outcome(call) == (200, body)
                call, peer = await called.asked()  # a connection of its own
                await peer.say(answer)
                assert await outcome(call) == (200, body)
                assert called.server.accepted == 2


@on_both_loops
async def test_names_of_headers_are_lower_case_and_repeated_ones_joined() -> None:
    async with calling() as called:
        call, peer = await called.asked()
        await peer.say(
            OK
            + b"X-Request-ID:  up-1 \r\nX-Empty:\r\nVia: a\r\nvia: b\r\nX-Name: \xe9\r\nContent-Length: 0\r\n\r\n"
        )
        headers = (await call).headers
    assert dict(headers) == {
        "x-request-id": "up-1",
        "x-empty": "",
        "via": "a, b",
        "x-name": "\xe9",
        "content-length": "0",
    }


@on_both_loops
async def test_a_head_of_just_under_the_limit_is_taken() -> None:
    async with calling() as called:
        call, peer = await called.asked()
        await peer.say(
            OK, *[b"X-%d: %s\r\n" % (i, b"a" * 1000) for i in range(60)], b"Content-Length: 2\r\n\r\nhi"
        )
        assert await outcome(call) == (200, b"hi")


@on_both_loops
async def test_a_reader_gets_all_that_has_come_and_another_may_go_on() -> None:
    async with calling() as called:
        call, peer = await called.asked()
        await peer.say(CHUNKED + b"1\r\na\r\n" + b"1\r\nb\r\n" + b"1\r\nc\r\n")
        answer = await call
        async for data in answer.chunks():
            assert data == b"abc"
            break
        waiting = asyncio.ensure_future(answer.chunks().__anext__())
        await asyncio.sleep(0)
        waiting.cancel()
        assert (await asyncio.gather(waiting, return_exceptions=True))[0].__class__ is asyncio.CancelledError
        await peer.say(b"2\r\nde\r\n")
        await peer.say(b"0\r\n\r\n")
        assert b"".join([data async for data in answer.chunks()]) == b"de"
        assert [data async for data in answer.chunks()] == []
        await answer.close()


@on_both_loops
async def test_an_answer_above_its_limit_is_malformed() -> None:
    async with calling() as called:
        call, peer = await called.asked()
        await peer.say(OK + b"Content-Length: 5\r\n\r\nhello")
        error = await outcome(call, limit=4)
        assert said(error) == (UpstreamMalformed, "the model provider's answer is larger than 4 bytes", None)


@on_both_loops
async def test_a_compressed_answer_is_inflated_in_bounded_pieces() -> None:
    text = b"tokens " * 200_000
    raw = zlib.compressobj(wbits=-15)
    for coding, packed in (
        (b"gzip", gzip.compress(text)),
        (b"X-GZIP", gzip.compress(text[:700]) + gzip.compress(b"") + gzip.compress(text[700:])),
        (b"deflate", zlib.compress(text)),
        (b"deflate", raw.compress(text) + raw.flush()),
        (b"identity", text),
    ):
        async with calling() as called:
            call, peer = await called.asked()
            speaking = asyncio.ensure_future(
                peer.say(
                    OK + b"Content-Encoding: %s\r\nContent-Length: %d\r\n\r\n" % (coding, len(packed)), packed
                )
            )
            pieces = [piece async for piece in (await call).chunks()]
            assert b"".join(pieces) == text
            if coding != b"identity":
                assert max(map(len, pieces)) == INFLATED_BYTES_MAX
            await speaking


@on_both_loops
async def test_what_zlib_still_holds_when_its_input_is_used_up_is_not_forgotten() -> None:
    raw = zlib.compressobj(wbits=-15)
    text = b"a" * (INFLATED_BYTES_MAX + 24)
    packed = raw.compress(text) + raw.flush()
    first = zlib.decompressobj(wbits=-15)
    assert first.decompress(packed, INFLATED_BYTES_MAX) == text[:-24]
    assert (first.unconsumed_tail, first.eof) == (b"", False)
    async with calling() as called:
        call, peer = await called.asked()
        await peer.say(OK + b"Content-Encoding: deflate\r\nContent-Length: %d\r\n\r\n" % len(packed), packed)
        assert await outcome(call) == (200, text)


@on_both_loops
async def test_what_cannot_be_inflated_is_malformed() -> None:
    packed = gzip.compress(b"hello" * 100)
    for coding, body in (
        (b"br", b"hello"),
        (b"zstd", b"hello"),
        (b"gzip, gzip", packed),
        (b"gzip", b"no gzip at all"),
        (b"gzip", packed[:-9]),
        (b"gzip", packed + b"more"),
    ):
        async with calling() as called:
            call, peer = await called.asked()
            await peer.say(
                OK + b"Content-Encoding: %s\r\nContent-Length: %d\r\n\r\n" % (coding, len(body)), body
            )
            assert type(await outcome(call)) is UpstreamMalformed, coding
