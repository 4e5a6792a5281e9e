"""What vLLM 0.32 says, word for word in shape: answers, streams, errors, metrics.

Held against recorded answers by `tests/vllm/test_golden.py` and against a running server by `make test-vllm`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.vllm_engine import Counters, Generation

FINGERPRINT = "vllm-0.32.0-fa4efa4e"
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that the model makes: one, with arguments that fit."""

    id: str
    name: str
    arguments: str


def call_of(body: Mapping[str, Any], number: int) -> Call | None:
    """The call that the request demands, if it does."""
    choice, tools = body.get("tool_choice"), body.get("tools")
    if not tools or choice in (None, "auto", "none"):
        return None
    if isinstance(choice, Mapping) and choice.get("type") in ("auto", "none"):
        return None
    tool = tools[0].get("function") or tools[0]
    schema = tool.get("parameters") or tool.get("input_schema") or {}
    arguments = {name: _value(kind) for name, kind in (schema.get("properties") or {}).items()}
    return Call(f"chatcmpl-tool-{number:016x}", tool["name"], json.dumps(arguments))


def _value(schema: Mapping[str, Any]) -> object:
    if schema.get("enum"):
        return schema["enum"][0]
    return 1 if schema.get("type") in ("integer", "number") else "text"


def event(body: object, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(body, separators=(',', ':'))}\n\n".encode()


def error(status: int, kind: str, message: str, param: str | None = None, *, anthropic: bool) -> Any:
    if anthropic:
        return {"type": "error", "error": {"type": kind, "message": message}}
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def permission(created_s: int) -> dict[str, Any]:
    """A part of what a server tells of its model that means nothing."""
    may = ("create_engine", "sampling", "logprobs", "search_indices", "view", "fine_tuning")
    return {
        "id": "modelperm-0",
        "object": "model_permission",
        "created": created_s,
        **{f"allow_{what}": what in ("sampling", "logprobs", "view") for what in may},
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }


# --- chat ---------------------------------------------------------------------------------------------------


def usage(g: Generation, *, streamed: bool) -> dict[str, Any]:
    told = {
        "prompt_tokens": g.prompt_tokens,
        "total_tokens": g.prompt_tokens + g.output_tokens,
        "completion_tokens": g.output_tokens,
    }
    details = {"cached_tokens": g.cached_tokens, "created_cache_tokens": g.created_cache_tokens}
    if not g.output_tokens:  # aborted in the queue or in its prefill
        details = dict.fromkeys(details, 0)
    if streamed:
        return {**told, "prompt_tokens_details": details}
    return {
        **told,
        "prompt_tokens_details": {**details, "multimodal_tokens": None},
        "completion_tokens_details": None,
    }


@dataclass(frozen=True, slots=True)
class ChatStream:
    """The events of one streamed answer. Generated text and the reason for its end come in one event."""

    id: str
    created_s: int
    model: str

    def opening(self) -> bytes:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
        more = {"prompt_token_ids": None, "prompt_text": None}
        return event({**self._chunk([{**choice, "finish_reason": None}]), **more})

    def piece(self, delta: Mapping[str, Any], finish: str = "", *, last: bool = False) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish or None}
        end = {"stop_reason": None} if finish else {}
        chunk = self._chunk([{**choice, **end, "token_ids": None}])
        return event({**chunk, "system_fingerprint": FINGERPRINT} if last else chunk)

    def call_opening(self, call: Call) -> bytes:
        begun = {"id": call.id, "type": "function", "index": 0, "function": {"name": call.name}}
        return self.piece({"content": None, "tool_calls": [begun]})

    def call_piece(self, arguments: str) -> bytes:
        return self.piece(
            {"content": None, "tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}
        )

    def usage(self, told: Mapping[str, Any]) -> bytes:
        return event({**self._chunk([]), "usage": told, "system_fingerprint": FINGERPRINT})

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
        }


def chat(
    answer_id: str,
    created_s: int,
    model: str,
    text: str,
    call: Call | None,
    finish: str,
    told: Mapping[str, Any],
) -> dict[str, Any]:
    called = {}
    if call is not None:
        function = {"name": call.name, "arguments": call.arguments}
        called = {"tool_calls": [{"id": call.id, "type": "function", "function": function}]}
    message = {
        "role": "assistant",
        "content": text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        **called,
        "reasoning": None,
    }
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": finish,
        "stop_reason": None,
        "token_ids": None,
        "routed_experts": None,
    }
    return {
        "id": answer_id,
        "object": "chat.completion",
        "created": created_s,
        "model": model,
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": told,
        **dict.fromkeys(
            (
                "prompt_logprobs",
                "prompt_token_ids",
                "prompt_text",
                "kv_transfer_params",
                "ec_transfer_params",
                "metrics",
            )
        ),
    }


# --- messages -------------------------------------------------------------------------------------------------


def messages_usage(g: Generation) -> dict[str, Any]:
    """What was read from the cache is beside `input_tokens`, as Anthropic has it; nothing is ever "created"."""
    return {
        "input_tokens": g.prompt_tokens - g.cached_tokens,
        "output_tokens": g.output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": g.cached_tokens,
    }


def stop_reason(finish: str) -> str | None:
    """What SIGTERM ended has none."""
    return _STOP_REASONS.get(finish)


def messages(
    answer_id: str, model: str, text: str, call: Call | None, finish: str, told: Mapping[str, Any]
) -> dict[str, Any]:
    content: list[Any] = [{"type": "text", "text": text}] if text else []
    if call is not None:
        content.append(
            {"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)}
        )
    return {
        "id": answer_id,
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": model,
        "stop_reason": stop_reason(finish),
        "usage": told,
    }


def message_start(answer_id: str, model: str, prompt_tokens: int) -> bytes:
    """Its usage counts the whole prompt: what of it was in the cache is told at the end."""
    message: dict[str, object] = {
        "id": answer_id,
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": model,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": prompt_tokens, "output_tokens": 0},
    }
    return event({"type": "message_start", "message": message}, "message_start")


