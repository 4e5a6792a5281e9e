"""Every route, for every role, at one's own and at another team's: what is not yours does not exist, and no byte of it
shows.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gateway.admin.route import Route
from gateway.admin.routes import PREFIX
from gateway.admin.routes import ROUTES as ALL_ROUTES
from gateway.core.offices import RIGHTS, Admin, Reach, Role
from gateway.storage.ledger import SqlLedger
from gateway.storage.tasks import Tasks
from tests.admin.office import Office
from tests.storage import worlds

ROUTES = [route for route in ALL_ROUTES if route.under == PREFIX]
#: What each of the two teams is full of; nobody of the other may see one letter of it.
MARKS = {"ours": "olive", "theirs": "thistle"}


CONFIGURED_NAMES = {
    "/deployments/{name}": "mini-eu",
    "/tiers/{name}": "small",
    "/virtual_models/{name}": "quick",
    "/rules/{name}": "late",
}


@dataclass(frozen=True)
class Side:
    """The ids of what one team has."""

    team_id: str
    tenant_id: str
    key_id: str
    budget_id: str
    task_id: str
    request_id: str
    admin_key_id: str = "zzzzzzzz"
    #: prices belong to no team: whoever may read sees all of them
    price_id: str = "none"
    webhook_id: str = "none"
    #: nor do clients
    client: str = "none"
    #: what is configured is everybody's, too: a name for each kind
    named: Mapping[str, str] = dataclasses.field(default_factory=dict)


async def side(it: Office, mark: str, folder: Path, tenant: str = "") -> Side:
    """A tenant with one team, which has a key with a budget, and a task of it that did something."""
    team, tenant = f"{mark}-team", tenant or f"{mark}-tenant"
    await it.ask("POST", "/tenants", {"tenant_id": tenant})
    await it.ask("POST", "/teams", {"name": team, "tenant": tenant})
    _, key = await it.ask(
        "POST", "/keys", {"name": f"{mark}-key", "team": team, "budget": {"limit_usd": "9", "window": "day"}}
    )
    _, budgets = await it.ask("GET", f"/budgets?scope=key:{key['key_id']}")
    _, task = await it.ask(
        "POST",
        "/tasks",
        {"key_id": key["key_id"], "name": f"{mark}-task", "budgets": [{"limit_usd": "5"}]},
    )
    ledger = await SqlLedger.open(it.database, replica_id=mark, journal_dir=folder / mark)
    attempt = worlds.attempt(
        tenant_id=tenant, team_id=team, key_id=key["key_id"], task_id=task["task_id"], model=mark
    )
    await worlds.reserve(ledger, attempt, 50_000_000)
    await ledger.settle(attempt, worlds.outcome(37_650_000))
    await ledger.close()
    await Tasks(it.database, actor="test", pepper=b"").record_outcome(task["task_id"], True)
    await worlds.run(
        it.database,
        "INSERT INTO prefix_miss (attempt_id, at_ms, request_id, tenant_id, team_id, key_id, task_id, model, "
        "provider, deployment, client, verdict, cause, lost_tokens, lost_nano_usd, detail) VALUES "
        f"('{mark}', $1, 'none', $2, $3, $4, $5, '{mark}', '', '', '', 'miss', '{mark}', 1, 1, '{{}}')",
        worlds.NOON_MS,
        tenant,
        team,
        key["key_id"],
        task["task_id"],
    )
    return Side(
        team, tenant, key["key_id"], budgets["data"][0]["budget_id"], task["task_id"], attempt.request_id
    )


async def admin_key(it: Office, role: Role, **reach: str) -> str:
    status, made = await it.ask("POST", "/admin_keys", {"name": "x", "role": role.value, **reach})
    assert status == 201, made
    return str(made["key"])


def address(route: Route, at: Side) -> str:
    path = route.path.replace("{name}", at.named.get(route.path, "none"))
    path = re.sub(r"\{(\w+)\}", lambda m: getattr(at, m[1]), path)
    query = {
        "/costs": "?start_time=2026-09-20&group_by=team,model",
        "/usage": "?start_time=2026-09-20&group_by=team,model",
        "/misses": "?by=team,model",
        "/outcomes": "?group_by=team_id,name,model",
    }
    return path + query.get(route.path, "")


#: Bodies that are right, for routes that take one; `scope` and `team` are another's where the ids are.
def body(route: Route, at: Side) -> Any:
    if route.body is None:
        return None
    return {
        "/keys": {"name": "new", "team": at.team_id},
        "/keys/bulk": {"keys": [{"name": "new", "team": at.team_id}]},
        "/budgets": {"scope": f"key:{at.key_id}", "limit_usd": "5", "window": "week"},
        "/budgets/{budget_id}": {"limit_usd": "8"},
        "/keys/{key_id}": {"name": "renamed"},
        "/teams/{team_id}": {"models": ["mini"]},
        "/tenants/{tenant_id}": {"name": "renamed"},
        "/teams": {"name": "made", "tenant": at.tenant_id},
        "/tenants": {"tenant_id": "made"},
        "/tasks": {"key_id": at.key_id, "name": "made"},
        "/tasks/{task_id}": {"labels": {"a": "b"}},
        "/tasks/{task_id}/raise": {"limit_usd": "50", "reason": "more"},
        "/tasks/{task_id}/handover": {"to": "eva"},
        "/tasks/{task_id}/outcome": {"success": True},
        "/admin_keys": {"name": "made", "role": "viewer"},
    }.get(route.path, {})


@pytest.mark.parametrize(
    ("role", "scope"),
    [
        (Role.OPERATOR, "tenant"),
        (Role.TEAM_ADMIN, "team"),
        (Role.VIEWER, "tenant"),
        (Role.VIEWER, "team"),
    ],
)
async def test_every_route_at_anothers_things_and_at_ones_own(
    it: Office, role: Role, scope: str, tmp_path: Path
) -> None:
    # The other team is in the same tenant where that makes it hardest to keep them apart.
    tenant = "shared" if scope == "team" else ""
    theirs = await side(it, MARKS["theirs"], tmp_path, tenant)
    ours = await side(it, MARKS["ours"], tmp_path, tenant)
    _, price = await it.ask(
        "POST",
        "/prices",
        {"price": "acme/large", "rates": {"input_usd_per_mtok": "1", "output_usd_per_mtok": "1"}},
    )
    ours = replace(ours, price_id=price["price_id"], client="codex", named=CONFIGURED_NAMES)
    await it.ask("POST", "/virtual_models", {"name": "quick", "otherwise": "small"})
    reach = {f"{scope}_id": getattr(ours, f"{scope}_id")}
    key = await admin_key(it, role, **reach)
    admin = Admin("", role, Reach(ours.tenant_id, ours.team_id if scope == "team" else ""))
    before = await everything(it, theirs)

    for route in ROUTES:
        if tenant and route.path == "/tenants/{tenant_id}":
            continue
        status, found = await it.ask(route.method, address(route, theirs), body(route, theirs), key=key)
        if not admin.may(route.right):
            assert status == 403, (route.name, found)
        elif "{" in route.path:
            assert status == 404, (route.name, found)
        elif route.method != "GET":
            assert status in (400, 404), (route.name, found)
        else:
            assert status == 200, (route.name, found)
        said = (
            str(found).replace(theirs.team_id, "").replace(theirs.tenant_id, "").replace(theirs.task_id, "")
        )
        if status == 200:
            said = str(found)
        assert MARKS["theirs"] not in said, route.name
    assert await everything(it, theirs) == before

    for route in sorted(ROUTES, key=lambda r: r.method == "DELETE"):
        if route.path in ("/keys/{key_id}/revoke", "/audit"):
            continue
        status, found = await it.ask(route.method, address(route, ours), body(route, ours), key=key)
        if not admin.may(route.right):
            assert status == 403, (route.name, found)
        else:
            # Their own team and tenant have keys and teams, so that they cannot be deleted; a name may be taken.
            assert status in (200, 201, 409), (route.name, found)


async def everything(it: Office, of: Side) -> list[Any]:
    """What the other team has, as it stands."""
    return [
        await it.rows(sql)
        for sql in (
            "SELECT * FROM team ORDER BY 1",
            "SELECT key_id, name, team_id, revoked_at_ms FROM virtual_key WHERE team_id = '"
            + of.team_id
            + "'",
            "SELECT budget_id, scope, limit_amount FROM budget WHERE scope LIKE '%" + of.key_id + "'",
            "SELECT task_id, state FROM task WHERE task_id = '" + of.task_id + "'",
            "SELECT * FROM tenant ORDER BY 1",
        )
    ]


async def test_an_operator_does_all_but_admin_keys_and_a_revoked_or_expired_key_opens_nothing(
    it: Office,
) -> None:
    key = await admin_key(it, Role.OPERATOR)
    assert (await it.ask("GET", "/me", key=key))[1]["role"] == "operator"
    assert (await it.ask("POST", "/tenants", {"tenant_id": "acme"}, key=key))[0] == 201
    assert (await it.ask("GET", "/audit", key=key))[0] == 200
    assert (await it.ask("GET", "/admin_keys", key=key))[0] == 403
    assert (await it.ask("POST", "/admin_keys", {"name": "x", "role": "owner"}, key=key))[0] == 403

    key_id = key.split("-")[1]
    trail = await it.rows("SELECT actor FROM audit WHERE action = 'tenant.create'")
    assert trail == [(f"admin:{key_id}",)]
    status, shown = await it.ask("DELETE", f"/admin_keys/{key_id}")
    assert (status, shown["revoked_at"] is not None) == (200, True)
    assert (await it.ask("GET", "/me", key=key))[0] == 401
    _, late = await it.ask(
        "POST", "/admin_keys", {"name": "x", "role": "viewer", "expires_at": "2020-01-01T00:00:00Z"}
    )
    assert (await it.ask("GET", "/me", key=late["key"]))[0] == 401


async def test_a_team_admin_cannot_raise_what_is_above_it(it: Office, tmp_path: Path) -> None:
    ours = await side(it, "olive", tmp_path)
    key = await admin_key(it, Role.TEAM_ADMIN, team_id=ours.team_id)
    _, team = await it.ask("POST", "/budgets", {"scope": f"team:{ours.team_id}", "limit_usd": "5"})
    patch = {"limit_usd": "50", "reason": "please"}
    for method, path, asked in (
        ("PATCH", f"/budgets/{team['budget_id']}", patch),
        ("DELETE", f"/budgets/{team['budget_id']}", None),
        ("PUT", "/budgets", {"scope": f"team:{ours.team_id}", "limit_usd": "50", "reason": "please"}),
    ):
        status, problem = await it.ask(method, path, asked, key=key)
        assert (status, problem["detail"]) == (403, "the budgets of your own team are set by those above it")
    assert (await it.ask("GET", f"/budgets/{team['budget_id']}", key=key))[1]["limit_usd"] == "5"
    assert (await it.ask("PATCH", f"/budgets/{ours.budget_id}", patch, key=key))[0] == 200


async def test_admin_keys_that_mean_nothing_are_refused(it: Office) -> None:
    for wanted, field in (
        ({"role": "team_admin"}, "team_id"),
        ({"role": "owner", "tenant_id": "default"}, "role"),
        ({"role": "king"}, "role"),
        ({"role": "viewer", "team_id": "nobody"}, "team_id"),
        ({"role": "viewer", "tenant_id": "nobody"}, "tenant_id"),
        ({"role": "team_admin", "team_id": "default", "tenant_id": "nobody"}, "team_id"),
    ):
        status, problem = await it.ask("POST", "/admin_keys", {"name": "x", **wanted})
        assert status in (400, 422)
        assert field in str(problem.get("errors", problem["detail"])) + problem["detail"], problem
    assert await it.rows("SELECT count(*) FROM admin_key") == [(0,)]


async def test_the_text_of_an_admin_key_is_shown_once_and_never_again(on: Office) -> None:
    sent = {"Idempotency-Key": "eva"}
    wanted = {"name": "eva", "role": "viewer"}
    _, made, _ = await on.told("POST", "/admin_keys", wanted, headers=sent)
    _, again, _ = await on.told("POST", "/admin_keys", wanted, headers=sent)
    assert again == made
    secret = made["key"].split("-", 2)[2]
    _, listed = await on.ask("GET", "/admin_keys")
    shown = {k: v for k, v in made.items() if k != "key"}
    assert listed["data"] == [shown]
    at_rest = [await on.rows(f"SELECT * FROM {table}") for table in ("admin_key", "admin_reply", "audit")]
    assert secret not in str(at_rest)
    assert (await on.ask("GET", "/me", key=made["key"]))[1] == {
        "actor": f"admin:{made['admin_key_id']}",
        "role": "viewer",
        "tenant_id": None,
        "team_id": None,
    }


def test_no_role_has_a_right_that_a_higher_one_lacks() -> None:
    line = [RIGHTS[role] for role in (Role.VIEWER, Role.TEAM_ADMIN, Role.OPERATOR, Role.OWNER)]
    assert all(low < high for low, high in pairwise(line))
