"""Plays seeds, and reports on those that fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tests.simulator.checker import Violation, summary
from tests.simulator.schedule import Schedule, schedule_of, text_of
from tests.simulator.shrink import shrink
from tests.simulator.world import run


@dataclass(frozen=True)
class Played:
    schedules: int
    counts: Counter[str]
    failed: list[tuple[int, list[Violation]]]


def play(seeds: range) -> Played:
    counts: Counter[str] = Counter()
    failed = []
    for seed in seeds:
        result = run(schedule_of(seed))
        counts.update(result.counts)
        if result.violations:
            failed.append((seed, result.violations))
    return Played(len(seeds), counts, failed)


def report(seed: int, violations: Sequence[Violation]) -> str:
    """A failing seed: what is wrong, and the least that brings it about."""
    rule = violations[0].rule

    def fails(candidate: Schedule) -> bool:
        return any(v.rule == rule for v in run(candidate).violations)

    whole = schedule_of(seed)
    small = shrink(whole, fails)
    result = run(small, trace=True)
    return "\n".join(
        [
            f"seed {seed}: {len(violations)} violations",
            summary(violations[:5]),
            f"still so with {len(small.ops)} of its {len(whole.ops)} operations:",
            *(f"  {text_of(op)}" for op in small.ops),
            "which go like this:",
            *(f"  {line}" for line in result.trace[-200:]),
            summary(result.violations[:5]),
            f"again: make simulate SCHEDULES=1 SEED={seed}",
        ]
    )
