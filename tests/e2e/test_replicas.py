"""Three servers of one's own behind a gateway: found, asked, killed, drained, restarted, and lied to."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp

from gateway.settings import load
from tests.support.fake_vllm import Lies, Options
from tests.support.gpu_tier import GpuTier, gpu_tier, written
from tests.support.servers import redis_server


async def test_killing_one_of_three_under_load(sqlite_url: str, tmp_path: Path) -> None:
    """No client sees an error before its first byte; streams that had begun end with an error event and are settled."""
    async with gpu_tier(sqlite_url, tmp_path) as tier:
        victim = tier.replicas[0]
        for replica in tier.replicas:
            replica.engine.hold_at = 1  # every answer stops behind its first token
        streams = [asyncio.create_task(tier.ask(f"{i} " * 500, stream=True)) for i in range(12)]
        await asyncio.gather(*(r.engine.until(held=1) for r in tier.replicas))
        await tier.until(lambda: sum(r.engine.held for r in tier.replicas) == 12)
        begun = victim.engine.held
        assert begun > 1
        victim.engine.hold_at = 0  # and those that come now, before it
        late = [asyncio.create_task(tier.ask(f"late {i} " * 500)) for i in range(12)]
        await victim.engine.until(held=begun + 1)
        await victim.kill()
        for replica in tier.replicas[1:]:
            replica.engine.let_go()
        answers = await asyncio.gather(*streams, *late)
        assert [status for status, _, _ in answers] == [200] * 24
        cut = [text for _, _, text in answers[:12] if "upstream_lost" in text]
        assert len(cut) == begun
        assert all('"content"' in text and text.rstrip().startswith("data:") for text in cut)
        assert all("upstream" not in text for _, _, text in answers[12:])

        entries = await tier.entries()
        assert len({e["attempt_id"] for e in entries}) == len(entries), "one entry for each attempt"
        lost = [e for e in entries if e["kind"] == "void"]
        assert len(entries) == 24 + len(lost)
        assert {e["error"] for e in lost} <= {"upstream_lost", "upstream_unreachable"}
        assert sum(e["finish"] == "upstream_cut" for e in entries) == begun
        health = await tier.admin.get("/admin/v1/health")
        assert {row["status"] for row in (await health.json())["data"]} == {"closed"}

        await tier.until(lambda: tier.health() == ["unreachable", "ready", "ready"])
        await victim.start()
        await tier.until(lambda: tier.health()[0] == "returning")


async def test_a_server_that_drains_behind_a_healthy_probe_is_left_at_once(
    sqlite_url: str, tmp_path: Path
) -> None:
    async with gpu_tier(sqlite_url, tmp_path, [Options(shutdown_timeout_s=10.0)] * 2) as tier:
        leaving, staying = tier.replicas
        leaving.engine.hold_at = 1
        streams = [asyncio.create_task(tier.ask(f"{i} " * 500, stream=True)) for i in range(4)]
        await tier.until(lambda: len(leaving.seen) + len(staying.seen) == 4)
        await leaving.engine.until(held=len(leaving.seen))
        assert leaving.engine.held
        ending = asyncio.create_task(leaving.terminate())
        await tier.until(lambda: leaving.draining)
        before = len(leaving.seen)
        for i in range(6):
            assert (await tier.ask(f"after {i} " * 500))[0] == 200
        assert len(leaving.seen) <= before + 1, "it was asked once more at most"
        leaving.engine.let_go()
        assert ["[DONE]" in text for _, _, text in await asyncio.gather(*streams)] == [True] * 4
        await ending
        assert staying.engine.in_flight == 0
        kinds = [e["kind"] for e in await tier.entries()]
        assert (kinds.count("post"), kinds.count("void")) == (10, len(leaving.seen) - before)


async def _turns(tier: GpuTier, session: str, count: int) -> list[str]:
    """The replicas that served so many turns of one conversation."""
    messages: list[dict[str, str]] = []
    served = []
    for n in range(count):
        messages.append({"role": "user", "content": f"{session} {n} " * 400})
        body = {"model": "small", "messages": messages}
        async with tier.http.post(
            "/v1/chat/completions", json=body, headers={"X-Session-ID": session}
        ) as answer:
            assert answer.status == 200
            served.append(answer.headers["x-replica"])
            message = (await answer.json())["choices"][0]["message"]
        messages.append({"role": "assistant", "content": message["content"]})
    return served


async def test_cached_tokens_are_foreseen_and_a_restart_empties_the_index(
    sqlite_url: str, tmp_path: Path
) -> None:
    async with gpu_tier(sqlite_url, tmp_path) as tier:
        served = [await _turns(tier, name, 5) for name in "abc"]
        assert [len(set(names)) for names in served] == [1, 1, 1]
        rows = list(tier.rows().values())
        told = sum(r.reported_cached_tokens for r in rows)
        foreseen = sum(r.predicted_cached_tokens for r in rows)
        assert told > 0
        assert abs(told - foreseen) < 0.1 * told
        assert sum(r.predictions_close for r in rows) >= 0.8 * sum(r.predictions for r in rows)

        home = next(r for r in tier.replicas if tier.rows()[r.base_url].name == served[0][0])
        assert tier.rows()[home.base_url].index_blocks > 0
        await home.restart()
        await tier.until(lambda: tier.rows()[home.base_url].restarts == 1)
        assert tier.rows()[home.base_url].index_blocks == 0
        assert tier.rows()[home.base_url].health == "returning"


async def test_what_is_drained_gets_nothing_new_and_comes_back(sqlite_url: str, tmp_path: Path) -> None:
    async with gpu_tier(sqlite_url, tmp_path) as tier:
        first = tier.replicas[0]
        body = {"deployment": "gpu/small", "replica": first.url.removeprefix("http://")}
        async with tier.admin.post("/admin/v1/replicas/drain", json=body) as answer:
            row = await answer.json()
            assert (answer.status, row["health"], row["in_use"]) == (200, "drained", False)
        for i in range(6):
            assert (await tier.ask(f"{i} " * 500))[0] == 200
        assert len(first.seen) == 0
        async with tier.admin.post(
            "/admin/v1/replicas/undrain", json={**body, "replica": row["name"]}
        ) as answer:
            assert (await answer.json())["health"] == "returning"
        async with tier.admin.post("/admin/v1/replicas/drain", json={**body, "replica": "nobody"}) as answer:
            assert answer.status == 404
        async with tier.admin.get("/admin/v1/audit?action=replica.drain") as answer:
            (entry,) = (await answer.json())["data"]
            assert entry["subject"] == "gpu/small"


async def test_a_server_that_is_no_replica_is_shown_and_not_used(sqlite_url: str, tmp_path: Path) -> None:
    options = [
        Options(),
        Options(lies=Lies(model="large")),
        Options(lies=Lies(max_model_len=4_096)),
        Options(metrics="older"),
        Options(metrics="sglang"),
    ]
    async with gpu_tier(sqlite_url, tmp_path, options) as tier:
        rows = tier.rows()
        seen = [(rows[r.base_url].health, rows[r.base_url].why) for r in tier.replicas]
        assert seen == [
            ("ready", ""),
            ("unfit", "it serves 'large', not 'small'"),
            ("unfit", "its context is 4096 tokens, not 32000"),
            ("ready", "metrics in an older naming"),
            ("ready", ""),
        ]
        for i in range(9):
            assert (await tier.ask(f"{i} " * 500))[0] == 200
        assert [bool(r.seen) for r in tier.replicas] == [True, False, False, True, True]
        async with tier.admin.get("/metrics") as answer:
            page = await answer.text()
        up = [
            float(line.split()[-1]) for line in page.splitlines() if line.startswith("tollhouse_replica_up{")
        ]
        assert sorted(up) == [0, 0, 1, 1, 1]


async def test_a_name_that_leads_nowhere_and_later_to_a_server(sqlite_url: str, tmp_path: Path) -> None:
    nowhere = {"urls": None, "dns": {"host": "nowhere.invalid", "port": 8000}}
    async with gpu_tier(sqlite_url, tmp_path, [Options()], source=nowhere) as tier:
        for _ in range(3):  # the second ejects it
            status, name, text = await tier.ask()
            assert (status, name) == (502, "")
        assert "no replica of gpu/small can be used" in text
        assert tier.app.health["gpu/small"].cause == "failures"
        assert {(e["kind"], e["error"]) for e in await tier.entries()} == {("void", "upstream_unreachable")}
        async with tier.admin.get("/metrics") as answer:
            page = await answer.text()
        assert 'tollhouse_replicas_lookup_failed{deployment="gpu/small"} 1' in page

        local = {"dns": {"host": "localhost", "port": tier.replicas[0].port}, "poll_s": 0.1, "refresh_s": 0.5}
        text = json.dumps({**json.loads(tier.config.read_text()), **written(local)})
        tier.config.write_text(text)
        tier.app.reload(lambda: load(tier.config, {}))
        await tier.until(lambda: any(row.in_use for row in tier.rows().values()))
        assert (await tier.ask())[0] == 200, "an ejection for want of replicas is over when there is one"


async def test_usage_that_cannot_be_is_shown_and_not_learned_from(sqlite_url: str, tmp_path: Path) -> None:
    def inflated(usage: dict[str, Any]) -> dict[str, Any]:
        tokens = 10**6
        return {**usage, "prompt_tokens": tokens, "total_tokens": tokens + usage["completion_tokens"]}

    async with gpu_tier(sqlite_url, tmp_path, [Options(lies=Lies(usage=inflated))]) as tier:
        assert (await tier.ask("short"))[0] == 200
        await tier.app.quiet()
        (row,) = tier.rows().values()
        assert (row.lies, row.prompt_tokens, row.predictions) == (1, 0, 0)
        assert row.why.startswith("prompt_tokens 1000000 for a prompt of ")


async def _told(tier: GpuTier) -> None:
    """It has said what it knows, and heard what others said."""
    await tier.app.quiet()
    shared = tier.app.fleets.shared
    assert shared is not None
    await shared.turn()
    await shared.idle()


async def test_two_gateways_agree_through_redis_where_a_conversation_is_and_who_is_drained(
    postgres_url: str, tmp_path: Path
) -> None:
    with redis_server() as redis:
        shared: dict[str, Any] = {"redis_url": redis.url, "pepper": "a pepper that both of them have"}
        async with gpu_tier(postgres_url, tmp_path, gateway="one", **shared) as one:
            urls = {"urls": [r.base_url for r in one.replicas]}
            async with gpu_tier(postgres_url, tmp_path, [], source=urls, gateway="two", **shared) as two:
                other = aiohttp.ClientSession(
                    f"http://127.0.0.1:{two.app.edge.port}", headers=one.http.headers
                )
                two.replicas = one.replicas
                async with other:
                    homes = [(await _turns(one, name, 2))[0] for name in "abc"]
                    assert len(set(homes)) == 3
                    moved = GpuTier(two.app, two.replicas, other, two.admin, two.config)
                    await _told(one)
                    await _told(two)
                    assert [(await _turns(moved, name, 3))[0] for name in "abc"] == homes

                body = {"deployment": "gpu/small", "replica": homes[0]}
                async with one.admin.post("/admin/v1/replicas/drain", json=body) as answer:
                    assert answer.status == 200
                await two.until(lambda: "drained" in two.health())
                assert one.health() == two.health()
