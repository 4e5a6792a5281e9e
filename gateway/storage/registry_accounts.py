"""Transactions of the admin API over tenants, teams and virtual keys. What is out of reach does not exist."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.core import secrets
from gateway.core.errors import InvalidRequest, NotFound
from gateway.core.identity import KeyRecord, RateLimit
from gateway.core.offices import InUse, Page, Reach, Taken, Tenant
from gateway.storage import audit, budget_changes
from gateway.storage.accounts import DEFAULT_TEAM, DEFAULT_TENANT, SELECT_TEAMS, Team, add_key, team_of
from gateway.storage.budget_changes import BudgetRule
from gateway.storage.keys import SELECT_KEYS, record_of
from gateway.storage.pages import Listing
from gateway.storage.transact import Fetch, Row, Sql, Tx, json_text

_NOW = Sql("SELECT now_ms()")
_TENANT_COLUMNS = "tenant_id, name, created_at_ms"
TENANTS = Listing(
    f"SELECT {_TENANT_COLUMNS} FROM tenant",  # noqa: S608
    ("tenant_id",),
    (0,),
    {},
    {
        "tenant": "tenant_id = {}",
        "team": "tenant_id = (SELECT t.tenant_id FROM team t WHERE t.team_id = {})",
    },
)
TEAMS = Listing(
    SELECT_TEAMS,
    ("team_id",),
    (0,),
    {"tenant_id": "tenant_id = {}"},
    {"tenant": "tenant_id = {}", "team": "team_id = {}"},
)
#: Keys that tasks have of their own are shown only where they are asked for.
_KEY_FILTERS = {
    "team_id": "k.team_id = {}",
    "tenant_id": "k.tenant_id = {}",
    "name": "k.name = {}",
    "declared_by": "k.declared_by = {}",
    "state:active": "k.revoked_at_ms IS NULL AND (k.expires_at_ms IS NULL OR k.expires_at_ms > now_ms())",
    "state:revoked": "k.revoked_at_ms IS NOT NULL",
    "state:expired": "k.revoked_at_ms IS NULL AND k.expires_at_ms <= now_ms()",
    "own": "k.declared_by IS NULL",
}
_KEY_SELECT = SELECT_KEYS.replace(" FROM virtual_key k", ", k.created_at_ms FROM virtual_key k", 1)
KEYS = Listing(
    _KEY_SELECT,
    ("k.created_at_ms", "k.key_id"),
    (18, 0),
    _KEY_FILTERS,
    {"tenant": "k.tenant_id = {}", "team": "k.team_id = {}"},
)

_TENANT = Sql(f"SELECT {_TENANT_COLUMNS} FROM tenant WHERE tenant_id = $1 FOR UPDATE")  # noqa: S608
_READ_TENANT = Sql(f"SELECT {_TENANT_COLUMNS} FROM tenant WHERE tenant_id = $1")  # noqa: S608
_ADD_TENANT = Sql("INSERT INTO tenant (tenant_id, name, created_at_ms) VALUES ($1, $2, $3)")
_NAME_TENANT = Sql("UPDATE tenant SET name = $2 WHERE tenant_id = $1")
_DROP_TENANT = Sql("DELETE FROM tenant WHERE tenant_id = $1")
_TEAMS_OF = Sql("SELECT count(*) FROM team WHERE tenant_id = $1")
_TEAM = Sql(f"{SELECT_TEAMS} WHERE team_id = $1")
_LOCK_TEAM = Sql(f"{SELECT_TEAMS} WHERE team_id = $1 FOR UPDATE")
_ADD_TEAM = Sql(
    "INSERT INTO team (team_id, tenant_id, name, models, requests_per_min, tokens_per_min, concurrent, "
    "default_task_budget_nano_usd, revision, created_at_ms) VALUES ($1, $2, $1, $3, $4, $5, $6, $7, $8, $9)"
)
_CHANGE_TEAM = Sql(
    "UPDATE team SET models = $2, requests_per_min = $3, tokens_per_min = $4, concurrent = $5, "
    "default_task_budget_nano_usd = $6, revision = $7 WHERE team_id = $1"
)
_DROP_TEAM = Sql("DELETE FROM team WHERE team_id = $1")
_KEYS_OF = Sql("SELECT count(*) FROM virtual_key WHERE team_id = $1")
_BUDGETS_OF = Sql("SELECT count(*) FROM budget WHERE scope = $1")
_KEY = Sql(f"{SELECT_KEYS} WHERE k.key_id = $1")
#: The keys of its tasks are copies of it, and stay that.
_CHANGE_KEY = Sql(
    "UPDATE virtual_key SET models = $2, requests_per_min = $3, tokens_per_min = $4, concurrent = $5, "
    "expires_at_ms = $6, revision = $7 WHERE key_id = $1 OR declared_by = $1"
)
_NAME_KEY = Sql("UPDATE virtual_key SET name = $2, labels = $3 WHERE key_id = $1")
_REVOKE = Sql(
    "UPDATE virtual_key SET revoked_at_ms = $2, revision = $3 "
    "WHERE (key_id = $1 OR declared_by = $1) AND revoked_at_ms IS NULL"
)


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key to be made, and its budget, if it gets one."""

    name: str
    team_id: str
    models: frozenset[str] = frozenset()
    limit: RateLimit = field(default_factory=RateLimit)
    expires_at_ms: int | None = None
    labels: Mapping[str, str] | None = None
    budget: BudgetRule | None = None


