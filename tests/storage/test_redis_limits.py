"""Limits shared through Redis: the same answers as in one process, and an answer without it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis
from redis.crc import key_slot

from gateway.core.limits import NEVER, Bucket, take
from gateway.storage.memory import MemoryLimits
from gateway.storage.redis_limits import UNITS_MAX, RedisLimits
from tests.support.servers import RedisServer, free_port
from tests.support.told_redis import PATIENT_S, TOLD_CLOCK, ToldRedis

Buckets = Sequence[tuple[str, int, int]]
_numbers = itertools.count(1)


@asynccontextmanager
async def limits_on(url: str, count: int = 1, **more: Any) -> AsyncIterator[tuple[RedisLimits, ...]]:
    """`count` replicas."""
    replicas = tuple(RedisLimits(url, **{"timeout_s": PATIENT_S, **more}) for _ in range(count))
    for replica in replicas:
        await replica.start()
    try:
        yield replicas
    finally:
        for replica in replicas:
            await replica.close()


# --- rates: one table, three ways ----------------------------------------------------------------------


class PureLimits:
    """`core.limits` over a plain dict: what "all or none" means, and nothing else."""

    def __init__(self) -> None:
        self.buckets: dict[str, Bucket] = {}

    async def take(self, buckets: Buckets, now_ms: int) -> tuple[str, float] | None:
        after, waits = dict(self.buckets), []
        for name, cost, capacity in buckets:
            before = after.get(name, Bucket.full(capacity, now_ms))
            after[name], wait_s = take(before, cost, capacity, now_ms)
            waits.append((name, wait_s))
        worst = max(waits, key=lambda w: w[1])
        if worst[1] > 0:
            return worst
        self.buckets = after
        return None


class ToldLimits:
    """`RedisLimits` whose server has the caller's clock."""

    def __init__(self, redis: ToldRedis, limits: RedisLimits, number: int = 0) -> None:
        self.redis, self.limits, self.scope = redis, limits, f"case:{number}:"

    async def take(self, buckets: Buckets, now_ms: int) -> tuple[str, float] | None:
        self.redis.at(now_ms)
        apart = [(self.scope + name, cost, capacity) for name, cost, capacity in buckets]
        worst = await self.limits.take(apart, -1)
        return None if worst is None else (worst[0].removeprefix(self.scope), worst[1])


Step = tuple[int, Buckets, tuple[str, float] | None]
TABLE: dict[str, list[Step]] = {
    "a bucket starts full, empties, and says how long to wait": [
        (0, [("r", 60, 60)], None),
        (0, [("r", 1, 60)], ("r", 1.0)),
        (999, [("r", 1, 60)], ("r", 0.001)),
        (1000, [("r", 1, 60)], None),
        (1000, [("r", 60, 60)], ("r", 60.0)),
    ],
    "all buckets give or none does": [
        (0, [("r", 1, 10), ("t", 900, 1000)], None),
        (0, [("r", 1, 10), ("t", 200, 1000)], ("t", 6.0)),
        (0, [("r", 9, 10), ("t", 100, 1000)], None),
        (0, [("r", 1, 10)], ("r", 6.0)),
    ],
    "the longest wait is told, the first of equals": [
        (0, [("a", 10, 10), ("b", 10, 20), ("c", 10, 10)], None),
        (0, [("b", 20, 20), ("a", 10, 10), ("c", 10, 10)], ("a", 60.0)),
    ],
    "a bucket named twice pays twice": [
        (0, [("c", 6, 10), ("c", 6, 10)], ("c", 12.0)),
        (0, [("c", 5, 10), ("c", 5, 10)], None),
        (0, [("c", 1, 10)], ("c", 6.0)),
    ],
    "what is larger than its bucket never fits": [
        (0, [("r", 11, 10)], ("r", NEVER)),
        (0, [("r", 0, 0)], None),
        (0, [("r", 1, 0)], ("r", NEVER)),
    ],
    "not a millisecond of refill is lost or given": [
        (0, [("r", 7, 7)], None),
        *[(ms, [("r", 1, 7)], ("r", (8572 - ms) / 1000)) for ms in (1, 17, 1000, 8571)],
        (8572, [("r", 1, 7)], None),
        (17142, [("r", 1, 7)], ("r", 0.001)),
        (17143, [("r", 1, 7)], None),
    ],
    "a bucket is full after a minute, and no fuller after an hour": [
        (0, [("r", 5, 5)], None),
        (60_000, [("r", 5, 5)], None),
        (3_660_000, [("r", 5, 5)], None),
        (3_660_000, [("r", 1, 5)], ("r", 12.0)),
    ],
    "a clock that steps back gives nothing": [
        (100_000, [("r", 60, 60)], None),
        (40_000, [("r", 1, 60)], ("r", 1.0)),
        (100_999, [("r", 1, 60)], ("r", 0.001)),
        (101_000, [("r", 1, 60)], None),
        (200_000, [("r", 30, 60)], None),
        (140_000, [("r", 1, 60)], None),
        (200_000, [("r", 30, 60)], ("r", 1.0)),
    ],
    "a lowered limit holds at once, a raised one refills faster": [
        (0, [("r", 0, 1000)], None),
        (0, [("r", 6, 5)], ("r", NEVER)),
        (0, [("r", 5, 5)], None),
        (1000, [("r", 1, 600)], None),
        (1000, [("r", 10, 600)], ("r", 0.1)),
    ],
    "numbers that doubles would round in the sixth digit": [
        (0, [("t", UNITS_MAX - 1, UNITS_MAX)], None),
        (0, [("t", 2, UNITS_MAX)], ("t", 0.001)),
        (0, [("t", 1, UNITS_MAX)], None),
        (1, [("t", 1_666_666, UNITS_MAX)], None),
        (1, [("t", 1, UNITS_MAX)], ("t", 0.001)),
    ],
}


