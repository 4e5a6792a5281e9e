"""The line of a task: the tasks above it, in whose budgets its attempts count as well.

A client names a child's parent with each request (`Attempt.parent_task_id`), or did so once: the task's row keeps the
first parent that was named. Both count, because what a client says may only narrow what it gets. A declared child is
where a line ends: its slices are parts of all that is above it, and what counts in them is not counted again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.storage.transact import Fetch, Sql, Tx

#: How many levels are followed. What is nested deeper gets nothing, or naming tasks would lead out of a budget.
LEVELS_MAX = 8
TOO_DEEP = "nested too deep"
DECLARED = "declared"

_LINKS = Sql("SELECT task_id, parent_task_id, source, state FROM task WHERE task_id = ANY($1::text[])")


@dataclass(frozen=True, slots=True)
class Link:
    """What a task's row says. `above` is None where a line ends."""

    above: str | None
    state: str


@dataclass(frozen=True, slots=True)
class Line:
    """Those above a task, the nearest first; `too_deep` if more than `LEVELS_MAX` levels."""

    above: tuple[str, ...] = ()
    too_deep: bool = False


NO_LINE = Line()


def above_of(parent_task_id: str | None, source: str) -> str | None:
    """Where the line goes on from a task with these columns."""
    return None if source == DECLARED else parent_task_id


def links(task_ids: Iterable[str]) -> Tx[dict[str, Link]]:
    """The rows of these tasks and of those above them, as far as they exist: one statement per level."""
    found: dict[str, Link] = {}
    seen: set[str] = set()
    level = set(task_ids)
    for _ in range(LEVELS_MAX + 2):  # the task itself, and enough to see that there are too many
        if not level:
            break
        seen |= level
        for task_id, parent, source, state in (yield Fetch(_LINKS, (sorted(level),))):
            found[task_id] = Link(above_of(parent, source), state)
        level = {link.above for link in found.values() if link.above is not None} - seen
    return found


def again(found: Mapping[str, Link]) -> Tx[dict[str, Link]]:
    """The same rows as they are now: once budgets are locked, an end of a task that they belong to has happened or waits."""
    rows = yield Fetch(_LINKS, (sorted(found),))
    return {task_id: Link(above_of(parent, source), state) for task_id, parent, source, state in rows}


def line_of(task_id: str, named: Iterable[str | None], found: Mapping[str, Link]) -> Line:
    """`named`: parents that are known without the task's row. Clients may name tasks in a circle, which ends a line."""
    above: list[str] = []
    level = {t for t in named if t is not None} | _above(task_id, found)
    for _ in range(LEVELS_MAX):
        level -= {task_id, *above}
        if not level:
            return Line(tuple(above))
        nearer = sorted(level)
        above += nearer
        level = {up for t in nearer for up in _above(t, found)}
    return Line(tuple(above), too_deep=bool(level - {task_id, *above}))


def _above(task_id: str, found: Mapping[str, Link]) -> set[str]:
    link = found.get(task_id)
    return set() if link is None or link.above is None else {link.above}
