"""What the rows of `compare` say: figures per workload, ratios paired by round, and whether a target is met."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Row = Mapping[str, Any]
REFERENCE = "aiohttp"
DIRECT = "direct"
#: Content chunks of one stream in workload CI.
CI_CHUNKS = 100


@dataclass(frozen=True, slots=True)
class Target:
    """The largest ratio to the reference, or the largest added milliseconds, that still meets it: `first` where keys,
    ledger and metrics are on and nothing is limited, `full` with a budget on the way."""

    work: str
    what: str
    unit: str
    first: float
    full: float

    def most(self, contestant: str) -> float:
        return self.full if contestant.endswith(WITH_BUDGET) else self.first


#: End of the names of contestants that have a budget.
WITH_BUDGET = "-budget"
TARGETS = (
    Target("A", "1 KB chat, CPU a request", "us", 2.0, 1.6),
    Target("B400", "400 KB agent step, CPU a request", "us", 1.8, 1.4),
    Target("B2M", "2 MB agent step, CPU a request", "us", 1.8, 1.4),
    Target("CI", "stream, CPU a chunk", "us", 1.4, 1.15),
    Target("D", "1 KB chat at 50/s, p50 added to direct", "ms", 2.5, 2.0),
)
IDLE_MB = 120.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One workload of one contestant. `score` is what the target limits: a ratio, or added milliseconds."""

    target: Target
    contestant: str
    value: float
    reference: float
    score: float
    lowest: float
    highest: float

    @property
    def most(self) -> float:
        return self.target.most(self.contestant)

    @property
    def met(self) -> bool:
        return self.score <= self.most


def figures(rows: Sequence[Row], contestant: str) -> list[Figure]:
    """A figure for every target that both the contestant and its reference ran."""
    out = []
    for target in TARGETS:
        if target.unit == "ms":
            values, references = _p50_ms(rows, target.work, contestant), _p50_ms(rows, target.work, DIRECT)
            scores = [mine - theirs for mine, theirs in zip(values, references, strict=False)]
        else:
            per = CI_CHUNKS if target.work == "CI" else 1
            values = [r["gateway_cpu_us"] / per for r in _of(rows, target.work, contestant)]
            references = [r["gateway_cpu_us"] / per for r in _of(rows, target.work, REFERENCE)]
            scores = [mine / theirs for mine, theirs in zip(values, references, strict=False) if theirs]
        if scores:
            out.append(
                Figure(
                    target,
                    contestant,
                    median(values),
                    median(references),
                    median(scores),
                    min(scores),
                    max(scores),
                )
            )
    return out


def _of(rows: Iterable[Row], work: str, contestant: str) -> list[Row]:
    """In the order of rounds, so that zipping two contestants pairs what ran next to each other."""
    mine = [r for r in rows if r["work"] == work and r["contestant"] == contestant]
    return sorted(mine, key=lambda r: r["round"])


def _p50_ms(rows: Iterable[Row], work: str, contestant: str) -> list[float]:
    return [r["latency_us"]["p50"] / 1e3 for r in _of(rows, work, contestant)]


def wrong(rows: Sequence[Row], contestant: str) -> tuple[int, int]:
    """(errors, upstream calls lost or extra) over all workloads; both must be 0."""
    mine = [r for r in rows if r["contestant"] == contestant]
    return sum(r["errors"] for r in mine), sum(abs(r["lost_or_extra"]) for r in mine)


def table(found: Sequence[Figure]) -> str:
    """Markdown, one line per workload and contestant."""
    out = [
        f"| workload | contestant | value | {REFERENCE}, or direct | ratio or added: median (min-max) | target | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for f in found:
        unit = f.target.unit
        mark = "" if unit == "ms" else "x"
        digits = 2 if unit == "ms" else 0
        out.append(
            f"| {f.target.work}: {f.target.what} | {f.contestant} | {f.value:.{digits}f} {unit}"
            f" | {f.reference:.{digits}f} {unit} | {f.score:.2f}{mark} ({f.lowest:.2f}-{f.highest:.2f})"
            f" | <= {f.most}{mark or ' ms'} | {'yes' if f.met else 'NO'} |"
        )
    return "\n".join(out)
