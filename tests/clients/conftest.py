"""A gateway in front of the demo provider, and the vendors' own libraries pointed at it with their defaults."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anthropic
import openai
import pytest

from gateway.core.catalog import Wire
from gateway.demo.provider import DemoProvider
from tests.support.small_world import KEY, SmallWorld, deployment, provider

GPT, CLAUDE, EMBED = "gpt-5", "claude-opus-5-5", "text-embedding-3-small"


@pytest.fixture
async def demo() -> AsyncIterator[DemoProvider]:
    async with DemoProvider(keep_requests=100) as demo:
        yield demo


@pytest.fixture
async def gw(demo: DemoProvider) -> AsyncIterator[SmallWorld]:
    at = provider(demo.base_url, Wire.DEMO)
    plays = {GPT: "demo-fast", CLAUDE: "demo-large", EMBED: "demo-embed"}
    served = [deployment(at, name, played, aliases=(f"up/{name}",)) for name, played in plays.items()]
    async with SmallWorld(served) as gw:
        yield gw


@pytest.fixture
async def gpt(gw: SmallWorld) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gw.url}/v1", api_key=KEY) as client:
        yield client


@pytest.fixture
async def claude(gw: SmallWorld) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=gw.url, api_key=KEY) as client:
        yield client
