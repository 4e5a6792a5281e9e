"""The campaign of `make test-vllm` in front of fakes: it finds nothing, and would find a loss or a double."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.fake_vllm import FakeVllm, Options
from tests.support.gpu_tier import gpu_tier
from tests.vllm.campaign import Campaign, run
from tests.vllm.checks import alike, settled_once
from tests.vllm.load import Call

CALL = Call("req_1", 200, "said", "length", "", (100, 32, 4))
ENTRY: dict[str, Any] = {
    "request_id": "req_1",
    "attempt_id": "att_1",
    "kind": "post",
    "error": "",
    "input_uncached": 68,
    "cache_read": 32,
    "output": 4,
}


class Played(FakeVllm):
    """A fake that is ended as a process is."""

    async def back(self) -> None:
        await self.start()


async def test_nothing_is_lost_or_doubled_in_front_of_fakes(sqlite_url: str, tmp_path: Path) -> None:
    fast = Options(prefill_tokens_per_s=200_000, decode_tokens_per_s=8_000, output_tokens=1_000)
    async with Played(replace(fast, shutdown_timeout_s=10)) as drains, Played(fast) as aborts:
        found = await run(tmp_path, sqlite_url, drains, aborts, agents=3, turns=30, again=False)
    assert [(f.name, f.wrong) for f in found] == [(f.name, []) for f in found]
    assert len(found) == 4


async def test_predictions_hold_with_answers_of_a_hundred_tokens(sqlite_url: str, tmp_path: Path) -> None:
    """They are in the next prompt, and in the cache but for what of them does not fill a block."""
    long = Options(output_tokens=1_000)
    async with Played(long) as one, Played(long) as other:
        urls = {"urls": [one.base_url, other.base_url]}
        async with gpu_tier(sqlite_url, tmp_path, (), source=urls) as tier:
            await tier.until(lambda: len(tier.rows()) == 2 and all(r.in_use for r in tier.rows().values()))
            found = await Campaign(tier, (one, other), agents=4).predictions(25, output_tokens=100)
    assert found.wrong == []


async def test_a_fake_is_like_itself_and_not_like_one_that_lacks_a_flag() -> None:
    async with FakeVllm() as same, FakeVllm(Options(details=False)) as other:
        assert await alike(same.url, "small") == []
        assert {line.partition(":")[0] for line in await alike(other.url, "small")} == {
            "chat",
            "chat with an id",
            "chat with salt, session and priority",
            "chat stream with usage",
            "tool call",
            "tool call stream",
        }


def test_a_loss_and_a_double_are_found() -> None:
    broken = Call("req_1", 200, "sa", "", "upstream_lost", None)
    lost = {**ENTRY, "attempt_id": "att_0", "kind": "void", "error": "upstream_lost"}
    assert settled_once([CALL], [ENTRY], 0) == []
    assert settled_once([CALL], [lost, ENTRY], 0) == []
    assert settled_once([broken], [lost], 0) == []
    for calls, entries, holds in (
        ([CALL], [], 0),
        ([CALL], [lost], 0),
        ([CALL], [ENTRY, {**ENTRY, "attempt_id": "att_2"}], 0),
        ([CALL], [ENTRY, ENTRY], 0),
        ([CALL], [{**ENTRY, "output": 5}], 0),
        ([broken], [ENTRY], 0),
        ([broken], [], 0),
        ([Call("req_1", 502, "", "", "upstream_lost", None)], [lost], 0),
        ([CALL], [ENTRY, {**ENTRY, "request_id": "req_2", "attempt_id": "att_2"}], 0),
        ([CALL], [{**lost, "error": "internal"}, ENTRY], 0),
        ([CALL], [ENTRY], 1),
    ):
        assert settled_once(calls, entries, holds) != [], (calls, entries, holds)
