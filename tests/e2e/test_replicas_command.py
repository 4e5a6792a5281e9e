"""`tollhouse replicas`, `check` and `doctor` on servers of one's own, two processes of a gateway and their operator."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import aiohttp

from gateway.core.money import usd_text
from tests.support.fake_vllm import FakeVllm, Lies, Options
from tests.support.gpu_tier import written
from tests.support.running import Tollhouse


async def test_replicas_are_shown_drained_and_put_back(tmp_path: Path) -> None:
    liar = Options(lies=Lies(model="large"))
    async with FakeVllm() as one, FakeVllm() as two, FakeVllm(liar) as three:
        urls = [r.base_url for r in (one, two, three)]
        tollhouse = Tollhouse(tmp_path)
        hour = {"usd_per_replica_hour": "2.50", "input_tokens_per_s": 16_000, "output_tokens_per_s": 900}
        tier = written({"urls": urls, "poll_s": 0.1}, price={"gpu": hour})
        text = {**tier, "state_dir": str(tollhouse.state)}
        tollhouse.config.write_text(json.dumps({**text, "log_level": "info"}))

        async def command(*words: str) -> list[dict[str, Any]]:
            status, out, err = await tollhouse.run("replicas", *words, "--json")
            assert status == 0, err
            rows: list[dict[str, Any]] = json.loads(out)
            return rows

        async def health(*words: str) -> dict[str, str]:
            return {row["address"]: row["health"] for row in await command(*words)}

        async with tollhouse.serve("--first-run") as serving:
            admin = await serving.says(r"admin: http://(127.0.0.1:\d+)")
            tollhouse.config.write_text(json.dumps({**text, "admin_listen": admin}))
            assert await health() == dict(zip(urls, ("ready", "ready", "unfit"), strict=True))
            name = one.url.removeprefix("http://")
            assert (await health("drain", "gpu/small", name))[one.base_url] == "drained"
            status, out, _ = await tollhouse.run("replicas")
            assert status == 0
            assert "it serves 'large', not" in " ".join(out.split())
            assert re.search(r"gpu/small +3 +\$2\.5 .* \$\d\.\d\d +0% of 60%", out), (
                "what they cost, and that they idle"
            )
            assert (await health("undrain", "gpu/small", name))[one.base_url] == "returning"
            status, _, err = await tollhouse.run("replicas", "drain", "gpu/small", "10.9.9.9:1")
            assert (status, "10.9.9.9:1" in err) == (2, True)
            status, _, err = await tollhouse.run("replicas", "drain", "gpu/small")
            assert status == 2


async def test_what_two_workers_did_is_shown_as_one(tmp_path: Path, postgres_url: str) -> None:
    """Whoever of them is asked: calls and charges of both, as the replica and the ledger have them, and hours once."""
    async with FakeVllm(Options()) as replica:
        tollhouse = Tollhouse(tmp_path)
        hour = {"usd_per_replica_hour": "3600", "input_tokens_per_s": 16_000, "output_tokens_per_s": 900}
        tier = written({"urls": [replica.base_url], "poll_s": 0.1}, price={"gpu": hour})
        text = {**tier, "state_dir": str(tollhouse.state), "database_url": postgres_url, "workers": 2}
        tollhouse.config.write_text(json.dumps({**text, "log_level": "info"}))
        began_s = time.monotonic()
        async with tollhouse.serve("--first-run") as serving:
            admin = await serving.says(r"admin: http://(127.0.0.1:\d+)")
            tollhouse.config.write_text(json.dumps({**text, "admin_listen": admin}))
            body = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
            headers = {"Authorization": f"Bearer {serving.key}"}
            connector = aiohttp.TCPConnector(force_close=True)  # each call may come to another worker
            async with aiohttp.ClientSession(serving.url, headers=headers, connector=connector) as http:
                for _ in range(20):
                    async with http.post("/v1/chat/completions", json=body) as answer:
                        assert answer.status == 200
            admin_key = {"Authorization": "Bearer admin-key-of-the-tests"}
            async with aiohttp.ClientSession(
                f"http://{admin}", headers=admin_key, connector=aiohttp.TCPConnector(force_close=True)
            ) as http:
                shown: list[tuple[int, int, str]] = []
                while len(shown) < 6:
                    async with http.get("/admin/v1/replicas") as answer:
                        (row,) = (await answer.json())["data"]
                    async with http.get("/admin/v1/gpu") as answer:
                        (cost,) = (await answer.json())["data"]
                    assert float(cost["cost_usd"]) <= time.monotonic() - began_s, "a dollar a second"
                    seen = row["prompt_tokens"], sum(row["picks"].values()), cost["charged_usd"]
                    # On a busy machine a worker may have said nothing yet, on an idle one nobody has looked at the replica.
                    if shown or (seen[1] == 20 and float(cost["cost_usd"]) > 0):
                        shown.append(seen)
            status, out, _ = await tollhouse.run("usage", "--by", "deployment", "--json")
            assert status == 0
            (used,) = json.loads(out)
            tokens = sum(line.input_uncached + line.cache_read for line in replica.bill)
            assert shown == [(tokens, 20, usd_text(used["cost_nano_usd"]))] * 6
            assert await serving.end() == 0


async def test_doctor_asks_each_replica_once(tmp_path: Path) -> None:
    tollhouse = Tollhouse(tmp_path)

    async def found(replicas: object) -> tuple[str, str]:
        text = {**written(replicas), "state_dir": str(tollhouse.state)}
        tollhouse.config.write_text(json.dumps(text))
        _, out, _ = await tollhouse.run("doctor", "--json")
        (finding,) = (f for f in json.loads(out)["findings"] if f["subject"] == "replicas of gpu/small")
        return finding["state"], finding["found"]

    async with FakeVllm() as good, FakeVllm(Options(lies=Lies(model="large"))) as liar:
        assert await found([good.base_url]) == ("ok", "1 found, all serve small")
        assert await found([good.base_url, liar.base_url]) == (
            "warn",
            f"1 of 2 can be used; {liar.url.removeprefix('http://')}: it serves 'large', not 'small'",
        )
        assert (await found([liar.base_url]))[0] == "fail"
        state, said = await found({"dns": {"host": "localhost", "port": good.port}})
        assert state in ("ok", "warn"), said  # where localhost has a second address, nobody listens there
        status, out, _ = await tollhouse.run("check")
        assert status == 0
        assert "every address of localhost" in " ".join(out.split())
    state, said = await found({"dns": {"host": "nowhere.invalid", "port": 8000}})
    assert (state, "DNS knows no nowhere.invalid" in said) == ("fail", True)
    state, said = await found({"kubernetes": {"service": "tier"}})
    assert (state, "there is no service account here" in said) == ("warn", True)