# --- tenants --------------------------------------------------------------------------------------------------


def tenants(reach: Reach, filters: Mapping[str, Any], after: Any, limit: int) -> Tx[Page[Tenant]]:
    page = yield from TENANTS.page(reach, filters, after, limit)
    return Page([Tenant(*row) for row in page.rows], page.after)


def tenant(reach: Reach, tenant_id: str, sql: Sql = _READ_TENANT) -> Tx[Tenant]:
    rows = yield Fetch(sql, (tenant_id,))
    if reach.team_id:
        own = yield Fetch(_TEAM, (reach.team_id,))
        reach = Reach(own[0][1] if own else "\0")
    if not rows or not reach.holds(rows[0][0], ""):
        raise NotFound(f"there is no tenant {tenant_id}")
    return Tenant(*rows[0])


def add_tenant(actor: str, tenant_id: str, name: str) -> Tx[Tenant]:
    if (yield Fetch(_TENANT, (tenant_id,))):
        raise Taken("tenant_id", f"there already is a tenant {tenant_id}")
    _, now_ms = yield from audit.record(actor, "tenant.create", f"tenant:{tenant_id}", {"name": name})
    yield Fetch(_ADD_TENANT, (tenant_id, name, now_ms))
    return Tenant(tenant_id, name, now_ms)


def change_tenant(actor: str, reach: Reach, tenant_id: str, change: Any) -> Tx[Tenant]:
    before = yield from tenant(reach, tenant_id, _TENANT)
    after: Tenant = change(before)
    if after == before:
        return before
    said = {"before": before.name, "after": after.name}
    yield from audit.record(actor, "tenant.change", f"tenant:{tenant_id}", said)
    yield Fetch(_NAME_TENANT, (tenant_id, after.name))
    return after


def drop_tenant(actor: str, reach: Reach, tenant_id: str, expect: Any) -> Tx[Tenant]:
    found = yield from tenant(reach, tenant_id, _TENANT)
    expect(found)
    if tenant_id == DEFAULT_TENANT:
        raise InUse("the default tenant stays")
    for sql, args, what in (
        (_TEAMS_OF, (tenant_id,), "teams"),
        (_BUDGETS_OF, (f"tenant:{tenant_id}",), "budgets"),
    ):
        count = (yield Fetch(sql, args))[0][0]
        if count:
            raise InUse(f"tenant {tenant_id} has {count} {what}: delete them first")
    yield from audit.record(actor, "tenant.delete", f"tenant:{tenant_id}", {})
    yield Fetch(_DROP_TENANT, (tenant_id,))
    return found


# --- teams ----------------------------------------------------------------------------------------------------


def teams(reach: Reach, filters: Mapping[str, Any], after: Any, limit: int) -> Tx[Page[Team]]:
    page = yield from TEAMS.page(reach, filters, after, limit)
    return Page([team_of(row) for row in page.rows], page.after)


def team(reach: Reach, team_id: str, sql: Sql = _TEAM) -> Tx[Team]:
    rows = yield Fetch(sql, (team_id,))
    found = team_of(rows[0]) if rows else None
    if found is None or not reach.holds(found.tenant_id, found.team_id):
        raise NotFound(f"there is no team {team_id}")
    return found


def add_team(actor: str, reach: Reach, wanted: Team, budget: BudgetRule | None) -> Tx[Team]:
    # A name may be taken by a team out of reach; that it exists is all that is told.
    if (yield Fetch(_LOCK_TEAM, (wanted.team_id,))):
        raise Taken("name", "is taken")
    if not reach.holds(wanted.tenant_id, wanted.team_id) or not (yield Fetch(_TENANT, (wanted.tenant_id,))):
        raise InvalidRequest(f"there is no tenant {wanted.tenant_id}", param="tenant")
    revision, now_ms = yield from _team_said(actor, "team.create", wanted)
    yield Fetch(_ADD_TEAM, (wanted.team_id, wanted.tenant_id, *_team_values(wanted), revision, now_ms))
    if budget is not None:
        yield from budget_changes.put(actor, f"team:{wanted.team_id}", budget)
    return wanted


def change_team(actor: str, reach: Reach, team_id: str, change: Any) -> Tx[Team]:
    before = yield from team(reach, team_id, _LOCK_TEAM)
    after: Team = change(before)
    if after == before:
        return before
    revision, _ = yield from _team_said(actor, "team.change", after)
    yield Fetch(_CHANGE_TEAM, (team_id, *_team_values(after), revision))
    return after


