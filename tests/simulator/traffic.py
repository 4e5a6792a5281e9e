"""Requests and their attempts, as `pipeline/` handles them with money: reserve, send, settle or post."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from random import Random
from typing import TYPE_CHECKING

import msgspec

from gateway.core.entry import Attempt, Kind, OnExceed, Outcome, Refused
from gateway.core.errors import LedgerUnavailable, Unavailable
from gateway.core.ids import new_id
from gateway.core.task import LANDING_RULE
from gateway.core.usage import Quality
from tests.simulator import calls
from tests.simulator.calls import Amounts, Wish
from tests.simulator.checker import AttemptFacts
from tests.simulator.provider import Provider
from tests.simulator.replica import Process
from tests.simulator.schedule import KEYS, TASKS, Call, Ends

if TYPE_CHECKING:
    from tests.simulator.world import World

#: A revocation shows within a second, and within a minute whatever happens (storage/keys.py).
REVOKED_S, REVOKED_WORST_S = 1.0, 60.0


class Traffic:
    def __init__(self, world: World) -> None:
        self.provider = Provider(world.loop, self._arrived)
        #: task -> the first attempts of its requests
        self.first_tries: dict[str, set[str]] = defaultdict(set)
        self._world = world

    def call(self, op: Call) -> None:
        world = self._world
        process = world.current[op.replica]
        if not process.serves:
            world.counts["not served"] += 1
            return
        context = process.owner.context()
        asked = asyncio.Event()
        task = world.loop.create_task(self._request(process, op, asked), name="request", context=context)
        if op.leaves_after_s is not None:

            def leave() -> None:
                if not task.done() and not asked.is_set():
                    world.say(f"#{op.number} the client leaves")
                    task.cancel()

            world.loop.call_later(op.leaves_after_s, leave, context=context)

    async def _request(self, process: Process, op: Call, asked: asyncio.Event) -> None:
        """Reserve, send, settle; once more if the provider turned it away."""
        world = self._world
        key, team = KEYS[op.key]
        task, parent = f"t{op.task}", None
        declared = world.operators.declared
        if op.task >= TASKS:
            if not declared:
                return
            # A task-scoped key is its owner's.
            task, (key, team) = declared[op.task % len(declared)], KEYS[0]
        if op.below:
            above = task + "c" * (op.below - 1)
            task, parent = f"{above}c", above if op.names_parent else None
        if process.keys is not None and not await self._key_works(process, key):
            world.counts["key refused"] += 1
            return
        rng = Random(f"{world.schedule.seed} call {op.number}")
        request_id = new_id("req", world.clock.now_ms(), rng.randbytes(10))
        for number in (1, 2):
            at_ms = world.clock.now_ms() + world.schedule.skews_ms[process.slot]
            attempt_id = new_id("att", at_ms, rng.randbytes(10))
            a = calls.attempt(attempt_id, request_id, key, team, task, parent, number, at_ms)
            try:
                sent = await self._try(process, op, a, asked)
                if isinstance(sent, Refused) and _lands(sent, a):
                    last = msgspec.structs.replace(
                        a, attempt_id=new_id("att", at_ms, rng.randbytes(10)), attempt_no=1, rule=LANDING_RULE
                    )
                    wish = calls.wish(max(1, sent.kept_back // 2), 1, landing=True)
                    await self._try(process, op, last, asked, wish)
                    return
            except LedgerUnavailable:
                world.counts["unavailable"] += 1
                world.say(f"#{op.number} {process.name} unavailable")
                return
            if isinstance(sent, Refused) or not sent or op.ends is not Ends.TURNED_AWAY:
                return

    async def _key_works(self, process: Process, key: str) -> bool:
        world = self._world
        asked_s = world.loop.now_s
        assert process.keys is not None
        try:
            record = await process.keys.find(key)
        except Unavailable:
            return False
        if record is None or record.revoked_at_ms is not None:
            return False
        since_s = asked_s - world.operators.revoked_at_s.get(key, asked_s)
        if since_s > (REVOKED_WORST_S if world.disturbed(process) else REVOKED_S):
            world.checker.violated(
                "key", f"{key} works at {process.name} {since_s:.1f} s after its revocation"
            )
        return True

    async def _try(
        self, process: Process, op: Call, a: Attempt, asked: asyncio.Event, landing: Wish | None = None
    ) -> bool | Refused:
        """Returns whether another attempt may follow, or why there was none."""
        world = self._world
        scopes = calls.scopes_of(a)
        facts = world.checker.attempts[a.attempt_id] = AttemptFacts(
            scopes, a.task_id, a.parent_task_id, a.request_id, landing is not None or op.landing
        )
        if a.attempt_no == 1:
            self.first_tries[a.task_id].add(a.attempt_id)
        wish = landing or calls.wish(op.most, op.least, op.landing)
        asked_ms = world.clock.now_ms()
        if op.asked_twice:
            answer, twin = await asyncio.gather(
                calls.reserve(process.ledger, a, scopes, wish), calls.reserve(process.ledger, a, scopes, wish)
            )
            if type(answer) is not type(twin) or (answer != twin and not isinstance(answer, Refused)):
                world.checker.violated("twice", f"{a.attempt_id} was answered {answer}, and {twin}")
        else:
            answer = await calls.reserve(process.ledger, a, scopes, wish)
        asked.set()
        if isinstance(answer, Refused):
            world.counts["refused"] += 1
            world.say(f"#{op.number} {process.name} refused: {answer}")
            world.checker.refused(a.attempt_id, answer, wish, asked_ms)
            return answer
        world.counts["granted"] += 1
        facts.granted = held = calls.granted_amounts(wish, answer)
        world.say(f"#{op.number} {process.name} granted {held}: {a.attempt_id[-6:]}")
        await self._send(process, op, a, held, facts)
        return True

    async def _send(self, process: Process, op: Call, a: Attempt, held: Amounts, facts: AttemptFacts) -> None:
        world = self._world
        bill = calls.shares(held, op.share)
        if op.ends is Ends.BREACH:
            facts.breach = True
            bill = calls.more_than(held)
        outcome, told = calls.posted(bill), bill
        if op.ends is Ends.TURNED_AWAY or op.ends is Ends.UNSENT:
            outcome, told = calls.void(), calls.NOTHING
        elif op.ends is Ends.ESTIMATED:
            told = calls.between(bill, held)
            outcome = calls.posted(told, Quality.ESTIMATED)
        elif op.ends is Ends.CUT:
            outcome, told = calls.at_bound(held), held
        billed = outcome.kind is not Kind.VOID
        if op.ends is not Ends.UNSENT:
            await self.provider.ask(a.attempt_id, bill if billed else None, op.takes_s)
        facts.told.append(told)
        world.say(f"#{op.number} {process.name} {'settles' if op.settles else 'posts'} {_said(outcome)}")
        if op.settles:
            settled = await process.ledger.settle(a, outcome)
            world.say(f"#{op.number} {process.name} settled: {settled}")
            if outcome.quality is Quality.EXACT and process.ledger.available:
                facts.acknowledged = told
        else:
            process.ledger.post(a, outcome)
        for slot, after_s in op.again:
            self._later(after_s, slot, a, outcome, "again")
        if op.proof_after_s is not None and billed:
            facts.told.append(bill)
            self._later(op.proof_after_s, op.replica, a, calls.posted(bill), "proof of")

    def _later(self, after_s: float, slot: int, a: Attempt, outcome: Outcome, why: str) -> None:
        """Settle once more, by whoever is that replica then."""
        world = self._world

        def settle() -> None:
            process = world.current[slot]
            if process.serves:
                world.say(f"{process.name}: {why} {a.attempt_id[-6:]}: {_said(outcome)}")
                world.counts["settled again"] += 1
                world.loop.create_task(
                    _settle(process, a, outcome), name="request", context=process.owner.context()
                )

        world.loop.call_later(after_s, settle, context=world.outside)

    def _arrived(self, attempt_id: str, bill: Amounts | None) -> None:
        self._world.say(f"the provider has {attempt_id[-6:]} and bills {bill}")
        self._world.checker.arrived(attempt_id, bill)
        self._world.checker.attempts[attempt_id].bill = bill


def _lands(refused: Refused, a: Attempt) -> bool:
    return refused.on_exceed is OnExceed.SUMMARIZE and (
        refused.scope == f"task:{a.task_id}" or not refused.scope.startswith("task:")
    )


async def _settle(process: Process, a: Attempt, outcome: Outcome) -> None:
    await process.ledger.settle(a, outcome)


def _said(outcome: Outcome) -> str:
    return f"{outcome.kind} {outcome.cost_nano_usd}"
