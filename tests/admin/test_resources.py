"""Transcripts of the admin API against a real store."""

from __future__ import annotations

import json
from pathlib import Path

from gateway.core import secrets
from gateway.core.entry import Kind
from gateway.storage.breaker_events import BreakerEvents
from gateway.storage.ledger import SqlLedger
from tests.admin.office import PEPPER, Office
from tests.storage import worlds

NO_LIMITS = {"requests_per_min": None, "tokens_per_min": None, "concurrent": None}


async def test_a_team_is_made_once(it: Office) -> None:
    wanted = {"name": "research", "models": ["mini"], "task_budget_usd": "2.50", "limits": {"concurrent": 4}}
    made = {
        "team_id": "research",
        "tenant_id": "default",
        "models": ["mini"],
        "limits": {**NO_LIMITS, "concurrent": 4},
        "task_budget_usd": "2.5",
    }
    assert await it.ask("POST", "/teams", wanted) == (201, made)
    status, teams = await it.ask("GET", "/teams")
    assert (status, [t["team_id"] for t in teams["data"]]) == (200, ["default", "research"])
    assert teams["data"][1] == made

    status, body = await it.ask("POST", "/teams", wanted)
    assert (status, body["errors"]) == (409, [{"field": "name", "message": "is taken"}])


async def test_a_key_is_shown_once_works_and_is_revoked(it: Office) -> None:
    wanted = {
        "name": "ci",
        "models": ["large"],
        "expires_at": "2027-01-15T08:00:00Z",
        "limits": {"requests_per_min": 60},
        "budget": {"limit_usd": "12.50", "window": "day"},
    }
    status, made = await it.ask("POST", "/keys", wanted)
    assert status == 201
    key_id, secret = secrets.parse_key(made.pop("key")) or ("", "")
    shown = {
        "key_id": key_id,
        "name": "ci",
        "tenant_id": "default",
        "team_id": "default",
        "models": ["large"],
        "limits": {**NO_LIMITS, "requests_per_min": 60},
        "labels": {},
        "task_id": None,
        "expires_at": "2027-01-15T08:00:00.000Z",
        "revoked_at": None,
    }
    assert made == shown
    assert await it.rows("SELECT secret_hmac FROM virtual_key") == [(secrets.hmac_of(PEPPER, secret),)]

    status, listed = await it.ask("GET", "/keys")
    assert listed == {"data": [shown], "has_more": False, "next_cursor": None}
    assert secret not in json.dumps(listed)
    status, budgets = await it.ask("GET", f"/budgets?scope=key:{key_id}")
    assert [(b["scope"], b["window"], b["limit_usd"], b["left_usd"]) for b in budgets["data"]] == [
        (f"key:{key_id}", "day", "12.5", "12.5")
    ]

    status, revoked = await it.ask("POST", f"/keys/{key_id}/revoke", {})
    assert (status, revoked["revoked_at"] is not None) == (200, True)
    assert await it.ask("POST", f"/keys/{key_id}/revoke", {}) == (200, revoked), "twice is once"
    assert (await it.ask("POST", "/keys/zzzzzzzz/revoke", {}))[0] == 404


async def test_every_change_is_in_the_audit_trail_with_its_actor_and_no_secret(it: Office) -> None:
    await it.ask("POST", "/teams", {"name": "research"})
    _, made = await it.ask("POST", "/keys", {"name": "ci", "team": "research"})
    await it.ask("PUT", "/budgets", {"scope": "team:research", "limit_usd": "5"})
    await it.ask("POST", f"/keys/{made['key_id']}/revoke", {})

    trail = await it.rows(
        "SELECT actor, action, subject, body FROM audit WHERE actor <> 'set-up' ORDER BY audit_id"
    )
    assert sorted(row[:3] for row in trail) == [
        ("admin", "budget.set", "team:research"),
        ("admin", "key.create", f"key:{made['key_id']}"),
        ("admin", "key.revoke", f"key:{made['key_id']}"),
        ("admin", "team.create", "team:research"),
    ]
    assert made["key"][12:] not in str(trail)


async def test_a_budget_is_set_and_changed(it: Office) -> None:
    status, made = await it.ask(
        "PUT", "/budgets", {"scope": "team:default", "limit_usd": "0.000000001", "window": "30d"}
    )
    assert (status, made["limit_usd"], made["window"], made["on_exceed"]) == (
        200,
        "0.000000001",
        "30d",
        "error",
    )
    status, changed = await it.ask(
        "PUT",
        "/budgets",
        {
            "scope": "team:default",
            "limit_usd": "100",
            "window": "30d",
            "on_exceed": "warn",
            "reason": "launch",
        },
    )
    assert (changed["limit_usd"], changed["on_exceed"]) == ("100", "warn")
    assert len((await it.ask("GET", "/budgets"))[1]["data"]) == 1


