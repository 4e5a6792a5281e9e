"""The queue in front of a deployment: who gets the next place, who is told to come back, and that no place is lost."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from gateway.core.catalog import Deployment
from gateway.core.errors import GatewayError, RateLimited, Unavailable
from gateway.core.serving import QueuePolicy, Serving, Urgency
from gateway.pipeline.places import Places
from tests.support.recorder import Recorder
from tests.support.small_world import SmallWorld, deployment, provider

NOW, BATCH = Urgency.INTERACTIVE, Urgency.BATCH
CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def there(*, concurrent: int | None = 1, per_replica: int | None = None, **queue: Any) -> Deployment:
    serving = Serving(concurrent_per_replica=per_replica, queue=QueuePolicy(**queue))
    return deployment(provider("http://127.0.0.1:1/v1"), concurrent=concurrent, serving=serving)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def waiting(places: Places, n: int) -> None:
    while places.counts()["up/m", "waiting"] != n:
        await asyncio.sleep(0)


def called(places: Places, one: Deployment, order: list[str]) -> Callable[[str, Urgency], asyncio.Task[None]]:
    """Starts a call that notes when it gets its place, and gives it back at once."""

    async def call(name: str, urgency: Urgency) -> None:
        await places.enter(one, name[0], name, urgency)
        order.append(name)
        places.leave(name)

    return lambda name, urgency: asyncio.ensure_future(call(name, urgency))


async def test_batch_waits_while_people_wait_but_not_for_ever() -> None:
    clock, order = Clock(), list[str]()
    places, one = Places(monotonic=clock), there(batch_turn_after_s=5, waiting_max=100)
    await places.enter(one, "t", "held")
    call = called(places, one, order)
    calls = [call("b1", BATCH), call("b2", BATCH)]
    await waiting(places, 2)
    clock.now_s = 4.0
    calls += [call("p1", NOW), call("q1", NOW), call("p2", NOW)]
    await waiting(places, 5)
    assert places.waiting() == {("up/m", "interactive"): 3, ("up/m", "batch"): 2}
    places.leave("held")
    await asyncio.gather(*calls)
    assert order == ["p1", "q1", "p2", "b1", "b2"]

    await places.enter(one, "t", "held")
    calls = [call("b3", BATCH), call("b4", BATCH), call("p3", NOW), call("p4", NOW)]
    await waiting(places, 4)
    clock.now_s = 10.0  # the batch calls have waited six seconds
    places.leave("held")
    await asyncio.gather(*calls)
    assert order[5:] == ["b3", "p3", "b4", "p4"]
    assert places.counts() == {("up/m", "inside"): 0, ("up/m", "waiting"): 0}


async def test_a_full_queue_turns_away_who_crowds_it_and_says_when_to_come_back() -> None:
    clock, told = Clock(), list[tuple[str, Urgency, float, str]]()
    places = Places(monotonic=clock, waited=lambda *word: told.append(word))
    one = there(waiting_max=2, wait_max_s=60)
    await places.enter(one, "t", "first")
    clock.now_s = 8.0
    places.leave("first")  # so a place is held for eight seconds
    await places.enter(one, "t", "held")

    loud = [asyncio.ensure_future(places.enter(one, "loud", f"l{n}", BATCH)) for n in range(2)]
    await waiting(places, 2)
    with pytest.raises(RateLimited) as crowded:
        await places.enter(one, "loud", "l2", BATCH)
    assert (crowded.value.status, crowded.value.retry_after_s) == (429, 24)
    assert crowded.value.message == "all 1 places of up/m are taken, and calls of this team wait for them"
    person = asyncio.ensure_future(places.enter(one, "quiet", "q"))
    with pytest.raises(
        Unavailable
    ) as displaced:  # by somebody who waits for an answer: not this team's fault
        await loud[1]
    assert (displaced.value.status, displaced.value.retry_after_s) == (503, 24)
    places.leave("held")
    await person
    places.leave("q")
    await loud[0]
    places.leave("l0")
    assert [word[1:] for word in told] == [
        (NOW, 0.0, "entered"),
        (NOW, 0.0, "entered"),
        (BATCH, 0.0, "full"),
        (BATCH, 0.0, "full"),
        (NOW, 0.0, "entered"),
        (BATCH, 0.0, "entered"),
    ]
    assert places.counts() == {("up/m", "inside"): 0, ("up/m", "waiting"): 0}


async def test_each_kind_waits_as_long_as_its_queue_says() -> None:
    places, one = Places(), there(wait_max_s=0.01, batch_wait_max_s=30)
    await places.enter(one, "t", "held")
    patient = asyncio.ensure_future(places.enter(one, "t", "batch", BATCH))
    with pytest.raises(Unavailable):
        await places.enter(one, "t", "person")
    assert not patient.done()
    places.leave("held")
    await patient


async def test_places_follow_the_replicas_that_are_there() -> None:
    live = {"up/m": 1}
    places, one = Places(live=lambda name: live[name]), there(concurrent=None, per_replica=2, waiting_max=9)
    for n in range(2):
        await places.enter(one, "t", f"in{n}")
    assert not places.free(one)
    late = [asyncio.ensure_future(places.enter(one, "t", f"late{n}")) for n in range(3)]
    await waiting(places, 3)
    live["up/m"] = 2
    places.look("up/m")
    await asyncio.gather(*late[:2])
    live["up/m"] = 0  # all are gone: who is inside is counted on, and one replica's places stay
    places.look("up/m")
    for n in range(2):
        places.leave(f"in{n}")
    await asyncio.sleep(0)
    assert not late[2].done()
    for n in range(2):
        places.leave(f"late{n}")
    await late[2]
    assert places.counts() == {("up/m", "inside"): 1, ("up/m", "waiting"): 0}


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_leaves_when_no_place_is_lost_and_none_is_given_twice(seed: int) -> None:
    rng = random.Random(seed)
    places = Places()
    two = there(concurrent=2, waiting_max=4, wait_max_s=rng.choice([0.002, 5.0]), batch_turn_after_s=0)
    most = 0

    async def call(n: int) -> None:
        nonlocal most
        name = f"a{n}"
        try:
            await places.enter(two, rng.choice("xyz"), name, rng.choice([*Urgency]))
        except GatewayError:
            return
        try:
            most = max(most, int(places.counts()["up/m", "inside"]))
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
        finally:
            places.leave(name)

    calls = []
    for n in range(60):
        calls.append(asyncio.ensure_future(call(n)))
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        if rng.random() < 0.4:
            rng.choice(calls).cancel()
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(e) for e in ended} <= {type(None), asyncio.CancelledError}
    assert most <= 2
    assert places.counts() == {("up/m", "inside"): 0, ("up/m", "waiting"): 0}
    await asyncio.wait_for(places.enter(two, "x", "after"), 1.0)


async def test_a_client_sees_429_or_503_and_when_to_come_back_and_nothing_is_held_for_it() -> None:
    async with Recorder() as upstream:
        serving = Serving(queue=QueuePolicy(waiting_max=1, wait_max_s=0.05))
        one = deployment(provider(upstream.base_url), concurrent=1, serving=serving)
        async with SmallWorld([one]) as gw:
            await gw.world.places.enter(one, "team1", "another call")

            async def ask() -> tuple[int, str | None, str]:
                async with gw.http.post(CHAT, data=json.dumps(HI).encode()) as answer:
                    return (
                        answer.status,
                        answer.headers.get("Retry-After"),
                        (await answer.json())["error"]["code"],
                    )

            first = asyncio.ensure_future(ask())
            await waiting(gw.world.places, 1)
            assert await ask() == (429, "2", "rate_limit_exceeded")
            assert await first == (503, "2", "service_unavailable")
            assert (await gw.settled(), gw.ledger.holds, upstream.received) == ([], {}, [])


async def test_a_batch_call_of_a_client_is_one_in_the_queue() -> None:
    async with Recorder() as upstream:
        one = deployment(provider(upstream.base_url), concurrent=1)
        async with SmallWorld([one]) as gw:
            await gw.world.places.enter(one, "team1", "another call")
            labels = {"X-Labels": "workload=batch"}
            asked = asyncio.ensure_future(gw.http.post(CHAT, data=json.dumps(HI).encode(), headers=labels))
            await waiting(gw.world.places, 1)
            assert gw.world.places.waiting() == {("up/m", "interactive"): 0, ("up/m", "batch"): 1}
            gw.world.places.leave("another call")
            assert (await asked).status == 200
            (await asked).release()
