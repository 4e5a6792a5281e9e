"""The fake vLLM against answers that a real one gave: the same keys, kinds, order of events, reasons and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.fake_vllm import FakeVllm
from tests.vllm.probes import Answer, Ask, answers, asked
from tests.vllm.shapes import events, metric_families, shape

BLOCK = 32  # of the server that was recorded


@pytest.fixture
def recorded(golden: Path) -> dict[str, Any]:
    """What each check of the recorded probe found."""
    lines = (golden / "probe.jsonl").read_text().splitlines()
    return {row["check"]: row for row in map(json.loads, lines)}


@pytest.fixture
async def fake() -> dict[str, Answer]:
    async with FakeVllm() as replica:
        return await answers(replica.url, "small")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("chat stream with usage", "chat_stream.sse"),
        ("tool call stream", "tool_stream.sse"),
        ("messages stream", "messages_stream.sse"),
    ],
)
def test_streams(name: str, file: str, fake: dict[str, Answer], golden: Path) -> None:
    assert fake[name].body == events((golden / file).read_text())


def test_usage_of_a_whole_answer(fake: dict[str, Answer], recorded: dict[str, Any]) -> None:
    told = dict(fake["chat"].body)["usage"]
    for check in ("prefix_cold", "prefix_warm", "prefix_warm_again", "cache_salt_isolates"):
        assert told == shape(recorded[check]["usage"])


async def test_a_prompt_is_counted_as_the_real_one_counted_it(recorded: dict[str, Any]) -> None:
    """Its blocks, and which of them were read: the three questions begin with the same 3,392 tokens."""
    for check, shared in (("prefix_warm", 3_392), ("prefix_warm_again", 3_424)):
        usage = recorded[check]["usage"]
        prompt, details = usage["prompt_tokens"], usage["prompt_tokens_details"]
        told = details["cached_tokens"], details["created_cache_tokens"]
        async with FakeVllm() as replica, aiohttp.ClientSession(replica.url) as http:
            text = "a" * (prompt * 4 - 23)  # 23 bytes are the roles around it
            for last in ("b" * (len(text) - shared * 4 + 7), ""):
                kept = text[: len(text) - len(last)]
                body = {"model": "small", "messages": [{"role": "user", "content": kept + last}]}
                async with http.post("/v1/chat/completions", json=body) as answer:
                    found = (await answer.json())["usage"]
        details = found["prompt_tokens_details"]
        assert found["prompt_tokens"] == prompt
        assert (details["cached_tokens"], details["created_cache_tokens"]) == told
        assert details["cached_tokens"] <= (prompt - 1) // BLOCK * BLOCK


def test_a_request_id_becomes_that_of_the_answer(fake: dict[str, Answer], recorded: dict[str, Any]) -> None:
    assert fake["chat with an id"].request_id == recorded["x_request_id"]["echoed"]


async def test_errors_that_no_other_replica_would_answer_differently(
    fake: dict[str, Answer], recorded: dict[str, Any]
) -> None:
    unknown = recorded["unknown_model"]
    found = fake["unknown model, chat"]
    assert (found.status, found.body) == (unknown["status"], shape(json.loads(unknown["body"])))
    async with FakeVllm() as replica, aiohttp.ClientSession(replica.url) as http:
        body = {"model": "nope", "messages": [{"role": "user", "content": "x"}]}
        async with http.post("/v1/chat/completions", json=body) as answer:
            assert json.loads(await answer.text()) == json.loads(unknown["body"])
        said = recorded["too_long"]  # cut off after 300 characters
        body = {"model": "small", "messages": [{"role": "user", "content": "x " * 70_000}]}
        async with http.post("/v1/chat/completions", json=body) as answer:
            text = await answer.text()
    assert fake["too long, chat"].status == said["status"]
    assert text.replace(": ", ":").startswith(said["body"].replace(": ", ":")[:170])
    assert '"type": "BadRequestError"' in text


def test_a_forced_tool_call(fake: dict[str, Answer], recorded: dict[str, Any]) -> None:
    assert dict(fake["tool call"].body)["choices"] == shape(recorded["forced_tool_call"]["choice"])


async def test_who_leaves_is_not_counted_as_a_success(recorded: dict[str, Any]) -> None:
    assert recorded["abort"]["success_delta"] == {}
    assert recorded["abort"]["running"][-1] == 0
    async with FakeVllm() as replica:
        replica.engine.hold_at = 5
        async with aiohttp.ClientSession(replica.url) as http:
            body = {"model": "small", "stream": True, "messages": [{"role": "user", "content": "x"}]}
            async with http.post("/v1/chat/completions", json=body):
                await replica.engine.until(held=1)
        await replica.engine.until(in_flight=0)
        assert replica.engine.counters.finished == {}
        assert replica.engine.counters.output_tokens == 5


async def test_metrics_have_the_recorded_names_types_and_labels(golden: Path) -> None:
    real = metric_families((golden / "metrics.txt").read_text())
    async with FakeVllm() as replica, aiohttp.ClientSession(replica.url) as http:
        await asked(http, Ask("/v1/chat/completions", {"model": "small", "messages": []}))
        async with http.get("/metrics") as answer:
            ours = metric_families(await answer.text())
    kind, labels = ours.pop("vllm:cache_config_info")
    assert kind == real["vllm:cache_config_info"][0]
    assert labels <= real["vllm:cache_config_info"][1]
    assert {name: real.get(name) for name in ours} == ours
