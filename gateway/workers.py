"""Several worker processes on one port: the kernel spreads connections (SO_REUSEPORT), a parent watches.

The parent serves nothing. It passes SIGTERM, SIGINT and SIGHUP on (the last as a line of standard input: the signal
would end a worker that has not got as far as to handle it), restarts a worker that dies (with a growing pause, so
that a worker which cannot start does not spin), and ends when all have ended.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RELOAD = b"reload\n"
RESTART_PAUSE_S = 0.5
RESTART_PAUSE_MAX_S = 30.0
#: A worker that lived this long did start; its next restart is quick again.
STEADY_S = 60.0


@dataclass(frozen=True, slots=True)
class Command:
    """How to start worker `index`: arguments and environment of a child process."""

    argv: Sequence[str]
    env: dict[str, str]


def restart_pause_s(deaths_in_a_row: int) -> float:
    """0.5 s, doubling to 30 s."""
    return float(min(RESTART_PAUSE_MAX_S, RESTART_PAUSE_S * 2 ** min(deaths_in_a_row, 10)))


async def supervise(command: Callable[[int], Command], count: int, grace_s: float) -> int:
    """Run `count` workers until a signal; 0 if all then ended by themselves within `grace_s`, else 1."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    running: dict[int, asyncio.subprocess.Process] = {}
    loop.add_signal_handler(signal.SIGHUP, _ask_to_reload, running)
    async with asyncio.TaskGroup() as group:
        ends = [
            group.create_task(_keep(command, index, stopping, grace_s, running), name=f"worker {index}")
            for index in range(count)
        ]
    return 1 if any(end.result() for end in ends) else 0


def _ask_to_reload(running: dict[int, asyncio.subprocess.Process]) -> None:
    for child in running.values():
        if child.returncode is None and child.stdin is not None:
            child.stdin.write(RELOAD)


async def _keep(
    command: Callable[[int], Command],
    index: int,
    stopping: asyncio.Event,
    grace_s: float,
    running: dict[int, asyncio.subprocess.Process],
) -> int:
    """One worker's life, restarts included. Returns its last exit code."""
    loop = asyncio.get_running_loop()
    deaths = 0
    while True:
        what = command(index)
        # The worker ends when this end of the pipe is gone.
        child = await asyncio.create_subprocess_exec(*what.argv, env=what.env, stdin=asyncio.subprocess.PIPE)
        running[index] = child
        began_s = loop.time()
        ended = asyncio.ensure_future(child.wait())
        asked = asyncio.ensure_future(stopping.wait())
        await asyncio.wait((ended, asked), return_when=asyncio.FIRST_COMPLETED)
        if stopping.is_set():
            asked.cancel()
            return await _end(child, grace_s)
        asked.cancel()
        deaths = 0 if loop.time() - began_s > STEADY_S else deaths + 1
        pause_s = restart_pause_s(deaths)
        print(
            f"worker {index} ended with code {child.returncode}; restarting in {pause_s:g} s",
            file=sys.stderr,
            flush=True,
        )
        try:
            async with asyncio.timeout(pause_s):
                await stopping.wait()
            return child.returncode or 0
        except TimeoutError:
            continue


async def _end(child: asyncio.subprocess.Process, grace_s: float) -> int:
    if child.returncode is None:
        child.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(grace_s):
            code = await child.wait()
            # One that was still starting has no handler for the signal yet, and nothing to finish.
            return 0 if code == -signal.SIGTERM else code
    except TimeoutError:
        child.kill()
        await child.wait()
        return 1