@pytest.mark.parametrize("case", TABLE)
@pytest.mark.parametrize("way", ["pure", "memory", "redis"])
async def test_the_table_of_rates(way: str, case: str, redis: ToldRedis) -> None:
    async with limits_on(redis.url, clock=TOLD_CLOCK) as (shared,):
        ways: dict[str, PureLimits | MemoryLimits | ToldLimits] = {
            "pure": PureLimits(),
            "memory": MemoryLimits(),
            "redis": ToldLimits(redis, shared),
        }
        limits = ways[way]
        for now_ms, buckets, expected in TABLE[case]:
            assert await limits.take(buckets, now_ms) == expected, (now_ms, buckets)
        assert not shared.degraded


takes = st.lists(
    st.tuples(
        st.integers(-2_000, 30_000),  # the pause since the last one, in ms
        st.lists(
            st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.sampled_from([0, 1, 7, 30, 10**6])),
            min_size=1,
            max_size=4,
        ),
    ),
    max_size=15,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(takes=takes)
async def test_any_sequence_of_takes_goes_as_in_one_process(
    redis: ToldRedis, takes: list[tuple[int, Buckets]]
) -> None:
    async with limits_on(redis.url, clock=TOLD_CLOCK) as (shared,):
        memory, told = MemoryLimits(), ToldLimits(redis, shared, next(_numbers))
        now_ms = 10_000
        for pause_ms, buckets in takes:
            now_ms = max(0, now_ms + pause_ms)
            assert await told.take(buckets, now_ms) == await memory.take(buckets, now_ms)


async def test_negative_costs_are_a_mistake_and_limits_beyond_all_measure_are_none(redis: ToldRedis) -> None:
    async with limits_on(redis.url) as (limits,):
        with pytest.raises(ValueError, match="must not be negative"):
            await limits.take([("r", -1, 10)], 0)
        assert await limits.take([("t", 10**15, 10**18)], 0) == ("t", NEVER)
        assert await limits.take([("t", UNITS_MAX, 10**18)], 0) is None
        assert await limits.take([], 0) is None


async def test_three_replicas_together_let_through_what_one_would(redis: ToldRedis) -> None:
    async with limits_on(redis.url, 3, clock=TOLD_CLOCK) as replicas:
        name = "key:k:requests"
        answers = await asyncio.gather(*(replicas[n % 3].take([(name, 1, 100)], 0) for n in range(300)))
        assert answers.count(None) == 100
        assert answers.count((name, 0.6)) == 200


async def test_the_servers_own_clock_counts(redis: ToldRedis) -> None:
    async with limits_on(redis.url) as (limits,):
        assert await limits.take([("r", 60, 60)], 0) is None
        empty = await limits.take([("r", 60, 60)], 10**15)  # ours would say that a long time has passed
        assert empty is not None
        assert 50 < empty[1] <= 60
        assert redis.client.pttl("tollhouse:{r}:r") in range(1, 61_001)


