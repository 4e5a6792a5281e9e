#!/usr/bin/env python3
"""What a refusal costs: CPU of the gateway's process for a request whose budget is used up, over HTTP.

A storm of agents that ask again and again must not cost what it does not earn. Each size of request is sent on a few
connections to a gateway on SQLite whose key has nothing left, always the same as agents do, and once never the same; a probe of the same server, which does nothing but
answer, is measured beside it. Prints a table and writes bench/REFUSALS.md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import aiohttp
import uvloop

from bench.gateway_under_test import command, start_gateway
from bench.machine import description
from gateway.core.secrets import parse_key

HERE = Path(__file__).resolve().parent
CONNECTIONS = 8
#: Of a small request, the server's own work included; what a larger one adds is the reading of it.
TARGET_US = 200.0
#: (name, messages, bytes of each)
SIZES = (("1 KB chat", 1, 600), ("50 KB step", 40, 1_200), ("400 KB step", 320, 1_200))
FRESH = "1 KB chat, never the same"


@dataclass(frozen=True, slots=True)
class Measured:
    name: str
    cpu_us: float  # of the gateway's process, for each request
    per_s: float


def cpu_ns(pid: int) -> int:
    """Time that the threads of a process have run, by the scheduler's count."""
    return sum(int(t.read_text().split()[0]) for t in Path(f"/proc/{pid}/task").glob("*/schedstat"))


async def measure(name: str, pid: int, requests: int, send: Callable[[], Awaitable[None]]) -> Measured:
    async def work(count: int) -> None:
        for _ in range(count):
            await send()

    await asyncio.gather(*(work(20) for _ in range(CONNECTIONS)))
    began_ns, began_s = cpu_ns(pid), time.monotonic()
    await asyncio.gather(*(work(requests // CONNECTIONS) for _ in range(CONNECTIONS)))
    done = requests // CONNECTIONS * CONNECTIONS
    return Measured(name, (cpu_ns(pid) - began_ns) / 1e3 / done, done / (time.monotonic() - began_s))


def body_of(messages: int, size: int) -> bytes:
    said = [
        {"role": ("user", "assistant")[i % 2], "content": f"{i} " + "word " * (size // 5)}
        for i in range(messages)
    ]
    return json.dumps({"model": "demo-large", "max_tokens": 1_000, "messages": said}).encode()


async def run(requests: int) -> list[Measured]:
    found = []
    with tempfile.TemporaryDirectory() as directory:
        state = Path(directory)
        async with start_gateway(state, "http://127.0.0.1:9/v1", "", 1, "drain", False) as gateway:
            key_id, _ = parse_key(gateway.key) or ("", "")
            await command("budgets", "set", f"key:{key_id}", "0", "--config", str(state / "gateway.yaml"))
            await asyncio.sleep(1.5)  # until the gateway has seen the change
            headers = {"Authorization": f"Bearer {gateway.key}", "X-Task-Id": "storm"}
            connector = aiohttp.TCPConnector(limit=CONNECTIONS)
            async with aiohttp.ClientSession(gateway.base_url, connector=connector, headers=headers) as http:

                async def probe() -> None:
                    async with http.get("/livez") as answer:
                        await answer.read()

                found.append(await measure("a probe", gateway.pid, requests, probe))
                for name, messages, size in SIZES:
                    send = partial(refused, http, body_of(messages, size))
                    found.append(await measure(name, gateway.pid, requests, send))
                numbers = itertools.count()

                async def fresh() -> None:
                    await refused(http, body_of(1, 600).replace(b"word", b"w%d" % next(numbers), 1))

                found.append(await measure(FRESH, gateway.pid, requests, fresh))
    return found


async def refused(http: aiohttp.ClientSession, body: bytes) -> None:
    async with http.post("/v1/chat/completions", data=body) as answer:
        text = await answer.read()
        if answer.status != 402:
            raise SystemExit(f"not refused: {answer.status} {text[:200]!r}")


def table(found: list[Measured]) -> str:
    lines = [
        "# Refusals",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {description()}. CPU of the gateway's process (SQLite, one process) for each",
        f"request of a key whose budget is used up, over HTTP on {CONNECTIONS} connections. Target of the 1 KB chat, sent again",
        f"and again: at most {TARGET_US:.0f} us. No SQL: `tests/storage/test_refusals.py`; no upstream byte: "
        "`tests/pipeline/test_ending.py`.",
        "",
        "| request | CPU us | of that beyond a probe | refusals/s |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {m.name} | {m.cpu_us:.0f} | {m.cpu_us - found[0].cpu_us:.0f} | {m.per_s:,.0f} |" for m in found
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=4_000)
    parser.add_argument("--dry", action="store_true", help="write no file")
    options = parser.parse_args()
    found = uvloop.run(run(options.requests))
    text = table(found)
    print(text)
    if not options.dry:
        (HERE / "REFUSALS.md").write_text(text)
    return 0 if found[1].cpu_us <= TARGET_US else 1


if __name__ == "__main__":
    sys.exit(main())
