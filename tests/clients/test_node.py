"""The vendors' Node libraries through the gateway, in a process of their own."""

from __future__ import annotations

import asyncio
import json
import os

from gateway.core.clients import task_id_of
from tests.clients.conftest import CLAUDE, EMBED, GPT
from tests.clients.npm_install import PACKAGE, NodeMissing, installed
from tests.support.small_world import KEY, KEY_ID, SmallWorld
from tests.support.untested import untested

RUN_TIMEOUT_S = 40


async def test_node_libraries_on_every_surface(gw: SmallWorld) -> None:
    try:
        modules = await asyncio.to_thread(installed)
    except NodeMissing as missing:
        untested(f"the Node libraries of OpenAI and Anthropic: {missing}")
        return
    process = await asyncio.create_subprocess_exec(
        "node",
        str(PACKAGE / "surfaces.mjs"),
        gw.url,
        str(modules),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "TOLLHOUSE_KEY": KEY},
    )
    try:
        async with asyncio.timeout(RUN_TIMEOUT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert out, err.decode()
    assert json.loads(out) == {
        "chat": ["[demo] ", True, True],
        "tools": ["bash", '{"command":"echo hi"}', "stop"],
        "structured": {"passed": False},
        "responses": ["response.completed", "completed", True],
        "embeddings": [256, 256],
        "models": [[GPT, CLAUDE, EMBED]] * 2,
        "messages": ["end_turn", True, True],
        "messagesTools": ["tool_use", "bash", {"command": "echo hi"}, "end_turn"],
        "task": True,
        "wrongKey": ["AuthenticationError", 401, "invalid_api_key"],
        "unknownModel": ["NotFoundError", 404, "not_found_error"],
    }
    # what was refused was not tried again
    assert [done.status for done in gw.done if done.status >= 400] == [401, 404]
    await gw.settled()
    clients = {(attempt.client, attempt.operation) for attempt, _ in gw.ledger.entries}
    assert clients == {
        ("openai-node", "chat"),
        ("openai-node", "responses"),
        ("openai-node", "embeddings"),
        ("anthropic-node", "messages"),
        ("anthropic-node", "count_tokens"),
    }
    by_name = {
        attempt.client
        for attempt, _ in gw.ledger.entries
        if attempt.task_id == task_id_of(KEY_ID, "node-task")
    }
    assert by_name == {"openai-node", "anthropic-node"}
