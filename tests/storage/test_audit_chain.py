"""The audit trail proves itself: what was changed, left out, cut off or slipped in shows; writers at once do not break it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from gateway.storage import audit
from gateway.storage.accounts import Accounts
from gateway.storage.database import Database, open_database
from tests.storage.worlds import run


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Database]:
    database = open_database(url)
    try:
        yield database
    finally:
        await database.close()


async def write(database: Database, subjects: list[str]) -> None:
    await asyncio.gather(
        *(database.write(partial(audit.record, "eva", "team.put", s, {"models": [s]})) for s in subjects)
    )


async def test_writers_at_once_make_one_chain(store: str) -> None:
    async with opened(store) as database, opened(store) as other:
        await asyncio.gather(
            write(database, [f"team:a{n}" for n in range(20)]),
            write(other, [f"team:b{n}" for n in range(20)]),
        )
        found = await audit.verify(database)
        assert (found.sound, found.entries, found.unchained) == (True, 40, 0)
        await write(database, ["team:c"])
        later = await audit.verify(database, found.head)
        assert (later.sound, later.entries, later.head != found.head) == (True, 41, True)


@pytest.mark.parametrize(
    ("tampering", "broken", "cut"),
    [
        ("UPDATE audit SET actor = 'mallory' WHERE subject = 'team:1'", True, False),
        ("UPDATE audit SET body = '{}' WHERE subject = 'team:2'", True, False),
        ("DELETE FROM audit WHERE subject = 'team:1'", True, False),
        ("DELETE FROM audit WHERE subject = 'team:3'", False, True),
        (
            "INSERT INTO audit (audit_id, at_ms, actor, action, subject, body, number, hash) "
            "VALUES ('x', 1, 'eva', 'a', 'b', '{}', 0, '')",
            True,
            False,
        ),
    ],
)
async def test_what_was_done_to_it_shows(store: str, tampering: str, broken: bool, cut: bool) -> None:
    async with opened(store) as database:
        for n in range(4):
            await write(database, [f"team:{n}"])
        head = (await audit.verify(database)).head
        await run(database, tampering)
        found = await audit.verify(database, head)
        assert (found.sound, found.broken is not None, found.cut) == (False, broken, cut)


async def test_a_rewritten_chain_does_not_hold_against_a_hash_that_was_kept(store: str) -> None:
    async with opened(store) as database:
        await write(database, ["team:1"])
        kept = (await audit.verify(database)).head
        await run(database, "DELETE FROM audit")
        await run(database, "UPDATE revision SET audit_head = ''")
        await write(database, ["team:2"])
        assert (await audit.verify(database)).sound
        found = await audit.verify(database, kept)
        assert (found.sound, found.lost) == (False, True)


async def test_entries_of_an_older_version_are_counted(store: str) -> None:
    async with opened(store) as database:
        await run(
            database,
            "INSERT INTO audit (audit_id, at_ms, actor, action, subject, body) VALUES ('old', 1, 'a', 'b', 'c', '{}')",
        )
        await Accounts(database, actor="eva").ensure_defaults()
        found = await audit.verify(database)
        assert (found.sound, found.unchained, found.late, found.entries > 0) == (True, 1, False, True)
