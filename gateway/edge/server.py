"""The public listener: bytes in, bytes out. Order of one request: address, key, body, pipeline, answer.

Built on aiohttp's low-level server with a URL table of its own: no middlewares, one straight function. A client
that leaves cancels its handler (`handler_cancellation`), which closes the pipeline's stream; what the provider
then bills is settled by the pipeline in a task of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import msgspec
from aiohttp import web
from multidict import CIMultiDict

from gateway import __version__
from gateway.core import clients
from gateway.core.catalog import Operation
from gateway.core.errors import (
    BodyTimeout,
    BodyTooLarge,
    GatewayError,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    UnsupportedMedia,
    UpgradeRequired,
)
from gateway.core.identity import Caller, KeyRecord
from gateway.edge import errors
from gateway.edge.artifacts import FindArtifact, answer_artifact
from gateway.edge.listener import Listener
from gateway.edge.live import LiveStreams, SilentConnections
from gateway.edge.tasks import TASK_BODY_BYTES_MAX, TaskDesk, answer_task
from gateway.edge.urls import Target, resolve
from gateway.edge.whole import Whole
from gateway.ports import Answer, Incoming
from gateway.telemetry.steps import Steps

BODY_TIMEOUT_S = 60.0
#: Requests that are cut at the end of a drain get this long to notice it and hand their attempts over.
CUT_S = 1.0


class Gateway(Protocol):
    """The pipeline, as far as the edge needs it (`pipeline/serve.py`)."""

    async def authenticate(self, headers: CIMultiDict[str]) -> Caller: ...

    def models(self, caller: Caller) -> tuple[str, ...]: ...

    def offers(self, caller: Caller, model: str) -> bool: ...

    @property
    def refusing(self) -> bool: ...

    async def refusal(
        self, operation: Operation, caller: Caller, headers: CIMultiDict[str], path_task: str | None
    ) -> GatewayError | None: ...

    async def serve(self, incoming: Incoming, steps: Steps) -> Answer: ...


class PrefixDesk(Protocol):
    """Knows how requests fared with their providers' caches (`storage.explained`)."""

    async def request(self, request_id: str, key: KeyRecord) -> Mapping[str, object]:
        """One request of that key; `NotFound` for one of anybody else."""
        ...

    async def route(self, request_id: str, key: KeyRecord) -> Mapping[str, object]:
        """Where one request of that key went, and why."""
        ...

    async def task(self, task_id: str) -> Mapping[str, object]:
        """What a task lost and saved."""
        ...


class Done(msgspec.Struct):
    """One finished request, for the access log and the metrics. Holds no secret and no content."""

    request_id: str
    method: str
    path: str
    steps: Steps
    traceparent: str | None = None
    status: int = 0
    operation: str = ""
    client: str = ""
    key_id: str = ""
    task_id: str = ""
    deployment: str = ""
    error: str = ""
    bytes_in: int = 0
    bytes_out: int = 0
    first_token_s: float | None = None
    client_gone: bool = False
    ends_only_at_404: bool = False  # refused, its client would ask again


@dataclass(frozen=True, slots=True)
class EdgeOptions:
    body_bytes_max: int = 32 << 20
    head_timeout_s: float = 10.0  # a connection's first request line and headers
    body_timeout_s: float = BODY_TIMEOUT_S
    keep_alive_s: float = 15.0
    slow_client_s: float = 120.0


