"""An agent in circles is told of, and stopped where that was configured, before it costs another call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from gateway.core.breakers import BreakerPolicy
from gateway.core.catalog import Tier, Wire
from gateway.core.entry import Amounts, Attempt, Granted, Refused
from gateway.core.rules import RuleText
from tests.support.recorder import Recorder, Script
from tests.support.small_world import KEY_ID, MemoryLedger, SmallWorld, deployment, provider
from tests.support.stepper import Stepper

RUN = "/t/run-7/v1"
JSON = dict[str, Any]


def chat(turns: int, tool: str = "read_file", said: str = "") -> JSON:
    """A request of an agent that has made the same call `turns` times, and what a person has `said` after it."""
    messages: list[JSON] = [{"role": "user", "content": "fix it"}]
    for i in range(turns):
        call = {
            "id": f"c{i}",
            "type": "function",
            "function": {"name": tool, "arguments": '{"path": "a.py"}'},
        }
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": "x = 1"})
    if said:
        messages.append({"role": "user", "content": said})
    return {"model": "m", "messages": messages}


def responses(turns: int) -> JSON:
    items: list[JSON] = [{"type": "message", "role": "user", "content": "fix it"}]
    for i in range(turns):
        call = {
            "type": "function_call",
            "call_id": f"c{i}",
            "name": "read_file",
            "arguments": '{"path": "a.py"}',
        }
        items += [call, {"type": "function_call_output", "call_id": f"c{i}", "output": "x = 1"}]
    return {"model": "m", "input": items}


def messages(turns: int) -> JSON:
    said: list[JSON] = [{"role": "user", "content": "fix it"}]
    for i in range(turns):
        use = {"type": "tool_use", "id": f"c{i}", "name": "read_file", "input": {"path": "a.py"}}
        result = {"type": "tool_result", "tool_use_id": f"c{i}", "content": "x = 1"}
        said += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return {"model": "m", "max_tokens": 100, "messages": said}


@asynccontextmanager
async def world(wire: Wire = Wire.OPENAI, **changes: object) -> AsyncIterator[tuple[Recorder, SmallWorld]]:
    """A gateway whose breakers are changed as told."""
    async with Recorder() as upstream:
        at = provider(upstream.base_url, wire)
        async with SmallWorld([deployment(at)], breakers=BreakerPolicy().changed(changes)) as gw:
            yield upstream, gw


async def post(gw: SmallWorld, path: str, body: JSON) -> tuple[int, dict[str, str], JSON]:
    async with gw.http.post(path, json=body) as answer:
        headers = {name.lower(): value for name, value in answer.headers.items()}
        return answer.status, headers, json.loads(await answer.read())


WHY = (
    "the breaker loop stopped this task: this task has called read_file 6 times in a row with the same arguments "
    "and the same result. To go on, say something new to the model, have the task resumed, or start a new one; the "
    "gateway's operator can change breakers.loop."
)


@pytest.mark.parametrize(
    ("wire", "address", "asks", "status", "error"),
    [
        (Wire.OPENAI, "/chat/completions", chat, 402, {"type": "invalid_request_error", "param": None}),
        (Wire.OPENAI, "/responses", responses, 400, {"type": "invalid_request_error", "param": None}),
        (Wire.ANTHROPIC, "/messages", messages, 402, {"type": "billing_error"}),
    ],
)
async def test_a_loop_is_stopped_at_its_sixth_turn_without_another_call(
    wire: Wire, address: str, asks: Callable[[int], JSON], status: int, error: JSON
) -> None:
    async with world(wire, loop="stop") as (upstream, gw):
        for turns in range(6):
            assert (await post(gw, RUN + address, asks(turns)))[0] == 200
        for _ in range(2):
            got, headers, body = await post(gw, RUN + address, asks(6))
            assert (got, headers["x-should-retry"]) == (status, "false")
            assert body["error"] == {**error, "code": "task_stopped", "message": WHY}
        assert len(upstream.received) == 6
        assert len(await gw.settled()) == 6
        assert gw.ledger.holds == {}
        assert [done.error for done in gw.done[-2:]] == ["task_stopped"] * 2
        assert [(kind, body["action"], body["pauses_task"]) for kind, _, body in gw.alerts] == [
            ("breaker_warning", "alert", False),
            ("breaker_tripped", "stop", True),
        ]


async def test_by_default_a_loop_is_told_of_once_and_goes_on() -> None:
    async with world() as (upstream, gw):
        for turns in range(9):
            assert (await post(gw, f"{RUN}/chat/completions", chat(turns)))[0] == 200
        assert len(upstream.received) == 9
        (_, early, _), (kind, dedupe, body) = gw.alerts
        evidence = body["evidence"]
        assert isinstance(evidence, dict)
        assert (kind, body["breaker"], body["action"], body["key_id"]) == (
            "breaker_tripped",
            "loop",
            "alert",
            KEY_ID,
        )
        assert (evidence["turns"], evidence["tools"]) == (6, "read_file")
        assert dedupe.startswith(f"{body['task_id']}/loop/trip/")
        assert early.startswith(f"{body['task_id']}/loop/warn/")


async def test_a_tool_that_waits_is_no_loop() -> None:
    async with world(loop="stop") as (upstream, gw):
        for turns in range(9):
            assert (await post(gw, f"{RUN}/chat/completions", chat(turns, "wait_for")))[0] == 200
        assert len(upstream.received) == 9
        assert gw.alerts == []


async def test_a_stopped_task_goes_on_when_somebody_says_something_new() -> None:
    async with world(loop="stop") as (upstream, gw):
        for turns in range(6):
            await post(gw, f"{RUN}/chat/completions", chat(turns))
        assert (await post(gw, f"{RUN}/chat/completions", chat(6)))[0] == 402
        assert (await post(gw, f"{RUN}/chat/completions", chat(6, said="stop reading it")))[0] == 200
        assert len(upstream.received) == 7


async def test_rules_may_ask_how_often_a_turn_came_in_a_row() -> None:
    async with Recorder() as upstream:
        at = provider(upstream.base_url)
        offers = [deployment(at), deployment(at, "small", tier=Tier.SMALL)]
        circles = RuleText("circles", "task.repeats >= 3", Tier.SMALL)
        async with SmallWorld(offers, rules=[circles]) as gw:
            tiers = [
                (await post(gw, f"{RUN}/chat/completions", {**chat(turns), "model": "auto"}))[1]["x-tier"]
                for turns in range(5)
            ]
        assert tiers == ["standard", "standard", "standard", "small", "small"]


async def test_a_task_has_no_more_calls_under_way_than_it_may() -> None:
    policy = BreakerPolicy().changed({"fan_out": {"mode": "stop", "concurrent": 1}})
    async with (
        Stepper() as upstream,
        SmallWorld([deployment(provider(upstream.base_url))], breakers=policy) as gw,
        asyncio.timeout(20),
    ):
        for _ in range(2):  # the second time the first has ended
            first = asyncio.ensure_future(post(gw, f"{RUN}/chat/completions", chat(0)))
            asked = await upstream.asked()
            status, headers, body = await post(gw, f"{RUN}/chat/completions", chat(1))
            assert (status, headers["retry-after"]) == (429, "1")
            assert "1 model calls under way" in body["error"]["message"]
            asked.send(b'{"id":"c","choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1}}')
            asked.end()
            assert (await first)[0] == 200


async def test_every_attempt_that_began_has_ended_once() -> None:
    async with world() as (upstream, gw):
        upstream.scripts = [Script(500, [b'{"error": {"message": "down"}}']), Script(200, [b"{"], abort=True)]
        assert (await post(gw, f"{RUN}/chat/completions", chat(0)))[0] == 200
        async with gw.http.post(f"{RUN}/chat/completions", json={**chat(1), "stream": True}) as answer:
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        assert len(await gw.settled()) == 4
        task_id = gw.ledger.entries[0][0].task_id
        state = gw.world.watch.state(task_id)
        assert state is not None
        assert gw.world.watch.running(task_id) == 0
        assert (state.upstream.results, state.upstream.bits) == (4, 0b1100)
        assert sum(cost for _, cost in state.spend.recent) == sum(
            outcome.cost_nano_usd for _, outcome in gw.ledger.entries
        )


async def test_a_task_whose_model_calls_keep_failing_waits_for_a_probe() -> None:
    async with world(upstream_errors={"mode": "stop", "in_row": 3}) as (upstream, gw):
        upstream.scripts = [Script(400, [b'{"error": {"message": "the caller\'s own fault"}}'])] * 3
        for n in range(3):
            assert (await post(gw, f"{RUN}/chat/completions", chat(n)))[0] == 400
        upstream.scripts = [Script(500, [b'{"error": {"message": "down"}}'])] * 3
        assert (await post(gw, f"{RUN}/chat/completions", chat(3)))[0] == 502
        assert len(upstream.received) == 6
        status, headers, body = await post(gw, f"{RUN}/chat/completions", chat(3))
        assert (status, headers["retry-after"], body["error"]["code"]) == (429, "30", "rate_limit_exceeded")
        assert len(upstream.received) == 6


async def test_a_key_that_retries_more_than_it_works_is_slowed_down() -> None:
    async with world(retries="stop") as (upstream, gw):
        for n in range(49):
            body = {"model": "m", "messages": [{"role": "user", "content": f"{n}"}]}
            headers = {"x-stainless-retry-count": "1" if n < 10 else "0"}
            async with gw.http.post("/v1/chat/completions", json=body, headers=headers) as answer:
                assert answer.status == 200
        last = await post(gw, "/v1/chat/completions", body)
        assert (last[0], last[1]["retry-after"]) == (429, "60")
        assert len(upstream.received) == 49
        assert [(kind, dedupe.split("/")[:2]) for kind, dedupe, _ in gw.alerts] == [
            ("breaker_tripped", [KEY_ID, "retries"])
        ]


class Paused(MemoryLedger):
    """A ledger whose task a breaker has paused, until `go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = True
        self.asked: list[str] = []

    async def reserve(
        self,
        attempt: Attempt,
        scopes: Sequence[str],
        ask: Amounts,
        least: Amounts,
        *,
        landing: bool = False,
    ) -> Granted | Refused:
        self.refuse = Refused(scopes[-1], 0, 0, 0, None, state="paused_loop") if self.paused else None
        return await super().reserve(attempt, scopes, ask, least, landing=landing)

    async def go_on(self, task_id: str, reason: str) -> bool:
        self.asked.append(reason)
        self.paused = False
        return True


async def test_a_paused_task_goes_on_when_somebody_speaks_to_the_model_and_not_before() -> None:
    async with Recorder() as upstream:
        ledger = Paused()
        at = deployment(provider(upstream.base_url))
        async with SmallWorld([at], ledger=ledger, go_on=ledger.go_on) as gw:
            assert (await post(gw, f"{RUN}/chat/completions", chat(7)))[0] == 402
            assert (await post(gw, f"{RUN}/chat/completions", chat(0)))[0] == 402, "nothing new was said"
            assert (await post(gw, f"{RUN}/chat/completions", chat(7, said="try b.py")))[0] == 200
            assert (await post(gw, f"{RUN}/chat/completions", chat(8)))[0] == 200
    assert ledger.asked == ["somebody has spoken to the model"]


class Old(MemoryLedger):
    """A ledger that knows that the task began an hour ago."""

    async def reserve(
        self,
        attempt: Attempt,
        scopes: Sequence[str],
        ask: Amounts,
        least: Amounts,
        *,
        landing: bool = False,
    ) -> Granted | Refused:
        granted = await super().reserve(attempt, scopes, ask, least, landing=landing)
        assert isinstance(granted, Granted)
        return msgspec.structs.replace(granted, task_began_ms=attempt.started_at_ms - 3_600_000)


async def test_a_process_that_has_just_started_learns_from_the_ledger_how_old_a_task_is() -> None:
    async with Recorder() as upstream:
        at = deployment(provider(upstream.base_url))
        capped = BreakerPolicy().changed({"wall_clock": {"mode": "stop", "most_s": 600}})
        async with SmallWorld([at], ledger=Old(), breakers=capped) as gw:
            assert (await post(gw, f"{RUN}/chat/completions", chat(1)))[0] == 200
            status, _, body = await post(gw, f"{RUN}/chat/completions", chat(2))
    assert status == 402
    assert "this task is 3600 seconds old, and its limit is 600" in body["error"]["message"]
