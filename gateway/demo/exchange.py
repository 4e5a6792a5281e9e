"""One request to the demo provider: read it, play its fault, answer it, bill it exactly once.

The bill line of an answer is written as soon as its last token is produced, before the events that close the
stream, so whoever has seen the end of an answer finds it on the bill. aiohttp cancels this coroutine when the
caller leaves (`handler_cancellation`); the line is then written on the way out, without awaiting anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import msgspec
from aiohttp import web

from gateway.core.catalog import Operation
from gateway.demo.answers import answers
from gateway.demo.bill import BillFile, BillLine, State, Tokens, price
from gateway.demo.cache import PromptCache, Split, render
from gateway.demo.embed import embedding_body, embedding_tokens
from gateway.demo.faults import OK, Fault, FaultKind, FaultPlan
from gateway.demo.models import DemoModel, find_model
from gateway.demo.prompt import BadRequest
from gateway.demo.read import read_ask
from gateway.demo.shapes import Event, Reply, body_of, error_event, error_of, stream_of, usage_of
from gateway.demo.tokens import TokenCounts

#: (bytes of one write) under a SLOW fault
_SLOW_PIECE = 7
_HTML = b"<html><head><title>502 Bad Gateway</title></head><body><h1>502 Bad Gateway</h1></body></html>\n"
_ID_PREFIX = {Operation.CHAT: "chatcmpl-", Operation.RESPONSES: "resp_", Operation.MESSAGES: "msg_"}


class OnDisconnect(StrEnum):
    """What is billed of a stream whose reader left. (A plain answer is always billed whole.)"""

    STOP = "stop"  # the output produced until then
    DRAIN = "drain"  # all of it: the model runs on


class ModelUnknown(Exception):
    """No model of this name is played."""


@dataclass(frozen=True, slots=True)
class SeenRequest:
    """A request as it arrived, kept for tests that ask what a gateway forwarded."""

    path: str
    headers: Mapping[str, str]  # lower-case names
    body: bytes


@dataclass(slots=True)
class Desk:
    """What all requests share."""

    bill: BillFile
    clock_ms: Callable[[], int]
    chunk_delay_s: float
    first_token_delay_s: float
    on_disconnect: OnDisconnect
    plan: FaultPlan
    seen: deque[SeenRequest]
    cache: PromptCache = field(default_factory=PromptCache)
    counts: TokenCounts = field(default_factory=TokenCounts)
    planned: int = 0  # requests since the plan was set
    received: int = 0

    def next_fault(self) -> Fault:
        self.planned += 1
        return self.plan.at(self.planned - 1)


class Exchange:
    """Serves one POST. `run()` returns the response; the bill has its line by then, or after a cancellation."""

    def __init__(self, desk: Desk, request: web.Request, operation: Operation, raw: bytes) -> None:
        self._desk = desk
        self._request = request
        self._operation = operation
        self._raw = raw
        self._fault = OK if operation is Operation.COUNT_TOKENS else desk.next_fault()
        desk.received += 1
        digest = hashlib.sha256(b"%d\n" % desk.received + raw).hexdigest()[:24]
        self._request_id = f"{_ID_PREFIX.get(operation, 'req_')}{digest}"
        self._credential = _credential(request)
        self._headers = {"x-request-id": self._request_id, "request-id": self._request_id}
        self._at_ms = desk.clock_ms()
        self._model: DemoModel | None = None
        self._model_name = ""
        self._stream = False
        self._billed = False

    async def run(self) -> web.StreamResponse:
        try:
            body = self._read_body()
            refusal = await self._injected_refusal()
            if refusal is not None:
                return refusal
            if self._operation is Operation.EMBEDDINGS:
                return await self._embed(body)
            return await self._generate(body)
        except BadRequest as e:
            return self._refused(400, e.message, e.param)
        except ModelUnknown as e:
            return self._refused(404, str(e), "model", "model_not_found")
        except ConnectionError:
            return web.Response(status=500)  # the caller is gone; nobody reads this

    # --- reading -------------------------------------------------------------------------------------------

    def _read_body(self) -> Mapping[str, Any]:
        try:
            body = msgspec.json.decode(self._raw)
        except msgspec.DecodeError as e:
            raise BadRequest(f"the body is not valid JSON: {e}") from None
        if not isinstance(body, dict) or not isinstance(body.get("model"), str):
            raise BadRequest("model: Field required", "model")
        self._model_name, self._stream = body["model"], body.get("stream") is True
        self._model = find_model(self._model_name)
        if self._model is None:
            raise ModelUnknown(f"The model '{self._model_name}' does not exist at the demo provider.")
        if self._model.embeds is not (self._operation is Operation.EMBEDDINGS):
            raise BadRequest(f"the model '{self._model_name}' does not serve {self._operation.path}", "model")
        return body

    @property
    def _played(self) -> DemoModel:
        assert self._model is not None, "_read_body sets the model or raises"
        return self._model

    # --- generation ------------------------------------------------------------------------------------------

    async def _generate(self, body: Mapping[str, Any]) -> web.StreamResponse:
        desk = self._desk
        ask = read_ask(self._operation, body, self._played)
        blocks = render(ask, self._credential, desk.counts)
        if self._operation is Operation.COUNT_TOKENS:
            return self._json(200, {"input_tokens": desk.cache.split(ask, blocks, self._at_ms).input_total})
        split = desk.cache.split(ask, blocks, self._at_ms)
        if split.input_total > self._played.context_tokens:
            raise BadRequest(
                f"prompt is too long: {split.input_total} tokens > {self._played.context_tokens} maximum",
                "messages",
            )
        said = answers(ask, blocks[-1].digest if blocks else b"\0" * 16)
        tokens = Tokens.of(split, sum(len(answer.tokens) for answer in said))
        usage = usage_of(self._operation, tokens, self._fault.kind)
        reply = Reply(ask, self._request_id, self._at_ms // 1_000, said, usage)
        finish = said[0].finish.value
        if self._stream:
            return await self._answer_stream(reply, split, finish)
        await self._wait(desk.first_token_delay_s + reply.output * desk.chunk_delay_s, split, tokens, finish)
        desk.cache.begin(split, desk.clock_ms())
        return await self._answer_plain(body_of(reply), tokens, finish)

    async def _wait(self, seconds: float, split: Split, tokens: Tokens, finish: str) -> None:
        """Until the plain answer is ready. A caller who leaves meanwhile pays for it: the model runs on."""
        try:
            if seconds:
                await asyncio.sleep(seconds)
            if self._fault.kind in _SILENT:
                await self._silence()
        except asyncio.CancelledError:
            charged = self._fault.billed or self._fault.kind not in _SILENT
            if charged:
                self._desk.cache.begin(split, self._desk.clock_ms())
            self._bill(
                tokens if charged else Tokens(), State.COMPLETE if charged else State.REFUSED, finish, 0
            )
            raise

    async def _answer_plain(self, body: Mapping[str, Any], tokens: Tokens, finish: str) -> web.StreamResponse:
        fault = self._fault
        if fault.kind is FaultKind.CLOSE:
            self._bill(tokens, State.COMPLETE, finish, 0)
            return await self._reset()
        self._bill(tokens, State.COMPLETE, finish, 200)
        if fault.kind is FaultKind.EMPTY_200:
            return self._whole_body(b"")
        encoded = msgspec.json.encode(body)
        if fault.kind is FaultKind.TRUNCATED_JSON:
            encoded = encoded[: len(encoded) // 2]
        response = web.StreamResponse(headers=self._headers)
        response.content_type = "text/html" if fault.kind is FaultKind.WRONG_TYPE else "application/json"
        response.content_length = len(encoded)
        await response.prepare(self._request)
        if fault.kind in (FaultKind.CUT, FaultKind.STALL):
            await response.write(encoded[: len(encoded) // 2])
            if fault.kind is FaultKind.STALL:
                await self._silence()
            return await self._reset(response)
        await self._write(response, encoded)
        await response.write_eof()
        return response

    async def _answer_stream(self, reply: Reply, split: Split, finish: str) -> web.StreamResponse:
        """One event per token; the bill counts the tokens whose event was written."""
        desk, fault, written = self._desk, self._fault, 0
        # A break that is asked for behind the last token comes before the events that close the stream.
        break_at = min(fault.after_events, reply.output) if fault.kind in _BROKEN else -1
        response = web.StreamResponse(headers={**self._headers, "cache-control": "no-cache"})
        response.content_type = "text/plain" if fault.kind is FaultKind.WRONG_TYPE else "text/event-stream"
        response.charset = "utf-8"
        try:
            if desk.first_token_delay_s:
                await asyncio.sleep(desk.first_token_delay_s)
            if fault.kind in _SILENT:
                await self._silence()
            desk.cache.begin(split, desk.clock_ms())
            if fault.kind in _LOST:
                reset = fault.kind is FaultKind.CLOSE
                self._bill(Tokens.of(split, reply.output), State.COMPLETE, finish, 0 if reset else 200)
                return await self._reset() if reset else self._whole_body(b"")
            await response.prepare(self._request)
            for event in stream_of(reply):
                if written == break_at and (event.token or 0 < written == reply.output):
                    self._bill(Tokens.of(split, written), State.INTERRUPTED, "error", 200)
                    return await self._break(response, event)
                if event.token and desk.chunk_delay_s:
                    await asyncio.sleep(desk.chunk_delay_s)
                if not event.token and written == reply.output:
                    self._bill(Tokens.of(split, written), State.COMPLETE, finish, 200)
                await self._send(response, event)
                written += event.token
            await response.write_eof()
        except (asyncio.CancelledError, ConnectionError):
            self._bill_left(split, written, reply.output, finish, 200 if response.prepared else 0)
            raise
        return response

    def _bill_left(self, split: Split, written: int, output: int, finish: str, status: int) -> None:
        """The caller left in the middle of a stream."""
        if self._fault.kind in _SILENT and not self._fault.billed:
            self._bill(Tokens(), State.REFUSED, "client_gone", 0)
            return
        self._desk.cache.begin(split, self._desk.clock_ms())
        if self._desk.on_disconnect is OnDisconnect.DRAIN or self._fault.kind in _SILENT:
            self._bill(Tokens.of(split, output), State.COMPLETE, finish, status)
        else:
            self._bill(Tokens.of(split, written), State.INTERRUPTED, "client_gone", status)

    async def _send(self, response: web.StreamResponse, event: Event) -> None:
        kind = self._fault.kind
        data = event.encode(b"\r\n" if kind is FaultKind.CRLF else b"\n")
        if kind is FaultKind.COMMENTS:
            data = b": keep-alive\n\n" + data
        await self._write(response, data * 2 if kind is FaultKind.USAGE_TWICE and event.usage else data)

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        if self._fault.kind is not FaultKind.SLOW:
            await response.write(data)
            return
        for at in range(0, len(data), _SLOW_PIECE):
            await response.write(data[at : at + _SLOW_PIECE])
            await asyncio.sleep(self._fault.delay_s)

    async def _break(self, response: web.StreamResponse, event: Event) -> web.StreamResponse:
        """End a stream the wrong way, in the place of `event`."""
        kind = self._fault.kind
        if kind is FaultKind.STALL:
            await self._silence()
        if kind in (FaultKind.STALL, FaultKind.CUT):
            return await self._reset(response)
        if kind is FaultKind.ERROR_EVENT:
            await self._write(response, error_event(self._operation, self._request_id).encode())
        else:
            data = event.encode()
            await self._write(response, data[: len(data) // 2])
        await response.write_eof()
        return response

    # --- embeddings ------------------------------------------------------------------------------------------

    async def _embed(self, body: Mapping[str, Any]) -> web.StreamResponse:
        counted = embedding_tokens(body, self._desk.counts)
        tokens = Tokens(input_uncached=sum(counted))
        await self._wait(self._desk.first_token_delay_s, Split(tokens.input_uncached), tokens, "stop")
        usage = usage_of(self._operation, tokens, self._fault.kind)
        return await self._answer_plain(embedding_body(body, self._model_name, usage), tokens, "stop")

    # --- refusing --------------------------------------------------------------------------------------------

    async def _injected_refusal(self) -> web.StreamResponse | None:
        """The answer of a fault that comes before any token, or None."""
        fault, operation = self._fault, self._operation
        if fault.kind is FaultKind.REFUSE:
            if fault.retry_after_s is not None:
                self._headers["retry-after"] = f"{fault.retry_after_s:g}"
            return self._refused(
                fault.status, f"[demo] injected error {fault.status}", code=_code(fault.status)
            )
        if fault.kind is FaultKind.ERROR_EVENT and not self._stream:
            return self._refused(500, "[demo] injected error 500", code="server_error")
        if fault.kind is FaultKind.CLOSE and not fault.billed:
            self._bill(Tokens(), State.REFUSED, "error", 0)
            return await self._reset()
        if fault.kind is FaultKind.HTML_502:
            self._bill(Tokens(), State.REFUSED, "error", 502)
            return web.Response(status=502, body=_HTML, content_type="text/html", headers=self._headers)
        if fault.kind is FaultKind.ERROR_IN_200:
            self._bill(Tokens(), State.REFUSED, "error", 200)
            if self._stream:
                return self._whole_body(error_event(operation, self._request_id).encode())
            return self._json(200, error_of(operation, 500, "[demo] injected error", self._request_id))
        if fault.kind is FaultKind.EMPTY_200 and not fault.billed:
            self._bill(Tokens(), State.REFUSED, "error", 200)
            return self._whole_body(b"")
        return None

    def _refused(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> web.StreamResponse:
        self._bill(Tokens(), State.REFUSED, "error", status)
        return self._json(status, error_of(self._operation, status, message, self._request_id, param, code))

    # --- the wire and the bill ---------------------------------------------------------------------------------

    def _json(self, status: int, body: object) -> web.Response:
        return web.Response(
            status=status,
            body=msgspec.json.encode(body),
            content_type="application/json",
            headers=self._headers,
        )

    def _whole_body(self, body: bytes) -> web.Response:
        content_type = "text/event-stream" if self._stream else "application/json"
        return web.Response(body=body, content_type=content_type, headers=self._headers)

    async def _silence(self) -> None:
        """Say nothing until the caller leaves, which cancels this."""
        await asyncio.Event().wait()

    async def _reset(self, response: web.StreamResponse | None = None) -> web.StreamResponse:
        """Close with a TCP reset instead of a clean end."""
        await asyncio.sleep(
            0
        )  # uvloop sends at the end of a turn; an abort before it would take the bytes back
        transport = self._request.transport
        if transport is not None:
            sock = transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        return response or web.Response(status=500)

    def _bill(self, tokens: Tokens, state: State, finish: str, status: int) -> None:
        """Write this request's line; later calls find it written. Counting tokens is free and has none."""
        if self._billed or self._operation is Operation.COUNT_TOKENS:
            return
        self._billed = True
        nano_usd = price(self._model.rates, tokens) if self._model else 0
        self._desk.bill.append(
            BillLine(
                bill_id=self._desk.bill.next_id,
                client_request_id=self._request.headers.get("x-client-request-id", ""),
                request_id=self._request_id,
                at_ms=self._at_ms,
                model=self._model.name if self._model else "",
                requested_model=self._model_name,
                operation=self._operation.value,
                status=status,
                input_uncached=tokens.input_uncached,
                cache_read=tokens.cache_read,
                cache_write_5m=tokens.cache_write_5m,
                cache_write_1h=tokens.cache_write_1h,
                output=tokens.output,
                nano_usd=nano_usd,
                state=state,
                finish=finish,
                stream=self._stream,
            )
        )


_SILENT = frozenset({FaultKind.STALL_HEADERS})
#: The model runs to its end, then the answer is lost (if not `billed`, it never ran: _injected_refusal).
_LOST = frozenset({FaultKind.EMPTY_200, FaultKind.CLOSE})
_BROKEN = frozenset({FaultKind.CUT, FaultKind.STALL, FaultKind.ERROR_EVENT, FaultKind.TRUNCATED_JSON})


def _credential(request: web.Request) -> bytes:
    """A hash of the caller's credential; the cache is kept apart by it. Without one, the empty credential's."""
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    return hashlib.sha256((bearer or request.headers.get("x-api-key", "")).encode()).digest()


def _code(status: int) -> str | None:
    return {401: "invalid_api_key", 429: "rate_limit_exceeded", 500: "server_error"}.get(status)
