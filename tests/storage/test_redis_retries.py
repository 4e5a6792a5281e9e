"""Replicas share a retry budget, through a real Redis; without it each has its own."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import cast

from redis.asyncio import Redis

from gateway.storage.redis_retries import RedisRetries
from tests.support.servers import RedisServer
from tests.support.told_redis import PATIENT_S


@asynccontextmanager
async def replicas(url: str, count: int = 2) -> AsyncIterator[list[RedisRetries]]:
    made = [
        RedisRetries(url, monotonic=lambda: 0.0, grows_back_s=math.inf, timeout_s=PATIENT_S)
        for _ in range(count)
    ]
    for budget in made:
        await budget.start()
    try:
        yield made
    finally:
        for budget in made:
            await budget.close()


async def traffic(budget: RedisRetries, requests: int) -> None:
    for _ in range(requests):
        budget.asked("p")
    await told(budget)


async def told(budget: RedisRetries) -> None:
    """What `run` does every second."""
    budget.tell(budget.names())
    await budget.idle()


async def retried(budget: RedisRetries, wanted: int) -> int:
    """How many of so many retries, one after the other, were made."""
    made = 0
    for _ in range(wanted):
        made += budget.take("p", 0.0)
        await budget.idle()
    return made


async def test_all_processes_together_retry_a_tenth_of_their_traffic_and_five(own_redis: RedisServer) -> None:
    async with replicas(own_redis.url, 4) as four:
        for budget in four:
            await traffic(budget, 50)  # 200 requests: 20 retries, and 5 from the start
        for budget in four:
            await told(budget)
        assert [round(budget.left("p"), 3) for budget in four] == [25.0] * 4
        made = []
        for budget in four:
            await told(budget)
            made.append(await retried(budget, 10))
        assert made == [10, 10, 5, 0]
        assert round(four[0].left("p"), 3) == 15.0  # as of its last word
        await told(four[0])
        assert (round(four[0].left("p"), 3), four[0].take("p", 0.0)) == (0.0, False)


async def test_what_is_taken_at_once_in_two_places_is_owed(own_redis: RedisServer) -> None:
    async with replicas(own_redis.url) as (a, b):
        for budget in (a, b):
            await traffic(budget, 1)
        assert [sum(budget.take("p", 0.0) for _ in range(9)) for budget in (a, b)] == [5, 5]
        for budget in (a, b, a):
            await told(budget)
        assert [round(budget.left("p"), 3) for budget in (a, b)] == [-4.8, -4.8]
        await traffic(a, 50)
        assert await retried(a, 3) == 0
        await traffic(b, 10)
        assert await retried(b, 3) == 1


async def test_an_account_grows_back_by_the_servers_clock_and_is_not_for_ever(own_redis: RedisServer) -> None:
    budget = RedisRetries(own_redis.url, monotonic=lambda: 0.0, grows_back_s=0.001, timeout_s=PATIENT_S)
    await budget.start()
    for _ in range(5):
        budget.take("p", 0.0)
    async with asyncio.timeout(PATIENT_S):
        while budget.left("p") <= 0.0:  # some milliseconds
            await told(budget)
    assert budget.left("p") <= 5.0
    async with Redis.from_url(own_redis.url) as redis:
        assert 3_500 < await redis.ttl("tollhouse:{retries}") <= 3_600
        fields = await cast("Awaitable[list[bytes]]", redis.hkeys("tollhouse:{retries}"))
        assert fields == [b"p"]
    await budget.close()


async def test_without_redis_each_has_an_account_of_its_own() -> None:
    async with replicas("redis://127.0.0.1:1/0") as both:
        assert [await retried(budget, 9) for budget in both] == [5, 5]


async def test_a_process_that_loses_redis_goes_on_by_itself(own_redis: RedisServer) -> None:
    async with replicas(own_redis.url) as (a, b):
        await traffic(a, 1)
        assert await retried(a, 3) == 3
        await traffic(b, 1)
        own_redis.kill()
        assert await retried(b, 9) == 2  # what all had left, and nothing of it is told
        for _ in range(10):
            b.asked("p")
        assert await retried(b, 9) == 1
