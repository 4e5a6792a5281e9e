"""What the pipeline reads of a bridged answer: complete, or a stream translated as it goes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

from gateway.core.errors import (
    UpstreamError,
    UpstreamLost,
    UpstreamMalformed,
    UpstreamOverloaded,
    UpstreamTimeout,
)
from gateway.upstream import bridge_answers, bridge_http
from gateway.upstream.bridge_chat import ChunkReader


class WholeAnswer:
    """`ports.UpstreamAnswer` that is complete."""

    def __init__(self, status: int, headers: Mapping[str, str], content: bytes) -> None:
        self.status = status
        self.headers = headers
        self._content = content
        self._rest = content

    async def read(self, limit: int) -> bytes:
        if len(self._content) > limit:
            raise UpstreamMalformed(f"the model provider's answer is larger than {limit} bytes")
        return self._content

    async def chunks(self) -> AsyncIterator[bytes]:
        rest, self._rest = self._rest, b""
        if rest:
            yield rest

    async def close(self) -> None:
        pass


class ChatWriter:
    def __init__(self, include_usage: bool) -> None:
        self._include_usage = include_usage

    def write(self, chunk: dict[str, Any]) -> bytes:
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def end(self, reader: ChunkReader) -> bytes:
        usage = b""
        if self._include_usage and reader.usage is not None:
            usage = self.write(reader.usage_chunk())
        return self.write(reader.last()) + usage + b"data: [DONE]\n\n"


class MessagesWriter:
    def __init__(self, model: str, input_bytes: int) -> None:
        self._events = bridge_answers.MessageEvents(model)
        self._input_bytes = input_bytes
        self._output_bytes = 0
        self._output_events = 0

    def write(self, chunk: dict[str, Any]) -> bytes:
        self._output_bytes += bridge_answers.weight([c["delta"] | {"role": ""} for c in chunk["choices"]])
        self._output_events += 1
        return bridge_answers.sse(self._events.feed(chunk))

    def end(self, reader: ChunkReader) -> bytes:
        finish = reader.last()["choices"][0]["finish_reason"]
        if reader.usage is not None:
            told = bridge_answers.usage(reader.usage)
        else:
            told = bridge_answers.estimated_usage(self._input_bytes, self._output_bytes, self._output_events)
        return bridge_answers.sse(self._events.end(finish, told))


class StreamAnswer:
    """`ports.UpstreamAnswer` that translates as it goes."""

    status = 200

    def __init__(
        self,
        exchange: bridge_http.Exchange,
        chunks: Any,
        reader: ChunkReader,
        writer: ChatWriter | MessagesWriter,
        headers: Mapping[str, str],
        dump: Callable[[Any], dict[str, Any]],
    ) -> None:
        self.headers = headers
        self._exchange = exchange
        self._source = chunks
        self._reader = reader
        self._writer = writer
        self._dump = dump
        self._pieces = self._translate()

    async def read(self, limit: int) -> bytes:
        got = bytearray()
        async for piece in self.chunks():
            got += piece
            if len(got) > limit:
                raise UpstreamMalformed(f"the model provider's answer is larger than {limit} bytes")
        return bytes(got)

    async def chunks(self) -> AsyncIterator[bytes]:
        """May be abandoned and called again: it goes on where the last one stopped."""
        async for piece in self._pieces:
            yield piece

    async def _translate(self) -> AsyncIterator[bytes]:
        source = self._source.__aiter__()
        while True:
            try:
                chunk = await anext(source)
                plain = self._reader.read(self._dump(chunk)) if chunk else None
                piece = self._writer.write(plain) if plain else b""
            except StopAsyncIteration:
                break
            except Exception as failed:
                raise _broken(self._exchange, failed) from None
            if piece:
                yield piece
        if self._exchange.failure is not None:
            raise self._exchange.failure
        if not (self._reader.finished and self._exchange.ended):
            # litellm takes a clean close for an end and would answer "stop"; no reason came, so no end came.
            raise UpstreamLost("the model provider's stream ended before it was finished")
        yield self._writer.end(self._reader)

    async def close(self) -> None:
        await self._exchange.close()


def _broken(exchange: bridge_http.Exchange, failed: Exception) -> UpstreamError:
    """Why a stream that had begun broke off; tokens may have been billed."""
    if exchange.failure is not None:
        return exchange.failure
    status = getattr(failed, "status_code", None)
    request_id = exchange.request_id
    if status in (429, 503, 529):
        return UpstreamOverloaded(upstream_status=status, upstream_request_id=request_id)
    if status == 408:
        return UpstreamTimeout(upstream_request_id=request_id)
    if isinstance(status, int) and status >= 400:
        return UpstreamError(
            "the model provider reported an error in its stream",
            upstream_status=status,
            upstream_request_id=request_id,
        )
    return UpstreamMalformed(upstream_request_id=request_id)
