"""What one replica was refused, the others know; and all the same without Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.core.entry import Granted, Refused
from gateway.storage.redis_refusals import RedisRefusals
from gateway.storage.refusals import Refusals
from tests.storage.worlds import TEAM, HandClock, attempt, opened, outcome, reserve, usd
from tests.support.servers import RedisServer
from tests.support.told_redis import PATIENT_S, ToldRedis

USED_UP = Refused("key:k", 100, 95, 0, None)
NEVER_S = 3_600.0


@asynccontextmanager
async def shared(url: str, refusals: Refusals) -> AsyncIterator[RedisRefusals]:
    shared = RedisRefusals(url, refusals, timeout_s=PATIENT_S, poll_every_s=NEVER_S)
    await shared.start()
    try:
        yield shared
    finally:
        await shared.close()


def told(refusals: Refusals) -> Refused | None:
    return refusals.find("task:t", ("key:k",), usd(10), usd(10), False)


async def test_others_know_it_for_as_long_as_it_is_known_here(redis: ToldRedis) -> None:
    one, two = Refusals(HandClock()), Refusals(HandClock())
    async with shared(redis.url, one) as first, shared(redis.url, two) as second:
        one.add("task:t", USED_UP, usd(10), False)
        await first.idle()
        await second.poll()
        assert told(two) == USED_UP
        assert redis.keys() == [b"tollhouse:{refusals}"]
        assert 0 < int(redis.client.pttl("tollhouse:{refusals}")) <= 2_000

        two.forget()
        await second.poll()
        assert told(two) is None, "what was heard once is not heard again"


async def test_who_has_seen_a_later_change_passes_it_over(redis: ToldRedis) -> None:
    one, two = Refusals(HandClock()), Refusals(HandClock())
    async with shared(redis.url, one) as first, shared(redis.url, two) as second:
        one.revision, two.revision = 7, 8
        one.add("task:t", USED_UP, usd(10), False)
        await first.idle()
        await second.poll()
        assert told(two) is None
        one.revision = 8
        one.add("task:t", USED_UP, usd(10), False)
        await first.idle()
        await second.poll()
        assert told(two) == USED_UP


async def test_what_is_no_message_is_passed_over(redis: ToldRedis) -> None:
    one = Refusals(HandClock())
    async with shared(redis.url, one) as first:
        redis.client.zadd("tollhouse:{refusals}", {b"\xc1 nonsense": 2**45})
        await first.poll()
        assert told(one) is None


async def test_losing_redis_changes_no_decision(own_redis: RedisServer, store: str, tmp_path: Path) -> None:
    async with opened(store, tmp_path / "journal") as (ledger, _, accounts):
        await accounts.ensure_defaults()
        await accounts.set_budget(TEAM, 100)
        async with shared(own_redis.url, ledger.refusals) as redis:
            a = attempt()
            await reserve(ledger, a, 95)
            await ledger.settle(a, outcome(95))
            assert await reserve(ledger, attempt(), 10) == Refused(TEAM, 100, 95, 0, None)
            own_redis.kill()
            await redis.poll()
            ledger.revision_changed()
            assert await reserve(ledger, attempt(), 10) == Refused(TEAM, 100, 95, 0, None)
            await accounts.set_budget(TEAM, 1_000)
            ledger.revision_changed()
            assert isinstance(await reserve(ledger, attempt(), 10), Granted)
