"""The parent of several workers, with workers that are not gateways: what signals become."""

from __future__ import annotations

import asyncio
import signal
import sys

PARENT = """
import os, sys
import uvloop
from gateway.workers import Command, supervise

worker = Command([sys.executable, "-u", "-c", sys.argv[1]], dict(os.environ))
sys.exit(uvloop.run(supervise(lambda index: worker, 2, 30.0)))
"""
#: As a worker that has not got as far as to handle signals. Written in one piece: two of them share a pipe.
STARTING = r"""
import os, time
os.write(1, b"up\n")
time.sleep(60)
"""
LISTENING = r"""
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
os.write(1, b"up\n")
for line in sys.stdin:
    os.write(1, f"told {line}".encode())
"""


async def parent_of(worker: str) -> asyncio.subprocess.Process:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, worker, stdout=asyncio.subprocess.PIPE
    )
    assert [await line(parent) for _ in range(2)] == ["up", "up"]
    return parent


async def line(parent: asyncio.subprocess.Process) -> str:
    assert parent.stdout is not None
    async with asyncio.timeout(30):
        return (await parent.stdout.readline()).decode().strip()


async def end(parent: asyncio.subprocess.Process) -> int:
    parent.send_signal(signal.SIGTERM)
    async with asyncio.timeout(30):
        return await parent.wait()


async def test_a_hang_up_is_told_to_every_worker_and_ends_none() -> None:
    parent = await parent_of(LISTENING)
    for _ in range(2):
        parent.send_signal(signal.SIGHUP)
        assert [await line(parent) for _ in range(2)] == ["told reload", "told reload"]
    assert await end(parent) == 0


async def test_a_hang_up_while_workers_start_does_not_end_them() -> None:
    parent = await parent_of(STARTING)
    parent.send_signal(signal.SIGHUP)
    assert await end(parent) == 0, "they were there to be ended"


async def test_the_end_is_orderly_for_workers_that_were_still_starting_and_not_for_one_that_failed() -> None:
    assert await end(await parent_of(STARTING)) == 0
    failing = LISTENING.replace("sys.exit(0)", "sys.exit(3)")
    assert await end(await parent_of(failing)) == 1