async def test_what_is_asked_for_in_one_turn_goes_out_in_one_write(redis: ToldRedis) -> None:
    async with limits_on(redis.url) as (limits,):
        before = redis.stat("total_reads_processed")
        await asyncio.gather(*(limits.take([(f"key:{n}:requests", 1, 10)], 0) for n in range(200)))
        own = 1  # the second INFO
        reads = redis.stat("total_reads_processed") - before - own
        assert reads <= 3  # 200 scripts are about 30 KB, which the server reads in pieces of 16


async def test_what_one_call_touches_lies_in_one_slot(redis: ToldRedis) -> None:
    async with limits_on(redis.url) as (limits,):
        await limits.take([("key:k:requests", 1, 9), ("key:k:tokens", 1, 9), ("team:t:tokens", 1, 9)], 0)
        await limits.enter([("key:k", 9), ("team:t", 9)], "req_1")
        await limits.take([("key:k2:requests", 1, 9)], 0)
        keys = redis.keys()
        assert keys == [
            b"tollhouse:{key:k2}:key:k2:requests",
            b"tollhouse:{replicas}",
            b"tollhouse:{team:t}:in:key:k",
            b"tollhouse:{team:t}:in:team:t",
            b"tollhouse:{team:t}:key:k:requests",
            b"tollhouse:{team:t}:key:k:tokens",
            b"tollhouse:{team:t}:team:t:tokens",
        ]
        assert len({key_slot(key) for key in keys[2:]}) == 1
        assert all(0 < redis.client.pttl(key) <= 61_000 for key in keys)


async def test_a_server_that_forgot_its_scripts_is_told_them_again(redis: ToldRedis) -> None:
    async with limits_on(redis.url) as (limits,):
        redis.client.script_flush()
        answers = await asyncio.gather(*(limits.take([("r", 1, 2)], 0) for _ in range(3)))
        assert [a is None for a in answers] == [True, True, False]
        assert not limits.degraded


def test_it_works_on_the_loop_that_serves(redis: ToldRedis) -> None:
    async def once() -> tuple[str, float] | None:
        async with limits_on(redis.url, clock=TOLD_CLOCK) as (limits,):
            assert await limits.take([("r", 1, 1)], 0) is None
            return await limits.take([("r", 1, 1)], 0)

    assert uvloop.run(once()) == ("r", 60.0)


def test_a_process_that_was_held_up_does_not_blame_redis(redis: ToldRedis) -> None:
    async def once() -> bool:
        async with limits_on(redis.url, timeout_s=0.05) as (limits,):
            async with asyncio.timeout(PATIENT_S):
                await limits.returned()
            for turns in range(4):  # before it is written, and after
                asking = asyncio.ensure_future(limits.take([("r", 1, 10)], 0))
                for _ in range(turns):
                    await asyncio.sleep(0)
                time.sleep(0.1)  # noqa: ASYNC251  as a long garbage collection would
                assert await asking is None
            return limits.degraded

    assert (asyncio.run(once()), uvloop.run(once())) == (False, False)


# --- concurrency ---------------------------------------------------------------------------------------

KEY, TEAM = ("key:k", 2), ("team:t", 3)
OTHER_KEY = ("key:k2", 2)


@pytest.mark.parametrize("way", ["memory", "redis"])
async def test_a_request_is_inside_everywhere_or_nowhere(way: str, redis: ToldRedis) -> None:
    async with limits_on(redis.url, clock=TOLD_CLOCK) as (shared,):
        limits = MemoryLimits() if way == "memory" else shared
        assert await limits.enter([KEY, TEAM], "1") is None
        assert await limits.enter([KEY, TEAM], "2") is None
        assert await limits.enter([KEY, TEAM], "3") == "key:k"
        assert await limits.enter([OTHER_KEY, TEAM], "4") is None
        assert await limits.enter([OTHER_KEY, TEAM], "5") == "team:t"
        assert await limits.enter([OTHER_KEY], "6") is None  # the refusal took no place of the key
        limits.leave("1")
        limits.leave("1")
        limits.leave("never came")
        assert await limits.enter([KEY, TEAM], "7") is None
        assert await limits.enter([KEY, TEAM], "8") == "key:k"
        assert await limits.enter([], "9") is None
        assert not limits.degraded


