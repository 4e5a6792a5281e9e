"""Metrics as a collector receives them."""

from __future__ import annotations

import logging

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, Metric

from gateway.telemetry.genai import GenAiMetrics
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.otel_metrics import MetricsExport, otlp_metrics
from tests.support.collector import Collector
from tests.telemetry.facts import CATALOG, attempt, outcome


def export(collector: Collector, metrics: Metrics, genai: GenAiMetrics) -> MetricsExport:
    return otlp_metrics(
        f"{collector.url}/v1/metrics",
        lambda: [*metrics.read(), *genai.read()],
        headers={"x-scope": "tests"},
        resource={"service.name": "tollhouse", "service.instance.id": "one"},
        version="0.1.0",
        every_s=60.0,
        timeout_s=0.5,
    )


def received(collector: Collector) -> dict[str, Metric]:
    """Of the last post."""
    body = ExportMetricsServiceRequest.FromString(collector.bodies("/v1/metrics")[-1])
    (resource,) = body.resource_metrics
    assert {a.key: a.value.string_value for a in resource.resource.attributes} == {
        "service.name": "tollhouse",
        "service.instance.id": "one",
    }
    return {metric.name: metric for metric in resource.scope_metrics[0].metrics}


async def test_a_collector_gets_what_a_scrape_would(collector: Collector) -> None:
    metrics, genai = Metrics(CATALOG), GenAiMetrics()
    sending = export(collector, metrics, genai)
    metrics.attempt(attempt(), outcome())
    genai.attempt(attempt(), outcome())
    metrics.request(
        operation="chat",
        client="codex",
        status=200,
        duration_s=0.3,
        span=("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"),
        at_s=1_800_000_000.0,
    )
    await sending.close()

    assert [(path, headers["x-scope"]) for path, headers, _ in collector.got] == [("/v1/metrics", "tests")]
    found = received(collector)
    cost = found["tollhouse_cost_usd"]
    (point,) = cost.sum.data_points
    assert (cost.unit, cost.sum.is_monotonic, point.as_double) == ("{USD}", True, 0.03765)
    assert cost.sum.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    assert {a.key: a.value.string_value for a in point.attributes} == {
        "model": "large",
        "provider": "acme",
        "team": "core",
    }
    took = found["tollhouse_request_duration_seconds"]
    (bucket,) = took.histogram.data_points
    assert (took.unit, bucket.count, bucket.sum, list(bucket.bucket_counts).index(1)) == ("s", 1, 0.3, 6)
    assert list(bucket.explicit_bounds)[5:7] == [0.25, 0.5]
    assert not bucket.HasField("min")
    (exemplar,) = bucket.exemplars
    assert (exemplar.trace_id.hex(), exemplar.as_double) == ("4bf92f3577b34da6a3ce929d0e0e4736", 0.3)
    assert found["process_resident_memory_bytes"].gauge.data_points[0].as_double > 1e6
    assert found["process_resident_memory_bytes"].unit == "By"

    tokens = {
        {a.key: a.value.string_value for a in p.attributes}["gen_ai.token.type"]: p.sum
        for p in found["gen_ai.client.token.usage"].histogram.data_points
    }
    assert tokens == {"input": 1_050.0, "output": 20.0}
    (call,) = found["gen_ai.client.operation.duration"].histogram.data_points
    assert (call.sum, {a.key: a.value.string_value for a in call.attributes}) == (
        1.5,
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "acme",
            "gen_ai.request.model": "large-2026",
        },
    )
    assert found["gen_ai.client.operation.time_to_first_chunk"].histogram.data_points[0].sum == 0.4


async def test_a_collector_that_refuses_is_told_of_once(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = Metrics(CATALOG)
    sending = export(collector, metrics, GenAiMetrics())
    collector.status = 400
    with caplog.at_level(logging.WARNING, "gateway.telemetry.otel_metrics"):
        for _ in range(3):
            await sending.once()
    assert sending.failed == 3
    assert [r.message for r in caplog.records if r.name == "gateway.telemetry.otel_metrics"] == [
        "the OTLP collector does not take metrics; said once until it does"
    ]
    collector.status = 200
    await sending.close()
    assert sending.failed == 3
