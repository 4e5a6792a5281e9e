"""An agent that knows nothing of caches, through a whole gateway on both stores: what it saves, and that the books hold."""

from __future__ import annotations

import hashlib
from typing import Any

import aiohttp
import pytest

from gateway.core.shaping import CachingPolicy
from gateway.core.trimming import TrimPolicy
from gateway.settings import ensure_pepper
from gateway.storage.accounts import Accounts
from tests.support.running import Running, running

SYSTEM = "Answer in one short sentence. " * 300
TOOLS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"name": n, "input_schema": {"type": "object"}} for n in ("read", "write")],
    "chat/completions": [
        {"type": "function", "function": {"name": n, "parameters": {}}} for n in ("read", "write")
    ],
}


async def run(
    http: aiohttp.ClientSession,
    path: str,
    model: str,
    *,
    stream: bool,
    steps: int = 5,
    headers: dict[str, str],
) -> None:
    """Turns of one conversation; the tools come in another order every time."""
    turns: list[dict[str, Any]] = []
    for n in range(steps):
        turns.append({"role": "user", "content": f"Turn {n}. " * 40})
        tools = TOOLS[path][:: 1 if n % 2 else -1]
        body: dict[str, Any] = {"model": model, "max_tokens": 50, "stream": stream, "tools": tools}
        if path == "messages":
            body |= {"system": SYSTEM, "messages": turns}
        else:
            body |= {"messages": [{"role": "system", "content": SYSTEM}, *turns]}
        async with http.post(f"/v1/{path}", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        turns.append({"role": "assistant", "content": f"done {n}"})


async def reads(gw: Running) -> list[bool]:
    await gw.settle_all()
    entries = sorted(await gw.entries(), key=lambda e: str(e["at_ms"]))
    return [int(e["cache_read"]) > 0 for e in entries]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "model"),
    [("messages", "demo-large"), ("chat/completions", "demo-large"), ("chat/completions", "demo-fast")],
)
async def test_an_agent_without_markers_reads_from_the_cache_from_its_second_turn_on(
    store: str, path: str, model: str, stream: bool
) -> None:
    async with running(store) as gw:
        await run(gw.http, path, model, stream=stream, headers={"x-task-id": "shaped"})
        assert await reads(gw) == [False, True, True, True, True]
        comparison = await gw.ledger_equals_bill()
        assert comparison.equal, comparison


async def test_at_observe_it_does_not(sqlite_url: str) -> None:
    async with running(sqlite_url) as gw:
        await run(gw.http, "messages", "demo-large", stream=False, headers={"x-cache-level": "observe"})
        assert await reads(gw) == [False] * 5


async def test_what_was_trimmed_is_read_page_by_page_by_the_owner_of_the_task(sqlite_url: str) -> None:
    found = "".join(f"line {n}: größer\n" for n in range(2_000))
    said = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": found}]},
    ]
    policy = CachingPolicy(trim=TrimPolicy(10_000, 4_000))
    async with running(sqlite_url, configured={"caching": policy}) as gw:
        body = {"model": "demo-large", "max_tokens": 9, "messages": said}
        async with gw.http.post("/v1/messages", json=body, headers={"x-task-id": "run"}) as answer:
            assert answer.headers["x-cache-transforms"].startswith("trim@1")
            task = answer.headers["x-task-id"]
        await gw.app.quiet()
        digest = hashlib.sha256(found.encode()).hexdigest()[:32]
        pages: list[str] = []
        offset = 0
        while offset is not None:
            # by the task's id, or by the name that the client gave it
            name = task if len(pages) % 2 else "run"
            async with gw.http.get(f"/v1/tasks/{name}/artifacts/{digest}?offset={offset}") as answer:
                assert answer.status == 200, await answer.text()
                page = await answer.json()
            pages.append(page.pop("text"))
            assert page == {
                "object": "task.artifact",
                "task_id": task,
                "hash": digest,
                "chars": len(found),
                "offset": offset,
                "next_offset": page["next_offset"],
            }
            offset = page["next_offset"]
        assert "".join(pages) == found
        assert len(pages) == 3
        _, other = await Accounts(gw.app.database, actor="test").create_key(
            pepper=ensure_pepper(gw.app.settings), name="other"
        )
        for path, key, status in (
            (f"/v1/tasks/{task}/artifacts/{digest}", other, 404),
            (f"/v1/tasks/{task}/artifacts/none", gw.key, 404),
            (f"/v1/tasks/none/artifacts/{digest}", gw.key, 404),
            (f"/v1/tasks/{task}/artifacts/{digest}?offset=-1", gw.key, 400),
            (f"/v1/tasks/{task}/artifacts/{digest}?limit=64001", gw.key, 400),
        ):
            async with gw.http.get(path, headers={"Authorization": f"Bearer {key}"}) as answer:
                assert answer.status == status, path
