"""The resources under /admin/v1: one function each, from a call to a reply. No HTTP here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gateway.admin.ports import Accounts, AdminDeps
from gateway.admin.problems import Fault, Problem, invalid, not_found
from gateway.admin.schemas import (
    BudgetIn,
    DeploymentOut,
    KeyCreated,
    KeyIn,
    KeyOut,
    Out,
    TaskOut,
    TaskStateIn,
    TeamIn,
    TeamOut,
    UsageOut,
    budget_out,
    entry_out,
    miss_out,
    task_out,
)

PAGE = 100
PAGE_MAX = 1_000
_END_OF_TIME_MS = 2**53


@dataclass(frozen=True, slots=True)
class Call:
    """One request by a proven actor. `body` is decoded JSON that nobody has looked at yet."""

    deps: AdminDeps
    actor: str
    path: Mapping[str, str]
    query: Mapping[str, str]
    body: object

    @property
    def accounts(self) -> Accounts:
        return self.deps.accounts(self.actor)


@dataclass(frozen=True, slots=True)
class Reply:
    body: Mapping[str, Any]
    status: int = 200


Resource = Callable[[Call], Awaitable[Reply]]


# --- teams, keys, budgets -------------------------------------------------------------------------------------


async def list_teams(call: Call) -> Reply:
    return _page([_shown(TeamOut.of(team)) for team in await call.accounts.list_teams()])


async def create_team(call: Call) -> Reply:
    wanted = TeamIn.model_validate(call.body)
    if any(team.team_id == wanted.name for team in await call.accounts.list_teams()):
        raise Problem(409, f"There already is a team {wanted.name}.", [Fault("name", "is taken")])
    team = call.deps.team(
        team_id=wanted.name,
        models=frozenset(wanted.models),
        limit=wanted.limits.rate_limit(),
        task_budget_nano_usd=wanted.task_budget_usd,
    )
    return Reply(_shown(TeamOut.of(await call.accounts.put_team(team))), 201)


async def list_keys(call: Call) -> Reply:
    return _page([_shown(KeyOut.of(key)) for key in await call.accounts.list_keys()])


async def create_key(call: Call) -> Reply:
    """The only reply that holds the key's text."""
    wanted = KeyIn.model_validate(call.body)
    _refuse_unknown_models(call, wanted.models)
    if all(team.team_id != wanted.team for team in await call.accounts.list_teams()):
        raise invalid("team", f"there is no team {wanted.team}")
    record, text = await call.accounts.create_key(
        pepper=call.deps.pepper,
        name=wanted.name,
        team_id=wanted.team,
        models=wanted.models,
        limit=wanted.limits.rate_limit(),
        expires_at_ms=wanted.expires_at,
    )
    if wanted.budget is not None:
        # If this fails, the key without a budget stays behind, but nobody was ever told its text.
        await call.accounts.set_budget(
            f"key:{record.key_id}",
            wanted.budget.limit,
            wanted.budget.window,
            wanted.budget.on_exceed,
            "UTC",
            **wanted.budget.more(),
        )
    return Reply({**_shown(KeyOut.of(record)), **_shown(KeyCreated(key=text))}, 201)


async def revoke_key(call: Call) -> Reply:
    return Reply(_shown(KeyOut.of(await call.accounts.revoke_key(call.path["key_id"]))))


async def list_budgets(call: Call) -> Reply:
    scope = call.query.get("scope", "")
    budgets = [b for b in await call.accounts.list_budgets() if scope in ("", b.scope)]
    return _page([budget_out(budget) for budget in budgets])


async def set_budget(call: Call) -> Reply:
    """Give a scope a budget, or change its limit; what was spent stays spent."""
    wanted = BudgetIn.model_validate(call.body)
    budget = await call.accounts.set_budget(
        wanted.scope, wanted.limit, wanted.window, wanted.on_exceed, wanted.zone, **wanted.more()
    )
    return Reply(budget_out(budget))


# --- what happened --------------------------------------------------------------------------------------------


async def list_tasks(call: Call) -> Reply:
    """The latest first; `next_before` is the `before` of the next page."""
    limit = _whole(call, "limit", PAGE, PAGE_MAX)
    tasks = await call.accounts.list_tasks(
        key_id=call.query.get("key_id", ""),
        team_id=call.query.get("team_id", ""),
        before_ms=_whole(call, "before", None, 2**62),
        limit=limit or PAGE,
    )
    page = _page([_shown(TaskOut.of(task)) for task in tasks]).body
    return Reply({**page, "next_before": tasks[-1].last_at_ms if len(tasks) == limit else None})


async def get_task(call: Call) -> Reply:
    """By its id, or by the id that its client gave it; with what breakers saw and did."""
    view = await call.deps.tasks(call.actor).task_view(call.path["task_id"])
    return Reply(task_out(view))


async def pause_task(call: Call) -> Reply:
    """It and all below it admit nothing until they are resumed."""
    return await _change_task(call, pause=True)


