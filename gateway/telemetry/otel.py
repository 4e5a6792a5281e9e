"""Traces for an OTLP collector, made in the background from tuples that requests leave behind.

No OpenTelemetry object exists on a request's path: the SDK's spans cost 180 us a request, more than all the
rest of the gateway. A request gets a `Trace` (two numbers and a verdict), keeps its facts only if the trace is
sampled, and one thread turns them into spans and sends them in batches.

Names follow the GenAI semantic conventions (semantic-conventions-genai, "Development", read November 2026);
what they do not name is `tollhouse.*`.
"""

from __future__ import annotations

import random
import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from gateway.core.entry import Attempt, Outcome
from gateway.telemetry.redact import redact
from gateway.telemetry.steps import Span

#: W3C Trace Context, level 1: version, trace id, parent id, flags. Later versions may append fields.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_ID_SPACE = 1 << 63  # sampling looks at the last 63 bits of a trace id, as the SDK's TraceIdRatioBased does

_OPERATION = {"chat": "chat", "responses": "chat", "messages": "chat", "embeddings": "embeddings"}
_PROVIDER = {
    "gemini": "gcp.gemini",
    "vertex": "gcp.vertex_ai",
    "bedrock": "aws.bedrock",
    "azure": "azure.ai.openai",
}


class Parent(NamedTuple):
    """A caller's `traceparent`. It joins traces, and never proves who is asking."""

    trace_id: int
    span_id: int
    sampled: bool


class Trace(NamedTuple):
    """One request's place in a trace."""

    trace_id: int
    span_id: int  # of the request's own span
    parent_span_id: int  # 0 = this is the root
    sampled: bool

    @property
    def trace_id_hex(self) -> str:
        return f"{self.trace_id:032x}"


class TracedAttempt(NamedTuple):
    attempt: Attempt
    outcome: Outcome


class TracedRequest(NamedTuple):
    """What a sampled request leaves behind. `started_ns` is wall time, `started_s` the same instant in `stages`."""

    trace: Trace
    request_id: str
    method: str
    path: str  # from the URL table, never as the client wrote it
    status: int
    error: str  # GatewayError.kind, "" if none
    client: str
    task_id: str
    started_ns: int
    started_s: float
    duration_s: float
    stages: Sequence[Span]
    attempts: Sequence[TracedAttempt]


def parse_traceparent(text: str | None) -> Parent | None:
    """A valid `traceparent` header, or None for anything else: a broken header starts a new trace."""
    match = _TRACEPARENT.fullmatch(text.strip()) if text and len(text) <= 512 else None
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    return Parent(trace_id, span_id, bool(int(match[4], 16) & _SAMPLED))


def attempt_span_id(attempt_id: str) -> int:
    """The span id of an attempt: the random half of its id, so that the provider can be told it before any span is."""
    return int(attempt_id[-16:], 16)


def traceparent_for(trace: Trace, attempt_id: str) -> str:
    """The header to send upstream with this attempt."""
    return f"00-{trace.trace_id:032x}-{attempt_span_id(attempt_id):016x}-{int(trace.sampled):02x}"


