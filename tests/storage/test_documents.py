"""Configuration documents in the database: all or none, on the state that they were tried on, each with its audit row."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest

from gateway.core.config_overlay import Document, Documents, Kind, Write
from gateway.core.offices import Moved
from gateway.storage import documents
from gateway.storage.database import Database
from gateway.storage.transact import Fetch, Row, Sql, Tx

LOCAL, SHARED = (Kind.PROVIDER, "local"), (Kind.CREDENTIAL, "shared")


async def put(database: Database, stamp: int, *writes: Write) -> Documents:
    return await database.write(partial(documents.write, "eva", stamp, writes))


async def trail(database: Database) -> list[tuple[object, ...]]:
    def tx() -> Tx[Sequence[Row]]:
        return (yield Fetch(Sql("SELECT actor, action, subject, body FROM audit ORDER BY number")))

    return [tuple(row) for row in await database.read(tx)]


async def test_what_is_written_is_told_by_another_stamp_and_versions_go_on_over_a_deletion(
    database: Database,
) -> None:
    empty = await database.read(documents.stored)
    assert (empty.stamp, empty.documents, empty.versions) == (0, (), {})
    both = (Write(LOCAL, {"base_url": "x"}, 1, made=True), Write(SHARED, {"env": "A_API_KEY"}, 1, made=True))
    first = await put(database, 0, *both)
    stored = await database.read(documents.stored)
    assert stored.documents == (first[1], first[0])
    assert stored.stamp == await database.read(documents.stamp) > 0

    (changed,) = await put(database, stored.stamp, Write(LOCAL, {"base_url": "y"}, 2))
    assert (changed.body, changed.created_at_ms) == ({"base_url": "y"}, first[0].created_at_ms)
    (gone,) = await put(database, await database.read(documents.stamp), Write(LOCAL, None, 3))
    assert gone == Document(*LOCAL, {}, 3, first[0].created_at_ms, gone.updated_at_ms)
    after = await database.read(documents.stored)
    assert (after.documents, after.versions) == ((first[1],), {LOCAL: 3, SHARED: 1})
    assert after.next_version(LOCAL) == 4
    assert await trail(database) == [
        ("eva", "provider.create", "provider:local", '{"version":1,"provider":{"base_url":"x"}}'),
        ("eva", "credential.create", "credential:shared", '{"version":1,"credential":{"env":"A_API_KEY"}}'),
        ("eva", "provider.change", "provider:local", '{"version":2,"provider":{"base_url":"y"}}'),
        ("eva", "provider.delete", "provider:local", '{"version":3}'),
    ]


async def test_on_another_state_than_it_was_tried_on_nothing_is_written(database: Database) -> None:
    await put(database, 0, Write(LOCAL, {"base_url": "x"}, 1, made=True))
    before = await database.read(documents.stored), await trail(database)
    with pytest.raises(Moved):
        await put(database, 0, Write(LOCAL, None, 2), Write(SHARED, {"env": "A_API_KEY"}, 1, made=True))
    assert (await database.read(documents.stored), await trail(database)) == before
