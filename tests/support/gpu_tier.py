"""A gateway on a real store in front of replicas of one's own: fakes of vLLM, found and asked as in operation."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from gateway import settings as config
from gateway.admin.ports import ReplicaState
from gateway.app import App
from gateway.settings import ensure_pepper
from gateway.storage import reports
from gateway.storage.accounts import Accounts
from tests.support.fake_vllm import FakeVllm, Options

CHAT = "/v1/chat/completions"
#: A busy machine must not make a test wrong.
PATIENT_S = 15.0


@dataclass(slots=True)
class GpuTier:
    """`http` is a client of the gateway that has the key, `admin` one of the admin API."""

    app: App
    replicas: list[FakeVllm]
    http: aiohttp.ClientSession
    admin: aiohttp.ClientSession
    config: Path

    async def ask(
        self, text: str = "hi", *, session: str = "", stream: bool = False, **more: object
    ) -> tuple[int, str, str]:
        """(status, x-replica, text of the answer)"""
        body = {"model": "small", "messages": [{"role": "user", "content": text}], "stream": stream, **more}
        headers = {"X-Session-ID": session} if session else {}
        async with self.http.post(CHAT, json=body, headers=headers) as answer:
            return answer.status, answer.headers.get("x-replica", ""), await answer.text()

    def rows(self) -> dict[str, ReplicaState]:
        """By address."""
        return {row.address: row for row in self.app.fleets.rows()}

    def health(self) -> list[str]:
        """Of each replica, in their order."""
        rows = self.rows()
        return [rows[r.base_url].health if r.base_url in rows else "" for r in self.replicas]

    async def until(self, reached: Callable[[], bool]) -> None:
        """Returns when the watch has come to see it."""
        async with asyncio.timeout(PATIENT_S):
            while not reached():
                await asyncio.sleep(0.01)

    async def entries(self) -> list[dict[str, Any]]:
        await self.app.quiet()
        return await reports.entries(self.app.database, limit=1_000_000)


def written(replicas: object, **more: object) -> dict[str, Any]:
    """A configuration with one deployment, "small", that has these replicas."""
    price = {
        "input_usd_per_mtok": "0.30",
        "cache_read_usd_per_mtok": "0.03",
        "output_usd_per_mtok": "1.20",
    }
    deployment = {"model": "small", "price": price, "context_tokens": 32_000, "replicas": replicas} | more
    return {
        "discover_providers": False,
        "listen": "127.0.0.1:0",
        "admin_listen": "127.0.0.1:0",
        "admin_key": "admin-key-of-the-tests",
        "log_level": "warning",
        "providers": {"gpu": {"cache_rules": "vllm", "deployments": [deployment]}},
    }


@asynccontextmanager
async def gpu_tier(
    store: str,
    directory: Path,
    options: Sequence[Options] = (Options(), Options(), Options()),
    *,
    source: Mapping[str, object] | None = None,
    deployment: Mapping[str, object] | None = None,
    gateway: str = "test",
    **settings: object,
) -> AsyncIterator[GpuTier]:
    """One replica for each of `options`. `source`: what `replicas:` says instead of their addresses, or besides them;
    `deployment`: what else the deployment says. `gateway` is this one's name, if there are several."""
    async with AsyncExitStack() as stack:
        replicas = [await stack.enter_async_context(FakeVllm(o)) for o in options]
        urls = {"urls": [r.base_url for r in replicas], "poll_s": 0.1, "refresh_s": 0.5}
        file = directory / f"{gateway}.yaml"
        text = {
            **written({**urls, **(source or {})}, **(deployment or {})),
            "database_url": store,
            **settings,
        }
        file.write_text(json.dumps({**text, "state_dir": str(directory / gateway)}))
        read = config.load(file, {})
        app = await stack.enter_async_context(App(read, replica_id=gateway, access_log=False))
        accounts = Accounts(app.database, actor="test")
        await accounts.ensure_defaults()
        _, key = await accounts.create_key(pepper=ensure_pepper(read), name="test")
        http = aiohttp.ClientSession(
            f"http://127.0.0.1:{app.edge.port}", headers={"Authorization": f"Bearer {key}"}
        )
        admin = aiohttp.ClientSession(
            f"http://127.0.0.1:{app.admin_port}", headers={"Authorization": "Bearer admin-key-of-the-tests"}
        )
        await stack.enter_async_context(http)
        await stack.enter_async_context(admin)
        yield GpuTier(app, replicas, http, admin, file)
