"""`tollhouse replicas`, `check` and `doctor` on servers of one's own, two processes of a gateway and their operator."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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
