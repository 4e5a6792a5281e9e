"""The demo provider: a real HTTP server that plays a model provider on loopback, caches, bills and fails on request.

    python -m gateway.demo.provider --port 0 --state DIR

It speaks OpenAI chat completions, responses and embeddings and Anthropic messages at `<base>/v1`, with the prompt
cache rules and the rates of `models.py`. Its answers are drawn from the prompt's hash: there is no model. Every
response carries `x-demo-provider: true`.

    GET  /demo/bill?after=N    bill lines with bill_id > N
    POST /demo/faults          a fault plan, see `faults.read_plan`
    GET  /v1/generation?id=    one bill line by request id or x-client-request-id, shaped like OpenRouter's
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web

from gateway.core.catalog import Operation
from gateway.demo.bill import BillFile, BillLine
from gateway.demo.exchange import Desk, Exchange, OnDisconnect, SeenRequest
from gateway.demo.faults import FaultPlan, read_plan
from gateway.demo.models import MODELS, DemoModel, find_model

BILL_NAME = "bill.jsonl"
BASE_URL_NAME = "base_url"
_MAX_BODY_BYTES = 256 * 1024 * 1024
_ABOUT = (
    "This is Tollhouse's demo provider. There is no model behind it: its answers are made up from the request, "
    "and its bill is play money. It listens on loopback and calls nobody.\n"
)


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class DemoProvider:
    """The server, for tests and for `main`. `start()` listens; `stop()` ends every request and closes the bill.

    `state`: a directory for `bill.jsonl` (kept over restarts) and `base_url`; None keeps the bill in memory.
    `keep_requests`: how many of the latest requests `seen` holds, bodies included.
    `clock_ms`: the clock of the prompt cache and of the bill, milliseconds since 1970.
    """

    def __init__(
        self,
        state: Path | None = None,
        *,
        port: int = 0,
        chunk_delay_s: float = 0.0,
        first_token_delay_s: float = 0.0,
        on_disconnect: OnDisconnect | str = OnDisconnect.STOP,
        faults: FaultPlan | None = None,
        clock_ms: Callable[[], int] = _wall_ms,
        fsync: bool = False,
        keep_requests: int = 0,
    ) -> None:
        self._state = state
        self._port = port
        self._desk = Desk(
            bill=BillFile(state / BILL_NAME if state else None, fsync=fsync),
            clock_ms=clock_ms,
            chunk_delay_s=chunk_delay_s,
            first_token_delay_s=first_token_delay_s,
            on_disconnect=OnDisconnect(on_disconnect),
            plan=faults or FaultPlan(),
            seen=deque(maxlen=keep_requests),
        )
        # Request ids continue where the kept bill ends, so a restart never gives one out twice.
        self._desk.received = self._desk.bill.next_id - 1
        self._runner: web.AppRunner | None = None
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # --- life ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.on_response_prepare.append(_mark)
        for path in ("/", "/v1"):
            app.router.add_get(path, self._about)
        for operation in Operation:
            app.router.add_post(f"/v1{operation.path}", self._serving(operation))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{id:.+}", self._model)
        app.router.add_get("/v1/generation", self._generation)
        app.router.add_get("/demo/bill", self._bill)
        app.router.add_post("/demo/faults", self._faults)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2, keepalive_timeout=75
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, backlog=1024)
        await site.start()
        self._port = self._runner.addresses[0][1]
        if self._state:
            (self._state / BASE_URL_NAME).write_text(self.base_url + "\n")

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self._desk.bill.close()

    async def __aenter__(self) -> DemoProvider:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def settled(self) -> None:
        """Returns when no request is open, so every one that arrived has its bill line."""
        await self._idle.wait()

    # --- for tests -------------------------------------------------------------------------------------------

    @property
    def root_url(self) -> str:
        """http://127.0.0.1:<port>"""
        return f"http://127.0.0.1:{self._port}"

    @property
    def base_url(self) -> str:
        """http://127.0.0.1:<port>/v1"""
        return f"{self.root_url}/v1"

    @property
    def seen(self) -> list[SeenRequest]:
        """The latest requests, oldest first (`keep_requests` of them)."""
        return list(self._desk.seen)

    @property
    def received(self) -> int:
        """How many model requests ever arrived, refused ones included."""
        return self._desk.received

    def bill(self, after: int = 0) -> list[BillLine]:
        """Lines with bill_id > after, in order."""
        return self._desk.bill.after(after)

    def set_faults(self, plan: FaultPlan) -> None:
        """From the next request on; its number is 0."""
        self._desk.plan, self._desk.planned = plan, 0

    # --- routes ------------------------------------------------------------------------------------------------

    def _serving(self, operation: Operation) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def serve(request: web.Request) -> web.StreamResponse:
            self._open += 1
            self._idle.clear()
            try:
                raw = await request.read()
                headers = {name.lower(): value for name, value in request.headers.items()}
                self._desk.seen.append(SeenRequest(request.path, headers, raw))
                return await Exchange(self._desk, request, operation, raw).run()
            finally:
                self._open -= 1
                if not self._open:
                    self._idle.set()

        return serve

    async def _about(self, _: web.Request) -> web.Response:
        return web.Response(text=_ABOUT)

    async def _models(self, _: web.Request) -> web.Response:
        rows = [_model_row(model) for model in MODELS]
        page = {"has_more": False, "first_id": rows[0]["id"], "last_id": rows[-1]["id"]}
        return web.json_response({"object": "list", "data": rows, **page})

    async def _model(self, request: web.Request) -> web.Response:
        model = find_model(request.match_info["id"])
        if model is None:
            return _not_found("this model does not exist")
        return web.json_response({**_model_row(model), "id": request.match_info["id"]})

    async def _generation(self, request: web.Request) -> web.Response:
        line = self._desk.bill.find(request.query.get("id", ""))
        return (
            _not_found("no such generation")
            if line is None
            else web.json_response({"data": line.generation()})
        )

    async def _bill(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "0")
        if not after.isdecimal():
            return web.json_response({"error": {"message": "after must be a bill_id"}}, status=400)
        lines = msgspec.to_builtins(self._desk.bill.after(int(after)))
        return web.json_response({"data": lines})

    async def _faults(self, request: web.Request) -> web.Response:
        try:
            self.set_faults(read_plan(msgspec.json.decode(await request.read(), type=dict)))
        except (ValueError, TypeError) as e:
            return web.json_response({"error": {"message": str(e)}}, status=400)
        return web.json_response({"ok": True})