class Edge:
    """`readiness` lists reasons why traffic should go elsewhere; empty = ready. Without `tasks` none are declared.

    `traced`: somebody will ask a request's `Steps` for its spans.
    """

    def __init__(
        self,
        gateway: Gateway,
        *,
        options: EdgeOptions,
        monotonic: Callable[[], float],
        new_request_id: Callable[[], str],
        readiness: Callable[[], list[str]],
        on_done: Callable[[Done], None],
        on_fault: Callable[[str, BaseException], None],
        tasks: TaskDesk | None = None,
        prefix: PrefixDesk | None = None,
        artifacts: FindArtifact | None = None,
        traced: bool = False,
    ) -> None:
        self._gateway = gateway
        self._tasks = tasks
        self._prefix = prefix
        self._artifacts = artifacts
        self._traced = traced
        self._options = options
        self._monotonic = monotonic
        self._new_request_id = new_request_id
        self._readiness = readiness
        self._on_done = on_done
        self._on_fault = on_fault
        self._live = LiveStreams(monotonic, options.keep_alive_s, options.slow_client_s)
        self._silent = SilentConnections(monotonic, options.head_timeout_s, self._connections)
        self._runner: web.ServerRunner | None = None
        self._busy: set[web.RequestHandler] = set()  # connections with a request under way
        self.port = 0

    @property
    def in_flight(self) -> int:
        """Requests being served."""
        return len(self._busy)

    async def start(self, host: str, port: int, *, reuse_port: bool = False) -> None:
        """Listen. Port 0 picks a free one; `self.port` then tells which."""
        server = Listener(
            self._handle,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=75.0,
            max_line_size=16_384,
            max_field_size=32_768,
            auto_decompress=False,
            lingering_time=2.0,
        )
        # Waiting is done by `drain`; aiohttp's own waits come twice on top of it.
        self._runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=4096, reuse_port=reuse_port or None)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self._live.start()
        self._silent.start()

    def _connections(self) -> list[web.RequestHandler]:
        server = None if self._runner is None else self._runner.server
        return [] if server is None else server.connections

    async def drain(self, timeout_s: float) -> None:
        """Stop listening, wait for running requests, then cut what is left."""
        if self._runner is None:
            return
        for site in list(self._runner.sites):
            await site.stop()
        self._silent.stop()
        for connection in self._connections():
            if connection in self._busy:
                connection.close()  # after its request
            else:
                connection.force_close()
        await self._idle(timeout_s)
        self._live.stop()
        await self._runner.cleanup()
        await self._idle(CUT_S)
        self._runner = None

    async def _idle(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while self.in_flight:
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pass

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        steps = Steps(self._monotonic, keep=self._traced)
        headers, connection = request.headers, request.protocol
        done = Done(self._new_request_id(), request.method, request.path, steps, headers.get("traceparent"))
        target = resolve(request.rel_url.raw_path, "anthropic-version" in headers)
        self._busy.add(connection)
        self._silent.spoke(connection)
        try:
            return await self._answer(request, target, steps, done)
        except GatewayError as error:
            done.error = error.kind
            return self._refuse(request, error, target, done)
        except asyncio.CancelledError:
            done.client_gone = True
            raise
        except ConnectionError:
            done.client_gone = True
            return web.Response()  # nobody is there to read it; aiohttp drops it without complaint
        except Exception as fault:
            done.error = "internal"
            self._on_fault(done.request_id, fault)
            unknown = GatewayError(
                "the gateway failed on this request; its id tells the operator where to look"
            )
            return self._refuse(request, unknown, target, done)
        finally:
            self._busy.discard(connection)
            self._on_done(done)

    async def _answer(
        self, request: web.BaseRequest, target: Target, steps: Steps, done: Done
    ) -> web.StreamResponse:
        headers = request.headers
        if "upgrade" in headers and headers["upgrade"].lower() == "websocket":
            raise UpgradeRequired()
        if target.kind == "none":
            raise NotFound(
                f"there is nothing at {request.path}; model calls go to /v1/chat/completions, /v1/responses, "
                "/v1/messages, /v1/messages/count_tokens, /v1/embeddings or /v1/models"
            )
        if request.method not in target.methods:
            raise MethodNotAllowed(
                f"{request.path} takes {' and '.join(target.methods)}, not {request.method}"
            )
        if target.kind == "probe":
            return self._probe(target, done)
        caller = await self._gateway.authenticate(headers)  # type: ignore[arg-type]
        done.key_id = caller.key_id
        if target.operation is None:
            return await self._desk(request, target, caller, done)
        done.operation = str(target.operation)
        refusal = None
        if self._gateway.refusing:
            refusal = await self._gateway.refusal(target.operation, caller, headers, target.task)  # type: ignore[arg-type]
        if refusal is not None:
            # A client that is still sending would take an early answer for a broken connection, and ask again.
            looked_at = clients.on_litellm(headers)
            body = await self._body(request, self._options.body_bytes_max, steps, keep=looked_at)
            done.ends_only_at_404 = looked_at and clients.ends_only_at_not_found(headers, body)
            done.bytes_in = request.content_length or 0
            raise refusal
        body = await self._body(request, self._options.body_bytes_max, steps)
        done.bytes_in = len(body)
        incoming = Incoming(
            done.request_id,
            target.operation,
            caller,
            headers,
            body,
            request.rel_url.raw_query_string,
            target.task,
        )
        try:
            answer = await self._gateway.serve(incoming, steps)
        except errors.OVER_BUDGET:
            done.ends_only_at_404 = clients.ends_only_at_not_found(headers, body)
            raise
        done.status, done.task_id, done.client = answer.status, answer.task_id, answer.client
        done.deployment, done.first_token_s = answer.deployment, answer.first_token_s
        done.error = answer.error
        pairs = answer.headers
        pairs += (
            ("Content-Type", answer.content_type),
            *_ids(done.request_id),
            ("x-gateway-overhead-ms", steps.gateway_ms()),
        )
        if answer.stream is None:
            done.bytes_out = len(answer.body)
            return Whole(answer.status, pairs, answer.body)
        return await self._stream(request, target, answer, CIMultiDict(pairs), steps, done)

    async def _desk(
        self, request: web.BaseRequest, target: Target, caller: Caller, done: Done
    ) -> web.StreamResponse:
        """Everything that a key may ask for and that is no model call."""
        if target.kind == "task":
            return await self._task(request, target, caller, done)
        if target.kind in ("prefix", "request"):
            return await self._explained(target, caller, done)
        return self._models(target, caller, done)

    async def _stream(
        self,
        request: web.BaseRequest,
        target: Target,
        answer: Answer,
        headers: CIMultiDict[str],
        steps: Steps,
        done: Done,
    ) -> web.StreamResponse:
        stream = answer.stream
        if stream is None:
            raise RuntimeError("_stream needs a stream")
        headers["Cache-Control"] = "no-cache"
        headers["X-Accel-Buffering"] = "no"
        response = web.StreamResponse(status=answer.status, headers=headers)
        response.enable_chunked_encoding()
        live = None
        try:
            await response.prepare(request)
            live = self._live.add(request, response, target.dialect)
            steps.pause()  # from here on the time is the provider's and the client's
            async for data in stream:
                done.bytes_out += len(data)
                live.writing()
                await response.write(data)
                live.wrote()
        finally:
            await stream.aclose()
            if live is not None:
                self._live.remove(live)
        await response.write_eof()
        return response

    async def _body(self, request: web.BaseRequest, most: int, steps: Steps, *, keep: bool = True) -> bytes:
        """The whole body, refused as early as its size is known. Compressed bodies are refused unread.

        Not to `keep` it, it is read and thrown away.
        """
        headers, content = request.headers, request.content
        if "content-encoding" in headers and headers["content-encoding"].lower() not in ("", "identity"):
            raise UnsupportedMedia()
        if content.is_eof():  # small ones are here already
            if content.total_bytes > most:
                raise _too_large(most)
            return content.read_nowait() if keep else b""
        length = request.content_length
        if length is not None and length > most:
            raise _too_large(most)
        if headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        parts: list[bytes] = []
        size = 0
        steps.pause()  # the client's upload is not our time
        try:
            async with asyncio.timeout(self._options.body_timeout_s):
                if not keep and length is not None and length <= content.get_read_buffer_limits()[1]:
                    await content.wait_eof()  # what fits into its buffer need not be taken out to be dropped
                    return b""
                async for part in content.iter_any():
                    size += len(part)
                    if size > most:
                        raise _too_large(most)
                    if keep:
                        parts.append(part)
        except TimeoutError as e:
            raise BodyTimeout() from e
        except web.RequestPayloadError as e:
            raise InvalidRequest("the request body is not what its framing says") from e
        finally:
            steps.resume()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _refuse(
        self, request: web.BaseRequest, error: GatewayError, target: Target, done: Done
    ) -> web.StreamResponse:
        status, pairs, body = errors.render(
            error, target.dialect, done.request_id, as_not_found=done.ends_only_at_404
        )
        pairs += (("Content-Type", "application/json"), *_ids(done.request_id))
        if isinstance(error, MethodNotAllowed):
            pairs.append(("Allow", ", ".join(target.methods)))
        if isinstance(error, UpgradeRequired):
            pairs.append(("Upgrade", "HTTP/1.1"))
        done.status, done.bytes_out = status, len(body)
        response = Whole(status, pairs, body)
        if not request.content.is_eof():
            response.force_close()  # the rest of the body is not read
        return response

    def _probe(self, target: Target, done: Done) -> web.StreamResponse:
        reasons = self._readiness() if target.name == "/readyz" else []
        done.status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        doc = {"service": "tollhouse", "version": __version__, "status": "not ready" if reasons else "ok"}
        body = msgspec.json.encode({**doc, "reasons": reasons} if reasons else doc)
        return Whole(done.status, _json_headers(done.request_id), body)

    async def _task(
        self, request: web.BaseRequest, target: Target, caller: Caller, done: Done
    ) -> web.StreamResponse:
        if self._tasks is None:
            raise NotFound("no tasks are declared here")
        if target.verb == "artifact":
            return await self._artifact(self._tasks, request, target, caller, done)
        verb = "change" if request.method == "PATCH" else target.verb
        body = b"" if verb == "show" else await self._body(request, TASK_BODY_BYTES_MAX, done.steps)
        done.bytes_in = len(body)
        status, doc = await answer_task(self._tasks, caller.key, verb, target.name, body)
        done.status, done.task_id = status, str(doc["id"])
        if verb == "show" and self._prefix is not None:
            doc["cache"] = await self._prefix.task(done.task_id)
        written = msgspec.json.encode(doc)
        done.bytes_out = len(written)
        return Whole(status, [*_json_headers(done.request_id), ("Cache-Control", "no-store")], written)

    async def _artifact(
        self, desk: TaskDesk, request: web.BaseRequest, target: Target, caller: Caller, done: Done
    ) -> web.StreamResponse:
        if self._artifacts is None:
            raise NotFound("nothing is trimmed here")
        doc = await answer_artifact(
            desk, self._artifacts, caller.key, target.name, target.part, request.rel_url.query
        )
        body = msgspec.json.encode(doc)
        done.status, done.task_id, done.bytes_out = HTTPStatus.OK, str(doc["task_id"]), len(body)
        return Whole(done.status, [*_json_headers(done.request_id), ("Cache-Control", "no-store")], body)

    async def _explained(self, target: Target, caller: Caller, done: Done) -> web.StreamResponse:
        if self._prefix is None:
            raise NotFound("nothing is kept about requests here")
        tell = self._prefix.request if target.kind == "prefix" else self._prefix.route
        body = msgspec.json.encode(await tell(target.name, caller.key))
        done.status, done.bytes_out = HTTPStatus.OK, len(body)
        return Whole(done.status, [*_json_headers(done.request_id), ("Cache-Control", "no-store")], body)

    def _models(self, target: Target, caller: Caller, done: Done) -> web.StreamResponse:
        """One shape that both vendors' SDKs read: OpenAI's members beside Anthropic's."""
        doc: object
        if target.kind == "models":
            names = self._gateway.models(caller)
            ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
            doc = {"object": "list", "data": [_model_row(n) for n in names], "has_more": False, **ends}
        elif self._gateway.offers(caller, target.name):
            doc = _model_row(target.name)
        else:
            raise ModelNotFound(
                f"the model '{target.name}' does not exist or this key may not use it", param="model"
            )
        body = msgspec.json.encode(doc)
        done.status, done.bytes_out = 200, len(body)
        return Whole(200, _json_headers(done.request_id), body)


def _model_row(name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "display_name": name,
        "owned_by": "tollhouse",
    }


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than {most} bytes")


def _ids(request_id: str) -> tuple[tuple[str, str], ...]:
    """The second name is the one that Anthropic's SDKs read."""
    return ("x-request-id", request_id), ("request-id", request_id)


def _json_headers(request_id: str) -> errors.Headers:
    return [("Content-Type", "application/json"), *_ids(request_id)]
