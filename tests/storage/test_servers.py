"""The one place that fails when a store cannot be tested here; its other tests are then not collected."""

from __future__ import annotations

from tests.support.servers import POSTGRES_MISSING, postgres_binaries


def test_postgres_is_available() -> None:
    assert postgres_binaries() is not None, POSTGRES_MISSING
