"""A refused request that comes again is told the same before anything of it is read, until something changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.entry import Amounts, Attempt, Granted, OnExceed, Refused
from tests.support.recorder import Recorder
from tests.support.small_world import MemoryLedger, SmallWorld, deployment, provider

CHAT = "/v1/chat/completions"


class AskedLedger(MemoryLedger):
    """Counts how often it was asked; `changes` is set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.changed = 0

    @property
    def changes(self) -> int:
        return self.changed

    async def reserve(
        self, attempt: Attempt, scopes: Any, ask: Amounts, least: Amounts, *, landing: bool = False
    ) -> Granted | Refused:
        self.asked += 1
        return await super().reserve(attempt, scopes, ask, least, landing=landing)


async def post(gw: SmallWorld, words: str = "hi", **headers: str) -> tuple[int, dict[str, str], bytes]:
    body = {"model": "m", "messages": [{"role": "user", "content": words}]}
    async with gw.http.post(CHAT, json=body, headers=headers) as answer:
        said = {k: v for k, v in answer.headers.items() if k.startswith("x-") and k != "x-request-id"}
        return answer.status, said, await answer.read()


@pytest.mark.parametrize("on_exceed", [OnExceed.ERROR, OnExceed.SOFT_STOP])
async def test_the_same_request_is_told_the_same(on_exceed: OnExceed) -> None:
    ledger = AskedLedger()
    async with Recorder() as upstream:
        async with SmallWorld([deployment(provider(upstream.base_url))], ledger=ledger) as gw:
            ledger.refuse = Refused("key:k", 100, 100, 0, None, on_exceed=on_exceed)
            status, headers, body = await post(gw)
            assert (status, ledger.asked) == (402 if on_exceed is OnExceed.ERROR else 200, 1)
            for retry in range(5):
                again = await post(gw, **{"x-stainless-retry-count": str(retry)})
                headers.pop("x-gateway-overhead-ms", None)
                again[1].pop("x-gateway-overhead-ms", None)
                assert again == (status, headers, body)
            assert ledger.asked == 1
            assert [done.error for done in gw.done] == ["budget_exceeded"] * 6, "each counts as a refusal"

            await post(gw, "something else")
            await post(gw, **{"X-Task-Id": "another"})
            assert ledger.asked == 3
            ledger.refuse = None
            ledger.changed += 1  # somebody has raised the budget
            assert (await post(gw))[0] == 200
            assert upstream.received[-1].path == CHAT


@pytest.mark.parametrize("held", [True, False])
async def test_what_may_come_back_is_asked_for_again(held: bool) -> None:
    ledger = AskedLedger()
    async with Recorder() as upstream:
        async with SmallWorld([deployment(provider(upstream.base_url))], ledger=ledger) as gw:
            ledger.refuse = Refused("key:k", 10**9, 0, 10**9, None) if held else None
            first, second = await post(gw), await post(gw)
            assert ledger.asked == 2
            assert first[0] == second[0] == (402 if held else 200)
            assert json.loads(second[2])
