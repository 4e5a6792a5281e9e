"""A gateway with a collector: where a trace comes from, where it goes on, and how metrics point to it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import aiohttp
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from gateway.app import App
from gateway.settings import Telemetry, ensure_pepper
from gateway.storage.accounts import Accounts
from tests.support.collector import collecting
from tests.support.recorder import Recorder
from tests.support.running import settings_for

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
GIVEN = f"00-{TRACE}-00f067aa0ba902b7-01"
ASK = {"model": "demo-fast", "max_tokens": 16, "messages": [{"role": "user", "content": "hi"}]}


async def test_a_trace_goes_from_the_client_through_the_gateway_to_the_provider(
    sqlite_url: str, tmp_path: Path
) -> None:
    with collecting() as collector:
        telemetry = Telemetry(f"{collector.url}/v1/traces", f"{collector.url}/v1/metrics", timeout_s=1.0)
        async with Recorder() as provider:
            settings = settings_for(sqlite_url, tmp_path, provider.base_url)
            settings = dataclasses.replace(settings, telemetry=telemetry)
            async with App(settings, replica_id="test", access_log=False) as app:
                accounts = Accounts(app.database, actor="test")
                await accounts.ensure_defaults()
                _, key = await accounts.create_key(pepper=ensure_pepper(settings), name="test")
                auth = {"Authorization": f"Bearer {key}", "x-task-id": "run"}
                url = f"http://127.0.0.1:{app.edge.port}/v1/chat/completions"
                async with aiohttp.ClientSession() as http:
                    for more in ({"traceparent": GIVEN}, {}):
                        async with http.post(url, json=ASK, headers={**auth, **more}) as answer:
                            assert answer.status == 200, await answer.text()
                    await app.quiet()
                    openmetrics = {"Accept": "application/openmetrics-text"}
                    at = f"http://127.0.0.1:{app.admin_port}/metrics"
                    async with http.get(at, headers=openmetrics) as answer:
                        kind, page = answer.headers["Content-Type"], await answer.text()
        told = [each.headers["traceparent"] for each in provider.received]
        spans = [
            span
            for body in collector.bodies("/v1/traces")
            for scope in ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans
            for span in scope.spans
        ]
        (metrics,) = collector.bodies("/v1/metrics")

    requests = [s for s in spans if s.name == "POST /v1/chat"]
    calls = [s for s in spans if s.name.startswith("chat ")]
    assert [f"00-{s.trace_id.hex()}-{s.span_id.hex()}-01" for s in calls] == told
    assert [(s.trace_id.hex(), s.parent_span_id.hex()) for s in requests[:1]] == [(TRACE, "00f067aa0ba902b7")]
    assert [s.parent_span_id for s in calls] == [s.span_id for s in requests]
    assert {"read", "identify", "shape", "route", "admit", "call"} <= {s.name for s in spans}
    assert [x.span_id for x in requests[1].links] == [requests[0].span_id]

    assert kind == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert page.endswith("# EOF\n")
    named = set(re.findall(r'# \{trace_id="(\w+)"', page))
    assert named <= {s.trace_id.hex() for s in requests}
    assert named
    names = {
        m.name
        for m in ExportMetricsServiceRequest.FromString(metrics).resource_metrics[0].scope_metrics[0].metrics
    }
    assert {"tollhouse_requests", "tollhouse_cost_usd", "gen_ai.client.operation.duration"} <= names
