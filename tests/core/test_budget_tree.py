"""Random lives of a tree of budgets in two units, against sums over what is known of each hold and each slice.

After every step: I1 posted + held <= limit (but for lowered limits and breaches), I2 every hold ends once, I3 both
sums follow from the entries, the open holds and the slices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.core.budget import Budget, OnExceed, claim, decide, held_by, hold, propagate, settle
from gateway.core.entry import Amounts, Granted, Refused, Unit

LANDING_PERCENT = 10
UNITS = (Unit.USD, Unit.CALLS)
amounts = st.integers(0, 60)


@dataclass
class Hold:
    task: int
    held: Amounts
    posted: Amounts | None = None  # None while it is open


def _kept_back(b: Budget) -> int:
    """A tenth; of fewer than ten calls one, unless it is the only one."""
    if b.unit is Unit.CALLS and b.limit < 10:
        return 1 if b.limit >= 2 else 0
    return b.limit // 10


@dataclass
class Task:
    parent: int | None
    open: bool = True
    budgets: dict[Unit, str] = field(default_factory=dict)
    #: units in which a limit was lowered or more was billed than held, here or below
    over: set[Unit] = field(default_factory=set)


class Tree(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.budgets: dict[str, Budget] = {}
        self.tasks: list[Task] = []
        self.holds: list[Hold] = []

    @initialize(usd=st.integers(50, 300), calls=st.integers(2, 12))
    def root(self, usd: int, calls: int) -> None:
        self._add(None, {Unit.USD: usd, Unit.CALLS: calls})

    # --- what happens ----------------------------------------------------------------------------------

    @rule(i=st.integers(0, 9), ask=amounts, least=amounts, landing=st.booleans())
    def reserve(self, i: int, ask: int, least: int, landing: bool) -> None:
        task = self._task(i)
        if not task.open:
            return
        mine = [self.budgets[b] for b in task.budgets.values()]
        wanted = Amounts(ask, None, None), Amounts(least, None, None)
        answer = decide(mine, *wanted, 0, landing)
        free = [b.left if landing else b.left - _kept_back(b) for b in mine]
        fits = (ask == 0 or free[0] >= max(1, min(ask, least))) and free[1] >= 1
        assert isinstance(answer, Granted if fits else Refused)
        if isinstance(answer, Granted):
            assert answer.amount_nano_usd == (min(ask, free[0]) if ask else 0)
            held = held_by(wanted[0], answer)
            for b in mine:
                self.budgets[b.budget_id] = hold(b, held)
            self.holds.append(Hold(self.tasks.index(task), held))

    @precondition(lambda self: self.holds)
    @rule(i=st.integers(0, 99), cost=amounts, void=st.booleans(), unknown=st.booleans())
    def end(self, i: int, cost: int, void: bool, unknown: bool) -> None:
        """The first time, what is held moves or returns; again, it is a correction."""
        it = self.holds[i % len(self.holds)]
        before = it.posted or Amounts(0, 0, 0, 0)
        usd = it.held.nano_usd if unknown else cost
        after = Amounts(0, 0, 0, 0) if void else Amounts(usd, 0, 0, 1)
        deltas = {}
        for unit, budget_id in self.tasks[it.task].budgets.items():
            released = (it.held.of(unit) or 0) if it.posted is None else 0
            posted = (after.of(unit) or 0) - (before.of(unit) or 0)
            deltas[budget_id] = (-released, posted)
            if posted > released:
                self._mark_over(it.task, unit)
        self._apply(propagate(self.budgets, deltas))
        it.posted = after

    @precondition(lambda self: len(self.tasks) < 7)
    @rule(i=st.integers(0, 9), usd=st.integers(0, 150), calls=st.integers(0, 6))
    def carve(self, i: int, usd: int, calls: int) -> None:
        parent = self._task(i)
        wanted = {Unit.USD: usd, Unit.CALLS: calls}
        depth = len(self.budgets[parent.budgets[Unit.USD]].ancestors)
        if not parent.open or depth >= 3 or any(self._of(parent, u).room < wanted[u] for u in UNITS):
            return
        for unit in UNITS:
            above = self._of(parent, unit)
            self.budgets[above.budget_id] = msgspec.structs.replace(above, held=above.held + wanted[unit])
        self._add(self.tasks.index(parent), wanted)

    @precondition(lambda self: len(self.tasks) > 1)
    @rule(i=st.integers(1, 9))
    def close(self, i: int) -> None:
        """With all below it, in whatever order."""
        index = 1 + i % (len(self.tasks) - 1)
        for j, task in enumerate(self.tasks):
            if task.open and self._is_below(j, index):
                task.open = False
                for unit in UNITS:
                    self._carve(self._of(task, unit), 0)

    @rule(i=st.integers(0, 9), unit=st.sampled_from(UNITS), limit=st.integers(0, 300))
    def change_limit(self, i: int, unit: Unit, limit: int) -> None:
        task = self._task(i)
        b = self._of(task, unit)
        if b.ancestors and task.open:
            above = self.budgets[b.ancestors[0]]
            if max(b.held, limit - b.posted) - claim(b) > max(0, above.room):
                return
            self._carve(b, limit)
            b = self._of(task, unit)
        self.budgets[b.budget_id] = msgspec.structs.replace(b, base_limit=limit)
        if limit < b.posted + b.held:
            task.over.add(unit)

    # --- what must be true -----------------------------------------------------------------------------

    @invariant()
    def posted_and_held_follow_from_entries_holds_and_slices(self) -> None:
        for i, task in enumerate(self.tasks):
            children = [t for t in self.tasks if t.parent == i]
            for unit in UNITS:
                b = self._of(task, unit)
                mine = [h for h in self.holds if h.task == i]
                below = [self._of(t, unit) for t in children]
                posted = sum((h.posted.of(unit) or 0) for h in mine if h.posted is not None)
                held = sum((h.held.of(unit) or 0) for h in mine if h.posted is None)
                assert b.posted == posted + sum(c.posted for c in below)
                shares = [
                    max(c.held, c.base_limit - c.posted if t.open else 0)
                    for t, c in zip(children, below, strict=True)
                ]
                assert b.held == held + sum(shares)

    @invariant()
    def nothing_exceeds_its_limit_but_what_was_lowered_or_breached(self) -> None:
        for task in self.tasks:
            for unit in UNITS:
                if unit not in task.over:
                    assert self._of(task, unit).left >= 0

    # --- the world -------------------------------------------------------------------------------------

    def _add(self, parent: int | None, limits: dict[Unit, int]) -> None:
        task = Task(parent)
        for unit, limit in limits.items():
            above = None if parent is None else self._of(self.tasks[parent], unit)
            b = Budget(
                f"bud_{len(self.budgets)}",
                f"task:{len(self.tasks)}",
                "lifetime",
                "UTC",
                0,
                None,
                limit,
                on_exceed=OnExceed.SUMMARIZE,
                unit=unit,
                landing_percent=LANDING_PERCENT,
                ancestors=(above.budget_id, *above.ancestors) if above else (),
                carved=limit if above else 0,
            )
            self.budgets[b.budget_id] = b
            task.budgets[unit] = b.budget_id
        self.tasks.append(task)

    def _task(self, i: int) -> Task:
        return self.tasks[i % len(self.tasks)]

    def _of(self, task: Task, unit: Unit) -> Budget:
        return self.budgets[task.budgets[unit]]

    def _is_below(self, i: int | None, top: int) -> bool:
        while i is not None and i != top:
            i = self.tasks[i].parent
        return i == top

    def _mark_over(self, i: int | None, unit: Unit) -> None:
        while i is not None:
            self.tasks[i].over.add(unit)
            i = self.tasks[i].parent

    def _carve(self, child: Budget, carved: int) -> None:
        after = msgspec.structs.replace(child, carved=carved)
        self.budgets[child.budget_id] = after
        change = claim(after) - claim(child)
        above = {i: self.budgets[i] for i in child.ancestors}
        self._apply(propagate(above, {child.ancestors[0]: (change, 0)}))

    def _apply(self, deltas: dict[str, tuple[int, int]]) -> None:
        for budget_id, (held, posted) in deltas.items():
            self.budgets[budget_id] = settle(self.budgets[budget_id], -held, posted)


TestTree = Tree.TestCase
TestTree.settings = settings(max_examples=150, stateful_step_count=30, deadline=None, database=None)
