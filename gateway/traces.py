"""What leaves for an OTLP collector: spans of requests as they end, and the registry of metrics.

Made only where a collector is configured: the exporters and what they import are 20 MB that most do not need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from itertools import chain
from typing import Any

from gateway import __version__
from gateway.core.entry import Attempt, Outcome
from gateway.edge.server import Done
from gateway.settings import Telemetry
from gateway.tasks import Tasks
from gateway.telemetry.genai import GenAiMetrics
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.otel import (
    Sampling,
    Trace,
    TracedAttempt,
    TracedLate,
    TracedRequest,
    Tracing,
    otlp_tracing,
    traceparent_for,
)
from gateway.telemetry.otel_metrics import MetricsExport, otlp_metrics

#: Requests whose attempts, or whose place in a trace, are kept until they end; more are forgotten, the oldest first.
KEPT_MAX = 10_000


class Traces:
    """The place of each request under way in a trace, and what its attempts were."""

    def __init__(self, tracing: Tracing, now_ms: Callable[[], int]) -> None:
        self._tracing = tracing
        self._now_ms = now_ms
        self._begun: dict[str, Trace] = {}
        self._attempts: dict[str, list[TracedAttempt]] = {}
        self._left: dict[str, Trace] = {}  # recorded, but what the provider does may not have ended

    def header(self, request_id: str, attempt_id: str, given: str | None) -> str:
        """The `traceparent` for the provider of an attempt; `given` is what the client sent."""
        trace = self._begun.get(request_id)
        if trace is None:
            trace = self._begun[request_id] = self._tracing.begin(given)
            _keep_newest(self._begun)
        return traceparent_for(trace, attempt_id)

    def attempt(self, attempt: Attempt, outcome: Outcome) -> None:
        """One attempt has ended, before its request or after it."""
        traced = TracedAttempt(attempt, outcome)
        trace = self._left.pop(attempt.request_id, None)
        if trace is not None:
            self._tracing.record(TracedLate(trace, traced))
            return
        self._attempts.setdefault(attempt.request_id, []).append(traced)
        _keep_newest(self._attempts)

    def done(self, done: Done, status: int, duration_s: float) -> tuple[str, str] | None:
        """A request has ended; its trace and span id if it is recorded."""
        attempts = self._attempts.pop(done.request_id, [])
        trace = self._begun.pop(done.request_id, None) or self._tracing.begin(done.traceparent)
        if not self._tracing.wants(trace, status, duration_s):
            return None
        if done.client_gone:
            self._left[done.request_id] = trace
            _keep_newest(self._left)
        self._tracing.record(
            TracedRequest(
                trace=trace,
                request_id=done.request_id,
                method=done.method,
                path=f"/v1/{done.operation}" if done.operation else "other",
                status=status,
                error=done.error,
                client=done.client,
                task_id=done.task_id,
                started_ns=self._now_ms() * 1_000_000 - int(duration_s * 1e9),
                started_s=done.steps.started_s,
                duration_s=duration_s,
                stages=done.steps.spans(),
                attempts=attempts,
            )
        )
        return trace.ids


def _keep_newest(kept: dict[str, Any]) -> None:
    while len(kept) > KEPT_MAX:
        del kept[next(iter(kept))]


def send(
    telemetry: Telemetry,
    replica_id: str,
    metrics: Metrics,
    now_ms: Callable[[], int],
    jobs: Tasks,
    stack: AsyncExitStack,
) -> tuple[Traces | None, GenAiMetrics | None]:
    """Start what is configured of the two; `stack` ends it, with a last word to the collector."""
    traces = genai = None
    if telemetry.traces_url:
        tracing = tracing_to(telemetry, replica_id)
        tracing.start()
        stack.push_async_callback(asyncio.to_thread, tracing.close)
        traces = Traces(tracing, now_ms)
    if telemetry.metrics_url:
        genai = GenAiMetrics()
        export = metrics_to(telemetry, replica_id, metrics, genai)
        jobs.watch(export.run(), "metrics export")
        stack.push_async_callback(export.close)
    return traces, genai


def tracing_to(telemetry: Telemetry, replica_id: str) -> Tracing:
    """As configured; not started."""
    return otlp_tracing(
        telemetry.traces_url,
        headers=_headers(telemetry),
        resource=_resource(telemetry, replica_id),
        version=__version__,
        sampling=Sampling(
            telemetry.sampling_ratio,
            telemetry.follow_parent,
            telemetry.sample_errors,
            telemetry.sample_slower_than_s,
        ),
        timeout_s=telemetry.timeout_s,
    )


def metrics_to(telemetry: Telemetry, replica_id: str, metrics: Metrics, genai: GenAiMetrics) -> MetricsExport:
    """As configured; not started."""
    return otlp_metrics(
        telemetry.metrics_url,
        lambda: chain(metrics.read(), genai.read()),
        headers=_headers(telemetry),
        resource=_resource(telemetry, replica_id),
        version=__version__,
        every_s=telemetry.metrics_every_s,
        timeout_s=telemetry.timeout_s,
    )


def _headers(telemetry: Telemetry) -> dict[str, str]:
    return {name: secret.reveal() for name, secret in telemetry.headers.items()}


def _resource(telemetry: Telemetry, replica_id: str) -> Mapping[str, str]:
    return {
        "service.instance.id": replica_id,
        **telemetry.resource,
        "service.name": telemetry.service_name,
        "service.version": __version__,
    }
