"""Declared tasks: keys and budgets of their own, slices for children, states, and what is shown of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.core.budget import OnExceed
from gateway.core.entry import Amounts, Attempt, Granted, Kind, Refused, Unit
from gateway.core.errors import InvalidRequest, NotFound
from gateway.core.identity import KeyRecord
from gateway.core.task import CHILDREN_MAX, State
from gateway.core.usage import Quality, Usage
from gateway.storage import reports
from gateway.storage.accounts import Accounts, Team
from gateway.storage.database import Database
from gateway.storage.keys import SqlKeyStore
from gateway.storage.ledger import SqlLedger
from gateway.storage.tasks import Declared, TaskOutcome, Tasks, Wanted
from tests.storage.worlds import TEAM, attempt, opened, outcome, rows, scopes, void

PEPPER = b"pepper"


@dataclass
class World:
    ledger: SqlLedger
    database: Database
    accounts: Accounts
    tasks: Tasks
    key: KeyRecord

    async def declare(
        self, budgets: Mapping[Unit, int] | int, parent: Declared | None = None, **more: object
    ) -> Declared:
        limits = {Unit.USD: budgets} if isinstance(budgets, int) else budgets
        wanted = Wanted("run", limits, **more)  # type: ignore[arg-type]
        return await self.tasks.create_task(parent.key if parent else self.key, wanted)

    async def reserve(
        self, task: Declared, amount: int, least: int | None = None, *, landing: bool = False
    ) -> tuple[Attempt, Granted | Refused]:
        a = attempt(task_id=task.task.task_id, key_id=self.key.key_id)
        lowest = Amounts(amount if least is None else least, 10, 10)
        return a, await self.ledger.reserve(a, scopes(a), Amounts(amount, 10, 10), lowest, landing=landing)

    async def spend(self, task: Declared, cost: int) -> Attempt:
        a, answer = await self.reserve(task, cost)
        assert isinstance(answer, Granted), answer
        await self.ledger.settle(a, outcome(cost))
        return a

    async def usd(self, task: Declared) -> tuple[int, int, int]:
        """(limit, posted, held) of its dollar budget."""
        found = await self.ledger.snapshot(f"task:{task.task.task_id}")
        (budget,) = (b for b in found if b.unit is Unit.USD)
        return budget.limit, budget.posted, budget.held

    async def state(self, task: Declared) -> str:
        return (await self.accounts.get_task(task.task.task_id)).state


@pytest.fixture
async def it(store: str, tmp_path: Path) -> AsyncIterator[World]:
    async with opened(store, tmp_path / "journal") as (ledger, database, accounts):
        await accounts.ensure_defaults()
        key, _ = await accounts.create_key(pepper=PEPPER, name="ci", models=["sonnet"])
        yield World(ledger, database, accounts, Tasks(database, actor="test", pepper=PEPPER), key)
        assert await reports.drift(database) == []


async def test_a_task_has_a_key_of_its_own_that_is_its_owners(it: World) -> None:
    task = await it.declare({Unit.USD: 1_000, Unit.CALLS: 3}, labels={"repo": "x"})
    key, row = task.key, task.task

    assert (key.task_id, key.declared_by, key.models) == (row.task_id, it.key.key_id, it.key.models)
    assert (row.source, row.state, row.name, row.depth, row.key_id) == (
        "declared", "running", "run", 0, it.key.key_id,
    )  # fmt: skip
    keys = await SqlKeyStore.open(it.database)
    assert await keys.find(key.key_id) == key
    await it.accounts.revoke_key(it.key.key_id)
    await keys.poll()
    found = await keys.find(key.key_id)
    assert found is not None
    assert found.revoked_at_ms is not None, "it ends with its owner's key"
    await keys.close()


async def test_a_task_without_a_dollar_budget_gets_the_default_of_its_team(it: World) -> None:
    await it.accounts.put_team(Team("default", task_budget_nano_usd=70))
    assert await it.usd(await it.declare({Unit.CALLS: 3})) == (70, 0, 0)
    assert await it.usd(await it.declare(900)) == (900, 0, 0)


async def test_a_childs_slice_is_held_in_its_parent_and_comes_back_unused(it: World) -> None:
    parent = await it.declare(1_000)
    child = await it.declare(300, parent)
    assert (child.task.parent_task_id, child.task.depth) == (parent.task.task_id, 1)
    assert await it.usd(parent) == (1_000, 0, 300)

    a, answer = await it.reserve(child, 200)
    assert isinstance(answer, Granted)
    assert (answer.remaining_nano_usd, answer.remaining_scope) == (100, f"task:{child.task.task_id}")
    assert await it.usd(parent) == (1_000, 0, 300), "a hold of the child is inside of its slice"
    await it.ledger.settle(a, outcome(120))
    assert await it.usd(child) == (300, 120, 0)
    assert await it.usd(parent) == (1_000, 120, 180), "what it spends moves from held to posted"

    _, refused = await it.reserve(parent, 701)
    assert refused == Refused(f"task:{parent.task.task_id}", 1_000, 120, 180, None)
    await it.tasks.end(child.task.task_id)
    assert await it.usd(parent) == (1_000, 120, 0)
    assert isinstance((await it.reserve(parent, 701))[1], Granted)
    _, refused = await it.reserve(child, 1)
    assert refused == Refused(f"task:{child.task.task_id}", 0, 0, 0, None, state="done")


async def test_what_a_grandchild_spends_is_posted_all_the_way_up(it: World) -> None:
    a = await it.declare({Unit.USD: 1_000, Unit.CALLS: 10})
    b = await it.declare({Unit.USD: 500, Unit.CALLS: 5}, a)
    c = await it.declare({Unit.USD: 200, Unit.CALLS: 2}, b)
    d = await it.declare({Unit.USD: 100, Unit.CALLS: 1}, c)
    spent = await it.spend(d, 60)
    assert [await it.usd(t) for t in (a, b, c, d)] == [
        (1_000, 60, 440), (500, 60, 140), (200, 60, 40), (100, 60, 0),
    ]  # fmt: skip
    await it.ledger.settle(spent, outcome(40))  # corrected: 20 come back, and are the slice's again
    assert [await it.usd(t) for t in (a, b, c, d)] == [
        (1_000, 40, 460), (500, 40, 160), (200, 40, 60), (100, 40, 0),
    ]  # fmt: skip
    with pytest.raises(InvalidRequest, match="tasks nest at most 3 deep"):
        await it.declare({Unit.USD: 1, Unit.CALLS: 0}, d)
    assert sorted(await it.tasks.end(b.task.task_id)) == sorted(t.task.task_id for t in (b, c, d))
    assert [await it.usd(t) for t in (a, b, c, d)] == [
        (1_000, 40, 0), (500, 40, 0), (200, 40, 0), (100, 40, 0),
    ]  # fmt: skip


async def test_an_ended_child_claims_what_it_still_holds_until_that_settles(it: World) -> None:
    parent = await it.declare(1_000)
    child = await it.declare(300, parent)
    a, _ = await it.reserve(child, 200)
    await it.tasks.end(child.task.task_id)
    assert await it.usd(parent) == (1_000, 0, 200)
    await it.ledger.settle(a, outcome(50))
    assert await it.usd(parent) == (1_000, 50, 0)


async def test_a_breach_of_a_child_is_posted_in_its_parent_too_and_no_hold_is_lost(it: World) -> None:
    parent = await it.declare(1_000)
    child = await it.declare(300, parent)
    a, _ = await it.reserve(child, 200)
    b, _ = await it.reserve(child, 100)
    await it.ledger.settle(a, outcome(290))  # 90 more than was held
    assert await it.usd(parent) == (1_000, 290, 100), "the open hold of 100 is still covered"
    await it.ledger.settle(b, outcome(100))
    assert await it.usd(parent) == (1_000, 390, 0)


async def test_unknown_charges_of_children_settle_like_others(it: World) -> None:
    parent = await it.declare({Unit.USD: 1_000, Unit.INPUT_TOKENS: 5_000})
    child = await it.declare({Unit.USD: 300, Unit.INPUT_TOKENS: 100}, parent)
    a, _ = await it.reserve(child, 200)
    lost = outcome(200, Kind.CHARGE_UNKNOWN, usage=Usage(), quality=Quality.UNKNOWN)
    await it.ledger.settle(a, lost)
    tokens = {b.unit: (b.posted, b.held) for b in await it.ledger.snapshot(f"task:{parent.task.task_id}")}
    assert tokens == {Unit.USD: (200, 100), Unit.INPUT_TOKENS: (10, 90)}


async def test_slices_must_fit_and_cover_every_unit_of_the_parent(it: World) -> None:
    parent = await it.declare({Unit.USD: 1_000, Unit.CALLS: 10})
    for limits, message in [
        ({Unit.USD: 10}, "its parent has a budget in calls"),
        ({Unit.USD: 1_001, Unit.CALLS: 1}, r"has \$0.000001 left, which is less than \$0.000001001"),
        ({Unit.USD: 10, Unit.CALLS: 11}, "has 10 calls left, which is less than 11 calls"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            await it.declare(limits, parent)
    with pytest.raises(InvalidRequest, match="must be hard"):
        await it.declare({Unit.USD: 10, Unit.CALLS: 1}, parent, on_exceed=OnExceed.WARN)
    assert await it.usd(parent) == (1_000, 0, 0), "nothing is left of what was refused"
    # A unit that the parent has no budget in is the child's alone.
    child = await it.declare({Unit.USD: 10, Unit.CALLS: 1, Unit.OUTPUT_TOKENS: 9}, parent)
    _, refused = await it.reserve(child, 5)
    assert isinstance(refused, Refused)
    assert refused.unit is Unit.OUTPUT_TOKENS


async def test_a_herd_of_children_gets_exactly_what_fits(it: World) -> None:
    parent = await it.declare(1_000)
    made = await asyncio.gather(*(it.declare(90, parent) for _ in range(15)), return_exceptions=True)
    assert [type(m) for m in made].count(Declared) == 11
    assert await it.usd(parent) == (1_000, 0, 990)
    # Their attempts, the parent's, and more children, all at once.
    children = [m for m in made if isinstance(m, Declared)]
    tries = await asyncio.gather(*(it.reserve(c, 50) for c in (*children, *children, parent)))
    held = [a for a, answer in tries if isinstance(answer, Granted)]
    assert len(held) == 11
    ends = [it.tasks.end(c.task.task_id) for c in children[:5]]
    await asyncio.gather(*(it.ledger.settle(a, outcome(50)) for a in held), *ends)
    assert await it.usd(parent) == (1_000, 550, 240)


async def test_children_are_limited_to_those_that_are_not_done(it: World) -> None:
    parent = await it.declare(1_000)
    children = [await it.declare(1, parent) for _ in range(CHILDREN_MAX)]
    with pytest.raises(InvalidRequest, match="at most 20 children"):
        await it.declare(1, parent)
    await it.tasks.end(children[0].task.task_id)
    await it.declare(1, parent)


async def test_of_many_declared_at_once_no_more_than_the_limit_are(it: World) -> None:
    """Without a budget, whose lock would let them come one by one."""
    parent = await it.declare({})
    made = await asyncio.gather(
        *(it.declare({}, parent) for _ in range(CHILDREN_MAX + 4)), return_exceptions=True
    )
    assert [type(m) for m in made].count(Declared) == CHILDREN_MAX


async def test_a_child_is_not_counted_twice_where_its_parent_is_named_as_well(it: World) -> None:
    parent = await it.declare(1_000)
    child = await it.declare(300, parent)
    ids = {"task_id": child.task.task_id, "parent_task_id": parent.task.task_id, "key_id": it.key.key_id}
    held, lost = attempt(**ids), attempt(**ids)
    ask = Amounts(100, 10, 10)
    await it.ledger.reserve(held, (*scopes(held), f"task:{parent.task.task_id}"), ask, ask)
    assert await it.usd(parent) == (1_000, 0, 300)
    await it.ledger.settle(held, outcome(100))
    await it.ledger.settle(lost, outcome(40))  # its hold was lost with the store's last commits
    assert await it.usd(parent) == (1_000, 140, 160)
    assert await it.usd(child) == (300, 140, 0)


async def test_a_slice_is_raised_and_lowered_within_its_parent(it: World) -> None:
    parent = await it.declare(1_000)
    child = await it.declare(300, parent)
    scope = f"task:{child.task.task_id}"
    a, _ = await it.reserve(child, 250)

    await it.accounts.adjust_budget(scope, 900, "more")
    assert await it.usd(parent) == (1_000, 0, 900)
    with pytest.raises(InvalidRequest, match=r"of which it is a part, has \$0.0000001 left"):
        await it.accounts.adjust_budget(scope, 1_001, "too much")
    await it.accounts.adjust_budget(scope, 100, "less")  # below what is held, which stays covered
    assert await it.usd(parent) == (1_000, 0, 250)
    await it.ledger.settle(a, outcome(30))
    assert await it.usd(child) == (100, 30, 0)
    assert await it.usd(parent) == (1_000, 30, 70)
    with pytest.raises(InvalidRequest, match="cannot change for a time only"):
        await it.accounts.adjust_budget(scope, 200, "today", until_ms=2**52)
    with pytest.raises(InvalidRequest, match="must be hard"):
        await it.accounts.set_budget(scope, 100, on_exceed=OnExceed.WARN)
    with pytest.raises(InvalidRequest, match="end the child instead"):
        await it.accounts.remove_budget(scope)
    with pytest.raises(InvalidRequest, match="its set of budgets stays as it is"):
        await it.accounts.set_budget(f"task:{parent.task.task_id}", 5, unit=Unit.CALLS)
    with pytest.raises(InvalidRequest, match="for its lifetime"):
        await it.accounts.set_budget(f"task:{parent.task.task_id}", 5, "day")


async def test_a_slice_that_was_nothing_can_be_raised_and_that_of_a_done_child_claims_nothing(
    it: World,
) -> None:
    parent = await it.declare(1_000)
    child = await it.declare(0, parent)
    scope = f"task:{child.task.task_id}"
    await it.accounts.adjust_budget(scope, 400, "now")
    assert await it.usd(parent) == (1_000, 0, 400)
    await it.spend(child, 150)
    await it.tasks.end(child.task.task_id)
    await it.accounts.adjust_budget(scope, 900, "too late")
    assert await it.usd(parent) == (1_000, 150, 0)


async def test_a_used_up_task_is_paused_told_once_and_goes_on_when_it_is_raised(it: World) -> None:
    task = await it.declare(1_000)
    await it.spend(task, 850)
    assert await it.state(task) == "alerted"
    scope = f"task:{task.task.task_id}"
    for _ in range(3):
        assert (await it.reserve(task, 200))[1] == Refused(scope, 1_000, 850, 0, None)
        it.ledger.revision_changed()
    assert await it.state(task) == "paused_budget"
    # Even what would fit waits for a person now.
    assert (await it.reserve(task, 10))[1] == Refused(scope, 1_000, 850, 0, None, state="paused_budget")
    told = await rows(it.database, "SELECT body FROM outbox WHERE kind = 'task_paused'")
    assert [json.loads(body)["spent"] for (body,) in told] == [850]

    await it.accounts.adjust_budget(scope, 2_000, "go on")
    it.ledger.revision_changed()
    assert await it.state(task) == "running"
    assert isinstance((await it.reserve(task, 200))[1], Granted)


async def test_money_that_may_come_back_pauses_nothing(it: World) -> None:
    task = await it.declare(1_000)
    held, _ = await it.reserve(task, 900)
    assert isinstance((await it.reserve(task, 200))[1], Refused)
    assert await it.state(task) == "running"
    await it.ledger.settle(held, outcome(900))
    assert isinstance((await it.reserve(task, 200))[1], Refused)
    assert await it.state(task) == "paused_budget"
    await it.ledger.settle(held, outcome(100))  # proof of a smaller bill
    it.ledger.revision_changed()
    assert await it.state(task) == "running"
    assert isinstance((await it.reserve(task, 200))[1], Granted)


async def test_only_a_landing_uses_what_is_kept_back_for_it(it: World) -> None:
    task = await it.declare(1_000, on_exceed=OnExceed.SUMMARIZE)
    scope = f"task:{task.task.task_id}"
    await it.spend(task, 975)
    _, refused = await it.reserve(task, 10)
    assert refused == Refused(scope, 1_000, 975, 0, None, on_exceed=OnExceed.SUMMARIZE, kept_back=20)
    assert await it.state(task) == "paused_budget"
    last, landed = await it.reserve(task, 20, landing=True)
    assert isinstance(landed, Granted)
    assert landed.amount_nano_usd == 20
    _, again = await it.reserve(task, 20, landing=True)
    assert isinstance(again, Refused)
    assert (again.remaining, again.kept_back) == (5, 0)
    await it.ledger.settle(last, outcome(15))
    await it.tasks.end(task.task.task_id)
    it.ledger.revision_changed()
    assert isinstance((await it.reserve(task, 1, landing=True))[1], Refused), "done is done"


async def test_a_task_lands_once_per_stop(it: World) -> None:
    task = await it.declare(1_000, on_exceed=OnExceed.SUMMARIZE)
    scope = f"task:{task.task.task_id}"
    running = Refused(scope, 0, 0, 0, None, state="running")
    assert (await it.reserve(task, 5, landing=True))[1] == running, "nothing has ended yet"
    it.ledger.revision_changed()
    await it.spend(task, 975)
    await it.reserve(task, 10)
    tries = await asyncio.gather(*(it.reserve(task, 4, landing=True) for _ in range(5)))
    landed = [a for a, answer in tries if isinstance(answer, Granted)]
    assert len(landed) == 1
    used_up = Refused(
        scope, 1_000, 975, 4, None, on_exceed=OnExceed.SUMMARIZE, kept_back=20, state="paused_budget"
    )
    assert (await it.reserve(task, 1))[1] == used_up
    # The same request may try another deployment.
    again = attempt(
        task_id=task.task.task_id, key_id=it.key.key_id, request_id=landed[0].request_id, attempt_no=2
    )
    it.ledger.revision_changed()
    wanted = Amounts(4, 10, 10)
    assert isinstance(await it.ledger.reserve(again, scopes(again), wanted, wanted, landing=True), Granted)

    await it.accounts.adjust_budget(scope, 2_000, "go on")
    it.ledger.revision_changed()
    assert await it.state(task) == "running"
    await it.spend(task, 977)
    await it.reserve(task, 10)
    it.ledger.revision_changed()
    assert isinstance((await it.reserve(task, 4, landing=True))[1], Granted), "another stop, another landing"


async def test_a_landing_that_came_to_nothing_is_given_back(it: World) -> None:
    task = await it.declare(1_000, on_exceed=OnExceed.SUMMARIZE)
    await it.spend(task, 975)
    await it.reserve(task, 10)
    wanted = Amounts(4, 10, 10)

    async def land(a: Attempt) -> Granted | Refused:
        it.ledger.revision_changed()
        return await it.ledger.reserve(a, scopes(a), wanted, wanted, landing=True)

    def last(**more: object) -> Attempt:
        return attempt(task_id=task.task.task_id, key_id=it.key.key_id, rule="summarize", **more)

    one = last()
    two = last(request_id=one.request_id, attempt_no=2)
    assert isinstance(await land(one), Granted)
    assert isinstance(await land(two), Granted)
    await it.ledger.settle(one, void())
    assert isinstance(await land(last()), Refused), "the second try of that request is under way"
    await it.ledger.settle(two, void())
    three = last()
    assert isinstance(await land(three), Granted)
    await it.ledger.settle(three, outcome(3))
    assert isinstance(await land(last()), Refused)


async def test_under_a_budget_that_many_share_each_task_lands_once_per_stop(it: World) -> None:
    one, two, late = [await it.declare(10_000) for _ in range(3)]
    await it.accounts.set_budget(TEAM, 1_000, on_exceed=OnExceed.SUMMARIZE, landing_percent=2)
    await it.spend(one, 480)
    await it.spend(two, 495)
    _, refused = await it.reserve(one, 10)
    said = Refused(TEAM, 1_000, 975, 0, None, on_exceed=OnExceed.SUMMARIZE, kept_back=20)
    assert refused == said

    async def land(task: Declared, amount: int = 5, **more: object) -> tuple[Attempt, Granted | Refused]:
        it.ledger.revision_changed()
        a = attempt(task_id=task.task.task_id, key_id=it.key.key_id, rule="summarize", **more)
        wanted = Amounts(amount, 10, 10)
        return a, await it.ledger.reserve(a, scopes(a), wanted, wanted, landing=True)

    tries = await asyncio.gather(*(land(one) for _ in range(5)))
    ((first, _),) = [(a, answer) for a, answer in tries if isinstance(answer, Granted)]
    assert {answer.state for _, answer in tries if isinstance(answer, Refused)} == {"paused_budget"}
    assert await it.state(one) == "running", "its own budget is not what has ended"
    assert isinstance((await land(one, request_id=first.request_id, attempt_no=2))[1], Granted)
    other, granted = await land(two)
    assert isinstance(granted, Granted), "each its own"
    assert isinstance((await land(late))[1], Refused), "what has not begun has nothing to sum up"
    assert isinstance((await land(two, 10))[1], Refused)

    # One that came to nothing is given back; all of them together stay within the limit.
    await it.ledger.settle(other, void())
    other, granted = await land(two, 15)
    assert isinstance(granted, Granted)
    assert (await it.ledger.snapshot(TEAM))[0].left == 0
    await it.ledger.settle(other, outcome(15))
    assert isinstance((await land(two, 1))[1], Refused)

    await it.accounts.adjust_budget(TEAM, 1_020, "another stop")
    assert isinstance((await land(two, 1))[1], Granted)


async def test_a_task_that_its_last_answer_alerts_has_had_it(it: World) -> None:
    task = await it.declare({Unit.USD: 10_000, Unit.CALLS: 5})
    await it.accounts.set_budget(TEAM, 1_000, on_exceed=OnExceed.SUMMARIZE, landing_percent=2)
    for cost in (480, 480, 15):
        await it.spend(task, cost)
    assert isinstance((await it.reserve(task, 10))[1], Refused)

    last, granted = await it.reserve(task, 5, landing=True)
    assert isinstance(granted, Granted)
    await it.ledger.settle(last, outcome(5))
    assert await it.state(task) == "alerted", "four of its five calls are made"
    it.ledger.revision_changed()
    assert isinstance((await it.reserve(task, 5, landing=True))[1], Refused)


async def test_pausing_a_task_pauses_all_below_it_and_resuming_lets_them_go_on(it: World) -> None:
    parent = await it.declare(1_000)
    child = await it.declare(300, parent)
    running, _ = await it.reserve(child, 100)
    both = sorted([parent.task.task_id, child.task.task_id])

    assert sorted(await it.tasks.pause(parent.task.task_id, "looks stuck", State.PAUSED_LOOP)) == both
    for task in (parent, child):
        _, refused = await it.reserve(task, 1)
        assert isinstance(refused, Refused)
        assert refused.state == "paused_loop"
        shown = await it.accounts.get_task(task.task.task_id)
        assert (shown.state, shown.state_reason) == ("paused_loop", "looks stuck")
    await it.ledger.settle(running, outcome(60))  # what runs may end
    assert await it.tasks.pause(parent.task.task_id, "again", State.PAUSED_LOOP) == []
    with pytest.raises(InvalidRequest, match="has no children"):
        await it.declare(10, parent)
    it.ledger.revision_changed()
    assert sorted(await it.tasks.resume(parent.task.task_id, "looked at it")) == both
    it.ledger.revision_changed()
    assert isinstance((await it.reserve(child, 1))[1], Granted)


async def test_done_is_final(it: World) -> None:
    task = await it.declare(1_000)
    await it.tasks.end(task.task.task_id, "finished")
    assert await it.tasks.end(task.task.task_id) == []
    assert await it.tasks.resume(task.task.task_id) == []
    assert await it.tasks.pause(task.task.task_id, "x") == []
    await it.accounts.adjust_budget(f"task:{task.task.task_id}", 9_000, "x")
    assert await it.state(task) == "done"


async def test_owners_have_nothing_of_one_another(it: World) -> None:
    other, _ = await it.accounts.create_key(pepper=PEPPER, name="other")
    task = await it.declare(1_000)
    with pytest.raises(NotFound):
        await it.tasks.create_task(other, Wanted("x", {Unit.USD: 1}), task.task.task_id)
    with pytest.raises(NotFound):
        await it.tasks.task_view(task.task.task_id, other.key_id)
    with pytest.raises(InvalidRequest, match="children of that task only"):
        await it.tasks.create_task(task.key, Wanted("x", {Unit.USD: 1}), "task_b")
    with pytest.raises(NotFound):
        await it.tasks.end("task_none")


async def test_a_child_that_a_client_names_is_shown_with_the_budgets_above_it(it: World) -> None:
    task = await it.declare({Unit.USD: 1_000})
    a = attempt(task_id="task_sub", parent_task_id=task.task.task_id, key_id=it.key.key_id)
    assert isinstance(
        await it.ledger.reserve(a, scopes(a), Amounts(100, 10, 10), Amounts(100, 10, 10)), Granted
    )
    await it.ledger.settle(a, outcome(100))
    view = await it.tasks.task_view("task_sub")
    assert ([b.budget_id for b in view.budgets], [(b.scope, b.left) for b in view.above]) == (
        [], [(f"task:{task.task.task_id}", 900)],
    )  # fmt: skip
    assert (view.step_nano_usd, view.steps_left) == (100, 9)
    assert (await it.tasks.task_view(task.task.task_id)).above == []


async def test_a_task_is_shown_with_everything_that_is_known_of_it(it: World) -> None:
    task = await it.declare({Unit.USD: 1_000, Unit.CALLS: 50}, labels={"repo": "x"}, breakers='{"steps":9}')
    child = await it.declare({Unit.USD: 100, Unit.CALLS: 5}, task)
    for cost in range(1, 13):
        await it.spend(task, cost)
    await it.tasks.record_outcome(task.task.task_id, True, 0.5, {"tests": "passed"})

    view = await it.tasks.task_view(task.task.task_id, it.key.key_id)
    assert (view.task.steps, view.task.attempts, view.task.cost_nano_usd) == (12, 12, 78)
    assert (view.labels, view.breakers) == ({"repo": "x"}, '{"steps":9}')
    assert {b.unit: (b.limit, b.posted, b.held, b.left) for b in view.budgets} == {
        Unit.USD: (1_000, 78, 100, 822),
        Unit.CALLS: (50, 12, 5, 33),
    }
    assert [(c.task_id, c.state, c.name) for c in view.children] == [(child.task.task_id, "running", "run")]
    assert (view.step_nano_usd, view.steps_left) == (13, 33)  # after 3, 4, ... 12 comes 13; 33 calls left
    assert view.outcome is not None
    assert view.outcome == TaskOutcome(True, 0.5, {"tests": "passed"}, view.outcome.at_ms)
    empty = await it.tasks.task_view(child.task.task_id)
    assert (empty.step_nano_usd, empty.outcome, empty.steps_left) == (None, None, 5)
    with pytest.raises(InvalidRequest, match="finite"):
        await it.tasks.record_outcome(task.task.task_id, True, float("nan"))