async def test_a_budget_in_calls_is_told_from_one_in_dollars(it: Office) -> None:
    wanted = {
        "scope": "team:default",
        "limit_calls": 500,
        "window": "lifetime",
        "mode": "shadow",
        "alerts": [90],
    }
    status, made = await it.ask("PUT", "/budgets", wanted)
    assert made.pop("budget_id").startswith("bud_")
    assert (status, made) == (
        200,
        {
            "scope": "team:default",
            "unit": "calls",
            "window": "lifetime",
            "zone": "UTC",
            "limit_calls": 500,
            "base_limit_calls": 500,
            "spent_calls": 0,
            "held_calls": 0,
            "left_calls": 500,
            "landing_calls": 0,
            "on_exceed": "error",
            "mode": "shadow",
            "would_refuse": 0,
            "alerts": [90],
            "landing_percent": 0,
            "override_until": None,
            "window_start": "1970-01-01T00:00:00.000Z",
            "window_end": None,
        },
    )
    await it.ask("PUT", "/budgets", {"scope": "team:default", "limit_usd": "5", "window": "lifetime"})
    status, listed = await it.ask("GET", "/budgets")
    assert sorted(b["unit"] for b in listed["data"]) == ["calls", "usd"]
    for body in ({"limit_usd": "5", "limit_calls": 5}, {}):
        status, problem = await it.ask("PUT", "/budgets", {"scope": "team:default", **body})
        assert (status, "give exactly one of limit_usd" in problem["detail"]) == (422, True)


async def test_mistakes_name_their_field(it: Office) -> None:
    async def mistakes(method: str, path: str, body: object) -> list[tuple[str, str]]:
        status, problem = await it.ask(method, path, body)
        assert status in (400, 404, 422), problem
        return [(e["field"], e["message"]) for e in problem.get("errors", [])]

    assert await mistakes(
        "POST", "/keys", {"models": ["larg"], "limits": {"concurrent": 0}, "admin": True}
    ) == [
        ("name", "Field required"),
        ("limits.concurrent", "Input should be greater than or equal to 1"),
        ("admin", "Extra inputs are not permitted"),
    ]
    assert await mistakes("POST", "/keys", {"name": "ci", "models": ["large", "larg"]}) == [
        ("models.1", "there is no model 'larg' in the catalog")
    ]
    assert await mistakes("POST", "/keys", {"name": "ci", "team": "nobody"}) == [
        ("team", "there is no team nobody")
    ]
    assert await mistakes("POST", "/keys", {"name": "ci", "expires_at": "2027-01-01T00:00:00"}) == [
        ("expires_at", 'needs a time zone, such as the Z in "2026-12-31T00:00:00Z"')
    ]
    assert await mistakes("POST", "/keys", {"name": "a\nb"}) == [
        ("name", "String should match pattern '^[^\\x00-\\x1f\\x7f]+$'")
    ]
    for limit, message in (
        (1.5, 'must be dollars as a text, such as "12.50"'),
        (True, 'must be dollars as a text, such as "12.50"'),
        ("-1", "'-1' is not a decimal number of dollars such as '0.25'"),
        ("1e3", "'1e3' is not a decimal number of dollars such as '0.25'"),
        ("0.0000000001", "is finer than a nano-dollar (9 decimals)"),
        ("9" * 12, "is more than can be kept"),
    ):
        body = {"scope": "team:default", "limit_usd": limit}
        assert await mistakes("PUT", "/budgets", body) == [("limit_usd", message)]
    body = {"scope": "team:default", "limit_usd": "1", "window": "fortnight"}
    assert [field for field, _ in await mistakes("PUT", "/budgets", body)] == ["window"]
    assert [field for field, _ in await mistakes("PUT", "/budgets", {"scope": "us", "limit_usd": "1"})] == [
        "scope"
    ]
    assert await mistakes("PUT", "/budgets", {"scope": "team:nobody", "limit_usd": "1"}) == []
    assert [field for field, _ in await mistakes("GET", "/misses?by=colour", None)] == ["by"]
    assert [field for field, _ in await mistakes("GET", "/misses?since=yesterday", None)] == ["since"]
    assert [field for field, _ in await mistakes("GET", "/keys?colour=red", None)] == ["colour"]
    assert [field for field, _ in await mistakes("GET", "/tasks?limit=0", None)] == ["limit"]


