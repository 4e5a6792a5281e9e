"""The provider as the application runs it: a process of its own, on uvloop."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp

from gateway.demo.bill import BillFile, State
from gateway.demo.provider import BASE_URL_NAME, BILL_NAME
from tests.demo.talk import HELLO, streamed


async def test_it_tells_its_address_cuts_exactly_and_ends_with_its_parent(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "gateway.demo.provider",
        "--state",
        str(tmp_path),
        "--until-stdin-closes",
    ]
    child = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdin
    assert child.stdout
    try:
        base_url = (await child.stdout.readline()).decode().split()[-1]
        assert (tmp_path / BASE_URL_NAME).read_text() == base_url + "\n"
        script: dict[str, Any] = {"script": [{"kind": "cut", "after_events": 5}, "close_before_headers"]}
        read, failures = b"", []
        async with aiohttp.ClientSession() as session:
            async with session.post(base_url.removesuffix("/v1") + "/demo/faults", json=script) as response:
                assert response.status == 200
            for _ in script["script"]:
                try:
                    async with session.post(
                        base_url + "/messages", json=streamed("messages", HELLO["messages"])
                    ) as response:
                        async for piece in response.content.iter_any():
                            read += piece
                except aiohttp.ClientError as e:
                    failures.append(type(e))
        assert failures == [aiohttp.ClientPayloadError, aiohttp.ClientOSError]
        assert read.count(b"event: content_block_delta") == 5
    finally:
        child.stdin.close()
        await child.wait()
    assert child.returncode == 0
    bill = BillFile(tmp_path / BILL_NAME)
    assert [(line.state, line.output) for line in bill.after(0)] == [
        (State.INTERRUPTED, 5),
        (State.REFUSED, 0),
    ]
    bill.close()
