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


#: As LiteLLM 1.110.2 sends it for mini-swe-agent 2.4.6, in the dialect of each of its model classes.
BASH: dict[str, Any] = {"name": "bash", "description": "Execute a bash command"}
COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
SDK = {"User-Agent": "OpenAI/Python 3.57.0", "X-Stainless-Raw-Response": "true"}
LITELLM = {"User-Agent": "litellm/1.110.2"}
FUNCTION = {"type": "function", "function": {**BASH, "parameters": COMMAND}}
#: Long enough to arrive in pieces.
LONG = {"role": "user", "content": "Fix the build. " * 20_000}
MINI: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "/v1/chat/completions": (
        SDK,
        {"model": "demo-fast", "messages": [LONG], "tools": [FUNCTION]},
    ),
    "/v1/responses": (
        LITELLM,
        {
            "model": "demo-fast",
            "input": [LONG],
            "tools": [{"type": "function", **BASH, "parameters": COMMAND}],
        },
    ),
    "/v1/messages": (
        LITELLM,
        {
            "model": "demo-large",
            "max_tokens": 99,
            "messages": [LONG],
            "tools": [{**BASH, "input_schema": COMMAND}],
        },
    ),
}


@pytest.mark.parametrize("path", MINI)
async def test_mini_swe_agent_is_told_by_the_status_at_which_its_loop_ends(
    sqlite_url: str, path: str
) -> None:
    headers, body = MINI[path]
    usual = 400 if path == "/v1/responses" else 402
    async with running(sqlite_url) as gw:
        [key] = await Accounts(gw.app.database, actor="test").list_keys()
        await Accounts(gw.app.database, actor="test").set_budget(f"key:{key.key_id}", 0, unit=Unit.CALLS)
        told = []
        for _ in range(2):  # the second is refused before it is read
            for asked, ua in (
                (body, headers),
                (body, {"User-Agent": "curl/8"}),
                ({**body, "tools": []}, headers),
            ):
                async with gw.http.post(path, json=asked, headers=ua) as answer:
                    told.append(
                        (answer.status, answer.headers["x-should-retry"], (await answer.json())["error"])
                    )
    [*_, (_, _, error)] = told
    assert [status for status, *_ in told] == [404, usual, usual] * 2
    assert {(retry, said["code"]) for _, retry, said in told} == {("false", "budget_exceeded")}
    assert {said["type"] for *_, said in told} == {error["type"]} != {"not_found_error"}
    assert error["message"].startswith(f"the budget of the key {key.key_id} is used up: 0 calls spent")


def refusals(metrics: str) -> int:
    """How many requests were refused for a budget, by the gateway's own count."""
    lines = [line for line in metrics.splitlines() if line.startswith("tollhouse_refusals_total{")]
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if "budget" in line)
