"""Tenants, teams, virtual keys and admin keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.admin.bodies import AdminKeyIn, KeyPatch, TeamPatch, TenantIn, TenantPatch, patched
from gateway.admin.call import Call, Json, Reply, etag_of
from gateway.admin.ports import TeamRow
from gateway.admin.problems import invalid
from gateway.admin.route import PAGED, Route, choice, text
from gateway.admin.schemas import KeyIn, KeysIn, TeamIn
from gateway.admin.shown import (
    AdminKeyCreated,
    AdminKeyOut,
    KeyCreated,
    KeyOut,
    TeamOut,
    TenantOut,
    shown,
)
from gateway.core import offices, secrets
from gateway.core.identity import KeyRecord
from gateway.core.offices import AdminKey, Once, Reach, Right, Role, Tenant

# --- tenants --------------------------------------------------------------------------------------------------


def _tenant(tenant: Tenant) -> Json:
    return shown(TenantOut.of(tenant))


async def list_tenants(call: Call) -> Reply:
    return await call.page(call.registry.tenants, _tenant)


async def create_tenant(call: Call) -> Reply:
    wanted = TenantIn.model_validate(call.body)
    name = wanted.name or wanted.tenant_id
    return await call.change(lambda it: it.add_tenant(wanted.tenant_id, name), _tenant, status=201)


async def get_tenant(call: Call) -> Reply:
    return _single(_tenant(await call.registry.tenant(call.path["tenant_id"])))


async def change_tenant(call: Call) -> Reply:
    patch = TenantPatch.model_validate(call.body)

    def change(before: Tenant) -> Tenant:
        call.expect(_tenant(before))
        return dataclasses.replace(before, name=patch.name)

    return await call.change(lambda it: it.change_tenant(call.path["tenant_id"], change), _tenant)


async def delete_tenant(call: Call) -> Reply:
    """Only one without teams and budgets; the ledger keeps its name."""

    def expect(found: Tenant) -> None:
        call.expect(_tenant(found))

    return await call.change(lambda it: it.drop_tenant(call.path["tenant_id"], expect), _tenant)


# --- teams ----------------------------------------------------------------------------------------------------


def _team(team: TeamRow) -> Json:
    return shown(TeamOut.of(team))


async def list_teams(call: Call) -> Reply:
    return await call.page(call.registry.teams, _team)


async def create_team(call: Call) -> Reply:
    wanted = TeamIn.model_validate(call.body)
    refuse_unknown_models(call, wanted.models)
    return await call.change(
        lambda it: it.add_team(
            budget=None if wanted.budget is None else wanted.budget.rule(),
            team_id=wanted.name,
            tenant_id=wanted.tenant,
            models=frozenset(wanted.models),
            limit=wanted.limits.rate_limit(),
            task_budget_nano_usd=wanted.task_budget_usd,
        ),
        _team,
        status=201,
    )


async def get_team(call: Call) -> Reply:
    return _single(_team(await call.registry.team(call.path["team_id"])))


async def change_team(call: Call) -> Reply:
    """Models, limits and the budget of each task; null takes a limit away."""
    patch = TeamPatch.model_validate(call.body)
    refuse_unknown_models(call, patch.models)

    def change(before: Any) -> Any:
        call.expect(_team(before))
        wanted: dict[str, Any] = {}
        if "models" in patch.model_fields_set:
            wanted["models"] = frozenset(patch.models)
        if "limits" in patch.model_fields_set:
            wanted["limit"] = patched(before.limit, patch.limits)
        if "task_budget_usd" in patch.model_fields_set:
            wanted["task_budget_nano_usd"] = patch.task_budget_usd
        return dataclasses.replace(before, **wanted)

    return await call.change(lambda it: it.change_team(call.path["team_id"], change), _team)


async def delete_team(call: Call) -> Reply:
    """Only one that never had a key, and has no budgets."""

    def expect(found: Any) -> None:
        call.expect(_team(found))

    return await call.change(lambda it: it.drop_team(call.path["team_id"], expect), _team)


# --- virtual keys ---------------------------------------------------------------------------------------------


def _key(key: KeyRecord) -> Json:
    return shown(KeyOut.of(key))


async def list_keys(call: Call) -> Reply:
    """Oldest first, revoked and expired ones too; those of tasks only with `declared_by`."""
    return await call.page(call.registry.keys, _key)


async def create_key(call: Call) -> Reply:
    """The only reply that holds the key's text. With an Idempotency-Key, a repetition gets the same."""
    wanted = KeyIn.model_validate(call.body)
    refuse_unknown_models(call, wanted.models)
    return await new_key(call, wanted)


