"""What an attempt reserves: bounded by what the provider said about the step before, and never squeezed below comfort."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.core.catalog import OnDisconnect
from gateway.core.entry import Amounts, Attempt, Granted, Refused
from gateway.demo.provider import DemoProvider
from tests.support.provider_fakes import ProviderFake
from tests.support.small_world import MemoryLedger, SmallWorld, Wire, deployment, provider

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
SYSTEM = "Work with care. " * 500


class Asking(MemoryLedger):
    """Remembers what each hold asked for, and the least that it would take."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Amounts, Amounts]] = []

    async def reserve(
        self,
        attempt: Attempt,
        scopes: Sequence[str],
        ask: Amounts,
        least: Amounts,
        *,
        landing: bool = False,
    ) -> Granted | Refused:
        self.asked.append((ask, least))
        return await super().reserve(attempt, scopes, ask, least, landing=landing)


@asynccontextmanager
async def demo() -> AsyncIterator[tuple[SmallWorld, Asking]]:
    ledger = Asking()
    async with DemoProvider() as upstream:
        at = provider(upstream.base_url, Wire.DEMO, on_disconnect=OnDisconnect.DRAIN, image_tokens_max=765)
        models = [deployment(at, name, name) for name in ("demo-fast", "demo-large")]
        async with SmallWorld(models, ledger=ledger) as gw:
            yield gw, ledger


def turn(text: str, *before: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "system", "content": SYSTEM}, *before, {"role": "user", "content": text}]


async def said(gw: SmallWorld, path: str = CHAT, **body: Any) -> dict[str, Any]:
    async with gw.http.post(path, json={"model": "demo-fast", **body}) as answer:
        assert answer.status == 200, await answer.text()
        found: dict[str, Any] = await answer.json()
    await gw.settled()
    return found


async def test_the_second_step_of_a_run_reserves_a_fraction_of_its_bytes() -> None:
    async with demo() as (gw, ledger):
        first = await said(gw, messages=turn("one"))
        second = await said(
            gw, messages=turn("two", {"role": "user", "content": "one"}, first["choices"][0]["message"])
        )
        (cold, _), (warm, _) = ledger.asked
        assert cold.input_tokens is not None
        assert warm.input_tokens is not None
        assert cold.input_tokens > len(SYSTEM)
        assert second["usage"]["prompt_tokens"] <= warm.input_tokens < cold.input_tokens / 2


async def test_a_deployment_that_bills_more_than_its_bound_is_not_believed_again() -> None:
    async with ProviderFake() as fake:
        ledger = Asking()
        async with SmallWorld([deployment(provider(fake.url))], ledger=ledger) as gw:
            for tokens in (1_000, 100_000, 1_000, 1_000):
                fake.replies(
                    {"id": "c", "choices": [], "usage": {"prompt_tokens": tokens, "completion_tokens": 1}}
                )
                await said(gw, model="m", messages=turn("again"))
    first, tight, *after = [ask.input_tokens for ask, _ in ledger.asked]
    assert tight is not None
    assert tight < 1_500
    assert after == [first, first]


async def test_what_a_providers_own_tools_bring_says_nothing_about_its_tokens() -> None:
    search = [{"type": "web_search"}, {"type": "function", "function": {"name": "f", "parameters": {}}}]
    async with ProviderFake() as fake:
        ledger = Asking()
        async with SmallWorld([deployment(provider(fake.url))], ledger=ledger) as gw:
            for tokens in (1_000, 100_000, 1_000):
                usage = {"prompt_tokens": tokens, "completion_tokens": 1}
                fake.replies({"id": "c", "choices": [], "usage": usage})
                await said(gw, model="m", messages=turn("again"), tools=search)
    first, tight, after = [ask.input_tokens or 0 for ask, _ in ledger.asked]
    assert tight < 1_500 < first
    assert after == tight


@pytest.mark.parametrize(
    ("most", "more", "bounded"),
    [
        (0, {"tools": [{"type": "web_search"}]}, 0),  # it runs none
        (40_000, {"tools": [{"type": "web_search"}]}, 40_000),
        (None, {"tools": [{"type": "web_search"}]}, None),
        (None, {"tools": [{"type": "mcp", "server_url": "https://mcp.example"}]}, None),
        (None, {"web_search_options": {}}, None),
        (None, {"tools": [{"type": "function", "function": {"name": "web_search"}}]}, 0),
    ],
)
async def test_tools_that_a_provider_runs_itself_are_bounded_only_by_what_its_operator_says(
    most: int | None, more: dict[str, Any], bounded: int | None
) -> None:
    async with ProviderFake() as fake:
        ledger = Asking()
        at = provider(fake.url, server_tools_tokens_max=most)
        fake.replies({"id": "c", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}})
        async with SmallWorld([deployment(at)], ledger=ledger) as gw:
            body = {"model": "m", "messages": turn("look it up"), **more}
            async with gw.http.post(CHAT, json=body) as answer:
                await answer.read()
            await gw.settled()
    ((ask, _),) = ledger.asked
    size = len(json.dumps(body).encode())
    assert (
        ask.input_tokens is None
        if bounded is None
        else bounded <= (ask.input_tokens or -1) < bounded + 2 * size
    )


