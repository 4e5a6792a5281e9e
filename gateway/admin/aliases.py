"""The addresses and names under which users of LiteLLM's proxy make keys and teams, for scripts that exist already.

Only what means the same here; a field that has no counterpart is refused by name, so that nobody relies on a limit that
is not there. Where to go instead is said, for fields and for whole addresses.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, TypeVar

from pydantic import Field

from gateway.admin.accounts import new_key, refuse_unknown_models
from gateway.admin.call import PAGE_MAX, Call, Json, Reply
from gateway.admin.problems import invalid
from gateway.admin.route import PAGED, Route, text
from gateway.admin.schemas import BudgetAmount, Id, In, KeyIn, Labels, Limits, Name, PerMin
from gateway.admin.shown import instant
from gateway.core import secrets
from gateway.core.budget import Budget
from gateway.core.entry import Unit
from gateway.core.errors import GatewayError
from gateway.core.identity import KeyRecord
from gateway.core.litellm_words import decimal_text, seconds_of, window_of
from gateway.core.money import NANO_PER_USD
from gateway.core.offices import Right

Dollars = Annotated[float, Field(ge=0, le=1_000_000_000)] | Annotated[int, Field(ge=0, le=1_000_000_000)]


class _Common(In):
    models: list[Name] = Field(default_factory=list)
    max_budget: Dollars | None = None
    budget_duration: Name | None = None
    rpm_limit: PerMin | None = None
    tpm_limit: PerMin | None = None
    max_parallel_requests: PerMin | None = None

    def limits(self) -> Limits:
        return Limits(
            requests_per_min=self.rpm_limit,
            tokens_per_min=self.tpm_limit,
            concurrent=self.max_parallel_requests,
        )

    def budget(self) -> BudgetAmount | None:
        if self.max_budget is None:
            if self.budget_duration is not None:
                raise invalid("budget_duration", "means nothing without max_budget")
            return None
        try:
            window = window_of(self.budget_duration)
        except ValueError as error:
            raise invalid("budget_duration", str(error)) from None
        return BudgetAmount.model_validate({"limit_usd": decimal_text(self.max_budget), "window": window})


class KeyGenerate(_Common):
    """`/key/generate`: `duration` is how long it lasts, `metadata` becomes labels."""

    key_alias: Name | None = None
    team_id: Id | None = None
    duration: Name | None = None
    metadata: Labels = Field(default_factory=dict)


class KeyUpdate(In):
    """`/key/update`. Budgets are changed under /admin/v1/budgets, where a raise says why."""

    key: Name
    key_alias: Name | None = None
    models: list[Name] | None = None
    duration: Name | None = None
    rpm_limit: PerMin | None = None
    tpm_limit: PerMin | None = None
    max_parallel_requests: PerMin | None = None
    metadata: Labels | None = None


class KeyDelete(In):
    keys: Annotated[list[Name], Field(min_length=1, max_length=100)]


class TeamNew(_Common):
    team_alias: Id | None = None
    team_id: Id | None = None
    organization_id: Id | None = None


_NO_USERS = "there are no users here: whoever has a budget or a limit has a key, or a team"
_RAISES = "budgets are changed at PATCH /admin/v1/budgets/{budget_id}, where a raise says why; /admin/v1/budgets?scope= finds it"
_OTHER_BUDGETS = "give the scope this budget at PUT /admin/v1/budgets"
#: Fields of theirs that are not here -> where to go instead.
_FIELDS = {
    "user_id": _NO_USERS,
    "user_email": _NO_USERS,
    "max_budget": _RAISES,
    "budget_duration": _RAISES,
    "budget_id": _OTHER_BUDGETS,
    "budget_limits": _OTHER_BUDGETS,
    "soft_budget": "a budget alerts at percentages: `alerts` at PUT /admin/v1/budgets, to the webhooks of /admin/v1/webhooks",
    "model_max_budget": "a budget is of a tenant, team, key or task, for all models together: make a key for the dear one",
    "metadata": "teams have no labels; keys have: `metadata` at /key/generate",
    "tags": "say them as labels: `metadata` at /key/generate, or the header x-labels of a request",
    "team_member_budget": _NO_USERS,
    "key": "the text of a key is made here; `key_alias` is its name",
    "blocked": "revoke the key at /key/delete, or pause a task at POST /admin/v1/tasks/{task_id}/pause",
}
#: Addresses of theirs that are not here -> where to go instead.
_ADDRESSES = {
    "/user/": f"{_NO_USERS}: /key/info, /team/info",
    "/customer/": f"{_NO_USERS}: /key/info, /team/info",
    "/spend/": "/admin/v1/costs, /admin/v1/usage and /admin/v1/ledger tell what was spent",
    "/global/spend": "/admin/v1/costs, /admin/v1/usage and /admin/v1/ledger tell what was spent",
    "/model": "/admin/v1/deployments has the models; GET /v1/models of the other listener is for clients",
    "/budget/": "/admin/v1/budgets",
    "/organization/": "an organization is a tenant: /admin/v1/tenants",
    "/team/": "/admin/v1/teams; of /team/ there are new and info",
    "/key/": "/admin/v1/keys; of /key/ there are generate, info, update, delete and list",
    "/health/": "/livez and /readyz; /admin/v1/health has the deployments",
    "/config/": "/admin/v1/configuration",
}


def elsewhere(path: str) -> str | None:
    """What to ask for instead of an address of LiteLLM's that is not here."""
    return next((instead for begins, instead in _ADDRESSES.items() if path.startswith(begins)), None)


