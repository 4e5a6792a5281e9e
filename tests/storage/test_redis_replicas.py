"""Gateway processes tell one another through a real Redis where threads went, how busy replicas are, and who is drained."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import redis.asyncio

from gateway.core.catalog import ReplicaKind, ReplicaSource
from gateway.core.replicas.chain import Chain, links_of
from gateway.core.replicas.fleet import Fleet
from gateway.core.replicas.group import Group, Groups, policy_of
from gateway.core.replicas.terms import Ask, End, EndKind, Health, Pick, ReplicaShown, Why
from gateway.storage.redis_replicas import RedisReplicas
from tests.support.servers import RedisServer

TIER = "gpu/small"
ADDRESSES = [f"http://10.0.0.{n}:8000/v1" for n in (1, 2, 3)]
SOURCE = ReplicaSource(ReplicaKind.STATIC, urls=tuple(ADDRESSES), exploration=0)


def asks(text: str) -> Ask:
    body = text.encode() * 2_000
    return Ask(Chain(links_of(body, 1), len(body)), f"task/{text}", f"task/{text}")


class Gateway:
    """One process: a fleet of the same three replicas, and its line to Redis."""

    def __init__(self, url: str, name: str, began_s: float) -> None:
        self.fleet = Fleet(policy_of(SOURCE))
        self.fleet.members(ADDRESSES, 0.0)
        self.now_s = began_s
        self.shared = RedisReplicas(
            url,
            Groups({TIER: Group(TIER, SOURCE, self.fleet)}),
            own=name,
            monotonic=lambda: self.now_s,
            timeout_s=10.0,
        )

    def pick(self, ask: Ask) -> Pick:
        found = self.fleet.pick(ask, self.now_s, 0.5)
        assert found is not None
        return found

    def sends(self, ask: Ask, attempt: str = "att_1") -> Pick:
        pick = self.pick(ask)
        self.fleet.sent(attempt, ask, pick, self.now_s)
        return pick

    def ended(self, attempt: str = "att_1") -> None:
        self.fleet.first_chunk(attempt, self.now_s)
        self.fleet.ended(attempt, End(EndKind.OK, 5_000, 0, 20), self.now_s)

    async def turn(self) -> None:
        await self.shared.turn()
        await self.shared.idle()

    def shown(self, address: str) -> ReplicaShown:
        return next(r for r in self.fleet.shown(self.now_s) if r.address == address)


@asynccontextmanager
async def two(url: str) -> AsyncIterator[tuple[Gateway, Gateway]]:
    a, b = Gateway(url, "a", 1_000.0), Gateway(url, "b", 50.0)
    await a.turn()
    await b.turn()
    try:
        yield a, b
    finally:
        await a.shared.close()
        await b.shared.close()


async def test_a_thread_that_moves_to_another_process_finds_its_replica(own_redis: RedisServer) -> None:
    async with two(own_redis.url) as (a, b):
        for n, name in enumerate("xyz"):
            a.sends(asks(name), f"att_{n}")
        for n in range(3):
            a.ended(f"att_{n}")
        homes = {name: a.pick(asks(name)) for name in "xyz"}
        assert {pick.why for pick in homes.values()} == {Why.WARM}
        assert {b.pick(asks(name)).why for name in "xyz"} == {Why.LEAST_LOADED}
        await a.turn()
        await b.turn()
        told = {name: b.pick(asks(name)) for name in "xyz"}
        assert {name: (p.address, p.why) for name, p in told.items()} == {
            name: (p.address, Why.WARM) for name, p in homes.items()
        }


async def test_load_of_one_process_counts_in_the_other_until_it_is_over(own_redis: RedisServer) -> None:
    async with two(own_redis.url) as (a, b):
        busy = a.sends(asks("x"))
        await a.turn()
        await b.turn()
        shown = b.shown(busy.address)
        assert (shown.peer_active, shown.peer_backlog_tokens) == (1, busy.uncached_tokens)
        assert (shown.active, b.pick(asks("other")).address != busy.address) == (0, True)
        a.ended()
        await a.turn()
        await b.turn()
        shown = b.shown(busy.address)
        assert (shown.peer_active, shown.peer_backlog_tokens) == (0, 0)


async def test_load_of_a_process_that_falls_silent_is_forgotten(own_redis: RedisServer) -> None:
    async with two(own_redis.url) as (a, b):
        busy = a.sends(asks("x"))
        await a.turn()
        await b.turn()
        b.now_s += 60
        assert b.shown(busy.address).peer_active == 0


async def test_what_a_person_drains_at_one_is_drained_at_all_and_after_a_restart(
    own_redis: RedisServer,
) -> None:
    async with two(own_redis.url) as (a, b):
        first = ADDRESSES[0]
        a.fleet.drain(first, True)
        a.shared.drained(TIER, first, True)
        await a.turn()
        await b.turn()
        assert b.shown(first).health is Health.DRAINED
        late = Gateway(own_redis.url, "late", 5.0)
        await late.turn()
        assert late.shown(first).health is Health.DRAINED
        await late.shared.close()
        b.fleet.drain(first, False)
        b.shared.drained(TIER, first, False)
        await b.turn()
        await a.turn()
        assert [g.shown(first).drained for g in (a, b)] == [False, False]


async def test_what_another_version_wrote_is_passed_over(own_redis: RedisServer) -> None:
    async with two(own_redis.url) as (a, b), redis.asyncio.from_url(own_redis.url) as raw:
        stream = "tollhouse:{replicas}:digests"
        await raw.xadd(stream, {"p": "c", "d": TIER, "b": b"\xff\x00"})
        await raw.xadd(stream, {"x": "y"})
        await raw.xadd(stream, {"p": "c", "d": "gone", "b": b"\x92"})
        await raw.hset("tollhouse:{replicas}:drained", "no line", "1")
        a.sends(asks("x"))
        await a.turn()
        await b.turn()
        assert sum(b.shown(address).peer_active for address in ADDRESSES) == 1


async def test_without_redis_each_goes_by_what_it_sees() -> None:
    async with two("redis://127.0.0.1:1/0") as (a, b):
        busy = a.sends(asks("x"))
        a.shared.drained(TIER, ADDRESSES[2], True)
        await a.turn()
        await b.turn()
        assert (a.shown(busy.address).active, b.shown(busy.address).peer_active) == (1, 0)


async def test_nothing_is_connected_where_there_are_no_replicas() -> None:
    shared = RedisReplicas("redis://127.0.0.1:1/0", Groups(), own="a", monotonic=lambda: 0.0)
    await shared.turn()
    await shared.close()
