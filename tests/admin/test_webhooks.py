"""Webhooks that people add: a secret shown once, kinds, a test, what became of each message; beside the configured one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp

from gateway.administration import admin_token
from gateway.core.webhook import secret_of
from gateway.settings import Secret, WebhookSpec, ensure_pepper
from gateway.storage.outbox import SqlOutbox
from tests.admin.office import PEPPER, Office
from tests.support.alert_receiver import AlertReceiver
from tests.support.running import Running, running

URL = "https://hooks.acme-corp.com/services/T0/very-secret"


async def test_it_lives_and_goes_and_its_secret_is_shown_once(on: Office) -> None:
    wanted = {"name": "ops", "url": URL, "kinds": ["task_paused", "budget_alert"]}
    once = {"Idempotency-Key": "a"}
    status, made, told = await on.told("POST", "/webhooks", wanted, headers=once)
    assert (status, made["address"], made["kinds"]) == (
        201,
        "https://hooks.acme-corp.com",
        ["budget_alert", "task_paused"],
    )
    assert made["secret"] == secret_of(PEPPER, made["webhook_id"], 1)
    assert (await on.told("POST", "/webhooks", wanted, headers=once))[1] == made

    path = f"/webhooks/{made['webhook_id']}"
    _, seen, tag = await on.told("GET", path)
    assert ("secret" in seen, tag["ETag"]) == (False, told["ETag"])
    assert (await on.told("PATCH", path, {"enabled": False}, headers={"If-Match": '"x"'}))[0] == 412
    status, patched = await on.ask("PATCH", path, {"enabled": False, "kinds": []})
    assert (status, patched["enabled"], patched["kinds"], "secret" in patched) == (200, False, [], False)
    status, problem = await on.ask("POST", f"{path}/test")
    assert (status, "is not enabled" in problem["detail"]) == (400, True)
    _, renewed = await on.ask("PATCH", path, {"new_secret": True})
    assert (renewed["secret_version"], renewed["secret"]) == (2, secret_of(PEPPER, made["webhook_id"], 2))

    _, page = await on.ask("GET", "/webhooks")
    assert [(it["name"], it["messages"]["pending"]) for it in page["data"]] == [("ops", 0)]
    at_rest = [await on.rows(f"SELECT * FROM {table}") for table in ("webhook", "admin_reply", "audit")]
    assert made["secret"] not in str(at_rest)
    assert renewed["secret"] not in str(at_rest)
    assert "very-secret" not in str(at_rest[1:]), "a URL is a secret, too"
    assert (await on.ask("DELETE", path))[0] == 200
    assert (await on.ask("GET", path))[0] == 404


async def test_where_a_webhook_may_not_go(it: Office) -> None:
    for url in (
        "http://hooks.acme-corp.com",
        "https://127.0.0.1/x",
        "https://169.254.169.254/",
        "ftp:x",
        "https://a.internal/",
    ):
        for method, path in (("POST", "/webhooks"), ("PATCH", "/webhooks/none")):
            body = {"name": "x", "url": url} if method == "POST" else {"url": url}
            status, problem = await it.ask(method, path, body)
            assert (status, problem["errors"][0]["field"]) == (422, "url"), url
    status, problem = await it.ask("POST", "/webhooks", {"name": "x", "url": URL, "kinds": ["everything"]})
    assert (status, problem["errors"][0]["field"]) == (422, "kinds.0")
    for path in ("/webhooks/configuration", "/webhooks/none", "/webhooks/none/deliveries"):
        assert (await it.ask("GET", path))[0] == 404
    assert (await it.ask("DELETE", "/webhooks/configuration"))[0] == 409


async def ask(gw: Running, method: str, path: str, body: object = None) -> Any:
    headers = {"Authorization": f"Bearer {admin_token(gw.app.settings)}"}
    url = f"http://127.0.0.1:{gw.app.admin_port}/admin/v1{path}"
    async with aiohttp.ClientSession(headers=headers) as http, http.request(method, url, json=body) as answer:
        assert answer.status < 300, await answer.text()
        return await answer.json()


async def deliveries(gw: Running, webhook_id: str, state: str = "") -> list[Mapping[str, Any]]:
    page = await ask(gw, "GET", f"/webhooks/{webhook_id}/deliveries" + (f"?state={state}" if state else ""))
    found: list[Mapping[str, Any]] = page["data"]
    return found


async def test_each_gets_what_it_wants_beside_the_configured_one(store: str) -> None:
    async with AlertReceiver("secret-of-the-configured") as configured:
        spec = WebhookSpec(configured.url, Secret("secret-of-the-configured"))
        async with running(store, configured={"webhook": spec}) as gw:
            pepper = ensure_pepper(gw.app.settings)
            made = await ask(gw, "POST", "/webhooks", {"name": "a", "url": configured.url})
            async with (
                AlertReceiver(secret_of(pepper, made["webhook_id"], 1)) as everything,
                AlertReceiver("") as broken,
            ):
                await ask(gw, "PATCH", f"/webhooks/{made['webhook_id']}", {"url": everything.url})
                narrow = await ask(
                    gw,
                    "POST",
                    "/webhooks",
                    {"name": "b", "url": broken.url, "kinds": ["task_paused"]},
                )
                outbox = SqlOutbox(gw.app.database)
                await outbox.put([("budget_alert", "one", {"n": 1}), ("task_paused", "two", {"n": 2})])
                for receiver in (configured, everything):
                    got = [await receiver.next() for _ in range(2)]
                    assert sorted(m["id"] for m in got) == ["one", "two"]

                # The narrow one's receiver has another secret, so it refuses what it gets.
                async with asyncio.timeout(10):
                    while (
                        not (found := await deliveries(gw, narrow["webhook_id"]))[0:1]
                        or not found[0]["last_error"]
                    ):
                        pass
                (refused,) = found
                assert (refused["kind"], refused["state"], refused["last_error"]) == (
                    "task_paused",
                    "pending",
                    "the receiver answered 401",
                )

                test = await ask(gw, "POST", f"/webhooks/{made['webhook_id']}/test")
                message = await everything.next()
                assert (message["type"], message["id"]) == ("test", test["delivery_id"])
                async with asyncio.timeout(10):
                    while await deliveries(gw, made["webhook_id"], "pending"):
                        pass
                done = await deliveries(gw, made["webhook_id"], "delivered")
                assert done[0]["kind"] == "test"
                assert len(done) == 3
                await ask(gw, "POST", "/webhooks/configuration/test")
                assert (await configured.next())["type"] == "test"
                shown = (await ask(gw, "GET", "/webhooks"))["data"]
                assert [(it["webhook_id"], it["origin"]) for it in shown] == [
                    ("configuration", "configuration"),
                    (made["webhook_id"], "api"),
                    (narrow["webhook_id"], "api"),
                ]
                assert shown[1]["messages"]["delivered"] == 3