async def new_key(call: Call, wanted: KeyIn) -> Reply:
    def again(body: Json, once: Once) -> Json:
        secret = secrets.secret_text(once.secret_bytes(call.deps.pepper))
        return {"key": secrets.key_text(body["key_id"], secret)}

    return await call.change(
        lambda it: it.create_key(**_wanted(wanted)),
        lambda made: _key(made[0]),
        status=201,
        secret=lambda made: {"key": made[1]},
        again=again,
    )


async def create_keys(call: Call) -> Reply:
    """Many at once, all or none; the error names the one that cannot be."""
    wanted = KeysIn.model_validate(call.body).keys
    for n, key in enumerate(wanted):
        refuse_unknown_models(call, key.models, f"keys.{n}.models")

    def again(body: Json, once: Once) -> Json:
        texts = [
            secrets.secret_text(once.secret_bytes(call.deps.pepper, n)) for n in range(len(body["data"]))
        ]
        rows = zip(body["data"], texts, strict=True)
        return {"data": [{**row, "key": secrets.key_text(row["key_id"], text)} for row, text in rows]}

    return await call.change(
        lambda it: it.create_keys([_wanted(key) for key in wanted]),
        lambda made: {"data": [_key(record) for record, _ in made]},
        status=201,
        secret=lambda made: {"data": [{**_key(record), "key": text} for record, text in made]},
        again=again,
    )


def _wanted(key: KeyIn) -> dict[str, Any]:
    return {
        "name": key.name,
        "team_id": key.team,
        "models": frozenset(key.models),
        "limit": key.limits.rate_limit(),
        "expires_at_ms": key.expires_at,
        "labels": key.labels,
        "budget": None if key.budget is None else key.budget.rule(),
    }


async def get_key(call: Call) -> Reply:
    return _single(_key(await call.registry.key(call.path["key_id"])))


async def change_key(call: Call) -> Reply:
    """What it may use and until when; the keys of its tasks follow. Null takes a limit or the end away."""
    patch = KeyPatch.model_validate(call.body)
    refuse_unknown_models(call, patch.models)

    def change(before: KeyRecord) -> KeyRecord:
        call.expect(_key(before))
        wanted: dict[str, Any] = {
            name: getattr(patch, name) for name in ("name", "labels") if name in patch.model_fields_set
        }
        if "models" in patch.model_fields_set:
            wanted["models"] = frozenset(patch.models)
        if "limits" in patch.model_fields_set:
            wanted["limit"] = patched(before.limit, patch.limits)
        if "expires_at" in patch.model_fields_set:
            wanted["expires_at_ms"] = patch.expires_at
        return dataclasses.replace(before, **wanted)

    return await call.change(lambda it: it.change_key(call.path["key_id"], change), _key)


async def revoke_key(call: Call) -> Reply:
    """It and the keys of its tasks open nothing any more; the ledger keeps naming it, so it stays listed."""

    def expect(found: KeyRecord) -> None:
        call.expect(_key(found))

    return await call.change(lambda it: it.revoke_key(call.path["key_id"], expect), _key)


def refuse_unknown_models(call: Call, models: Sequence[str], field: str = "models") -> None:
    """A mistyped name would make a key that can call nothing, or less than was meant."""
    catalog = call.deps.catalog()
    known = {*catalog.by_model, *(tier.value for tier in catalog.by_tier), "auto"}
    for index, model in enumerate(models):
        if model not in known:
            raise invalid(f"{field}.{index}", f"there is no model {model!r} in the catalog")


# --- admin keys -----------------------------------------------------------------------------------------------


def _admin_key(key: AdminKey) -> Json:
    return shown(AdminKeyOut.of(key))


async def list_admin_keys(call: Call) -> Reply:
    return await call.page(call.registry.admin_keys, _admin_key)


async def create_admin_key(call: Call) -> Reply:
    """The only reply that holds the key's text."""
    wanted = AdminKeyIn.model_validate(call.body)

    def again(body: Json, once: Once) -> Json:
        secret = secrets.secret_text(once.secret_bytes(call.deps.pepper))
        return {"key": offices.admin_key_text(body["admin_key_id"], secret)}

    return await call.change(
        lambda it: it.create_admin_key(
            name=wanted.name,
            role=wanted.role,
            reach=Reach(wanted.tenant_id or "", wanted.team_id or ""),
            expires_at_ms=wanted.expires_at,
        ),
        lambda made: _admin_key(made[0]),
        status=201,
        secret=lambda made: {"key": made[1]},
        again=again,
    )


