"""Fleets follow the world: replicas that come, go, fall silent, answer slowly, or turn out to be something else."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from gateway.core.catalog import Catalog, Deployment, Provider, ReplicaKind, ReplicaSource, Wire
from gateway.core.replicas.group import NOT_ASKED, Group, Groups
from gateway.core.replicas.terms import Health
from gateway.jobs.replica_watch import MODELS_EVERY_S, ReplicaWatch, misfit
from gateway.ports import ServedModel, Unanswered

SOURCE = ReplicaSource(ReplicaKind.DNS, host="tier", port="8000", refresh_s=5.0, poll_s=1.0)
GPU = Provider("gpu", Wire.OPENAI, "", "")
SMALL = Deployment("gpu/small", GPU, "small", "small", "", context_tokens=8_192, replicas=SOURCE)
A, B, C = (f"http://10.0.0.{n}:8000/v1" for n in (1, 2, 3))


class World:
    """`ports.Replicas` by script, and a clock."""

    def __init__(self, *addresses: str) -> None:
        self.now_s = 100.0
        self.found: Sequence[str] | Unanswered = addresses
        self.answers: dict[str, str | Unanswered] = {}
        self.serves: dict[str, tuple[ServedModel, ...]] = {}
        self.asked: list[str] = []
        self.models_asked: list[str] = []
        self.forgotten: list[str] = []
        self.deployments: tuple[Deployment, ...] = (SMALL,)
        self.groups = Groups()
        self._started: list[asyncio.Task[None]] = []
        self.watch = ReplicaWatch(
            self.groups,
            lambda: Catalog.of(self.deployments),
            self,
            spawn=self._spawn,
            monotonic=lambda: self.now_s,
            random=lambda: 0.5,
        )

    def _spawn(self, coro: Coroutine[Any, Any, None], name: str) -> None:
        self._started.append(asyncio.get_running_loop().create_task(coro, name=name))

    async def find(self, deployment: Deployment) -> tuple[str, ...]:
        if isinstance(self.found, Unanswered):
            raise self.found
        return tuple(self.found)

    async def metrics(self, deployment: Deployment, address: str) -> str:
        self.asked.append(address)
        answer = self.answers.get(address, "vllm:num_requests_waiting 0\n")
        if isinstance(answer, Unanswered):
            raise answer
        return answer

    async def models(self, deployment: Deployment, address: str) -> tuple[ServedModel, ...]:
        self.models_asked.append(address)
        return self.serves.get(address, (ServedModel("small", 32_768),))

    async def version(self, address: str) -> str:
        return "0.32.0"

    def forget(self, address: str) -> None:
        self.forgotten.append(address)

    async def passes(self, seconds: float) -> None:
        """Time goes by, and what is due is done."""
        self.now_s += seconds
        for _ in range(2):  # what a look-up brings is asked in the next turn
            self.watch.turn()
            started, self._started = self._started, []
            await asyncio.gather(*started)

    @property
    def group(self) -> Group:
        return self.groups.by_deployment["gpu/small"]

    def health(self) -> dict[str, Health]:
        return {shown.address: shown.health for shown in self.group.fleet.shown(self.now_s)}


async def test_all_are_found_and_asked_before_the_first_request() -> None:
    world = World(A, B)
    await world.watch.begin()
    assert world.health() == {A: Health.READY, B: Health.READY}
    assert (world.group.unfit, world.group.versions) == ({}, {A: "0.32.0", B: "0.32.0"})
    assert (world.asked, world.models_asked) == ([A, B], [A, B])


async def test_each_is_asked_at_its_pace_and_what_it_serves_once_a_minute() -> None:
    world = World(A)
    await world.watch.begin()
    for _ in range(10):
        await world.passes(0.5)
    assert world.asked == [A] * 6
    assert world.models_asked == [A]
    await world.passes(MODELS_EVERY_S)
    assert world.models_asked == [A, A]


async def test_hundreds_are_asked_less_often_each() -> None:
    world = World(*(f"http://10.0.1.{n}:8000/v1" for n in range(200)))
    await world.watch.begin()
    for _ in range(16):
        await world.passes(0.5)
    assert len(world.asked) == 400


async def test_what_comes_is_asked_before_it_is_used_and_what_goes_is_forgotten() -> None:
    world = World(A, B)
    await world.watch.begin()
    world.answers[C] = Unanswered("connection refused")  # its pod is there before its server
    world.found = (B, C)
    await world.passes(5)
    assert world.health()[A] is Health.GONE
    assert (world.group.unfit, world.group.silent) == ({C: NOT_ASKED}, {C: "connection refused"})
    assert world.forgotten == [A]
    del world.answers[C]
    await world.passes(1)
    assert (world.group.unfit, world.group.silent, world.health()[C]) == ({}, {}, Health.RETURNING)


async def test_nothing_found_keeps_the_last_ones_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    world = World(A, B)
    await world.watch.begin()
    world.found = Unanswered("DNS knows no tier")
    with caplog.at_level(logging.WARNING, "gateway"):
        for _ in range(3):
            await world.passes(5)
    assert world.health() == {A: Health.READY, B: Health.READY}
    assert world.group.problem == "DNS knows no tier"
    assert caplog.messages == ["replicas of gpu/small: DNS knows no tier; the last known ones stay"]
    world.found = (A,)
    await world.passes(5)
    assert world.group.problem == ""


async def test_who_is_away_is_left_at_once_and_who_is_slow_at_the_third_time() -> None:
    world = World(A, B)
    await world.watch.begin()
    world.answers = {A: Unanswered("connection refused"), B: Unanswered("no answer within 2 s", slow=True)}
    await world.passes(1)
    assert world.health() == {A: Health.UNREACHABLE, B: Health.READY}
    await world.passes(1)
    assert world.health()[B] is Health.READY
    await world.passes(1)
    assert world.health()[B] is Health.UNREACHABLE
    world.answers.clear()
    await world.passes(1)
    assert world.health() == {A: Health.RETURNING, B: Health.RETURNING}
    assert world.models_asked == [A, B, A, B], "another server may have come back in its place"


async def test_a_server_that_is_replaced_by_another_model_is_found_out_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = World(A, B)
    await world.watch.begin()
    world.serves[A] = (ServedModel("large", None),)
    with caplog.at_level(logging.WARNING, "gateway"):
        for _ in range(3):
            await world.passes(MODELS_EVERY_S)
    why = "it serves 'large', not 'small'"
    assert world.group.unfit == {A: why}
    assert caplog.messages == [f"gpu/small: replica {A} is not used: {why}"]


@pytest.mark.parametrize(
    ("served", "why"),
    [
        ((), "it serves no model, not 'small'"),
        ((ServedModel("other", 8_192), ServedModel("small", 8_192)), ""),
        ((ServedModel("small", None),), ""),
        ((ServedModel("small", 4_096),), "its context is 4096 tokens, not 8192"),
    ],
)
def test_what_is_a_replica(served: tuple[ServedModel, ...], why: str) -> None:
    assert misfit(SMALL, served) == why


async def test_a_reload_brings_takes_away_and_moves_deployments() -> None:
    world = World(A)
    await world.watch.begin()
    fleet = world.group.fleet
    renamed = dataclasses.replace(SMALL, upstream_model="small-2", weight=7)
    world.deployments = (renamed, dataclasses.replace(SMALL, name="gpu/two", model="two"))
    await world.passes(1)
    assert world.group.fleet is fleet, (
        "what it has learned stays while its replicas are found in the same way"
    )
    assert world.group.unfit == {A: "it serves 'small', not 'small-2'"}
    assert set(world.groups.by_deployment) == {"gpu/small", "gpu/two"}
    moved = dataclasses.replace(SMALL, replicas=dataclasses.replace(SOURCE, host="elsewhere"))
    world.deployments, world.found = (moved,), (B,)
    await world.passes(1)
    assert set(world.groups.by_deployment) == {"gpu/small"}
    assert (world.group.fleet is fleet, world.health()) == (False, {B: Health.READY})
    assert world.forgotten == [A], "when no deployment has it any more"
    world.deployments = ()
    await world.passes(1)
    assert (world.groups.by_deployment, world.forgotten) == ({}, [A, B])
