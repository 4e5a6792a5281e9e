"""Redis for tests: `redis` is shared and emptied before each, `own_redis` is the test's to kill."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from redis import Redis

from tests.support.servers import RedisServer, redis_server
from tests.support.told_redis import ToldRedis


@pytest.fixture(scope="session")
def redis_of_session() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def redis(redis_of_session: RedisServer) -> Iterator[ToldRedis]:
    """Empty, at time 0."""
    with contextlib.closing(Redis.from_url(redis_of_session.url)) as client:
        client.flushall()
        told = ToldRedis(redis_of_session.url, client)
        told.at(0)
        yield told


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server
