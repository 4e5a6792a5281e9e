"""Alerts and episodes of breakers do not pile up, whether somebody receives them or not."""

from __future__ import annotations

from gateway.jobs.sweeper import KEEP_ENDED_MS, KEEP_EPISODES_MS, KEEP_WAITING_MS, Sweeper
from gateway.storage.breaker_events import BreakerEvents
from gateway.storage.database import Database
from gateway.storage.outbox import SqlOutbox
from gateway.storage.transact import Fetch, Sql, Tx

MINUTE_MS = 60_000


async def aged(database: Database, table: str, column: str, name: str, age_ms: int) -> None:
    """Let a row have happened so long ago."""
    key = {"outbox": "dedupe", "breaker_event": "event_id"}[table]
    sql = Sql(f"UPDATE {table} SET {column} = now_ms() - $2 WHERE {key} = $1")

    def tx() -> Tx[None]:
        yield Fetch(sql, (name, age_ms))

    await database.write(tx)


async def left(database: Database, table: str, key: str) -> list[str]:
    def tx() -> Tx[list[str]]:
        return [row[0] for row in (yield Fetch(Sql(f"SELECT {key} FROM {table} ORDER BY {key}")))]

    return await database.read(tx)


async def filled(database: Database) -> tuple[SqlOutbox, BreakerEvents]:
    outbox, events = SqlOutbox(database), BreakerEvents(database)
    for name in ("delivered-old", "delivered-new", "waiting-old", "waiting-new"):
        await outbox.put([("budget_alert", name, {})])
    for name, age_ms in (
        ("delivered-old", KEEP_ENDED_MS + MINUTE_MS),
        ("delivered-new", KEEP_WAITING_MS * 2),
    ):
        await aged(database, "outbox", "delivered_at_ms", name, age_ms)
    for name, age_ms in (("waiting-old", KEEP_WAITING_MS + MINUTE_MS), ("waiting-new", MINUTE_MS)):
        await aged(database, "outbox", "created_at_ms", name, age_ms)
    body = {"task_id": "t", "key_id": "k", "breaker": "loop", "action": "observe", "tripped": True}
    for name, age_ms in (("old", KEEP_EPISODES_MS + MINUTE_MS), ("new", MINUTE_MS)):
        await events.record("breaker_tripped", name, {**body, "message": "m", "evidence": {}}, tell=False)
        await aged(database, "breaker_event", "at_ms", name, age_ms)
    return outbox, events


async def test_without_a_receiver_what_waits_goes_too(database: Database) -> None:
    assert await Sweeper(*await filled(database), delivered=False).turn() == 3
    assert await left(database, "outbox", "dedupe") == ["delivered-new", "waiting-new"]
    assert await left(database, "breaker_event", "event_id") == ["new"]


async def test_with_a_receiver_what_waits_is_left_to_whoever_delivers_it(database: Database) -> None:
    assert await Sweeper(*await filled(database), delivered=True).turn() == 2
    assert await left(database, "outbox", "dedupe") == ["delivered-new", "waiting-new", "waiting-old"]


async def test_there_are_never_more_alerts_than_the_table_may_hold(database: Database) -> None:
    outbox, events = SqlOutbox(database), BreakerEvents(database)
    await outbox.put([("budget_alert", f"{i:04d}", {}) for i in range(1_203)])
    assert await Sweeper(outbox, events, delivered=True).turn(alerts_max=100) == 1_103
    assert len(await left(database, "outbox", "dedupe")) == 100
