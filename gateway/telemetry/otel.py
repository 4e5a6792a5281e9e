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
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from gateway.core.entry import Attempt, Outcome
from gateway.telemetry.genai import OPERATION, PROVIDER
from gateway.telemetry.redact import redact
from gateway.telemetry.steps import Span

#: W3C Trace Context, level 1: version, trace id, parent id, flags. Later versions may append fields.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_ID_SPACE = 1 << 63  # sampling looks at the last 63 bits of a trace id, as the SDK's TraceIdRatioBased does

#: Tasks whose last request is known, so that the next one can point to it.
_TASKS_MAX = 4_096


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
    def ids(self) -> tuple[str, str]:
        """Of the trace and of the request's span, in hex."""
        return f"{self.trace_id:032x}", f"{self.span_id:016x}"


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
    #: the request of the same task that was recorded last, if that was another trace
    before: Trace | None = None


class TracedLate(NamedTuple):
    """An attempt that ended after its request was recorded: the client had left, and the provider went on."""

    trace: Trace
    attempt: TracedAttempt


class Sampling(NamedTuple):
    """Which traces are kept: by trace id, so that replicas agree; what the caller says, if that is followed; and, once it
    is known, what failed (5xx) or took at least `slower_than_s` (0 = not asked for)."""

    ratio: float = 1.0
    follow_parent: bool = True
    errors: bool = False
    slower_than_s: float = 0.0


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

    A full queue drops requests and counts them in `dropped`; a collector that is down costs nothing else.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        resource: Mapping[str, str] | None = None,
        version: str = "",
        sampling: Sampling = Sampling(),  # noqa: B008 - immutable
        capacity: int = 2_048,
        flush_interval_s: float = 1.0,
        random_bits: Callable[[int], int] = random.getrandbits,
    ) -> None:
        if not 0.0 <= sampling.ratio <= 1.0:
            raise ValueError(f"a ratio is from 0 to 1, not {sampling.ratio}")
        self._exporter = exporter
        self._resource = Resource(dict(resource or {"service.name": "tollhouse"}))
        self._scope = InstrumentationScope("tollhouse", version)
        self._sampling = sampling
        self._threshold = int(sampling.ratio * _ID_SPACE)
        self._capacity = capacity
        self._interval_s = flush_interval_s
        self._bits = random_bits
        self._queue: deque[TracedRequest | TracedLate] = deque()
        self._last: dict[str, Trace] = {}  # by task
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
        if parent is not None and self._sampling.follow_parent:
            return Trace(parent.trace_id, span_id, parent.span_id, parent.sampled)
        trace_id = parent.trace_id if parent is not None else self._bits(128) or 1
        sampled = trace_id % _ID_SPACE < self._threshold
        return Trace(trace_id, span_id, parent.span_id if parent is not None else 0, sampled)

    def wants(self, trace: Trace, status: int, duration_s: float) -> bool:
        """Whether a request that ended like this is to be recorded."""
        policy = self._sampling
        return trace.sampled or (policy.errors and status >= 500) or 0 < policy.slower_than_s <= duration_s

    def record(self, request: TracedRequest | TracedLate) -> None:
        """Keep what has ended for the next batch."""
        if len(self._queue) >= self._capacity:
            self.dropped += 1
            return
        if isinstance(request, TracedRequest) and request.task_id:
            before = self._last.pop(request.task_id, None)
            self._last[request.task_id] = request.trace
            if len(self._last) > _TASKS_MAX:
                del self._last[next(iter(self._last))]
            if before is not None and before.trace_id != request.trace.trace_id:
                request = request._replace(before=before)
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

    def _spans(self, kept: TracedRequest | TracedLate) -> Iterator[ReadableSpan]:
        if isinstance(kept, TracedLate):
            yield self._attempt(kept.trace, kept.attempt)
            return
        own = kept.trace.span_id

        def at(seconds: float) -> int:
            return kept.started_ns + int((seconds - kept.started_s) * 1e9)

        # A client's mistake is not the server's error: the conventions mark only 5xx.
        yield self._span(
            kept.trace,
            f"{kept.method} {kept.path}",
            own,
            kept.trace.parent_span_id,
            (kept.started_ns, at(kept.started_s + kept.duration_s)),
            SpanKind.SERVER,
            _request_facts(kept),
            error=kept.error or str(kept.status) if kept.status >= 500 else "",
            link=kept.before,
        )
        for stage in kept.stages:
            times = (at(stage.start_s), at(stage.start_s + stage.duration_s))
            span_id = self._bits(64) or 1
            yield self._span(kept.trace, stage.name, span_id, own, times, SpanKind.INTERNAL, {})
        for each in kept.attempts:
            yield self._attempt(kept.trace, each)

    def _attempt(self, trace: Trace, traced: TracedAttempt) -> ReadableSpan:
        attempt, outcome = traced
        start_ns = attempt.started_at_ms * 1_000_000
        return self._span(
            trace,
            f"{OPERATION.get(attempt.operation, attempt.operation)} {attempt.upstream_model}",
            attempt_span_id(attempt.attempt_id),
            trace.span_id,
            (start_ns, start_ns + outcome.latency_ms * 1_000_000),
            SpanKind.CLIENT,
            _attempt_facts(attempt, outcome),
            error=outcome.error,
        )

    def _span(
        self,
        trace: Trace,
        name: str,
        span_id: int,
        parent: int,
        times_ns: tuple[int, int],
        kind: SpanKind,
        attributes: Mapping[str, str | int | float | Sequence[str]],
        *,
        error: str = "",
        link: Trace | None = None,
    ) -> ReadableSpan:
        links = [Link(_context(link, link.span_id), {"tollhouse.link": "previous_of_task"})] if link else []
        return ReadableSpan(
            name,
            _context(trace, span_id),
            _context(trace, parent) if parent else None,
            self._resource,
            attributes,
            links=links,
            kind=kind,
            status=Status(StatusCode.ERROR, error) if error else Status(StatusCode.UNSET),
            start_time=times_ns[0],
            end_time=times_ns[1],
            instrumentation_scope=self._scope,
        )


