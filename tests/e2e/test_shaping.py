"""An agent that knows nothing of caches, through a whole gateway on both stores: what it saves, and that the books hold."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

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
