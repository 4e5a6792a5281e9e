"""Virtual keys: made once, found from memory, revoked within a second, and usable through a short outage."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from gateway.core import secrets
from gateway.core.errors import NotFound, Unavailable
from gateway.core.identity import RateLimit
from gateway.storage.accounts import Accounts, Team
from gateway.storage.database import Database, open_database
from gateway.storage.keys import GRACE_S, POLL_EVERY_S, SqlKeyStore
from tests.storage.worlds import HandClock, rows

PEPPER = b"pepper"


async def test_a_key_is_found_as_it_was_made_and_its_text_is_stored_nowhere(database: Database) -> None:
    accounts = Accounts(database, actor="ann")
    await accounts.put_team(Team("red", "acme", frozenset({"sonnet"}), RateLimit(60, 1_000, 4)))
    keys = await SqlKeyStore.open(database)

    record, text = await accounts.create_key(
        pepper=PEPPER,
        name="ci",
        team_id="red",
        models=["sonnet", "haiku"],
        limit=RateLimit(5, None, 1),
        expires_at_ms=1_900_000_000_000,
        task_id="task_1",
        labels={"repo": "x"},
    )
    found = await keys.find(record.key_id)
    await keys.close()

    assert found == record
    assert (record.tenant_id, record.team_models, record.team_limit) == (
        "acme",
        frozenset({"sonnet"}),
        RateLimit(60, 1_000, 4),
    )
    key_id, secret = secrets.parse_key(text) or ("", "")
    assert (key_id, secrets.matches(PEPPER, secret, record.secret_hmac)) == (record.key_id, True)
    stored = [
        *await rows(database, "SELECT * FROM virtual_key"),
        *await rows(database, "SELECT * FROM audit"),
    ]
    assert secret not in repr(stored)


async def test_a_revocation_elsewhere_shows_within_a_second(store: str) -> None:
    here, there = open_database(store), open_database(store)
    accounts = Accounts(there, actor="ann")
    await accounts.ensure_defaults()
    record, _ = await accounts.create_key(pepper=PEPPER, name="ci")
    changed = asyncio.Event()
    keys = await SqlKeyStore.open(here, changed.set)
    assert await keys.find(record.key_id) == record
    changed.clear()

    revoked = await accounts.revoke_key(record.key_id)
    async with asyncio.timeout(1.0):
        await changed.wait()
    assert await keys.find(record.key_id) == revoked
    await keys.close()
    for database in (here, there):
        await database.close()


async def test_changes_of_teams_and_budgets_reach_keys_and_listeners(database: Database) -> None:
    accounts = Accounts(database, actor="ann")
    await accounts.ensure_defaults()
    record, _ = await accounts.create_key(pepper=PEPPER, name="ci")
    changes: list[str] = []
    keys = await SqlKeyStore.open(database, lambda: changes.append("changed"))

    await accounts.put_team(Team("default", models=frozenset({"haiku"})))
    await keys.poll()
    assert await keys.find(record.key_id) == replace(record, team_models=frozenset({"haiku"}))
    await accounts.set_budget("team:default", 5)
    await keys.poll()
    await accounts.set_budget("team:default", 5)  # nothing new
    await keys.poll()
    assert changes == ["changed"] * 3  # at the start, too
    await keys.close()


async def test_unknown_ids_are_unknown_and_ask_the_store_rarely(database: Database) -> None:
    class Counting:
        flights = 1
        calls = 0

        async def run(self, tx: Any, timeout_s: float) -> Any:
            self.calls += 1
            return await database.reader.run(tx, timeout_s)

        async def close(self) -> None: ...

    counting = Counting()
    keys = await SqlKeyStore.open(replace(database, reader=counting))
    counting.calls = 0
    began = time.monotonic()
    assert set(await asyncio.gather(*(keys.find(f"nobody{i:02d}") for i in range(2_000)))) == {None}
    # One look for all of them, beside the store's own polls.
    assert counting.calls <= 2 + (time.monotonic() - began) / POLL_EVERY_S
    await keys.close()


async def test_known_keys_work_for_a_minute_while_the_store_is_down(sqlite_url: str) -> None:
    class Minutes(HandClock):
        seconds = 0.0

        def monotonic(self) -> float:
            return self.seconds

    clock = Minutes()
    database = open_database(sqlite_url, clock)
    accounts = Accounts(database, actor="ann")
    await accounts.ensure_defaults()
    record, _ = await accounts.create_key(pepper=PEPPER, name="ci")
    up = await SqlKeyStore.open(database)
    await up.close()
    gone = open_database("postgresql://nobody@127.0.0.1:1/none", clock)
    down = SqlKeyStore(gone, lambda: None)
    down._records, down._revision, down._fresh_at = up._records, up._revision, up._fresh_at

    clock.seconds = GRACE_S
    assert await down.find(record.key_id) == record
    with pytest.raises(Unavailable):
        await down.find("nobody00")
    clock.seconds = GRACE_S + 0.1
    with pytest.raises(Unavailable, match="keys cannot be looked up"):
        await down.find(record.key_id)
    await database.close()
    await gone.close()


async def test_every_change_is_audited_once_and_bad_ones_are_refused(database: Database) -> None:
    accounts = Accounts(database, actor="ann")
    await accounts.ensure_defaults()
    await accounts.ensure_defaults()
    record, _ = await accounts.create_key(pepper=PEPPER, name="ci")
    first = await accounts.revoke_key(record.key_id)
    assert await accounts.revoke_key(record.key_id) == first
    await accounts.set_budget(f"key:{record.key_id}", 7, "month", zone="Europe/Berlin")
    await accounts.remove_budget(f"key:{record.key_id}", "month", "Europe/Berlin")

    audit = await rows(database, "SELECT actor, action, subject FROM audit ORDER BY audit_id, at_ms")
    assert sorted(audit) == sorted(
        ("ann", action, subject)
        for action, subject in [
            ("team.put", "team:default"),
            ("key.create", f"key:{record.key_id}"),
            ("key.revoke", f"key:{record.key_id}"),
            ("budget.set", f"key:{record.key_id}"),
            ("budget.remove", f"key:{record.key_id}"),
        ]
    )
    assert await rows(database, "SELECT number FROM revision") == [(5,)]
    for call, message in [
        (accounts.revoke_key("nobody00"), "there is no key nobody00"),
        (accounts.create_key(pepper=PEPPER, name="x", team_id="blue"), "there is no team blue"),
        (accounts.set_budget("team:blue", 1), "there is no team blue"),
        (accounts.remove_budget("team:default"), "has no budget per lifetime"),
        (accounts.get_task("task_x"), "there is no task task_x"),
    ]:
        with pytest.raises(NotFound, match=message):
            await call
    for scope, window, message in [
        ("task", "lifetime", "'task' is not a scope"),
        ("planet:earth", "lifetime", "'planet:earth' is not a scope"),
        ("team:default", "fortnight", "'fortnight' is not a window"),
    ]:
        with pytest.raises(Exception, match=message):
            await accounts.set_budget(scope, 1, window)