async def resume_task(call: Call) -> Reply:
    """It goes on, whatever stopped it, except for a cap or a budget that is still used up; and what breakers saw of it so
    far counts no more, on any replica."""
    return await _change_task(call, pause=False)


async def _change_task(call: Call, *, pause: bool) -> Reply:
    wanted = TaskStateIn.model_validate({} if call.body is None else call.body)
    desk = call.deps.tasks(call.actor)
    task_id = (await desk.task_view(call.path["task_id"])).task.task_id
    change = desk.pause if pause else desk.resume
    changed = await change(task_id, wanted.reason)
    call.deps.on_change()
    return Reply({**task_out(await desk.task_view(task_id)), "changed": list(changed)})


async def usage(call: Call) -> Reply:
    """Sums over [since, until) by the keys in `by`, grouped as `tollhouse usage` does."""
    by = tuple(part.strip() for part in call.query.get("by", "model").split(",") if part.strip())
    rows = await call.deps.usage(
        by=by,
        from_ms=_moment(call, "since") or 0,
        to_ms=_moment(call, "until") or _END_OF_TIME_MS,
        team_id=call.query.get("team_id", ""),
        key_id=call.query.get("key_id", ""),
    )
    return _page([_shown(UsageOut.of(by, row)) for row in rows])


async def get_request(call: Call) -> Reply:
    """Every ledger entry of one request."""
    request_id = call.path["request_id"]
    rows = await call.deps.entries(request_id=request_id)
    if not rows:
        raise not_found(f"request in the ledger: {request_id}")
    return Reply({"request_id": request_id, "entries": [entry_out(row) for row in rows]})


async def get_prefix(call: Call) -> Reply:
    """Whether a request was read from its provider's cache, attempt by attempt, and why not."""
    return Reply(await call.deps.prefix(call.path["request_id"]))


async def misses(call: Call) -> Reply:
    """What was lost over [since, until) by prompts that were not read from a cache, by the keys in `by` and the cause."""
    by = tuple(part.strip() for part in call.query.get("by", "team").split(",") if part.strip())
    rows = await call.deps.misses(
        by=by,
        from_ms=_moment(call, "since") or 0,
        to_ms=_moment(call, "until") or _END_OF_TIME_MS,
        team_id=call.query.get("team_id", ""),
        key_id=call.query.get("key_id", ""),
        task_id=call.query.get("task_id", ""),
    )
    return _page([miss_out(by, row) for row in rows])


async def get_catalog(call: Call) -> Reply:
    health = call.deps.health()
    catalog = call.deps.catalog()
    rows = [_shown(DeploymentOut.of(d, health.get(d.name, "closed"))) for d in catalog.deployments]
    return Reply({**_page(rows).body, "default_tier": catalog.default_tier.value})


#: Method, path below /admin/v1, resource.
ROUTES: tuple[tuple[str, str, Resource], ...] = (
    ("GET", "/teams", list_teams),
    ("POST", "/teams", create_team),
    ("GET", "/keys", list_keys),
    ("POST", "/keys", create_key),
    ("POST", "/keys/{key_id}/revoke", revoke_key),
    ("GET", "/budgets", list_budgets),
    ("PUT", "/budgets", set_budget),
    ("GET", "/usage", usage),
    ("GET", "/tasks", list_tasks),
    ("GET", "/tasks/{task_id}", get_task),
    ("POST", "/tasks/{task_id}/pause", pause_task),
    ("POST", "/tasks/{task_id}/resume", resume_task),
    ("GET", "/requests/{request_id}", get_request),
    ("GET", "/requests/{request_id}/prefix", get_prefix),
    ("GET", "/misses", misses),
    ("GET", "/catalog", get_catalog),
)


def _page(rows: Sequence[Mapping[str, Any]]) -> Reply:
    return Reply({"data": rows})


def _shown(out: Out) -> dict[str, Any]:
    return out.model_dump(mode="json")


def _refuse_unknown_models(call: Call, models: Sequence[str]) -> None:
    """A mistyped name would make a key that can call nothing, or less than was meant."""
    catalog = call.deps.catalog()
    known = {*catalog.by_model, *(tier.value for tier in catalog.by_tier), "auto"}
    for index, model in enumerate(models):
        if model not in known:
            raise invalid(f"models.{index}", f"there is no model {model!r} in the catalog")


def _whole(call: Call, name: str, default: int | None, most: int) -> int | None:
    text = call.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:20]) <= most:
        raise invalid(name, f"must be a whole number from 1 to {most}")
    return int(text)


def _moment(call: Call, name: str) -> int | None:
    """A UTC day ("2026-11-30") or an instant ("2026-11-30T12:00:00Z"), as milliseconds."""
    text = call.query.get(name)
    if not text:
        return None
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise invalid(name, 'must be a day ("2026-11-30") or an instant ("2026-11-30T12:00:00Z")') from None
    return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)
