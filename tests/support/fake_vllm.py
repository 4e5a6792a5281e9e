"""A vLLM server without a model: its protocol, its prefix cache, its queue and its ways of ending, in milliseconds.

    async with FakeVllm() as replica: ...          # replica.base_url, replica.bill, replica.terminate() ...
    python -m tests.support.fake_vllm --port 0     # prints its address; SIGTERM and SIGKILL as with the real one

Behaviour of vLLM 0.32 as observed in November 2026 on a real server (`make test-vllm` holds the two together).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import signal
import socket
import struct
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from gateway.demo.bill import BillFile, BillLine, State, Tokens, price
from gateway.demo.models import Rates
from tests.support import vllm_answers as say
from tests.support.vllm_engine import BlockCache, Engine, Generation, rendered, tokens_of

NO_RATES = Rates(0, 0, 0, 0, 0)
_METRICS = {"current": say.metrics, "older": say.older_metrics, "sglang": say.sglang_metrics}
_BACK_AFTER_S = 20.0
_ARGUMENT_BYTES = 4  # of a tool call's arguments in one event


@dataclass(frozen=True, slots=True)
class Lies:
    """What a replica says that is not so."""

    model: str = ""  # in answers and in /v1/models
    max_model_len: int = 0
    usage: Callable[[dict[str, Any]], dict[str, Any]] = dict  # changes the usage object of an answer


@dataclass(frozen=True, slots=True)
class Options:
    """Flags of the server, and how fast its hardware is. None = as fast as this machine goes."""

    model: str = "small"
    block_tokens: int = 32
    kv_tokens: int = 131_072
    max_model_len: int = 32_768
    seqs_max: int = 8
    queued_max: int | None = None  # --max-num-queued-reqs: above so many in flight, 503
    shutdown_timeout_s: float = 0.0  # --shutdown-timeout: 0 = SIGTERM aborts what runs
    keep_alive_s: float | None = None  # --sse-keep-alive-interval
    by_priority: bool = True  # --scheduling-policy priority
    details: bool = True  # --enable-prompt-tokens-details
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    output_tokens: int = 16  # of an answer that its request does not cut short
    metrics: str = "current"  # current | older | sglang: how they are named
    lies: Lies = field(default_factory=Lies)
    rates: Rates = NO_RATES  # of the bill


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as it arrived."""

    path: str
    headers: Mapping[str, str]  # lower-case names
    body: Mapping[str, Any]


