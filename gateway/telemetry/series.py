"""Counters, gauges and histograms as plain dicts.

An increment is a dict look-up and an addition, 0.2 to 0.3 us. What a scrape needs is made when somebody scrapes
(`page`).

A family never holds more than twice `max_series` series (and one), whatever its callers pass: a Prometheus
server dies of label values that somebody outside may choose.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from gateway.telemetry.page import Across, Exemplar, Family, Labels, Sample

#: What stands in for a label value that is unknown, or one too many.
OTHER = "other"


class _Series:
    """A metric's name, its label names, and the guard on how many combinations of them there may be."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Labels = (),
        *,
        open_labels: Sequence[str] = (),
        max_series: int = 2_000,
    ) -> None:
        unknown = set(open_labels) - set(labels)
        if unknown:
            raise ValueError(f"{name} has no label {sorted(unknown)}")
        self.name, self.text, self.labels = name, text, labels
        self._open = tuple(label in open_labels for label in labels)
        self._max = max_series

    def _admit(self, key: Labels, known: Mapping[Labels, object]) -> Labels:
        """The combination to count a new `key` under: itself, with its open labels collapsed, or all collapsed."""
        if len(key) != len(self.labels):
            raise ValueError(f"{self.name} needs values for {self.labels}, not {key}")
        if len(known) < self._max:
            return key
        key = tuple(OTHER if is_open else v for v, is_open in zip(key, self._open, strict=True))
        if key in known or len(known) < 2 * self._max:
            return key
        return (OTHER,) * len(self.labels)


class Counter(_Series):
    """A sum of integers that only grows; with `nano` they are billionths of the unit in its name."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Labels = (),
        *,
        open_labels: Sequence[str] = (),
        max_series: int = 2_000,
        nano: bool = False,
    ) -> None:
        super().__init__(name, text, labels, open_labels=open_labels, max_series=max_series)
        self._nano = nano
        self._values: dict[Labels, int] = {}

    def add(self, key: Labels, amount: int = 1) -> None:
        try:
            self._values[key] += amount
        except KeyError:
            key = self._admit(key, self._values)
            self._values[key] = self._values.get(key, 0) + amount

    def read(self) -> Family:
        samples = tuple(Sample(k, v) for k, v in sorted(self._values.items()))
        return Family(self.name, "counter", self.text, self.labels, samples, nano=self._nano)


class Histogram(_Series):
    """Observations counted into buckets; `bounds` are the upper ends, rising, without +Inf."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Labels,
        bounds: Sequence[float],
        *,
        open_labels: Sequence[str] = (),
        max_series: int = 2_000,
    ) -> None:
        super().__init__(name, text, labels, open_labels=open_labels, max_series=max_series)
        if list(bounds) != sorted(set(bounds)):
            raise ValueError(f"the bounds of {name} must rise: {bounds}")
        self._bounds = tuple(bounds)
        #: per series: one count per bucket, the last one is above all bounds; then the sum
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        self._exemplars: dict[Labels, list[Exemplar | None]] = {}

    def observe(self, key: Labels, value: float) -> None:
        counts = self._counts.get(key)
        if counts is None:
            key = self._admit(key, self._counts)
            counts = self._counts.setdefault(key, [0] * (len(self._bounds) + 1))
            self._sums.setdefault(key, 0.0)
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[key] += value

    def exemplify(self, key: Labels, exemplar: Exemplar) -> None:
        """Keep this as the newest exemplar of the bucket that its value, already observed, fell into."""
        if key in self._counts:
            kept = self._exemplars.setdefault(key, [None] * (len(self._bounds) + 1))
            kept[bisect_left(self._bounds, exemplar.value)] = exemplar

    def read(self) -> Family:
        samples = tuple(
            Sample(key, self._sums[key], tuple(counts), tuple(self._exemplars.get(key, ())))
            for key, counts in sorted(self._counts.items())
        )
        return Family(self.name, "histogram", self.text, self.labels, samples, self._bounds)


#: What a gauge reads: one number, or one per combination of label values.
Reading = float | Mapping[Labels, float]


class Gauge(_Series):
    """A value that is read when somebody scrapes; `kind` is "counter" for one that only grows."""

    def __init__(
        self,
        name: str,
        text: str,
        read: Callable[[], Reading],
        labels: Labels = (),
        *,
        kind: Literal["gauge", "counter"] = "gauge",
        across: Across = "sum",
        nano: bool = False,
    ) -> None:
        super().__init__(name, text, labels)
        self._read, self._kind, self._across, self._nano = read, kind, across, nano

    def read(self) -> Family:
        reading = self._read()
        values: Mapping[Labels, float] = reading if isinstance(reading, Mapping) else {(): reading}
        samples = tuple(Sample(k, v) for k, v in sorted(values.items())[: self._max])
        return Family(
            self.name, self._kind, self.text, self.labels, samples, nano=self._nano, across=self._across
        )
