"""Every provider that does not speak the client's dialect itself, through the litellm library.

The only module that imports litellm, and only when a `LitellmUpstream` is built: the import costs about 3.5 s of CPU
and 195 MB, so nobody pays for it who does not need it. litellm is used as a library of request and
answer conversions; its retries, fallbacks, callbacks, agent loops, caches and price look-ups stay off, and all its
traffic goes through `bridge_http`.

    messages ─ bridge_messages ─┐                                 ┌─ bridge_answers ─ messages
    chat ───────────────────────┴─ litellm.acompletion ─ provider ─┴─ bridge_chat ──── chat
    embeddings ─────────────────── litellm.aembedding ─── provider ─────────────────── embeddings
"""

from __future__ import annotations

import asyncio
import logging
import os
import warnings
from collections.abc import Mapping
from contextvars import ContextVar
from functools import cache
from typing import Any

import httpx
import msgspec

from gateway.core.catalog import Deployment, Operation, Provider, Wire
from gateway.core.errors import (
    UpstreamError,
    UpstreamMalformed,
)
from gateway.ports import UpstreamAnswer, UpstreamCall
from gateway.upstream import bridge_answers, bridge_chat, bridge_http, bridge_messages
from gateway.upstream.bridge_body import ChatWriter, MessagesWriter, StreamAnswer, WholeAnswer
from gateway.upstream.bridge_chat import Arguments, ChunkReader, Target, Untranslatable
from gateway.upstream.bridge_errors import error_body

_OPERATIONS = frozenset({Operation.CHAT, Operation.MESSAGES, Operation.EMBEDDINGS})
#: They take system turns only at the front; images inside tool results they take where OpenAI does not.
_NOT_OPENAI_SHAPED = frozenset({"anthropic", "bedrock", "gemini", "vertex_ai"})
#: Every request of these is known to go through `bridge_http` (tests/upstream/test_litellm*.py),
#: so an exception without a request is proof that nothing was billed.
_PROVEN = frozenset({"anthropic", "azure", "bedrock", "gemini", "openai"})
_PASSED_HEADERS = ("retry-after", "retry-after-ms", "x-should-retry")
#: litellm reports "stop" with every chunk of a Gemini stream (1.106.6), so its end must be seen in the bytes.
_GEMINI_ENDS = (b'"finishReason"', b'"blockReason"')
_EMBEDDING_PARAMETERS = frozenset({"input", "dimensions", "encoding_format", "user"})


def serves(provider: Provider, operation: Operation) -> bool:
    """True if this adapter can carry `operation` to `provider`; dialects that the wire speaks itself are not ours."""
    match provider.wire:
        case Wire.LITELLM:
            return operation in _OPERATIONS
        case Wire.OPENAI:
            return provider.bridge and operation is Operation.MESSAGES
        case Wire.ANTHROPIC:
            return provider.bridge and operation is Operation.CHAT
        case _:
            return False


