"""Keys, teams, budgets and tasks, as operators see and change them.

Every change counts up the revision in its own transaction, which is how running replicas learn of it, and leaves
a row in the audit trail. What is set to what it already is changes nothing. All raise `Unavailable` when the store
is down.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from gateway.core import secrets
from gateway.core.budget import ALERT_PERCENTS, Budget, BudgetMode, OnExceed, at
from gateway.core.entry import Unit
from gateway.core.errors import InvalidRequest, NotFound
from gateway.core.identity import KeyRecord, RateLimit
from gateway.storage import audit, budget_changes, budget_rows
from gateway.storage.budget_changes import BudgetRule
from gateway.storage.database import Database
from gateway.storage.keys import SELECT_KEYS, record_of
from gateway.storage.tables import TOKEN_COLUMNS
from gateway.storage.transact import Fetch, Row, Sql, Tx, json_text

DEFAULT_TENANT = "default"
DEFAULT_TEAM = "default"

_NOW = Sql("SELECT now_ms()")
_TENANT = Sql("SELECT 1 FROM tenant WHERE tenant_id = $1")
_ADD_TENANT = Sql("INSERT INTO tenant (tenant_id, name, created_at_ms) VALUES ($1, $1, $2)")
SELECT_TEAMS = (
    "SELECT team_id, tenant_id, models, requests_per_min, tokens_per_min, concurrent, "
    "default_task_budget_nano_usd FROM team"
)
_TEAMS = Sql(f"{SELECT_TEAMS} ORDER BY team_id")
_TEAM = Sql(f"{SELECT_TEAMS} WHERE team_id = $1")
_PUT_TEAM = Sql(
    "INSERT INTO team (team_id, tenant_id, name, models, requests_per_min, tokens_per_min, concurrent, "
    "default_task_budget_nano_usd, revision, created_at_ms) VALUES ($1, $2, $1, $3, $4, $5, $6, $7, $8, $9) "
    "ON CONFLICT (team_id) DO UPDATE SET models = excluded.models, requests_per_min = excluded.requests_per_min, "
    "tokens_per_min = excluded.tokens_per_min, concurrent = excluded.concurrent, "
    "default_task_budget_nano_usd = excluded.default_task_budget_nano_usd, revision = excluded.revision"
)
_ADD_KEY = Sql(
    "INSERT INTO virtual_key (key_id, secret_hmac, tenant_id, team_id, name, models, requests_per_min, "
    "tokens_per_min, concurrent, expires_at_ms, task_id, declared_by, labels, revision, created_at_ms) "
    "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15)"
)
_KEYS = Sql(f"{SELECT_KEYS} ORDER BY k.created_at_ms, k.key_id")
_KEY = Sql(f"{SELECT_KEYS} WHERE k.key_id = $1")
_REVOKE = Sql(
    "UPDATE virtual_key SET revoked_at_ms = $2, revision = $3 "
    "WHERE (key_id = $1 OR declared_by = $1) AND revoked_at_ms IS NULL"
)
_BUDGETS = Sql(f"SELECT {budget_rows.COLUMNS} FROM budget ORDER BY scope, budget_id")  # noqa: S608
_TASK_COLUMNS = (
    "task_id",
    "key_id",
    "team_id",
    "tenant_id",
    "external_id",
    "source",
    "parent_task_id",
    "state",
    "created_at_ms",
    "last_at_ms",
    "steps",
    "attempts",
    "cost_nano_usd",
    "list_cost_nano_usd",
    "name",
    "depth",
    "state_reason",
)
SELECT_TASKS = f"SELECT {', '.join((*_TASK_COLUMNS, *TOKEN_COLUMNS))} FROM task"  # noqa: S608
_TASKS = Sql(
    f"{SELECT_TASKS} WHERE ($1 = '' OR key_id = $1) AND ($2 = '' OR team_id = $2) AND last_at_ms < $3 "
    "ORDER BY last_at_ms DESC, task_id LIMIT $4"
)
#: The task of that id, else one of each key that has tasks of that name: its latest.
_TASK = Sql(
    f"{SELECT_TASKS} t WHERE task_id = $1 OR (external_id = $1 AND NOT EXISTS "  # noqa: S608
    "(SELECT 1 FROM task WHERE task_id = $1) AND NOT EXISTS (SELECT 1 FROM task later WHERE "
    "later.external_id = $1 AND later.key_id = t.key_id AND (later.last_at_ms, later.task_id) > "
    "(t.last_at_ms, t.task_id))) ORDER BY last_at_ms DESC LIMIT 10"
)


@dataclass(frozen=True, slots=True)
class Team:
    """Owns keys and budgets. Empty `models` = all; `task_budget_nano_usd` = lifetime budget of each of its tasks."""

    team_id: str
    tenant_id: str = DEFAULT_TENANT
    models: frozenset[str] = frozenset()
    limit: RateLimit = field(default_factory=RateLimit)
    task_budget_nano_usd: int | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """One agent run and its totals. `tokens` has the keys of `tables.TOKEN_COLUMNS`."""

    task_id: str
    key_id: str
    team_id: str
    tenant_id: str
    external_id: str
    source: str
    parent_task_id: str | None
    state: str
    created_at_ms: int
    last_at_ms: int
    steps: int
    attempts: int
    cost_nano_usd: int
    list_cost_nano_usd: int
    name: str
    depth: int  # declared tasks above it
    state_reason: str
    tokens: Mapping[str, int]


class Accounts:
    """`actor` is who changes things, for the audit trail."""

    def __init__(self, database: Database, *, actor: str) -> None:
        self._database = database
        self._actor = actor

    async def ensure_defaults(self) -> None:
        """Make the tenant and the team "default" unless they exist."""
        if not any(team.team_id == DEFAULT_TEAM for team in await self.list_teams()):
            await self.put_team(Team(DEFAULT_TEAM))

    async def put_team(self, team: Team) -> Team:
        """Make a team, and its tenant, or change its models, limits and task budget; never its tenant."""
        return await self._database.write(partial(self._put_team, team))

    async def list_teams(self) -> list[Team]:
        return [team_of(row) for row in await self._rows(_TEAMS)]

    async def create_key(
        self,
        *,
        pepper: bytes,
        name: str,
        team_id: str = DEFAULT_TEAM,
        models: Iterable[str] = (),
        limit: RateLimit | None = None,
        expires_at_ms: int | None = None,
        task_id: str | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> tuple[KeyRecord, str]:
        """The new key and its text, which is shown once and cannot be had again. `NotFound` without the team."""
        record = KeyRecord(
            key_id="",
            secret_hmac=b"",
            tenant_id="",
            team_id=team_id,
            name=name,
            models=frozenset(models),
            expires_at_ms=expires_at_ms,
            limit=limit or RateLimit(),
            task_id=task_id,
            labels=dict(labels or {}),
        )
        return await self._database.write(partial(self._create_key, record, pepper))

    async def list_keys(self) -> list[KeyRecord]:
        """All keys, oldest first; revoked and expired ones too."""
        return [record_of(row) for row in await self._rows(_KEYS)]

    async def revoke_key(self, key_id: str) -> KeyRecord:
        """The key as it is now; revoking twice keeps the first time. Raises `NotFound`."""
        return await self._database.write(partial(self._revoke_key, key_id))

    async def set_budget(
        self,
        scope: str,
        limit: int,
        window: str = "lifetime",
        on_exceed: OnExceed = OnExceed.ERROR,
        zone: str = "UTC",
        *,
        unit: Unit = Unit.USD,
        mode: BudgetMode = BudgetMode.ENFORCE,
        alert_percents: tuple[int, ...] = ALERT_PERCENTS,
        landing_percent: int | None = None,
        reason: str | None = None,
    ) -> Budget:
        """Give a scope a budget, or change it; what was spent in the window stays spent. See `BudgetRule`. A reason says that
        somebody decides this now, and an empty one is refused for a raise.

        A scope may have one budget per unit and window. A new one counts from now on. A raised one lets a task go on
        that waited for it. Raises `InvalidRequest`, `NotFound`.
        """
        rule = rule_of(limit, unit, window, zone, on_exceed, mode, alert_percents, landing_percent)
        because = reason is not None
        return await self._database.write(
            partial(budget_changes.put, self._actor, scope, rule, reason or "", because=because)
        )

    async def adjust_budget(
        self,
        scope: str,
        limit: int,
        reason: str,
        *,
        unit: Unit = Unit.USD,
        window: str = "lifetime",
        zone: str = "UTC",
        until_ms: int | None = None,
    ) -> Budget:
        """Raise or lower a limit, for good or until a time, and say why. Below what is spent, nothing is admitted.

        Raises `InvalidRequest`, `NotFound`.
        """
        rule_of(limit, unit, window, zone)
        if not reason.strip():
            raise InvalidRequest("say why the limit changes", param="reason")
        return await self._database.write(
            partial(
                budget_changes.adjust,
                self._actor,
                scope,
                limit,
                reason,
                unit=unit,
                window=window,
                zone=zone,
                until_ms=until_ms,
            )
        )

    async def remove_budget(
        self, scope: str, window: str = "lifetime", zone: str = "UTC", unit: Unit = Unit.USD
    ) -> None:
        """Raises `NotFound`; `InvalidRequest` if tasks below it depend on it."""
        await self._database.write(partial(budget_changes.remove, self._actor, scope, unit, window, zone))

    async def list_budgets(self) -> list[Budget]:
        """All budgets as they stand now, by scope."""
        return await self._database.read(_list_budgets)

    async def list_tasks(
        self, *, key_id: str = "", team_id: str = "", before_ms: int | None = None, limit: int = 100
    ) -> list[Task]:
        """The latest first; the next page is `before_ms` = the last one's `last_at_ms`."""
        found = await self._rows(_TASKS, key_id, team_id, 2**62 if before_ms is None else before_ms, limit)
        return [task_of(row) for row in found]

    async def get_task(self, task_id: str) -> Task:
        """By its id, or by the id that its client gave it (the latest of that key). Raises `NotFound`;
        `InvalidRequest` for a name that clients of several keys use.
        """
        found = [task_of(row) for row in await self._rows(_TASK, task_id)]
        if not found:
            raise NotFound(f"there is no task {task_id}")
        if len(found) > 1:
            shown = ", ".join(f"{t.task_id} of key {t.key_id}" for t in found)
            raise InvalidRequest(f"several keys have a task {task_id}: say which by its id: {shown}")
        return found[0]

    # --- transactions --------------------------------------------------------------------------------

    async def _rows(self, sql: Sql, *args: Any) -> list[Row]:
        def tx() -> Tx[list[Row]]:
            return list((yield Fetch(sql, args)))

        return await self._database.read(tx)

    def _put_team(self, team: Team) -> Tx[Team]:
        found = yield Fetch(_TEAM, (team.team_id,))
        if found:
            team = replace(team, tenant_id=found[0][1])
            if team_of(found[0]) == team:
                return team
        revision, now_ms = yield from audit.record(
            self._actor,
            "team.put",
            f"team:{team.team_id}",
            {"models": sorted(team.models), "limit": team.limit, "task_budget": team.task_budget_nano_usd},
        )
        if not (yield Fetch(_TENANT, (team.tenant_id,))):
            yield Fetch(_ADD_TENANT, (team.tenant_id, now_ms))
        yield Fetch(
            _PUT_TEAM,
            (
                team.team_id,
                team.tenant_id,
                json_text(sorted(team.models)),
                team.limit.requests_per_min,
                team.limit.tokens_per_min,
                team.limit.concurrent,
                team.task_budget_nano_usd,
                revision,
                now_ms,
            ),
        )
        return team

    def _create_key(self, record: KeyRecord, pepper: bytes) -> Tx[tuple[KeyRecord, str]]:
        return (yield from add_key(self._actor, record, pepper))

    def _revoke_key(self, key_id: str) -> Tx[KeyRecord]:
        found = yield Fetch(_KEY, (key_id,))
        if not found:
            raise NotFound(f"there is no key {key_id}")
        record = record_of(found[0])
        if record.revoked_at_ms is not None:
            return record
        revision, now_ms = yield from audit.record(self._actor, "key.revoke", f"key:{key_id}", {})
        yield Fetch(_REVOKE, (key_id, now_ms, revision))
        return replace(record, revoked_at_ms=now_ms)


