"""Children that clients name by themselves: what they use counts in the budgets of all tasks above them, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from gateway.core.budget import Budget
from gateway.core.entry import Amounts, Attempt, Granted, Kind, Refused, Unit
from gateway.core.task import TaskDefault
from gateway.storage import reports
from gateway.storage.accounts import Accounts, Team
from gateway.storage.admission import Admitted, Ask, admit
from gateway.storage.database import Database
from gateway.storage.ledger import SqlLedger
from gateway.storage.lines import LEVELS_MAX, Line, Link, line_of
from gateway.storage.tasks import Tasks, Wanted
from gateway.storage.transact import Fetch, Tx
from tests.storage.worlds import attempt, opened, outcome, reserve


@pytest.fixture
async def it(store: str, tmp_path: Path) -> AsyncIterator[World]:
    async with opened(store, tmp_path / "journal") as (ledger, database, accounts):
        await accounts.ensure_defaults()
        yield World(ledger, database, accounts)
        assert await reports.drift(database) == []


class World:
    def __init__(self, ledger: SqlLedger, database: Database, accounts: Accounts) -> None:
        self.ledger, self.database, self.accounts = ledger, database, accounts

    async def hold(self, task: str, parent: str | None, amount: int) -> Granted | Refused:
        return (await self.try_(task, parent, amount))[1]

    async def try_(self, task: str, parent: str | None, amount: int) -> tuple[Attempt, Granted | Refused]:
        a = attempt(task_id=task, parent_task_id=parent)
        answer = await reserve(self.ledger, a, amount)
        if isinstance(answer, Refused):
            return a, answer
        left = answer.remaining_nano_usd, answer.remaining_scope
        return a, Granted(answer.amount_nano_usd, *left, answer.task_step, answer.output_tokens)

    async def held(self, *tasks: str) -> list[tuple[int, int]]:
        """(posted, held) of the only budget of each task."""
        found: list[tuple[int, int]] = []
        for task in tasks:
            (budget,) = await self.ledger.snapshot(f"task:{task}")
            found.append((budget.posted, budget.held))
        return found

    async def limits(self) -> list[tuple[str, int]]:
        budgets: list[Budget] = await self.accounts.list_budgets()
        return [(b.scope, b.limit) for b in budgets]


async def test_a_child_spends_its_parents_money(it: World) -> None:
    await it.accounts.set_budget("task:p", 100)
    a, answer = await it.try_("c", "p", 60)
    assert answer == Granted(60, 40, "task:p", 1, 10)
    assert await it.held("p") == [(0, 60)]
    assert await it.hold("p", None, 41) == Refused("task:p", 100, 0, 60, None)
    assert await it.hold("c2", "p", 41) == Refused("task:p", 100, 0, 60, None)
    await it.ledger.settle(a, outcome(50))
    assert await it.held("p") == [(50, 0)]


async def test_of_a_herd_of_children_exactly_those_that_fit_their_parent_are_admitted(it: World) -> None:
    await it.accounts.set_budget("task:p", 10 * 7)
    answers = await asyncio.gather(*(it.hold(f"c{i}", "p", 10) for i in range(40)))
    assert sum(isinstance(answer, Granted) for answer in answers) == 7


async def test_a_grandchild_counts_all_the_way_up(it: World) -> None:
    await it.accounts.set_budget("task:top", 100)
    await it.accounts.set_budget("task:middle", 80)
    assert await it.hold("middle", "top", 10) == Granted(10, 70, "task:middle", 1, 10)
    assert await it.hold("child", "middle", 10) == Granted(10, 60, "task:middle", 1, 10)
    assert await it.hold("grandchild", "child", 10) == Granted(10, 50, "task:middle", 1, 10)
    assert await it.held("top", "middle") == [(0, 30), (0, 30)]


async def test_a_child_that_names_no_parent_any_more_keeps_the_one_it_had(it: World) -> None:
    await it.accounts.set_budget("task:p", 100)
    await it.hold("c", "p", 60)
    it.ledger._parents.clear()  # another process, which has not seen the first request
    assert await it.hold("c", None, 41) == Refused("task:p", 100, 0, 60, None)
    assert await it.hold("c", None, 20) == Granted(20, 20, "task:p", 2, 10)
    assert await it.hold("c", "elsewhere", 21) == Refused("task:p", 100, 0, 80, None)


async def test_what_is_declared_below_is_not_counted_twice(it: World) -> None:
    key, _ = await it.accounts.create_key(pepper=b"pepper", name="ci")
    tasks = Tasks(it.database, actor="test", pepper=b"pepper")
    root = (await tasks.create_task(key, Wanted("root", {Unit.USD: 1_000}))).task.task_id
    part = (await tasks.create_task(key, Wanted("part", {Unit.USD: 300}), root)).task.task_id
    assert await it.held(root, part) == [(0, 300), (0, 0)]

    # The key's owner joins the declared child, whether it names the parent or not.
    assert await it.hold(part, root, 100) == Granted(100, 200, f"task:{part}", 1, 10)
    assert await it.hold(part, None, 100) == Granted(100, 100, f"task:{part}", 2, 10)
    assert await it.held(root, part) == [(0, 300), (0, 200)]
    # A child that its client names is inside of the slice; a child of the root is not.
    a, answer = await it.try_("sub", part, 100)
    assert answer == Granted(100, 0, f"task:{part}", 1, 10)
    assert isinstance(await it.hold("sub", part, 1), Refused)
    assert await it.hold("beside", root, 700) == Granted(700, 0, f"task:{root}", 1, 10)
    assert await it.held(root, part) == [(0, 1_000), (0, 300)]
    await it.ledger.settle(a, outcome(70))
    assert await it.held(root, part) == [(70, 930), (70, 200)]
    await tasks.end(part)
    assert await it.hold("sub", part, 1) == Refused(f"task:{part}", 0, 0, 0, None, state="done")


async def test_a_run_and_its_children_share_one_default_budget(it: World) -> None:
    await it.accounts.put_team(Team("default", task_budget_nano_usd=100))
    assert await it.hold("c", "p", 60) == Granted(60, 40, "task:p", 1, 10), "a parent that never asked itself"
    assert await it.hold("p", None, 30) == Granted(30, 10, "task:p", 1, 10)
    assert isinstance(await it.hold("c2", "p", 11), Refused)
    assert await it.hold("other", None, 100) == Granted(100, 0, "task:other", 1, 10)
    assert await it.limits() == [("task:other", 100), ("task:p", 100)]


async def test_nobody_gets_out_of_a_budget_by_nesting(it: World) -> None:
    await it.accounts.set_budget("task:t0", 100)
    for i in range(LEVELS_MAX):
        assert isinstance(await it.hold(f"t{i + 1}", f"t{i}", 1), Granted)
    deep = f"t{LEVELS_MAX + 1}"
    refused = Refused(f"task:{deep}", 0, 0, 0, None, state="nested too deep")
    assert await it.hold(deep, f"t{LEVELS_MAX}", 1) == refused
    assert await it.held("t0") == [(0, LEVELS_MAX)]


async def test_tasks_named_in_a_circle_are_in_each_others_budgets(it: World) -> None:
    await it.accounts.set_budget("task:a", 100)
    await it.accounts.set_budget("task:b", 50)
    assert await it.hold("a", "b", 10) == Granted(10, 40, "task:b", 1, 10)
    assert await it.hold("b", "a", 10) == Granted(10, 30, "task:b", 1, 10)
    assert await it.held("a", "b") == [(0, 20), (0, 20)]


async def test_below_a_task_that_was_stopped_nothing_new_begins(it: World) -> None:
    await it.hold("p", None, 1)
    await Tasks(it.database, actor="test", pepper=b"pepper").pause("p", "look at it first")
    stopped = Refused("task:p", 0, 0, 0, None, state="paused_admin")
    assert await it.hold("new", "p", 1) == stopped


async def test_below_a_task_that_ends_while_its_budgets_are_waited_for_nothing_begins(it: World) -> None:
    """Its slice is given back by then, so what a child held in it would be nowhere above."""
    key, _ = await it.accounts.create_key(pepper=b"pepper", name="ci")
    tasks = Tasks(it.database, actor="test", pepper=b"pepper")
    root = (await tasks.create_task(key, Wanted("root", {Unit.USD: 1_000}))).task.task_id
    part = (await tasks.create_task(key, Wanted("part", {Unit.USD: 300}), root)).task.task_id
    amounts = Amounts(100, 1, 1)
    ask = Ask(attempt(task_id="sub", parent_task_id=part), (f"task:{part}", "task:sub"), amounts, amounts)

    def admitted_late() -> Tx[Admitted]:
        """The task ends right after the admission has looked at it, before it has the locks."""
        under_way = admit([ask], it.ledger._lease, None, TaskDefault(), {}, False)
        step, ended = next(under_way), False
        while True:
            rows = yield step
            if not ended and isinstance(step, Fetch) and "source, state FROM task" in step.sql.postgres:
                ended = True
                yield from tasks._end(part, "")
            try:
                step = under_way.send(rows)
            except StopIteration as stop:
                assert ended
                return cast(Admitted, stop.value)

    (answer,) = (await it.database.write(admitted_late)).answers
    assert isinstance(answer, Refused)
    assert (answer.scope, answer.state) == (f"task:{part}", "done")
    assert await it.held(root, part) == [(0, 0), (0, 0)]


async def test_a_hold_that_the_store_lost_is_posted_all_the_way_up(it: World) -> None:
    await it.accounts.set_budget("task:top", 100)
    await it.hold("p", "top", 10)
    await it.ledger.settle(attempt(task_id="c", parent_task_id="p"), outcome(30, Kind.POST))
    assert await it.held("top") == [(30, 10)]


def test_a_line_ends_at_its_top_in_a_circle_and_at_its_greatest_length() -> None:
    rows = {"c": Link("p", "running"), "p": Link("g", "running"), "g": Link(None, "running")}
    assert line_of("c", (), rows) == Line(("p", "g"))
    assert line_of("c", ("x", None), rows) == Line(("p", "x", "g"))
    assert line_of("x", ("p",), rows) == Line(("p", "g"))
    circle = {"a": Link("b", "running"), "b": Link("a", "running")}
    assert line_of("a", (), circle) == Line(("b",))
    ladder = {f"t{i}": Link(f"t{i + 1}", "running") for i in range(20)}
    assert line_of("t0", (), ladder) == Line(tuple(f"t{i}" for i in range(1, LEVELS_MAX + 1)), too_deep=True)