class FakeVllm:
    """One replica on 127.0.0.1. `bill` and `seen` outlive restarts; nothing else does.

    `engine.hold_at`, `engine.until` and `engine.let_go` catch answers in the middle.
    """

    def __init__(self, options: Options | None = None, *, port: int = 0, bill: Path | None = None) -> None:
        self.options = options or Options()
        self.port = port
        self.bills = BillFile(bill)
        self.seen: list[Seen] = []
        self.started_s = 0.0
        self.draining = False
        self.comments = 0
        self._numbers = itertools.count(1)
        self._runner: web.AppRunner | None = None
        self._begin_life()

    @property
    def bill(self) -> list[BillLine]:
        """A line per request, in the order in which they ended."""
        return self.bills.after(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self.kill()

    # --- its lives ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listens, with an empty cache, at the same address as before."""
        self._begin_life()
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._tell_metrics)
        app.router.add_get("/load", self._load)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/messages/count_tokens", self._count)
        app.router.add_post("/v1/chat/completions", self._serve)
        app.router.add_post("/v1/messages", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=5.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def terminate(self) -> None:
        """SIGTERM. Without a shutdown timeout what runs is aborted, politely; with one it may end, and until then
        /health still says 200 while new requests get 500."""
        self.draining = True
        if self.options.shutdown_timeout_s:
            try:
                async with asyncio.timeout(self.options.shutdown_timeout_s):
                    await self.engine.idle()
            except TimeoutError:
                pass
        self.engine.abort()
        await self._close()

    async def kill(self) -> None:
        """SIGKILL: every connection is reset where it is."""
        assert self._runner is not None
        assert self._runner.server is not None
        for connection in list(self._runner.server.connections):
            transport = connection.transport
            if transport is not None:
                reset = transport.get_extra_info("socket")
                reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                transport.abort()
        await self._close()

    async def restart(self) -> None:
        await self.kill()
        await self.start()

    async def _close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _begin_life(self) -> None:
        o = self.options
        self.draining = False
        # A real one takes that long to come back, which is how its start times are told apart.
        self.started_s = max(time.time(), self.started_s + _BACK_AFTER_S)
        self.engine = Engine(
            BlockCache(o.block_tokens, o.kv_tokens // o.block_tokens),
            seqs_max=o.seqs_max,
            prefill_tokens_per_s=o.prefill_tokens_per_s,
            decode_tokens_per_s=o.decode_tokens_per_s,
        )

    # --- what it tells of itself ----------------------------------------------------------------------------

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _load(self, _request: web.Request) -> web.Response:
        return web.json_response({"server_load": self.engine.in_flight})

    async def _tell_metrics(self, _request: web.Request) -> web.Response:
        o, engine = self.options, self.engine
        signals = say.Signals(
            model=self._model,
            running=engine.running,
            waiting=engine.waiting,
            kv_usage=engine.cache.usage,
            block_tokens=o.block_tokens,
            blocks=engine.cache.capacity_blocks,
            started_s=self.started_s,
            counters=engine.counters,
        )
        return web.Response(text=_METRICS[o.metrics](signals), content_type="text/plain")

    async def _models(self, _request: web.Request) -> web.Response:
        length = self.options.lies.max_model_len or self.options.max_model_len
        model = {
            "id": self._model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "vllm",
            "root": f"/models/{self._model}",
            "parent": None,
            "max_model_len": length,
            "permission": [say.permission(int(time.time()))],
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        text = body["prompt"].encode() if "prompt" in body else _prompt(body)
        count = tokens_of(text)
        told = {"count": count, "max_model_len": self.options.max_model_len}
        return web.json_response({**told, "tokens": [*range(count)], "token_strs": None})

    async def _count(self, request: web.Request) -> web.Response:
        count = tokens_of(_prompt(await request.json()))
        return web.json_response(
            {"input_tokens": count, "context_management": {"original_input_tokens": count}}
        )

    @property
    def _model(self) -> str:
        return self.options.lies.model or self.options.model

    # --- generation -----------------------------------------------------------------------------------------

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append(Seen(request.path, headers, body))
        asked = _Asked(self, headers, body, anthropic=request.path == "/v1/messages")
        refusal = asked.refusal()
        if refusal is not None:
            return refusal
        return await asked.streamed(request) if body.get("stream") else await asked.whole()

    def number(self) -> int:
        return next(self._numbers)

    def wrote(self, piece: bytes) -> None:
        if piece == say.KEEP_ALIVE:
            self.comments += 1
            self.engine.tell()

    async def commented(self, times: int) -> None:
        """Returns when so many comments were sent in streams where nothing else came."""
        await self.engine.when(lambda: self.comments >= times)


class _Asked:
    """One request for text, from its checks to its line on the bill."""

    def __init__(
        self, server: FakeVllm, headers: Mapping[str, str], body: Mapping[str, Any], *, anthropic: bool
    ) -> None:
        self._server, self._headers, self._body, self._anthropic = server, headers, body, anthropic
        self._number = server.number()
        self._request_id = headers.get("x-request-id") or f"{self._number:032x}"
        self._id = f"chatcmpl-{headers.get('x-request-id') or f'{self._number:016x}'}"
        self._told = {"x-request-id": self._request_id}
        self._created_s = int(time.time())
        engine, prompt = server.engine, _prompt(body)
        salt = str(body.get("cache_salt") or "")
        block = engine.cache.block_tokens
        self._g = Generation(prompt, salt, engine.cache.chain(prompt, salt), block)
        self._call = say.call_of(body, self._number)
        pieces, self._finish = self._answer()
        self._pieces = pieces

    def refusal(self) -> web.Response | None:
        o, engine, model = self._server.options, self._server.engine, self._body.get("model")
        if model != o.model:
            text = f"The model `{model}` does not exist. Valid aliases: {o.model}."
            return self._refused(404, "NotFoundError", text, "model")
        if self._g.prompt_tokens > o.max_model_len:
            text = (
                f"This model's maximum context length is {o.max_model_len} tokens. However, your prompt contains "
                f"at least {o.max_model_len + 1} input tokens, which exceeds this limit even without any output."
            )
            return self._refused(400, "BadRequestError", text, "input_tokens")
        if self._server.draining:
            return self._refused(500, "InternalServerError", "cannot schedule new futures after shutdown")
        if o.queued_max is not None and engine.in_flight >= o.queued_max:
            engine.counters.rejected += 1
            text = "The engine is currently busy and cannot accept new requests."
            return self._refused(503, "Service Unavailable", text)
        return None

    async def whole(self) -> web.Response:
        text = ""
        async with aclosing(self._tokens()) as tokens:
            async for piece in tokens:
                text += piece
        self._bill(200)
        g, model = self._g, self._server._model
        shown = "" if self._call else text
        call = self._call if g.finish == "tool_calls" else None
        if self._anthropic:
            body = say.messages(self._id, model, shown, call, g.finish, self._usage(streamed=False))
        else:
            told = self._usage(streamed=False)
            body = say.chat(self._id, self._created_s, model, shown, call, g.finish, told)
        return web.json_response(body, headers=self._told)

    async def streamed(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={**self._told, "content-type": "text/event-stream; charset=utf-8"}
        )
        response.enable_chunked_encoding()
        await response.prepare(request)
        events = self._messages_events() if self._anthropic else self._chat_events()
        async with aclosing(events):
            async for piece in _kept_alive(events, self._server.options.keep_alive_s):
                await response.write(piece)
                self._server.wrote(piece)
        await response.write_eof()
        return response

    async def _chat_events(self) -> AsyncGenerator[bytes, None]:
        g, stream = self._g, say.ChatStream(self._id, self._created_s, self._server._model)
        include = bool((self._body.get("stream_options") or {}).get("include_usage"))
        opened = False
        async with aclosing(self._tokens()) as tokens:
            async for piece in tokens:
                if not opened:
                    opened = True
                    yield stream.opening()
                    if self._call:
                        yield stream.call_opening(self._call)
                if self._call:
                    yield stream.call_piece(piece)
                else:
                    yield stream.piece({"content": piece}, g.finish, last=bool(g.finish) and not include)
        self._bill(200)
        if not opened:
            yield stream.opening()
        elif self._call or g.finish == "abort":  # aborted before its first token: without any reason
            yield stream.piece({}, g.finish, last=not include)
        if include:
            yield stream.usage(self._usage(streamed=True))
        yield say.DONE

    async def _messages_events(self) -> AsyncGenerator[bytes, None]:
        g, opened = self._g, False
        async with aclosing(self._tokens()) as tokens:
            async for piece in tokens:
                if not opened:
                    opened = True
                    yield say.message_start(self._id, self._server._model, g.prompt_tokens)
                    yield say.block_start(self._call)
                yield say.block_delta(piece, self._call)
        self._bill(200)
        if opened:
            yield say.event({"type": "content_block_stop", "index": 0}, "content_block_stop")
        else:
            yield say.message_start(self._id, self._server._model, g.prompt_tokens)
        for last in say.message_end(g.finish, self._usage(streamed=True)):
            yield last

    async def _tokens(self) -> AsyncGenerator[str, None]:
        """The answer's pieces. Whoever stops listening early still leaves a line on the bill."""
        engine, body = self._server.engine, self._body
        priority = int(self._headers.get("x-vllm-priority") or body.get("priority") or 0)
        if not self._server.options.by_priority:
            priority = 0
        running = engine.generate(self._g, self._pieces, priority, self._finish, kept=self._call is None)
        try:
            async with aclosing(running):
                async for piece in running:
                    yield piece
        except (GeneratorExit, asyncio.CancelledError):
            self._bill(0)
            raise

    def _answer(self) -> tuple[list[str], str]:
        if self._call is not None:
            text = self._call.arguments
            return [text[i : i + _ARGUMENT_BYTES] for i in range(0, len(text), _ARGUMENT_BYTES)], "tool_calls"
        most = self._body.get("max_completion_tokens") or self._body.get("max_tokens") or 1_000_000
        wanted = self._server.options.output_tokens
        count = most if self._body.get("ignore_eos") else min(most, wanted)
        return [f" {n % 1_000:03}" for n in range(count)], "length" if count == most else "stop"

    def _usage(self, *, streamed: bool) -> dict[str, Any]:
        o = self._server.options
        told = say.messages_usage(self._g) if self._anthropic else say.usage(self._g, streamed=streamed)
        if not o.details and not self._anthropic:
            told["prompt_tokens_details"] = None
        return o.lies.usage(told)

    def _refused(self, status: int, kind: str, text: str, param: str | None = None) -> web.Response:
        self._bill(status)
        body = say.error(status, kind, text, param, anthropic=self._anthropic)
        return web.json_response(body, status=status, headers=self._told)

    def _bill(self, status: int) -> None:
        """One line per request. `finish` is "abort" for what SIGTERM ended, "" for a caller who left."""
        g, o = self._g, self._server.options
        served = status in (0, 200)
        cached = g.cached_tokens if g.output_tokens else 0
        tokens = Tokens(g.prompt_tokens - cached, cached, 0, 0, g.output_tokens)
        if not served or (status == 0 and not g.output_tokens):
            tokens = Tokens()
        state = State.COMPLETE if status == 200 and g.finish != "abort" else State.INTERRUPTED
        bills = self._server.bills
        bills.append(
            BillLine(
                bill_id=bills.next_id,
                client_request_id=self._headers.get("x-client-request-id", ""),
                request_id=self._id,
                at_ms=int(time.time() * 1_000),
                model=o.model,
                requested_model=str(self._body.get("model")),
                operation="messages" if self._anthropic else "chat",
                status=status,
                **{f.name: getattr(tokens, f.name) for f in fields(tokens)},
                nano_usd=price(o.rates, tokens),
                state=state if served else State.REFUSED,
                finish=g.finish,
                stream=bool(self._body.get("stream")),
            )
        )


async def _kept_alive(events: AsyncIterator[bytes], every_s: float | None) -> AsyncIterator[bytes]:
    """The events, and a comment wherever none comes for so long."""
    while True:
        coming = asyncio.ensure_future(anext(events, None))
        try:
            while not (await asyncio.wait({coming}, timeout=every_s))[0]:
                yield say.KEEP_ALIVE
        finally:
            if not coming.done():
                coming.cancel()
                await asyncio.wait({coming})
        piece = coming.result()
        if piece is None:
            return
        yield piece


def _prompt(body: Mapping[str, Any]) -> bytes:
    """As both dialects are rendered: Anthropic's system comes first, its tools have another form."""
    messages = list(body.get("messages") or ())
    if body.get("system"):
        messages.insert(0, {"role": "system", "content": body["system"]})
    return rendered(messages, body.get("tools") or ())


# --- as a process of its own ----------------------------------------------------------------------------------


async def _run(options: Options, port: int, bill: Path | None) -> None:
    replica = FakeVllm(options, port=port, bill=bill)
    await replica.start()
    print(replica.url, flush=True)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    await replica.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.fake_vllm")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--options", default="{}", help="fields of Options, as JSON")
    parser.add_argument("--bill", type=Path, help="a file that gets every line of the bill")
    asked = parser.parse_args()
    options = msgspec.convert(json.loads(asked.options), Options)
    asyncio.run(_run(options, asked.port, asked.bill))


if __name__ == "__main__":
    main()
