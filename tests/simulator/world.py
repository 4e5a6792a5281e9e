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

from gateway.core.errors import Unavailable
from gateway.storage.ledger import LEASE_TTL_S, SqlLedger
from gateway.storage.postgres_runner import IDLE_IN_TRANSACTION_S
from tests.simulator.checker import Checker, Violation
from tests.simulator.loop import Inline, NothingHappens, Owner, VirtualLoop
from tests.simulator.operators import Operators
from tests.simulator.replica import Process, ReplicaClock
from tests.simulator.schedule import (
    BadDisk,
    Call,
    Crash,
    Leap,
    Op,
    Outage,
    Pause,
    Schedule,
    Storm,
    text_of,
)
from tests.simulator.store import Sabotage, Store, Weather
from tests.simulator.traffic import Traffic

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
        self.clock = ReplicaClock(self.loop, schedule.start_ms, 0)
        self.store = Store(self.loop, Random(f"{schedule.seed} store"), self.clock.now_ms, sabotage)
        # Whoever owns the database knows at its start that all others are dead.
        self.checker = Checker(
            self.store,
            0 if schedule.embedded else round(schedule.grace_s * 1_000),
            [limit for limit in (schedule.task_limit, schedule.team_task_limit) if limit is not None],
        )
        self.counts: Counter[str] = Counter()
        self.trace: list[str] | None = [] if trace else None
        self._directory = directory
        self._ledger_type = ledger
        self._outsiders = Owner("outside", Inline())
        self.outside = self._outsiders.context()
        self.operators = Operators(self)
        self.traffic = Traffic(self)
        self._runs: Counter[int] = Counter()
        self._journals: dict[int, Path] = {}
        self.current: dict[int, Process] = {}
        self._all: list[Process] = []
        self._disturbed_until_s: dict[str, float] = defaultdict(float)
        self._names: dict[str, str] = {}
        self._storms: list[Storm] = []
        self._set_weather()

    def say(self, text: str) -> None:
        if self.trace is not None:
            for found, name in self._names.items():
                text = text.replace(found, name)
            self.trace.append(f"{self.loop.now_s:9.4f} s  {text}")

    def name(self, found: str, name: str) -> None:
        """How an id is called in traces, if chance made it."""
        self._names[found] = name

    # --- the whole play --------------------------------------------------------------------------------

    async def play(self) -> None:
        await self.operators.furnish()
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

    def _perform(self, op: Op) -> None:
        self.counts[type(op).__name__.lower()] += 1
        self.say(f"-- {text_of(op)}")
        if isinstance(op, Call):
            self.traffic.call(op)
        elif isinstance(op, Crash):
            self._crash(self.current[op.replica], op.down_s, op.term)
        elif isinstance(op, Pause):
            self._pause(self.current[op.replica], op.for_s, op.succeeded)
        elif isinstance(op, Leap):
            for process in self.current.values():
                self._pause(process, op.for_s, succeeded=False)
        elif isinstance(op, Outage):
            self._outage(op)
        elif isinstance(op, Storm):
            self._storm(op)
        elif isinstance(op, BadDisk):
            self._bad_disk(self.current[op.replica].disk, op)
        else:
            self.operators.change(op)

    # --- processes -------------------------------------------------------------------------------------

    def _launch(self, slot: int) -> None:
        self._runs[slot] += 1
        process = Process(
            *(self.store, self.schedule, slot, self._runs[slot], self._journals[slot], self._ledger_type)
        )
        self.current[slot] = process
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
        if self.current[process.slot] is process:
            self.loop.call_later(down_s, self._relaunch, process, context=self.outside)

    def _relaunch(self, process: Process) -> None:
        if self.current[process.slot] is process:
            self._launch(process.slot)

    def _crash(self, process: Process, down_s: float, term: bool) -> None:
        if process.died:
            return
        if term and process.serves and not process.owner.paused:
            process.leaving = process.stopping = True
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
        if for_s > IDLE_IN_TRANSACTION_S:
            self.loop.call_later(IDLE_IN_TRANSACTION_S, self._end_idle, process, context=self.outside)
        self._disturb(process.name, for_s)
        self.loop.call_later(for_s, self._resume, process, context=self.outside)
        if succeeded and process.ready:
            # Another machine, and so another disk; what the old journal holds is found at the end.
            self._journals[process.slot] = self._directory / f"r{process.slot}-{self._runs[process.slot]}"
            process.leaving = True
            self._launch(process.slot)

    def _end_idle(self, process: Process) -> None:
        if process.owner.paused:
            self.store.end_idle(process.owner)

    def _resume(self, process: Process) -> None:
        if process.owner.paused and not process.died:
            self.say(f"{process.name} goes on")
            self.loop.resume(process.owner)

    # --- the store and the disks -----------------------------------------------------------------------

    def _outage(self, op: Outage) -> None:
        self._disturb("", op.for_s + 3)
        if not op.stall:
            self.store.break_connections()
        self._storm(Storm(op.at_s, op.number, op.for_s, (("stalled" if op.stall else "down", 1.0),)))

    def _storm(self, op: Storm) -> None:
        self._disturb("", op.for_s + 3)
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

    def disturbed(self, process: Process) -> bool:
        """Whether something that slows it down is going on, or was a moment ago."""
        return max(self._disturbed_until_s[process.name], self._disturbed_until_s[""]) >= self.loop.now_s

    # --- the end ---------------------------------------------------------------------------------------

    async def _heal(self) -> None:
        """Everything works again: all requests end, all journals are posted, no living process keeps a hold."""
        self.say("-- everything works again")
        self._storms.clear()
        self._set_weather()
        for process in self._all:
            self._resume(process)
            self._set_disk(process.disk, False, 0.0)
        for process in list(self.current.values()):
            if process.died:
                self._relaunch(process)
        if not await self._until(self._settled):
            if self.checker.violations:
                return
            self.checker.violated("stuck", f"after {PATIENCE_S:.0f} s: {self._what_is_left()}")
            return
        for hold in self.checker.left_open():
            epoch = self.store.rows("SELECT epoch FROM replica WHERE replica_id = ?", hold.replica_id)[0][0]
            owner = self.current[int(hold.replica_id[1:])]
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
        left = ["a change is under way" for t in self.operators.under_way if not t.done()]
        for process in self._all:
            if process.died:
                continue
            if process.stopping:
                left.append(f"{process.name} has not left")
            elif not process.ready:
                left.append(f"{process.name} does not start")
            elif self._under_way(process):
                left.append(f"{process.name} has requests under way")
            elif (
                process.ledger._journal.pending
                or process.ledger._adrift
                # What was adrift is in nobody's list while it is being posted.
                or process.ledger._replaying.locked()
            ):
                left.append(f"{process.name} has settlements that are not posted")
            elif any(t.get_name() in ("admit", "settle") and not t.done() for t in process.owner.tasks):
                left.append(f"{process.name} admits or settles")
            elif process.dead_jobs():
                left.append(f"of {process.name} these have died: {process.dead_jobs()}")
        left += [f"r{slot} is down" for slot, process in self.current.items() if process.died]
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
                await self._until(lambda slot=slot: self.current[slot].ready)
                process = self.current[slot]
                await self.loop.create_task(process.stop(), name="leave", context=process.owner.context())
                process.kill()
        left = sorted(p.name for path in self._directory.iterdir() for p in path.iterdir() if p.is_file())
        if left:
            self.checker.violated("journal", f"left behind: {left}")
        await asyncio.sleep(LEASE_TTL_S + self.schedule.grace_s + 1)
        # Under a name that was used before: starting again must not make its former holds wait for another grace.
        heir = 0
        self._launch(heir)
        await self._until(lambda: self.current[heir].ready)
        process = self.current[heir]
        await self.loop.create_task(self._reap(process), context=process.owner.context())
        self.checker.final(self.traffic.first_tries)

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
        counts["billed"] = len(self.traffic.provider.bill)
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