T = TypeVar("T", bound=In)


def _read(model: type[T], body: object) -> T:
    for name in body if isinstance(body, dict) else ():
        if name in _FIELDS and name not in model.model_fields:
            raise invalid(name, _FIELDS[name])
    return model.model_validate(body)


async def generate_key(call: Call) -> Reply:
    """As POST /admin/v1/keys."""
    wanted = _read(KeyGenerate, call.body)
    refuse_unknown_models(call, wanted.models)
    ours = KeyIn(
        name=wanted.key_alias or "unnamed",
        team=wanted.team_id or "default",
        models=wanted.models,
        limits=wanted.limits(),
        labels=wanted.metadata,
        budget=wanted.budget(),
    )
    if wanted.duration is not None:
        ours = ours.model_copy(update={"expires_at": call.deps.now_ms() + _seconds(wanted.duration) * 1000})
    try:
        reply = await new_key(call, ours)
    except GatewayError as error:
        if error.param == "team":
            raise invalid("team_id", error.message) from error
        raise
    assert not isinstance(reply.body, bytes)
    made = reply.body
    return Reply(
        {
            "key": made["key"],
            "token": made["key_id"],
            "token_id": made["key_id"],
            "key_alias": made["name"],
            "team_id": made["team_id"],
            "models": made["models"],
            "expires": made["expires_at"],
            "max_budget": wanted.max_budget,
            "budget_duration": wanted.budget_duration,
            "rpm_limit": wanted.rpm_limit,
            "tpm_limit": wanted.tpm_limit,
            "max_parallel_requests": wanted.max_parallel_requests,
            "metadata": made["labels"],
        },
        headers=reply.headers,
    )


async def key_info(call: Call) -> Reply:
    """By the key's text or its id; `spend` and `max_budget` are those of its own budget in dollars."""
    if "key" not in call.params:
        raise invalid("key", "is required")
    key = await call.registry.key(_key_id(call.params["key"]))
    return Reply({"key": key.key_id, "info": _info(key, await _budget(call, f"key:{key.key_id}"))})


async def update_key(call: Call) -> Reply:
    """As PATCH /admin/v1/keys/{key_id}."""
    wanted = _read(KeyUpdate, call.body)
    refuse_unknown_models(call, wanted.models or [])
    given = wanted.model_fields_set
    key_id = _key_id(wanted.key)

    def change(before: KeyRecord) -> KeyRecord:
        changes: dict[str, Any] = {}
        if wanted.key_alias is not None:
            changes["name"] = wanted.key_alias
        if wanted.models is not None:
            changes["models"] = frozenset(wanted.models)
        if wanted.metadata is not None:
            changes["labels"] = wanted.metadata
        if wanted.duration is not None:
            changes["expires_at_ms"] = call.deps.now_ms() + _seconds(wanted.duration) * 1000
        limits = {
            ours: getattr(wanted, theirs)
            for theirs, ours in (
                ("rpm_limit", "requests_per_min"),
                ("tpm_limit", "tokens_per_min"),
                ("max_parallel_requests", "concurrent"),
            )
            if theirs in given
        }
        changes["limit"] = replace(before.limit, **limits)
        return replace(before, **changes)

    budget = await _budget(call, f"key:{key_id}")
    return await call.change(lambda it: it.change_key(key_id, change), lambda key: _info(key, budget))


async def delete_keys(call: Call) -> Reply:
    """They are revoked; the ledger keeps naming them. One that is unknown, and none is."""
    wanted = [_key_id(key) for key in KeyDelete.model_validate(call.body).keys]
    for key_id in wanted:
        await call.registry.key(key_id)
    for key_id in wanted:
        await call.change(lambda it, key_id=key_id: it.revoke_key(key_id, lambda _: None), lambda _: {})  # type: ignore[misc]
    return Reply({"deleted_keys": wanted})