def rule_of(
    limit: int,
    unit: Unit,
    window: str,
    zone: str,
    on_exceed: OnExceed = OnExceed.ERROR,
    mode: BudgetMode = BudgetMode.ENFORCE,
    alert_percents: tuple[int, ...] = ALERT_PERCENTS,
    landing_percent: int | None = None,
) -> BudgetRule:
    """Raises `InvalidRequest` for what cannot be."""
    try:
        return BudgetRule(limit, unit, window, zone, on_exceed, mode, alert_percents, landing_percent)
    except ValueError as e:
        message = str(e)
        params = {"a limit": "limit", "alerts": "alerts", "a landing": "landing_percent"}
        param = next((name for start, name in params.items() if message.startswith(start)), "window")
        raise InvalidRequest(message, param=param) from None


def add_key(
    actor: str, record: KeyRecord, pepper: bytes, secret_bytes: bytes | None = None
) -> Tx[tuple[KeyRecord, str]]:
    """Store a new key, in the tenant of its team; its id is made here, and its secret, unless one is given. `NotFound`
    without the team.
    """
    teams = yield Fetch(_TEAM, (record.team_id,))
    if not teams:
        raise NotFound(f"there is no team {record.team_id}")
    team = team_of(teams[0])
    key_id, secret = secrets.new_key(
        os.urandom(secrets.ID_RANDOM_BYTES), secret_bytes or os.urandom(secrets.SECRET_RANDOM_BYTES)
    )
    record = replace(
        record,
        key_id=key_id,
        secret_hmac=secrets.hmac_of(pepper, secret),
        tenant_id=team.tenant_id,
        team_models=team.models,
        team_limit=team.limit,
    )
    body = {"name": record.name, "team_id": record.team_id, "task_id": record.task_id}
    revision, now_ms = yield from audit.record(actor, "key.create", f"key:{key_id}", body)
    yield Fetch(
        _ADD_KEY,
        (
            key_id,
            record.secret_hmac,
            record.tenant_id,
            record.team_id,
            record.name,
            json_text(sorted(record.models)),
            record.limit.requests_per_min,
            record.limit.tokens_per_min,
            record.limit.concurrent,
            record.expires_at_ms,
            record.task_id,
            record.declared_by,
            json_text(dict(record.labels)),
            revision,
            now_ms,
        ),
    )
    return record, secrets.key_text(key_id, secret)


def _list_budgets() -> Tx[list[Budget]]:
    now_ms: int = (yield Fetch(_NOW))[0][0]
    budgets = [at(budget_rows.budget_of(row), now_ms) for row in (yield Fetch(_BUDGETS))]
    return (yield from budget_rows.with_earlier(budgets, now_ms))


def team_of(row: Row) -> Team:
    """A row of SELECT_TEAMS."""
    team_id, tenant_id, models, requests, tokens, concurrent, task_budget = row
    return Team(
        team_id,
        tenant_id,
        msgspec.json.decode(models, type=frozenset[str]),
        RateLimit(requests, tokens, concurrent),
        task_budget,
    )


def task_of(row: Row) -> Task:
    """A row of SELECT_TASKS."""
    named = dict(zip(_TASK_COLUMNS, row, strict=False))
    return Task(**named, tokens=dict(zip(TOKEN_COLUMNS, row[len(_TASK_COLUMNS) :], strict=True)))
