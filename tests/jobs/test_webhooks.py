"""Webhooks: at least once, signed, again later, given up at last, and never into the own network."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest

from gateway.core.addresses import judge
from gateway.core.errors import Unavailable
from gateway.core.webhook import GIVE_UP_MS, Message
from gateway.jobs.webhooks import BATCH, Counts, Outbox, Webhooks
from gateway.storage.database import Database, open_database
from gateway.storage.outbox import DeadMessage, OutboxCounts, SqlOutbox
from tests.storage.worlds import TEAM, attempt, opened, outcome, reserve, rows, run
from tests.support.recorder import Recorder, Script

SECRET = b"whsec_test"
SENT_S = 1_790_000_123


@pytest.fixture
def outbox(database: Database) -> SqlOutbox:
    return SqlOutbox(database)


@pytest.fixture
async def receiver() -> AsyncIterator[Recorder]:
    async with Recorder() as upstream:
        yield upstream


@asynccontextmanager
async def job(outbox: Outbox, url: str, **changes: object) -> AsyncIterator[Webhooks]:
    facts: dict[str, object] = {
        "secret": SECRET,
        "now_ms": lambda: SENT_S * 1_000,
        "random": lambda: 0.5,
        "loopback": True,
    }
    webhooks = Webhooks(outbox, url=url, **{**facts, **changes})  # type: ignore[arg-type]
    try:
        yield webhooks
    finally:
        await webhooks.close()


async def alert(outbox: SqlOutbox, dedupe: str = "bud_1/0/0/80") -> None:
    await outbox.put([("budget_alert", dedupe, {"percent": 80})])


async def make_due(database: Database) -> None:
    await run(database, "UPDATE outbox SET next_at_ms = 0")


async def notes(database: Database) -> list[tuple[object, ...]]:
    """(dedupe, attempts, delivered, dead, error) of each message."""
    return await rows(
        database,
        "SELECT dedupe, attempts, delivered_at_ms IS NOT NULL, dead_at_ms IS NOT NULL, last_error FROM outbox "
        "ORDER BY dedupe",
    )


def ids(receiver: Recorder) -> list[str]:
    return [received.headers["x-tollhouse-event-id"] for received in receiver.received]


# --- delivery ---------------------------------------------------------------------------------------------


async def test_a_message_is_delivered_once_and_signed(
    outbox: SqlOutbox, database: Database, receiver: Recorder
) -> None:
    await alert(outbox)
    await alert(outbox)  # the same event
    async with job(outbox, f"{receiver.base_url}/hook?team=a") as webhooks:
        assert (await webhooks.turn(), await webhooks.turn()) == (1, 0)
        assert webhooks.counts == Counts(delivered=1)
    (received,) = receiver.received
    body = json.loads(received.body)
    assert (received.path, received.query) == ("/v1/hook", "team=a")
    assert received.headers["content-type"] == "application/json"
    assert body == {
        "id": "bud_1/0/0/80",
        "type": "budget_alert",
        "created_at": body["created_at"],
        "data": {"percent": 80},
    }
    assert received.headers["x-tollhouse-event-id"] == body["id"]
    digest = hmac.new(SECRET, b"%d." % SENT_S + received.body, hashlib.sha256).hexdigest()
    assert received.headers["x-tollhouse-signature"] == f"t={SENT_S},v1={digest}"
    assert await outbox.counts() == OutboxCounts(pending=0, delivered=1, dead=0, oldest_pending_ms=0)
    assert [bool(row[2]) for row in await notes(database)] == [True]


async def test_a_process_that_dies_before_it_marks_a_delivery_causes_a_second_one(
    outbox: SqlOutbox, database: Database, receiver: Recorder
) -> None:
    reached = asyncio.Event()

    class Dying(SqlOutbox):
        async def delivered(self, message: Message) -> None:
            reached.set()
            await asyncio.Event().wait()

    await alert(outbox)
    async with job(Dying(database), receiver.base_url, lease_ms=0) as webhooks:
        turn = asyncio.create_task(webhooks.turn())
        await reached.wait()
        turn.cancel()
        await asyncio.wait([turn])
    async with job(outbox, receiver.base_url) as webhooks:
        assert await webhooks.turn() == 1
    assert ids(receiver) == ["bud_1/0/0/80"] * 2
    assert await notes(database) == [("bud_1/0/0/80", 2, True, False, "")]


async def test_what_one_is_delivering_the_others_skip(outbox: SqlOutbox) -> None:
    for n in range(3):
        await alert(outbox, f"event {n}")
    first = await outbox.claim(2, 60_000)
    second = await outbox.claim(2, 60_000)
    assert sorted(m.dedupe for m in (*first, *second)) == ["event 0", "event 1", "event 2"]
    assert (len(first), await outbox.claim(2, 60_000)) == (2, [])


async def test_what_another_has_locked_is_skipped_and_not_waited_for(postgres_url: str) -> None:
    database = open_database(postgres_url)
    outbox = SqlOutbox(database)
    for n in range(2):
        await alert(outbox, f"event {n}")
    other = await asyncpg.connect(postgres_url)
    try:
        async with other.transaction():
            await other.execute("SELECT 1 FROM outbox WHERE dedupe = 'event 0' FOR UPDATE")
            assert [m.dedupe for m in await outbox.claim(9, 60_000)] == ["event 1"]
        assert [m.dedupe for m in await outbox.claim(9, 60_000)] == ["event 0"]
    finally:
        await other.close()
        await database.close()


async def test_a_full_batch_is_followed_by_the_next_at_once(outbox: SqlOutbox, receiver: Recorder) -> None:
    for n in range(BATCH + 1):
        await alert(outbox, f"event {n:02}")
    async with job(outbox, receiver.base_url, every_s=3_600.0) as webhooks:
        running = asyncio.create_task(webhooks.run())
        async with asyncio.timeout(20):
            while webhooks.counts.delivered <= BATCH:
                await asyncio.sleep(0.001)
        running.cancel()
        await asyncio.wait([running])
    assert sorted(ids(receiver)) == [f"event {n:02}" for n in range(BATCH + 1)]


async def test_what_a_settlement_announces_is_delivered(
    store: str, tmp_path: Path, receiver: Recorder
) -> None:
    async with opened(store, tmp_path) as (ledger, database, accounts):
        await accounts.ensure_defaults()
        await accounts.set_budget(TEAM, 1_000)
        spent = attempt()
        await reserve(ledger, spent, 900)
        await ledger.settle(spent, outcome(850))
        async with job(SqlOutbox(database), receiver.base_url) as webhooks:
            assert await webhooks.turn() == 2
    told = [json.loads(received.body) for received in receiver.received]
    assert [
        (t["type"], t["data"]["scope"], t["data"]["percent"])
        for t in sorted(told, key=lambda t: str(t["id"]))
    ] == [
        ("budget_alert", TEAM, 50),
        ("budget_alert", TEAM, 80),
    ]


# --- failures ---------------------------------------------------------------------------------------------


async def test_a_receiver_that_fails_three_times_is_asked_again_until_it_works(
    outbox: SqlOutbox, database: Database, receiver: Recorder
) -> None:
    receiver.scripts = [Script(status, [b"{}"]) for status in (500, 404, 429)]
    await alert(outbox)
    seen = []
    async with job(outbox, receiver.base_url) as webhooks:
        for _ in range(4):
            assert (await webhooks.turn(), await webhooks.turn()) == (1, 0)  # not again before its time
            seen.append((await notes(database))[0][1:])
            await make_due(database)
        assert webhooks.counts == Counts(delivered=1, failed=3)
    assert seen == [
        (1, False, False, "the receiver answered 500"),
        (2, False, False, "the receiver answered 404"),
        (3, False, False, "the receiver answered 429"),
        (4, True, False, ""),
    ]
    assert ids(receiver) == ["bud_1/0/0/80"] * 4


async def test_a_message_waits_longer_after_each_failure(
    outbox: SqlOutbox, database: Database, receiver: Recorder
) -> None:
    receiver.scripts = [Script(500, [b"{}"]) for _ in range(3)]
    await alert(outbox)
    waits = []
    async with job(outbox, receiver.base_url, random=lambda: 0.0) as webhooks:
        for _ in range(3):
            await webhooks.turn()
            ((wait_ms,),) = await rows(database, "SELECT next_at_ms - now_ms() FROM outbox")
            waits.append(wait_ms)
            await make_due(database)
    assert [round(wait_ms / 1_000 + 0.4) for wait_ms in waits] == [1, 2, 4]


async def test_after_a_day_a_message_is_given_up_and_stays_to_be_seen(
    outbox: SqlOutbox, database: Database, receiver: Recorder
) -> None:
    receiver.scripts = [Script(500, [b"{}"])]
    for dedupe in ("failing", "old", "new"):
        await alert(outbox, dedupe)
    age = "UPDATE outbox SET created_at_ms = now_ms() - $1 WHERE dedupe = $2"
    await run(database, age, GIVE_UP_MS - 500, "failing")
    await run(database, age, GIVE_UP_MS, "old")
    await run(database, "UPDATE outbox SET next_at_ms = 9000000000000000 WHERE dedupe = 'new'")
    async with job(outbox, receiver.base_url) as webhooks:
        assert (await webhooks.turn(), webhooks.counts) == (2, Counts(failed=2, dead=2))
        await run(database, "UPDATE outbox SET next_at_ms = 0 WHERE dedupe <> 'new'")
        assert await webhooks.turn() == 0
    assert ids(receiver) == ["failing"]  # the old one was not even sent
    counts = await outbox.counts()
    assert (counts.pending, counts.delivered, counts.dead, 0 <= counts.oldest_pending_ms < 60_000) == (
        1,
        0,
        2,
        True,
    )
    dead = {m.dedupe: m for m in await outbox.dead_messages()}
    found = dead["failing"]
    assert found == DeadMessage(
        found.message_id,
        "budget_alert",
        "failing",
        '{"percent":80}',
        found.created_at_ms,
        found.dead_at_ms,
        1,
        "the receiver answered 500",
    )
    assert (len(dead), dead["old"].error) == (2, "it was too old to be sent")


async def test_a_receiver_that_does_not_answer_is_left(outbox: SqlOutbox, database: Database) -> None:
    await alert(outbox)
    async with silent() as door:
        async with job(outbox, f"http://127.0.0.1:{door.port}/", timeout_s=0.05) as webhooks:
            async with asyncio.timeout(10):
                await webhooks.turn()
        assert (door.connections, (await notes(database))[0][-1]) == (1, "TimeoutError")
    async with job(outbox, f"http://127.0.0.1:{door.port}/") as webhooks:  # nobody listens there any more
        await make_due(database)
        await webhooks.turn()
        assert webhooks.counts == Counts(failed=1)
    ((_, attempts, delivered, dead, error),) = await notes(database)
    assert (attempts, delivered, dead) == (2, False, False)
    assert str(error).startswith("ClientConnectorError: Cannot connect to host 127.0.0.1")


async def test_who_has_lost_the_claim_decides_nothing(outbox: SqlOutbox, database: Database) -> None:
    await alert(outbox)
    (early,) = await outbox.claim(1, 0)
    (late,) = await outbox.claim(1, 60_000)
    await outbox.later(early, 0, "early")
    await outbox.dead(early, "early")
    assert await notes(database) == [("bud_1/0/0/80", 2, False, False, "")]
    await outbox.dead(late, "late")
    await outbox.delivered(early)  # but a delivery is one, whoever made it
    assert await notes(database) == [("bud_1/0/0/80", 2, True, False, "")]
    await outbox.later(late, 0, "late")
    assert (await outbox.claim(1, 0), await outbox.counts()) == ([], OutboxCounts(0, 1, 0, 0))


async def test_a_store_that_is_down_is_asked_again(
    outbox: SqlOutbox, database: Database, receiver: Recorder
) -> None:
    class Flaky(SqlOutbox):
        down = 3

        async def claim(self, most: int, lease_ms: int) -> Sequence[Message]:
            if self.down:
                self.down -= 1
                raise Unavailable("the database does not answer")
            return await super().claim(most, lease_ms)

        async def delivered(self, message: Message) -> None:
            if not receiver.received[1:]:
                raise Unavailable("the database does not answer")
            await super().delivered(message)

    await alert(outbox)
    async with job(Flaky(database), receiver.base_url, every_s=0.0, lease_ms=0) as webhooks:
        running = asyncio.create_task(webhooks.run())
        async with asyncio.timeout(20):
            while (await outbox.counts()).delivered == 0:
                await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
    assert ids(receiver) == ["bud_1/0/0/80"] * 2


async def test_old_messages_are_forgotten(outbox: SqlOutbox, database: Database) -> None:
    for dedupe in ("delivered", "dead", "waiting", "fresh"):
        await alert(outbox, dedupe)
    await run(database, "UPDATE outbox SET created_at_ms = 0")
    await run(database, "UPDATE outbox SET delivered_at_ms = now_ms() - 2000 WHERE dedupe = 'delivered'")
    await run(database, "UPDATE outbox SET delivered_at_ms = now_ms() + 9000 WHERE dedupe = 'fresh'")
    await run(database, "UPDATE outbox SET dead_at_ms = now_ms() - 2000 WHERE dedupe = 'dead'")
    assert await outbox.forget(1_000) == 2
    assert [row[0] for row in await notes(database)] == ["fresh", "waiting"]


# --- where it may go --------------------------------------------------------------------------------------


class Door:
    """A port that counts who comes and never answers."""

    def __init__(self) -> None:
        self.connections = 0
        self.port = 0
        self.left = asyncio.Event()
        self.left.set()

    async def met(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.left.clear()
        while await reader.read(4_096):
            pass
        writer.close()
        self.left.set()


@asynccontextmanager
async def silent() -> AsyncIterator[Door]:
    door = Door()
    server = await asyncio.start_server(door.met, "127.0.0.1", 0)
    door.port = server.sockets[0].getsockname()[1]
    try:
        yield door
    finally:
        server.close()
        async with asyncio.timeout(10):
            await door.left.wait()


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.com/",
        "https://10.0.0.1/",
        "https://localhost/",
        "https://hooks.example.com:22/",
        "x",
    ],
)
def test_a_url_into_the_own_network_makes_no_job(url: str) -> None:
    with pytest.raises(ValueError, match=f"the URL of the webhook may not be used: {judge(url).reason}"):
        Webhooks(None, url=url, secret=SECRET, now_ms=lambda: 0, random=lambda: 0.0)  # type: ignore[arg-type]


def test_a_job_needs_a_secret() -> None:
    with pytest.raises(ValueError, match="the secret of the webhook must not be empty"):
        Webhooks(None, url="https://hooks.example.com/", secret=b"", now_ms=lambda: 0, random=lambda: 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "found", [["127.0.0.1"], ["8.8.8.8", "127.0.0.1"], ["::ffff:127.0.0.1"], ["169.254.169.254"], []]
)
async def test_a_name_that_resolves_into_the_own_network_gets_no_packet(
    sqlite_url: str, found: list[str]
) -> None:
    database = open_database(sqlite_url)
    outbox = SqlOutbox(database)
    await alert(outbox)
    async with silent() as door:
        url, ports = f"https://hooks.example.com:{door.port}/", frozenset({door.port})

        async def resolve(_: str, __: int) -> Sequence[str]:
            return found

        async with job(outbox, url, ports=ports, loopback=False, resolve=resolve) as webhooks:
            await webhooks.turn()
            assert (door.connections, webhooks.counts) == (0, Counts(failed=1, refused=1))
        ((*_, error),) = await notes(database)
        assert (
            f"hooks.example.com resolves to {', '.join(a for a in found if a != '8.8.8.8') or 'nothing'}"
            in str(error)
        )
    await database.close()


async def test_a_name_is_resolved_once_and_the_connection_goes_there(sqlite_url: str) -> None:
    """The next answer would lead elsewhere: a name that is rebound while we look."""
    database = open_database(sqlite_url)
    outbox = SqlOutbox(database)
    await alert(outbox)
    asked = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append((host, port))
        return ["127.0.0.1"] if len(asked) == 1 else ["169.254.169.254"]

    async with silent() as door:
        url, ports = f"https://hooks.example.com:{door.port}/", frozenset({door.port})
        async with job(outbox, url, ports=ports, timeout_s=0.2, resolve=resolve) as webhooks:
            await webhooks.turn()
            assert (asked, door.connections) == ([("hooks.example.com", door.port)], 1)
            # Each delivery asks anew, and judges what it gets.
            await make_due(database)
            await webhooks.turn()
            assert (len(asked), door.connections, webhooks.counts.refused) == (2, 1, 1)
    await database.close()


async def test_redirects_are_not_followed(sqlite_url: str, receiver: Recorder) -> None:
    database = open_database(sqlite_url)
    outbox = SqlOutbox(database)
    await alert(outbox)
    async with Recorder() as inner:
        receiver.scripts = [Script(307, [], headers={"Location": f"{inner.base_url}/metadata"})]
        async with job(outbox, receiver.base_url) as webhooks:
            await webhooks.turn()
        assert (len(receiver.received), inner.received) == (1, [])
    assert (await notes(database))[0][1:] == (1, False, False, "the receiver answered 307")
    await database.close()
