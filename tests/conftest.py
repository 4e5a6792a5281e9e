"""Stores for tests: `store` is the URL of a migrated, empty database, once on SQLite and once on Postgres."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from gateway.storage.database import Database, open_database
from gateway.storage.schema import migrate
from tests.support.servers import (
    POSTGRES_MISSING,
    PROMETHEUS_MISSING,
    PostgresServer,
    postgres_binaries,
    postgres_server,
    prometheus_binary,
)

_numbers = itertools.count(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "store" in metafunc.fixturenames:
        stores = ["sqlite", "postgres"] if postgres_binaries() else ["sqlite"]
        metafunc.parametrize("store", stores, indirect=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # test_postgres_is_available fails as well; this is said even if that test was not among those asked for.
    missing = [
        text
        for found, text in ((postgres_binaries, POSTGRES_MISSING), (prometheus_binary, PROMETHEUS_MISSING))
        if found.cache_info().currsize and found() is None
    ]
    if missing:
        terminalreporter.section("NOT TESTED", sep="!", red=True)
        for text in missing:
            terminalreporter.line(text)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One cluster for the session, with a migrated template database."""
    with postgres_server() as server:
        asyncio.run(create_database(server, "template_migrated"))
        asyncio.run(migrate(server.url("template_migrated")))
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
