"""Those who change things beside the requests: budgets, keys, declared tasks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.core.budget import BudgetMode
from gateway.core.entry import OnExceed, Unit
from gateway.core.errors import InvalidRequest, NotFound, Unavailable
from gateway.core.identity import KeyRecord
from gateway.storage.accounts import Accounts, Team
from gateway.storage.database import Database
from gateway.storage.tasks import Tasks, Wanted
from tests.simulator.runner import SimulatedRunner
from tests.simulator.schedule import (
    KEYS,
    TEAMS,
    BudgetPlan,
    Declare,
    Op,
    Remove,
    Revoke,
    SetLimit,
    Steer,
)

if TYPE_CHECKING:
    from tests.simulator.world import World


class Operators:
    def __init__(self, world: World) -> None:
        self.revoked_at_s: dict[str, float] = {}
        self.declared: list[str] = []  # ids of tasks
        self.under_way: list[asyncio.Task[None]] = []
        self._world = world
        runner = SimulatedRunner(world.store, flights=1)
        database = Database(runner, runner, world.clock)
        self._accounts = Accounts(database, actor="simulator")
        self._tasks = Tasks(database, actor="simulator", pepper=b"pepper")

    async def furnish(self) -> None:
        """What is there before the first replica starts."""
        world = self._world
        s = world.schedule
        for team in TEAMS:
            await self._accounts.put_team(Team(team, task_budget_nano_usd=s.team_task_limit))
        for number, (key, team) in enumerate(KEYS):
            world.store.connection.execute(
                "INSERT INTO virtual_key (key_id, secret_hmac, tenant_id, team_id, name, models, labels, revision, "
                "created_at_ms) VALUES (?, x'', 'default', ?, ?, '[]', '{}', 1, ?)",
                (key, team, key, number),
            )
        for plan in s.budgets:
            await self._set_budget(plan, plan.limit)
        for declare in s.tasks:
            await self._change(declare)

    def change(self, op: Op) -> None:
        world = self._world
        self.under_way.append(world.loop.create_task(self._change(op), context=world.outside))

    async def _change(self, op: Op) -> None:
        try:
            if isinstance(op, SetLimit):
                await self._set_limit(op)
            elif isinstance(op, Remove):
                plan = self._world.schedule.budgets[op.budget]
                await self._accounts.remove_budget(plan.scope, plan.window, plan.zone, Unit(plan.unit))
            elif isinstance(op, Revoke):
                key = KEYS[op.key][0]
                await self._accounts.revoke_key(key)
                self.revoked_at_s.setdefault(key, self._world.loop.now_s)
            elif isinstance(op, Declare):
                await self._declare(op)
            elif isinstance(op, Steer) and self.declared:
                await self._steer(op, self.declared[op.task % len(self.declared)])
        except (Unavailable, NotFound, InvalidRequest) as e:
            self._world.say(f"#{op.number} did not succeed: {e}")

    async def _set_limit(self, op: SetLimit) -> None:
        plan = self._world.schedule.budgets[op.budget]
        if op.for_s is None:
            await self._set_budget(plan, op.limit)
            return
        await self._accounts.adjust_budget(
            *(plan.scope, op.limit, "simulated"),
            unit=Unit(plan.unit),
            window=plan.window,
            zone=plan.zone,
            until_ms=self._world.clock.now_ms() + round(op.for_s * 1_000),
        )

    async def _set_budget(self, plan: BudgetPlan, limit: int) -> None:
        await self._accounts.set_budget(
            *(plan.scope, limit, plan.window, OnExceed(plan.on_exceed), plan.zone),
            unit=Unit(plan.unit),
            mode=BudgetMode(plan.mode),
        )

    async def _declare(self, op: Declare) -> None:
        """Its id carries the time, by which tasks are locked in order; no two are declared in one millisecond."""
        parent = None
        if op.parent is not None and self.declared:
            parent = self.declared[op.parent % len(self.declared)]
        owner, team = KEYS[0]
        key = KeyRecord(key_id=owner, secret_hmac=b"", tenant_id="default", team_id=team, name=owner)
        budgets = {Unit(unit): limit for unit, limit in op.budgets}
        try:
            # Every other schedule has tasks that sum up at their end.
            on_exceed = OnExceed.SUMMARIZE if self._world.schedule.seed % 2 else OnExceed.ERROR
            made = await self._tasks.create_task(key, Wanted("simulated", budgets, on_exceed), parent)
        finally:
            await asyncio.sleep(0.002)
        self._world.name(made.task.task_id, f"task_{len(self.declared)}")
        self.declared.append(made.task.task_id)
        self._world.say(f"#{op.number} declared {made.task.task_id}, below {parent}")

    async def _steer(self, op: Steer, task_id: str) -> None:
        if op.how == "end":
            await self._tasks.end(task_id)
        elif op.how == "pause":
            await self._tasks.pause(task_id, "simulated")
        elif op.how == "resume":
            await self._tasks.resume(task_id)
        else:
            await self._accounts.adjust_budget(f"task:{task_id}", op.limit, "simulated")
        self._world.say(f"#{op.number} {op.how} {task_id}")
