"""The metrics page of a gateway that has served, refused and missed."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.core.catalog import Catalog, Deployment, Provider, ReplicaKind, ReplicaSource, Tier, Wire
from gateway.core.entry import Kind
from gateway.core.errors import GatewayError
from gateway.core.gpu_price import GpuPrice
from gateway.core.health import Status
from gateway.core.rules import RuleSet, RuleText
from gateway.core.serving import Serving
from gateway.core.usage import Quality
from gateway.settings import Secret, Settings
from gateway.settings.model import Routing, WebhookSpec
from gateway.storage.accounts import Accounts
from gateway.storage.schema import migrate
from tests.operations.promql import Exported, exported
from tests.support.fake_vllm import FakeVllm
from tests.support.running import Running, running
from tests.support.servers import RedisServer

SYSTEM = "\n".join(f"rule {n}: answer in one short sentence, and say no more than that" for n in range(120))
WEBHOOK = WebhookSpec("http://127.0.0.1:9/alerts", Secret("a-secret-of-the-tests"))


def _kinds(of: type[GatewayError]) -> frozenset[str]:
    return frozenset({of.kind}).union(*(_kinds(each) for each in of.__subclasses__()))


#: Labels out of our own enumerations.
VALUES = {
    ("tollhouse_refusals_total", "kind"): _kinds(GatewayError),
    ("tollhouse_attempts_total", "outcome"): _kinds(GatewayError) | {"ok", "client_gone", "upstream_cut"},
    ("tollhouse_deployment_status", "status"): frozenset(Status),
    ("tollhouse_ledger_entries_total", "kind"): frozenset(Kind),
    ("tollhouse_ledger_entries_total", "quality"): frozenset(Quality),
    ("tollhouse_requests_total", "status_class"): frozenset({"2xx", "4xx", "5xx"}),
    ("tollhouse_ledger_queue", "what"): frozenset({"waiting", "flights"}),
    ("tollhouse_tokens_total", "class"): frozenset(
        {"input_uncached", "cache_read", "cache_write_5m", "cache_write_1h", "cache_write_12h", "output"}
    ),
}


def _with_places_replicas_and_a_failing_rule(settings: Settings, source: ReplicaSource) -> Settings:
    gpu = Serving(gpu=GpuPrice(2_500_000_000, 16_000, 900))
    deployments = tuple(
        dataclasses.replace(d, concurrent=4, serving=gpu) for d in settings.catalog.deployments
    )
    own = Provider("gpu", Wire.OPENAI, "", "")
    price = deployments[0].price
    small = Deployment("gpu/small", own, "small", "small", price, priority=9, replicas=source)
    rules = RuleSet.compile([RuleText("fails", "request.labels.none == 'x'", Tier.FAST)], Tier.STANDARD)
    catalog = Catalog.of((*deployments, small), settings.catalog.default_tier)
    providers = {**settings.providers, "gpu": own}
    return dataclasses.replace(settings, providers=providers, catalog=catalog, routing=Routing(rules=rules))


async def ask(gw: Running, system: str, said: list[dict[str, Any]], **more: Any) -> int:
    body = {
        "model": "demo-fast",
        "max_tokens": 16,
        "messages": [{"role": "system", "content": system}, *said],
        **more,
    }
    async with gw.http.post("/v1/chat/completions", json=body, headers={"x-task-id": "run"}) as answer:
        await answer.read()
        return answer.status


async def served(gw: Running) -> str:
    """The page after one request of each kind."""
    async with FakeVllm() as replica:
        source = ReplicaSource(ReplicaKind.STATIC, urls=(replica.base_url,))
        gw.app.reload(lambda: _with_places_replicas_and_a_failing_rule(gw.app.settings, source))
        async with asyncio.timeout(15):
            while not any(row.in_use for row in gw.app.fleets.rows()):
                await asyncio.sleep(0.01)
        ask = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
        run = {"x-task-id": "run"}
        async with gw.http.post("/v1/chat/completions", json=ask, headers=run) as answer:
            assert answer.status == 200, await answer.text()
        gw.app.gpu.tick()
        return await _served(gw)


async def _served(gw: Running) -> str:
    said = [{"role": "user", "content": "hi"}]
    assert await ask(gw, SYSTEM, said) == 200
    said += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": "and?"}]
    assert await ask(gw, SYSTEM.replace("rule 7:", "rule seven:"), said) == 200
    assert await ask(gw, SYSTEM, said, model="auto", stream=True) == 200
    assert await ask(gw, SYSTEM, said, n=99) == 400
    accounts = Accounts(gw.app.database, actor="test")
    await accounts.set_budget("team:default", 1_000)
    assert await ask(gw, SYSTEM, said) == 402
    await accounts.set_budget("team:default", 20_000_000_000, reason="enough of that")
    gw.app.store_changed()
    await gw.app.quiet()
    gw.app.metrics.breaker("loop", "observe")
    async with aiohttp.ClientSession() as http:
        async with http.get(f"http://127.0.0.1:{gw.app.admin_port}/metrics") as answer:
            return await answer.text()


@pytest.fixture(scope="session")
def page(tmp_path_factory: pytest.TempPathFactory, redis_of_session: RedisServer) -> str:
    async def scraped(store_url: str, redis_url: str) -> str:
        await migrate(store_url)
        async with running(store_url, configured={"redis_url": redis_url, "webhook": WEBHOOK}) as gw:
            return await served(gw)

    directory: Path = tmp_path_factory.mktemp("operations")
    return asyncio.run(scraped(f"sqlite:///{directory / 'store.db'}", redis_of_session.url))


@pytest.fixture(scope="session")
def on(page: str) -> Exported:
    return exported(page, VALUES)
