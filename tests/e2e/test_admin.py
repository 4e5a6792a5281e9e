"""The admin API of a whole gateway: what it changes holds for requests, and what it says adds up to the bill."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from typing import Any

import aiohttp
import pytest

from gateway.administration import admin_token
from tests.support.running import Running, running

CANARY = "canary-in-the-prompt"


class Both:
    """The gateway, and its admin listener."""

    def __init__(self, gw: Running, http: aiohttp.ClientSession) -> None:
        self.gw = gw
        self._http = http

    async def admin(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        async with self._http.request(method, f"/admin/v1{path}", json=body) as answer:
            return answer.status, await answer.json()

    async def chat(self, key: str, model: str = "demo-fast", task: str = "run") -> int:
        headers = {"Authorization": f"Bearer {key}", "X-Task-Id": task}
        messages = [{"role": "user", "content": CANARY}]
        body = {"model": model, "messages": messages, "max_tokens": 20}
        async with self.gw.http.post("/v1/chat/completions", json=body, headers=headers) as answer:
            await answer.read()
            return answer.status

    async def soon(self, wanted: int, ask: Callable[[], Any]) -> None:
        """Replicas follow a change within a second."""
        async with asyncio.timeout(5):
            while await ask() != wanted:
                pass


@pytest.fixture
async def both(store: str) -> AsyncIterator[Both]:
    async with running(store) as gw:
        headers = {"Authorization": f"Bearer {admin_token(gw.app.settings)}"}
        url = f"http://127.0.0.1:{gw.app.admin_port}"
        async with aiohttp.ClientSession(url, headers=headers) as http:
            yield Both(gw, http)


async def test_what_is_changed_holds_for_the_next_requests(both: Both) -> None:
    _, made = await both.admin("POST", "/keys", {"name": "ci", "budget": {"limit_usd": "1"}})
    key, key_id = made["key"], made["key_id"]
    assert await both.chat(key) == 200
    await both.admin("PATCH", f"/keys/{key_id}", {"models": ["demo-large"]})
    await both.soon(404, lambda: both.chat(key))
    assert await both.chat(key, "demo-large") == 200

    _, budgets = await both.admin("GET", f"/budgets?scope=key:{key_id}")
    address = f"/budgets/{budgets['data'][0]['budget_id']}"
    status, _ = await both.admin("PATCH", address, {"limit_usd": "0", "below_spent": True})
    assert status == 200
    assert await both.chat(key, "demo-large") in (402, 429)
    await both.admin("PATCH", address, {"limit_usd": "1", "reason": "go on"})
    await both.soon(200, lambda: both.chat(key, "demo-large"))

    _, tasks = await both.admin("GET", f"/tasks?key_id={key_id}&sort=spend")
    task_id = tasks["data"][0]["task_id"]
    await both.admin("POST", f"/tasks/{task_id}/stop", {"reason": "enough"})
    await both.soon(402, lambda: both.chat(key, "demo-large"))
    assert await both.chat(key, "demo-large", "another") == 200
    await both.admin("DELETE", f"/keys/{key_id}")
    await both.soon(401, lambda: both.chat(key, "demo-large", "another"))


async def test_costs_usage_tasks_ledger_and_bill_agree_to_the_nano_dollar(both: Both) -> None:
    keys = [(await both.admin("POST", "/keys", {"name": f"k{n}"}))[1]["key"] for n in range(2)]
    calls = [
        (keys[n % 2], ("demo-fast", "demo-large", "demo-small")[n % 3], f"run-{n % 4}") for n in range(18)
    ]
    statuses = await asyncio.gather(*(both.chat(*call) for call in calls))
    assert set(statuses) == {200}
    await both.gw.settle_all()
    assert (await both.gw.ledger_equals_bill()).equal

    day = datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(days=1)
    sums = []
    for path in (
        f"/costs?start_time={day}&group_by=model,key",
        f"/usage?start_time={day}&group_by=deployment",
    ):
        _, page = await both.admin("GET", path)
        sums.append(sum(Decimal(r["cost_usd"]) for b in page["data"] for r in b["results"]))
    _, entries = await both.admin("GET", "/ledger?limit=1000")
    _, tasks = await both.admin("GET", "/tasks?limit=1000")
    billed = sum(e["amount_nano_usd"] for e in await both.gw.entries())
    assert billed > 0
    assert {
        *sums,
        sum(Decimal(e["amount_usd"]) for e in entries["data"]),
        sum(Decimal(t["cost_usd"]) for t in tasks["data"]),
    } == {Decimal(billed) / 10**9}
    assert CANARY not in str((entries, tasks))
