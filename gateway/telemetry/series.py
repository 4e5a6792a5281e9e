"""Counters, gauges and histograms as plain dicts.

An increment is a dict look-up and an addition, 0.2 to 0.3 us, or the addition alone for who keeps the `cell` of a
series. What a scrape needs is made when somebody scrapes (`page`).

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
        self._cells: dict[Labels, list[int]] = {}

    def cell(self, key: Labels) -> list[int]:
        """The series of these labels, made if it is new: a list of one number, for its keeper to add to."""
        cell = self._cells.get(key)
        return self._cells.setdefault(self._admit(key, self._cells), [0]) if cell is None else cell

    def add(self, key: Labels, amount: int = 1) -> None:
        self.cell(key)[0] += amount

    def read(self) -> Family:
        samples = tuple(Sample(k, cell[0]) for k, cell in sorted(self._cells.items()))
        return Family(self.name, "counter", self.text, self.labels, samples, nano=self._nano)


class Observed:
    """One series of a histogram: one count per bucket, the last one is above all bounds; and the sum."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value


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
        self._cells: dict[Labels, Observed] = {}
        self._exemplars: dict[Labels, list[Exemplar | None]] = {}

    def cell(self, key: Labels) -> Observed:
        """The series of these labels, made if it is new."""
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells.setdefault(self._admit(key, self._cells), Observed(self._bounds))
        return cell

    def observe(self, key: Labels, value: float) -> None:
        self.cell(key).add(value)

    def exemplify(self, key: Labels, exemplar: Exemplar) -> None:
        """Keep this as the newest exemplar of the bucket that its value, already observed, fell into."""
        if key in self._cells:
            kept = self._exemplars.setdefault(key, [None] * (len(self._bounds) + 1))
            kept[bisect_left(self._bounds, exemplar.value)] = exemplar

    def read(self) -> Family:
        samples = tuple(
            Sample(key, cell.sum, tuple(cell.counts), tuple(self._exemplars.get(key, ())))
            for key, cell in sorted(self._cells.items())
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
