from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.collector import Collector, collecting


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as it:
        yield it
