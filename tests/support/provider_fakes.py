"""Providers on 127.0.0.1 that speak their own wire formats: Gemini, Bedrock, Azure, Anthropic, OpenAI.

A fake answers what it was told to and remembers what it was asked. Bodies follow the providers' references
(ai.google.dev, docs.aws.amazon.com/bedrock, platform.claude.com, platform.openai.com; 2026-11).
"""

from __future__ import annotations

import asyncio
import binascii
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from gateway.core.catalog import Deployment, Operation, Provider, Wire
from gateway.ports import UpstreamCall


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it arrived; `body` keeps the order of keys."""

    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass(slots=True)
class Reply:
    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    #: sent one by one; None means: stay silent until the client is gone
    pieces: Sequence[bytes | None] | None = None
    #: close the connection without the end of the chunked body
    cut: bool = False
    #: say nothing at all until the client is gone
    silent: bool = False
    #: drop the connection instead of answering
    reset: bool = False


class ProviderFake:
    """`async with ProviderFake() as fake`; replies are given in the order in which they were told."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.came = asyncio.Event()
        self.gone = asyncio.Event()  # set when a client left a silent or open answer
        self._replies: list[Reply] = []

    def replies(self, body: Any = None, **how: Any) -> None:
        self._replies.append(Reply(body, **how))

    def streams(self, *pieces: bytes | None, content_type: str = "text/event-stream", **how: Any) -> None:
        headers = {"content-type": content_type, **how.pop("headers", {})}
        self._replies.append(Reply(pieces=pieces, headers=headers, **how))

    async def left(self) -> None:
        """Returns once a client has left an answer that was still open."""
        async with asyncio.timeout(5):
            await self.gone.wait()

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(
            Asked(request.rel_url.raw_path, dict(request.headers), json.loads(await request.read()))
        )
        reply = self._replies.pop(0)
        self.came.set()
        try:
            if reply.reset:
                assert request.transport is not None
                request.transport.abort()
            if reply.silent:
                await asyncio.Event().wait()
            if reply.pieces is None:
                return self._whole(reply)
            return await self._piecewise(request, reply)
        except asyncio.CancelledError:
            self.gone.set()
            raise

    def _whole(self, reply: Reply) -> web.Response:
        if isinstance(reply.body, bytes):
            return web.Response(status=reply.status, body=reply.body, headers=reply.headers)
        return web.json_response(reply.body, status=reply.status, headers=reply.headers)

    async def _piecewise(self, request: web.Request, reply: Reply) -> web.StreamResponse:
        response = web.StreamResponse(status=reply.status, headers=reply.headers)
        response.enable_chunked_encoding()
        await response.prepare(request)
        for piece in reply.pieces or ():
            if piece is None:
                await asyncio.Event().wait()
            else:
                await response.write(piece)
        if reply.cut:
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write_eof()
        return response


def data(*events: Any) -> list[bytes]:
    """Server-sent events without names: OpenAI, Azure, Gemini."""
    return [b"data: " + (e if isinstance(e, bytes) else json.dumps(e).encode()) + b"\n\n" for e in events]


def named(*events: Mapping[str, Any]) -> list[bytes]:
    """Server-sent events named by their type: Anthropic."""
    return [f"event: {e['type']}\ndata: {json.dumps(e)}\n\n".encode() for e in events]


def aws_events(*events: tuple[str, Mapping[str, Any]]) -> list[bytes]:
    """`(event type, payload)` in AWS's binary framing: lengths, prelude CRC, string headers, payload, CRC."""
    return [_aws_frame({":event-type": kind, ":content-type": "application/json", ":message-type": "event"}, payload)
            for kind, payload in events]  # fmt: skip


def aws_exception(kind: str, payload: Mapping[str, Any]) -> bytes:
    return _aws_frame(
        {":exception-type": kind, ":content-type": "application/json", ":message-type": "exception"}, payload
    )


def _aws_frame(headers: Mapping[str, str], payload: Mapping[str, Any]) -> bytes:
    packed = b"".join(
        bytes([len(name)]) + name.encode() + b"\x07" + struct.pack(">H", len(value)) + value.encode()
        for name, value in headers.items()
    )
    body = json.dumps(payload).encode()
    prelude = struct.pack(">II", 16 + len(packed) + len(body), len(packed))
    frame = prelude + struct.pack(">I", binascii.crc32(prelude)) + packed + body
    return frame + struct.pack(">I", binascii.crc32(frame))


# --- calls to them ---------------------------------------------------------------------------------------

#: No part of any of these may ever show up in an answer or an error.
SECRETS = {
    "plain": "sk-canary-0123456789",
    "aws": '{"aws_access_key_id": "AKIDCANARY", "aws_secret_access_key": "aws-canary-secret"}',
}


def deployment(provider: str, url: str, model: str = "", **changes: Any) -> Deployment:
    """A deployment on a fake: `provider` is litellm's name for it, or "openai"/"anthropic" for a bridged wire."""
    wire, path, default, extra = {
        "gemini": (Wire.LITELLM, "/v1beta", "gemini-2.5-pro", {}),
        "bedrock": (
            Wire.LITELLM,
            "",
            "anthropic.claude-sonnet-4-5-20250929-v1:0",
            {"aws_region_name": "us-east-1"},
        ),
        "azure": (Wire.LITELLM, "", "gpt-4.1", {"api_version": "2025-04-01-preview"}),
        "openai": (Wire.OPENAI, "/v1", "gpt-4.1", {}),
        "anthropic": (Wire.ANTHROPIC, "/v1", "claude-sonnet-4-5", {}),
    }[provider]
    settings: dict[str, Any] = {
        "credential": "aws" if provider == "bedrock" else "plain",
        "litellm_provider": provider,
        "litellm_params": extra,
        "bridge": True,
        **changes,
    }
    return Deployment("d", Provider("p", wire, url + path, **settings), "m", model or default, "p/m")


def call(where: Deployment, operation: Operation, body: Any, slow: bool = False) -> UpstreamCall:
    raw = json.dumps(body).encode()
    half = len(raw) // 2  # bodies arrive in pieces
    pieces = (raw[:half], memoryview(raw)[half:])
    return UpstreamCall("att_1", where, operation, pieces, (), bool(body.get("stream")), slow)