async def get_admin_key(call: Call) -> Reply:
    return _single(_admin_key(await call.registry.admin_key(call.path["admin_key_id"])))


async def revoke_admin_key(call: Call) -> Reply:
    return await call.change(lambda it: it.revoke_admin_key(call.path["admin_key_id"]), _admin_key)


async def who_am_i(call: Call) -> Reply:
    """The role and reach of the key that asks."""
    admin = call.admin
    body: Mapping[str, Any] = {
        "actor": admin.actor,
        "role": admin.role.value,
        "tenant_id": admin.reach.tenant_id or None,
        "team_id": admin.reach.team_id or None,
    }
    return Reply(body)


def _single(body: Json) -> Reply:
    return Reply(body, etag=etag_of(body))


_KEY_FILTERS = (
    text("team_id"),
    text("tenant_id"),
    text("name"),
    choice("state", ("active", "revoked", "expired")),
    text("declared_by", "the keys of the tasks that this key declared"),
)
ROUTES = (
    Route("GET", "/me", who_am_i, Right.READ, "admin keys"),
    Route("GET", "/tenants", list_tenants, Right.READ, "tenants", TenantOut, params=PAGED, listed=True),
    Route("POST", "/tenants", create_tenant, Right.OPERATE, "tenants", TenantOut, TenantIn, status=201, once=True),
    Route("GET", "/tenants/{tenant_id}", get_tenant, Right.READ, "tenants", TenantOut, tagged=True),
    Route("PATCH", "/tenants/{tenant_id}", change_tenant, Right.CHANGE, "tenants", TenantOut, TenantPatch, once=True, tagged=True),
    Route("DELETE", "/tenants/{tenant_id}", delete_tenant, Right.OPERATE, "tenants", TenantOut, once=True, tagged=True),
    Route("GET", "/teams", list_teams, Right.READ, "teams", TeamOut, params=(text("tenant_id"), *PAGED), listed=True),
    Route("POST", "/teams", create_team, Right.CHANGE, "teams", TeamOut, TeamIn, status=201, once=True),
    Route("GET", "/teams/{team_id}", get_team, Right.READ, "teams", TeamOut, tagged=True),
    Route("PATCH", "/teams/{team_id}", change_team, Right.CHANGE, "teams", TeamOut, TeamPatch, once=True, tagged=True),
    Route("DELETE", "/teams/{team_id}", delete_team, Right.CHANGE, "teams", TeamOut, once=True, tagged=True),
    Route("GET", "/keys", list_keys, Right.READ, "keys", KeyOut, params=(*_KEY_FILTERS, *PAGED), listed=True),
    Route("POST", "/keys", create_key, Right.CHANGE_IN_TEAM, "keys", KeyCreated, KeyIn, status=201, once=True),
    Route("POST", "/keys/bulk", create_keys, Right.CHANGE_IN_TEAM, "keys", body=KeysIn, status=201, once=True),
    Route("GET", "/keys/{key_id}", get_key, Right.READ, "keys", KeyOut, tagged=True),
    Route("PATCH", "/keys/{key_id}", change_key, Right.CHANGE_IN_TEAM, "keys", KeyOut, KeyPatch, once=True, tagged=True),
    Route("DELETE", "/keys/{key_id}", revoke_key, Right.CHANGE_IN_TEAM, "keys", KeyOut, once=True, tagged=True),
    Route("POST", "/keys/{key_id}/revoke", revoke_key, Right.CHANGE_IN_TEAM, "keys", KeyOut, once=True, tagged=True),
    Route("GET", "/admin_keys", list_admin_keys, Right.OWN, "admin keys", AdminKeyOut, params=(choice("role", Role), *PAGED), listed=True),
    Route("POST", "/admin_keys", create_admin_key, Right.OWN, "admin keys", AdminKeyCreated, AdminKeyIn, status=201, once=True),
    Route("GET", "/admin_keys/{admin_key_id}", get_admin_key, Right.OWN, "admin keys", AdminKeyOut, tagged=True),
    Route("DELETE", "/admin_keys/{admin_key_id}", revoke_admin_key, Right.OWN, "admin keys", AdminKeyOut, once=True),
)  # fmt: skip
