"""A run that moves on to another replica finds the deployment that holds its prompt."""

from __future__ import annotations

import pytest

from gateway.core.catalog import Deployment
from gateway.pipeline.exchange import World
from gateway.storage.redis_bindings import RedisBindings
from tests.pipeline.test_routes import ASK, CALLS, RESULT, ask, used
from tests.support.recorder import Recorder
from tests.support.servers import RedisServer
from tests.support.small_world import SmallWorld, provider

SECOND = (ASK, CALLS, RESULT)


def step_of(world: World) -> int:
    (run,) = [run for task in world.runs.tasks() if (run := world.runs.known(task)) is not None]
    return run.step


@pytest.mark.parametrize("up", [True, False])
async def test_a_warm_cache_is_found_from_another_replica(own_redis: RedisServer, up: bool) -> None:
    url = own_redis.url if up else "redis://127.0.0.1:1/0"
    first, second = RedisBindings(url, timeout_s=5.0), RedisBindings(url, timeout_s=5.0)
    await first.start()
    await second.start()
    try:
        async with Recorder() as upstream:
            at = provider(upstream.base_url)
            pair = [Deployment(name, at, "m", "m", "up/m") for name in ("a", "b")]
            # by chance the first replica would take `b`, the second `a`
            async with (
                SmallWorld(pair, random=lambda: 0.9, bindings=first) as one,
                SmallWorld(pair, random=lambda: 0.0, bindings=second) as other,
            ):
                upstream.scripts = [used(0, 5_000)]
                assert (await ask(one, model="m"))["x-deployment"] == "b"
                await one.settled()
                await first.idle()
                found = await ask(other, *SECOND, model="m")
                assert found["x-deployment"] == ("b" if up else "a")
                assert step_of(other.world) == (2 if up else 1)
    finally:
        await first.close()
        await second.close()


async def test_what_another_version_wrote_is_passed_over(own_redis: RedisServer) -> None:
    bindings = RedisBindings(own_redis.url, timeout_s=5.0)
    await bindings.start()
    try:
        async with Recorder() as upstream:
            pair = [Deployment(n, provider(upstream.base_url), "m", "m", "up/m") for n in ("a", "b")]
            async with SmallWorld(pair, bindings=bindings) as gw:
                assert (await ask(gw, model="m"))["x-deployment"] == "a"
                await gw.settled()
                (task_id,) = gw.world.runs.tasks()
                run = gw.world.runs.known(task_id)
                assert run is not None
                (name,) = run.threads
                bindings.put(task_id, name, b"{}")
                await bindings.idle()
                assert await bindings.find(task_id, name) == b"{}"
                run.threads.clear()
                assert (await ask(gw, *SECOND, model="m"))["x-deployment"] == "a"
    finally:
        await bindings.close()
