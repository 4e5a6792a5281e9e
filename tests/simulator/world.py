"""Performs a schedule: replicas, their store, disks and clients; then heals everything, and asks the checker."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from gateway.core.budget import BudgetMode
from gateway.core.entry import Attempt, Kind, OnExceed, Refused, Unit
from gateway.core.errors import InvalidRequest, LedgerUnavailable, NotFound, Unavailable
from gateway.core.ids import new_id
from gateway.core.usage import Quality
from gateway.storage.accounts import Accounts, Team
from gateway.storage.database import Database
from gateway.storage.ledger import LEASE_TTL_S, SqlLedger
from tests.simulator import calls
from tests.simulator.calls import Amounts
from tests.simulator.checker import AttemptFacts, Checker, Violation
from tests.simulator.loop import Inline, NothingHappens, Owner, VirtualLoop
from tests.simulator.provider import Provider
from tests.simulator.replica import Process, ReplicaClock
from tests.simulator.runner import SimulatedRunner
from tests.simulator.schedule import (
    KEYS,
    TEAMS,
    BadDisk,
    BudgetPlan,
    Call,
    Crash,
    Ends,
    Leap,
    Op,
    Outage,
    Pause,
    Remove,
    Revoke,
    Schedule,
    SetLimit,
    Storm,
    text_of,
)
from tests.simulator.store import Sabotage, Store, Weather

#: How long, on the virtual clock, everything gets to come to its end when nothing goes wrong any more.
PATIENCE_S = 60.0
#: A revocation shows within a second, and within a minute whatever happens (storage/keys.py).
REVOKED_S, REVOKED_WORST_S = 1.0, 60.0


@dataclass
class Result:
    violations: list[Violation]
    counts: Counter[str]
    trace: list[str] = field(default_factory=list)


def run(
    schedule: Schedule,
    *,
    trace: bool = False,
    sabotage: Sabotage | None = None,
    ledger: type[SqlLedger] = SqlLedger,
) -> Result:
    """Perform it from beginning to end. The same schedule gives the same result."""
    memory = Path("/dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="simulated-", dir=memory if memory.is_dir() else None))
    world = World(schedule, directory, trace=trace, sabotage=sabotage, ledger=ledger)
    try:
        with _quiet():
            try:
                world.loop.run_until_complete(world.play(), world.outside)
            except NothingHappens as e:
                world.checker.violated("stuck", str(e))
            return world.result()
    finally:
        world.end()
        shutil.rmtree(directory, ignore_errors=True)


class World:
    def __init__(
        self,
        schedule: Schedule,
        directory: Path,
        *,
        trace: bool,
        sabotage: Sabotage | None,
        ledger: type[SqlLedger],
    ) -> None:
        self.schedule = schedule
        self.loop = VirtualLoop()
        self._clock = ReplicaClock(self.loop, schedule.start_ms, 0)
        self.store = Store(self.loop, Random(f"{schedule.seed} store"), self._clock.now_ms, sabotage)
        # Whoever owns the database knows at its start that all others are dead.
        self.checker = Checker(
            self.store,
            0 if schedule.embedded else round(schedule.grace_s * 1_000),
            [limit for limit in (schedule.task_limit, schedule.team_task_limit) if limit is not None],
        )
        self.provider = Provider(self.loop, self._arrived)
        self.counts: Counter[str] = Counter()
        self.trace: list[str] | None = [] if trace else None
        self._directory = directory
        self._ledger_type = ledger
        self._outsiders = Owner("outside", Inline())
        self.outside = self._outsiders.context()
        runner = SimulatedRunner(self.store, flights=1)
        self._accounts = Accounts(Database(runner, runner, self._clock), actor="simulator")
        self._runs: Counter[int] = Counter()
        self._journals: dict[int, Path] = {}
        self._current: dict[int, Process] = {}
        self._all: list[Process] = []
        self._requests = 0  # under way in processes that live
        self._disturbed_until_s: dict[str, float] = defaultdict(float)
        self._first_tries: dict[str, set[str]] = defaultdict(set)
        self._changes: list[asyncio.Task[None]] = []
        self._revoked_at_s: dict[str, float] = {}
        self._storms: list[Storm] = []
        self._set_weather()

    def say(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.loop.now_s:9.4f} s  {text}")

    # --- the whole play --------------------------------------------------------------------------------

    async def play(self) -> None:
        await self._furnish()
        for slot in range(self.schedule.replicas):
            self._journals[slot] = self._directory / f"r{slot}"
            self._launch(slot)
        await asyncio.sleep(0.1)
        began_s = self.loop.now_s
        for op in self.schedule.ops:
            delay_s = began_s + op.at_s - self.loop.now_s
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            if self.checker.violations:
                return
            self._perform(op)
        await asyncio.sleep(0.5)
        for step in (self._heal, self._finish):
            if not self.checker.violations:
                await step()

    async def _furnish(self) -> None:
        s = self.schedule
        for team in TEAMS:
            await self._accounts.put_team(Team(team, task_budget_nano_usd=s.team_task_limit))
        for number, (key, team) in enumerate(KEYS):
            self.store.connection.execute(
                "INSERT INTO virtual_key (key_id, secret_hmac, tenant_id, team_id, name, models, labels, revision, "
                "created_at_ms) VALUES (?, x'', 'default', ?, ?, '[]', '{}', 1, ?)",
                (key, team, key, number),
            )
        for plan in s.budgets:
            await self._set(plan, plan.limit)

    def _perform(self, op: Op) -> None:
        self.counts[type(op).__name__.lower()] += 1
        self.say(f"-- {text_of(op)}")
        if isinstance(op, Call):
            self._call(op)
        elif isinstance(op, Crash):
            self._crash(self._current[op.replica], op.down_s, op.term)
        elif isinstance(op, Pause):
            self._pause(self._current[op.replica], op.for_s, op.succeeded)
        elif isinstance(op, Leap):
            for process in self._current.values():
                self._pause(process, op.for_s, succeeded=False)
        elif isinstance(op, Outage):
            self._outage(op)
        elif isinstance(op, Storm):
            self._storm(op)
        elif isinstance(op, BadDisk):
            self._bad_disk(self._current[op.replica].disk, op)
        else:
            self._changes.append(self.loop.create_task(self._change(op), context=self.outside))

    # --- processes -------------------------------------------------------------------------------------

    def _launch(self, slot: int) -> None:
        self._runs[slot] += 1
        process = Process(
            *(self.store, self.schedule, slot, self._runs[slot], self._journals[slot], self._ledger_type)
        )
        self._current[slot] = process
        self._all.append(process)
        self.loop.create_task(self._start(process), name="start", context=process.owner.context())

    async def _start(self, process: Process) -> None:
        try:
            await process.start()
        except (Unavailable, OSError) as e:
            self.say(f"{process.name} cannot start: {e!r}")
            # It exits, and whoever started it does so again.
            self.loop.call_soon(self._end, process, 0.5, context=self.outside)
        except Exception as e:
            self.checker.violated("start", f"{process.name} cannot start: {e!r}")
            self.loop.call_soon(self._end, process, 0.5, context=self.outside)
        else:
            self.say(f"{process.name} serves")

    def _end(self, process: Process, down_s: float) -> None:
        """It dies, and is started again after a while."""
        if process.died:
            return
        said = process.kill()
        self.say(f"{process.name} is dead{' (journal: ' + said + ')' if said else ''}")
        if self._current[process.slot] is process:
            self.loop.call_later(down_s, self._relaunch, process, context=self.outside)

    def _relaunch(self, process: Process) -> None:
        if self._current[process.slot] is process:
            self._launch(process.slot)

    def _crash(self, process: Process, down_s: float, term: bool) -> None:
        if process.died:
            return
        if term and process.serves and not process.owner.paused:
            process.leaving = True
            self.loop.create_task(self._leave(process, down_s), name="leave", context=process.owner.context())
            self.loop.call_later(40.0, self._end, process, down_s, context=self.outside)
        else:
            self._end(process, down_s)

    async def _leave(self, process: Process, down_s: float) -> None:
        for _ in range(100):
            if not self._under_way(process):
                break
            await asyncio.sleep(0.1)
        try:
            await process.stop()
        except OSError as e:  # what its journal does not take is charged at the hold later
            self.say(f"{process.name} ends with {e!r}")
        else:
            self.say(f"{process.name} has left")
        self.loop.call_soon(self._end, process, down_s, context=self.outside)

    def _under_way(self, process: Process) -> bool:
        return any(t.get_name() == "request" and not t.done() for t in process.owner.tasks)

    def _pause(self, process: Process, for_s: float, succeeded: bool) -> None:
        if process.died or process.owner.paused:
            return
        self.loop.pause(process.owner)
        self._disturb(process.name, for_s)
        self.loop.call_later(for_s, self._resume, process, context=self.outside)
        if succeeded and process.ready:
            # Another machine, and so another disk; what the old journal holds is found at the end.
            self._journals[process.slot] = self._directory / f"r{process.slot}-{self._runs[process.slot]}"
            process.leaving = True
            self._launch(process.slot)

    def _resume(self, process: Process) -> None:
        if process.owner.paused and not process.died:
            self.say(f"{process.name} goes on")
            self.loop.resume(process.owner)

    # --- the store and the disks -----------------------------------------------------------------------

    def _outage(self, op: Outage) -> None:
        self._disturb_all(op.for_s + 3)
        if not op.stall:
            self.store.break_connections()
        self._storm(Storm(op.at_s, op.number, op.for_s, (("stalled" if op.stall else "down", 1.0),)))

    def _storm(self, op: Storm) -> None:
        self._disturb_all(op.for_s + 3)
        self._storms.append(op)
        self._set_weather()
        self.loop.call_later(op.for_s, self._clear_up, op, context=self.outside)

    def _clear_up(self, op: Storm) -> None:
        if op in self._storms:
            self._storms.remove(op)
            self._set_weather()

    def _set_weather(self) -> None:
        """What all storms that blow now bring together."""
        worst = {"spread": self.schedule.spread}
        for storm in self._storms:
            for name, value in storm.weather:
                worst[name] = max(value, worst.get(name, 0.0))
        self.store.set_weather(Weather(**worst))

    def _bad_disk(self, disk: Any, op: BadDisk) -> None:
        self._set_disk(disk, op.full, 0.0 if op.full else 0.5)
        self.loop.call_later(op.for_s, self._set_disk, disk, False, 0.0, context=self.outside)

    def _set_disk(self, disk: Any, full: bool, slow_s: float) -> None:
        disk.full, disk.slow_s = full, slow_s

    def _disturb(self, name: str, for_s: float) -> None:
        self._disturbed_until_s[name] = max(self._disturbed_until_s[name], self.loop.now_s + for_s + 1)

    def _disturb_all(self, for_s: float) -> None:
        for process in self._all:
            self._disturb(process.name, for_s)

    # --- operators -------------------------------------------------------------------------------------

    async def _set(self, plan: BudgetPlan, limit: int) -> None:
        await self._accounts.set_budget(
            *(plan.scope, limit, plan.window, OnExceed(plan.on_exceed), plan.zone),
            unit=Unit(plan.unit),
            mode=BudgetMode(plan.mode),
        )

    async def _change(self, op: Op) -> None:
        try:
            if isinstance(op, SetLimit):
                plan = self.schedule.budgets[op.budget]
                if op.for_s is None:
                    await self._set(plan, op.limit)
                else:
                    until_ms = self._clock.now_ms() + round(op.for_s * 1_000)
                    await self._accounts.adjust_budget(
                        *(plan.scope, op.limit, "simulated"),
                        unit=Unit(plan.unit),
                        window=plan.window,
                        zone=plan.zone,
                        until_ms=until_ms,
                    )
            elif isinstance(op, Remove):
                plan = self.schedule.budgets[op.budget]
                await self._accounts.remove_budget(plan.scope, plan.window, plan.zone, Unit(plan.unit))
            elif isinstance(op, Revoke):
                key = KEYS[op.key][0]
                await self._accounts.revoke_key(key)
                self._revoked_at_s.setdefault(key, self.loop.now_s)
        except (Unavailable, NotFound, InvalidRequest) as e:
            self.say(f"#{op.number} did not succeed: {e}")

    # --- calls -----------------------------------------------------------------------------------------

    def _call(self, op: Call) -> None:
        process = self._current[op.replica]
        if not process.serves:
            self.counts["not served"] += 1
            return
        context = process.owner.context()
        asking = asyncio.Event()
        task = self.loop.create_task(self._request(process, op, asking), name="request", context=context)
        if op.leaves_after_s is not None:

            def leave() -> None:
                if not task.done() and not asking.is_set():
                    self.say(f"#{op.number} the client leaves")
                    task.cancel()

            self.loop.call_later(op.leaves_after_s, leave, context=context)

    async def _request(self, process: Process, op: Call, asked: asyncio.Event) -> None:
        """What `pipeline.serve` does with money: reserve, send, settle; once more if the provider turned it away."""
        key, _ = KEYS[op.key]
        if process.keys is not None and not await self._key_works(process, key):
            self.counts["key refused"] += 1
            return
        rng = Random(f"{self.schedule.seed} call {op.number}")
        request_id = new_id("req", self._clock.now_ms(), rng.randbytes(10))
        for number in (1, 2):
            a = self._attempt(process, op, request_id, number, rng)
            try:
                sent = await self._try(process, op, a, asked)
            except LedgerUnavailable:
                self.counts["unavailable"] += 1
                self.say(f"#{op.number} {process.name} unavailable")
                return
            if not sent or op.ends is not Ends.TURNED_AWAY:
                return

    async def _key_works(self, process: Process, key: str) -> bool:
        asked_s = self.loop.now_s
        assert process.keys is not None
        try:
            record = await process.keys.find(key)
        except Unavailable:
            return False
        if record is None or record.revoked_at_ms is not None:
            return False
        since_s = asked_s - self._revoked_at_s.get(key, asked_s)
        calm = self._disturbed_until_s[process.name] < self.loop.now_s
        if since_s > (REVOKED_S if calm else REVOKED_WORST_S):
            self.checker.violated(
                "key", f"{key} works at {process.name} {since_s:.1f} s after its revocation"
            )
        return True

    def _attempt(self, process: Process, op: Call, request_id: str, number: int, rng: Random) -> Attempt:
        key, team = KEYS[op.key]
        parent = f"t{op.task}" if op.child else None
        task = f"t{op.task}c" if op.child else f"t{op.task}"
        at_ms = self._clock.now_ms() + self.schedule.skews_ms[process.slot]
        attempt_id = new_id("att", at_ms, rng.randbytes(10))
        return calls.attempt(attempt_id, request_id, key, team, task, parent, number, at_ms)

    async def _try(self, process: Process, op: Call, a: Attempt, asked: asyncio.Event) -> bool:
        """Returns whether another attempt may follow."""
        scopes = calls.scopes_of(a)
        facts = self.checker.attempts[a.attempt_id] = AttemptFacts(scopes, a.task_id, op.landing)
        if a.attempt_no == 1:
            self._first_tries[a.task_id].add(a.attempt_id)
        wish = calls.wish(op.most, op.least, op.landing)
        asked_ms = self._clock.now_ms()
        if op.asked_twice:
            answer, twin = await asyncio.gather(
                calls.reserve(process.ledger, a, scopes, wish), calls.reserve(process.ledger, a, scopes, wish)
            )
            if type(answer) is not type(twin) or (answer != twin and not isinstance(answer, Refused)):
                self.checker.violated("twice", f"{a.attempt_id} was answered {answer}, and {twin}")
        else:
            answer = await calls.reserve(process.ledger, a, scopes, wish)
        asked.set()
        if isinstance(answer, Refused):
            self.counts["refused"] += 1
            self.say(f"#{op.number} {process.name} refused: {answer}")
            self.checker.refused(a.attempt_id, answer, wish, asked_ms)
            return False
        self.counts["granted"] += 1
        facts.granted = held = calls.granted_amounts(wish, answer)
        self.say(f"#{op.number} {process.name} granted {held}: {a.attempt_id[-6:]}")
        await self._send(process, op, a, held, facts)
        return True

    async def _send(self, process: Process, op: Call, a: Attempt, held: Amounts, facts: AttemptFacts) -> None:
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
        if op.settles:
            self.say(f"#{op.number} {process.name} settles {outcome.kind} {outcome.cost_nano_usd}")
            settled = await process.ledger.settle(a, outcome)
            self.say(f"#{op.number} {process.name} settled: {settled}")
            if outcome.quality is Quality.EXACT and process.ledger.available:
                facts.acknowledged = told
        else:
            process.ledger.post(a, outcome)
            self.say(f"#{op.number} {process.name} posts {outcome.kind} {outcome.cost_nano_usd}")
        for slot, after_s in op.again:
            self._later(after_s, slot, a, outcome, "again")
        if op.proof_after_s is not None and billed:
            facts.told.append(bill)
            self._later(op.proof_after_s, op.replica, a, calls.posted(bill), "proof of")

    def _later(self, after_s: float, slot: int, a: Attempt, outcome: Any, why: str) -> None:
        """Settle once more, by whoever is that replica then."""

        def settle() -> None:
            process = self._current[slot]
            if process.serves:
                self.say(f"{process.name}: {why} {a.attempt_id[-6:]}: {outcome.kind} {outcome.cost_nano_usd}")
                self.counts["settled again"] += 1
                self.loop.create_task(
                    self._settle_again(process, a, outcome), name="request", context=process.owner.context()
                )

        self.loop.call_later(after_s, settle, context=self.outside)

    async def _settle_again(self, process: Process, a: Attempt, outcome: Any) -> None:
        await process.ledger.settle(a, outcome)

    def _arrived(self, attempt_id: str, bill: Amounts | None) -> None:
        self.say(f"the provider has {attempt_id[-6:]} and bills {bill}")
        self.checker.arrived(attempt_id, bill)
        self.checker.attempts[attempt_id].bill = bill

    # --- the end ---------------------------------------------------------------------------------------

    async def _heal(self) -> None:
        """Everything works again: all requests end, all journals are posted, no living process keeps a hold."""
        self.say("-- everything works again")
        self._storms.clear()
        self._set_weather()
        for process in self._all:
            self._resume(process)
            self._set_disk(process.disk, False, 0.0)
        for process in list(self._current.values()):
            if process.died:
                self._relaunch(process)
        if not await self._until(self._settled):
            if self.checker.violations:
                return
            self.checker.violated("stuck", f"after {PATIENCE_S:.0f} s: {self._what_is_left()}")
            return
        for hold in self.checker.left_open():
            epoch = self.store.rows("SELECT epoch FROM replica WHERE replica_id = ?", hold.replica_id)[0][0]
            owner = self._current[int(hold.replica_id[1:])]
            if hold.epoch == epoch and owner.serves:
                self.checker.violated(
                    "leak", f"{hold.attempt_id} stays held by {owner.name}, which is done with it"
                )

    async def _until(self, done: Any) -> bool:
        deadline_s = self.loop.now_s + PATIENCE_S
        while not done():
            if self.loop.now_s > deadline_s or self.checker.violations:
                return False
            await asyncio.sleep(0.25)
        return True

    def _settled(self) -> bool:
        return not self._what_is_left()

    def _what_is_left(self) -> list[str]:
        left = [f"change {t.get_coro()}" for t in self._changes if not t.done()]
        for process in self._all:
            if process.died:
                continue
            if process.leaving and self._current[process.slot] is process:
                left.append(f"{process.name} has not left")
            elif not process.ready:
                left.append(f"{process.name} does not start")
            elif self._under_way(process):
                left.append(f"{process.name} has requests under way")
            elif process.ledger._journal.pending or process.ledger._adrift:
                left.append(f"{process.name} has settlements that are not posted")
            elif any(t.get_name() == "settle" and not t.done() for t in process.owner.tasks):
                left.append(f"{process.name} settles")
            elif process.dead_jobs():
                left.append(f"of {process.name} these have died: {process.dead_jobs()}")
        left += [f"r{slot} is down" for slot, process in self._current.items() if process.died]
        return left

    async def _finish(self) -> None:
        """All leave in order; the journals of machines that were given up are posted; the dead are charged."""
        for process in self._all:
            if not process.died:
                leaving = self.loop.create_task(process.stop(), name="leave", context=process.owner.context())
                await leaving
                process.kill()
        for path in sorted(self._directory.iterdir()):
            if list(path.glob("*.journal")):
                slot = int(path.name[1:].partition("-")[0])
                self._journals[slot] = path
                self._launch(slot)
                await self._until(lambda slot=slot: self._current[slot].ready)
                process = self._current[slot]
                await self.loop.create_task(process.stop(), name="leave", context=process.owner.context())
                process.kill()
        left = sorted(p.name for path in self._directory.iterdir() for p in path.iterdir())
        if left:
            self.checker.violated("journal", f"left behind: {left}")
        await asyncio.sleep(LEASE_TTL_S + self.schedule.grace_s + 1)
        # Under a name of its own: a name that is used again makes its former holds wait for another grace.
        heir = self.schedule.replicas
        self._journals[heir] = self._directory / "heir"
        self._launch(heir)
        await self._until(lambda: self._current[heir].ready)
        process = self._current[heir]
        await self.loop.create_task(self._reap(process), context=process.owner.context())
        self.checker.final(self._first_tries)

    async def _reap(self, process: Process) -> None:
        # Its reaper is at work already, and this one would skip what that one has locked.
        await asyncio.sleep(0.5)
        await process.ledger.reap(round(self.schedule.grace_s * 1_000))
        await process.stop()

    def result(self) -> Result:
        counts, store = self.counts, self.store
        counts["transactions"] = store.counts.transactions
        counts["interleaved"] = store.counts.switches
        counts["waits for locks"] = store.locks.waits
        counts["deadlocks"] = store.locks.deadlocks
        counts["late commits"] = store.counts.late_commits
        counts["lost answers"] = store.counts.lost_answers
        counts["charged as lost"] = self.checker.reaped
        counts["corrected"] = self.checker.corrected
        counts["billed"] = len(self.provider.bill)
        for fault in self.loop.faults:
            self.checker.violated("fault", fault)
        return Result(self.checker.violations, counts, self.trace or [])

    def end(self) -> None:
        """Leave nothing to the garbage collector that it might complain about."""
        for process in self._all:
            if not process.died:
                process.kill()
        self.loop.kill(self._outsiders)
        self.store.close()
        self.loop.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """The gateway's warnings are about faults that are meant."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
