"""A provider that records the exact bytes it receives and answers the least that each dialect allows."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from types import TracebackType

from aiohttp import web


@dataclass(frozen=True, slots=True)
class Received:
    path: str
    query: str
    headers: dict[str, str]
    body: bytes


@dataclass(slots=True)
class Script:
    """What to answer instead of the default: status, headers and the pieces of a body, written one by one."""

    status: int
    pieces: list[bytes]
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "application/json"})
    abort: bool = False  # break the connection after the last piece instead of ending the answer


class Recorder:
    """`async with Recorder() as upstream:` serves on `upstream.base_url`; `upstream.received` is what came in."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.scripts: list[Script] = []
        self.base_url = ""
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> Recorder:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.base_url = f"http://{host}:{port}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {k.lower(): v for k, v in request.headers.items()}
        self.received.append(Received(request.path, request.query_string, headers, body))
        if self.scripts:
            return await _play(request, self.scripts.pop(0))
        stream = _asks_stream(body)
        kind = request.path.removeprefix("/v1")
        content_type, answer = _answer(kind, stream, _include_usage(body))
        return web.Response(body=answer, headers={"Content-Type": content_type, "x-request-id": "up-1"})


async def _play(request: web.Request, script: Script) -> web.StreamResponse:
    response = web.StreamResponse(status=script.status, headers=script.headers)
    await response.prepare(request)
    for piece in script.pieces:
        await response.write(piece)
    if script.abort:
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


def _asks_stream(body: bytes) -> bool:
    return bool(json.loads(body).get("stream"))


def _include_usage(body: bytes) -> bool:
    return bool((json.loads(body).get("stream_options") or {}).get("include_usage"))


def sse(*docs: object, done: bool = False) -> bytes:
    """Data-only events, as OpenAI sends them."""
    text = b"".join(b"data: " + json.dumps(doc).encode() + b"\n\n" for doc in docs)
    return text + (b"data: [DONE]\n\n" if done else b"")


def named(*docs: dict[str, object]) -> bytes:
    """Named events, as Anthropic and the responses dialect send them."""
    return b"".join(
        b"event: " + str(doc["type"]).encode() + b"\ndata: " + json.dumps(doc).encode() + b"\n\n"
        for doc in docs
    )


CHAT_USAGE = {"prompt_tokens": 100, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 64}}
MESSAGES_USAGE = {
    "input_tokens": 36,
    "cache_read_input_tokens": 64,
    "cache_creation_input_tokens": 0,
    "output_tokens": 5,
}
RESPONSES_USAGE = {"input_tokens": 100, "output_tokens": 5, "input_tokens_details": {"cached_tokens": 64}}


def chat_chunks(*, usage: bool) -> list[object]:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    parts: list[object] = [
        {
            **head,
            "choices": [
                {"index": 0, "delta": {"role": "assistant", "content": "Hel"}, "finish_reason": None}
            ],
        },
        {**head, "choices": [{"index": 0, "delta": {"content": "lo"}, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
    ]
    return [*parts, {**head, "choices": [], "usage": CHAT_USAGE}] if usage else parts


def messages_events() -> list[dict[str, object]]:
    start_usage = {**MESSAGES_USAGE, "output_tokens": 1}
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "usage": start_usage,
    }
    return [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hello"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    ]


def _responses_doc(status: str) -> dict[str, object]:
    text = {"type": "output_text", "text": "Hello", "annotations": []}
    item = {"type": "message", "id": "i1", "role": "assistant", "status": status, "content": [text]}
    return {
        "id": "resp_1",
        "object": "response",
        "status": status,
        "model": "m",
        "output": [item],
        "usage": RESPONSES_USAGE,
    }


def _answer(kind: str, stream: bool, include_usage: bool) -> tuple[str, bytes]:
    if kind == "/chat/completions":
        if stream:
            return "text/event-stream", sse(*chat_chunks(usage=include_usage), done=True)
        choice = {"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}
        doc = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "model": "m",
            "choices": [choice],
            "usage": CHAT_USAGE,
        }
        return "application/json", json.dumps(doc).encode()
    if kind == "/messages":
        if stream:
            return "text/event-stream", named(*messages_events())
        doc = {
            "id": "msg_1",
            "type": "message",
            "role": "assistant",
            "model": "m",
            "content": [{"type": "text", "text": "Hello"}],
            "stop_reason": "end_turn",
            "usage": MESSAGES_USAGE,
        }
        return "application/json", json.dumps(doc).encode()
    if kind == "/messages/count_tokens":
        return "application/json", b'{"input_tokens": 42}'
    if kind == "/embeddings":
        row = {"object": "embedding", "index": 0, "embedding": [0.1, 0.2]}
        usage = {"prompt_tokens": 8, "total_tokens": 8}
        return "application/json", json.dumps(
            {"object": "list", "data": [row], "model": "m", "usage": usage}
        ).encode()
    if kind == "/responses":
        if stream:
            delta: dict[str, object] = {
                "type": "response.output_text.delta",
                "delta": "Hello",
                "sequence_number": 1,
            }
            end: dict[str, object] = {"type": "response.completed", "response": _responses_doc("completed")}
            return "text/event-stream", named(
                {"type": "response.created", "response": _responses_doc("in_progress")}, delta, end
            )
        return "application/json", json.dumps(_responses_doc("completed")).encode()
    return "application/json", b"{}"
