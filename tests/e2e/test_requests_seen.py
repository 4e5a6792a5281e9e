"""GET /v1/requests/{id}: tier, deployment, rule and reason of a request, for the key that made it."""

from __future__ import annotations

import dataclasses
import json

from gateway.core.catalog import Tier
from gateway.core.rules import RuleSet, RuleText, Switch
from gateway.settings import ensure_pepper
from gateway.storage.accounts import Accounts
from tests.support.running import running

ASK = {"model": "auto", "messages": [{"role": "user", "content": "demo:output=4"}]}


async def test_a_key_sees_where_its_requests_went_and_nobody_elses(sqlite_url: str) -> None:
    rules = RuleSet.compile(
        [RuleText("no tools", "request.tools == 0", Tier.SMALL, why="nothing to call", switch=Switch.ALWAYS)]
    )
    async with running(sqlite_url) as gw:
        settings = gw.app.settings
        gw.app.reload(
            lambda: dataclasses.replace(settings, routing=dataclasses.replace(settings.routing, rules=rules))
        )
        async with gw.http.post("/v1/chat/completions", data=json.dumps(ASK)) as answer:
            assert answer.status == 200
            request_id, deployment = answer.headers["x-request-id"], answer.headers["x-deployment"]
        await gw.settle_all()
        async with gw.http.get(f"/v1/requests/{request_id}") as answer:
            assert answer.status == 200
            found = await answer.json()
        (attempt,) = found.pop("attempts")
        assert {
            name: found[name] for name in ("id", "task_step", "tier", "deployment", "rule", "reason")
        } == {
            "id": request_id,
            "task_step": 1,
            "tier": "small",
            "deployment": deployment,
            "rule": "no tools",
            "reason": "nothing to call",
        }
        assert (attempt["no"], attempt["status"], attempt["finish"]) == (1, 200, "stop")
        assert (attempt["cost_usd"], found["retries_cost_usd"]) == (found["cost_usd"], "0")
        accounts = Accounts(gw.app.database, actor="test")
        _, other = await accounts.create_key(pepper=ensure_pepper(settings), name="other")
        headers = {"Authorization": f"Bearer {other}"}
        async with gw.http.get(f"/v1/requests/{request_id}", headers=headers) as answer:
            assert answer.status == 404
        async with gw.http.get("/v1/requests/") as answer:
            assert answer.status == 404