def block_start(call: Call | None) -> bytes:
    block: dict[str, Any] = {"type": "text", "text": ""}
    if call is not None:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
    return event({"type": "content_block_start", "content_block": block, "index": 0}, "content_block_start")


def block_delta(text: str, call: Call | None) -> bytes:
    delta = {"type": "text_delta", "text": text}
    if call is not None:
        delta = {"type": "input_json_delta", "partial_json": text}
    return event({"type": "content_block_delta", "delta": delta, "index": 0}, "content_block_delta")


def message_end(finish: str, told: Mapping[str, Any]) -> list[bytes]:
    delta = {"stop_reason": stop_reason(finish), "stop_sequence": None}
    return [
        event({"type": "message_delta", "delta": delta, "usage": told}, "message_delta"),
        event({"type": "message_stop"}, "message_stop"),
    ]


# --- metrics --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Signals:
    """What a scrape can learn of a server."""

    model: str
    running: int
    waiting: int
    kv_usage: float
    block_tokens: int
    blocks: int
    started_s: float
    counters: Counters


def metrics(s: Signals) -> str:
    c = s.counters
    reasons = {r: c.finished.get(r, 0) for r in ("stop", "length", "abort", "error", "repetition")}
    reasons["stop"] += c.finished.get("tool_calls", 0)
    config = {
        "block_size": str(s.block_tokens),
        "enable_prefix_caching": "True",
        "kv_cache_size_tokens": str(s.block_tokens * s.blocks),
        "num_gpu_blocks": str(s.blocks),
        "num_gpu_blocks_override": str(s.blocks),
    }
    rejected = {"max_num_queued_reqs": c.rejected, "max_num_queued_tokens": 0}
    lines = [
        *_metric("num_requests_running", "gauge", s.model, s.running),
        *_metric("num_requests_waiting", "gauge", s.model, s.waiting),
        *_metric("kv_cache_usage_perc", "gauge", s.model, s.kv_usage),
        *_metric("prefix_cache_queries_total", "counter", s.model, c.prompt_tokens),
        *_metric("prefix_cache_hits_total", "counter", s.model, c.cached_tokens),
        *_metric("num_preemptions_total", "counter", s.model, 0),
        *_metric("prompt_tokens_total", "counter", s.model, c.prompt_tokens),
        *_metric("prompt_tokens_cached_total", "counter", s.model, c.cached_tokens),
        *_metric("generation_tokens_total", "counter", s.model, c.output_tokens),
        *_by(
            "num_requests_waiting_by_reason",
            "gauge",
            s.model,
            "reason",
            {"capacity": s.waiting, "deferred": 0},
        ),
        *_by("request_success_total", "counter", s.model, "finished_reason", reasons),
        *_by("admission_rejections_total", "counter", s.model, "reason", rejected, engine=False),
        "# HELP vllm:cache_config_info Configuration of the cache.",
        "# TYPE vllm:cache_config_info gauge",
        f"vllm:cache_config_info{{{_labels({**config, 'engine': '0'})}}} 1.0",
    ]
    return _text(lines, s.started_s)


def older_metrics(s: Signals) -> str:
    """As servers of 2025 name them: the cache is the GPU's, and its size must be multiplied out."""
    config = {"block_size": str(s.block_tokens), "num_gpu_blocks": str(s.blocks)}
    lines = [
        *_metric("num_requests_running", "gauge", s.model, s.running),
        *_metric("num_requests_waiting", "gauge", s.model, s.waiting),
        *_metric("gpu_cache_usage_perc", "gauge", s.model, s.kv_usage),
        *_metric("gpu_prefix_cache_queries_total", "counter", s.model, s.counters.prompt_tokens),
        *_metric("gpu_prefix_cache_hits_total", "counter", s.model, s.counters.cached_tokens),
        f"vllm:cache_config_info{{{_labels(config)}}} 1.0",
    ]
    return _text(lines, s.started_s)


def sglang_metrics(s: Signals) -> str:
    """As SGLang's documentation names them (2026-11); no such server was run."""
    label = _labels({"model_name": s.model})
    lines = [
        f"sglang:num_running_reqs{{{label}}} {float(s.running)}",
        f"sglang:num_queue_reqs{{{label}}} {float(s.waiting)}",
        f"sglang:token_usage{{{label}}} {s.kv_usage}",
    ]
    return _text(lines, s.started_s)


def _text(lines: Sequence[str], started_s: float) -> str:
    start = ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {started_s!r}"]
    return "\n".join([*start, *lines, ""])


def _metric(name: str, kind: str, model: str, value: float) -> list[str]:
    label = _labels({"engine": "0", "model_name": model})
    return [*_head(name, kind), f"vllm:{name}{{{label}}} {float(value)}"]


def _by(
    name: str, kind: str, model: str, by: str, values: Mapping[str, float], *, engine: bool = True
) -> list[str]:
    told = {"engine": "0"} if engine else {}
    rows = [
        f"vllm:{name}{{{_labels({**told, by: v, 'model_name': model})}}} {float(n)}"
        for v, n in values.items()
    ]
    return [*_head(name, kind), *rows]


def _head(name: str, kind: str) -> list[str]:
    return [f"# HELP vllm:{name} As vLLM counts it.", f"# TYPE vllm:{name} {kind}"]


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
