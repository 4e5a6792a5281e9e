"""`redis` is shared by the tests of a process, and emptied before each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from redis import Redis

from tests.support.servers import RedisServer
from tests.support.told_redis import ToldRedis


@pytest.fixture
def redis(redis_of_session: RedisServer) -> Iterator[ToldRedis]:
    """Empty, at time 0."""
    with contextlib.closing(Redis.from_url(redis_of_session.url)) as client:
        client.flushall()
        told = ToldRedis(redis_of_session.url, client)
        told.at(0)
        yield told