async def new_team(call: Call) -> Reply:
    """As POST /admin/v1/teams; `organization_id` is the tenant."""
    wanted = _read(TeamNew, call.body)
    refuse_unknown_models(call, wanted.models)
    name = wanted.team_id or wanted.team_alias
    if name is None:
        raise invalid("team_id", "give team_id or team_alias")
    if wanted.team_id and wanted.team_alias and wanted.team_id != wanted.team_alias:
        raise invalid("team_alias", "is the same as team_id here: a team has one name")
    amount = wanted.budget()
    reply = await call.change(
        lambda it: it.add_team(
            budget=None if amount is None else amount.rule(),
            team_id=name,
            tenant_id=wanted.organization_id or "default",
            models=frozenset(wanted.models),
            limit=wanted.limits().rate_limit(),
        ),
        lambda team: {
            "team_id": team.team_id,
            "team_alias": team.team_id,
            "organization_id": team.tenant_id,
            "models": sorted(team.models),
            "max_budget": wanted.max_budget,
            "budget_duration": wanted.budget_duration,
            "rpm_limit": team.limit.requests_per_min,
            "tpm_limit": team.limit.tokens_per_min,
        },
    )
    return Reply(reply.body, headers=reply.headers)


async def team_info(call: Call) -> Reply:
    if "team_id" not in call.params:
        raise invalid("team_id", "is required")
    team = await call.registry.team(call.params["team_id"])
    budget = await _budget(call, f"team:{team.team_id}")
    keys = await call.registry.keys({"team_id": team.team_id}, None, PAGE_MAX)
    body = {
        "team_id": team.team_id,
        "team_info": {
            "team_id": team.team_id,
            "team_alias": team.team_id,
            "organization_id": team.tenant_id,
            "models": sorted(team.models),
            "rpm_limit": team.limit.requests_per_min,
            "tpm_limit": team.limit.tokens_per_min,
            **_spend(budget),
        },
        "keys": [{"token": key.key_id, "key_alias": key.name} for key in keys.rows],
    }
    return Reply(body)


async def list_key_ids(call: Call) -> Reply:
    """Ids of keys, a page at a time."""
    reply = await call.page(call.registry.keys, lambda key: {"token": key.key_id, "key_alias": key.name})
    assert not isinstance(reply.body, bytes)
    return Reply({**reply.body, "keys": [row["token"] for row in reply.body["data"]]})


def _info(key: KeyRecord, budget: Budget | None) -> Json:
    return {
        "token": key.key_id,
        "key_alias": key.name,
        "team_id": key.team_id,
        "models": sorted(key.models),
        "expires": instant(key.expires_at_ms),
        "blocked": key.revoked_at_ms is not None,
        "rpm_limit": key.limit.requests_per_min,
        "tpm_limit": key.limit.tokens_per_min,
        "max_parallel_requests": key.limit.concurrent,
        "metadata": dict(key.labels),
        **_spend(budget),
    }


def _spend(budget: Budget | None) -> Json:
    """As floats, which is what such scripts compute with; exact amounts are under /admin/v1."""
    if budget is None:
        return {"spend": None, "max_budget": None, "budget_reset_at": None}
    return {
        "spend": budget.spent / NANO_PER_USD,
        "max_budget": budget.limit / NANO_PER_USD,
        "budget_reset_at": instant(budget.window_end_ms),
    }


async def _budget(call: Call, scope: str) -> Budget | None:
    page = await call.registry.budgets({"scope": scope, "unit": Unit.USD.value}, None, 1)
    return page.rows[0] if page.rows else None


def _key_id(key: str) -> str:
    parts = secrets.parse_key(key)
    return parts[0] if parts else key


def _seconds(duration: str) -> int:
    try:
        return seconds_of(duration)
    except ValueError as error:
        raise invalid("duration", str(error)) from None


_ROOT = ""
_TAG = "names of LiteLLM"
ROUTES = (
    Route("POST", "/key/generate", generate_key, Right.CHANGE_IN_TEAM, _TAG, body=KeyGenerate, once=True, under=_ROOT),
    Route("GET", "/key/info", key_info, Right.READ, _TAG, params=(text("key", "its text or its id"),), under=_ROOT),
    Route("POST", "/key/update", update_key, Right.CHANGE_IN_TEAM, _TAG, body=KeyUpdate, once=True, under=_ROOT),
    Route("POST", "/key/delete", delete_keys, Right.CHANGE_IN_TEAM, _TAG, body=KeyDelete, under=_ROOT),
    Route("GET", "/key/list", list_key_ids, Right.READ, _TAG, params=(text("team_id"), *PAGED), under=_ROOT),
    Route("POST", "/team/new", new_team, Right.CHANGE, _TAG, body=TeamNew, once=True, under=_ROOT),
    Route("GET", "/team/info", team_info, Right.READ, _TAG, params=(text("team_id"),), under=_ROOT),
)  # fmt: skip