async def test_three_replicas_count_together(redis: ToldRedis) -> None:
    async with limits_on(redis.url, 3, clock=TOLD_CLOCK) as replicas:
        answers = await asyncio.gather(*(replicas[n % 3].enter([("key:k", 10)], f"{n}") for n in range(60)))
        assert answers.count(None) == 10
        for n in range(60):
            replicas[n % 3].leave(f"{n}")
        for replica in replicas:
            await replica.idle()
        assert redis.client.zcard("tollhouse:{key:k}:in:key:k") == 0


async def test_one_process_refuses_what_it_knows_is_full_without_asking(redis: ToldRedis) -> None:
    async with limits_on(redis.url) as (limits,):
        assert await limits.enter([KEY], "1") is None
        assert await limits.enter([KEY], "2") is None
        before = redis.stat("total_commands_processed")
        assert [await limits.enter([KEY], f"{n}") for n in range(100)] == ["key:k"] * 100
        assert redis.stat("total_commands_processed") == before + 1  # INFO


async def test_places_of_a_dead_process_fall_free_and_those_of_a_living_one_do_not(redis: ToldRedis) -> None:
    async with limits_on(redis.url, 2, clock=TOLD_CLOCK) as (dying, living):
        assert await dying.enter([KEY], "1") is None
        assert await living.enter([KEY], "2") is None
        redis.at(30_000)
        living.renew()
        await living.idle()
        redis.at(44_999)
        assert await living.enter([KEY], "3") == "key:k"
        redis.at(45_000)
        assert await living.enter([KEY], "3") is None
        assert await living.enter([KEY], "4") == "key:k"


async def test_a_caller_that_is_cancelled_while_it_enters_leaves(redis: ToldRedis) -> None:
    async with limits_on(redis.url, clock=TOLD_CLOCK) as (limits,):
        entering = asyncio.create_task(limits.enter([KEY], "1"))
        await asyncio.sleep(0)
        entering.cancel()
        await asyncio.wait((entering,))
        limits.leave("1")
        await limits.idle()
        assert redis.client.exists("tollhouse:{key:k}:in:key:k") == 0


async def test_who_was_refused_is_not_renewed_into_a_place(redis: ToldRedis) -> None:
    async with limits_on(redis.url, 2, clock=TOLD_CLOCK) as (one, two):
        assert await one.enter([("key:k", 1)], "1") is None
        refused = asyncio.create_task(two.enter([("key:k", 1)], "2"))
        await asyncio.sleep(0)
        two.renew()  # goes out behind the question, before its answer
        assert await refused == "key:k"
        await two.idle()
        assert redis.client.zrange("tollhouse:{key:k}:in:key:k", 0, -1) == [b"1"]


# --- without Redis -------------------------------------------------------------------------------------


async def test_without_redis_each_replica_keeps_to_its_share() -> None:
    nowhere = f"redis://127.0.0.1:{free_port()}/0"
    async with limits_on(nowhere, replicas_min=4) as (limits,):
        assert limits.degraded
        answers = [await limits.take([("key:k:requests", 1, 100)], 0) for _ in range(26)]
        assert answers == [None] * 25 + [("key:k:requests", 2.4)]
        # what fits the whole limit passes, if only now and then
        assert await limits.take([("key:k:tokens", 900, 1000)], 0) is None
        assert await limits.take([("key:k:tokens", 900, 1000)], 0) == ("key:k:tokens", 60.0)
        assert await limits.take([("key:k:tokens", 1001, 1000)], 0) == ("key:k:tokens", NEVER)
        assert [await limits.enter([("key:k", 8)], f"{n}") for n in range(3)] == [None, None, "key:k"]
        limits.leave("0")
        assert await limits.enter([("key:k", 8)], "3") is None
        assert [await limits.enter([("team:t", 2)], f"t{n}") for n in range(2)] == [
            None,
            "team:t",
        ]  # at least 1


async def test_replicas_are_counted_through_redis_and_remembered_without_it(own_redis: RedisServer) -> None:
    async with limits_on(own_redis.url, 3) as replicas:
        for replica in replicas:
            replica.renew()
            await replica.idle()
        assert [r.replicas for r in replicas] == [3, 3, 3]
        own_redis.kill()
        answers = [await replicas[0].take([("key:k:requests", 1, 100)], 0) for _ in range(100)]
        assert answers.count(None) == 33


