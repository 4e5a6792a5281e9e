"""What goes wrong must reach the caller of a library as the right exception, after the right number of requests.

The libraries run with their own defaults: two retries of what they think worth it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from gateway.core.entry import Kind, Refused
from gateway.demo.faults import Fault, FaultKind, FaultPlan
from gateway.demo.provider import DemoProvider
from tests.clients.conftest import CLAUDE, GPT
from tests.support.small_world import KEY, KEY_ID, RateLimit, SmallWorld, key_record

HELLO: Any = [{"role": "user", "content": "Say hello."}]
#: (client, stream) -> a call in one of the dialects
Call = Callable[[Any, bool], Awaitable[Any]]


async def chat(client: Any, stream: bool, model: str = GPT) -> Any:
    return await client.chat.completions.create(model=model, messages=HELLO, stream=stream)


async def responses(client: Any, stream: bool, model: str = GPT) -> Any:
    return await client.responses.create(model=model, input="Say hello.", stream=stream)


async def messages(client: Any, stream: bool, model: str = CLAUDE) -> Any:
    return await client.messages.create(model=model, max_tokens=500, messages=HELLO, stream=stream)


def served(gw: SmallWorld) -> list[int]:
    """The status of every request that reached the gateway."""
    return [done.status for done in gw.done]


@pytest.fixture(params=[False, True], ids=["plain", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def test_a_used_up_budget_is_refused_once_and_spends_nothing(
    gpt: openai.AsyncOpenAI,
    claude: anthropic.AsyncAnthropic,
    gw: SmallWorld,
    demo: DemoProvider,
    stream: bool,
) -> None:
    gw.ledger.refuse = Refused("task:t1", 2_000_000_000, 1_900_000_000, 0, None)
    says = (
        r"the budget of the task t1 has too little left for this request: \$1\.9 spent and \$0 reserved of \$2; "
        r"this request may cost up to \$0\.\d+\. Ask its owner to raise it \(POST /v1/tasks/t1/budgets\), or start a new task\."
    )
    with pytest.raises(openai.APIStatusError, match=says) as by_chat:
        await chat(gpt, stream)
    with pytest.raises(openai.BadRequestError, match=says) as by_responses:
        await responses(gpt, stream)
    with pytest.raises(anthropic.APIStatusError, match=says) as by_messages:
        await messages(claude, stream)
    assert [(e.value.status_code, e.value.code, e.value.type) for e in (by_chat, by_responses)] == [
        (402, "budget_exceeded", "invalid_request_error"),
        (400, "budget_exceeded", "invalid_request_error"),
    ]
    body: Any = by_messages.value.body
    assert (by_messages.value.status_code, body["error"]["type"]) == (402, "billing_error")
    for error in (by_chat, by_responses, by_messages):
        assert error.value.response.headers["x-budget-remaining-usd"] == "0.1"
    assert (served(gw), demo.received) == ([402, 400, 402], 0)


async def test_a_wrong_key_is_refused_once(gw: SmallWorld, stream: bool) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{gw.url}/v1", api_key="sk-of-somebody") as gpt,
        anthropic.AsyncAnthropic(base_url=gw.url, api_key="sk-of-somebody") as claude,
    ):
        says = "this is not a gateway key; gateway keys begin with 'gw-'"
        with pytest.raises(openai.AuthenticationError, match=says) as by_chat:
            await chat(gpt, stream)
        with pytest.raises(openai.AuthenticationError, match=says):
            await responses(gpt, stream)
        with pytest.raises(anthropic.AuthenticationError, match=says) as by_messages:
            await messages(claude, stream)
    body: Any = by_messages.value.body
    assert (by_chat.value.code, body["error"]["type"]) == ("invalid_api_key", "authentication_error")
    assert served(gw) == [401, 401, 401]


async def test_an_unknown_model_is_refused_once(
    gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, gw: SmallWorld, stream: bool
) -> None:
    with pytest.raises(
        openai.NotFoundError, match=r"'gpt-55' does not exist .* Did you mean 'gpt-5'\?"
    ) as by_chat:
        await chat(gpt, stream, "gpt-55")
    with pytest.raises(anthropic.NotFoundError, match="'claude-9' does not exist"):
        await messages(claude, stream, "claude-9")
    assert (by_chat.value.code, by_chat.value.param) == ("model_not_found", "model")
    assert served(gw) == [404, 404]


async def test_a_bad_field_is_named_and_refused_once(gpt: openai.AsyncOpenAI, gw: SmallWorld) -> None:
    bad: Any = "many"
    with pytest.raises(openai.BadRequestError) as refused:
        await gpt.chat.completions.create(model=GPT, messages=HELLO, max_tokens=bad)
    assert (refused.value.param, served(gw)) == ("max_tokens", [400])


@pytest.mark.parametrize("dialect", ["chat", "messages"])
async def test_a_rate_limit_is_waited_out(demo: DemoProvider, dialect: str, gw: SmallWorld) -> None:
    """120 a minute, used up: the next fits after half a second, and Retry-After says one.

    A library that did not obey would be back within half a second, in vain.
    """
    async with SmallWorld(gw.deployments, key_record(limit=RateLimit(requests_per_min=120))) as limited:
        used_up = [(f"key:{KEY_ID}:requests", 120, 120)]
        assert await limited.world.limits.take(used_up, limited.world.clock.now_ms()) is None
        began_s = time.monotonic()
        async with (
            openai.AsyncOpenAI(base_url=f"{limited.url}/v1", api_key=KEY) as gpt,
            anthropic.AsyncAnthropic(base_url=limited.url, api_key=KEY) as claude,
        ):
            await (chat(gpt, False) if dialect == "chat" else messages(claude, False))
        waited_s = time.monotonic() - began_s
        assert (served(limited), waited_s >= 1.0, demo.received) == ([429, 200], True, 1)


def broken(kind: FaultKind) -> FaultPlan:
    return FaultPlan((Fault(kind, after_events=3),))


async def read(stream: AsyncIterator[Any], events: list[Any]) -> None:
    async for event in stream:
        events.append(event)


@pytest.mark.parametrize(
    ("kind", "says", "errors"),
    [
        (
            FaultKind.ERROR_EVENT,
            "injected stream error",
            ["upstream_error", "upstream_overloaded", "upstream_error"],
        ),
        (FaultKind.CUT, "cut the connection in the middle of its answer", ["upstream_lost"] * 3),
    ],
)
async def test_a_stream_that_breaks_raises_after_what_came_through(
    gpt: openai.AsyncOpenAI,
    claude: anthropic.AsyncAnthropic,
    gw: SmallWorld,
    demo: DemoProvider,
    kind: FaultKind,
    says: str,
    errors: list[str],
) -> None:
    """Never a clean end, and no second request that would be paid twice."""
    events: list[Any] = []
    demo.set_faults(broken(kind))
    with pytest.raises(openai.APIError, match=says):
        await read(await chat(gpt, True), events)
    assert [c.choices[0].delta.content for c in events if c.choices[0].delta.content] == ["[", "demo", "]"]
    assert [c.choices[0].finish_reason for c in events] == [None] * len(events)

    events.clear()
    demo.set_faults(broken(kind))
    with pytest.raises(anthropic.APIError, match=says):
        await read(await messages(claude, True), events)
    assert [e.delta.text for e in events if e.type == "content_block_delta"] == ["[", "demo", "]"]
    assert "message_stop" not in {e.type for e in events}

    events.clear()
    demo.set_faults(broken(kind))
    await read(
        await responses(gpt, True), events
    )  # this dialect's errors are events, which the library hands on
    assert [e.delta for e in events if e.type == "response.output_text.delta"] == ["[", "demo", "]"]
    assert (events[-1].type, "response.completed" in {e.type for e in events}) == ("error", False)

    assert (served(gw), demo.received) == ([200, 200, 200], 3)
    await gw.settled()
    assert [(o.kind, o.error) for _, o in gw.ledger.entries] == [(Kind.POST, error) for error in errors]


async def test_an_upstream_that_stays_broken_is_an_error_of_the_gateway(
    gpt: openai.AsyncOpenAI, gw: SmallWorld, demo: DemoProvider
) -> None:
    """A provider that refuses the gateway's own key must not look as if the caller's were wrong."""
    demo.set_faults(FaultPlan((Fault(FaultKind.REFUSE, 401),) * 3))
    with pytest.raises(openai.InternalServerError) as failed:
        await chat(gpt.with_options(max_retries=0), False)
    assert (failed.value.status_code, failed.value.code) == (502, "upstream_auth")
    assert served(gw) == [502]
