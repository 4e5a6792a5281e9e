"""The admin listener: probes, metrics, and a small JSON API for operators. Never on the public port.

Probes, metrics and the API's description are open to whoever reaches the listener (they hold no secret and no customer's
name beyond team labels); everything else under /admin/v1 needs an admin key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web
from pydantic import ValidationError

import gateway
from gateway.admin import aliases, browse, openapi
from gateway.admin.call import Call, Json, Reply
from gateway.admin.door import Door
from gateway.admin.ports import AdminDeps
from gateway.admin.problems import CONTENT_TYPE, Fault, Problem, from_validation, invalid
from gateway.admin.route import ParamError, Route
from gateway.admin.routes import PREFIX, ROUTES
from gateway.core.errors import GatewayError

BODY_BYTES_MAX = 256 * 1024
_KEY_CHARS_MAX = 200


class AdminServer:
    """`start` listens, `stop` ends; `port` tells which port it got."""

    def __init__(self, deps: AdminDeps) -> None:
        self._app = build_app(deps)
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self, host: str, port: int, *, reuse_port: bool = False) -> None:
        runner = web.AppRunner(self._app, access_log=None, handler_cancellation=True, shutdown_timeout=2.0)
        self._runner = runner
        await runner.setup()
        site = web.TCPSite(runner, host, port, reuse_port=reuse_port)
        await site.start()
        self.port = runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


def build_app(deps: AdminDeps) -> web.Application:
    """Every route of the listener."""
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_problems_for(deps.on_fault)])
    probes = _Probes(deps)
    app.router.add_get("/livez", probes.livez)
    app.router.add_get("/readyz", probes.readyz)
    app.router.add_get("/metrics", probes.metrics)
    door = Door(deps.identify, deps.monotonic)
    for route in ROUTES:
        # Names of deployments have slashes, and nothing is below a name.
        path = route.address.replace("{name}", "{name:.+}")
        app.router.add_route(route.method, path, _guarded(door, deps, route))
    described = msgspec.json.encode(openapi.document(ROUTES, gateway.__version__))
    app.router.add_get(f"{PREFIX}/openapi.json", _static(described, "application/json"))
    app.router.add_get(f"{PREFIX}/docs", _static(browse.PAGE.encode(), "text/html", browse.HEADERS))
    app.router.add_get("/", _to_the_page)
    return app


async def _to_the_page(_: web.Request) -> web.Response:
    return web.Response(status=302, headers={"Location": f"{PREFIX}/docs"})


def _static(
    body: bytes, content_type: str, headers: dict[str, str] | None = None
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body, content_type=content_type, charset="utf-8", headers=headers)

    return answer


class _Probes:
    def __init__(self, deps: AdminDeps) -> None:
        self._deps = deps

    async def livez(self, _: web.Request) -> web.Response:
        return _json({"status": "alive"})

    async def readyz(self, _: web.Request) -> web.Response:
        reasons = list(self._deps.readiness())
        if reasons:
            return _json({"status": "not ready", "reasons": reasons}, 503)
        return _json({"status": "ready", "reasons": []})

    async def metrics(self, request: web.Request) -> web.Response:
        content_type, page = await self._deps.metrics(request.headers.get("Accept", ""))
        return web.Response(body=page, headers={"Content-Type": content_type})


def _guarded(
    door: Door, deps: AdminDeps, route: Route
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        admin = await door.admin(request, route.right)  # before the body is read
        try:
            params = route.parsed(list(request.query.items()))
        except ParamError as error:
            raise invalid(error.name, error.message) from None
        for name, given in request.match_info.items():
            if not given.isprintable():  # a NUL is no text to a database
                raise Problem(404, f"There is no such {name.removesuffix('_id')}.")
        body = await _json_body(request) if route.body is not None else None
        key = request.headers.get("Idempotency-Key") if route.once else None
        if key is not None and not (0 < len(key) <= _KEY_CHARS_MAX and key.isprintable()):
            raise invalid("Idempotency-Key", f"must be 1 to {_KEY_CHARS_MAX} printable characters")
        said = json.dumps([request.method, request.path, body], sort_keys=True)
        call = Call(
            deps,
            admin,
            dict(request.match_info),
            params,
            body,
            route.name,
            request.headers.get("If-Match") if route.tagged else None,
            key,
            hashlib.sha256(said.encode()).digest(),
            request.headers.get("Accept", ""),
        )
        reply = await route.resource(call)
        if reply.stream is not None:
            return await _streamed(request, reply, reply.stream, deps.on_fault)
        return _response(reply)

    return answer


def _response(reply: Reply) -> web.Response:
    headers = {"Cache-Control": "no-store", **reply.headers}
    if reply.etag is not None:
        headers["ETag"] = reply.etag
    if isinstance(reply.body, bytes):
        return web.Response(
            body=reply.body, status=reply.status, headers={**headers, "Content-Type": reply.content_type}
        )
    return _json(reply.body, reply.status, headers)


async def _streamed(
    request: web.Request,
    reply: Reply,
    parts: AsyncGenerator[bytes, None],
    on_fault: Callable[[str, BaseException], None],
) -> web.StreamResponse:
    """What fails on the way is cut off, so that nobody takes a part for the whole."""
    headers = {"Cache-Control": "no-store", **reply.headers, "Content-Type": reply.content_type}
    response = web.StreamResponse(status=reply.status, headers=headers)
    await response.prepare(request)
    try:
        async with aclosing(parts):
            async for part in parts:
                await response.write(part)
        await response.write_eof()
    except ConnectionError:
        pass  # whoever asked has left
    except Exception as error:
        on_fault(f"{request.method} {request.path}", error)
        if request.transport is not None:
            request.transport.abort()
    return response


async def _json_body(request: web.Request) -> object:
    """The decoded body. Problems: 413, 415, 400."""
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise Problem(415, "Compressed bodies are not accepted.")
    if request.content_type != "application/json":
        raise Problem(415, "The body must be application/json.")
    raw = await request.read()
    try:
        return json.loads(raw or b"{}")
    except (ValueError, RecursionError):
        raise Problem(400, "The body is not valid JSON.") from None


def _problems_for(
    on_fault: Callable[[str, BaseException], None],
) -> Callable[..., Awaitable[web.StreamResponse]]:
    """Last resort: every error leaves as problem details, and the unforeseen says nothing about itself."""

    @web.middleware
    async def problems(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except Problem as problem:
            return problem.response()
        except ValidationError as error:
            return from_validation(error).response()
        except GatewayError as error:
            faults = [Fault(error.param, error.message)] if error.param else []
            return Problem(error.status, error.message, faults).response()
        except web.HTTPRequestEntityTooLarge:
            return Problem(413, f"The body is larger than {BODY_BYTES_MAX} bytes.").response()
        except web.HTTPMethodNotAllowed as error:
            allow = {"Allow": ", ".join(sorted(error.allowed_methods))}
            return Problem(405, "This address does not take that method.", headers=allow).response()
        except web.HTTPNotFound:
            instead = aliases.elsewhere(request.path)
            return Problem(404, f"Not here: {instead}." if instead else "Not Found").response()
        except web.HTTPException as error:
            return Problem(error.status, error.reason or "").response()
        except Exception as error:
            on_fault(f"{request.method} {request.path}", error)
            return Problem(500, "The admin API failed; the log says why.").response()

    return problems


def _json(body: Json, status: int = 200, headers: dict[str, Any] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers
    )


__all__ = ["BODY_BYTES_MAX", "CONTENT_TYPE", "AdminDeps", "AdminServer", "build_app"]