class LitellmUpstream:
    """`ports.Upstream` for wire LITELLM and for bridged dialects.

    `credentials` maps a credential's name to its secret: an API key, or a JSON object of litellm's credential
    parameters (`{"aws_access_key_id": ..., "aws_secret_access_key": ...}`), or a Google service account's JSON.
    Building one imports litellm. One per event loop; `start` before use, `stop` at the end.
    """

    def __init__(self, credentials: Mapping[str, str]) -> None:
        self._credentials = credentials
        self._litellm, self._internal_call = _load()
        self._pool: httpx.AsyncHTTPTransport | None = None
        self._supported: dict[tuple[str, str], frozenset[str]] = {}

    async def start(self) -> None:
        limits = httpx.Limits(max_connections=None, keepalive_expiry=bridge_http.KEEPALIVE_S)
        self._pool = httpx.AsyncHTTPTransport(limits=limits, trust_env=False)

    async def stop(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.aclose()

    async def open(self, call: UpstreamCall) -> UpstreamAnswer:
        """Raises `UpstreamError`s; what the provider or litellm has against the request comes back as an answer.

        Streams open when the provider's headers have arrived, plain answers when they are complete.
        """
        if self._pool is None:
            raise RuntimeError("LitellmUpstream.open before start")
        provider = call.deployment.provider
        if not serves(provider, call.operation):
            return _refusal(call, 404, f"provider '{provider.name}' does not serve {call.operation.value}")
        try:
            body = msgspec.json.decode(b"".join(call.body), type=dict[str, Any])
            arguments = self._arguments(call, body)
        except (msgspec.DecodeError, Untranslatable) as refused:
            return _refusal(call, 400, str(refused), getattr(refused, "param", None))
        except (AttributeError, KeyError, TypeError, ValueError) as wrong:
            # The translators walk the client's JSON without a schema; what has another shape is the client's.
            return _refusal(
                call, 400, f"the request does not have the shape of its dialect ({type(wrong).__name__})"
            )
        exchange = bridge_http.Exchange(
            self._pool,
            bridge_http.Timeouts.of(provider, call.slow),
            call.attempt_id,
            end_marks=_GEMINI_ENDS if call.stream and _gemini(call.deployment) else (),
        )
        token = bridge_http.current.set(exchange)
        # litellm's own calls are not logged by litellm: no background tasks, no cost look-ups after the call.
        internal = self._internal_call.set(True)
        try:
            answer = await self._ask(call, body, arguments, exchange)
        except asyncio.CancelledError:
            await asyncio.shield(exchange.close())
            raise
        except Exception as failed:
            await exchange.close()
            return self._failed(call, exchange, failed)
        finally:
            bridge_http.current.reset(token)
            self._internal_call.reset(internal)
        return answer

    async def _ask(
        self,
        call: UpstreamCall,
        body: Mapping[str, Any],
        arguments: Arguments,
        exchange: bridge_http.Exchange,
    ) -> UpstreamAnswer:
        model = call.deployment.upstream_model
        size = sum(map(len, call.body))
        kwargs = arguments.kwargs | self._destination(call.deployment) | {"timeout": exchange.total_s}
        if call.operation is Operation.EMBEDDINGS:
            told = await self._litellm.aembedding(**kwargs)
            await exchange.close()
            return _plain(_embeddings(told.model_dump(), model), exchange, arguments)
        told = await self._litellm.acompletion(**kwargs, stream=call.stream)
        if not call.stream:
            await exchange.close()
            chat = bridge_chat.completion(told.model_dump(), model, not _claude(call.deployment))
            answer = bridge_answers.message(chat, size) if call.operation is Operation.MESSAGES else chat
            return _plain(answer, exchange, arguments)
        # Gemini's stream is requested only when its first chunk is wanted; a status must be known before.
        chunks = told.completion_stream or await told.fetch_stream()
        writer: ChatWriter | MessagesWriter
        if call.operation is Operation.MESSAGES:
            writer = MessagesWriter(model, size)
        else:
            options = body.get("stream_options") or {}
            writer = ChatWriter(bool(options.get("include_usage")))
        headers = {"content-type": "text/event-stream", **_headers(exchange, arguments)}
        reader = ChunkReader(model, not _claude(call.deployment))
        return StreamAnswer(exchange, chunks, reader, writer, headers, self._dump)

    # --- what litellm is told ----------------------------------------------------------------------------

    def _arguments(self, call: UpstreamCall, body: Mapping[str, Any]) -> Arguments:
        provider = call.deployment.provider
        if call.operation is Operation.EMBEDDINGS:
            return _embedding_arguments(body)
        target = self._target(call.deployment)
        dropped: tuple[str, ...] = ()
        if call.operation is Operation.MESSAGES:
            body, dropped = bridge_messages.chat_body(body, target)
        arguments = bridge_chat.arguments(body, target)
        if call.stream and provider.stream_usage and "stream_options" in target.supported:
            arguments.kwargs["stream_options"] = {"include_usage": True}
        return Arguments(arguments.kwargs, dropped + arguments.dropped)

    def _target(self, deployment: Deployment) -> Target:
        name = _litellm_provider(deployment.provider)
        key = (name, deployment.upstream_model)
        if key not in self._supported:
            listed = self._litellm.get_supported_openai_params(model=key[1], custom_llm_provider=name)
            self._supported[key] = frozenset(listed or ())
        openai_shaped = name not in _NOT_OPENAI_SHAPED
        return Target(
            provider=name,
            supported=self._supported[key],
            inner_system=openai_shaped,
            thinking_blocks=not openai_shaped,
            tool_images=not openai_shaped,
            markers=name
            != "azure",  # refuses fields it does not know; for openai.com litellm removes them itself
            claude=_claude(deployment),
        )

    def _destination(self, deployment: Deployment) -> dict[str, Any]:
        """Where and as whom. Comes last, so that nothing from a client's body can replace it."""
        provider = deployment.provider
        name = _litellm_provider(provider)
        out: dict[str, Any] = {
            **provider.litellm_params,
            "model": deployment.upstream_model,
            "custom_llm_provider": name,
            "num_retries": 0,
            "max_retries": 0,
            "drop_params": False,
            "caching": False,
            "no-log": True,
            "_skip_mcp_handler": True,  # else every call with tools imports the proxy
        }
        if base := _api_base(provider):
            out["api_base"] = base
        secret = self._credentials.get(provider.credential, "")
        if not secret.lstrip().startswith("{"):
            # litellm would look for a key in the environment when it is given none.
            out["api_key"] = secret or "none"
        elif name.startswith("vertex_ai"):
            out["vertex_credentials"] = secret
        else:
            out |= msgspec.json.decode(secret, type=dict[str, str])
        return out

    @staticmethod
    def _dump(chunk: Any) -> dict[str, Any]:
        """A chunk of litellm's inner stream: its own model, the OpenAI SDK's, or a dict of either known shape."""
        if isinstance(chunk, dict):
            return chunk if "choices" in chunk else bridge_chat.generic_chunk(chunk)
        dumped: dict[str, Any] = chunk.model_dump()
        return dumped

    # --- what went wrong ---------------------------------------------------------------------------------

    def _failed(
        self, call: UpstreamCall, exchange: bridge_http.Exchange, failed: Exception
    ) -> UpstreamAnswer:
        """An error answer, or raises. litellm's exceptions may hold secrets and bodies: nothing of them is chained."""
        if exchange.failure is not None:
            raise exchange.failure from None
        if exchange.status >= 400:
            content = error_body(call.operation, exchange.status, exchange.error_body, self._secrets())
            return WholeAnswer(
                exchange.status, {"content-type": "application/json", **_headers(exchange)}, content
            )
        request_id = exchange.request_id
        if exchange.sent:
            raise UpstreamMalformed(upstream_request_id=request_id) from None
        status = getattr(failed, "status_code", None)
        if isinstance(status, int) and 400 <= status < 500 and status != 408:
            text = str(getattr(failed, "message", "")) or type(failed).__name__
            raw = msgspec.json.encode({"message": text.removeprefix("litellm.").split("\n", 1)[0]})
            content = error_body(call.operation, status, raw, self._secrets())
            return WholeAnswer(status, {"content-type": "application/json"}, content)
        billed = False if _litellm_provider(call.deployment.provider) in _PROVEN else None
        # A request that litellm cannot even build will not fare better at the next attempt.
        raise UpstreamError(
            f"litellm could not make the request ({type(failed).__name__})", billed=billed, retryable=False
        ) from None

    def _secrets(self) -> tuple[str, ...]:
        """Of now: credentials may have changed since this was built."""
        return tuple(text for secret in self._credentials.values() for text in _secret_texts(secret))


# --- answers -------------------------------------------------------------------------------------------


def _plain(body: Mapping[str, Any], exchange: bridge_http.Exchange, arguments: Arguments) -> WholeAnswer:
    headers = {"content-type": "application/json", **_headers(exchange, arguments)}
    return WholeAnswer(200, headers, msgspec.json.encode(body))


def _refusal(call: UpstreamCall, status: int, message: str, param: str | None = None) -> WholeAnswer:
    content = error_body(call.operation, status, msgspec.json.encode({"message": message}), param=param)
    return WholeAnswer(status, {"content-type": "application/json"}, content)


def _headers(exchange: bridge_http.Exchange, arguments: Arguments | None = None) -> dict[str, str]:
    """`x-request-id`, what tells clients when to retry, and `x-dropped-params` if any were left out."""
    out = {name: exchange.headers[name] for name in _PASSED_HEADERS if name in exchange.headers}
    if request_id := exchange.request_id:
        out["x-request-id"] = request_id
    if arguments is not None and arguments.dropped:
        out["x-dropped-params"] = ",".join(arguments.dropped)
    return out


# --- embeddings ------------------------------------------------------------------------------------------


def _embedding_arguments(body: Mapping[str, Any]) -> Arguments:
    given = {n: v for n, v in body.items() if v is not None and n != "model"}
    for name in given:
        if name not in _EMBEDDING_PARAMETERS:
            raise Untranslatable(f"'{name}' cannot be passed on", name)
    dropped = tuple(n for n in given if n == "user")
    return Arguments({n: v for n, v in given.items() if n != "user"}, dropped)


def _embeddings(dump: Mapping[str, Any], model: str) -> dict[str, Any]:
    usage = dump.get("usage") or {}
    prompt = usage.get("prompt_tokens") or 0
    return {
        "object": "list",
        "model": dump.get("model") or model,
        "data": [
            {"object": "embedding", "index": at, "embedding": item["embedding"]}
            for at, item in enumerate(dump.get("data") or ())
        ],
        "usage": {"prompt_tokens": prompt, "total_tokens": usage.get("total_tokens") or prompt},
    }


# --- litellm itself --------------------------------------------------------------------------------------


def _litellm_provider(provider: Provider) -> str:
    if provider.litellm_provider:
        return provider.litellm_provider
    return "anthropic" if provider.wire is Wire.ANTHROPIC else "openai"


def _claude(deployment: Deployment) -> bool:
    return "claude" in deployment.upstream_model.lower()


def _gemini(deployment: Deployment) -> bool:
    return (
        _litellm_provider(deployment.provider) in ("gemini", "vertex_ai")
        and "gemini" in deployment.upstream_model
    )


def _secret_texts(credential: str) -> list[str]:
    if not credential.lstrip().startswith("{"):
        return [credential]
    return [text for text in msgspec.json.decode(credential).values() if isinstance(text, str)]


def _api_base(provider: Provider) -> str:
    """litellm adds `/v1/messages` to Anthropic's base itself, and nothing but the operation to OpenAI's."""
    if _litellm_provider(provider) == "anthropic":
        return provider.base_url.removesuffix("/v1")
    return provider.base_url


@cache
def _load() -> tuple[Any, ContextVar[bool]]:
    """litellm, quiet and without a will of its own, and the variable that marks a call as its own."""
    # Without this litellm fetches its price map from the network at import; it reads it nowhere else.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    with warnings.catch_warnings():
        # Its models are built at their first use; here is where that costs no request, and where this is expected.
        warnings.filterwarnings(
            "ignore", r"Item '\w+' on TypedDict class '\w+' is using the `ReadOnly` qualifier"
        )
        import litellm
        from litellm._internal_context import is_internal_call
        from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler
        from litellm.types.utils import (
            Delta,
            EmbeddingResponse,
            Message,
            ModelResponse,
            ModelResponseStream,
            Usage,
        )

        for model in (Delta, EmbeddingResponse, Message, ModelResponse, ModelResponseStream, Usage):
            model()

    for name in ("LiteLLM", "LiteLLM Router", "LiteLLM Proxy"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.disabled = True
    litellm.suppress_debug_info = True
    litellm.turn_off_message_logging = True
    litellm.disable_streaming_logging = True
    litellm.callbacks = []
    litellm.success_callback = []
    litellm.failure_callback = []
    litellm.num_retries = 0
    litellm.drop_params = False
    litellm.modify_params = False
    # It would create a paid cache object at Google for every marker, outside of the hold.
    litellm.disable_anthropic_gemini_context_caching_transform = True
    # Every async client that litellm builds from here on gets our transport.
    seam: Any = staticmethod(lambda **_: bridge_http.Seam())
    setattr(AsyncHTTPHandler, "create_async_transport", seam)  # noqa: B010
    litellm.in_memory_llm_clients_cache.cache_dict.clear()
    litellm.module_level_aclient = AsyncHTTPHandler()
    return litellm, is_internal_call
