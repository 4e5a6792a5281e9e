"""The store that the admin API needs, shaped as `storage.registry.Registry` is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gateway.admin.ports import TeamRow
from gateway.core.budget import Budget
from gateway.core.config_overlay import Documents, Stored, Write
from gateway.core.identity import KeyRecord
from gateway.core.offices import AdminKey, AuditEntry, Page, Reach, Role, Tenant
from gateway.core.outcomes import Run
from gateway.core.prices import PriceRow
from gateway.core.task_facts import TaskRow
from gateway.core.usage_facts import Question, UsageBucket

Filters = Mapping[str, Any]


class OwnPriceRow(Protocol):
    """A price row that somebody stated. `body`: the row as in prices.yaml, without its times."""

    @property
    def price_id(self) -> str: ...

    @property
    def price(self) -> str: ...

    @property
    def valid_from_ms(self) -> int: ...

    @property
    def valid_to_ms(self) -> int | None: ...

    @property
    def body(self) -> Mapping[str, Any]: ...

    @property
    def row(self) -> PriceRow: ...


class WebhookRow(Protocol):
    @property
    def webhook_id(self) -> str: ...

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def kinds(self) -> Sequence[str]: ...

    @property
    def enabled(self) -> bool: ...

    @property
    def secret_version(self) -> int: ...

    @property
    def created_at_ms(self) -> int: ...


class WebhookCountsRow(Protocol):
    """Messages to one webhook, by what became of them."""

    @property
    def pending(self) -> int: ...

    @property
    def delivered(self) -> int: ...

    @property
    def dead(self) -> int: ...

    @property
    def last_delivered_at_ms(self) -> int | None: ...


class DeliveryRow(Protocol):
    """One message on its way to one webhook."""

    @property
    def delivery_id(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def created_at_ms(self) -> int: ...

    @property
    def attempts(self) -> int: ...

    @property
    def next_at_ms(self) -> int: ...

    @property
    def delivered_at_ms(self) -> int | None: ...

    @property
    def dead_at_ms(self) -> int | None: ...

    @property
    def last_error(self) -> str: ...


class Registry(Protocol):
    """What one admin sees and may change. `NotFound` for what does not exist or is out of reach; `Taken`, `InUse`,
    `InvalidRequest`, `Unavailable`, and for repeated requests `Replayed` and `KeyReused`. `change` gets what is there
    and returns what is to be, `expect` gets what is there, inside the transaction, which ends when they raise.
    """

    async def tenants(self, filters: Filters, after: Any, limit: int) -> Page[Tenant]: ...

    async def tenant(self, tenant_id: str) -> Tenant: ...

    async def add_tenant(self, tenant_id: str, name: str) -> Tenant: ...

    async def change_tenant(self, tenant_id: str, change: Callable[[Tenant], Tenant]) -> Tenant: ...

    async def drop_tenant(self, tenant_id: str, expect: Callable[[Tenant], None]) -> Tenant: ...

    async def teams(self, filters: Filters, after: Any, limit: int) -> Page[Any]: ...

    async def team(self, team_id: str) -> TeamRow: ...

    async def add_team(self, *, budget: Mapping[str, Any] | None, **wanted: Any) -> TeamRow:
        """With its budget, all or nothing."""
        ...

    async def change_team(self, team_id: str, change: Callable[[Any], Any]) -> TeamRow: ...

    async def drop_team(self, team_id: str, expect: Callable[[Any], None]) -> TeamRow: ...

    async def keys(self, filters: Filters, after: Any, limit: int) -> Page[KeyRecord]: ...

    async def key(self, key_id: str) -> KeyRecord: ...

    async def create_key(self, *, budget: Mapping[str, Any] | None, **wanted: Any) -> tuple[KeyRecord, str]:
        """The key, and its text, which is shown once."""
        ...

    async def create_keys(self, wanted: Sequence[Mapping[str, Any]]) -> Sequence[tuple[KeyRecord, str]]:
        """As `create_key` for each, all or nothing."""
        ...

    async def change_key(self, key_id: str, change: Callable[[KeyRecord], KeyRecord]) -> KeyRecord: ...

    async def revoke_key(self, key_id: str, expect: Callable[[KeyRecord], None]) -> KeyRecord: ...

    async def budgets(self, filters: Filters, after: Any, limit: int) -> Page[Budget]: ...

    async def budget(self, budget_id: str) -> Budget: ...

    async def put_budget(
        self,
        scope: str,
        rule: Mapping[str, Any],
        reason: str,
        check: Callable[[Budget, Budget], None] | None,
    ) -> Budget:
        """Make one, or change the one of that scope, unit and window after `check` (before, after); `Taken` without."""
        ...

    async def change_budget(
        self, budget_id: str, change: Callable[[Budget, int], Budget], reason: str
    ) -> Budget: ...

    async def drop_budget(self, budget_id: str, expect: Callable[[Budget], None]) -> Budget: ...

    async def own_prices(self) -> Sequence[OwnPriceRow]: ...

    async def own_price(self, price_id: str) -> OwnPriceRow: ...

    async def add_price(self, wanted: Mapping[str, Any]) -> OwnPriceRow:
        """`price`, `valid_from_ms` (None = now), `valid_to_ms` and `body`."""
        ...

    async def add_prices(self, wanted: Sequence[Mapping[str, Any]]) -> Sequence[OwnPriceRow]:
        """As `add_price` for each, all or nothing."""
        ...

    async def change_price(self, price_id: str, change: Callable[[Any, int], Any]) -> OwnPriceRow:
        """`InUse` for a change of more than the end of a row that has begun."""
        ...

    async def drop_price(self, price_id: str, expect: Callable[[Any], None]) -> OwnPriceRow:
        """One that has begun ends now."""
        ...

    async def documents(self) -> Stored: ...

    async def write_documents(self, stamp: int, writes: Sequence[Write]) -> Documents:
        """All or none; raises `Moved` if the store is not at that stamp any more."""
        ...

    async def expect_new(self) -> None:
        """Raises `Replayed` or `KeyReused` if this request was made before."""
        ...

    async def webhooks(self) -> Sequence[tuple[WebhookRow, WebhookCountsRow]]: ...

    async def configured_webhook_counts(self) -> WebhookCountsRow: ...

    async def webhook(self, webhook_id: str) -> WebhookRow: ...

    async def add_webhook(self, name: str, url: str, kinds: Sequence[str], enabled: bool) -> WebhookRow: ...

    async def change_webhook(self, webhook_id: str, change: Callable[[Any], Any]) -> WebhookRow: ...

    async def drop_webhook(self, webhook_id: str, expect: Callable[[Any], None]) -> WebhookRow: ...

    async def test_webhook(self, webhook_id: str) -> DeliveryRow:
        """A message to this one only; "configuration" is the configured one."""
        ...

    async def deliveries(self, webhook_id: str, filters: Filters, after: Any, limit: int) -> Page[Any]:
        """As `DeliveryRow`."""
        ...

    async def tasks(self, filters: Filters, after: Any, limit: int) -> Page[Any]: ...

    async def find_task(self, name: str) -> TaskRow: ...

    async def task_tree(self, name: str) -> Sequence[TaskRow]: ...

    async def declare_task(
        self,
        key_id: str,
        name: str,
        budgets: Sequence[Mapping[str, Any]],
        labels: Mapping[str, str],
        parent: str | None,
    ) -> tuple[TaskRow, str]:
        """A new task of that key, and the text of its own key."""
        ...

    async def change_task(
        self, name: str, change: Callable[[str, Mapping[str, str]], tuple[str, Mapping[str, str]]]
    ) -> str:
        """`change` gets its name and labels; the id of the task."""
        ...

    async def runs(
        self, by: Sequence[str], label: str, from_ms: int, to_ms: int, team_id: str, key_id: str
    ) -> Sequence[Run]: ...

    async def entries(self, filters: Filters, after: Any, limit: int) -> Page[Mapping[str, Any]]: ...

    async def note(self, action: str, subject: str, body: Mapping[str, Any]) -> None:
        """Into the audit trail, for what was done outside of the store."""
        ...

    async def audit(self, filters: Filters, after: Any, limit: int) -> Page[AuditEntry]: ...

    async def usage(
        self, question: Question, after: Sequence[Any] | None, limit: int
    ) -> tuple[Sequence[UsageBucket], bool]:
        """Sums by bucket and group, in that order, those behind the `place` `after`; and whether there are more."""
        ...

    async def admin_keys(self, filters: Filters, after: Any, limit: int) -> Page[AdminKey]: ...

    async def admin_key(self, admin_key_id: str) -> AdminKey: ...

    async def create_admin_key(
        self, *, name: str, role: Role, reach: Reach, expires_at_ms: int | None
    ) -> tuple[AdminKey, str]: ...

    async def revoke_admin_key(self, admin_key_id: str) -> AdminKey: ...
