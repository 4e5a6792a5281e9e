"""Why a request was not read from its provider's cache: asked over HTTP by whoever sent it, and by the operator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.core.explanation import advice
from gateway.core.money import usd_text
from gateway.settings import ensure_pepper
from gateway.storage import reports
from gateway.storage.accounts import Accounts
from gateway.storage.reports import MissRow
from tests.support.running import Running, running

JSON = dict[str, Any]
SYSTEM = "\n".join(f"rule {n}: answer in one short sentence, and say no more than that" for n in range(120))
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"{name} a file", "parameters": {}}}
    for name in ("read", "write")
]


@dataclass
class Agent:
    """A run on demo-fast, which caches as GPT-5.6 does. Only appends, unless a test changes something."""

    gw: Running
    task: str = "run"
    system: str = SYSTEM
    tools: list[JSON] = field(default_factory=lambda: list(TOOLS))
    said: list[JSON] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    level: str = "observe"

    async def step(self, text: str, **settings: Any) -> str:
        """The request's id."""
        self.said.append({"role": "user", "content": text})
        body = {
            "model": "demo-fast",
            "messages": [{"role": "system", "content": self.system}, *self.said],
            "tools": self.tools,
            "tool_choice": "none",
            **settings,
        }
        headers = {"x-task-id": self.task, "x-cache-level": self.level, **self.headers}
        async with self.gw.http.post("/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            self.said.append((await answer.json())["choices"][0]["message"])
            return answer.headers["x-request-id"]

    async def why(self, request_id: str, key: str = "") -> Any:
        await self.gw.app.quiet()
        headers = {"Authorization": f"Bearer {key or self.gw.key}"}
        async with self.gw.http.get(f"/v1/requests/{request_id}/prefix", headers=headers) as answer:
            return await answer.json() if answer.status == 200 else answer.status

    async def verdict(self, request_id: str) -> tuple[str, str | None, str | None, int | None]:
        (attempt,) = (await self.why(request_id))["attempts"]
        return attempt["verdict"], attempt["cause"], attempt["segment"], attempt["index"]


@pytest.fixture
async def agent(sqlite_url: str) -> AsyncIterator[Agent]:
    async with running(sqlite_url) as gw:
        yield Agent(gw)


async def test_a_run_is_explained_step_by_step(agent: Agent) -> None:
    first, second = await agent.step("one"), await agent.step("two")
    agent.system = SYSTEM.replace("rule 7:", "it is 9:14:")
    third = await agent.step("three")
    agent.tools.reverse()
    fourth = await agent.step("four")
    fifth = await agent.step("five")
    agent.said[2]["content"] = "2"
    sixth = await agent.step("six")
    seventh = await agent.step("seven", reasoning_effort="high")

    assert [await agent.verdict(r) for r in (first, second, third, fourth, fifth, sixth, seventh)] == [
        ("miss", "first_of_its_kind", None, None),
        ("hit", None, None, None),
        ("miss", "system_line_changed", "system", 8),
        ("miss", "tools_reordered", "tools", 0),
        ("hit", None, None, None),
        ("miss", "history_rewritten", "message", 3),
        ("miss", "settings_changed", "settings", None),
    ]


async def test_what_was_lost_is_told_in_tokens_and_dollars(agent: Agent) -> None:
    await agent.step("one")
    agent.tools.reverse()
    second = await agent.step("two")
    document = await agent.why(second)
    (attempt,) = document["attempts"]
    tokens = attempt["tokens"]
    assert (document["object"], document["request_id"]) == ("request.prefix", second)
    assert (attempt["why"], attempt["advice"]) == (
        "the same tools came in another order, from place 0 on",
        advice("tools_reordered"),  # type: ignore[arg-type]
    )
    assert tokens["read"] == 0 < tokens["lost"] == tokens["expected"] <= tokens["input"]
    # demo-fast: written at 3.125, read at 0.25 dollars per million
    assert attempt["lost_usd"] == f"{tokens['lost'] * 2_875 / 1e9:.9f}".rstrip("0")
    team = await reports.misses(agent.gw.app.database, by=("team",))
    assert team == [MissRow(("default",), "tools_reordered", 1, tokens["lost"], tokens["lost"] * 2_875)]


async def test_what_a_higher_level_would_have_kept_from_happening_is_told_and_does_not_happen_there(
    agent: Agent,
) -> None:
    shaped = Agent(agent.gw, task="shaped", system="shaped\n" + SYSTEM, level="safe")
    for run, verdict, prevented_by in ((agent, "miss", "safe"), (shaped, "hit", None)):
        await run.step("one")
        run.tools.reverse()
        (attempt,) = (await run.why(await run.step("two")))["attempts"]
        assert (attempt["verdict"], attempt["prevented_by"]) == (verdict, prevented_by)
    shaped.tools.reverse()
    shaped.system = shaped.system.replace("rule 7", "it is 9:14")
    (attempt,) = (await shaped.why(await shaped.step("three")))["attempts"]
    assert (attempt["cause"], attempt["level"], attempt["prevented_by"]) == (
        "system_line_changed",
        "safe",
        "relocate",
    )


async def test_a_task_shows_what_it_lost_and_saved(agent: Agent) -> None:
    await agent.step("one")
    agent.tools.reverse()
    (lost,) = (await agent.why(await agent.step("two")))["attempts"]
    await agent.step("three")
    await agent.gw.app.quiet()
    async with agent.gw.http.get("/v1/tasks/run") as answer:
        cache = (await answer.json())["cache"]
    assert (cache["lost_usd"], cache["misses"]) == (
        lost["lost_usd"],
        [
            {
                "cause": "tools_reordered",
                "attempts": 1,
                "lost_tokens": lost["tokens"]["lost"],
                "lost_usd": lost["lost_usd"],
            }
        ],
    )
    assert cache["saved_usd"] == usd_text(
        sum(e["list_cost_nano_usd"] - e["amount_nano_usd"] for e in await agent.gw.entries())
    )


async def test_of_what_is_kept_nothing_is_text_of_a_prompt(agent: Agent, sqlite_url: str) -> None:
    await agent.step("one secret question")
    agent.system = SYSTEM.replace("rule 7:", "it is 9:14:")
    await agent.step("two")
    await agent.gw.app.quiet()
    assert len(await reports.misses(agent.gw.app.database, by=("task",))) == 1
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    stored = b"".join(file.read_bytes() for file in path.parent.glob(f"{path.name}*"))
    assert b"system_line_changed" in stored
    for text in (b"9:14", b"short sentence", b"secret question", b"write a file"):
        assert text not in stored


async def test_a_key_sees_its_own_requests_and_the_operator_all(agent: Agent) -> None:
    request = await agent.step("one")
    app = agent.gw.app
    _, other = await Accounts(app.database, actor="test").create_key(
        pepper=ensure_pepper(app.settings), name="other"
    )
    assert (await agent.why(request))["request_id"] == request
    assert await agent.why(request, other) == 404
    assert await agent.why("req_unknown") == 404
    assert await agent.why("%00") == 404
    admin = {"Authorization": f"Bearer {(app.settings.state_dir / 'admin-key').read_text().strip()}"}
    async with aiohttp.ClientSession(f"http://127.0.0.1:{app.admin_port}", headers=admin) as http:
        async with http.get(f"/admin/v1/requests/{request}/prefix") as answer:
            assert (answer.status, await answer.json()) == (200, await agent.why(request))
        async with http.get("/admin/v1/requests/req_unknown/prefix") as answer:
            assert answer.status == 404
        agent.tools.reverse()
        lost = (await agent.why(await agent.step("two")))["attempts"][0]["lost_usd"]
        async with http.get("/admin/v1/misses?by=team,model") as answer:
            assert [
                (m["group"], m["cause"], m["attempts"], m["lost_usd"]) for m in (await answer.json())["data"]
            ] == [({"team": "default", "model": "demo-fast"}, "tools_reordered", 1, lost)]


async def test_a_short_prompt_is_below_the_minimum_and_keeps_no_row(agent: Agent) -> None:
    agent.system, agent.tools = "be brief", []
    request = await agent.step("hello", tool_choice=None)
    assert await agent.verdict(request) == ("miss", "below_minimum", None, None)
    assert await reports.misses(agent.gw.app.database, by=()) == []


async def test_the_other_sides_of_a_session_are_no_misses_of_its_main_run(agent: Agent) -> None:
    await agent.step("one")
    sub = Agent(agent.gw, system="You are a sub-agent.\n" + SYSTEM, tools=[])
    first_of_sub = await sub.step("look", tool_choice=None)
    second, second_of_sub = await agent.step("two"), await sub.step("look again", tool_choice=None)
    assert await agent.verdict(first_of_sub) == ("miss", "first_of_its_kind", None, None)
    assert (await agent.verdict(second))[0] == "hit"
    assert (await agent.verdict(second_of_sub))[0] == "hit"


async def test_two_runs_with_one_opening_separate_at_their_first_difference(agent: Agent) -> None:
    """Without an id from the client: both begin alike, and the second one reads what the first has written."""
    a, b = Agent(agent.gw, task="", headers={}), Agent(agent.gw, task="")
    await a.step("the same question")
    await b.step("the same question")
    b.said[-1] = {"role": "assistant", "content": "another answer"}
    third, fourth = await a.step("and now?"), await b.step("and then?")
    assert [(await agent.verdict(r))[0] for r in (third, fourth)] == ["hit", "hit"]
    await agent.gw.app.quiet()
    tasks = {e["request_id"]: e["task_id"] for e in await agent.gw.entries()}
    assert tasks[third] != tasks[fourth]
