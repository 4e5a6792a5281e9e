"""A deployment with several replicas: which one is asked, and what becomes of a request whose replica fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from gateway.core.catalog import Deployment, ReplicaKind, ReplicaSource
from gateway.core.entry import Kind
from gateway.core.health import Status
from gateway.core.replicas.fleet import Fleet
from gateway.core.replicas.group import Group, Groups, policy_of, short_name
from gateway.core.replicas.terms import Health
from gateway.core.retries import RetryBudget
from tests.support.recorder import Recorder, Script, chat_chunks, sse
from tests.support.small_world import SmallWorld, deployment, provider

CHAT = "/v1/chat/completions"
EVENTS = {"Content-Type": "text/event-stream"}


def asks(text: str = "hi", stream: bool = False, **more: object) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps(
        {"model": "m", "max_tokens": 100, "stream": stream, "messages": messages, **more}
    ).encode()


def says(status: int, message: str, kind: str = "Internal Server Error") -> Script:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return Script(status, [json.dumps({"error": error}).encode()])


DRAINING = says(500, "cannot schedule new futures after shutdown")
FULL = says(503, "queue is full", "Service Unavailable")


@dataclass(slots=True)
class Tier:
    """Three replicas that serve what the recorder serves, in front of a gateway."""

    gw: SmallWorld
    replicas: list[Recorder]
    group: Group

    def of(self, name: str) -> Recorder:
        """The replica that an answer's x-replica names."""
        return next(r for r in self.replicas if short_name(r.base_url) == name)

    def health(self) -> dict[str, Health]:
        shown = self.group.fleet.shown(self.gw.world.clock.monotonic())
        return {short_name(r.address): r.health for r in shown}

    @property
    def received(self) -> list[int]:
        return [len(replica.received) for replica in self.replicas]

    def scripted(self, script: Script) -> None:
        for replica in self.replicas:
            replica.scripts = [script]


@asynccontextmanager
async def tier(others: Sequence[Deployment] = (), retries: RetryBudget | None = None) -> AsyncIterator[Tier]:
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(Recorder()) for _ in range(3)]
        urls = tuple(r.base_url for r in replicas)
        source = ReplicaSource(ReplicaKind.STATIC, urls=urls, exploration=0)
        own = deployment(provider("", name="gpu"), replicas=source)
        group = Group(own.name, source, Fleet(policy_of(source)))
        group.fleet.members(urls, 0.0)
        world = SmallWorld([own, *others], replicas=Groups({own.name: group}))
        if retries is not None:
            world.retries = retries
        gw = await stack.enter_async_context(world)
        yield Tier(gw, replicas, group)


async def test_a_conversation_stays_where_its_prefix_is_and_others_spread() -> None:
    async with tier() as t:
        histories = {name: [{"role": "user", "content": f"{name} " * 2_000}] for name in "abc"}
        served: dict[str, list[str]] = {name: [] for name in "abc"}
        for _ in range(4):
            for name, messages in histories.items():
                body = json.dumps({"model": "m", "max_tokens": 100, "messages": messages}).encode()
                async with t.gw.http.post(CHAT, data=body, headers={"X-Session-ID": name}) as answer:
                    assert answer.status == 200
                    served[name].append(answer.headers["x-replica"])
                messages += [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "go on"}]
        assert [len(set(names)) for names in served.values()] == [1, 1, 1]
        assert len({names[0] for names in served.values()}) == 3
        assert sorted(t.received) == [4, 4, 4]
        await t.gw.settled()
        _, outcome = t.gw.ledger.entries[0]
        assert (outcome.served_by, outcome.note) == (served["a"][0], "")


async def test_no_header_of_a_client_picks_a_replica_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with tier() as t:
        for name in ("x-replica", "x-data-parallel-rank", "x-vllm-priority"):
            names = set()
            for i in range(3):
                headers = {name: short_name(t.replicas[0].base_url), "X-Session-ID": f"{name} {i}"}
                text = f"{name} {i} " * 500
                async with t.gw.http.post(CHAT, data=asks(text), headers=headers) as answer:
                    names.add(answer.headers["x-replica"])
            assert len(names) == 3, name
        assert not any(
            {"x-replica", "x-data-parallel-rank", "x-vllm-priority"} & r.headers.keys()
            for replica in t.replicas
            for r in replica.received
        )
        said = [m.partition("the header ")[2].partition(";")[0] for m in caplog.messages if "the header" in m]
        assert said == ["x-replica", "x-data-parallel-rank", "x-vllm-priority"]


@pytest.mark.parametrize(
    ("name", "script", "error", "left"),
    [
        ("draining", DRAINING, "upstream_error", Health.COOLING),
        ("full", FULL, "upstream_overloaded", Health.COOLING),
        ("a proxy's page", Script(502, [b"<html>"]), "upstream_error", Health.COOLING),
        ("cut", Script(200, [b'{"id":'], abort=True), "upstream_lost", Health.COOLING),
        ("no event", Script(200, [b": keep-alive\n\n"], EVENTS, abort=True), "upstream_lost", Health.COOLING),
    ],
)
async def test_a_replica_that_fails_before_its_first_byte_is_left_at_once(
    name: str, script: Script, error: str, left: Health
) -> None:
    async with tier() as t:
        t.gw.ledger.remaining_nano_usd = 10**12  # a hard budget: nothing is paid for twice
        t.replicas[0].scripts = [script]
        for i in range(6):
            async with t.gw.http.post(CHAT, data=asks(f"{i} " * 999, stream=name == "no event")) as answer:
                assert (answer.status, await answer.read() != b"") == (200, True)
        lines = await t.gw.settled()
        assert [line for line in lines if line[1] is not Kind.POST] == [(1, Kind.VOID, "error", error)]
        assert len(lines) == 7, "one entry for each attempt"
        assert len(t.replicas[0].received) == 1
        assert t.health()[short_name(t.replicas[0].base_url)] is left
        assert t.gw.world.health == {}, "the deployment as a whole is well"


