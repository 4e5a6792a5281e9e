"""Traces as a collector receives them: a real OTLP/HTTP receiver on the loopback."""

from __future__ import annotations

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.telemetry.otel import (
    Parent,
    Sampling,
    Trace,
    TracedAttempt,
    TracedLate,
    TracedRequest,
    Tracing,
    attempt_span_id,
    otlp_tracing,
    parse_traceparent,
    traceparent_for,
)
from gateway.telemetry.steps import Span
from tests.support.collector import Collector
from tests.telemetry.facts import attempt, outcome

HEADER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE_ID = 0x4BF92F3577B34DA6A3CE929D0E0E4736
SPAN_ID = 0x00F067AA0BA902B7


RESOURCE = {"service.name": "tollhouse", "service.version": "0.1.0"}


def request(trace: Trace, status: int = 200, error: str = "") -> TracedRequest:
    return TracedRequest(
        trace=trace,
        request_id="req_" + "1" * 32,
        method="POST",
        path="/v1/chat/completions",
        status=status,
        error=error,
        client="claude-code",
        task_id="task_" + "2" * 32,
        started_ns=1_800_000_000_000_000_000,
        started_s=50.0,
        duration_s=2.0,
        stages=(Span("read", 50.0, 0.25), Span("call", 50.25, 1.5)),
        attempts=(
            TracedAttempt(attempt(1), outcome(0, error="upstream_timeout")),
            TracedAttempt(attempt(2), outcome()),
        ),
    )


def test_a_collector_gets_the_request_its_stages_and_its_attempts(collector: Collector) -> None:
    tracing = otlp_tracing(
        f"{collector.url}/v1/traces", headers={"x-scope": "tests"}, resource=RESOURCE, version="0.1.0"
    )
    tracing.start()
    trace = tracing.begin(HEADER)
    tracing.record(request(trace))
    tracing.close()

    ((path, headers, sent),) = collector.got
    assert (path, headers["x-scope"]) == ("/v1/traces", "tests")
    body = ExportTraceServiceRequest.FromString(sent)
    (resource,) = body.resource_spans
    assert {a.key: a.value.string_value for a in resource.resource.attributes} == {
        "service.name": "tollhouse",
        "service.version": "0.1.0",
    }
    spans = resource.scope_spans[0].spans
    assert {s.trace_id.hex() for s in spans} == {"4bf92f3577b34da6a3ce929d0e0e4736"}
    own = f"{trace.span_id:016x}"
    ms = [
        (s.name, s.parent_span_id.hex(), (s.start_time_unix_nano - 1_800_000_000_000_000_000) // 10**6,
         (s.end_time_unix_nano - s.start_time_unix_nano) // 10**6, s.status.code)
        for s in spans
    ]  # fmt: skip
    assert ms == [
        ("POST /v1/chat/completions", "00f067aa0ba902b7", 0, 2000, 0),
        ("read", own, 0, 250, 0),
        ("call", own, 250, 1500, 0),
        ("chat large-2026", own, 0, 1500, 2),
        ("chat large-2026", own, 0, 1500, 0),
    ]


def test_usage_follows_the_conventions_and_input_includes_cached_tokens() -> None:
    kept = InMemorySpanExporter()
    tracing = Tracing(kept)
    tracing.record(request(tracing.begin(HEADER)))
    tracing.flush()

    facts = dict(kept.get_finished_spans()[-1].attributes or {})
    assert facts == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "acme",
        "gen_ai.request.model": "large-2026",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.conversation.id": f"task_{2:032x}",
        "gen_ai.agent.name": "claude-code",
        "gen_ai.response.id": "up-1",
        "tollhouse.task.id": f"task_{2:032x}",
        "tollhouse.request.id": f"req_{2:032x}",
        "gen_ai.usage.input_tokens": 1050,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 900,
        "gen_ai.usage.cache_creation.input_tokens": 50,
        "gen_ai.usage.reasoning.output_tokens": 5,
        "tollhouse.attempt.id": f"att_{2:032x}",
        "tollhouse.attempt.number": 1,
        "tollhouse.deployment": "large-eu",
        "tollhouse.tier": "standard",
        "tollhouse.rule": "default",
        "tollhouse.entry.kind": "post",
        "tollhouse.entry.quality": "exact",
        "tollhouse.cost_nano_usd": 37_650_000,
        "tollhouse.list_cost_nano_usd": 75_300_000,
        "http.response.status_code": 200,
        "tollhouse.first_token_ms": 400,
    }


def test_only_the_servers_own_errors_mark_the_request() -> None:
    kept = InMemorySpanExporter()
    tracing = Tracing(kept)
    trace = tracing.begin(HEADER)
    tracing.record(request(trace, 402, "budget_exceeded"))
    tracing.record(request(trace, 503, "ledger_unavailable"))
    tracing.flush()

    roots = [s for s in kept.get_finished_spans() if s.name.startswith("POST")]
    assert [(s.status.is_unset, (s.attributes or {})["error.type"]) for s in roots] == [
        (True, "budget_exceeded"),
        (False, "ledger_unavailable"),
    ]