async def _mark(_: web.Request, response: web.StreamResponse) -> None:
    response.headers["x-demo-provider"] = "true"


def _not_found(message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "not_found_error"}}, status=404)


def _model_row(model: DemoModel) -> dict[str, object]:
    """One model in OpenAI's and Anthropic's shape at once."""
    return {
        "id": model.name,
        "object": "model",
        "type": "model",
        "created": 1_767_225_600,
        "created_at": "2026-01-01T00:00:00Z",
        "display_name": f"{model.name} (no model behind it)",
        "owned_by": "demo",
    }


# --- command line --------------------------------------------------------------------------------------------


async def _serve(args: argparse.Namespace) -> None:
    provider = DemoProvider(
        args.state,
        port=args.port,
        chunk_delay_s=args.chunk_delay_ms / 1_000,
        first_token_delay_s=args.first_token_delay_ms / 1_000,
        on_disconnect=args.on_disconnect,
        fsync=args.fsync,
    )
    await provider.start()
    end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.set)
    if args.until_stdin_closes:
        # The parent holds the other end of the pipe: however it dies, this server ends with it.
        loop.add_reader(sys.stdin, lambda: None if os.read(sys.stdin.fileno(), 1024) else end.set())
    print(f"demo provider (no model behind it) listens on {provider.base_url}", flush=True)
    await end.wait()
    await provider.stop()


def main(argv: list[str] | None = None) -> None:
    """Prints one line that ends in the base URL when it is ready; ends on SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m gateway.demo.provider", description=_ABOUT)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument(
        "--state", type=Path, default=None, help="directory for the bill; else it is kept in memory"
    )
    parser.add_argument("--chunk-delay-ms", type=float, default=2.0)
    parser.add_argument("--first-token-delay-ms", type=float, default=30.0)
    parser.add_argument("--on-disconnect", choices=[o.value for o in OnDisconnect], default="stop")
    parser.add_argument("--fsync", action="store_true", help="sync the bill to disk after every line")
    parser.add_argument("--until-stdin-closes", action="store_true", help="end when standard input ends")
    uvloop.run(_serve(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
