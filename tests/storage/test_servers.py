"""The one place that fails when a server cannot be had here; the tests that need it are then left out."""

from __future__ import annotations

from tests.support.servers import POSTGRES_MISSING, REDIS_MISSING, postgres_binaries, redis_binary


def test_postgres_is_available() -> None:
    assert postgres_binaries() is not None, POSTGRES_MISSING


def test_redis_is_available() -> None:
    assert redis_binary() is not None, REDIS_MISSING
