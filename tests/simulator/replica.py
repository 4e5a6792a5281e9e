"""One gateway process as far as money goes, from its start to its end."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from gateway.core.task import TaskDefault
from gateway.jobs.reaper import Reaper
from gateway.storage.database import Database
from gateway.storage.keys import SqlKeyStore
from gateway.storage.ledger import SqlLedger
from tests.simulator.disk import JournalDisk
from tests.simulator.loop import Owner, VirtualLoop
from tests.simulator.runner import SimulatedRunner
from tests.simulator.schedule import Schedule
from tests.simulator.store import Store


@dataclass(frozen=True, slots=True)
class ReplicaClock:
    """Its wall clock is wrong by `skew_ms`; its monotonic one cannot be."""

    loop: VirtualLoop
    start_ms: int
    skew_ms: int

    def now_ms(self) -> int:
        return self.start_ms + self.skew_ms + round(self.loop.now_s * 1_000)

    def monotonic(self) -> float:
        return self.loop.now_s


class Process:
    """A run of a replica. `replica_id` and the journal's directory outlive it."""

    def __init__(
        self, store: Store, schedule: Schedule, slot: int, run: int, directory: Path, ledger: type[SqlLedger]
    ) -> None:
        self.slot = slot
        self.replica_id = f"r{slot}"
        self.name = f"r{slot}.{run}"
        self.disk = JournalDisk(store.loop, directory, Random(f"{schedule.seed} disk {self.name}"))
        self.owner = Owner(self.name, self.disk)
        self.ready = False
        self.leaving = False  # takes no more requests
        self.stopping = False  # and ends when those are done
        self.died = False
        self.ledger: SqlLedger
        self.keys: SqlKeyStore | None = None
        self._schedule = schedule
        self._store = store
        self._ledger_type = ledger

    @property
    def serves(self) -> bool:
        return self.ready and not self.leaving and not self.died

    async def start(self) -> None:
        """Raises `Unavailable` if the store does not answer. Runs in the context of its owner, as all of it does."""
        schedule, store = self._schedule, self._store
        clock = ReplicaClock(store.loop, schedule.start_ms, schedule.skews_ms[self.slot % schedule.replicas])
        runner = SimulatedRunner(store, flights=1 if schedule.embedded else 2)
        path = Path("simulated.db") if schedule.embedded else None
        database = Database(runner, runner, clock, sqlite_path=path)
        self.disk.directory.mkdir(parents=True, exist_ok=True)
        self.ledger = await self._ledger_type.open(
            database,
            replica_id=self.replica_id,
            journal_dir=self.disk.directory,
            task_default=TaskDefault(schedule.task_limit),
        )
        if schedule.keys_checked:
            self.keys = await SqlKeyStore.open(database, self.ledger.revision_changed)
        reaper = Reaper(self.ledger, grace_s=schedule.grace_s, every_s=schedule.reap_every_s)
        store.loop.create_task(reaper.run(), name="reaper")
        self.ready = True

    async def stop(self) -> None:
        """As after SIGTERM, when its requests are done."""
        if self.keys is not None:
            await self.keys.close()
        await self.ledger.close()

    def kill(self) -> str:
        """As by kill -9. Says what became of what it was writing."""
        self.died = True
        self._store.loop.kill(self.owner)
        said = self.disk.crash()
        # The kernel closes the files of the dead.
        if self.ready and self.ledger._journal._fd is not None:
            with suppress(OSError):
                os.close(self.ledger._journal._fd)
            self.ledger._journal._fd = None
        return said

    def dead_jobs(self) -> list[str]:
        """Background tasks that ended although they are to run until it leaves."""
        if not self.serves:
            return []
        wanted = {"lease", "replay", "reaper", *(["keys"] if self.keys else [])}
        running = {task.get_name() for task in self.owner.tasks if not task.done()}
        return sorted(wanted - running)
