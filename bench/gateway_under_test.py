"""A gateway in front of a demo provider, started for one run and stopped after it."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import aiohttp

from bench.memory import NotStarted, free_port

START_S = 60.0
STOP_S = 60.0
_TOLLHOUSE = [sys.executable, "-c", "from gateway.cli import main; main()"]

#: Models and rates as the demo provider bills them. Budgets are large: this run is about what is counted.
CONFIG = """\
listen: 127.0.0.1:{port}
admin_listen: 127.0.0.1:{admin_port}
workers: {workers}
state_dir: {state}
database_url: {database}
pepper: {pepper}
discover_providers: false
demo: off
providers:
  demo:
    wire: demo
    base_url: {provider}
    on_disconnect: {on_disconnect}
    usage_lookup: "{usage_lookup}"
    deployments:
      - model: demo-large
        tier: standard
        operations: [chat, responses, messages, count_tokens]
        context_tokens: 1000000
        max_output_tokens: 32000
        price: {{input_usd_per_mtok: "3", output_usd_per_mtok: "15", cache_read_usd_per_mtok: "0.30",
                cache_write_5m_usd_per_mtok: "3.75", cache_write_1h_usd_per_mtok: "6"}}
      - model: demo-fast
        tier: fast
        operations: [chat, responses, messages, count_tokens]
        context_tokens: 1000000
        max_output_tokens: 32000
        price: {{input_usd_per_mtok: "2.5", output_usd_per_mtok: "10", cache_read_usd_per_mtok: "0.25",
                cache_write_5m_usd_per_mtok: "3.125"}}
      - model: demo-small
        tier: small
        operations: [chat, responses, messages, count_tokens]
        context_tokens: 1000000
        max_output_tokens: 32000
        price: {{input_usd_per_mtok: "1", output_usd_per_mtok: "5", cache_read_usd_per_mtok: "0.10",
                cache_write_5m_usd_per_mtok: "1.25", cache_write_1h_usd_per_mtok: "2"}}
      - model: demo-embed
        tier: small
        operations: [embeddings]
        context_tokens: 8192
        price: {{input_usd_per_mtok: "0.02", output_usd_per_mtok: "0"}}
budgets:
  - {{scope: "tenant:default", limit_usd: "1000000", window: month}}
log_level: warning
"""


@dataclass(frozen=True, slots=True)
class Gateway:
    base_url: str
    key: str
    ledger_url: str
    pid: int = 0  # 0 = not known
    admin_url: str = ""


@asynccontextmanager
async def start_gateway(
    state: Path, provider_url: str, database_url: str, workers: int, on_disconnect: str, reconcile: bool
) -> AsyncIterator[Gateway]:
    """Migrate, make a key, serve. `database_url` "" = SQLite in `state`."""
    port, admin_port = free_port(), free_port()
    database = database_url or f"sqlite:///{state / 'ledger.db'}"
    config = state / "gateway.yaml"
    config.write_text(
        CONFIG.format(
            port=port, admin_port=admin_port, workers=workers, state=state, database=database,
            pepper="mixed-load" * 4, provider=provider_url, on_disconnect=on_disconnect,
            usage_lookup="/generation?id=" if reconcile else "",
        )
    )  # fmt: skip
    await command("migrate", "--config", str(config))
    made = json.loads(await command("keys", "create", "mixed-load", "--json", "--config", str(config)))
    child = await _serve(config, _opened(state / "log"))
    try:
        await _ready(f"http://127.0.0.1:{admin_port}/readyz", child, state / "log")
        yield Gateway(
            f"http://127.0.0.1:{port}", made["key"], database, child.pid, f"http://127.0.0.1:{admin_port}"
        )
    finally:
        if child.returncode is None:
            child.terminate()
        try:
            async with asyncio.timeout(STOP_S):
                await child.wait()
        except TimeoutError:
            child.kill()
            await child.wait()


def _opened(log: Path) -> BinaryIO:
    return log.open("wb")


def _end_of(log: Path) -> str:
    return log.read_text()[-500:]


async def _serve(config: Path, log: BinaryIO) -> asyncio.subprocess.Process:
    with log:  # the child has its own copy
        return await asyncio.create_subprocess_exec(
            *_TOLLHOUSE, "serve", "--config", str(config), stdout=log, stderr=log
        )


async def command(*arguments: str) -> str:
    """Standard output of a `tollhouse` command. Raises NotStarted with its message if it fails."""
    child = await asyncio.create_subprocess_exec(
        *_TOLLHOUSE, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await child.communicate()
    if child.returncode:
        raise NotStarted(f"tollhouse {' '.join(arguments)}: {err.decode().strip()[-500:]}")
    return out.decode()


async def _ready(url: str, child: asyncio.subprocess.Process, log: Path) -> None:
    until_s = time.monotonic() + START_S
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            if child.returncode is not None or time.monotonic() > until_s:
                raise NotStarted(f"the gateway did not get ready: {_end_of(log)}")
            await asyncio.sleep(0.1)
