"""Alerts of a whole gateway arrive, signed, at somebody who has configured a webhook."""

from __future__ import annotations

from gateway.core.breakers import BreakerPolicy
from gateway.core.entry import Unit
from gateway.settings import Secret, WebhookSpec
from gateway.storage.accounts import Accounts
from gateway.storage.outbox import SqlOutbox
from tests.support.alert_receiver import AlertReceiver
from tests.support.running import running

SECRET = "secret-of-the-receiver"
CHAT = "/v1/chat/completions"
HI = {"model": "demo-fast", "max_tokens": 16, "messages": [{"role": "user", "content": "demo:output=4"}]}


async def test_a_budget_that_crosses_a_percent_is_announced(store: str) -> None:
    async with (
        AlertReceiver(SECRET) as receiver,
        running(store, configured={"webhook": WebhookSpec(receiver.url, Secret(SECRET))}) as gw,
    ):
        accounts = Accounts(gw.app.database, actor="test")
        await accounts.set_budget("team:default", 5, unit=Unit.CALLS, alert_percents=(80,))
        for _ in range(4):
            async with gw.http.post(CHAT, json=HI) as answer:
                assert answer.status == 200
        message = await receiver.next()
        assert message["type"] == "budget_alert"
        expected = {"percent": 80, "scope": "team:default", "unit": "calls"}
        assert {k: message["data"][k] for k in expected} == expected
        page = gw.app.metrics.render().decode()
        assert 'tollhouse_webhooks_total{outcome="failed"} 0' in page
        assert 'tollhouse_outbox_messages{state="dead"} 0' in page


async def test_a_task_at_its_cap_is_refused_and_announced_once(store: str) -> None:
    async with (
        AlertReceiver(SECRET) as receiver,
        running(
            store,
            configured={
                "webhook": WebhookSpec(receiver.url, Secret(SECRET)),
                "breakers": BreakerPolicy().changed({"steps": {"mode": "stop", "most": 2}}),
            },
        ) as gw,
    ):
        statuses = []
        for _ in range(4):
            async with gw.http.post(f"/t/run-7{CHAT}", json=HI) as answer:
                statuses.append(answer.status)
            await gw.app.quiet()
        assert statuses == [200, 200, 402, 402]
        message = await receiver.next()
        data = message["data"]
        assert (message["type"], data["breaker"], data["action"]) == ("breaker_tripped", "steps", "stop")
        assert data["evidence"] == {"steps": 2, "most": 2}
        assert message["id"] == f"{data['task_id']}/steps/trip/2"
        assert (await SqlOutbox(gw.app.database).counts()).pending <= 1  # the receiver knows before the mark
        page = gw.app.metrics.render().decode()
        assert 'tollhouse_breaker_episodes_total{breaker="steps",action="stop"} 1' in page
        assert 'tollhouse_refusals_total{kind="task_stopped"} 2' in page


async def test_what_waits_is_told_also_where_webhooks_are_only_added(sqlite_url: str) -> None:
    async with running(sqlite_url) as gw:
        page = gw.app.metrics.render().decode()
        assert 'tollhouse_outbox_messages{state="pending"} 0' in page
        assert "tollhouse_outbox_oldest_seconds 0" in page
