"""The pages of several processes as one: counters and histograms add up, also those of processes that have died.

A process that dies takes with it what it counted since it was last asked; what a scrape has told of it stays in the
totals for good, so that they never go backwards. `Told` is that memory, of one place in the crowd (a worker's index),
which one process after the other may fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from gateway.telemetry.page import Exemplar, Family, Labels, Sample


class Page(msgspec.Struct, frozen=True):
    """All families of the process at place `index`; a later process at the same place has a greater `born_ns`."""

    index: int
    born_ns: int
    families: tuple[Family, ...]


class Told(msgspec.Struct, frozen=True):
    """What scrapes were told of one place: by the process there now, and by all before it together."""

    born_ns: int
    now: tuple[Family, ...]
    gone: tuple[Family, ...] = ()


def told(before: Told | None, page: Page) -> Told:
    """The memory after this page. A page that is older than what was told changes nothing."""
    now = tuple(f for f in page.families if f.kind != "gauge")
    if before is None:
        return Told(page.born_ns, now)
    if page.born_ns < before.born_ns:
        return before
    if page.born_ns > before.born_ns:
        return Told(page.born_ns, now, tuple(_one_after_another((before.gone, before.now))))
    return Told(before.born_ns, tuple(_latest(before.now, now)), before.gone)


def total(memory: Mapping[int, Told], pages: Iterable[Page]) -> list[Family]:
    """One page of the whole crowd: everything told, and the gauges of those that have answered just now."""
    parts = [[f for f in page.families if f.kind == "gauge"] for page in pages]
    parts += [_one_after_another((place.gone, place.now)) for place in memory.values()]
    return sorted(merged(parts), key=lambda family: family.name)


def merged(pages: Iterable[Sequence[Family]]) -> list[Family]:
    """Families of one name as one, by their `across`: a number of things adds up, a state is the most or least; so is
    what every process counts of the same thing (hours of a replica), once and not once for each.
    """
    return _folded(pages, _beside)


def _one_after_another(pages: Iterable[Sequence[Family]]) -> list[Family]:
    """What processes counted of which one began when the other had ended: that adds up, whatever it is."""
    return _folded(pages, _added)


def _folded(
    pages: Iterable[Sequence[Family]], join: Callable[[Family, Sample, Sample], Sample]
) -> list[Family]:
    found: dict[str, Family] = {}
    for page in pages:
        for family in page:
            known = found.get(family.name)
            found[family.name] = family if known is None else _joined(known, family, join)
    return list(found.values())


def _latest(one: Sequence[Family], other: Sequence[Family]) -> list[Family]:
    """Two readings of one process, of which either may be the later: all that it counted only grows."""
    found = {family.name: family for family in one}
    for family in other:
        known = found.get(family.name)
        found[family.name] = family if known is None else _joined(known, family, _greater)
    return list(found.values())


def _joined(one: Family, other: Family, join: Callable[[Family, Sample, Sample], Sample]) -> Family:
    if one.bounds != other.bounds:
        return other  # buckets of two kinds cannot be added; within one release there are none
    samples: dict[Labels, Sample] = {sample.labels: sample for sample in one.samples}
    for sample in other.samples:
        known = samples.get(sample.labels)
        samples[sample.labels] = sample if known is None else join(one, known, sample)
    return msgspec.structs.replace(one, samples=tuple(v for _, v in sorted(samples.items())))


def _beside(family: Family, one: Sample, other: Sample) -> Sample:
    if family.across == "sum":
        return _added(family, one, other)
    choose = max if family.across == "max" else min
    return Sample(one.labels, choose(one.value, other.value))


def _added(_: Family, one: Sample, other: Sample) -> Sample:
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    return Sample(one.labels, one.value + other.value, counts, _newest(one, other))


def _greater(_: Family, one: Sample, other: Sample) -> Sample:
    counts = tuple(map(max, one.counts, other.counts))
    return Sample(one.labels, max(one.value, other.value), counts, _newest(one, other))


def _newest(one: Sample, other: Sample) -> tuple[Exemplar | None, ...]:
    if not one.exemplars or not other.exemplars:
        return one.exemplars or other.exemplars
    pairs = zip(one.exemplars, other.exemplars, strict=True)
    return tuple(max(pair, key=lambda e: e.at_s if e is not None else 0.0) for pair in pairs)
