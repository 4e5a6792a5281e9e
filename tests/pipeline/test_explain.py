"""Explanations on their way from an answer to its ledger entry; and that they stand in nobody's way."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from gateway.core.entry import Kind
from gateway.core.explanation import Explanation
from gateway.core.threads import Answered, Threads
from tests.support.recorder import Recorder, Script
from tests.support.small_world import SmallWorld, deployment, provider

CHAT = "/t/run/v1/chat/completions"
SYSTEM = {"role": "system", "content": "rule\n" * 2_000}


def body(*texts: str, system: dict[str, Any] = SYSTEM) -> bytes:
    messages = [system, *({"role": "user", "content": text} for text in texts)]
    return json.dumps({"model": "m", "messages": messages}).encode()


def says(prompt: int, read: int) -> Script:
    """An answer whose usage reports a cache."""
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": 5,
        "total_tokens": prompt + 5,
        "prompt_tokens_details": {"cached_tokens": read},
    }
    choice = {"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}
    text = json.dumps(
        {"id": "c", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}
    )
    return Script(200, [text.encode()], {"Content-Type": "application/json"})


async def test_what_a_provider_had_cached_and_does_not_read_is_kept_with_the_entry() -> None:
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url))]) as gw:
        upstream.scripts = [says(2_600, 2_560), says(2_610, 2_560), says(2_620, 0)]
        changed = {"role": "system", "content": SYSTEM["content"].replace("rule", "9:14", 1)}
        for data in (body("a"), body("a", "b"), body("a", "b", "c", system=changed)):
            async with gw.http.post(CHAT, data=data) as answer:
                assert answer.status == 200
        await gw.settled()
        first, second, third = (outcome.miss for _, outcome in gw.ledger.entries)
        assert (first, second) == (None, None)
        assert third is not None
        assert (third.cause, third.segment, third.index, third.read_tokens) == (
            "system_line_changed",
            "system",
            1,
            0,
        )
        assert third.previous_request_id == gw.ledger.entries[1][0].request_id
        # $3 per million uncached, $0.3 read
        assert third.lost_nano_usd == third.lost_tokens * 2_700


async def test_an_attempt_is_settled_whatever_becomes_of_its_explanation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Threads):
        def answered(self, task_id: str, a: Answered, now_ms: int) -> Explanation | None:
            raise RuntimeError("a fault of our own")

    async with Recorder() as upstream:
        upstream.scripts = [says(2_600, 0)]
        async with SmallWorld([deployment(provider(upstream.base_url))], threads=Broken()) as gw:
            with caplog.at_level(logging.CRITICAL):
                async with gw.http.post(CHAT, data=body("a")) as answer:
                    assert answer.status == 200
            assert await gw.settled() == [(1, Kind.POST, "stop", "")]
