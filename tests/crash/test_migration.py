"""A migration whose process is killed before its COMMIT has not happened, and happens the next time."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from gateway.storage import schema
from gateway.storage.database import open_database
from gateway.storage.transact import Tx
from tests.conftest import create_database


def killed_before_commit(url: str) -> None:
    """What the subprocess does: the product's own migration, as far as its last statement."""

    def migration(postgres: bool) -> Tx[None]:
        yield from schema._migrate(postgres, "head")
        os.kill(os.getpid(), signal.SIGKILL)

    database = open_database(url)
    asyncio.run(database.write(partial(migration, database.postgres_dsn is not None)))


@pytest.fixture(params=["sqlite", "postgres"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'new.db'}"
    server = request.getfixturevalue("postgres")
    asyncio.run(create_database(server, "killed_in_migration"))
    url: str = server.url("killed_in_migration")
    return url


def test_a_migration_that_is_killed_happens_the_next_time(empty: str) -> None:
    this = f"from tests.crash.test_migration import killed_before_commit as it; it({empty!r})"
    assert subprocess.run([sys.executable, "-c", this], check=False).returncode == -signal.SIGKILL

    async def migrated_again() -> None:
        database = open_database(empty)
        try:
            with pytest.raises(schema.SchemaMismatch):
                await schema.check(database)
            await schema.migrate(empty)
            await schema.check(database)
        finally:
            await database.close()

    asyncio.run(migrated_again())
