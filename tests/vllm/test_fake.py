"""The fake vLLM: what its cache, its queue and its ends look like from outside."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.support.fake_vllm import FakeVllm, Lies, Options

RULES = "Keep answers short. " * 101  # 2,020 bytes


async def chat(replica: FakeVllm, text: str, **more: Any) -> dict[str, Any]:
    body = {"model": "small", "max_tokens": 4, **more}
    body["messages"] = [{"role": "system", "content": RULES}, {"role": "user", "content": text}]
    async with aiohttp.ClientSession() as http:
        async with http.post(replica.base_url + "/chat/completions", json=body) as answer:
            found: dict[str, Any] = await answer.json()
            return {"status": answer.status, **found}


def cached(answer: dict[str, Any]) -> tuple[int, int]:
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


async def streamed(replica: FakeVllm, **more: Any) -> list[Any]:
    """The data of each event."""
    body = {"model": "small", "stream": True, "messages": [{"role": "user", "content": "x"}], **more}
    async with aiohttp.ClientSession() as http:
        async with http.post(replica.base_url + "/chat/completions", json=body) as answer:
            lines = (await answer.text()).split("\n\n")
    data = [line.removeprefix("data: ") for line in lines if line]
    return [json.loads(d) if d[0] == "{" else d for d in data]


async def metrics(replica: FakeVllm) -> dict[str, float]:
    async with aiohttp.ClientSession() as http, http.get(replica.url + "/metrics") as answer:
        text = await answer.text()
    rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name.partition("{")[0]: float(value) for name, value in rows}


async def test_whole_blocks_are_read_again_but_for_the_last_and_not_with_another_salt() -> None:
    async with FakeVllm() as replica:
        assert cached(await chat(replica, "a question")) == (518, 0)
        assert cached(await chat(replica, "a question")) == (518, 512)
        assert cached(await chat(replica, "another one")) == (518, 480)
        assert cached(await chat(replica, "a question", cache_salt="tenant-1")) == (518, 0)
        await replica.restart()
        assert cached(await chat(replica, "a question")) == (518, 0)


async def test_a_prompt_that_ends_with_a_block_has_that_block_computed_anew() -> None:
    async with FakeVllm(Options(block_tokens=2)) as replica:
        first = await chat(replica, "1234")
        again = await chat(replica, "1234")
        assert cached(first)[0] % 2 == 0
        assert cached(again) == (cached(first)[0], cached(first)[0] - 2)


async def test_the_longest_unused_prompt_is_forgotten_first_and_from_its_end() -> None:
    async with FakeVllm(Options(kv_tokens=1_024)) as replica:
        for salt in ("one", "two", "one", "three"):
            await chat(replica, "q", cache_salt=salt)
        assert cached(await chat(replica, "q", cache_salt="one"))[1] == 480 + 32
        assert cached(await chat(replica, "q", cache_salt="two"))[1] == 0


async def test_what_was_answered_can_be_read_as_a_part_of_the_next_prompt() -> None:
    async with FakeVllm() as replica:
        first = await chat(replica, "q", max_tokens=200, ignore_eos=True)
        said = first["choices"][0]["message"]["content"]
        body = {"role": "assistant", "content": said}
        messages = [{"role": "system", "content": RULES}, {"role": "user", "content": "q"}, body]
        async with aiohttp.ClientSession() as http:
            more = {"model": "small", "messages": [*messages, {"role": "user", "content": "and?"}]}
            async with http.post(replica.base_url + "/chat/completions", json=more) as answer:
                prompt, read = cached(await answer.json())
        assert read == (cached(first)[0] + 200) // 32 * 32 <= prompt


async def test_lower_priorities_go_first_and_a_full_queue_refuses() -> None:
    async with FakeVllm(Options(seqs_max=1, queued_max=3)) as replica:
        replica.engine.hold_at = 1
        asked = [asyncio.create_task(chat(replica, "running"))]
        await replica.engine.until(held=1)
        for waiting, priority in enumerate((5, -5), 1):
            asked.append(asyncio.create_task(chat(replica, str(priority), priority=priority)))
            await replica.engine.until(waiting=waiting)
        full = await chat(replica, "one too many")
        replica.engine.let_go()
        assert [a["status"] for a in await asyncio.gather(*asked)] == [200, 200, 200]
        assert (full["status"], full["error"]["type"]) == (503, "Service Unavailable")
        order = [line.client_request_id or line.status for line in replica.bill]
        assert order == [503, 200, 200, 200]
        salted = [s.body["messages"][1]["content"] for s in replica.seen]
        assert salted == ["running", "5", "-5", "one too many"]
        assert [line.request_id[-1] for line in replica.bill] == ["4", "1", "3", "2"]


async def test_sigterm_aborts_with_a_polite_end() -> None:
    async with FakeVllm() as replica:
        replica.engine.hold_at = 3
        asked = asyncio.create_task(streamed(replica, stream_options={"include_usage": True}))
        await replica.engine.until(held=1)
        await replica.terminate()
        *pieces, last, usage, done = await asked
        assert len(pieces) == 4
        assert last["choices"][0]["delta"] == {}
        assert last["choices"][0]["finish_reason"] == "abort"
        assert usage["usage"]["completion_tokens"] == 3
        assert done == "[DONE]"
        assert [(b.status, b.finish, b.output, b.state) for b in replica.bill] == [
            (200, "abort", 3, "interrupted")
        ]


async def test_sigterm_before_the_first_token_leaves_a_stream_without_any_reason() -> None:
    async with FakeVllm() as replica:
        replica.engine.hold_at = 0
        asked = asyncio.create_task(streamed(replica, stream_options={"include_usage": True}))
        await replica.engine.until(held=1)
        await replica.terminate()
        opening, usage, done = await asked
        assert opening["choices"][0]["finish_reason"] is None
        assert usage["usage"]["completion_tokens"] == 0
        assert done == "[DONE]"


async def test_a_drain_finishes_what_runs_refuses_the_rest_and_calls_itself_well() -> None:
    async with FakeVllm(Options(shutdown_timeout_s=5)) as replica:
        replica.engine.hold_at = 1
        asked = asyncio.create_task(chat(replica, "running"))
        await replica.engine.until(held=1)
        ending = asyncio.create_task(replica.terminate())
        late = await chat(replica, "late")
        async with aiohttp.ClientSession() as http, http.get(replica.url + "/health") as health:
            assert health.status == 200
        replica.engine.let_go()
        await ending
        assert (late["status"], late["error"]["type"]) == (500, "InternalServerError")
        assert (await asked)["choices"][0]["finish_reason"] == "length"


async def test_sudden_death_cuts_without_an_end_and_a_restart_is_younger() -> None:
    async with FakeVllm() as replica:
        born = (await metrics(replica))["process_start_time_seconds"]
        replica.engine.hold_at = 2
        asked = asyncio.create_task(streamed(replica))
        await replica.engine.until(held=1)
        await replica.restart()
        with pytest.raises(aiohttp.ClientError):
            await asked
        assert [(b.status, b.finish, b.output) for b in replica.bill] == [(0, "", 2)]
        assert (await metrics(replica))["process_start_time_seconds"] > born


async def test_metrics_count_tokens_in_three_namings() -> None:
    async with FakeVllm() as replica:
        await chat(replica, "q")
        await chat(replica, "q")
        told = await metrics(replica)
        assert told["vllm:prefix_cache_queries_total"] == 2 * 515
        assert told["vllm:prefix_cache_hits_total"] == 512
        assert told["vllm:kv_cache_usage_perc"] == 0
    async with FakeVllm(Options(metrics="older")) as replica:
        assert "vllm:gpu_cache_usage_perc" in await metrics(replica)
    async with FakeVllm(Options(metrics="sglang")) as replica:
        assert (await metrics(replica))["sglang:num_running_reqs"] == 0


async def test_a_silent_stream_is_kept_alive_with_comments_and_lies_are_told() -> None:
    lies = Lies(model="other", usage=lambda told: {**told, "completion_tokens": -1})
    async with FakeVllm(Options(keep_alive_s=0.01, lies=lies)) as replica:
        replica.engine.hold_at = 1
        body = {"model": "small", "stream": True, "messages": [{"role": "user", "content": "x"}]}
        async with aiohttp.ClientSession() as http:
            async with http.post(replica.base_url + "/chat/completions", json=body) as answer:
                async for line in answer.content:
                    if line.startswith(b":"):
                        break
                replica.engine.let_go()
                rest = await answer.text()
        assert rest.endswith("data: [DONE]\n\n")
        assert '"model":"other"' in rest
        assert (await chat(replica, "q"))["usage"]["completion_tokens"] == -1
