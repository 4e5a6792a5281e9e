"""How things change: once, on what was seen, with a reason, and with an audit row or not at all; on both stores."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from gateway.core import secrets
from tests.admin.office import PEPPER, Office
from tests.storage import worlds


def once(key: str) -> dict[str, str]:
    return {"Idempotency-Key": key}


async def actions(it: Office) -> list[tuple[str, str]]:
    found = await it.rows("SELECT action, subject FROM audit WHERE actor <> 'set-up'")
    return sorted((row[0], row[1]) for row in found)


async def test_a_tenant_and_its_team_live_and_go(on: Office) -> None:
    status, made = await on.ask("POST", "/tenants", {"tenant_id": "acme", "name": "Acme Inc."})
    assert (status, made["tenant_id"], made["name"]) == (201, "acme", "Acme Inc.")
    status, problem = await on.ask("POST", "/tenants", {"tenant_id": "acme"})
    assert (status, problem["errors"][0]["field"]) == (409, "tenant_id")
    assert (await on.ask("POST", "/teams", {"name": "research", "tenant": "acme"}))[0] == 201
    status, problem = await on.ask("POST", "/teams", {"name": "lab", "tenant": "nobody"})
    assert (status, problem["errors"][0]["field"]) == (400, "tenant")

    status, problem = await on.ask("DELETE", "/tenants/acme")
    assert (status, problem["detail"]) == (409, "tenant acme has 1 teams: delete them first.")
    assert (await on.ask("PATCH", "/tenants/acme", {"name": "Acme"}))[1]["name"] == "Acme"
    patch = {"models": ["mini"], "limits": {"concurrent": 2}, "task_budget_usd": "3"}
    assert (await on.ask("PATCH", "/teams/research", patch))[1] == {
        "team_id": "research",
        "tenant_id": "acme",
        "models": ["mini"],
        "limits": {"requests_per_min": None, "tokens_per_min": None, "concurrent": 2},
        "task_budget_usd": "3",
    }
    status, patched = await on.ask("PATCH", "/teams/research", {"limits": {"requests_per_min": 9}})
    assert patched["limits"] == {"requests_per_min": 9, "tokens_per_min": None, "concurrent": 2}
    status, patched = await on.ask(
        "PATCH", "/teams/research", {"limits": {"concurrent": None}, "task_budget_usd": None}
    )
    assert (patched["limits"]["concurrent"], patched["task_budget_usd"]) == (None, None)

    assert (await on.ask("DELETE", "/teams/research"))[0] == 200
    assert (await on.ask("DELETE", "/tenants/acme"))[0] == 200
    assert (await on.ask("GET", "/tenants/acme"))[0] == 404
    assert (await on.ask("DELETE", "/teams/default"))[0] == 409
    assert [action for action, _ in await actions(on)] == [
        "team.change",
        "team.change",
        "team.change",
        "team.create",
        "team.delete",
        "tenant.change",
        "tenant.create",
        "tenant.delete",
    ]


async def test_a_change_of_what_was_changed_meanwhile_is_refused(on: Office) -> None:
    _, made = await on.ask("POST", "/keys", {"name": "ci"})
    address = f"/keys/{made['key_id']}"
    _, _, seen = await on.told("GET", address)
    status, _, after = await on.told("PATCH", address, {"name": "ci-2"}, headers={"If-Match": seen["ETag"]})
    assert (status, after["ETag"] != seen["ETag"]) == (200, True)

    status, problem, _ = await on.told("PATCH", address, {"name": "mine"}, headers={"If-Match": seen["ETag"]})
    assert (status, problem["errors"][0]["field"]) == (412, "If-Match")
    assert (await on.told("DELETE", address, headers={"If-Match": seen["ETag"]}))[0] == 412
    status, found, now = await on.told("GET", address)
    assert (found["name"], found["revoked_at"], now["ETag"]) == ("ci-2", None, after["ETag"])
    assert (await on.told("DELETE", address, headers={"If-Match": f'"x", {now["ETag"]}'}))[0] == 200


async def test_the_entity_tag_of_a_budget_does_not_move_with_what_is_spent(on: Office) -> None:
    _, made, first = await on.told("POST", "/budgets", {"scope": "team:default", "limit_usd": "5"})
    await worlds.run(on.database, "UPDATE budget SET posted_amount = 1000000000")
    _, found, second = await on.told("GET", f"/budgets/{made['budget_id']}")
    assert (found["spent_usd"], second["ETag"]) == ("1", first["ETag"])
    _, _, third = await on.told("PATCH", f"/budgets/{made['budget_id']}", {"limit_usd": "4"})
    assert third["ETag"] != first["ETag"]
    same = {"scope": "team:default", "limit_usd": "3"}
    assert (await on.told("PUT", "/budgets", same, headers={"If-Match": first["ETag"]}))[0] == 412
    assert (await on.told("PUT", "/budgets", same, headers={"If-Match": third["ETag"]}))[0] == 200
    other = {**same, "window": "day"}
    assert (await on.told("PUT", "/budgets", other, headers={"If-Match": "*"}))[0] == 412, "there is none"


async def test_a_change_that_is_sent_again_happens_once(on: Office) -> None:
    body = {"name": "ci", "budget": {"limit_usd": "5"}}
    first = await on.told("POST", "/keys", body, headers=once("a-1"))
    again = await on.told("POST", "/keys", body, headers=once("a-1"))
    assert (first[0], again[0]) == (201, 201)
    assert again[1] == first[1], "the text of the key, too"
    assert (again[2].get("Idempotency-Replayed"), again[2]["ETag"]) == ("true", first[2]["ETag"])
    key_id, secret = secrets.parse_key(first[1]["key"]) or ("", "")
    assert await on.rows("SELECT key_id, secret_hmac FROM virtual_key") == [
        (key_id, secrets.hmac_of(PEPPER, secret))
    ]
    assert await actions(on) == [("budget.set", f"key:{key_id}"), ("key.create", f"key:{key_id}")]

    status, problem, _ = await on.told("POST", "/keys", {"name": "other"}, headers=once("a-1"))
    assert (status, problem["errors"][0]["field"]) == (409, "Idempotency-Key")
    kept = await on.rows("SELECT key_digest, request_digest, body FROM admin_reply")
    assert len(kept) == 1
    assert secret.encode() not in b"".join(kept[0])
    assert b"a-1" not in b"".join(kept[0])


async def test_of_many_at_once_with_one_idempotency_key_one_happens(on: Office) -> None:
    asked = [on.told("POST", "/keys", {"name": "ci"}, headers=once("herd")) for _ in range(8)]
    answers = await asyncio.gather(*asked)
    assert {status for status, _, _ in answers} == {201}
    assert len({body["key"] for _, body, _ in answers}) == 1
    assert await on.rows("SELECT count(*) FROM virtual_key") == [(1,)]


async def test_a_refused_change_may_be_sent_again_with_its_idempotency_key(it: Office) -> None:
    body = {"scope": "team:later", "limit_usd": "5"}
    assert (await it.told("POST", "/budgets", body, headers=once("k")))[0] == 404
    await it.ask("POST", "/teams", {"name": "later"})
    assert (await it.told("POST", "/budgets", body, headers=once("k")))[0] == 201


async def test_a_change_and_its_audit_row_are_one(on: Office) -> None:
    await on.ask("POST", "/teams", {"name": "research"})
    await worlds.run(on.database, "ALTER TABLE audit RENAME TO gone")
    for method, path, body in (
        ("POST", "/teams", {"name": "lab"}),
        ("PATCH", "/teams/research", {"models": ["mini"]}),
        ("DELETE", "/teams/research", None),
        ("POST", "/keys", {"name": "ci", "budget": {"limit_usd": "5"}}),
        ("POST", "/budgets", {"scope": "team:research", "limit_usd": "5"}),
        ("POST", "/tenants", {"tenant_id": "acme"}),
        ("POST", "/admin_keys", {"name": "eva", "role": "viewer"}),
    ):
        assert (await on.ask(method, path, body))[0] == 500, (method, path)
    assert await on.rows("SELECT team_id, models FROM team ORDER BY team_id") == [
        ("default", "[]"),
        ("research", "[]"),
    ]
    for table in ("virtual_key", "budget", "admin_key"):
        assert await on.rows(f"SELECT count(*) FROM {table}") == [(0,)]


async def test_a_raise_needs_a_reason_and_a_limit_below_what_is_spent_a_word(on: Office) -> None:
    _, made = await on.ask(
        "POST", "/budgets", {"scope": "team:default", "limit_usd": "5", "window": "lifetime"}
    )
    address = f"/budgets/{made['budget_id']}"
    await worlds.run(on.database, "UPDATE budget SET posted_amount = 3000000000, held_amount = 500000000")

    async def refused(method: str, path: str, body: object) -> tuple[int, str]:
        status, problem = await on.ask(method, path, body)
        return status, problem["errors"][0]["field"]

    assert await refused("PATCH", address, {"limit_usd": "6"}) == (422, "reason")
    assert await refused("PATCH", address, {"limit_usd": "6", "reason": " "}) == (422, "reason")
    assert await refused("PATCH", address, {"on_exceed": "warn"}) == (422, "reason")
    assert await refused("PATCH", address, {"mode": "shadow"}) == (422, "reason")
    assert await refused("PATCH", address, {"limit_calls": 6}) == (422, "limit_calls")
    assert await refused("PATCH", address, {"limit_usd": "3.2"}) == (409, "limit_usd")
    assert await refused(
        "PATCH", address, {"limit_usd": "9", "until": "2020-01-01T00:00:00Z", "reason": "x"}
    ) == (
        422,
        "until",
    )
    assert (await on.ask("PATCH", address, {}))[0] == 422
    same = {"scope": "team:default", "window": "lifetime"}
    assert await refused("PUT", "/budgets", {**same, "limit_usd": "6"}) == (422, "reason")
    assert await refused("POST", "/budgets", {**same, "limit_usd": "6"}) == (409, "scope")
    assert (await on.ask("GET", address))[1]["limit_usd"] == "5"

    patch = {"limit_usd": "8", "until": "2027-01-01T00:00:00Z", "reason": "launch week"}
    _, raised = await on.ask("PATCH", address, patch)
    assert (raised["limit_usd"], raised["base_limit_usd"], raised["override_until"]) == (
        "8",
        "5",
        "2027-01-01T00:00:00.000Z",
    )
    _, ended = await on.ask("PATCH", address, {"until": None})
    assert (ended["limit_usd"], ended["override_until"]) == ("5", None)
    _, lowered = await on.ask("PATCH", address, {"limit_usd": "3.2", "below_spent": True})
    assert (lowered["limit_usd"], lowered["left_usd"]) == ("3.2", "-0.3")

    said = await on.rows("SELECT action, body FROM audit WHERE subject = 'team:default' AND actor = 'admin'")
    assert sorted((action, json.loads(body)["reason"]) for action, body in said) == [
        ("budget.lower", ""),
        ("budget.lower", ""),
        ("budget.raise", "launch week"),
        ("budget.set", ""),
    ]
    assert (await on.ask("DELETE", address))[0] == 200
    assert (await on.ask("GET", address))[0] == 404


async def test_lists_come_in_pages_that_go_on_where_the_last_one_ended(on: Office) -> None:
    names = [f"team-{n}" for n in range(7)]
    for name in names:
        await on.ask("POST", "/teams", {"name": name})
        await on.ask("POST", "/keys", {"name": f"key of {name}", "team": name})
        await on.ask("PUT", "/budgets", {"scope": f"team:{name}", "limit_usd": "1"})

    async def all_of(path: str, size: int) -> list[Any]:
        found: list[Any] = []
        more = ""
        while True:
            _, page = await on.ask("GET", f"{path}{'&' if '?' in path else '?'}limit={size}{more}")
            assert len(page["data"]) <= size
            found += page["data"]
            if not page["has_more"]:
                assert page["next_cursor"] is None
                return found
            more = f"&cursor={page['next_cursor']}"

    assert [team["team_id"] for team in await all_of("/teams", 3)] == ["default", *names]
    assert [key["name"] for key in await all_of("/keys", 2)] == [f"key of {name}" for name in names]
    assert [key["team_id"] for key in await all_of("/keys?team_id=team-3&state=active", 2)] == ["team-3"]
    assert await all_of("/keys?state=revoked", 2) == []
    assert [b["scope"] for b in await all_of("/budgets?unit=usd", 4)] == [f"team:{name}" for name in names]
    assert len(await all_of("/audit?action=key.create", 5)) == 7
    assert [d["name"] for d in await all_of("/deployments", 1)] == ["large-eu", "mini-eu"]

    _, first = await on.ask("GET", "/keys?limit=2")
    for path in (
        f"/keys?limit=2&team_id=team-1&cursor={first['next_cursor']}",
        f"/teams?cursor={first['next_cursor']}",
        "/keys?cursor=bm90aGluZw",
        "/keys?cursor=%00",
        "/keys?cursor=",
    ):
        status, problem = await on.ask("GET", path)
        assert (status, problem["errors"][0]["field"]) == (422, "cursor"), path


async def test_many_keys_are_made_or_none(on: Office) -> None:
    rows = [{"name": f"k{n}", "budget": {"limit_usd": "1"}} for n in range(5)]
    for wrong, field in (
        ({"name": "x", "team": "nobody"}, "keys.3.team"),
        ({"name": "x", "models": ["gpt-0"]}, "keys.3.models.0"),
        ({"name": ""}, "keys.3.name"),
        ({"name": "x", "budget": {"limit_usd": "1", "window": "fortnight"}}, "keys.3.budget.window"),
    ):
        status, problem = await on.ask("POST", "/keys/bulk", {"keys": [*rows[:3], wrong, *rows[3:]]})
        assert (status in (400, 422), problem["errors"][0]["field"]) == (True, field)
    assert await on.rows("SELECT count(*) FROM virtual_key") == [(0,)]
    assert await on.rows("SELECT count(*) FROM budget") == [(0,)]

    status, made, _ = await on.told("POST", "/keys/bulk", {"keys": rows}, headers=once("many"))
    assert (status, [row["name"] for row in made["data"]]) == (201, ["k0", "k1", "k2", "k3", "k4"])
    assert (await on.told("POST", "/keys/bulk", {"keys": rows}, headers=once("many")))[1] == made
    texts = dict(secrets.parse_key(row["key"]) or ("", "") for row in made["data"])
    stored = await on.rows("SELECT key_id, secret_hmac FROM virtual_key")
    assert dict(stored) == {key_id: secrets.hmac_of(PEPPER, secret) for key_id, secret in texts.items()}
    assert len(set(texts.values())) == 5