async def test_a_refusal_for_a_providers_own_tool_names_the_tools() -> None:
    async with ProviderFake() as fake:
        ledger = Asking()
        ledger.refuse = Refused("team:a", 10, 0, 0, None)
        at = provider(fake.url, server_tools_tokens_max=None)
        async with SmallWorld([deployment(at)], ledger=ledger) as gw:
            body = {"model": "m", "messages": turn("look it up"), "tools": [{"type": "web_search"}]}
            async with gw.http.post(CHAT, json=body) as answer:
                error = (await answer.json())["error"]
    assert (answer.status, error["param"], error["code"]) == (400, "tools", "unboundable_request")
    assert error["message"] == (
        "this request has no known price or no upper bound, and the team a has a hard budget in dollars; it offers a tool "
        "that the provider runs itself (as web search), and what such a tool finds is billed as input without a limit: "
        "switch it off, or have server_tools_tokens_max set for this provider"
    )
    assert fake.asked == []


async def test_images_have_a_bound_and_files_have_none() -> None:
    async with demo() as (gw, ledger):
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 200_000}}
        file = {"type": "file", "file": {"file_data": "data:application/pdf;base64," + "A" * 200}}
        for part in (picture, file):
            await said(gw, messages=[{"role": "user", "content": [part]}])
        (image, _), (opaque, _) = ledger.asked
        assert image.input_tokens is not None
        assert 765 < image.input_tokens < 1_500
        assert opaque == Amounts(None, None, 8_192)


async def test_output_is_squeezed_no_further_than_what_is_usual_for_this_key_client_and_model() -> None:
    async with ProviderFake() as fake:
        ledger = Asking()
        async with SmallWorld([deployment(provider(fake.url))], ledger=ledger) as gw:
            for tokens in (300, 10_000, 300):
                fake.replies(
                    {"id": "c", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}}
                )
                await said(gw, model="m", max_tokens=32_000, messages=turn("go"))
    # the answer of 10,000 tokens is in the class that ends at 10,239, and half as much again is the margin
    assert [(ask.output_tokens, least.output_tokens) for ask, least in ledger.asked] == [
        (32_000, 2_048),
        (32_000, 2_048),
        (32_000, 10_239 * 3 // 2),
    ]


async def test_what_is_kept_for_thinking_is_never_squeezed() -> None:
    async with demo() as (gw, ledger):
        thinking = {"type": "enabled", "budget_tokens": 20_000}
        body = {"model": "demo-large", "max_tokens": 32_000, "thinking": thinking}
        await said(gw, MESSAGES, **body, messages=[{"role": "user", "content": "go"}])
        assert [least.output_tokens for _, least in ledger.asked] == [20_000 + 2_048]


async def test_what_the_gateway_moves_in_a_prompt_is_bounded_too() -> None:
    """Levels that change from step to step, and a line that changes with every request."""
    async with demo() as (gw, ledger):
        before: list[dict[str, Any]] = []
        for n, level in enumerate(("relocate", "relocate", "observe", "relocate", "safe", "relocate")):
            system = f"{SYSTEM}\nThe time is 12:0{n}:{n}7.\n{SYSTEM}"
            body = {"model": "demo-large", "max_tokens": 64, "system": system}
            messages = [*before, {"role": "user", "content": f"step {n}"}]
            async with gw.http.post(
                MESSAGES, json={**body, "messages": messages}, headers={"x-cache-level": level}
            ) as answer:
                found = await answer.json()
                assert answer.status == 200, found
            await gw.settled()
            before = [*messages, {"role": "assistant", "content": found["content"]}]
        billed = [outcome.usage.input_total for _, outcome in gw.ledger.entries]
        held = [ask.input_tokens or 0 for ask, _ in ledger.asked]
        assert len(billed) == 6
        assert all(most >= truth for most, truth in zip(held, billed, strict=True)), (held, billed)
