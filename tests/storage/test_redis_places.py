"""Places at deployments that several processes share: never more calls inside than there are places, and all get in."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.core.errors import Unavailable
from gateway.core.serving import QueuePolicy, Serving
from gateway.pipeline.places import Places
from gateway.storage.redis_limits import RedisLimits
from gateway.tasks import Tasks
from tests.support.servers import RedisServer
from tests.support.small_world import deployment, provider
from tests.support.told_redis import PATIENT_S, ToldRedis

TWO = deployment(
    provider("http://127.0.0.1:1/v1"), concurrent=2, serving=Serving(queue=QueuePolicy(waiting_max=1_000))
)
ALL_S = 20.0


@asynccontextmanager
async def processes(url: str, count: int, **more: Any) -> AsyncIterator[list[tuple[Places, RedisLimits]]]:
    faults: list[BaseException] = []
    jobs = Tasks(lambda _, fault: faults.append(fault))
    made = []
    for _ in range(count):
        limits, places = RedisLimits(url, replicas_min=count, timeout_s=PATIENT_S), Places(**more)
        await limits.start()
        places.share(limits, jobs.spawn, random.random)
        made.append((places, limits))
    yield made
    await jobs.drain(PATIENT_S)
    for _, limits in made:
        await limits.close()
    assert faults == []


async def waiting(places: Places, n: int) -> None:
    while places.counts().get(("up/m", "waiting")) != n:
        await asyncio.sleep(0)


async def test_a_call_waits_for_a_place_that_another_process_has(redis: ToldRedis) -> None:
    async with processes(redis.url, 2) as ((here, _), (there, _)), asyncio.timeout(ALL_S):
        await here.enter(TWO, "t", "a")
        await there.enter(TWO, "t", "b")
        third = asyncio.create_task(there.enter(TWO, "t", "c"))
        await waiting(there, 1)
        here.leave("a")
        await third
        assert here.counts() == {("up/m", "inside"): 0, ("up/m", "waiting"): 0}
        assert there.counts() == {("up/m", "inside"): 2, ("up/m", "waiting"): 0}


async def test_never_more_are_inside_than_there_are_places_and_no_process_starves(redis: ToldRedis) -> None:
    inside: set[str] = set()
    most, order = 0, list[str]()

    async def call(places: Places, name: str) -> None:
        nonlocal most
        await places.enter(TWO, name[0], name)
        inside.add(name)
        most = max(most, len(inside))
        order.append(name[0])
        await asyncio.sleep(0.001)
        inside.remove(name)
        places.leave(name)

    async with processes(redis.url, 2, wait_max_s=ALL_S) as ((here, _), (there, _)):
        await asyncio.gather(*(call(p, f"{n}{i}") for p, n in ((here, "h"), (there, "t")) for i in range(60)))
    assert (most, len(order)) == (2, 120)
    assert 10 < order[:60].count("h") < 50


async def test_who_leaves_the_queue_takes_no_place_along(redis: ToldRedis) -> None:
    async with processes(redis.url, 2) as ((here, _), (there, limits)), asyncio.timeout(ALL_S):
        await here.enter(TWO, "t", "a")
        await here.enter(TWO, "t", "b")
        waits = [asyncio.create_task(there.enter(TWO, "t", f"w{i}")) for i in range(3)]
        await waiting(there, 3)
        for task in waits:
            task.cancel()
        here.leave("a")
        here.leave("b")
        assert [type(gone) for gone in await asyncio.gather(*waits, return_exceptions=True)] == [
            asyncio.CancelledError
        ] * 3
        await there.enter(TWO, "t", "c")
        await there.enter(TWO, "t", "d")
        for name in ("c", "d"):
            there.leave(name)
        await limits.idle()
        assert redis.client.keys("tollhouse:*:in:deployment:*") == []


async def test_without_redis_each_keeps_to_its_share(own_redis: RedisServer) -> None:
    async with processes(own_redis.url, 2, wait_max_s=0.05) as ((here, _), (there, limits)):
        own_redis.kill()
        for places in (here, there):
            await places.enter(TWO, "t", f"first of {id(places)}")
            with pytest.raises(Unavailable, match="all 2 places of up/m are taken"):
                await places.enter(TWO, "t", "second")
        assert limits.degraded
