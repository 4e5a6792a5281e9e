"""Random schedules against the pure arithmetic: the store must answer as `core.budget` does, and lose nothing."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.core import budget as budgets
from gateway.core.budget import Budget, decide
from gateway.core.entry import Attempt, Granted, Kind, Refused, Settled
from gateway.core.task import ADMITTING
from gateway.storage import reports
from gateway.storage.accounts import Accounts, Team
from gateway.storage.database import Database
from gateway.storage.ledger import SqlLedger
from tests.storage.worlds import attempt, opened, outcome, scopes, usd, void

_examples = itertools.count(1)


@dataclass(frozen=True)
class Ask:
    task: int  # which task, and with it which budgets; see `PARENTS`
    amount: int
    least: int


@dataclass(frozen=True)
class End:
    which: int  # of the attempts so far, modulo
    cost: int  # above the hold: a breach
    kind: Kind


@dataclass(frozen=True)
class Limit:
    scope: int
    limit: int


#: A child that a client names, and a child of that.
PARENTS = {3: 0, 4: 3}
asks = st.builds(Ask, st.integers(0, 4), st.integers(0, 60), st.integers(0, 60))
ends = st.builds(
    End, st.integers(0, 40), st.integers(0, 70), st.sampled_from([Kind.POST, Kind.VOID, Kind.CHARGE_UNKNOWN])
)
#: Rounds of things that happen at once; a round has one sort of things, so that their order does not matter.
rounds = st.lists(
    st.one_of(
        st.lists(asks, min_size=1, max_size=8),
        st.lists(ends, min_size=1, max_size=8),
        st.builds(lambda x: [x], st.builds(Limit, st.integers(0, 2), st.integers(0, 200))),
    ),
    max_size=12,
)


class Model:
    """The same world, one call after the other, in memory."""

    def __init__(self, budgets_by_scope: dict[str, Budget]) -> None:
        self.budgets = budgets_by_scope
        self.holds: dict[str, tuple[int, list[str]]] = {}
        self.posted: dict[str, int] = {}
        self.corrected: set[str] = set()
        self.lowered = False

    def reserve(
        self, where: list[str], amount: int, least: int, states: dict[str, str], a: Attempt
    ) -> Granted | Refused:
        """`where`: its scopes, its task and those above that last, the nearest first."""
        held_in = [s for s in where if s in self.budgets]
        answer = decide([self.budgets[s] for s in held_in], usd(amount), usd(least), 0)
        for scope in where:
            state = states.get(scope.removeprefix("task:"), "running")
            if isinstance(answer, Granted) and state not in ADMITTING:
                b = self.budgets[scope]
                return Refused(scope, b.limit, b.posted, b.held, None, state=state)
        if isinstance(answer, Granted):
            self.holds[a.attempt_id] = (answer.amount_nano_usd, held_in)
            for s in held_in:
                self.budgets[s] = budgets.hold(self.budgets[s], usd(answer.amount_nano_usd))
        return answer

    def settle(self, a: Attempt, cost: int, kind: Kind) -> Settled:
        held, where = self.holds[a.attempt_id]
        if a.attempt_id not in self.posted:
            self._move(where, held, cost)
            self.posted[a.attempt_id] = cost
            return Settled.SETTLED
        before = self.posted[a.attempt_id]
        if kind is Kind.CHARGE_UNKNOWN or a.attempt_id in self.corrected or cost == before:
            return Settled.ALREADY
        self._move(where, 0, cost - before)
        self.corrected.add(a.attempt_id)
        return Settled.CORRECTED

    def _move(self, where: list[str], held: int, posted: int) -> None:
        for s in where:
            self.budgets[s] = budgets.settle(self.budgets[s], held, posted)


async def play(ledger: SqlLedger, accounts: Accounts, schedule: list[list[object]], exact: bool) -> None:
    n = next(_examples)
    team, tasks = f"team:t{n}", [f"task_{n}_{i}" for i in range(5)]
    await accounts.put_team(Team(f"t{n}"))
    limits = {team: 150, f"task:{tasks[0]}": 100, f"task:{tasks[1]}": 60}
    model = Model({s: await accounts.set_budget(s, limit) for s, limit in limits.items()})
    made: list[Attempt] = []
    may_be_over = False  # after a breach or a lowered limit
    for now in schedule:
        ledger.revision_changed()  # refusals from memory are older than the model
        if isinstance(now[0], Ask):
            new = [
                (x, attempt(team_id=f"t{n}", task_id=tasks[x.task], parent_task_id=parent))
                for x in now
                if isinstance(x, Ask)
                for parent in [tasks[PARENTS[x.task]] if x.task in PARENTS else None]
            ]
            states = {t.task_id: t.state for t in await accounts.list_tasks(team_id=f"t{n}")}
            answers = await asyncio.gather(
                *(ledger.reserve(a, scopes(a), usd(x.amount), usd(x.least)) for x, a in new)
            )
            for (x, a), answer in zip(new, answers, strict=True):
                if exact:
                    expected = model.reserve(line(a, x.task, tasks, states), x.amount, x.least, states, a)
                    assert (type(answer), _money(answer)) == (type(expected), _money(expected))
                if isinstance(answer, Granted):
                    made.append(a)
        elif isinstance(now[0], End) and made:
            ending = [(made[x.which % len(made)], x) for x in now if isinstance(x, End)]
            outcomes = [void() if x.kind is Kind.VOID else outcome(x.cost, x.kind) for _, x in ending]
            settled = await asyncio.gather(
                *(ledger.settle(a, o) for (a, _), o in zip(ending, outcomes, strict=True))
            )
            if exact:
                costs = [(a, o.cost_nano_usd, o.kind) for (a, _), o in zip(ending, outcomes, strict=True)]
                assert settled == [model.settle(*c) for c in costs]
            may_be_over = True
        elif isinstance(now[0], Limit):
            may_be_over = True
            scope = list(limits)[now[0].scope]
            changed = await accounts.set_budget(scope, now[0].limit)
            if exact:
                before = model.budgets[scope]
                model.budgets[scope] = Budget(
                    *(changed.budget_id, scope, "lifetime", "UTC", 0, None, now[0].limit),
                    before.posted,
                    before.held,
                    epoch=changed.epoch,
                )
        for scope in limits:
            (stored,) = await ledger.snapshot(scope)
            if exact:
                assert stored == model.budgets[scope]
            elif not may_be_over:
                assert stored.room >= 0
    await asyncio.gather(*(ledger.settle(a, outcome(1)) for a in made))


def line(a: Attempt, task: int, tasks: list[str], known: Container[str]) -> list[str]:
    """All scopes in which an attempt of that task is held: what is above its parent is known from its parent's row."""
    above = [task]
    while above[-1] in PARENTS and (above[-1] == task or tasks[above[-1]] in known):
        above.append(PARENTS[above[-1]])
    return [*scopes(a)[:3], *(f"task:{tasks[i]}" for i in above)]


