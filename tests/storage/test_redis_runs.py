"""Replicas count together how long runs are and what rules want in them, through a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.core.policies import Bills
from gateway.core.runs import Runs
from gateway.storage.redis_runs import RedisRuns
from tests.support.servers import RedisServer
from tests.support.told_redis import PATIENT_S

KIND = "key/codex/"


class Replica:
    def __init__(self, url: str) -> None:
        self.runs = Runs(kinds_max=3)
        self.shared = RedisRuns(url, self.runs, timeout_s=PATIENT_S)

    def ask(self, task: str, turns: int, wants: str = "standard", kind: str = KIND) -> None:
        for _ in range(turns):
            run = self.runs.asked(task, kind, 0)
            self.runs.habit(run, run.thread(b"t"), wants)

    def counts(self, kind: str = KIND) -> dict[str, int]:
        return self.runs.counts(kind)

    def wanted(self) -> dict[str, int]:
        """The counts but those of steps, of which only the runs are told."""
        steps = {"reached 1": "runs"}
        return {
            steps.get(name, name): n
            for name, n in self.counts().items()
            if name in steps or not name.startswith(("turns ", "reached "))
        }

    def remaining(self) -> float:
        return round(self.runs.remaining(self.runs.asked("new", KIND, 0)), 1)

    async def told(self) -> None:
        """What `run` does every second."""
        self.shared.tell()
        await self.shared.idle()


@asynccontextmanager
async def replicas(url: str) -> AsyncIterator[tuple[Replica, Replica]]:
    a, b = Replica(url), Replica(url)
    await a.shared.start()
    await b.shared.start()
    try:
        yield a, b
    finally:
        await a.shared.close()
        await b.shared.close()


async def test_what_one_has_seen_of_a_kind_the_other_goes_by(own_redis: RedisServer) -> None:
    async with replicas(own_redis.url) as (a, b):
        for n in range(20):
            a.ask(f"a{n}", 80)
        b.ask("b", 2, "small")
        alone = b.remaining()
        for replica in (a, b, b):
            await replica.told()
        assert (alone, b.remaining()) == (6.0, 71.4)
        assert b.wanted() == {
            "turns": 1_604, "runs": 22, "asked": 1_602, "wanted small": 2, "wanted standard": 1_600
        }  # fmt: skip
        a.ask("a0", 1)
        await a.told()
        assert a.counts()["turns"] == 1_604  # its own, and what b had told
        await b.told()
        await a.told()
        b.ask("b", 1, "standard")
        a.ask("a0", 1)
        for replica in (a, b, a):
            replica.ask("x", 1)
            await replica.told()
        assert a.wanted() == {
            "turns": 1_610, "runs": 24, "asked": 1_608, "wanted small": 2, "wanted standard": 1_606, "ended small": 1
        }  # fmt: skip


async def test_what_policies_would_have_cost_is_counted_together(own_redis: RedisServer) -> None:
    async with replicas(own_redis.url) as (a, b):
        for replica, bills in ((a, Bills(5, 3, 4, 1)), (b, Bills(50, 30, 40, 2)), (a, Bills(0, 0, 1))):
            replica.ask("t", 1)
            replica.runs.bills(replica.runs.asked("t", KIND, 0)).observe(bills)
            await replica.told()
        assert a.runs.bills(a.runs.asked("t", KIND, 0)) == Bills(55, 33, 45, 3)


async def test_a_redis_that_forgets_is_told_again_by_each_what_it_has_counted(own_redis: RedisServer) -> None:
    async with replicas(own_redis.url) as (a, b):
        a.ask("a", 30)
        b.ask("b", 50)
        for replica in (a, b):
            await replica.told()
        own_redis.kill()
        a.ask("a", 5)
        await a.told()
        assert a.counts()["turns"] == 35
        own_redis.start()
        for replica in (a, b):
            await replica.shared.returned()
        for replica in (a, a, a, b, a):  # a may have asked while it died, and waits two turns for the answer
            replica.ask("c", 1)
            await replica.told()
        assert (a.counts()["turns"], b.counts()["turns"]) == (90, 89)


async def test_a_kind_that_is_forgotten_here_is_learned_from_what_all_have_counted(
    own_redis: RedisServer,
) -> None:
    async with replicas(own_redis.url) as (a, _):
        a.ask("t", 40)
        await a.told()
        for n in range(3):
            a.ask(f"o{n}", 1, kind=f"other{n}/codex/")
        await a.told()
        assert a.counts() == {}
        a.ask("u", 1)
        await a.told()
        assert (a.wanted()["turns"], a.wanted()["runs"]) == (41, 2)


async def test_without_redis_each_counts_by_itself() -> None:
    async with replicas("redis://127.0.0.1:1/0") as (a, b):
        a.ask("a", 30)
        for replica in (a, b):
            await replica.told()
        assert (a.counts()["turns"], b.counts()) == (30, {})
