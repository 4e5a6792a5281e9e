"""Metrics for an OTLP collector: the registry as it stands, read every minute and sent by a thread.

No instrument of the SDK exists: what is counted lies in `series`, and its observable instruments know no histograms.
Names are those of the Prometheus page without `_total`, units in UCUM; a collector that writes them for Prometheus
again gets the same names. Sums are cumulative. Every worker sends its own, told apart by `service.instance.id`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import Exemplar as SdkExemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from gateway.telemetry.page import Exemplar, Family, Sample

_log = logging.getLogger(__name__)
_UNITS = (("_seconds", "s"), ("_bytes", "By"), ("_usd", "{USD}"))
_GENAI_UNITS = {"gen_ai.client.token.usage": "{token}"}
#: Not known of a histogram of ours; the exporter then leaves the field out.
_UNKNOWN = cast(float, None)


class MetricsExport:
    """`run` sends `read()` every `every_s`; `close` sends it once more. A collector that is down costs a line in the log."""

    def __init__(
        self,
        exporter: MetricExporter,
        read: Callable[[], Iterable[Family]],
        *,
        resource: Mapping[str, str],
        version: str = "",
        every_s: float = 60.0,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._exporter = exporter
        self._read = read
        self._resource = Resource(dict(resource))
        self._scope = InstrumentationScope("tollhouse", version)
        self._every_s = every_s
        self._now_ns = now_ns
        self._started_ns = now_ns()
        self._failing = False
        self.failed = 0

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(self._every_s)
            await self.once()

    async def once(self) -> None:
        """Send everything as it stands. Read here, on the loop that counts; sent by a thread."""
        families = list(self._read())
        now_ns = self._now_ns()
        try:
            sent = await asyncio.to_thread(self._send, families, now_ns)
        except Exception:
            _log.exception("metrics cannot be written for the collector")
            sent = False
        if not sent:
            self.failed += 1
            if not self._failing:
                _log.warning("the OTLP collector does not take metrics; said once until it does")
        self._failing = not sent

    async def close(self) -> None:
        await self.once()
        await asyncio.to_thread(self._exporter.shutdown)

    def _send(self, families: list[Family], now_ns: int) -> bool:
        metrics = [metric(family, self._started_ns, now_ns) for family in families if family.samples]
        scope = ScopeMetrics(self._scope, metrics, "")
        data = MetricsData([ResourceMetrics(self._resource, [scope], "")])
        return self._exporter.export(data) is MetricExportResult.SUCCESS


def metric(family: Family, started_ns: int, now_ns: int) -> Metric:
    """One family in the SDK's form."""
    name = family.name.removesuffix("_total")
    data: Sum | Gauge | Histogram
    if family.kind == "histogram":
        points = [_buckets(family, sample, started_ns, now_ns) for sample in family.samples]
        data = Histogram(points, AggregationTemporality.CUMULATIVE)
    else:
        numbers = [
            NumberDataPoint(_attributes(family, s), started_ns, now_ns, _value(family, s))
            for s in family.samples
        ]
        data = (
            Sum(numbers, AggregationTemporality.CUMULATIVE, True)
            if family.kind == "counter"
            else Gauge(numbers)
        )
    return Metric(name, family.text, _unit(name), data)


def _unit(name: str) -> str:
    if name.startswith("gen_ai."):
        return _GENAI_UNITS.get(name, "s")
    return next((unit for ending, unit in _UNITS if name.endswith(ending)), "1")


def _value(family: Family, sample: Sample) -> int | float:
    return family.as_float(sample) if family.nano else sample.value


def _attributes(family: Family, sample: Sample) -> dict[str, str]:
    """An empty value says that the label does not apply."""
    return {name: value for name, value in zip(family.labels, sample.labels, strict=True) if value}


def _buckets(family: Family, sample: Sample, started_ns: int, now_ns: int) -> HistogramDataPoint:
    return HistogramDataPoint(
        _attributes(family, sample),
        started_ns,
        now_ns,
        sum(sample.counts),
        float(sample.value),
        sample.counts,
        family.bounds,
        _UNKNOWN,
        _UNKNOWN,
        [_exemplar(e) for e in sample.exemplars if e is not None],
    )


def _exemplar(exemplar: Exemplar) -> SdkExemplar:
    return SdkExemplar(
        {},
        exemplar.value,
        int(exemplar.at_s * 1e9),
        int(exemplar.span_id, 16),
        int(exemplar.trace_id, 16),
    )


def otlp_metrics(
    url: str,
    read: Callable[[], Iterable[Family]],
    *,
    headers: Mapping[str, str],
    resource: Mapping[str, str],
    version: str,
    every_s: float,
    timeout_s: float,
) -> MetricsExport:
    """To the collector's address for metrics (`http://127.0.0.1:4318/v1/metrics`)."""
    exporter = OTLPMetricExporter(endpoint=url, headers=dict(headers), timeout=timeout_s)
    return MetricsExport(exporter, read, resource=resource, version=version, every_s=every_s)
