"""All tables, for SQLite and Postgres alike. Money is BIGINT nano-dollars, time BIGINT milliseconds, ids TEXT;
`*_amount` is BIGINT in the unit of its budget.

`migrations/` builds the same schema; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    text,
)

#: Constraint names are needed by migrations; SQLite keeps none of its own.
metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _id(name: str) -> Column[str]:
    return Column(name, Text, primary_key=True)


def _text(name: str, *, null: bool = False) -> Column[str]:
    return Column(name, Text, nullable=null)


def _int(name: str, *, null: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=null)


def _text_or(name: str, default: str) -> Column[str]:
    return Column(name, Text, nullable=False, server_default=text(f"'{default}'"))


def _sums(*names: str) -> list[Column[int]]:
    return [Column(name, BigInteger, nullable=False, server_default=text("0")) for name in names]


def _hourly(name: str, keys: Sequence[str], sums: Sequence[str]) -> Table:
    """Sums over one hour for each combination of the other keys."""
    hour = Column(keys[0], BigInteger, primary_key=True, autoincrement=False)
    return Table(name, metadata, hour, *map(_id, keys[1:]), *_sums(*sums))


#: The columns that count tokens, in ledger, usage_hour and task alike.
TOKEN_COLUMNS = (
    "input_uncached",
    "cache_read",
    "cache_write_5m",
    "cache_write_1h",
    "cache_write_12h",
    "output",
    "reasoning",
)
#: What is summed up of entries: by hour in usage_hour and team_hour, and of each task. `retries_*` are attempts after a
#: request's first, `failed_*` those that their terminal entry says an error of.
USAGE_SUMS = (
    "attempts",
    "errors",
    "retries",
    "retries_cost_nano_usd",
    "failed_cost_nano_usd",
    "cost_nano_usd",
    "list_cost_nano_usd",
    *TOKEN_COLUMNS,
)

tenant = Table("tenant", metadata, _id("tenant_id"), _text("name"), _int("created_at_ms"))

team = Table(
    "team",
    metadata,
    _id("team_id"),
    _text("tenant_id"),
    _text("name"),
    _text("models"),  # JSON array; empty = all
    _int("requests_per_min", null=True),
    _int("tokens_per_min", null=True),
    _int("concurrent", null=True),
    _int("default_task_budget_nano_usd", null=True),
    _int("revision"),  # the revision that last changed this row
    _int("created_at_ms"),
    Index("ix_team_tenant_id_name", "tenant_id", "name", unique=True),
    Index("ix_team_revision", "revision"),
)

virtual_key = Table(
    "virtual_key",
    metadata,
    _id("key_id"),
    Column("secret_hmac", LargeBinary, nullable=False),
    *map(_text, ("tenant_id", "team_id", "name")),
    _text("models"),  # JSON array; empty = all
    _int("requests_per_min", null=True),
    _int("tokens_per_min", null=True),
    _int("concurrent", null=True),
    _int("expires_at_ms", null=True),
    _int("revoked_at_ms", null=True),
    _text("task_id", null=True),
    _text("declared_by", null=True),  # of a task-scoped key: the key whose money, rates and reports it uses
    _text("labels"),  # JSON object
    _int("revision"),
    _int("created_at_ms"),
    Index("ix_virtual_key_revision", "revision"),
    Index("ix_virtual_key_team_id", "team_id"),
)

task = Table(
    "task",
    metadata,
    _id("task_id"),
    *map(_text, ("key_id", "team_id", "tenant_id", "external_id", "source")),
    _text("parent_task_id", null=True),
    _text("state"),
    _int("created_at_ms"),
    _int("last_at_ms"),
    *_sums("steps", *USAGE_SUMS),
    _text_or("name", ""),
    _text_or("labels", "{}"),  # JSON object
    _text("breakers", null=True),  # JSON, as it was declared; null = the defaults
    *_sums("depth"),  # declared tasks above it
    _text_or("state_reason", ""),
    # how it turned out, said by whoever runs it; success null = nothing was said
    Column("success", Boolean, nullable=True),
    Column("score", Float, nullable=True),
    _text("outcome_labels", null=True),  # JSON object
    _int("outcome_at_ms", null=True),
    Index("ix_task_last_at_ms", "last_at_ms"),
    Index("ix_task_key_id_last_at_ms", "key_id", "last_at_ms"),
    Index(
        "ix_task_parent_task_id",
        "parent_task_id",
        postgresql_where=text("parent_task_id IS NOT NULL"),
        sqlite_where=text("parent_task_id IS NOT NULL"),
    ),
)

#: One row per (scope, unit, window definition), holding the current window, or the current bucket of a rolling one. It
#: is the lock of its scope, so it stays when a window ends; what the ended window held moves to budget_closed.
budget = Table(
    "budget",
    metadata,
    _id("budget_id"),
    _text("scope"),
    _text_or("unit", "usd"),
    _text("window"),
    _text("zone"),
    _int("window_start_ms"),
    _int("window_end_ms", null=True),
    _int("limit_amount"),
    *_sums("posted_amount", "held_amount"),
    _text("on_exceed"),
    _text_or("mode", "enforce"),
    _text_or("alert_percents", "[50,80,90,100]"),  # JSON array
    *_sums("landing_percent"),
    _int("override_limit_amount", null=True),  # instead of the limit, until then
    _int("override_until_ms", null=True),
    _text_or("ancestors", "[]"),  # JSON array: ids of the budgets it is carved from, the nearest first
    *_sums("carved_amount", "would_refuse"),
    _int("epoch"),
    _int("created_at_ms"),
    Index("ix_budget_scope_unit_window_zone", "scope", "unit", "window", "zone", unique=True),
    CheckConstraint("held_amount >= 0", name="held_not_negative"),
    CheckConstraint("limit_amount >= 0", name="limit_not_negative"),
)

budget_closed = Table(
    "budget_closed",
    metadata,
    _id("budget_id"),
    Column("window_start_ms", BigInteger, primary_key=True, autoincrement=False),
    _int("window_end_ms"),
    _text("scope"),
    _text_or("unit", "usd"),
    _int("limit_amount"),
    *_sums("posted_amount", "held_amount", "would_refuse"),
    CheckConstraint("held_amount >= 0", name="held_not_negative"),
)

hold = Table(
    "hold",
    metadata,
    _id("attempt_id"),
    _text("replica_id"),
    _int("replica_epoch"),
    _int("amount_nano_usd"),
    *_sums("input_tokens", "output_tokens", "calls"),
    _text("budgets"),  # JSON array of places (storage/budget_rows.py): where the amounts are held
    _text("state"),  # held | ended; how it ended is in the ledger
    _int("step"),
    _int("created_at_ms"),
    _text("attempt"),  # JSON of core.entry.Attempt: enough to charge it without its owner
    _text_or("answer", "{}"),  # JSON of core.entry.Granted
    _int("orphaned_at_ms", null=True),  # when the next run of its replica started
    Index(
        "ix_hold_open",
        "replica_id",
        postgresql_where=text("state = 'held'"),
        sqlite_where=text("state = 'held'"),
    ),
)

#: Immutable. `at_ms` is the time inside the attempt's id, for the unique indexes must hold the key by which Postgres
#: partitions. A `correct` entry has signed differences in amount, list cost and tokens. `charged_*` is what was posted
#: to budgets in those units: the usage, or what was held where the usage is unknown. `served_by` is one of a
#: deployment's replicas, `replica_id` a gateway.
ledger = Table(
    "ledger",
    metadata,
    Column("at_ms", BigInteger, primary_key=True, autoincrement=False),
    _id("entry_id"),
    _text("attempt_id"),
    _text("kind"),
    *map(_int, ("amount_nano_usd", "list_cost_nano_usd", "hold_nano_usd", "step", "posted_at_ms")),
    _text("budgets"),  # as in hold: where the amount was posted
    *map(_text, ("replica_id", "request_id", "tenant_id", "team_id", "key_id", "task_id")),
    _text("parent_task_id", null=True),
    Column("attempt_no", Integer, nullable=False),
    _text("operation"),
    _text("client"),
    _text("model_requested"),
    _text("model"),
    _text("upstream_model"),
    _text("provider"),
    _text("deployment"),
    _text("tier"),
    _text("rule"),
    Column("stream", Boolean, nullable=False),
    _int("started_at_ms"),
    *(_int(name) for name in TOKEN_COLUMNS),
    _text("quality"),
    _text("price_version"),
    _text("finish"),
    Column("status", Integer, nullable=False),
    _text("error"),
    _int("latency_ms"),
    _int("first_token_ms", null=True),
    _text("upstream_request_id"),
    _text("service_tier"),
    _text("note"),
    *_sums("charged_input_tokens", "charged_output_tokens", "charged_calls"),
    _text("served_by", null=True),
    Index(
        "uq_ledger_terminal",
        "attempt_id",
        "at_ms",
        unique=True,
        postgresql_where=text("kind <> 'correct'"),
        sqlite_where=text("kind <> 'correct'"),
    ),
    Index(
        "uq_ledger_correct",
        "attempt_id",
        "at_ms",
        unique=True,
        postgresql_where=text("kind = 'correct'"),
        sqlite_where=text("kind = 'correct'"),
    ),
    Index("ix_ledger_request_id", "request_id"),
    Index("ix_ledger_task_id_at_ms", "task_id", "at_ms"),
    postgresql_partition_by="RANGE (at_ms)",
)

#: Why an attempt read less from its provider's cache than it could have (core/explanation.py); a hit has no row. Written
#: with the ledger's entry, deleted after a while. `detail` is the whole explanation as JSON: kinds, indexes, lengths.
prefix_miss = Table(
    "prefix_miss",
    metadata,
    _id("attempt_id"),
    _int("at_ms"),
    _text("request_id"),
    _text("tenant_id"),
    _text("team_id"),
    _text("key_id"),
    _text("task_id"),
    _text("model"),
    _text("provider"),
    _text("deployment"),
    _text("client"),
    _text("verdict"),
    _text("cause"),
    _int("lost_tokens"),
    _int("lost_nano_usd"),
    _text("detail"),
    Index("ix_prefix_miss_request_id", "request_id"),
    Index("ix_prefix_miss_task_id_at_ms", "task_id", "at_ms"),
    Index("ix_prefix_miss_at_ms", "at_ms"),
)

#: What is reported by; every other column of usage_hour is a sum over the entries of one hour with these values.
USAGE_KEYS = (
    "hour_ms",
    "tenant_id",
    "team_id",
    "key_id",
    "model",
    "provider",
    "deployment",
    "tier",
    "client",
)
usage_hour = _hourly("usage_hour", USAGE_KEYS, USAGE_SUMS)

#: The same sums by team alone, written in the same transaction: a month of them is one row for each team and hour.
TEAM_KEYS = USAGE_KEYS[:3]
team_hour = _hourly("team_hour", TEAM_KEYS, USAGE_SUMS)

#: Sums of prefix_miss, written with its rows, and kept when those are deleted.
MISS_KEYS = (*USAGE_KEYS, "cause")
MISS_SUMS = ("attempts", "lost_tokens", "lost_nano_usd")
miss_hour = _hourly("miss_hour", MISS_KEYS, MISS_SUMS)

#: What budgets refused: the holds that were asked for, by the kind of scope that said no. Written every few seconds.
REFUSED_KEYS = (*USAGE_KEYS, "scope_kind")
REFUSED_SUMS = ("refusals", "unbounded", "refused_nano_usd")  # unbounded: of no known amount
refused_hour = _hourly("refused_hour", REFUSED_KEYS, REFUSED_SUMS)

replica = Table(
    "replica",
    metadata,
    _id("replica_id"),
    _int("epoch"),
    _int("started_at_ms"),
    _int("expires_at_ms"),
)

#: One row, counted up by every change of a key, team or budget; replicas poll it.
revision = Table(
    "revision",
    metadata,
    Column("one", Integer, primary_key=True, autoincrement=False),
    _int("number"),
    _text_or("audit_head", ""),  # the hash of the last entry of the audit trail
    CheckConstraint("one = 1", name="single_row"),
)

outbox = Table(
    "outbox",
    metadata,
    _id("outbox_id"),
    _text("kind"),  # budget_alert | budget_shadow | bound_breach | task_paused
    _text("dedupe"),
    _text("body"),  # JSON
    _int("created_at_ms"),
    _int("delivered_at_ms", null=True),
    *_sums("attempts", "next_at_ms"),  # tries so far; when the next may begin, or the claim of one ends
    _int("dead_at_ms", null=True),  # given up
    _text_or("last_error", ""),
    *_sums(
        "spread"
    ),  # 1: those of `webhook` have their deliveries; the columns above are of the configured one
    Index(
        "ix_outbox_next_at_ms",
        "next_at_ms",
        postgresql_where=text("delivered_at_ms IS NULL AND dead_at_ms IS NULL"),
        sqlite_where=text("delivered_at_ms IS NULL AND dead_at_ms IS NULL"),
    ),
    Index("ix_outbox_dedupe", "dedupe", unique=True),
    Index(
        "ix_outbox_spread",
        "outbox_id",
        postgresql_where=text("spread = 0"),
        sqlite_where=text("spread = 0"),
    ),
)

#: Receivers that people added over the admin API. Their secrets are made from the pepper, the id and the version of the
#: secret, so none is at rest.
webhook = Table(
    "webhook",
    metadata,
    _id("webhook_id"),
    _text("name"),
    _text("url"),  # often holds a secret of the receiver
    _text("kinds"),  # JSON array; empty = all
    Column("enabled", Boolean, nullable=False),
    _int("secret_version"),
    _int("created_at_ms"),
    _int("revision"),
)

webhook_delivery = Table(
    "webhook_delivery",
    metadata,
    _id("webhook_id"),
    _id("outbox_id"),
    _text("kind"),
    _int("created_at_ms"),  # of the message
    *_sums("attempts", "next_at_ms"),
    _int("delivered_at_ms", null=True),
    _int("dead_at_ms", null=True),
    _text_or("last_error", ""),
    Index(
        "ix_webhook_delivery_webhook_id_next_at_ms",
        "webhook_id",
        "next_at_ms",
        postgresql_where=text("delivered_at_ms IS NULL AND dead_at_ms IS NULL"),
        sqlite_where=text("delivered_at_ms IS NULL AND dead_at_ms IS NULL"),
    ),
    Index("ix_webhook_delivery_created_at_ms", "created_at_ms"),
)

#: One row per episode of a breaker (storage/breaker_events.py).
breaker_event = Table(
    "breaker_event",
    metadata,
    _id("event_id"),
    _text("task_id"),
    _text("key_id"),
    _text("breaker"),
    _text("action"),  # observe | alert | stop
    _text("message"),
    _text("evidence"),  # JSON object
    Column("tripped", Boolean, nullable=False),
    _int("at_ms"),
    _int("resumed_at_ms", null=True),
    _text("resumed_by", null=True),
    _int("revision", null=True),  # the revision that let it go on
    Index("ix_breaker_event_at_ms", "at_ms"),
    Index("ix_breaker_event_revision", "revision"),
    Index("ix_breaker_event_task_id_at_ms", "task_id", "at_ms"),
)

audit = Table(
    "audit",
    metadata,
    _id("audit_id"),
    _int("at_ms"),
    _text("actor"),
    _text("action"),
    _text("subject"),
    _text("body"),  # JSON; never a secret
    _int("number", null=True),  # the revision; its order is that of the chain
    _text(
        "hash", null=True
    ),  # over this row and the hash before it (core/audit_chain.py); null: of an older version
    Index("ix_audit_at_ms", "at_ms"),
    Index(
        "ix_audit_number",
        "number",
        unique=True,
        postgresql_where=text("number IS NOT NULL"),
        sqlite_where=text("number IS NOT NULL"),
    ),
)

#: Price rows stated over the admin API, beside those of the configuration, which they go before while they hold. A row that
#: has begun is never changed but for its end, so that what is found at a time stays what was charged then.
own_price = Table(
    "own_price",
    metadata,
    _id("price_id"),
    _text("price"),
    _int("valid_from_ms"),
    _int("valid_to_ms", null=True),
    _text("body"),  # JSON: a row as in prices.yaml, without its times
    _int("created_at_ms"),
    _int("withdrawn_at_ms", null=True),  # before it began
    _int("revision"),
    Index("ix_own_price_revision", "revision"),
    Index("ix_own_price_price", "price"),
)

#: Configuration that was written over the admin API, laid over what files say. What is deleted has a time and no body.
config_document = Table(
    "config_document",
    metadata,
    *map(_id, ("kind", "name")),
    _text("body"),  # JSON: as it would stand in gateway.yaml
    *map(_int, ("version", "created_at_ms", "updated_at_ms", "revision")),
    _int("deleted_at_ms", null=True),
    Index("ix_config_document_revision", "revision"),
)

#: Keys of the admin API. "" as tenant or team = all of them.
admin_key = Table(
    "admin_key",
    metadata,
    _id("admin_key_id"),
    Column("secret_hmac", LargeBinary, nullable=False),
    _text("name"),
    _text("role"),
    _text("tenant_id"),
    _text("team_id"),
    _int("created_at_ms"),
    _int("expires_at_ms", null=True),
    _int("revoked_at_ms", null=True),
)

#: Replies of the admin API to requests with an idempotency key, written with the change that they tell of and kept for a
#: day. Neither the key nor a secret is in there (core/offices.py, `Once`).
admin_reply = Table(
    "admin_reply",
    metadata,
    Column("key_digest", LargeBinary, primary_key=True),
    Column("request_digest", LargeBinary, nullable=False),
    Column("status", Integer, nullable=False),
    Column("body", LargeBinary, nullable=False),
    _int("created_at_ms"),
    Index("ix_admin_reply_created_at_ms", "created_at_ms"),
)
