"""Health that people see and change: over the admin API and with `tollhouse health`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp

from gateway.core.health import HealthState, Status
from tests.support.running import Tollhouse

CHAT = "/v1/chat/completions"


async def test_a_deployment_is_drained_shown_and_put_back(tmp_path: Path) -> None:
    tollhouse = Tollhouse(tmp_path, listen="127.0.0.1:0")
    async with tollhouse.serve("--first-run") as serving:
        admin = await serving.says(r"admin: http://(127.0.0.1:\d+)")
        tollhouse.config.write_text(tollhouse.config.read_text().replace("127.0.0.1:0", admin))

        async def command(*words: str) -> dict[str, Any]:
            status, out, err = await tollhouse.run("health", *words, "--json")
            assert status == 0, err
            return {row["subject"]: row["status"] for row in json.loads(out)}

        async def tier() -> str:
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {serving.key}"}) as http:
                ask = {"model": "demo-large", "messages": [{"role": "user", "content": "demo:output=2"}]}
                async with http.post(serving.url + CHAT, json=ask) as answer:
                    assert answer.status == 200
                    return answer.headers["x-tier"]

        assert await command("show") == dict.fromkeys(
            ("demo/demo-large", "demo/demo-fast", "demo/demo-small", "demo/demo-embed"), "closed"
        )
        assert (await command("drain", "demo/demo-large"))["demo/demo-large"] == "drained"
        assert await tier() == "standard"  # nothing else serves that model
        assert (await command("undrain", "demo/demo-large"))["demo/demo-large"] == "closed"

        status, _, err = await tollhouse.run("health", "drain", "demo/none")
        assert (status, "demo/none" in err) == (2, True)
        status, _, err = await tollhouse.run("health", "drain")
        assert status == 2


def test_the_words_of_a_status_are_those_of_the_admin_api() -> None:
    assert {s.value for s in Status} == {"drained", "closed", "open", "cooling", "half_open", "probing"}
    assert HealthState().status(0.0) is Status.CLOSED
