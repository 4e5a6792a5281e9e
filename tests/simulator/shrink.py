"""The smallest part of a failing schedule that still fails, by leaving out ever smaller stretches of it."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulator.schedule import Schedule

TRIES_MAX = 600


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """`schedule` fails, and so does what is returned."""
    tries = 0
    size = max(1, len(schedule.ops) // 2)
    while True:
        shorter = False
        start = 0
        while start < len(schedule.ops) and tries < TRIES_MAX:
            candidate = schedule.with_ops(schedule.ops[:start] + schedule.ops[start + size :])
            tries += 1
            if fails(candidate):
                schedule, shorter = candidate, True
            else:
                start += size
        if tries >= TRIES_MAX or (size == 1 and not shorter):
            return schedule
        if not shorter or size > len(schedule.ops):
            size = max(1, size // 2)
