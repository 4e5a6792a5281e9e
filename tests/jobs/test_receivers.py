"""Webhooks that people added come and go while the gateway runs, outlast a store that is away, and end with it."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from gateway.core.errors import Unavailable
from gateway.core.webhook import secret_of
from gateway.jobs.receivers import Receiver, Receivers
from gateway.jobs.webhooks import Outbox, Webhooks
from gateway.storage import receivers
from gateway.storage.database import Database, open_database
from gateway.storage.outbox import OutboxCounts, SqlOutbox
from gateway.storage.receivers import SqlReceivers, Webhook
from gateway.storage.transact import Tx
from tests.support.alert_receiver import AlertReceiver

PEPPER = b"pepper-of-the-tests"


class Flaky(SqlReceivers):
    """Away for the first looks."""

    down = 2

    async def receivers(self) -> Sequence[Webhook]:
        if self.down:
            self.down -= 1
            raise Unavailable("the database does not answer")
        return await super().receivers()


def deliverer(it: Receiver, outbox: Outbox) -> Webhooks:
    return Webhooks(
        outbox,
        url=it.url,
        secret=secret_of(PEPPER, it.webhook_id, it.secret_version).encode(),
        now_ms=lambda: 1_790_000_000_000,
        random=random.Random(0).random,
        every_s=0.01,
        loopback=True,
    )


@asynccontextmanager
async def serving(store: SqlReceivers) -> AsyncIterator[Receivers]:
    job = Receivers(store, deliverer, every_s=0.01)
    running = asyncio.create_task(job.run())
    try:
        yield job
    finally:
        running.cancel()
        await asyncio.wait([running])
        assert not [t for t in asyncio.all_tasks() if t.get_name().startswith("webhook")], "all end with it"


async def added(database: Database, name: str, url: str, *kinds: str) -> Webhook:
    def tx() -> Tx[Webhook]:
        return (yield from receivers.add("eva", name, url, kinds, True))

    return await database.write(tx)


async def changed(database: Database, webhook_id: str, **to: Any) -> None:
    def tx() -> Tx[Webhook]:
        return (yield from receivers.change("eva", webhook_id, lambda it: dataclasses.replace(it, **to)))

    await database.write(tx)


async def test_they_come_change_and_go_while_it_runs(store: str) -> None:
    database = open_database(store)
    outbox = SqlOutbox(database)
    await outbox.put([("budget_alert", "before there was any", {})])
    async with serving(Flaky(database)) as job, AlertReceiver("") as nobody:
        ops = await added(database, "ops", nobody.url)
        async with (
            AlertReceiver(secret_of(PEPPER, ops.webhook_id, 1)) as first,
            AlertReceiver(secret_of(PEPPER, ops.webhook_id, 2)) as second,
        ):
            await changed(database, ops.webhook_id, url=first.url)
            job.wake()
            await outbox.put([("budget_alert", "one", {"n": 1})])
            assert (await first.next())["id"] == "one", "and not what was before"

            await changed(database, ops.webhook_id, url=second.url, secret_version=2, kinds=("task_paused",))
            job.wake()
            await outbox.put([("budget_alert", "not wanted", {}), ("task_paused", "two", {"n": 2})])
            assert (await second.next())["id"] == "two"

            await changed(database, ops.webhook_id, enabled=False)
            job.wake()
            other = await added(database, "other", nobody.url)
            async with AlertReceiver(secret_of(PEPPER, other.webhook_id, 1)) as third:
                await changed(database, other.webhook_id, url=third.url)
                job.wake()
                await outbox.put([("task_paused", "three", {"n": 3})])
                assert (await third.next())["id"] == "three"
    await database.close()


async def test_what_waits_for_them_is_counted_unless_they_are_disabled(store: str) -> None:
    database = open_database(store)
    waiting = SqlReceivers(database)
    assert await waiting.counts() == OutboxCounts(0, 0, 0, 0)
    ops = await added(database, "ops", "https://ops.example.com/")
    await added(database, "pauses", "https://pauses.example.com/", "task_paused")
    await SqlOutbox(database).put([("budget_alert", "one", {}), ("task_paused", "two", {})])
    assert await waiting.spread(10) == 2
    await waiting.outbox(ops.webhook_id).claim(1, 60_000)
    counts = await waiting.counts()
    assert dataclasses.replace(counts, oldest_pending_ms=0) == OutboxCounts(3, 0, 0, 0)
    assert 0 <= counts.oldest_pending_ms < 60_000
    await changed(database, ops.webhook_id, enabled=False)
    assert (await waiting.counts()).pending == 1
    await database.close()


async def test_one_whose_address_is_refused_leaves_the_others_alone(sqlite_url: str) -> None:
    database = open_database(sqlite_url)
    await added(database, "inside", "https://169.254.169.254/x")
    good = await added(database, "good", "https://never.example.com/")
    async with AlertReceiver(secret_of(PEPPER, good.webhook_id, 1)) as receiver:
        await changed(database, good.webhook_id, url=receiver.url)
        async with serving(SqlReceivers(database)):
            await SqlOutbox(database).put([("budget_alert", "one", {})])
            assert (await receiver.next())["id"] == "one"
    await database.close()