@pytest.mark.parametrize(
    ("header", "parent"),
    [
        (HEADER, Parent(TRACE_ID, SPAN_ID, True)),
        (HEADER[:-2] + "00", Parent(TRACE_ID, SPAN_ID, False)),
        ("01" + HEADER[2:] + "-later-fields", Parent(TRACE_ID, SPAN_ID, True)),
        (HEADER + "-extra", None),
        ("ff" + HEADER[2:], None),
        ("00-" + "0" * 32 + HEADER[35:], None),
        (HEADER[:36] + "0" * 16 + "-01", None),
        (HEADER.upper(), None),
        ("00-short-01", None),
        ("", None),
        (None, None),
        (HEADER + "0" * 10_000, None),
    ],
)
def test_traceparent_is_taken_only_as_written_in_the_standard(
    header: str | None, parent: Parent | None
) -> None:
    assert parse_traceparent(header) == parent


def test_the_provider_is_told_the_attempt_as_its_parent() -> None:
    trace = Trace(TRACE_ID, 1, SPAN_ID, True)
    attempt_id = "att_0190a1b2c3d47e5f8a1b2c3d4e5f6071"
    assert traceparent_for(trace, attempt_id) == "00-4bf92f3577b34da6a3ce929d0e0e4736-8a1b2c3d4e5f6071-01"
    assert attempt_span_id(attempt_id) == 0x8A1B2C3D4E5F6071


def test_roots_are_sampled_by_trace_id_and_children_follow_their_parent() -> None:
    low, high = 1 << 61, (1 << 62) + 1
    ids = iter([7, low, 7, high, 7, 7])
    kept = InMemorySpanExporter()
    tracing = Tracing(kept, sampling=Sampling(0.5), random_bits=lambda _: next(ids))

    assert tracing.begin(None) == Trace(low, 7, 0, True)
    unsampled = tracing.begin(None)
    assert unsampled == Trace(high, 7, 0, False)
    assert tracing.begin(HEADER[:-2] + "00") == Trace(TRACE_ID, 7, SPAN_ID, False)
    assert tracing.begin(HEADER) == Trace(TRACE_ID, 7, SPAN_ID, True)

    assert not tracing.wants(unsampled, 503, 60.0)


def test_a_caller_who_is_not_followed_is_joined_and_sampled_like_anybody() -> None:
    for ratio, sampled in ((0.0, False), (1.0, True)):
        tracing = Tracing(
            InMemorySpanExporter(), sampling=Sampling(ratio, follow_parent=False), random_bits=lambda _: 7
        )
        assert tracing.begin(HEADER) == Trace(TRACE_ID, 7, SPAN_ID, sampled)


def test_what_failed_or_was_slow_is_kept_where_that_is_asked_for() -> None:
    tracing = Tracing(InMemorySpanExporter(), sampling=Sampling(0.0, errors=True, slower_than_s=5.0))
    trace = tracing.begin(None)
    assert [
        tracing.wants(trace, status, duration_s)
        for status, duration_s in ((200, 4.9), (404, 0.1), (503, 0.1), (200, 5.0))
    ] == [False, False, True, True]


def test_a_request_points_to_the_one_before_it_in_its_task() -> None:
    kept = InMemorySpanExporter()
    tracing = Tracing(kept)
    first, second = tracing.begin(None), tracing.begin(None)
    for trace in (first, second, second):
        tracing.record(request(trace)._replace(stages=(), attempts=()))
    tracing.flush()
    links = [[(x.context.trace_id, x.context.span_id) for x in s.links] for s in kept.get_finished_spans()]
    assert links == [[], [(first.trace_id, first.span_id)], []]


def test_an_attempt_that_ends_after_its_request_belongs_to_its_trace() -> None:
    kept = InMemorySpanExporter()
    tracing = Tracing(kept)
    trace = tracing.begin(HEADER)
    tracing.record(TracedLate(trace, TracedAttempt(attempt(3), outcome(finish="client_gone"))))
    tracing.flush()
    (span,) = kept.get_finished_spans()
    assert (span.name, span.context and span.context.trace_id, span.parent and span.parent.span_id) == (
        "chat large-2026",
        TRACE_ID,
        trace.span_id,
    )


def test_a_full_queue_drops_and_counts() -> None:
    kept = InMemorySpanExporter()
    tracing = Tracing(kept, capacity=2)
    trace = tracing.begin(HEADER)
    for _ in range(5):
        tracing.record(request(trace))
    tracing.close()

    assert tracing.dropped == 3
    assert len(kept.get_finished_spans()) == 2 * 5


def test_a_sample_ratio_above_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"from 0 to 1, not 1\.5"):
        Tracing(InMemorySpanExporter(), sampling=Sampling(1.5))