async def test_what_a_request_cost_can_be_followed_up(it: Office, tmp_path: Path) -> None:
    ledger = await SqlLedger.open(it.database, replica_id="r1", journal_dir=tmp_path / "journal")
    lost = worlds.attempt()
    good = worlds.attempt(request_id=lost.request_id, attempt_no=2)
    for attempt, outcome in ((lost, worlds.void()), (good, worlds.outcome(37_650_000))):
        await worlds.reserve(ledger, attempt, 50_000_000)
        await ledger.settle(attempt, outcome)
    await ledger.close()

    status, found = await it.ask("GET", f"/requests/{good.request_id}")
    assert (status, found["request_id"]) == (200, good.request_id)
    assert sorted((e["kind"], e["attempt_no"], e["amount_usd"], e["at"]) for e in found["entries"]) == [
        (Kind.POST, 2, "0.03765", "2026-09-21T14:13:20.000Z"),
        (Kind.VOID, 1, "0", "2026-09-21T14:13:20.000Z"),
    ]
    status, problem = await it.ask("GET", "/requests/req_unknown")
    assert (status, problem["detail"]) == (404, "There is no such request in the ledger: req_unknown.")

    status, page = await it.ask("GET", "/tasks?limit=1")
    (task,) = page["data"]
    assert (task["task_id"], task["attempts"], task["cost_usd"], task["state"]) == (
        "task_a",
        2,
        "0.03765",
        "running",
    )
    assert (page["has_more"], page["next_cursor"]) == (False, None)
    status, view = await it.ask("GET", "/tasks/task_a")
    assert (status, {name: view[name] for name in task}) == (200, task)
    assert (view["breakers"], view["outcome"], view["budgets"]) == ([], None, [])
    assert (await it.ask("GET", "/tasks/task_b"))[0] == 404


async def test_a_task_that_a_breaker_stopped_is_shown_with_its_evidence_and_resumed(
    it: Office, tmp_path: Path
) -> None:
    ledger = await SqlLedger.open(it.database, replica_id="r1", journal_dir=tmp_path)
    await worlds.reserve(ledger, worlds.attempt(), 1_000)
    await ledger.close()
    body = {
        "task_id": "task_a",
        "key_id": "key00001",
        "breaker": "loop",
        "action": "stop",
        "tripped": True,
        "message": "the same call 6 times",
        "evidence": {"turns": 6},
        "pauses_task": True,
    }
    await BreakerEvents(it.database).record("breaker_tripped", "task_a/loop/trip/1", body, tell=True)

    status, task = await it.ask("GET", "/tasks/task_a")
    (seen,) = task["breakers"]
    assert (status, task["state"]) == (200, "paused_loop")
    assert task["state_reason"] == "breaker loop: the same call 6 times"
    assert {**seen, "at": ""} == {
        "breaker": "loop",
        "action": "stop",
        "tripped": True,
        "message": "the same call 6 times",
        "evidence": {"turns": 6},
        "at": "",
        "resumed_at": None,
        "resumed_by": None,
    }
    status, resumed = await it.ask("POST", "/tasks/task_a/resume", {"reason": "looked at it"})
    assert (status, resumed["state"], resumed["changed"]) == (200, "running", ["task_a"])
    assert resumed["breakers"][0]["resumed_by"] == "admin"
    status, paused = await it.ask("POST", "/tasks/task_a/pause", {"reason": "wait"})
    assert (status, paused["state"], paused["state_reason"]) == (200, "paused_admin", "wait")
    assert it.changes == ["changed"] * 2
    assert (await it.ask("POST", "/tasks/task_a/resume", {"reason": 1}))[0] == 422
    assert (await it.ask("POST", "/tasks/none/resume", {}))[0] == 404
    assert await it.rows(
        "SELECT actor, action FROM audit WHERE subject = 'task:task_a' ORDER BY audit_id"
    ) == [
        ("breaker", "task.pause"),
        ("admin", "task.resume"),
        ("admin", "task.pause"),
    ]


async def test_the_catalog_shows_what_each_deployment_serves_and_how_it_is(it: Office) -> None:
    status, catalog = await it.ask("GET", "/catalog")
    assert status == 200
    assert catalog["default_tier"] == "standard"
    assert [(d["name"], d["operations"], d["health"]) for d in catalog["data"]] == [
        ("large-eu", ["chat", "embeddings", "responses"], "closed"),
        ("mini-eu", ["chat"], "open"),
    ]
