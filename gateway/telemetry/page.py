"""A registry as values: what one process counted at one moment, to be written as text, sent, or added to others.

Two text forms: Prometheus 0.0.4, and OpenMetrics 1.0 (https://prometheus.io/docs/specs/om/open_metrics_spec/, read
November 2026), which alone has room for exemplars.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from gateway.core.money import NANO_PER_USD, usd_text

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Labels = tuple[str, ...]
#: How the gauges of several processes become one: a number of things is added, a state is the best or worst of them.
Across = Literal["sum", "max", "min"]


class Exemplar(msgspec.Struct, frozen=True, array_like=True):
    """One request that fell into a bucket: how long it took, its span (ids in hex), and when that was (1970 UTC)."""

    value: float
    trace_id: str
    span_id: str
    at_s: float


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A value of one combination of labels. Of a histogram: the sum, a count per bucket (the last above all bounds),
    and the newest exemplar of each bucket, or no exemplars at all."""

    labels: Labels
    value: int | float
    counts: tuple[int, ...] = ()
    exemplars: tuple[Exemplar | None, ...] = ()


class Family(msgspec.Struct, frozen=True):
    """A metric with all its samples. `nano`: values are billionths of what the name says (dollars)."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: Labels
    samples: tuple[Sample, ...]
    bounds: tuple[float, ...] = ()
    nano: bool = False
    across: Across = "sum"

    def as_float(self, sample: Sample) -> float:
        return sample.value / NANO_PER_USD if self.nano else float(sample.value)


def wants_openmetrics(accept: str) -> bool:
    """Whether an `Accept` header prefers OpenMetrics to the older text."""
    wish = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for part in accept.split(","):
        kind, *parameters = (word.strip() for word in part.lower().split(";"))
        if kind in wish:
            weights = [p.removeprefix("q=") for p in parameters if p.startswith("q=")]
            try:
                weight = float(weights[0]) if weights else 1.0
            except ValueError:
                weight = 0.0
            wish[kind] = max(wish[kind], weight)
    openmetrics, text = wish.values()
    return openmetrics > 0 and openmetrics >= text


def written(families: Iterable[Family], *, openmetrics: bool = False) -> bytes:
    """The page for a scrape, of content type `PROMETHEUS` or `OPENMETRICS`."""
    text = "".join(family_text(family, openmetrics=openmetrics) for family in families)
    return (text + "# EOF\n" if openmetrics else text).encode()


def family_text(family: Family, *, openmetrics: bool = False) -> str:
    name = family.name
    # OpenMetrics names a counter without the ending that its samples have.
    head_name = name.removesuffix("_total") if openmetrics and family.kind == "counter" else name
    out = [_head(head_name, family.kind, family.text, openmetrics)]
    if family.kind == "histogram":
        for sample in family.samples:
            out += _histogram_lines(family, sample, openmetrics)
    else:
        out += [_line(name, family.labels, s.labels, _number(s.value, family.nano)) for s in family.samples]
    return "".join(out)


def _histogram_lines(family: Family, sample: Sample, openmetrics: bool) -> Iterable[str]:
    total = 0
    with_le = (*family.labels, "le")
    exemplars: Sequence[Exemplar | None] = sample.exemplars if openmetrics else ()
    for at, count in enumerate(sample.counts):
        total += count
        bound = repr(family.bounds[at]) if at < len(family.bounds) else "+Inf"
        line = _line(f"{family.name}_bucket", with_le, (*sample.labels, bound), str(total))
        exemplar = exemplars[at] if exemplars else None
        if exemplar is not None:
            of = f'{{trace_id="{exemplar.trace_id}",span_id="{exemplar.span_id}"}}'
            line = f"{line[:-1]} # {of} {exemplar.value!r} {exemplar.at_s:.3f}\n"
        yield line
    yield _line(f"{family.name}_sum", family.labels, sample.labels, repr(float(sample.value)))
    yield _line(f"{family.name}_count", family.labels, sample.labels, str(total))


def _number(value: int | float, nano: bool) -> str:
    return usd_text(int(value)) if nano else repr(value)


def escaped(value: str) -> str:
    """A label value as it stands between double quotes."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _head(name: str, kind: str, text: str, openmetrics: bool) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    if openmetrics:
        text = text.replace('"', '\\"')
        return f"# TYPE {name} {kind}\n# HELP {name} {text}\n"
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


def _line(name: str, labels: Iterable[str], values: Iterable[str], value: str) -> str:
    pairs = ",".join(f'{k}="{escaped(v)}"' for k, v in zip(labels, values, strict=True))
    return f"{name}{{{pairs}}} {value}\n" if pairs else f"{name} {value}\n"
