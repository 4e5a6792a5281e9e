from collections.abc import AsyncIterator

import pytest

from tests.admin.office import Office, office


@pytest.fixture
async def it(sqlite_url: str) -> AsyncIterator[Office]:
    async with office(sqlite_url) as opened:
        yield opened


@pytest.fixture
async def on(store: str) -> AsyncIterator[Office]:
    """On each store."""
    async with office(store) as opened:
        yield opened
