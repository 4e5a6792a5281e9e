"""Two whole gateways on one Postgres and one Redis: what they share, and that no fault of Redis costs a request."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from redis import Redis

from gateway.app import App
from gateway.core.errors import Unavailable
from gateway.core.identity import RateLimit
from gateway.core.serving import QueuePolicy, Serving
from gateway.core.shaping import CachingPolicy
from gateway.core.trimming import TrimPolicy
from gateway.demo.provider import DemoProvider
from gateway.demo.report import LedgerLine, compare
from gateway.settings import ConfigError, ensure_pepper
from gateway.storage import reports
from gateway.storage.accounts import Accounts
from tests.support.running import settings_for
from tests.support.servers import RedisServer
from tests.support.told_redis import PATIENT_S


@dataclass(slots=True)
class Pair:
    apps: list[App]
    provider: DemoProvider
    key: str
    http: aiohttp.ClientSession

    async def chat(self, replica: int, *messages: str, **more: Any) -> tuple[int, dict[str, str]]:
        """Status and headers; the answer is read to its end."""
        body = {
            "model": "demo-fast",
            "max_completion_tokens": 8,
            "messages": [
                {"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(messages)
            ],
            **more,
        }
        url = f"http://127.0.0.1:{self.apps[replica].edge.port}/v1/chat/completions"
        async with self.http.post(url, json=body) as answer:
            await answer.read()
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}

    async def new_key(self, limit: RateLimit) -> None:
        app = self.apps[0]
        accounts = Accounts(app.database, actor="test")
        _, key = await accounts.create_key(pepper=ensure_pepper(app.settings), name="test", limit=limit)
        self.http.headers["Authorization"] = f"Bearer {key}"

    async def returned(self) -> None:
        """All use Redis again."""
        async with asyncio.timeout(PATIENT_S):
            while (
                "x-gw-degraded" in (await self.chat(0, "hi"))[1]
                or "x-gw-degraded" in (await self.chat(1, "hi"))[1]
            ):
                await asyncio.sleep(0.02)


@asynccontextmanager
async def pair(postgres_url: str, redis_url: str, directory: Path, **configured: Any) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(DemoProvider())
        settings = settings_for(postgres_url, directory, provider.base_url)
        settings = dataclasses.replace(settings, redis_url=redis_url, **configured)
        apps = []
        for n in range(2):
            app = App(settings, replica_id=f"test-{n}", reconcile_every_s=86_400.0, access_log=False)
            apps.append(await stack.enter_async_context(app))
        await Accounts(apps[0].database, actor="test").ensure_defaults()
        http = await stack.enter_async_context(aiohttp.ClientSession())
        found = Pair(apps, provider, "", http)
        await found.new_key(RateLimit())
        yield found


async def test_replicas_share_limits_and_lineage(
    postgres_url: str, own_redis: RedisServer, tmp_path: Path
) -> None:
    async with pair(postgres_url, own_redis.url, tmp_path) as two:
        tasks = set()
        for turn in range(6):
            status, headers = await two.chat(turn % 2, "begin", *["more"] * (2 * turn))
            assert (status, headers.get("x-gw-degraded")) == (200, None)
            tasks.add((headers["x-task-id"], headers["x-task-step"]))
        assert [step for _, step in sorted(tasks, key=lambda t: int(t[1]))] == ["1", "2", "3", "4", "5", "6"]
        assert len({task for task, _ in tasks}) == 1
        assert (await two.chat(0, "begin", model="auto"))[0] == 200
        await two.new_key(RateLimit(requests_per_min=10))
        statuses = Counter([(await two.chat(n % 2, "hi"))[0] for n in range(20)])
        assert statuses == {200: 10, 429: 10}
        assert b"\ntollhouse_limits_degraded 0\n" in two.apps[0].metrics.render()

        one_place = Serving(queue=QueuePolicy(wait_max_s=0.05))
        at = dataclasses.replace(two.apps[0].settings.catalog.deployments[0], concurrent=1, serving=one_place)
        await two.apps[0].gpu.places.enter(at, "team", "first")
        with pytest.raises(Unavailable, match="all 1 places of"):
            await two.apps[1].gpu.places.enter(at, "team", "second")

        with Redis.from_url(own_redis.url) as redis:  # told within a second
            async with asyncio.timeout(PATIENT_S):
                while redis.hkeys("tollhouse:{retries}") != [b"demo"]:
                    await asyncio.sleep(0.02)
                while not redis.keys("tollhouse:{runs:*}"):
                    await asyncio.sleep(0.02)


async def test_what_one_replica_trimmed_is_read_from_another(
    postgres_url: str, own_redis: RedisServer, tmp_path: Path
) -> None:
    found = "".join(f"line {n}\n" for n in range(2_000))
    said = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": found}]},
    ]
    caching = CachingPolicy(trim=TrimPolicy(10_000, 4_000))
    async with pair(postgres_url, own_redis.url, tmp_path, caching=caching) as two:
        one, other = (f"http://127.0.0.1:{app.edge.port}/v1" for app in two.apps)
        body = {"model": "demo-large", "max_tokens": 9, "messages": said}
        async with two.http.post(f"{one}/messages", json=body, headers={"x-task-id": "run"}) as answer:
            assert answer.headers["x-cache-transforms"].startswith("trim@1")
        await two.apps[0].quiet()
        digest = hashlib.sha256(found.encode()).hexdigest()[:32]
        async with two.http.get(f"{other}/tasks/run/artifacts/{digest}?limit=64000") as answer:
            assert (answer.status, (await answer.json())["text"]) == (200, found)


async def test_no_fault_of_redis_costs_a_request_or_an_entry(
    postgres_url: str, own_redis: RedisServer, tmp_path: Path
) -> None:
    async with pair(postgres_url, own_redis.url, tmp_path) as two:
        await two.new_key(RateLimit(requests_per_min=1_000_000, concurrent=1_000))
        seen: Counter[tuple[int, str]] = Counter()
        stop = asyncio.Event()

        async def agent(number: int) -> None:
            turn = 0
            while not stop.is_set():
                said = [f"agent {number}", *["more"] * (2 * turn)]
                status, headers = await two.chat((number + turn) % 2, *said, stream=turn % 2 == 1)
                seen[status, headers.get("x-gw-degraded", "")] += 1
                turn = (turn + 1) % 10

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(agent(number))
            with Redis.from_url(own_redis.url) as client:
                for _ in range(3):
                    client.flushall()
                    await asyncio.sleep(0.05)
            for fault in ("pause", "kill", "pause"):
                before = seen[200, "ratelimit"]
                if fault == "pause":
                    with own_redis.paused():
                        await _until(lambda before=before: seen[200, "ratelimit"] > before + 5)
                else:
                    own_redis.kill()
                    await _until(lambda before=before: seen[200, "ratelimit"] > before + 5)
                    own_redis.start()
                await two.returned()
                before = seen[200, ""]
                await _until(lambda before=before: seen[200, ""] > before + 5)
            stop.set()
        assert {status for status, _ in seen} == {200}
        for app in two.apps:
            await app.quiet()
        await two.provider.settled()
        entries = await reports.entries(two.apps[0].database, limit=1_000_000)
        compared = compare([LedgerLine.of(e) for e in entries], two.provider.bill())
        assert compared.differences == ()
        assert compared.entries >= sum(seen.values())


async def _until(true: Any) -> None:
    async with asyncio.timeout(PATIENT_S):
        while not true():
            await asyncio.sleep(0.005)


async def test_an_address_that_cannot_be_used_is_a_mistake_in_the_configuration(
    sqlite_url: str, tmp_path: Path
) -> None:
    settings = settings_for(sqlite_url, tmp_path, "http://127.0.0.1:1/v1")
    settings = dataclasses.replace(settings, redis_url="redis://127.0.0.1:six")
    with pytest.raises(ConfigError, match="redis_url: Port could not be cast"):
        async with App(settings, replica_id="test", access_log=False):
            pass
