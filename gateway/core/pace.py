"""What a task's next step will probably use, by its last ones, and how many such steps its budgets pay for.

An agent's steps grow with its history, so the average of the last ones is behind: where they follow a rising line, its
next point counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from gateway.core.budget import Budget
from gateway.core.entry import Unit

#: Steps that are looked at.
STEPS = 10
_UNITS = (Unit.USD, Unit.INPUT_TOKENS, Unit.OUTPUT_TOKENS, Unit.CALLS)
#: (step, nano-dollars, input tokens, output tokens, calls) of a ledger entry
Entry = tuple[int, int, int, int, int]


def next_step(entries: Iterable[Entry]) -> dict[Unit, int]:
    """What the next step may be expected to use of each unit, rounded up; nothing before the first.

    `entries` come latest first; several of one step (tries, corrections) add up.
    """
    by_step: dict[int, list[int]] = {}
    for step, *used in entries:
        if step in by_step or len(by_step) < STEPS:
            so_far = by_step.setdefault(step, [0] * len(_UNITS))
            by_step[step] = [a + b for a, b in zip(so_far, used, strict=True)]
    if not by_step:
        return {}
    steps = [by_step[step] for step in sorted(by_step)]
    return {unit: _next([step[i] for step in steps]) for i, unit in enumerate(_UNITS)}


def steps_left(budgets: Iterable[Budget], used: Mapping[Unit, int]) -> int | None:
    """How many more steps that use so much fit all hard budgets; None = nothing says."""
    left = []
    for b in budgets:
        each = used.get(b.unit, 1 if b.unit is Unit.CALLS else 0)
        if b.hard and each > 0:
            left.append(max(0, b.room) // each)
    return min(left, default=None)


def _next(values: Sequence[int]) -> int:
    n = len(values)
    mean = Fraction(sum(values), n)
    middle = Fraction(n - 1, 2)
    spread = sum((i - middle) ** 2 for i in range(n))
    slope = sum((i - middle) * (v - mean) for i, v in enumerate(values)) / spread if spread else Fraction(0)
    return max(0, -int(-(mean + max(slope, Fraction(0)) * (n - middle)) // 1))
