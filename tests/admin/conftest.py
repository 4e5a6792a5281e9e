from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.admin.office import Office, office


@pytest.fixture
async def it(tmp_path: Path) -> AsyncIterator[Office]:
    async with office(tmp_path) as opened:
        yield opened
