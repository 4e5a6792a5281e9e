"""Replicas tell one another who is well, through a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.core.health import HealthState, Result, Status, adopted, drain, record, told
from gateway.storage.redis_health import RedisHealth
from tests.support.servers import RedisServer


class Replica:
    """`states` of one process; its monotonic clock began somewhere else than the wall's."""

    def __init__(self, url: str, name: str, began_s: float) -> None:
        self.states: dict[str, HealthState] = {}
        self.now_ms = 1_800_000_000_000
        self.began_s = began_s
        self.health = RedisHealth(
            url, self.states, replica_id=name, now_ms=lambda: self.now_ms, monotonic=self.monotonic
        )

    def monotonic(self) -> float:
        return self.began_s + (self.now_ms - 1_800_000_000_000) / 1_000

    async def told(self) -> None:
        """What was said is with Redis."""
        await self.health.idle()

    def say(self, **states: HealthState) -> None:
        self.states.update(states)
        self.health.changed(states)

    def status(self, name: str) -> Status:
        return self.states.get(name, HealthState()).status(self.monotonic())


@asynccontextmanager
async def replicas(url: str) -> AsyncIterator[tuple[Replica, Replica]]:
    a, b = Replica(url, "a", 1_000.0), Replica(url, "b", 50.0)
    await a.health.start()
    await b.health.start()
    try:
        yield a, b
    finally:
        await a.health.close()
        await b.health.close()


def ejected(now_s: float) -> HealthState:
    state = HealthState()
    for _ in range(5):
        state = record(state, Result.FAILURE, now_s)
    return state


async def test_what_one_replica_ejects_the_other_leaves_alone_for_as_long(own_redis: RedisServer) -> None:
    async with replicas(own_redis.url) as (a, b):
        a.say(eject=ejected(a.monotonic()))
        await a.told()
        await b.health.listen()
        assert b.status("eject") is Status.OPEN
        b.now_ms += 29_000
        assert b.status("eject") is Status.OPEN
        b.now_ms += 2_000
        assert b.status("eject") is Status.HALF_OPEN

        # b probes it, and it is well again: a hears of that
        b.say(eject=record(b.states["eject"], Result.OK, b.monotonic()))
        await b.told()
        a.now_ms = b.now_ms
        await a.health.listen()
        assert a.status("eject") is Status.CLOSED
        assert a.states["eject"].ejections == 1


async def test_a_drain_reaches_all_and_so_does_its_end(own_redis: RedisServer) -> None:
    async with replicas(own_redis.url) as (a, b):
        for drained, status in ((True, Status.DRAINED), (False, Status.CLOSED)):
            a.say(drain=drain(a.states.get("drain", HealthState()), drained=drained))
            await a.told()
            await b.health.listen()
            assert b.status("drain") is status


async def test_single_failures_are_nobody_elses_business(own_redis: RedisServer) -> None:
    async with replicas(own_redis.url) as (a, b):
        a.say(fails=record(HealthState(), Result.FAILURE, a.monotonic()))
        await a.told()
        await b.health.listen()
        assert "fails" not in b.states


async def test_without_redis_each_goes_by_what_it_sees() -> None:
    async with replicas("redis://127.0.0.1:1/0") as (a, b):
        a.say(eject=ejected(a.monotonic()))
        await b.health.listen()
        assert (a.status("eject"), b.status("eject")) == (Status.OPEN, Status.CLOSED)


def test_an_adopted_state_keeps_what_was_counted_here() -> None:
    own = record(HealthState(), Result.FAILURE, 10.0)
    shared = told(ejected(100.0), 100.0, 5_000_000)
    found = adopted(own, shared, 10.0, 5_000_000)
    assert (found.window, found.open_until_s, found.cause) == (own.window, 40.0, "failures")
