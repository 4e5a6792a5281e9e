"""Lineage shared through Redis: whichever worker a step lands on, its task is the one that a single process names."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from gateway.storage.memory import MemoryPrefixIndex
from gateway.storage.redis_prefixes import STEP_SEGMENTS_MAX, RedisPrefixIndex
from tests.support.servers import RedisServer, free_port
from tests.support.told_redis import PATIENT_S, TOLD_CLOCK, ToldRedis

_numbers = itertools.count(1)


def links(*segments: str) -> tuple[bytes, ...]:
    rolling = xxhash.xxh3_128()
    found = []
    for segment in segments:
        rolling.update(segment.encode() + b"\0")
        found.append(rolling.digest())
    return tuple(found)


class Fleet:
    """Workers that share a Redis, one clock, and the numbers of new tasks; beside them, one process that has it all."""

    def __init__(self, redis: ToldRedis, workers: int) -> None:
        self.redis = redis
        self.key = f"key{next(_numbers)}/client"
        self.now_s = 1_000.0
        self.alone = MemoryPrefixIndex(lambda: self.now_s)
        self.workers = [
            RedisPrefixIndex(
                redis.url,
                MemoryPrefixIndex(lambda: self.now_s),
                lambda: self.now_s,
                timeout_s=PATIENT_S,
                clock=TOLD_CLOCK,
            )
            for _ in range(workers)
        ]
        self.tasks = 0
        self.tasks_alone = 0

    async def serve(self, worker: int, *steps: str) -> str:
        """The task that the worker names, as the pipeline does: find, else a new one; then remember."""
        self.redis.at(round(self.now_s * 1_000))
        chain, index = links(*steps), self.workers[worker]
        found = await index.find(self.key, chain)
        if found is None:
            self.tasks += 1
        task = found[1] if found else f"task {self.tasks}"
        self.redis.at(round(self.now_s * 1_000) + 20)  # it takes a while to get there
        index.put(self.key, chain, task)
        await index.idle()
        return task

    def serve_alone(self, *steps: str) -> str:
        chain = links(*steps)
        found = self.alone.known(self.key, chain)
        if found is None:
            self.tasks_alone += 1
        task = found[1] if found else f"task {self.tasks_alone}"
        self.alone.put(self.key, chain, task)
        return task


@asynccontextmanager
async def fleet_on(redis: ToldRedis, workers: int = 3) -> AsyncIterator[Fleet]:
    fleet = Fleet(redis, workers)
    for worker in fleet.workers:
        await worker.start()
    try:
        yield fleet
    finally:
        for worker in fleet.workers:
            await worker.close()


async def test_steps_of_one_agent_on_three_workers_are_one_task(redis: ToldRedis) -> None:
    async with fleet_on(redis) as fleet:
        steps = ["system", "user"]
        for turn in range(12):
            assert await fleet.serve(turn % 3, *steps) == "task 1"
            steps += [f"assistant {turn}", f"tool {turn}"]
        assert await fleet.workers[0].find(fleet.key, links(*steps)) == (len(steps) - 2, "task 1")
        assert await fleet.workers[0].find("another key", links(*steps)) is None
        assert await fleet.serve(0, "system", "user") == "task 2"
        assert await fleet.workers[1].find(fleet.key, links(*steps[:-2])) == (len(steps) - 2, "task 1")


async def test_two_runs_with_one_opening_separate_at_their_first_difference(redis: ToldRedis) -> None:
    async with fleet_on(redis) as fleet:
        assert await fleet.serve(0, "s", "u") == "task 1"
        assert await fleet.serve(1, "s", "u") == "task 1"
        assert await fleet.serve(2, "s", "u", "a1", "t1") == "task 1"
        # Worker 1 put task 1 at the opening itself; that it has gone on since is known only to Redis.
        assert await fleet.serve(1, "s", "u", "a2", "t2") == "task 2"
        assert await fleet.serve(0, "s", "u", "a1", "t1", "a3") == "task 1"
        assert await fleet.serve(0, "s", "u", "a2", "t2", "a4") == "task 2"


async def test_the_same_first_request_is_a_retry_for_a_minute_and_then_another_run(redis: ToldRedis) -> None:
    async with fleet_on(redis) as fleet:
        assert await fleet.serve(0, "s", "u") == "task 1"
        fleet.now_s += 60
        assert await fleet.serve(1, "s", "u") == "task 1"
        fleet.now_s += 60.1
        assert await fleet.serve(2, "s", "u") == "task 2"
        # both wait for their first answer; each goes on as one task
        assert await fleet.serve(0, "s", "u", "a1") == "task 2"
        assert await fleet.serve(1, "s", "u", "a2") == "task 1"
        assert await fleet.serve(2, "s", "u", "a2", "t2") == "task 1"
        assert await fleet.serve(2, "s", "u", "a1", "t1") == "task 2"


async def test_late_retries_of_a_later_step_are_still_its_task(redis: ToldRedis) -> None:
    async with fleet_on(redis) as fleet:
        assert await fleet.serve(0, "s", "u") == "task 1"
        for worker in (1, 2, 0):
            assert await fleet.serve(worker, "s", "u", "a", "t") == "task 1"
            fleet.now_s += 600
        assert await fleet.workers[0].find(fleet.key, links("s", "u", "a", "t")) == (4, "task 1")
        assert await fleet.serve(1, "s", "u") == "task 2"


async def test_branches_of_one_conversation_on_different_workers(redis: ToldRedis) -> None:
    async with fleet_on(redis) as fleet:
        assert await fleet.serve(0, "s", "u") == "task 1"
        assert await fleet.serve(1, "s", "u", "a", "t") == "task 1"
        assert await fleet.serve(2, "s", "u", "a", "t", "left") == "task 1"
        assert await fleet.serve(0, "s", "u", "a", "t", "right") == "task 2"
        assert await fleet.serve(1, "s", "u", "a", "t", "right", "more") == "task 2"
        assert await fleet.serve(1, "s", "u", "a", "t", "left", "more") == "task 1"


# A tree of conversations: each request repeats an earlier one, extends it, or forks at one of its segments.
requests = st.lists(
    st.tuples(
        st.integers(0, 2),  # the worker
        st.integers(0, 10**6),  # which earlier request
        st.sampled_from(["repeat", "extend", "fork", "open"]),
        st.integers(0, 2),  # what comes next
        st.sampled_from([0.0, 1.0, 30.0, 61.0, 300.0]),  # after this pause
    ),
    max_size=14,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=requests)
async def test_any_traffic_is_named_as_one_process_would(redis: ToldRedis, requests: list[Any]) -> None:
    async with fleet_on(redis) as fleet:
        sent: list[tuple[str, ...]] = [("s", "u0")]
        for worker, which, how, what, pause_s in requests:
            fleet.now_s += pause_s
            earlier = sent[which % len(sent)]
            more = (f"a{what}", f"t{what}")
            steps = {
                "repeat": earlier,
                "extend": earlier + more,
                "fork": earlier[: max(2, len(earlier) - 2)] + more,
                "open": ("s", f"u{what}"),
            }[how]
            sent.append(steps)
            assert await fleet.serve(worker, *steps) == fleet.serve_alone(*steps), steps


async def test_sixteen_runs_at_one_point_are_the_most_that_are_told_apart(redis: ToldRedis) -> None:
    async with fleet_on(redis, 1) as fleet:
        index = fleet.workers[0]
        for n in range(40):
            index.put(fleet.key, links("s", "u"), f"task {n}")
        for n in range(39, 23, -1):
            assert await index.find(fleet.key, links("s", "u", f"a{n}")) == (2, f"task {n}")
            index.put(fleet.key, links("s", "u", f"a{n}"), f"task {n}")
        assert await index.find(fleet.key, links("s", "u", "b")) is None


async def test_everything_expires_and_a_lookup_is_bounded(redis: ToldRedis) -> None:
    async with fleet_on(redis, 2) as fleet:
        opening = [f"{n}" for n in range(10)]
        await fleet.serve(0, *opening)
        four_h_ms = 4 * 3_600_000
        keys = redis.keys()
        assert len(keys) == 2  # the end, and since when this key is known
        assert all(four_h_ms - 60_000 < redis.client.pttl(key) <= four_h_ms for key in keys)
        step = [f"more {n}" for n in range(STEP_SEGMENTS_MAX)]
        assert await fleet.workers[1].find(fleet.key, links(*opening, *step[1:])) == (10, "task 1")
        assert await fleet.workers[1].find(fleet.key, links(*opening, *step)) is None
        await fleet.serve(1, *opening, *step[:4])
        assert len(redis.keys()) == 2  # the task has left its old end
        # an end that one of two tasks has left keeps its time
        for task in ("task 2", "task 3"):
            fleet.workers[0].put(fleet.key, links("s", "u"), task)
        fleet.workers[0].put(fleet.key, links("s", "u", "a"), "task 2")
        await fleet.workers[0].idle()
        keys = redis.keys()
        assert [key for key in keys if redis.client.pttl(key) == -1] == []


# --- without Redis -------------------------------------------------------------------------------------


async def test_without_redis_each_process_knows_what_it_has_seen() -> None:
    nowhere = ToldRedis(f"redis://127.0.0.1:{free_port()}/0", Redis())
    async with fleet_on(nowhere, 2) as fleet:
        one, two = fleet.workers
        one.put(fleet.key, links("s", "u"), "task 1")
        assert await one.find(fleet.key, links("s", "u", "a")) == (2, "task 1")
        assert await two.find(fleet.key, links("s", "u", "a")) is None


async def test_a_flushed_redis_loses_no_run_that_goes_on_where_it_was(redis: ToldRedis) -> None:
    async with fleet_on(redis, 2) as fleet:
        assert await fleet.serve(0, "s", "u") == "task 1"
        assert await fleet.serve(0, "s", "u2") == "task 2"
        fleet.now_s += 10
        redis.client.flushall()
        assert await fleet.serve(0, "s", "u", "a") == "task 1"
        fleet.now_s += 10
        # Redis remembers this key again, but not what is older than that
        assert await fleet.serve(0, "s", "u2", "b") == "task 2"
        assert await fleet.serve(1, "s", "u2", "b", "c") == "task 2"
        # what the own index has seen since then it is not asked about: task 2 has left that end
        assert await fleet.serve(0, "s", "u2", "b", "d") == "task 3"


async def test_a_killed_redis_is_done_without_and_a_new_one_is_used(own_redis: RedisServer) -> None:
    with Redis.from_url(own_redis.url) as client:
        told = ToldRedis(own_redis.url, client)
        told.at(0)
        async with fleet_on(told, 2) as fleet:
            one, two = fleet.workers
            assert await fleet.serve(0, "s", "u") == "task 1"
            own_redis.kill()
            assert await one.find(fleet.key, links("s", "u", "a")) == (2, "task 1")
            one.put(fleet.key, links("s", "u", "a"), "task 1")
            assert await two.find(fleet.key, links("s", "u", "a", "b")) is None
            own_redis.start()
            async with asyncio.timeout(PATIENT_S):
                await one.returned()
                await two.returned()
            fleet.now_s += 10
            assert await fleet.serve(0, "s", "u", "a", "b") == "task 1"
            assert await fleet.serve(1, "s", "u", "a", "b", "c") == "task 1"


async def test_what_came_while_the_line_was_down_is_known_where_it_came(redis: ToldRedis) -> None:
    async with fleet_on(redis, 1) as fleet:
        index = fleet.workers[0]
        assert await fleet.serve(0, "s", "u") == "task 1"
        redis.cut()
        assert await index.find(fleet.key, links("s", "u2")) is None
        index.put(fleet.key, links("s", "u2"), "task 2")
        fleet.now_s += 10
        async with asyncio.timeout(PATIENT_S):
            await index.returned()
        redis.at(round(fleet.now_s * 1_000))
        assert await index.find(fleet.key, links("s", "u2", "a")) == (2, "task 2")


async def test_a_silent_redis_is_waited_for_once_and_briefly(own_redis: RedisServer) -> None:
    loop = asyncio.get_running_loop()
    index = RedisPrefixIndex(own_redis.url, MemoryPrefixIndex(loop.time), loop.time)
    await index.start()
    async with asyncio.timeout(PATIENT_S):
        await index.returned()
    index.put("key", links("s", "u"), "task 1")
    with own_redis.paused():
        began_s = loop.time()
        for _ in range(50):
            assert await index.find("key", links("s", "u", "a")) == (2, "task 1")
        assert loop.time() - began_s < 1.0
    async with asyncio.timeout(PATIENT_S):
        await index.returned()
    assert await index.find("key", links("s", "u", "a")) == (2, "task 1")
    await index.close()


async def test_lookups_of_one_turn_go_out_in_one_write(redis: ToldRedis) -> None:
    async with fleet_on(redis, 1) as fleet:
        before = redis.stat("total_reads_processed")
        chain = links("s", "u")
        found = await asyncio.gather(*(fleet.workers[0].find(f"key{n}", chain) for n in range(50)))
        assert found == [None] * 50
        assert redis.stat("total_reads_processed") - before - 1 <= 2


@pytest.mark.parametrize("segments", [1, 2, 500])
async def test_a_chain_of_any_length(redis: ToldRedis, segments: int) -> None:
    async with fleet_on(redis, 2) as fleet:
        steps = [f"{n}" for n in range(segments)]
        assert await fleet.workers[0].find(fleet.key, ()) is None
        assert await fleet.serve(0, *steps) == await fleet.serve(1, *steps) == "task 1"
        assert await fleet.serve(1, *steps, "more") == "task 1"
