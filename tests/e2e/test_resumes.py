"""A task that a breaker has stopped is stopped on every replica, and goes on everywhere when somebody says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import aiohttp

from gateway.app import App
from gateway.core.breakers import BreakerPolicy
from gateway.settings import Secret, ensure_pepper
from gateway.storage.transact import Fetch, Row, Sql, Tx
from tests.support.running import Running, running

CHAT = "/t/run-7/v1/chat/completions"
STOPPING = {"breakers": BreakerPolicy().changed({"loop": "stop"})}
_AUDIT = Sql("SELECT actor, action FROM audit WHERE subject LIKE 'task:%' ORDER BY at_ms, audit_id")


def loop(turns: int, said: str = "") -> dict[str, Any]:
    """A request of an agent that has made the same call `turns` times."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "fix it"}]
    for i in range(turns):
        function = {"name": "read_file", "arguments": "{}"}
        call = {"id": f"c{i}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"c{i}", "content": "x = 1"})
    if said:
        messages.append({"role": "user", "content": said})
    return {"model": "demo-fast", "max_tokens": 16, "messages": messages}


async def post(http: aiohttp.ClientSession, body: dict[str, Any], app: App) -> tuple[int, str]:
    async with http.post(CHAT, json=body) as answer:
        found = await answer.json()
    await app.quiet()
    return answer.status, found.get("error", {}).get("message", "")


async def task(gw: Running, method: str = "GET", body: object = None) -> dict[str, Any]:
    async with gw.http.request(method, "/v1/tasks/run-7", json=body) as answer:
        assert answer.status == 200
        found: dict[str, Any] = await answer.json()
        return found


async def audit(gw: Running) -> list[Row]:
    def tx() -> Tx[list[Row]]:
        return list((yield Fetch(_AUDIT)))

    return [tuple(row) for row in await gw.app.database.read(tx)]


async def test_the_evidence_is_kept_and_the_owner_lets_the_task_go_on(store: str) -> None:
    async with running(store, configured=STOPPING) as gw:
        for turns in range(6):
            assert (await post(gw.http, loop(turns), gw.app))[0] == 200
        status, why = await post(gw.http, loop(6), gw.app)
        assert (status, "6 times in a row" in why) == (402, True)

        stopped = await task(gw)
        trip, warning = stopped["breakers"]
        assert stopped["state"] == "paused_loop"
        assert stopped["state_reason"] == f"breaker loop: {trip['message']}"
        assert (trip["breaker"], trip["action"], trip["tripped"], trip["resumed_at"]) == (
            "loop",
            "stop",
            True,
            None,
        )
        assert (trip["evidence"]["turns"], trip["evidence"]["tools"]) == (6, "read_file")
        assert (warning["action"], warning["tripped"]) == ("alert", False)

        resumed = await task(gw, "PATCH", {"state": "running", "reason": "that file is what it is"})
        await gw.app.resumes.turn()
        assert (resumed["state"], resumed["state_reason"]) == ("running", "")
        assert [event["resumed_by"][:4] for event in resumed["breakers"]] == ["key:", "key:"]
        assert (await post(gw.http, loop(7), gw.app))[0] == 200
        actors = [(actor.partition(":")[0], action) for actor, action in await audit(gw)]
        assert actors == [("breaker", "task.pause"), ("key", "task.resume")]


async def test_a_stop_and_a_resume_hold_on_the_other_replica_too(postgres_url: str, tmp_path: Path) -> None:
    async with running(postgres_url, configured=STOPPING) as gw:
        pepper = Secret(ensure_pepper(gw.app.settings).decode())
        settings = dataclasses.replace(gw.app.settings, state_dir=tmp_path, pepper=pepper)
        async with App(settings, replica_id="other", access_log=False) as other:
            url, headers = f"http://127.0.0.1:{other.edge.port}", gw.http.headers
            async with aiohttp.ClientSession(url, headers=headers) as http:
                for turns in range(6):
                    assert (await post(gw.http, loop(turns), gw.app))[0] == 200
                assert (await post(gw.http, loop(6), gw.app))[0] == 402
                status, why = await post(http, loop(6), other)
                assert (status, "is paused_loop" in why) == (402, True)

                await task(gw, "PATCH", {"state": "running"})
                for app in (gw.app, other):
                    app.store_changed()
                    await app.resumes.turn()
                assert (await post(http, loop(7), other))[0] == 200
                assert (await post(gw.http, loop(8), gw.app))[0] == 200


async def test_whoever_speaks_to_a_stuck_agent_lets_it_go_on(store: str) -> None:
    async with running(store, configured=STOPPING) as gw:
        for turns in range(6):
            await post(gw.http, loop(turns), gw.app)
        assert (await post(gw.http, loop(6), gw.app))[0] == 402
        assert (await post(gw.http, loop(6, said="look at b.py instead"), gw.app))[0] == 200
        seen = await task(gw)
        assert (seen["state"], seen["breakers"][0]["resumed_by"]) == ("running", "breaker")
