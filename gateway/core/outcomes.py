"""How runs turned out, in numbers: what a success costs, how often the first try is one, how far repeated runs differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Run:
    """A task whose outcome was said. `interventions`: how often somebody resumed it or raised its budget."""

    task_id: str
    group: tuple[str, ...]
    success: bool
    score: float | None
    cost_nano_usd: int
    steps: int
    output_tokens: int
    interventions: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of the runs of one group. Per success: all that the group spent, failures too, over its successes, rounded up; None
    without a success. `cost_*_nano_usd` are of single successful runs: the spread between repeated ones.
    """

    group: tuple[str, ...]
    runs: int
    successes: int
    first_passes: int  # successes without an intervention
    interventions: int
    mean_score: float | None
    cost_nano_usd: int
    cost_per_success_nano_usd: int | None
    output_tokens_per_success: int | None
    steps_per_success: int | None
    cost_min_nano_usd: int | None
    cost_median_nano_usd: int | None
    cost_max_nano_usd: int | None


def statistics(runs: Iterable[Run]) -> list[Statistics]:
    """One for each group, the one with most runs first."""
    grouped: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.group, []).append(run)
    found = [_of(group, own) for group, own in grouped.items()]
    return sorted(found, key=lambda s: (-s.runs, s.group))


def _of(group: tuple[str, ...], runs: Sequence[Run]) -> Statistics:
    good = [run for run in runs if run.success]
    costs = sorted(run.cost_nano_usd for run in good)
    scores = [run.score for run in runs if run.score is not None]

    def per_success(amount: Callable[[Run], int]) -> int | None:
        return -(-sum(map(amount, runs)) // len(good)) if good else None

    return Statistics(
        group,
        len(runs),
        len(good),
        sum(run.interventions == 0 for run in good),
        sum(run.interventions for run in runs),
        sum(scores) / len(scores) if scores else None,
        sum(run.cost_nano_usd for run in runs),
        per_success(lambda run: run.cost_nano_usd),
        per_success(lambda run: run.output_tokens),
        per_success(lambda run: run.steps),
        costs[0] if costs else None,
        costs[(len(costs) - 1) // 2] if costs else None,
        costs[-1] if costs else None,
    )
