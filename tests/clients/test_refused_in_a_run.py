"""An agent whose budget is used up in the middle of its run: one refusal, no repetition, nothing sent on.

`make refusals` does the same with the command line agents and frameworks themselves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from gateway.core.entry import Unit
from gateway.storage.accounts import Accounts
from tests.clients.test_sdks import CHAT_TOOLS, MESSAGES_TOOLS
from tests.support.running import Running, running

STEPS = 3
ASK: Any = {"role": "user", "content": "Fix the build. demo:tools=9"}


async def chat(gpt: openai.AsyncOpenAI, stream: bool) -> None:
    history: list[Any] = [ASK]
    while True:
        if stream:
            async with gpt.chat.completions.stream(
                model="demo-fast", messages=history, tools=CHAT_TOOLS
            ) as events:
                answer: Any = await events.get_final_completion()
        else:
            answer = await gpt.chat.completions.create(model="demo-fast", messages=history, tools=CHAT_TOOLS)
        said = answer.choices[0].message
        history += [
            said.to_dict(),
            {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "ok"},
        ]


async def responses(gpt: openai.AsyncOpenAI, stream: bool) -> None:
    tools: Any = [{"type": "function", "strict": False, **CHAT_TOOLS[0]["function"]}]
    history: list[Any] = [ASK]
    while True:
        if stream:
            async with gpt.responses.stream(model="demo-fast", input=history, tools=tools) as events:
                answer: Any = await events.get_final_response()
        else:
            answer = await gpt.responses.create(model="demo-fast", input=history, tools=tools)
        [call] = answer.output
        history += [
            {
                "type": "function_call",
                "call_id": call.call_id,
                "name": call.name,
                "arguments": call.arguments,
            },
            {"type": "function_call_output", "call_id": call.call_id, "output": "ok"},
        ]


async def messages(claude: anthropic.AsyncAnthropic, stream: bool) -> None:
    history: list[Any] = [ASK]
    ask: Any = {"model": "demo-large", "max_tokens": 500, "messages": history, "tools": MESSAGES_TOOLS}
    while True:
        if stream:
            async with claude.messages.stream(**ask) as events:
                answer: Any = await events.get_final_message()
        else:
            answer = await claude.messages.create(**ask)
        [call] = answer.content
        history += [
            {"role": "assistant", "content": [call.to_dict()]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "ok"}],
            },
        ]


def client_of(gw: Running, run: Callable[..., Awaitable[None]]) -> Any:
    if run is messages:
        return anthropic.AsyncAnthropic(base_url=gw.url, api_key=gw.key)
    return openai.AsyncOpenAI(base_url=f"{gw.url}/v1", api_key=gw.key)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("run", [chat, responses, messages])
async def test_a_run_ends_with_one_refusal(
    sqlite_url: str, run: Callable[..., Awaitable[None]], stream: bool
) -> None:
    async with running(sqlite_url) as gw, client_of(gw, run) as client:
        [key] = await Accounts(gw.app.database, actor="test").list_keys()
        scope = f"key:{key.key_id}"
        await Accounts(gw.app.database, actor="test").set_budget(scope, STEPS, unit=Unit.CALLS)
        refused: tuple[type[openai.APIStatusError], type[anthropic.APIStatusError]] = (
            openai.APIStatusError,
            anthropic.APIStatusError,
        )

        with pytest.raises(refused, match=f"the budget of the key {key.key_id} is used up: ") as why:
            await run(client, stream)

        error: Any = why.value
        assert error.status_code == (400 if run is responses else 402)
        assert gw.provider.received == STEPS
        answered = gw.app.metrics.render().decode()
        assert refusals(answered) == 1


def refusals(metrics: str) -> int:
    """How many requests were refused for a budget, by the gateway's own count."""
    lines = [line for line in metrics.splitlines() if line.startswith("tollhouse_refusals_total{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if "budget" in line)
