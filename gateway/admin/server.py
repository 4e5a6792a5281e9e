"""The admin listener: probes, metrics, and a small JSON API for operators. Never on the public port.

Probes and metrics are open to whoever reaches the listener (they hold no secret and no customer's name beyond
team labels); everything under /admin/v1 needs an admin key.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from pydantic import ValidationError

from gateway.admin import resources
from gateway.admin.door import Door
from gateway.admin.ports import AdminDeps
from gateway.admin.problems import CONTENT_TYPE, Fault, Problem, from_validation
from gateway.core.errors import GatewayError

BODY_BYTES_MAX = 256 * 1024
PREFIX = "/admin/v1"


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
    door = Door(deps.verify, deps.monotonic)
    for method, path, resource in resources.ROUTES:
        app.router.add_route(method, PREFIX + path, _guarded(door, deps, resource))
    return app


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

    async def metrics(self, _: web.Request) -> web.Response:
        content_type, page = self._deps.metrics()
        return web.Response(body=page, headers={"Content-Type": content_type})


def _guarded(
    door: Door, deps: AdminDeps, resource: resources.Resource
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        actor = door.actor(request)  # before the body is read
        body = await _json_body(request) if request.method in ("POST", "PUT") else None
        call = resources.Call(deps, actor, dict(request.match_info), dict(request.query), body)
        reply = await resource(call)
        return _json(reply.body, reply.status)

    return answer


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
        except web.HTTPException as error:
            return Problem(error.status, error.reason or "").response()
        except Exception as error:
            on_fault(f"{request.method} {request.path}", error)
            return Problem(500, "The admin API failed; the log says why.").response()

    return problems


def _json(body: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json")


__all__ = ["BODY_BYTES_MAX", "CONTENT_TYPE", "AdminDeps", "AdminServer", "build_app"]