def drop_team(actor: str, reach: Reach, team_id: str, expect: Any) -> Tx[Team]:
    found = yield from team(reach, team_id, _LOCK_TEAM)
    expect(found)
    if team_id == DEFAULT_TEAM:
        raise InUse("the default team stays")
    for sql, args, what in (
        (_KEYS_OF, (team_id,), "keys, which the ledger names; revoke them instead"),
        (_BUDGETS_OF, (f"team:{team_id}",), "budgets: delete them first"),
    ):
        count = (yield Fetch(sql, args))[0][0]
        if count:
            raise InUse(f"team {team_id} has {count} {what}")
    yield from audit.record(actor, "team.delete", f"team:{team_id}", {})
    yield Fetch(_DROP_TEAM, (team_id,))
    return found


def _team_values(wanted: Team) -> tuple[Any, ...]:
    limit = wanted.limit
    return (
        json_text(sorted(wanted.models)),
        limit.requests_per_min,
        limit.tokens_per_min,
        limit.concurrent,
        wanted.task_budget_nano_usd,
    )


def _team_said(actor: str, action: str, wanted: Team) -> Tx[tuple[int, int]]:
    said = {
        "tenant_id": wanted.tenant_id,
        "models": sorted(wanted.models),
        "limit": wanted.limit,
        "task_budget": wanted.task_budget_nano_usd,
    }
    return (yield from audit.record(actor, action, f"team:{wanted.team_id}", said))


# --- keys -----------------------------------------------------------------------------------------------------


def keys(reach: Reach, filters: Mapping[str, Any], after: Any, limit: int) -> Tx[Page[KeyRecord]]:
    """`state` is active, revoked or expired; with `declared_by`, the keys of the tasks that this key declared."""
    wanted = {name: value for name, value in filters.items() if name != "state"}
    if filters.get("state"):
        wanted[f"state:{filters['state']}"] = True
    if not wanted.get("declared_by"):
        wanted["own"] = True
    page = yield from KEYS.page(reach, wanted, after, limit)
    return Page([record_of(row) for row in page.rows], page.after)


def key(reach: Reach, key_id: str) -> Tx[KeyRecord]:
    rows: list[Row] = list((yield Fetch(_KEY, (key_id,))))
    found = record_of(rows[0]) if rows else None
    if found is None or not reach.holds(found.tenant_id, found.team_id):
        raise NotFound(f"there is no key {key_id}")
    return found


def create_key(
    actor: str, reach: Reach, pepper: bytes, wanted: NewKey, secret_bytes: bytes | None
) -> Tx[tuple[KeyRecord, str]]:
    """The key and its text; with its budget, all or nothing."""
    rows = yield Fetch(_TEAM, (wanted.team_id,))
    if not rows or not reach.holds(rows[0][1], wanted.team_id):
        raise InvalidRequest(f"there is no team {wanted.team_id}", param="team")
    record = KeyRecord(
        key_id="",
        secret_hmac=b"",
        tenant_id="",
        team_id=wanted.team_id,
        name=wanted.name,
        models=wanted.models,
        expires_at_ms=wanted.expires_at_ms,
        limit=wanted.limit,
        labels=dict(wanted.labels or {}),
    )
    made, text = yield from add_key(
        actor, record, pepper, secret_bytes or os.urandom(secrets.SECRET_RANDOM_BYTES)
    )
    if wanted.budget is not None:
        yield from budget_changes.put(actor, f"key:{made.key_id}", wanted.budget)
    return made, text


def change_key(actor: str, reach: Reach, key_id: str, change: Any) -> Tx[KeyRecord]:
    yield Fetch(Sql("SELECT 1 FROM virtual_key WHERE key_id = $1 FOR UPDATE"), (key_id,))
    before = yield from key(reach, key_id)
    after: KeyRecord = change(before)
    if after == before:
        return before
    if before.declared_by is not None:
        raise InvalidRequest("the key of a task is as the key that declared it: change that one")
    said = {
        "name": after.name,
        "models": sorted(after.models),
        "limit": after.limit,
        "expires_at_ms": after.expires_at_ms,
        "labels": dict(after.labels),
    }
    revision, _ = yield from audit.record(actor, "key.change", f"key:{key_id}", said)
    limit = after.limit
    yield Fetch(
        _CHANGE_KEY,
        (
            key_id,
            json_text(sorted(after.models)),
            limit.requests_per_min,
            limit.tokens_per_min,
            limit.concurrent,
            after.expires_at_ms,
            revision,
        ),
    )
    yield Fetch(_NAME_KEY, (key_id, after.name, json_text(dict(after.labels))))
    return after


def revoke_key(actor: str, reach: Reach, key_id: str, expect: Any) -> Tx[KeyRecord]:
    """It and the keys of its tasks; twice is once."""
    found = yield from key(reach, key_id)
    expect(found)
    if found.revoked_at_ms is not None:
        return found
    revision, now_ms = yield from audit.record(actor, "key.revoke", f"key:{key_id}", {})
    yield Fetch(_REVOKE, (key_id, now_ms, revision))
    return replace(found, revoked_at_ms=now_ms)
