"""`telemetry`: where traces and metrics go. What the file leaves open comes from the standard OTEL_* variables
(opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables, and .../protocol/exporter; read November 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote

from gateway.settings.model import Secret, Telemetry
from gateway.settings.section import Section

_RATIO = frozenset({"traceidratio", "parentbased_traceidratio"})
_SAMPLERS = {
    "always_on": 1.0,
    "always_off": 0.0,
    "parentbased_always_on": 1.0,
    "parentbased_always_off": 0.0,
}
_MOST_S = 86_400.0


def read_telemetry(section: Section, env: Mapping[str, str]) -> Telemetry:
    """Without an endpoint nothing leaves. A variable that makes no sense is a problem, named beside the section."""
    given = _Variables(section, env)
    ratio, follow_parent = given.sampler()
    base = _url(section, "otlp_endpoint", given.text("OTEL_EXPORTER_OTLP_ENDPOINT"))
    traces = given.text("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or _below(base, "traces")
    metrics = given.text("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT") or _below(base, "metrics")
    on = given.text("OTEL_SDK_DISABLED").lower() != "true"
    traces = traces if section.flag("traces", given.text("OTEL_TRACES_EXPORTER") != "none") and on else ""
    metrics = metrics if section.flag("metrics", given.text("OTEL_METRICS_EXPORTER") != "none") and on else ""
    protocol = given.text("OTEL_EXPORTER_OTLP_PROTOCOL") or "http/protobuf"
    if (traces or metrics) and protocol != "http/protobuf":
        section.wrong("", f"OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf, not {protocol!r}")
    resource = given.pairs("OTEL_RESOURCE_ATTRIBUTES")
    name = resource.pop("service.name", "")
    name = given.text("OTEL_SERVICE_NAME") or name
    headers = {
        key: Secret(value) for key, value in given.pairs("OTEL_EXPORTER_OTLP_HEADERS").items()
    }  # often an API key
    telemetry = Telemetry(
        traces_url=traces,
        metrics_url=metrics,
        headers=headers,
        sampling_ratio=section.number("sampling_ratio", ratio, 0.0, 1.0),
        follow_parent=section.flag("follow_parent", follow_parent),
        sample_errors=section.flag("sample_errors", False),
        sample_slower_than_s=section.number("sample_slower_than_s", 0.0, 0.0, _MOST_S),
        metrics_every_s=section.number(
            "metrics_every_s", given.number("OTEL_METRIC_EXPORT_INTERVAL", 60_000) / 1e3, 0.1, _MOST_S
        ),
        timeout_s=given.number("OTEL_EXPORTER_OTLP_TIMEOUT", 10_000) / 1e3,
        service_name=section.text("service_name", name or "tollhouse"),
        resource=resource,
    )
    section.done()
    return telemetry


def _url(section: Section, key: str, default: str) -> str:
    url = section.text(key, default)
    if url and not url.startswith(("http://", "https://")):
        section.wrong(key, f"must be an http or https URL, not {url!r}")
    return url


def _below(base: str, signal: str) -> str:
    return f"{base.rstrip('/')}/v1/{signal}" if base else ""


class _Variables:
    """OTEL_* as text, numbers and pairs."""

    def __init__(self, section: Section, env: Mapping[str, str]) -> None:
        self._section, self._env = section, env

    def text(self, name: str) -> str:
        return self._env.get(name, "").strip()

    def number(self, name: str, default: float) -> float:
        """More than nothing."""
        text = self.text(name)
        try:
            number = float(text) if text else default
        except ValueError:
            number = 0.0
        if not 0 < number < float("inf"):
            self._section.wrong("", f"{name} must be a number above 0, not {text!r}")
            return default
        return number

    def pairs(self, name: str) -> dict[str, str]:
        """`key=value,key=value`, percent-encoded."""
        found = {}
        for part in filter(None, (p.strip() for p in self.text(name).split(","))):
            key, equals, value = part.partition("=")
            if not (key.strip() and equals):
                self._section.wrong("", f"{name} must be key=value,key=value")  # it may hold a secret
                return {}
            found[unquote(key.strip())] = unquote(value.strip())
        return found

    def sampler(self) -> tuple[float, bool]:
        """Ratio, and whether a caller's verdict is followed."""
        name = self.text("OTEL_TRACES_SAMPLER").lower()
        follow = not name or name.startswith("parentbased_")
        if name in _RATIO:
            text = self.text("OTEL_TRACES_SAMPLER_ARG") or "1"
            try:
                ratio = float(text)
            except ValueError:
                ratio = -1.0
            if not 0 <= ratio <= 1:
                self._section.wrong("", f"OTEL_TRACES_SAMPLER_ARG must be from 0 to 1, not {text!r}")
                return 1.0, follow
            return ratio, follow
        if name and name not in _SAMPLERS:
            known = ", ".join(sorted({*_SAMPLERS, *_RATIO}))
            self._section.wrong("", f"OTEL_TRACES_SAMPLER must be one of {known}, not {name!r}")
        return _SAMPLERS.get(name, 1.0), follow