async def test_a_killed_redis_is_done_without_and_a_new_one_is_used(own_redis: RedisServer) -> None:
    async with limits_on(own_redis.url, 2) as (one, two):
        assert await one.enter([KEY], "1") is None
        one.renew()  # and so hears that there are two of them
        await one.idle()
        own_redis.kill()
        assert await one.take([("key:k:requests", 1, 60)], 0) is None
        assert one.degraded
        assert await one.enter([KEY, TEAM], "2") == "key:k"  # the share of two is one, and that is inside
        own_redis.start()
        async with asyncio.timeout(PATIENT_S):
            await one.returned()
            await two.returned()
        await one.idle()
        # empty, but told who is inside
        assert await two.enter([KEY], "3") is None
        assert await two.enter([KEY], "4") == "key:k"
        assert (one.degraded, two.degraded) == (False, False)


async def test_a_silent_redis_is_waited_for_once_and_briefly(own_redis: RedisServer) -> None:
    loop = asyncio.get_running_loop()
    async with limits_on(own_redis.url, timeout_s=0.05) as (limits,):
        async with asyncio.timeout(PATIENT_S):
            await limits.returned()
        with own_redis.paused():
            began_s = loop.time()
            async with asyncio.timeout(PATIENT_S):
                answers = await asyncio.gather(*(limits.take([("r", 1, 100)], 0) for _ in range(50)))
            assert answers == [None] * 50
            assert loop.time() - began_s < 1.0
            assert limits.degraded
            began_s = loop.time()
            for n in range(50):
                assert await limits.take([("r", 1, 100)], 0) is None
                assert await limits.enter([("key:k", 100)], f"{n}") is None
            assert loop.time() - began_s < 1.0
        async with asyncio.timeout(PATIENT_S):
            await limits.returned()
            await limits.idle()


async def test_a_flushed_redis_learns_at_the_next_renewal_who_is_inside(redis: ToldRedis) -> None:
    async with limits_on(redis.url, 2) as (one, two):
        assert await one.enter([KEY], "1") is None
        assert await one.enter([KEY], "2") is None
        redis.client.flushall()
        one.renew()
        await one.idle()
        assert await two.enter([KEY], "3") == "key:k"


async def test_who_leaves_while_the_line_is_down_has_left_when_it_is_back(redis: ToldRedis) -> None:
    async with limits_on(redis.url, 2) as (one, two):
        assert await one.enter([KEY], "1") is None
        assert await one.enter([KEY], "2") is None
        redis.cut()
        assert await one.take([("r", 1, 1)], 0) is None
        assert one.degraded
        one.leave("1")
        async with asyncio.timeout(PATIENT_S):
            await one.returned()
            await two.returned()
        await one.idle()
        assert redis.client.zrange("tollhouse:{key:k}:in:key:k", 0, -1) == [b"2"]


async def test_a_redis_that_refuses_to_write_is_as_good_as_none(own_redis: RedisServer) -> None:
    with Redis.from_url(own_redis.url) as client:
        async with limits_on(own_redis.url) as (limits,):
            client.replicaof("127.0.0.1", str(free_port()))
            assert await limits.take([("r", 1, 10)], 0) is None
            assert limits.degraded
            client.replicaof("NO", "ONE")
            async with asyncio.timeout(PATIENT_S):
                await limits.returned()
                while limits.degraded:  # it can log in while it cannot write
                    await limits.returned()
                    await limits.idle()


async def test_passwords_are_used_and_a_wrong_one_is_no_reason_to_stop(own_redis: RedisServer) -> None:
    with Redis.from_url(own_redis.url) as client:
        client.config_set("requirepass", "a b/c")
        where = f"127.0.0.1:{own_redis.port}/1"
        async with limits_on(f"redis://:a%20b%2Fc@{where}") as (limits,):
            assert not limits.degraded
            assert await limits.take([("r", 1, 10)], 0) is None
            assert client.execute_command("INFO", "keyspace")["db1"]["keys"] == 2
        async with limits_on(f"redis://:wrong@{where}") as (limits,):
            assert limits.degraded
            assert await limits.take([("r", 1, 10)], 0) is None


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1", "must specify one of the following schemes"),
        ("redis://127.0.0.1:six", "Port could not be cast"),
        ("rediss://127.0.0.1?ssl_ca_certs=/nowhere", "TLS to Redis cannot be set up"),
        ("rediss://127.0.0.1?ssl_cert_reqs=maybe", "TLS to Redis cannot be set up"),
    ],
)
async def test_an_address_that_cannot_be_used_is_said_so_at_once(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RedisLimits(url)
