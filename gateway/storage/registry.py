"""The store of the admin API: what one admin may see and change, each change with its audit row, and once if it is so
asked for. See `registry_accounts`, `registry_budgets`, `registry_lists` and `admin_keys` for the transactions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from gateway.core.budget import Budget
from gateway.core.config_overlay import Documents, Stored, Write
from gateway.core.errors import InvalidRequest
from gateway.core.identity import KeyRecord
from gateway.core.offices import (
    Admin,
    AdminKey,
    AuditEntry,
    KeyReused,
    Once,
    Page,
    Reach,
    Replayed,
    Role,
    Tenant,
)
from gateway.core.outcomes import Run
from gateway.core.task import TaskDefault
from gateway.core.usage_facts import Question, UsageBucket
from gateway.storage import (
    admin_keys,
    audit,
    documents,
    own_prices,
    receivers,
    registry_accounts,
    registry_budgets,
    registry_lists,
    registry_tasks,
    registry_usage,
)
from gateway.storage.accounts import Task, Team, rule_of
from gateway.storage.database import Database
from gateway.storage.own_prices import OwnPrice
from gateway.storage.receivers import Delivery, Webhook, WebhookCounts
from gateway.storage.registry_accounts import NewKey
from gateway.storage.tasks import Tasks, Wanted
from gateway.storage.transact import Fetch, Sql, Tx

T = TypeVar("T")
#: How long a reply is kept for a request that is sent again.
REPLIES_MS = 86_400_000

_REPLY = Sql("SELECT request_digest, status, body FROM admin_reply WHERE key_digest = $1")
_KEEP = Sql(
    "INSERT INTO admin_reply (key_digest, request_digest, status, body, created_at_ms) "
    "VALUES ($1, $2, $3, $4, now_ms())"
)
_FORGET = Sql(f"DELETE FROM admin_reply WHERE created_at_ms < now_ms() - {REPLIES_MS}")  # noqa: S608


class Registry:
    """For one request of one admin. Raises `NotFound` for what does not exist or is out of reach, `Taken`, `InUse`,
    `InvalidRequest`, `Unavailable`; with `once`, `Replayed` and `KeyReused`. `change` gets what is there and returns
    what is to be; `expect` gets what is there; what they raise ends the transaction.
    """

    def __init__(
        self,
        database: Database,
        admin: Admin,
        *,
        pepper: bytes,
        once: Once | None = None,
        task_default: TaskDefault = TaskDefault(),  # noqa: B008 - frozen
    ) -> None:
        self._task_default = task_default
        self._database = database
        self._actor = admin.actor
        self._reach = admin.reach
        self._pepper = pepper
        self._once = once

    # --- tenants, teams, keys ------------------------------------------------------------------------

    async def tenants(self, filters: Mapping[str, Any], after: Any, limit: int) -> Page[Tenant]:
        return await self._read(partial(registry_accounts.tenants, self._reach, filters, after, limit))

    async def tenant(self, tenant_id: str) -> Tenant:
        return await self._read(partial(registry_accounts.tenant, self._reach, tenant_id))

    async def add_tenant(self, tenant_id: str, name: str) -> Tenant:
        return await self._write(partial(registry_accounts.add_tenant, self._actor, tenant_id, name))

    async def change_tenant(self, tenant_id: str, change: Callable[[Tenant], Tenant]) -> Tenant:
        return await self._write(
            partial(registry_accounts.change_tenant, self._actor, self._reach, tenant_id, change)
        )

    async def drop_tenant(self, tenant_id: str, expect: Callable[[Tenant], None]) -> Tenant:
        return await self._write(
            partial(registry_accounts.drop_tenant, self._actor, self._reach, tenant_id, expect)
        )

    async def teams(self, filters: Mapping[str, Any], after: Any, limit: int) -> Page[Team]:
        return await self._read(partial(registry_accounts.teams, self._reach, filters, after, limit))

    async def team(self, team_id: str) -> Team:
        return await self._read(partial(registry_accounts.team, self._reach, team_id))

    async def add_team(self, *, budget: Mapping[str, Any] | None, **wanted: Any) -> Team:
        """The fields of `accounts.Team`, and what `accounts.rule_of` takes for its budget."""
        rule = None if budget is None else rule_of(**budget)
        return await self._write(
            partial(registry_accounts.add_team, self._actor, self._reach, Team(**wanted), rule)
        )

    async def change_team(self, team_id: str, change: Callable[[Team], Team]) -> Team:
        return await self._write(
            partial(registry_accounts.change_team, self._actor, self._reach, team_id, change)
        )

    async def drop_team(self, team_id: str, expect: Callable[[Team], None]) -> Team:
        return await self._write(
            partial(registry_accounts.drop_team, self._actor, self._reach, team_id, expect)
        )

    async def keys(self, filters: Mapping[str, Any], after: Any, limit: int) -> Page[KeyRecord]:
        return await self._read(partial(registry_accounts.keys, self._reach, filters, after, limit))

    async def key(self, key_id: str) -> KeyRecord:
        return await self._read(partial(registry_accounts.key, self._reach, key_id))

    async def create_key(self, *, budget: Mapping[str, Any] | None, **wanted: Any) -> tuple[KeyRecord, str]:
        """The fields of `NewKey`, and what `accounts.rule_of` takes for its budget; the key, and its text."""
        new = NewKey(**wanted, budget=None if budget is None else rule_of(**budget))
        return await self._write(
            partial(registry_accounts.create_key, self._actor, self._reach, self._pepper, new, self._secret())
        )

    async def create_keys(self, wanted: Sequence[Mapping[str, Any]]) -> list[tuple[KeyRecord, str]]:
        """As `create_key` for each, all or nothing. `InvalidRequest` names the place of the one that cannot be."""
        new = [
            NewKey(**{**w, "budget": None if w["budget"] is None else rule_of(**w["budget"])}) for w in wanted
        ]

        def tx() -> Tx[list[tuple[KeyRecord, str]]]:
            made = []
            for n, key in enumerate(new):
                secret = None if self._once is None else self._once.secret_bytes(self._pepper, n)
                try:
                    made.append(
                        (
                            yield from registry_accounts.create_key(
                                self._actor, self._reach, self._pepper, key, secret
                            )
                        )
                    )
                except InvalidRequest as error:
                    raise InvalidRequest(error.message, param=f"keys.{n}.{error.param}") from None
            return made

        return await self._write(tx)

    async def change_key(self, key_id: str, change: Callable[[KeyRecord], KeyRecord]) -> KeyRecord:
        return await self._write(
            partial(registry_accounts.change_key, self._actor, self._reach, key_id, change)
        )

    async def revoke_key(self, key_id: str, expect: Callable[[KeyRecord], None]) -> KeyRecord:
        return await self._write(
            partial(registry_accounts.revoke_key, self._actor, self._reach, key_id, expect)
        )

    # --- budgets -------------------------------------------------------------------------------------

    async def budgets(self, filters: Mapping[str, Any], after: Any, limit: int) -> Page[Budget]:
        return await self._read(partial(registry_budgets.budgets, self._reach, filters, after, limit))

    async def budget(self, budget_id: str) -> Budget:
        return await self._read(partial(registry_budgets.budget, self._reach, budget_id))

    async def put_budget(
        self,
        scope: str,
        rule: Mapping[str, Any],
        reason: str,
        check: Callable[[Budget, Budget], None] | None,
    ) -> Budget:
        """`rule`: what `accounts.rule_of` takes. An existing one is changed after `check` (before, after), or is `Taken`
        without."""
        wanted = rule_of(**rule)

        def change(before: Budget, now_ms: int) -> Budget:
            del now_ms
            after = registry_budgets.to_rule(before, wanted)
            if check is not None:
                check(before, after)
            return after

        return await self._write(
            partial(
                registry_budgets.put_budget,
                self._actor,
                self._reach,
                scope,
                wanted,
                None if check is None else change,
                reason,
            )
        )

    async def change_budget(
        self, budget_id: str, change: Callable[[Budget, int], Budget], reason: str
    ) -> Budget:
        return await self._write(
            partial(registry_budgets.change_budget, self._actor, self._reach, budget_id, change, reason)
        )

    async def drop_budget(self, budget_id: str, expect: Callable[[Budget], None]) -> Budget:
        return await self._write(
            partial(registry_budgets.drop_budget, self._actor, self._reach, budget_id, expect)
        )

    # --- prices --------------------------------------------------------------------------------------

    async def own_prices(self) -> Sequence[OwnPrice]:
        return await self._read(own_prices.own_prices)

    async def own_price(self, price_id: str) -> OwnPrice:
        return await self._read(partial(own_prices.own_price, price_id))

    async def add_price(self, wanted: Mapping[str, Any]) -> OwnPrice:
        """`price`, `valid_from_ms` (None = now), `valid_to_ms` and `body`."""
        return await self._write(partial(own_prices.add_one, self._actor, wanted))

    async def add_prices(self, wanted: Sequence[Mapping[str, Any]]) -> Sequence[OwnPrice]:
        """As `add_price` for each, all or nothing."""
        return await self._write(partial(own_prices.add, self._actor, wanted))

    async def change_price(self, price_id: str, change: Callable[[OwnPrice, int], OwnPrice]) -> OwnPrice:
        return await self._write(partial(own_prices.change, self._actor, price_id, change))

    async def drop_price(self, price_id: str, expect: Callable[[OwnPrice], None]) -> OwnPrice:
        return await self._write(partial(own_prices.drop, self._actor, price_id, expect))

    # --- configuration -------------------------------------------------------------------------------

    async def documents(self) -> Stored:
        return await self._read(documents.stored)

    async def write_documents(self, stamp: int, writes: Sequence[Write]) -> Documents:
        """All or none; raises `Moved` if the store is not at that stamp any more."""
        return await self._write(partial(documents.write, self._actor, stamp, writes))

    async def expect_new(self) -> None:
        """Before something is tried at length: raises `Replayed` or `KeyReused` if this request was made before."""
        if self._once is not None:
            await self._read(partial(_expect_new, self._once))

    # --- webhooks ------------------------------------------------------------------------------------

    async def webhooks(self) -> Sequence[tuple[Webhook, WebhookCounts]]:
        return await self._read(receivers.webhooks)

    async def configured_webhook_counts(self) -> WebhookCounts:
        return await self._read(receivers.configured_counts)

    async def webhook(self, webhook_id: str) -> Webhook:
        return await self._read(partial(receivers.webhook, webhook_id))

    async def add_webhook(self, name: str, url: str, kinds: Sequence[str], enabled: bool) -> Webhook:
        return await self._write(partial(receivers.add, self._actor, name, url, kinds, enabled))

    async def change_webhook(self, webhook_id: str, change: Callable[[Webhook], Webhook]) -> Webhook:
        return await self._write(partial(receivers.change, self._actor, webhook_id, change))

    async def drop_webhook(self, webhook_id: str, expect: Callable[[Webhook], None]) -> Webhook:
        return await self._write(partial(receivers.drop, self._actor, webhook_id, expect))

    async def test_webhook(self, webhook_id: str) -> Delivery:
        """A message to this one only; "configuration" is the configured one."""
        return await self._write(partial(receivers.test, self._actor, webhook_id))

    async def deliveries(
        self, webhook_id: str, filters: Mapping[str, Any], after: Any, limit: int
    ) -> Page[Delivery]:
        return await self._read(partial(receivers.deliveries, webhook_id, filters, after, limit))

    # --- what happened -------------------------------------------------------------------------------

    async def tasks(self, filters: Mapping[str, Any], after: Any, limit: int) -> Page[Task]:
        return await self._read(partial(registry_lists.tasks, self._reach, filters, after, limit))

    async def find_task(self, name: str) -> Task:
        return await self._read(partial(registry_lists.find_task, self._reach, name))

    async def task_tree(self, name: str) -> Sequence[Task]:
        return await self._read(partial(registry_lists.task_tree, self._reach, name))

    async def declare_task(
        self,
        key_id: str,
        name: str,
        budgets: Sequence[Mapping[str, Any]],
        labels: Mapping[str, str],
        parent: str | None,
    ) -> tuple[Task, str]:
        """A new task of that key, and the text of its own key. `budgets`: what `accounts.rule_of` takes of each."""
        rules = tuple(rule_of(**budget) for budget in budgets)
        wanted = Wanted(name, {rule.unit: rule.limit for rule in rules}, labels=labels, budget_rules=rules)
        tasks = Tasks(
            self._database,
            actor=self._actor,
            pepper=self._pepper,
            task_default=self._task_default,
            secret_bytes=self._secret(),
        )

        def tx() -> Tx[tuple[Task, str]]:
            key = yield from registry_accounts.key(self._reach, key_id)
            if key.revoked_at_ms is not None:
                raise InvalidRequest(f"key {key_id} is revoked", param="key_id")
            declared = yield from tasks.declaring(key, wanted, parent)()
            return declared.task, declared.key_text

        return await self._write(tx)

    async def change_task(
        self, name: str, change: Callable[[str, Mapping[str, str]], tuple[str, Mapping[str, str]]]
    ) -> str:
        """`change` gets its name and labels and returns what they are to be; the id of the task."""
        return await self._write(partial(registry_tasks.change_task, self._actor, self._reach, name, change))

    async def runs(
        self, by: Sequence[str], label: str, from_ms: int, to_ms: int, team_id: str, key_id: str
    ) -> list[Run]:
        """Tasks whose outcome was said, grouped by any of `registry_tasks.GROUPS`."""
        return await self._read(
            partial(registry_tasks.runs, self._reach, by, label, from_ms, to_ms, team_id, key_id)
        )

    async def entries(self, filters: Mapping[str, Any], after: Any, limit: int) -> Page[Mapping[str, Any]]:
        return await self._read(partial(registry_lists.entries, self._reach, filters, after, limit))

    async def note(self, action: str, subject: str, body: Mapping[str, Any]) -> None:
        """Into the audit trail, for what was done outside of the store."""
        await self._write(partial(audit.record, self._actor, action, subject, body))

    async def audit(self, filters: Mapping[str, Any], after: Any, limit: int) -> Page[AuditEntry]:
        """Not for those who do not see everything: whoever asks has been told so."""
        return await self._read(partial(registry_lists.audit, filters, after, limit))

    async def usage(
        self, question: Question, after: Sequence[Any] | None, limit: int
    ) -> tuple[list[UsageBucket], bool]:
        """Sums by bucket and group, in that order, those behind the `place` `after`; and whether there are more."""
        return await self._read(partial(registry_usage.buckets, self._reach, question, after, limit))

    # --- admin keys ----------------------------------------------------------------------------------

    async def admin_keys(self, filters: Mapping[str, Any], after: Any, limit: int) -> Page[AdminKey]:
        return await self._read(partial(admin_keys.admin_keys, self._reach, filters, after, limit))

    async def admin_key(self, admin_key_id: str) -> AdminKey:
        return await self._read(partial(admin_keys.admin_key, admin_key_id))

    async def create_admin_key(
        self, *, name: str, role: Role, reach: Reach, expires_at_ms: int | None
    ) -> tuple[AdminKey, str]:
        return await self._write(
            partial(
                admin_keys.create_admin_key,
                self._actor,
                self._pepper,
                name,
                role,
                reach,
                expires_at_ms,
                self._secret(),
            )
        )

    async def revoke_admin_key(self, admin_key_id: str) -> AdminKey:
        return await self._write(partial(admin_keys.revoke_admin_key, self._actor, admin_key_id))

    # --- transactions --------------------------------------------------------------------------------

    def _secret(self) -> bytes | None:
        return None if self._once is None else self._once.secret_bytes(self._pepper)

    async def _read(self, tx: Callable[[], Tx[T]]) -> T:
        return await self._database.report(tx)

    async def _write(self, tx: Callable[[], Tx[T]]) -> T:
        if self._once is None:
            return await self._database.write(tx)
        return await self._database.write(partial(_once, tx, self._once))


def _once(tx: Callable[[], Tx[T]], once: Once) -> Tx[T]:
    """The change and its reply together. Of two that come at once, the second meets the first's row and runs again."""
    yield from _expect_new(once)
    result = yield from tx()
    status, body = once.reply(result)
    yield Fetch(_KEEP, (once.key_digest, once.request_digest, status, body))
    yield Fetch(_FORGET)
    return result


def _expect_new(once: Once) -> Tx[None]:
    rows = yield Fetch(_REPLY, (once.key_digest,))
    if rows:
        if bytes(rows[0][0]) != once.request_digest:
            raise KeyReused
        raise Replayed(rows[0][1], bytes(rows[0][2]))
