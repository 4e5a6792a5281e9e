"""Configuration that is written over the admin API is in force on every gateway within a second, and after a restart."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from gateway.app import App
from gateway.demo.provider import DemoProvider
from gateway.settings import load, written
from gateway.storage.accounts import Accounts
from gateway.storage.reports import entries

ADMIN_KEY, PEPPER = "an admin key of the tests", "a pepper that both of them have"
HAS_IT = {"LOCAL_API_KEY": "secret-of-local"}
WITHIN_S = 5.0
#: In an order in which each can be used when it is made.
MADE = (
    ("credentials", {"name": "shared", "env": "LOCAL_API_KEY"}),
    ("providers", {"name": "local", "wire": "openai", "credential": "shared", "base_url": "(the demo's)"}),
    ("deployments", {"provider": "local", "model": "llama", "upstream_model": "demo-fast", "price": "none"}),
    ("deployments", {"provider": "local", "model": "quick", "upstream_model": "demo-small", "price": "none",
                     "tier": "fast"}),
    ("tiers", {"name": "fast", "fallbacks": ["standard"]}),
    ("rules", {"name": "beginnings", "when": "task.step < 3", "tier": "fast", "order": -1}),
)  # fmt: skip


@asynccontextmanager
async def gateway(
    folder: Path, name: str, store: str, upstream: str, env: Mapping[str, str]
) -> AsyncIterator[App]:
    file = folder / f"{name}.yaml"
    deployment = {"model": "base", "upstream_model": "demo-large", "price": "none"}
    said = {
        "listen": "127.0.0.1:0",
        "admin_listen": "127.0.0.1:0",
        "admin_key": ADMIN_KEY,
        "pepper": PEPPER,
        "demo": "off",
        "state_dir": str(folder / name),
        "database_url": store,
        "providers": {"files": {"base_url": upstream, "deployments": [deployment]}},
    }
    file.write_text(written(said))
    read = partial(load, file, env)
    async with App(read(()), replica_id=name, access_log=False, read=read) as app:
        yield app


class Person:
    """Whoever has the admin key, and an agent's."""

    def __init__(self, http: aiohttp.ClientSession, key: str) -> None:
        self._http, self._key, self._runs = http, key, itertools.count()

    async def ask(self, app: App, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        url = f"http://127.0.0.1:{app.admin_port}/admin/v1/{path}"
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        async with self._http.request(method, url, json=body, headers=headers) as answer:
            return answer.status, await answer.json(content_type=None)

    async def make_all(self, app: App, upstream: str) -> None:
        for kind, body in MADE:
            if kind == "providers":
                body = {**body, "base_url": upstream}
            status, found = await self.ask(app, "POST", kind, body)
            assert status == 201, found

    async def chat(self, app: App, model: str) -> tuple[int, str]:
        """Status, and the deployment that answered."""
        url = f"http://127.0.0.1:{app.edge.port}/v1/chat/completions"
        said = {
            "role": "user",
            "content": f"run {next(self._runs)}",
        }  # another one each time, so at its first step
        body = {"model": model, "max_tokens": 5, "messages": [said]}
        async with self._http.post(
            url, json=body, headers={"Authorization": f"Bearer {self._key}"}
        ) as answer:
            await answer.read()
            request_id = answer.headers["x-request-id"]
        await app.quiet()
        made = [e for e in await entries(app.database, limit=1_000) if e["request_id"] == request_id]
        return answer.status, made[0]["deployment"] if made else ""

    async def until(self, app: App, model: str, wanted: tuple[int, str]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while await self.chat(app, model) != wanted:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def person(app: App) -> AsyncIterator[Person]:
    accounts = Accounts(app.database, actor="test")
    await accounts.ensure_defaults()
    _, key = await accounts.create_key(pepper=PEPPER.encode(), name="test")
    async with aiohttp.ClientSession() as http:
        yield Person(http, key)


async def test_two_gateways_call_what_was_made_at_one_of_them(postgres_url: str, tmp_path: Path) -> None:
    async with (
        DemoProvider() as demo,
        gateway(tmp_path, "one", postgres_url, demo.base_url, HAS_IT) as one,
        gateway(tmp_path, "two", postgres_url, demo.base_url, HAS_IT) as two,
        person(one) as eva,
    ):
        assert await eva.chat(one, "llama") == (404, "")
        await eva.make_all(one, demo.base_url)
        assert await eva.chat(one, "llama") == (200, "local/llama"), "at once where it was written"
        await eva.until(two, "llama", (200, "local/llama"))
        for app in (one, two):
            await eva.until(app, "auto", (200, "local/quick"))
        status, seen = await eva.ask(two, "GET", "deployments/local/llama")
        assert (status, seen["source"]) == (200, {"file": "admin API, version 1", "line": None})

        status, _ = await eva.ask(two, "PATCH", "rules/beginnings", {"tier": None, "model": "llama"})
        assert status == 200
        for app in (one, two):
            await eva.until(app, "auto", (200, "local/llama"))

        for path in ("rules/beginnings", "tiers/fast", "deployments/local/llama", "deployments/local/quick"):
            status, found = await eva.ask(one, "DELETE", path)
            assert status == 200, found
        for app in (one, two):
            await eva.until(app, "llama", (404, ""))
            await eva.until(app, "auto", (200, "files/base"))


async def test_it_is_there_after_a_restart_and_a_reload_and_a_replica_without_the_secret_says_so(
    store: str, tmp_path: Path
) -> None:
    async with DemoProvider() as demo:
        async with gateway(tmp_path, "one", store, demo.base_url, HAS_IT) as one, person(one) as eva:
            await eva.make_all(one, demo.base_url)
            assert (await eva.ask(one, "POST", "reload")) == (
                200,
                {"reloaded": True, "waiting_for_restart": []},
            )
            assert await eva.chat(one, "llama") == (200, "local/llama")
        async with gateway(tmp_path, "one", store, demo.base_url, HAS_IT) as one, person(one) as eva:
            assert await eva.chat(one, "auto") == (200, "local/quick")
            assert one.readiness() == []

        async with gateway(tmp_path, "one", store, demo.base_url, {}) as one, person(one) as eva:
            assert await eva.chat(one, "auto") == (200, "files/base")
            assert one.readiness() == [
                "what was written over the admin API is not in force here; the log says why"
            ]
            async with aiohttp.ClientSession() as http:
                async with http.get(f"http://127.0.0.1:{one.admin_port}/metrics") as answer:
                    assert "tollhouse_overlay_not_in_force 1" in await answer.text()
            _, found = await eva.ask(one, "GET", "configuration")
            assert found["trouble"].startswith(
                "admin API: credential shared: env: the environment variable LOCAL_API_KEY is not set"
            )
            # The way back: what cannot be used here goes, and the rest is in force.
            for path in (
                "rules/beginnings",
                "tiers/fast",
                "deployments/local/llama",
                "deployments/local/quick",
            ):
                assert (await eva.ask(one, "DELETE", path))[0] == 200
            status, _ = await eva.ask(one, "PATCH", "providers/local", {"credential": None})
            assert status == 422, "what cannot be used is still there"
            for path in ("providers/local", "credentials/shared"):
                assert (await eva.ask(one, "DELETE", path))[0] == 200
            assert one.readiness() == []


async def test_the_first_provider_of_litellm_is_called_without_a_restart(
    sqlite_url: str, tmp_path: Path
) -> None:
    """litellm is loaded when it is first needed; a call that comes meanwhile waits for it."""
    async with (
        DemoProvider() as demo,
        gateway(tmp_path, "one", sqlite_url, demo.base_url, HAS_IT) as one,
        person(one) as eva,
    ):
        provider = {
            "name": "bridged",
            "wire": "litellm",
            "litellm_provider": "openai",
            "base_url": demo.base_url,
        }
        deployment = {"provider": "bridged", "model": "g", "upstream_model": "demo-fast", "price": "none"}
        for kind, body in [
            MADE[0],
            ("providers", {**provider, "credential": "shared"}),
            ("deployments", deployment),
        ]:
            status, found = await eva.ask(one, "POST", kind, body)
            assert status == 201, found
        assert await eva.chat(one, "g") == (200, "bridged/g")
        assert await eva.chat(one, "base") == (200, "files/base")
