"""Servers of one's own behind a gateway: what they are told, who waits for them, and what they cost in the ledger."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp

from gateway.core.gpu_price import GpuPrice
from gateway.core.prices import PriceRow, cost
from gateway.core.usage import Usage
from gateway.settings import ensure_pepper
from gateway.storage.accounts import Accounts, Team
from tests.support.fake_vllm import Options
from tests.support.gpu_tier import CHAT, GpuTier, gpu_tier

PRICE = {
    "gpu": {
        "usd_per_replica_hour": "2.50",
        "input_tokens_per_s": 16_000,
        "cached_tokens_per_s": 400_000,
        "output_tokens_per_s": 900,
    }
}
RATES = GpuPrice(2_500_000_000, 16_000, 900, 400_000).rates
PROMPT = "Never delete what you did not make. " * 400


async def metrics(tier: GpuTier, name: str) -> dict[str, float]:
    async with tier.admin.get("/metrics") as answer:
        lines = [line for line in (await answer.text()).splitlines() if line.startswith(f"{name}{{")]
    return {line.partition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def key_of_another_tenant(tier: GpuTier) -> str:
    accounts = Accounts(tier.app.database, actor="test")
    await accounts.put_team(Team("others", "other"))
    _, key = await accounts.create_key(pepper=ensure_pepper(tier.app.settings), name="o", team_id="others")
    return key


def nano(dollars: str) -> int:
    return int(Decimal(dollars) * 10**9)


def cost_of(entry: dict[str, Any]) -> int:
    used = Usage(
        input_uncached=entry["input_uncached"], cache_read=entry["cache_read"], output=entry["output"]
    )
    return cost(PriceRow("own", "1", 0, RATES), used, 0).nano_usd


async def test_the_ledger_says_which_replica_served_each_attempt(sqlite_url: str, tmp_path: Path) -> None:
    """The first one refuses, the other answers: two entries, two names, the same for the key and for the admin."""
    full, free = Options(queued_max=0), Options()
    async with gpu_tier(sqlite_url, tmp_path, [full, free]) as tier:
        names = [tier.rows()[replica.base_url].name for replica in tier.replicas]
        while not (await tier.entries())[1:]:  # until the full one was asked
            status, served, _ = await tier.ask(PROMPT)
            assert (status, served) == (200, names[1])
        entries = await tier.entries()
        request_id = entries[-1]["request_id"]
        mine = [e["served_by"] for e in entries if e["request_id"] == request_id]
        async with tier.http.get(f"/v1/requests/{request_id}") as answer:
            told = await answer.json()
        async with tier.admin.get(f"/admin/v1/requests/{request_id}") as answer:
            shown = (await answer.json())["entries"]
        assert told["replica"] == names[1]
        assert [each["replica"] for each in told["attempts"]] == mine
        assert [each["served_by"] for each in shown] == mine
        assert {name for each in entries if (name := each["served_by"])} == set(names)


async def test_hours_are_paid_in_the_same_ledger_and_tenants_share_no_cache(
    sqlite_url: str, tmp_path: Path
) -> None:
    async with gpu_tier(sqlite_url, tmp_path, [Options()], deployment={"price": PRICE}) as tier:
        (replica,) = tier.replicas
        assert (await tier.ask(PROMPT))[0] == 200
        assert (await tier.ask(PROMPT, cache_salt="guessed", priority=-9))[0] == 200
        other = {"Authorization": f"Bearer {await key_of_another_tenant(tier)}"}
        body = {"model": "small", "messages": [{"role": "user", "content": PROMPT}]}
        async with aiohttp.ClientSession(f"http://127.0.0.1:{tier.app.edge.port}", headers=other) as http:
            async with http.post(CHAT, json=body) as answer:
                assert answer.status == 200
                assert answer.headers["x-cache-transforms"] == "cache_salt@1"

        entries = sorted(await tier.entries(), key=lambda e: e["attempt_id"])
        cached = [entry["cache_read"] for entry in entries]
        assert cached[0] == cached[2] == 0, "the first of each tenant computes it"
        assert cached[1] > 3_000
        assert [entry["amount_nano_usd"] for entry in entries] == [cost_of(entry) for entry in entries]
        assert entries[1]["amount_nano_usd"] < entries[0]["amount_nano_usd"] / 5
        salts = [seen.body["cache_salt"] for seen in replica.seen]
        assert salts[0] == salts[1] != salts[2]
        assert "guessed" not in salts
        assert [seen.body.get("priority") for seen in replica.seen] == [None, 0, None]

        charged = await metrics(tier, "tollhouse_gpu_charged_usd_total")
        assert charged == {
            'tollhouse_gpu_charged_usd_total{deployment="gpu/small"}': sum(
                entry["amount_nano_usd"] for entry in entries
            )
            / 1e9
        }
        tier.app.gpu.tick()
        (hours,) = (await metrics(tier, "tollhouse_gpu_replica_hours_total")).values()
        (dollars,) = (await metrics(tier, "tollhouse_gpu_cost_usd_total")).values()
        assert 0 < hours < 1
        assert abs(dollars - hours * 2.5) < 2e-9 + hours * 1e-3
        async with tier.admin.get("/admin/v1/gpu") as answer:
            (row,) = (await answer.json())["data"]
        assert (row["deployment"], row["replicas"], row["usd_per_replica_hour"]) == ("gpu/small", 1, "2.5")
        assert nano(row["charged_usd"]) == sum(entry["amount_nano_usd"] for entry in entries)
        assert nano(row["idle_usd"]) == nano(row["cost_usd"]) - nano(row["charged_usd"])


async def test_calls_wait_here_and_people_go_first_there_too(sqlite_url: str, tmp_path: Path) -> None:
    """Two replicas with a place each: the third and fourth call wait in the gateway, and the person's is first."""
    told = {"takes_priority": True, "concurrent_per_replica": 1, "queue": {"wait_max_s": 30}}
    async with gpu_tier(sqlite_url, tmp_path, [Options(), Options()], deployment=told) as tier:
        for replica in tier.replicas:
            replica.engine.hold_at = 0

        async def ask(text: str, workload: str) -> int:
            body = {"model": "small", "messages": [{"role": "user", "content": text}]}
            async with tier.http.post(
                CHAT, json=body, headers={"X-Labels": f"workload={workload}"}
            ) as answer:
                await answer.read()
                return answer.status

        first = [asyncio.create_task(ask(f"first {n}", "interactive")) for n in range(2)]
        await tier.until(lambda: all(r.engine.held == 1 for r in tier.replicas))
        places = tier.app.gpu.places
        night = asyncio.create_task(ask("night", "batch"))
        await tier.until(lambda: places.waiting().get(("gpu/small", "batch")) == 1)
        person = asyncio.create_task(ask("person", "interactive"))
        await tier.until(lambda: places.waiting().get(("gpu/small", "interactive")) == 1)
        tier.replicas[0].engine.let_go()
        assert await person == 200
        for replica in tier.replicas:
            replica.engine.let_go()
        assert await asyncio.gather(*first, night) == [200] * 3
        seen = sorted((s for r in tier.replicas for s in r.seen), key=lambda s: str(s.body["messages"]))
        said = {s.body["messages"][0]["content"]: s.body.get("priority") for s in seen}
        assert said == {"first 0": None, "first 1": None, "night": 10, "person": None}
        waits = await metrics(tier, "tollhouse_queue_wait_seconds_count")
        assert waits == {
            'tollhouse_queue_wait_seconds_count{deployment="gpu/small",class="interactive",outcome="entered"}': 3,
            'tollhouse_queue_wait_seconds_count{deployment="gpu/small",class="batch",outcome="entered"}': 1,
        }


async def test_places_go_with_the_replica_that_is_drained(sqlite_url: str, tmp_path: Path) -> None:
    told = {"concurrent_per_replica": 3}
    async with gpu_tier(sqlite_url, tmp_path, [Options(), Options()], deployment=told) as tier:
        (deployment,) = tier.app.settings.catalog.deployments
        places = tier.app.gpu.places
        tier.app.gpu.tick()
        assert places.most(deployment) == 6
        change = {"deployment": "gpu/small", "replica": tier.replicas[0].base_url}
        async with tier.admin.post("/admin/v1/replicas/drain", json=change) as answer:
            assert answer.status == 200
        tier.app.gpu.tick()
        assert places.most(deployment) == 3
        await tier.replicas[1].kill()
        await tier.until(lambda: tier.health()[1] == "unreachable")
        tier.app.gpu.tick()
        assert places.most(deployment) == 3, "one replica's places at least, for what comes back"
