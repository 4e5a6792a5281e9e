"""A run of an agent is one task, whoever else asks the same at the same time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest

from gateway.core.clients import task_id_of
from gateway.core.entry import Attempt
from tests.clients.conftest import CLAUDE, EMBED, GPT
from tests.clients.test_sdks import CHAT_TOOLS, HELLO, MESSAGES_TOOLS
from tests.support.small_world import KEY, KEY_ID, SmallWorld

#: One more step of a run: sends its history and appends the answer and a tool's result to it.
Step = Callable[[Any, list[Any]], Awaitable[None]]
TASK = "Fix the build. demo:tools=9"


async def chat_step(client: openai.AsyncOpenAI, history: list[Any]) -> None:
    answer = await client.chat.completions.create(model=GPT, messages=history, tools=CHAT_TOOLS)
    said = answer.choices[0].message
    assert said.tool_calls is not None
    history += [
        said.to_dict(),
        {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "ok"},
    ]


async def responses_step(client: openai.AsyncOpenAI, history: list[Any]) -> None:
    tools: Any = [{"type": "function", "strict": False, **CHAT_TOOLS[0]["function"]}]
    answer = await client.responses.create(model=GPT, input=history, tools=tools, store=False)
    [call] = answer.output
    assert call.type == "function_call"
    history += [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "ok"}]


async def messages_step(client: anthropic.AsyncAnthropic, history: list[Any]) -> None:
    answer = await client.messages.create(
        model=CLAUDE, max_tokens=500, messages=history, tools=MESSAGES_TOOLS
    )
    [call] = answer.content
    assert call.type == "tool_use"
    history += [
        {"role": "assistant", "content": [call.to_dict()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "ok"}]},
    ]


async def attempts(gw: SmallWorld) -> list[Attempt]:
    """In the order in which they were sent."""
    await gw.settled()
    return [a for a, _ in sorted(gw.ledger.entries, key=lambda entry: entry[0].attempt_id)]


def named(tasks: list[str]) -> str:
    """A letter for each task, in the order of their first step."""
    letters = {task: chr(ord("A") + i) for i, task in enumerate(dict.fromkeys(tasks))}
    return "".join(letters[task] for task in tasks)


@pytest.mark.parametrize("step", [chat_step, responses_step, messages_step])
async def test_parallel_runs_with_the_same_prompt_part_after_their_first_step(
    gpt: openai.AsyncOpenAI, claude: anthropic.AsyncAnthropic, gw: SmallWorld, step: Step
) -> None:
    """Until they differ they cannot be told apart, so only the first step of one is in the other's account."""
    client: Any = claude if step is messages_step else gpt
    one: list[Any] = [{"role": "user", "content": TASK}]
    other = list(one)
    for run in (one, other, one, other, other, one, one, other):
        await step(client, run)
    sent = await attempts(gw)
    assert named([attempt.task_id for attempt in sent]) == "AAABBAAB"
    assert {attempt.task_source for attempt in sent} == {"new", "lineage"}


async def test_two_kinds_of_clients_that_say_the_same_are_two_runs(gw: SmallWorld) -> None:
    for agent in ("AsyncOpenAI/Python 2.54.0", "OpenAI/JS 7.59.0"):
        async with openai.AsyncOpenAI(base_url=gw.url, api_key=KEY) as client:
            await client.chat.completions.create(
                model=GPT, messages=HELLO, extra_headers={"User-Agent": agent}
            )
    sent = await attempts(gw)
    assert [(a.client, a.task_source) for a in sent] == [("openai-python", "new"), ("openai-node", "new")]
    assert named([a.task_id for a in sent]) == "AB"


async def test_the_address_and_a_header_name_the_same_task(gw: SmallWorld) -> None:
    """For clients that can set nothing but a base URL, and for those that can set headers."""
    headers = {"X-Task-Id": "fix-42"}
    async with (
        openai.AsyncOpenAI(base_url=f"{gw.url}/t/fix-42/v1", api_key=KEY) as gpt,
        openai.AsyncOpenAI(base_url=f"{gw.url}/t/fix-42", api_key=KEY) as bare,
        anthropic.AsyncAnthropic(base_url=f"{gw.url}/t/fix-42", api_key=KEY) as claude,
        anthropic.AsyncAnthropic(base_url=gw.url, api_key=KEY, default_headers=headers) as by_header,
    ):
        for each in (gpt, bare):
            await each.chat.completions.create(model=GPT, messages=HELLO)
        await gpt.embeddings.create(model=EMBED, input="a")
        for another in (claude, by_header):
            await another.messages.create(model=CLAUDE, max_tokens=5, messages=HELLO)
        assert (await gpt.models.retrieve(GPT)).id == GPT
    sent = await attempts(gw)
    task = task_id_of(KEY_ID, "fix-42")
    assert [(a.task_id, a.task_source, a.task_external_id) for a in sent] == [
        *[(task, "path", "fix-42")] * 4,
        (task, "header", "fix-42"),
    ]


async def test_a_sub_agents_task_is_a_child_of_its_session(
    claude: anthropic.AsyncAnthropic, gw: SmallWorld
) -> None:
    """As Claude Code and opencode send it, and as anyone may."""
    session = {"User-Agent": "claude-cli/2.1.332 (external, sdk-cli)", "x-claude-code-session-id": "s1"}
    for headers in (
        session,
        {**session, "x-claude-code-agent-id": "a1"},
        {"User-Agent": "opencode/1.18.33", "x-session-id": "ses_2", "x-parent-session-id": "ses_1"},
        {"X-Task-Id": "part", "X-Parent-Task-Id": "whole"},
    ):
        await claude.messages.create(model=CLAUDE, max_tokens=5, messages=HELLO, extra_headers=headers)
    assert [(a.client, a.task_external_id, a.task_id, a.parent_task_id) for a in await attempts(gw)] == [
        ("claude-code", "s1", task_id_of(KEY_ID, "s1"), None),
        ("claude-code", "s1/a1", task_id_of(KEY_ID, "s1/a1"), task_id_of(KEY_ID, "s1")),
        ("opencode", "ses_2", task_id_of(KEY_ID, "ses_2"), task_id_of(KEY_ID, "ses_1")),
        ("anthropic-python", "part", task_id_of(KEY_ID, "part"), task_id_of(KEY_ID, "whole")),
    ]