class Tracing:
    """Decides which requests are traced, and sends their spans.

    A parent's verdict is followed; roots are sampled at `sample_ratio` by trace id, so that replicas agree.
    A full queue drops requests and counts them in `dropped`; a collector that is down costs nothing else.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        service_name: str = "tollhouse",
        version: str = "",
        sample_ratio: float = 1.0,
        capacity: int = 2_048,
        flush_interval_s: float = 1.0,
        random_bits: Callable[[int], int] = random.getrandbits,
    ) -> None:
        if not 0.0 <= sample_ratio <= 1.0:
            raise ValueError(f"sample_ratio is from 0 to 1, not {sample_ratio}")
        self._exporter = exporter
        self._resource = Resource({"service.name": service_name, "service.version": version})
        self._scope = InstrumentationScope("tollhouse", version)
        self._threshold = int(sample_ratio * _ID_SPACE)
        self._capacity = capacity
        self._interval_s = flush_interval_s
        self._bits = random_bits
        self._queue: deque[TracedRequest] = deque()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.dropped = 0
        self.failed_batches = 0

    def start(self) -> None:
        """Start the sending thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="otel-export", daemon=True)
            self._thread.start()

    def begin(self, traceparent: str | None) -> Trace:
        """Join the caller's trace, or start one."""
        parent = parse_traceparent(traceparent)
        span_id = self._bits(64) or 1
        if parent is not None:
            return Trace(parent.trace_id, span_id, parent.span_id, parent.sampled)
        trace_id = self._bits(128) or 1
        return Trace(trace_id, span_id, 0, trace_id % _ID_SPACE < self._threshold)

    def record(self, request: TracedRequest) -> None:
        """Keep a finished request for the next batch, if its trace is sampled."""
        if not request.trace.sampled:
            return
        if len(self._queue) >= self._capacity:
            self.dropped += 1
            return
        self._queue.append(request)

    def close(self) -> None:
        """Send what is kept and stop; blocks until done, at most the exporter's time-out per batch."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.flush()
        self._exporter.shutdown()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self.flush()

    def flush(self) -> None:
        """Send what is kept; blocks. The sending thread calls this every `flush_interval_s`."""
        while self._queue:
            batch: list[ReadableSpan] = []
            while self._queue and len(batch) < 512:
                batch += self._spans(self._queue.popleft())
            if self._exporter.export(batch) is not SpanExportResult.SUCCESS:
                self.failed_batches += 1

    def _spans(self, r: TracedRequest) -> Iterator[ReadableSpan]:
        own = r.trace.span_id

        def at(seconds: float) -> int:
            return r.started_ns + int((seconds - r.started_s) * 1e9)

        def span(
            name: str,
            span_id: int,
            parent: int,
            times_ns: tuple[int, int],
            kind: SpanKind,
            attributes: Mapping[str, str | int | float | Sequence[str]],
            error: str = "",
        ) -> ReadableSpan:
            return ReadableSpan(
                name,
                self._context(r.trace, span_id),
                self._context(r.trace, parent) if parent else None,
                self._resource,
                attributes,
                kind=kind,
                status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
                start_time=times_ns[0],
                end_time=times_ns[1],
                instrumentation_scope=self._scope,
            )

        end_ns = at(r.started_s + r.duration_s)
        whole = (r.started_ns, end_ns)
        # A client's mistake is not the server's error: the conventions mark only 5xx.
        server_error = r.error or str(r.status) if r.status >= 500 else ""
        yield span(
            f"{r.method} {r.path}",
            own,
            r.trace.parent_span_id,
            whole,
            SpanKind.SERVER,
            _request_facts(r),
            server_error,
        )
        for stage in r.stages:
            times = (at(stage.start_s), at(stage.start_s + stage.duration_s))
            yield span(stage.name, self._bits(64) or 1, own, times, SpanKind.INTERNAL, {})
        for attempt, outcome in r.attempts:
            start_ns = attempt.started_at_ms * 1_000_000
            name = f"{_OPERATION.get(attempt.operation, attempt.operation)} {attempt.upstream_model}"
            yield span(
                name,
                attempt_span_id(attempt.attempt_id),
                own,
                (start_ns, start_ns + outcome.latency_ms * 1_000_000),
                SpanKind.CLIENT,
                _attempt_facts(attempt, outcome),
                outcome.error,
            )

    def _context(self, trace: Trace, span_id: int) -> SpanContext:
        return SpanContext(
            trace.trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
        )


def _request_facts(r: TracedRequest) -> dict[str, str | int]:
    facts: dict[str, str | int] = {
        "http.request.method": r.method,
        "http.route": r.path,
        "http.response.status_code": r.status,
        "gen_ai.conversation.id": r.task_id,
        "tollhouse.request.id": r.request_id,
        "tollhouse.client": redact(r.client),
    }
    if r.error:
        facts["error.type"] = r.error
    return facts


def _attempt_facts(attempt: Attempt, outcome: Outcome) -> dict[str, str | int | float | Sequence[str]]:
    usage = outcome.usage
    facts: dict[str, str | int | float | Sequence[str]] = {
        "gen_ai.operation.name": _OPERATION.get(attempt.operation, attempt.operation),
        "gen_ai.provider.name": _PROVIDER.get(attempt.provider, attempt.provider),
        "gen_ai.request.model": attempt.upstream_model,
        "gen_ai.response.finish_reasons": (redact(outcome.finish),),
        "gen_ai.conversation.id": attempt.task_id,
        # Cached tokens are inside here, whatever the provider's own field of that name means.
        "gen_ai.usage.input_tokens": usage.input_total,
        "gen_ai.usage.output_tokens": usage.output,
        "gen_ai.usage.cache_read.input_tokens": usage.cache_read,
        "gen_ai.usage.cache_creation.input_tokens": usage.cache_write,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning,
        "tollhouse.attempt.id": attempt.attempt_id,
        "tollhouse.attempt.number": attempt.attempt_no,
        "tollhouse.deployment": attempt.deployment,
        "tollhouse.tier": attempt.tier,
        "tollhouse.rule": attempt.rule,
        "tollhouse.entry.kind": outcome.kind.value,
        "tollhouse.entry.quality": outcome.quality.value,
        "tollhouse.cost_nano_usd": outcome.cost_nano_usd,
        "tollhouse.list_cost_nano_usd": outcome.list_cost_nano_usd,
    }
    if outcome.status:
        facts["http.response.status_code"] = outcome.status
    if outcome.first_token_ms is not None:
        facts["tollhouse.first_token_ms"] = outcome.first_token_ms
    if outcome.error:
        facts["error.type"] = outcome.error
    return facts


def otlp_tracing(
    endpoint: str,
    *,
    headers: Mapping[str, str] | None = None,
    service_name: str = "tollhouse",
    version: str = "",
    sample_ratio: float = 1.0,
    timeout_s: float = 5.0,
) -> Tracing:
    """Tracing to an OTLP/HTTP collector; `endpoint` is its base URL (`http://127.0.0.1:4318`), without /v1/traces."""
    exporter = OTLPSpanExporter(
        endpoint=endpoint.rstrip("/") + "/v1/traces", headers=dict(headers or {}), timeout=timeout_s
    )
    return Tracing(exporter, service_name=service_name, version=version, sample_ratio=sample_ratio)
