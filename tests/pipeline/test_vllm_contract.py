"""What a vLLM does that other providers do not: aborts with status 200, drains, dies; and what becomes of the money."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.core.catalog import ReplicaKind, ReplicaSource
from gateway.core.entry import Kind
from gateway.core.replicas.fleet import Fleet
from gateway.core.replicas.group import Group, Groups, policy_of
from gateway.core.usage import Quality
from gateway.demo.models import Rates
from gateway.demo.report import Comparison, LedgerLine, compare
from tests.support.fake_vllm import FakeVllm, Options
from tests.support.small_world import SmallWorld, Wire, deployment, provider

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
BILLED = Rates(3_000_000, 300_000, 3_750_000, 6_000_000, 15_000_000)  # as in `small_world.RATES`
ABORTED = (1, Kind.POST, "abort", "upstream_aborted")


@dataclass(slots=True)
class Pair:
    gw: SmallWorld
    replicas: list[FakeVllm]

    def asks(self, path: str = CHAT, text: str = "hi", **more: Any) -> asyncio.Task[tuple[int, str]]:
        body = {"model": "m", "max_tokens": 12, "messages": [{"role": "user", "content": text}], **more}
        return asyncio.create_task(self._asked(path, body))

    async def _asked(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        async with self.gw.http.post(path, json=body) as answer:
            return answer.status, await answer.text()

    async def caught(self) -> FakeVllm:
        """The replica that holds the one request that is under way."""
        tasks = {asyncio.create_task(r.engine.until(held=1)): r for r in self.replicas}
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for other in pending:
            other.cancel()
        return tasks[done.pop()]

    def hold(self, at: int) -> None:
        for replica in self.replicas:
            replica.engine.hold_at = at

    def let_go(self) -> None:
        for replica in self.replicas:
            replica.engine.let_go()

    async def against_bills(self) -> Comparison:
        await self.gw.settled()
        lines = [
            LedgerLine(
                a.attempt_id,
                o.kind.value,
                o.usage.input_uncached,
                o.usage.cache_read,
                output=o.usage.output,
                cost_nano_usd=o.cost_nano_usd,
            )
            for a, o in self.gw.ledger.entries
        ]
        return compare(lines, [line for r in self.replicas for line in r.bill])


@asynccontextmanager
async def pair(
    replicas: int = 2, timeouts: dict[str, float] | None = None, **options: Any
) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        flags = Options(model="m-2026", rates=BILLED, **options)
        servers = [await stack.enter_async_context(FakeVllm(flags)) for _ in range(replicas)]
        urls = tuple(server.base_url for server in servers)
        source = ReplicaSource(ReplicaKind.STATIC, urls=urls, exploration=0)
        own = deployment(provider("", Wire.DEMO, name="gpu", **timeouts or {}), replicas=source)
        group = Group(own.name, source, Fleet(policy_of(source)))
        group.fleet.members(urls, 0.0)
        world = SmallWorld([own], replicas=Groups({own.name: group}))
        world.ledger.remaining_nano_usd = 10**12  # under a hard budget nothing that is lost is paid for twice
        yield Pair(await stack.enter_async_context(world), servers)


def events(stream: str) -> list[str]:
    """The name or the data of each event."""
    found = []
    for text in stream.split("\n\n")[:-1]:
        name, _, rest = text.partition("\n")
        found.append(name.removeprefix("event: ") if rest else text.removeprefix("data: "))
    return found


# --- before the first byte: somebody else answers -------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_whole_answer_that_is_broken_off_is_asked_for_elsewhere_and_what_it_cost_is_booked(
    path: str,
) -> None:
    async with pair() as p:
        p.hold(3)
        asked = p.asks(path)
        await (await p.caught()).terminate()
        p.let_go()
        status, answer = await asked
        assert status == 200
        assert json.loads(answer)["usage"].get("completion_tokens", 12) == 12
        finish = "length" if path == CHAT else "max_tokens"
        assert await p.gw.settled() == [ABORTED, (2, Kind.POST, finish, "")]
        assert [o.usage.output for _, o in p.gw.ledger.entries] == [3, 12]
        assert [o.quality for _, o in p.gw.ledger.entries] == [Quality.EXACT, Quality.EXACT]
        assert (await p.against_bills()).differences == ()


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_stream_that_is_broken_off_before_its_first_token_is_asked_for_elsewhere_and_free(
    path: str,
) -> None:
    async with pair() as p:
        p.hold(0)
        asked = p.asks(path, stream=True)
        await (await p.caught()).terminate()
        p.let_go()
        status, stream = await asked
        assert (status, events(stream)[-1]) == (200, "[DONE]" if path == CHAT else "message_stop")
        finish = "length" if path == CHAT else "max_tokens"
        assert await p.gw.settled() == [
            (1, Kind.VOID, "abort", "upstream_aborted"),
            (2, Kind.POST, finish, ""),
        ]


async def test_when_nobody_else_is_left_the_client_gets_an_error_and_no_half_an_answer() -> None:
    async with pair(replicas=1) as p:
        p.hold(3)
        asked = p.asks()
        await (await p.caught()).terminate()
        status, answer = await asked
        assert (status, json.loads(answer)["error"]["code"]) == (502, "upstream_unreachable")
        assert (await p.gw.settled())[0] == ABORTED


async def test_a_drain_loses_nothing_and_doubles_nothing() -> None:
    async with pair(shutdown_timeout_s=10) as p:
        p.hold(2)
        first = p.asks(stream=True)
        draining = await p.caught()
        ending = asyncio.create_task(draining.terminate())
        later = [p.asks(text=f"{n} " * 600, stream=n % 2 == 0) for n in range(8)]
        (other,) = (r for r in p.replicas if r is not draining)
        other.engine.let_go()
        assert [status for status, _ in await asyncio.gather(*later)] == [200] * 8
        draining.engine.let_go()
        status, stream = await first
        await ending
        assert (status, events(stream)[-1]) == (200, "[DONE]")
        assert len([b for b in other.bill if b.status == 200]) == 8
        assert (await p.against_bills()).differences == ()


@pytest.mark.parametrize(
    ("path", "text", "model", "status"),
    [(CHAT, "x " * 70_000, "m", 400), (MESSAGES, "x " * 70_000, "m", 400), (CHAT, "hi", "other", 404)],
)
async def test_what_no_replica_would_answer_is_asked_of_one(
    path: str, text: str, model: str, status: int
) -> None:
    async with pair() as p:
        for replica in p.replicas:
            replica.options = Options(model="another" if model == "other" else "m-2026")
        found, _ = await p.asks(path, text=text)
        assert found == status
        assert sum(len(r.seen) for r in p.replicas) == 1
        assert await p.gw.settled() == [(1, Kind.VOID, "error", "upstream_refused")]


# --- after it: the client is told --------------------------------------------------------------------------------


async def test_a_chat_stream_that_is_broken_off_ends_with_an_error_and_its_usage_is_booked() -> None:
    async with pair() as p:
        p.hold(3)
        asked = p.asks(stream=True)
        await (await p.caught()).terminate()
        status, stream = await asked
        opening, *pieces, error = (json.loads(data) for data in events(stream))
        assert status == 200
        assert opening["choices"][0]["delta"]["role"] == "assistant"
        assert [e["choices"][0]["finish_reason"] for e in pieces] == [None] * 3
        assert error == {
            "error": {
                "message": "the model provider broke its answer off",
                "type": "server_error",
                "param": None,
                "code": "upstream_aborted",
            }
        }
        assert await p.gw.settled() == [ABORTED]
        ((_, outcome),) = p.gw.ledger.entries
        assert (outcome.usage.output, outcome.quality) == (3, Quality.EXACT)
        assert (await p.against_bills()).differences == ()


async def test_a_messages_stream_that_is_broken_off_has_no_clean_end() -> None:
    async with pair() as p:
        p.hold(3)
        asked = p.asks(MESSAGES, stream=True)
        await (await p.caught()).terminate()
        status, stream = await asked
        assert status == 200
        assert events(stream) == [
            "message_start",
            "content_block_start",
            *["content_block_delta"] * 3,
            "content_block_stop",
            "message_delta",
            "error",
        ]
        assert await p.gw.settled() == [ABORTED]
        assert (await p.against_bills()).differences == ()


async def test_sudden_death_in_the_middle_is_told_and_estimated_once() -> None:
    async with pair() as p:
        p.hold(3)
        asked = p.asks(stream=True)
        dying = await p.caught()
        await dying.restart()
        status, stream = await asked
        assert status == 200
        assert json.loads(events(stream)[-1])["error"]["code"] == "upstream_lost"
        assert "[DONE]" not in stream
        assert await p.gw.settled() == [(1, Kind.POST, "upstream_cut", "upstream_lost")]
        ((_, outcome),) = p.gw.ledger.entries
        assert (outcome.usage.output, outcome.quality) == (3, Quality.ESTIMATED)
        p.let_go()
        assert (await p.asks(stream=True))[0] == 200


# --- usage and comments --------------------------------------------------------------------------------------------


async def test_messages_are_billed_by_their_last_usage_which_takes_apart_what_was_cached() -> None:
    async with pair(replicas=1) as p:
        text = "Keep answers short. " * 100
        for stream in (False, True, True):
            assert (await p.asks(MESSAGES, text=text, stream=stream))[0] == 200
        await p.gw.settled()
        read = [(o.usage.input_uncached, o.usage.cache_read) for _, o in p.gw.ledger.entries]
        assert read == [(506, 0), (26, 480), (26, 480)]
        assert (await p.against_bills()).differences == ()


async def test_chat_is_billed_by_the_usage_that_the_client_did_not_ask_for() -> None:
    async with pair(replicas=1) as p:
        text = "Keep answers short. " * 100
        _, stream = await p.asks(text=text, stream=True)
        _, again = await p.asks(text=text, stream=True)
        assert "usage" not in stream + again
        assert (await p.against_bills()).differences == ()
        assert [o.usage.cache_read for _, o in p.gw.ledger.entries] == [0, 480]


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("idle_s", [0.3, 30.0])
async def test_a_replica_that_only_keeps_the_stream_alive_is_left_at_the_first_event_limit(
    path: str, idle_s: float
) -> None:
    """Whether comments come (every 5 ms) or nothing: the limit is on what is said, and another replica answers."""
    every_s = 0.005 if idle_s == 0.3 else None
    limits = {"first_event_timeout_s": 0.4, "idle_timeout_s": idle_s}
    async with pair(keep_alive_s=every_s, timeouts=limits) as p:
        p.hold(0)
        asked = p.asks(path, stream=True)
        stuck = await p.caught()
        next(r for r in p.replicas if r is not stuck).engine.let_go()
        status, stream = await asked
        assert (status, stream.count(" 007")) == (200, 1)
        finish = "length" if path == CHAT else "max_tokens"
        lost, served = await p.gw.settled()
        assert (lost, served) == (
            (1, Kind.VOID, "error", "upstream_timeout"),
            (2, Kind.POST, finish, ""),
        )
        p.let_go()


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_stream_that_goes_on_with_comments_alone_ends_with_an_error_at_the_limit_between_events(
    path: str,
) -> None:
    limits = {"event_idle_timeout_s": 0.2, "idle_timeout_s": 30.0}
    async with pair(replicas=1, keep_alive_s=0.005, timeouts=limits) as p:
        p.hold(3)
        status, stream = await p.asks(path, stream=True)
        said = [event for event in events(stream) if not event.startswith(":")]
        assert (status, "upstream_timeout" in said[-1] or said[-1] == "error") == (200, True)
        assert [(k, f, e) for _, k, f, e in await p.gw.settled()] == [
            (Kind.POST, "upstream_cut", "upstream_timeout")
        ]
        assert p.replicas[0].comments >= 3
        p.let_go()


async def test_comments_of_a_queue_that_is_long_reach_no_client_as_a_first_byte_and_break_nothing() -> None:
    async with pair(replicas=1, keep_alive_s=0.005) as p:
        p.hold(0)
        asked = p.asks(stream=True)
        await p.caught()
        await p.replicas[0].commented(3)
        p.let_go()
        status, stream = await asked
        data = [event for event in events(stream) if not event.startswith(":")]
        assert (status, data[-1], len(data)) == (200, "[DONE]", 14)
        assert await p.gw.settled() == [(1, Kind.POST, "length", "")]
