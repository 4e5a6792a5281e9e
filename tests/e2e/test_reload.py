"""A changed configuration without a restart: SIGHUP, with requests under way."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import aiohttp

from tests.e2e.test_processes import CHAT, body
from tests.support.raw_client import RawClient
from tests.support.running import Tollhouse

AUTO = json.dumps({"model": "auto", "messages": [{"role": "user", "content": "demo:output=2"}]}).encode()


async def test_rules_change_between_two_requests_and_an_error_changes_nothing(tmp_path: Path) -> None:
    tollhouse = Tollhouse(tmp_path, listen="127.0.0.1:0")
    plain = tollhouse.config.read_text()

    async def rule() -> str | None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {serving.key}"}) as http:
            async with http.post(serving.url + CHAT, data=AUTO) as answer:
                assert answer.status == 200
                return answer.headers.get("x-rule")

    async with tollhouse.serve("--first-run") as serving:
        assert await rule() is None
        async with RawClient(serving.url, serving.key or "") as client:
            await client.post(CHAT, body(300, stream=True))
            await client.head()
            events = [await client.event()]

            tollhouse.config.write_text(
                plain + "rules: [{name: all, tier: small, switch: always}]\ndrain_s: 7\n"
            )
            serving.process.send_signal(signal.SIGHUP)
            assert await serving.says(r"(reloaded; these wait for a restart: drain_s)")
            assert await rule() == "all"

            tollhouse.config.write_text(plain + "rules: [{name: all, tier: small, when: task.stepp > 1}]\n")
            serving.process.send_signal(signal.SIGHUP)
            problem = await serving.says(r"not reloaded: (\S+) rules\[0\].when: task has no 'stepp'")
            assert problem == f"{tollhouse.config}:4:45:"
            assert await rule() == "all"

            while (event := await client.event()) is not None:
                events.append(event)
        assert events[-1] == b"data: [DONE]\n\n"
        assert len(events) > 100
        assert await asyncio.wait_for(serving.end(), 30) == 0


async def test_one_worker_is_asked_and_all_reload(tmp_path: Path, postgres_url: str) -> None:
    tollhouse = Tollhouse(
        tmp_path, postgres_url, listen="127.0.0.1:0", workers=2, admin_key="an-admin-key-of-the-tests"
    )
    plain = tollhouse.config.read_text()
    async with tollhouse.serve("--first-run") as serving:
        admin = await serving.says(r"admin: (http://[^)]+)\)")
        tollhouse.config.write_text(plain + "rules: [{name: all, tier: small, switch: always}]\n")
        headers = {"Authorization": "Bearer an-admin-key-of-the-tests"}
        async with aiohttp.ClientSession(headers=headers) as http:
            async with http.post(f"{admin}/admin/v1/reload") as answer:
                assert (answer.status, await answer.json()) == (
                    200,
                    {"reloaded": True, "waiting_for_restart": []},
                )

        async def rule() -> str | None:
            headers = {"Authorization": f"Bearer {serving.key}", "Connection": "close"}
            async with aiohttp.ClientSession(headers=headers) as http:
                async with http.post(serving.url + CHAT, data=AUTO) as answer:
                    return answer.headers.get("x-rule")

        async with asyncio.timeout(20):
            while set(await asyncio.gather(*(rule() for _ in range(16)))) != {"all"}:
                pass
        assert await asyncio.wait_for(serving.end(), 40) == 0
