"""Secrets and prompts that could be recognised anywhere are found nowhere: not in logs, metrics, traces, errors, the audit
trail, the database, or what lies in the state directory.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.collector import collecting
from tests.support.provider_fakes import ProviderFake
from tests.support.running import Tollhouse

PROVIDER_KEY = "canaryprovider-4vJ8sQ2mZr7TxW1pLk9D"
ADMIN_KEY = "canaryadmin-9fKw3Lq7RzX2bV5nMt8H"
PEPPER = "canarypepper-7hGd2Yp4CsN6vJ1xQm3W"
PROMPT = "canaryprompt of a salamander under the third stone"
ANSWER = "canaryanswer of a heron on one leg"
HOOK = "canaryhook-5tRb8Wn2"
CHAT = "/v1/chat/completions"


def whole(text: str) -> dict[str, Any]:
    return {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": "llama",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14},
    }


def tell(fake: ProviderFake) -> None:
    """One good answer, and all the ways in which providers give back what they were sent."""
    echo = f"Bearer {PROVIDER_KEY} sent {PROMPT}"
    fake.replies(whole(ANSWER))
    fake.replies({"error": {"message": f"bad request: {echo}", "type": "x"}}, status=400)
    fake.replies({"error": {"message": f"Incorrect API key provided: {PROVIDER_KEY}"}}, status=401)
    fake.replies(f"<html>{echo}</html>".encode(), status=404)
    fake.replies(f"no JSON: {echo}".encode(), headers={"content-type": "application/json"})
    fake.streams(b'data: {"choices": [{"delta": {"content": "' + ANSWER.encode() + b'"}}]}\n\n', cut=True)
    for _ in range(10):
        fake.replies({"error": {"message": echo}}, status=500)


async def agent(url: str, key: str) -> list[tuple[int, str]]:
    """What a client gets: for its own prompts, for nonsense, for keys that are none."""
    ask = {"model": "llama", "max_tokens": 20, "messages": [{"role": "user", "content": PROMPT}]}
    sent: list[tuple[bytes, str]] = [(json.dumps(ask).encode(), key)] * 5
    sent += [(json.dumps({**ask, "stream": True}).encode(), key), (json.dumps(ask).encode(), key)]
    sent += [
        (b'{"messages": "' + PROMPT.encode(), key),
        (json.dumps({**ask, "model": PROMPT}).encode(), key),
        (json.dumps({**ask, PROMPT: 1, "messages": PROMPT}).encode(), key),
        (json.dumps(ask).encode(), f"{key[:-6]}canary"),
    ]
    got = []
    async with aiohttp.ClientSession(url) as http:
        for body, bearer in sent:
            headers = {"Authorization": f"Bearer {bearer}", "X-Task-Id": "run", "Cookie": f"c={HOOK}"}
            try:
                async with http.post(CHAT, data=body, headers=headers) as answer:
                    got.append((answer.status, await answer.text()))
            except aiohttp.ClientError as cut:
                got.append((0, str(cut)))
    return got


async def operator(url: str) -> tuple[list[str], str, str]:
    """What an operator does, and the key and the secret that are shown once."""
    said: list[str] = []
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    async with aiohttp.ClientSession(f"{url}/admin/v1/", headers=headers) as http:

        async def ask(method: str, path: str, body: object = None, **more: Any) -> Any:
            async with http.request(method, path, json=body, **more) as answer:
                said.append(await answer.text())
                return json.loads(said[-1])

        once = {"Idempotency-Key": "canary-once"}
        made = await ask("POST", "keys", {"name": "ci"}, headers=once)
        hook = {"name": "ops", "url": f"https://hooks.acme-corp.com/{HOOK}"}
        webhook = await ask("POST", "webhooks", hook, headers={"Idempotency-Key": "canary-hook"})
        said.clear()  # what is shown once
        await ask("GET", "keys")
        await ask("GET", "webhooks")
        await ask(
            "POST", "keys", {"name": PROMPT, "secret": ADMIN_KEY, "limits": {"concurrent": PROVIDER_KEY}}
        )
        await ask("POST", "webhooks", {"name": "x", "url": f"http://127.0.0.1/{HOOK}"})
        await ask("GET", f"keys?team={ADMIN_KEY}")
        await ask("GET", "me", headers={"Authorization": f"Bearer {ADMIN_KEY}x"})
        await ask("PATCH", f"webhooks/{webhook['webhook_id']}", {"url": f"https://h.acme-corp.com/{HOOK}"})
        for path in (
            "providers",
            "credentials",
            "deployments",
            "rules",
            "prices",
            "ledger",
            "health",
            "tasks",
        ):
            await ask("GET", path)
    return said, str(made["key"]), str(webhook["secret"])


async def test_what_is_secret_is_found_nowhere(tmp_path: Path) -> None:
    with collecting() as collector:
        async with ProviderFake() as fake:
            tell(fake)
            price = {"input_usd_per_mtok": "1", "output_usd_per_mtok": "2"}
            local = {
                "base_url": f"{fake.url}/v1",
                "key": PROVIDER_KEY,
                "deployments": [{"model": "llama", "price": price}],
            }
            tollhouse = Tollhouse(
                tmp_path,
                listen="127.0.0.1:0",
                admin_key=ADMIN_KEY,
                pepper=PEPPER,
                log_level="debug",
                providers=json.dumps({"local": local}),
                telemetry=json.dumps({"otlp_endpoint": f"{collector.url}/v1/traces"}),
            )
            async with tollhouse.serve("--first-run") as serving:
                admin = await serving.says(r"admin: (http://[^)]+)\)")
                said, key, webhook_secret = await operator(admin)
                got = await agent(serving.url, key)
                async with aiohttp.ClientSession() as http:
                    async with http.get(f"{admin}/metrics") as answer:
                        metrics = await answer.text()
                    trail_headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
                    async with http.get(f"{admin}/admin/v1/audit", headers=trail_headers) as answer:
                        trail = await answer.text()
                first = serving.key or ""
                assert await serving.end() == 0
                logs = serving.said

    assert (got[0][0], ANSWER in got[0][1]) == (200, True), "the canaries did fly"
    assert len([status for status, _ in got if status != 200]) >= 8
    assert any(asked.headers["Authorization"] == f"Bearer {PROVIDER_KEY}" for asked in fake.asked)
    assert len(collector.got) > 0

    secrets = [PROVIDER_KEY, ADMIN_KEY, PEPPER, webhook_secret, key.split("-", 2)[2], first.split("-", 2)[2]]
    everything = [*secrets, PROMPT, ANSWER, HOOK]
    # The first key is shown to whoever starts it, and only there.
    told = re.sub(r"gw-[a-z2-7]{8}-[A-Za-z0-9_-]{43}", "", logs, count=3)
    at_rest = [path.read_bytes() for path in tollhouse.state.rglob("*") if path.is_file()]
    for name, text, wanted in (
        ("logs", told, everything),
        ("metrics", metrics, everything),
        ("traces", str(collector.got), everything),
        ("audit", trail, [*secrets, HOOK]),
        ("errors for clients", str(got), secrets),
        ("answers for operators", str(said), [*secrets, HOOK]),
        # The URL of a webhook is in there, as it must be, and in the ledger what a provider said of a failure.
        ("at rest", str(at_rest).replace(f"sent {PROMPT}", ""), [*secrets, PROMPT, ANSWER]),
    ):
        assert [secret for secret in wanted if secret in text] == [], name