def _context(trace: Trace, span_id: int) -> SpanContext:
    return SpanContext(trace.trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _request_facts(r: TracedRequest) -> dict[str, str | int]:
    facts: dict[str, str | int] = {
        "http.request.method": r.method,
        "http.route": r.path,
        "http.response.status_code": r.status,
        "gen_ai.conversation.id": r.task_id,
        "tollhouse.task.id": r.task_id,
        "tollhouse.request.id": r.request_id,
        "tollhouse.client": redact(r.client),
    }
    if r.error:
        facts["error.type"] = r.error
    return facts


def _attempt_facts(attempt: Attempt, outcome: Outcome) -> dict[str, str | int | float | Sequence[str]]:
    usage = outcome.usage
    facts: dict[str, str | int | float | Sequence[str]] = {
        "gen_ai.operation.name": OPERATION.get(attempt.operation, attempt.operation),
        "gen_ai.provider.name": PROVIDER.get(attempt.provider, attempt.provider),
        "gen_ai.request.model": attempt.upstream_model,
        "gen_ai.response.finish_reasons": (redact(outcome.finish),),
        "gen_ai.conversation.id": attempt.task_id,
        "gen_ai.agent.name": redact(attempt.client),
        "tollhouse.task.id": attempt.task_id,
        "tollhouse.request.id": attempt.request_id,
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
    if outcome.upstream_request_id:
        facts["gen_ai.response.id"] = redact(outcome.upstream_request_id)
    if outcome.status:
        facts["http.response.status_code"] = outcome.status
    if outcome.first_token_ms is not None:
        facts["tollhouse.first_token_ms"] = outcome.first_token_ms
    if outcome.served_by is not None:
        facts["tollhouse.served_by"] = outcome.served_by
    if outcome.error:
        facts["error.type"] = outcome.error
    return facts


def otlp_tracing(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    resource: Mapping[str, str] | None = None,
    version: str = "",
    sampling: Sampling = Sampling(),  # noqa: B008 - immutable
    timeout_s: float = 5.0,
) -> Tracing:
    """Tracing to the collector's address for traces (`http://127.0.0.1:4318/v1/traces`)."""
    exporter = OTLPSpanExporter(endpoint=url, headers=dict(headers or {}), timeout=timeout_s)
    return Tracing(exporter, resource=resource, version=version, sampling=sampling)
