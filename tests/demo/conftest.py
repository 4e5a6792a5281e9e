from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gateway.demo.provider import DemoProvider
from tests.demo.talk import Talk, talking


@pytest.fixture
async def talk() -> AsyncIterator[Talk]:
    async with talking(DemoProvider()) as talk:
        yield talk