def _money(answer: Granted | Refused) -> tuple[object, ...]:
    if isinstance(answer, Granted):
        return answer.amount_nano_usd, answer.remaining_nano_usd, answer.remaining_scope
    return answer.scope, answer.limit, answer.spent, answer.held


async def check(database: Database) -> None:
    """I2 and I3 over everything that was played, and the sums that are derived from the entries."""
    assert await reports.drift(database) == []
    entries = await reports.entries(database, limit=10**6)
    kinds = Counter((e["attempt_id"], e["kind"] == "correct") for e in entries)
    assert set(kinds.values()) <= {1}
    (total,) = await reports.usage(database, by=(), from_ms=0, to_ms=2**50)
    by_task = await reports.usage(database, by=("task",), from_ms=0, to_ms=2**50)
    assert total.attempts == len([1 for _, correction in kinds if not correction])
    assert total.cost_nano_usd == sum(e["amount_nano_usd"] for e in entries)
    assert total.cost_nano_usd == sum(row.cost_nano_usd for row in by_task)
    assert total.tokens == {k: sum(row.tokens[k] for row in by_task) for k in total.tokens}
    tasks = {t.task_id: t for t in await Accounts(database, actor="test").list_tasks(limit=10**6)}
    for row in by_task:
        task = tasks[str(row.group[0])]
        assert (task.attempts, task.cost_nano_usd, task.tokens) == (
            row.attempts,
            row.cost_nano_usd,
            row.tokens,
        )


@pytest.mark.parametrize(("kind", "examples"), [("sqlite", 200), ("postgres", 40)])
def test_random_schedules_agree_with_the_model(
    kind: str, examples: int, request: pytest.FixtureRequest
) -> None:
    # In memory where that is possible: thousands of commits, and none of them is about the disk.
    shared_memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=shared_memory if shared_memory.is_dir() else None) as directory,
        asyncio.Runner() as runner,
    ):
        url = request.getfixturevalue(f"{kind}_url")
        if kind == "sqlite":
            url = f"sqlite:///{shutil.copy(url.removeprefix('sqlite:///'), directory)}"
        world = opened(url, Path(directory) / "journal")
        ledger, database, accounts = runner.run(world.__aenter__())

        @settings(
            max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(rounds)
        def schedules(schedule: list[list[object]]) -> None:
            # Two flights may overtake each other on Postgres, so only the invariants are exact there.
            runner.run(play(ledger, accounts, schedule, exact=kind == "sqlite"))

        try:
            schedules()
            runner.run(check(database))
        finally:
            runner.run(world.__aexit__(None, None, None))