async def test_nobody_listens_at_one_of_three() -> None:
    async with tier() as t:
        await t.replicas[0].__aexit__(None, None, None)
        for i in range(6):
            async with t.gw.http.post(CHAT, data=asks(f"{i} " * 999)) as answer:
                assert answer.status == 200
        lines = await t.gw.settled()
        assert [line for line in lines if line[1] is not Kind.POST] == [
            (1, Kind.VOID, "error", "upstream_unreachable")
        ]
        assert t.health()[short_name(t.replicas[0].base_url)] is Health.UNREACHABLE
        assert t.gw.world.health == {}


async def test_a_burst_on_a_replica_that_dies_needs_no_retry_budget() -> None:
    empty = RetryBudget()
    while empty.take("gpu", 0.0):
        pass
    async with tier(retries=empty) as t:
        t.replicas[0].scripts = [Script(200, [b'{"id":'], abort=True)] * 40

        async def ask(i: int) -> int:
            async with t.gw.http.post(CHAT, data=asks(f"{i} " * 999)) as answer:
                return answer.status

        assert await asyncio.gather(*map(ask, range(40))) == [200] * 40
        assert len(t.replicas[0].received) > 1
        assert t.gw.world.retries.refused == 1, "that of emptying it"


async def test_a_request_that_kills_replicas_kills_no_third_one_without_budget() -> None:
    empty = RetryBudget(grows_back_s=1e9)
    while empty.take("gpu", 0.0):
        pass
    async with tier(retries=empty) as t:
        t.scripted(Script(200, [b'{"id":'], abort=True))
        async with t.gw.http.post(CHAT, data=asks()) as answer:
            assert answer.status == 502
        assert sorted(t.received) == [0, 1, 1]


async def test_what_is_wrong_with_the_request_is_no_fault_of_the_replica() -> None:
    async with tier() as t:
        t.scripted(says(400, "bad", "BadRequestError"))
        async with t.gw.http.post(CHAT, data=asks()) as answer:
            assert answer.status == 400
        assert await t.gw.settled() == [(1, Kind.VOID, "error", "upstream_refused")]
        assert set(t.health().values()) == {Health.READY}


async def test_a_stream_that_had_begun_ends_with_an_error_event_and_is_settled() -> None:
    async with tier() as t:
        t.scripted(Script(200, [sse(*chat_chunks(usage=False)[:2])], EVENTS, abort=True))
        async with t.gw.http.post(CHAT, data=asks(stream=True)) as answer:
            text = await answer.text()
            served = answer.headers["x-replica"]
        assert '"Hel"' in text
        assert "upstream_lost" in text
        assert await t.gw.settled() == [(1, Kind.POST, "upstream_cut", "upstream_lost")]
        assert sum(t.received) == 1
        assert t.health()[served] is Health.COOLING
        _, outcome = t.gw.ledger.entries[0]
        assert outcome.served_by == served
        assert outcome.note.startswith("usage missing")


async def test_when_all_replicas_fail_the_next_deployment_is_asked_and_the_tier_rests() -> None:
    async with Recorder() as hosted:
        other = deployment(provider(hosted.base_url, name="api"), priority=1)
        async with tier([other]) as t:
            for replica in t.replicas:
                await replica.__aexit__(None, None, None)
            for i in range(6):
                async with t.gw.http.post(CHAT, data=asks(f"{i}")) as answer:
                    assert (answer.status, answer.headers["x-deployment"]) == (200, "api/m"), i
                    assert "x-replica" not in answer.headers
            now_s = t.gw.world.clock.monotonic()
            assert t.gw.world.health["gpu/m"].status(now_s) is Status.OPEN


async def test_what_is_no_replica_of_the_deployment_is_never_asked() -> None:
    async with tier() as t:
        wrong = t.replicas[0].base_url
        t.group.unfit[wrong] = "it serves 'other', not 'm-2026'"
        for i in range(6):
            async with t.gw.http.post(CHAT, data=asks(f"{i} " * 999)) as answer:
                assert answer.status == 200
        assert t.received[0] == 0
        t.group.unfit.update((r.base_url, "the same") for r in t.replicas)
        async with t.gw.http.post(CHAT, data=asks("once more")) as answer:
            assert answer.status == 502
            assert "no replica of gpu/m can be used" in (await answer.json())["error"]["message"]


async def test_cached_tokens_are_learned_from_only_if_the_tier_tells_any() -> None:
    async with tier() as t:
        quiet = {"prompt_tokens": 3_000, "completion_tokens": 5, "prompt_tokens_details": None}
        doc = {"id": "c", "object": "chat.completion", "model": "m", "usage": quiet,
               "choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}]}  # fmt: skip
        for replica in t.replicas:
            replica.scripts = [Script(200, [json.dumps(doc).encode()])] * 3
        names = set()
        for _ in range(3):
            async with t.gw.http.post(CHAT, data=asks("same " * 3_000)) as answer:
                names.add(answer.headers["x-replica"])
        assert len(names) == 1, "a tier that reports nothing is not taken for one that caches nothing"
        (served,) = (r for r in t.group.fleet.shown(0.0) if r.prompt_tokens)
        assert (served.prompt_tokens, served.reported_cached_tokens, served.predictions) == (9_000, 0, 0)
