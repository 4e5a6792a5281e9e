"""A tree of tasks under everything at once: attempts, ends, children made, raised, lowered and done, in one gather.

After every round nothing exceeds its limit (costs stay within their holds, and a limit is lowered to no less than
what is in use), and every sum follows from entries, holds and slices. In the end nothing is held.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.core.entry import Amounts, Attempt, Granted, Kind, Unit
from gateway.core.errors import InvalidRequest
from gateway.core.identity import KeyRecord
from gateway.core.usage import Usage
from gateway.storage import reports
from gateway.storage.accounts import Accounts, Team
from gateway.storage.database import Database
from gateway.storage.ledger import SqlLedger
from gateway.storage.tasks import Declared, Tasks, Wanted
from tests.storage.worlds import attempt, opened, outcome, scopes, void

PEPPER = b"pepper"
_examples = itertools.count(1)


@dataclass(frozen=True)
class Step:
    what: str
    which: int  # task or attempt, modulo
    amount: int


steps = st.builds(
    Step,
    st.sampled_from(["reserve"] * 5 + ["settle"] * 4 + ["void", "carve", "carve", "end", "raise", "lower"]),
    st.integers(0, 30),
    st.integers(0, 70),
)
schedules_of = st.lists(st.lists(steps, min_size=1, max_size=12), min_size=2, max_size=8)


@dataclass
class Play:
    ledger: SqlLedger
    database: Database
    accounts: Accounts
    tasks: Tasks
    key: KeyRecord
    known: list[Declared]
    open: dict[str, tuple[Attempt, Amounts]]
    ended: list[str]

    def start(self, step: Step) -> Coroutine[Any, Any, None] | None:
        task = self.known[step.which % len(self.known)]
        match step.what:
            case "reserve":
                return self._reserve(task, step.amount)
            case "settle" | "void" if self.open:
                ids = list(self.open)
                return self._end_attempt(ids[step.which % len(ids)], step)
            case "carve":
                return self._carve(task, step.amount)
            case "end" if len(self.known) > 1:
                return self._end_task(self.known[1 + step.which % (len(self.known) - 1)])
            case "raise" | "lower":
                return self._adjust(task, step)
        return None

    async def _reserve(self, task: Declared, amount: int) -> None:
        a = attempt(task_id=task.task.task_id, team_id=self.key.team_id, key_id=self.key.key_id)
        ask = Amounts(amount, amount, 10)
        answer = await self.ledger.reserve(a, scopes(a), ask, Amounts(amount // 2, amount, 10))
        if isinstance(answer, Granted):
            self.open[a.attempt_id] = a, Amounts(answer.amount_nano_usd, amount, 10)

    async def _end_attempt(self, attempt_id: str, step: Step) -> None:
        if attempt_id not in self.open:
            return  # another step of this round has just ended it
        a, held = self.open.pop(attempt_id)
        self.ended.append(attempt_id)
        used = Usage(input_uncached=min(step.amount, held.input_tokens or 0), output=1)
        cost = min(step.amount, held.nano_usd or 0)
        await self.ledger.settle(a, void() if step.what == "void" else outcome(cost, Kind.POST, usage=used))

    async def _carve(self, task: Declared, amount: int) -> None:
        wanted = Wanted("child", {Unit.USD: amount, Unit.INPUT_TOKENS: 2 * amount, Unit.CALLS: 4})
        try:
            self.known.append(await self.tasks.create_task(task.key, wanted))
        except InvalidRequest:
            pass  # no room, too deep, or done

    async def _end_task(self, task: Declared) -> None:
        await self.tasks.end(task.task.task_id)

    async def _adjust(self, task: Declared, step: Step) -> None:
        scope = f"task:{task.task.task_id}"
        (usd,) = (b for b in await self.ledger.snapshot(scope) if b.unit is Unit.USD)
        if step.what == "lower" and not usd.ancestors:
            return
        limit = usd.limit + step.amount if step.what == "raise" else max(0, usd.limit - step.amount)
        try:
            await self.accounts.adjust_budget(scope, limit, "model")
        except InvalidRequest:
            pass

    async def check(self, lowered: bool) -> None:
        assert await reports.drift(self.database) == []
        for task in self.known:
            for b in await self.ledger.snapshot(f"task:{task.task.task_id}"):
                # A slice that was lowered may be below what it holds; what it is carved from never is.
                assert b.left >= 0 or (lowered and b.ancestors and b.unit is Unit.USD), b


async def play(it: Play, schedule: list[list[Step]]) -> None:
    lowered = False
    for round_ in schedule:
        it.ledger.revision_changed()
        lowered |= any(step.what == "lower" for step in round_)
        await asyncio.gather(*(c for step in round_ if (c := it.start(step)) is not None))
        await it.check(lowered)
    for a, _ in list(it.open.values()):
        await it.ledger.settle(a, outcome(0, usage=Usage()))
    await it.tasks.end(it.known[0].task.task_id)
    await it.check(lowered)
    for task in it.known:
        assert {b.held for b in await it.ledger.snapshot(f"task:{task.task.task_id}")} == {0}


@pytest.mark.parametrize(("kind", "examples"), [("sqlite", 60), ("postgres", 20)])
def test_a_tree_of_tasks_keeps_its_sums_and_limits(
    kind: str, examples: int, request: pytest.FixtureRequest
) -> None:
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

        async def one(schedule: list[list[Step]]) -> None:
            team = f"t{next(_examples)}"
            await accounts.put_team(Team(team))
            key, _ = await accounts.create_key(pepper=PEPPER, name="ci", team_id=team)
            tasks = Tasks(database, actor="model", pepper=PEPPER)
            wanted = Wanted("root", {Unit.USD: 300, Unit.INPUT_TOKENS: 500, Unit.CALLS: 40})
            root = await tasks.create_task(key, wanted)
            await play(Play(ledger, database, accounts, tasks, key, [root], {}, []), schedule)

        @settings(
            max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(schedules_of)
        def schedules(schedule: list[list[Step]]) -> None:
            runner.run(one(schedule))

        try:
            schedules()
            entries = runner.run(reports.entries(database, limit=10**6))
            assert set(Counter(e["attempt_id"] for e in entries).values()) <= {1}
        finally:
            runner.run(world.__aexit__(None, None, None))
