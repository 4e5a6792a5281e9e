"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("audit_id", sa.Text(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("audit_id", name=op.f("pk_audit")),
    )
    op.create_index("ix_audit_at_ms", "audit", ["at_ms"], unique=False)
    op.create_table(
        "budget",
        sa.Column("budget_id", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("window", sa.Text(), nullable=False),
        sa.Column("zone", sa.Text(), nullable=False),
        sa.Column("window_start_ms", sa.BigInteger(), nullable=False),
        sa.Column("window_end_ms", sa.BigInteger(), nullable=True),
        sa.Column("limit_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("posted_nano_usd", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("held_nano_usd", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("on_exceed", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("held_nano_usd >= 0", name=op.f("ck_budget_held_not_negative")),
        sa.CheckConstraint("limit_nano_usd >= 0", name=op.f("ck_budget_limit_not_negative")),
        sa.PrimaryKeyConstraint("budget_id", name=op.f("pk_budget")),
    )
    op.create_index("ix_budget_scope_window_zone", "budget", ["scope", "window", "zone"], unique=True)
    op.create_table(
        "budget_closed",
        sa.Column("budget_id", sa.Text(), nullable=False),
        sa.Column("window_start_ms", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("window_end_ms", sa.BigInteger(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("limit_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("posted_nano_usd", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("held_nano_usd", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.CheckConstraint("held_nano_usd >= 0", name=op.f("ck_budget_closed_held_not_negative")),
        sa.PrimaryKeyConstraint("budget_id", "window_start_ms", name=op.f("pk_budget_closed")),
    )
    op.create_table(
        "hold",
        sa.Column("attempt_id", sa.Text(), nullable=False),
        sa.Column("replica_id", sa.Text(), nullable=False),
        sa.Column("replica_epoch", sa.BigInteger(), nullable=False),
        sa.Column("amount_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("budgets", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("remaining_nano_usd", sa.BigInteger(), nullable=True),
        sa.Column("remaining_scope", sa.Text(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("attempt_id", name=op.f("pk_hold")),
    )
    op.create_index(
        "ix_hold_open",
        "hold",
        ["replica_id"],
        unique=False,
        postgresql_where=sa.text("state = 'held'"),
        sqlite_where=sa.text("state = 'held'"),
    )
    op.create_table(
        "ledger",
        sa.Column("at_ms", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("entry_id", sa.Text(), nullable=False),
        sa.Column("attempt_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("amount_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("list_cost_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("hold_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("posted_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("budgets", sa.Text(), nullable=False),
        sa.Column("replica_id", sa.Text(), nullable=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("parent_task_id", sa.Text(), nullable=True),
        sa.Column("attempt_no", sa.Integer(), nullable=False),
        sa.Column("operation", sa.Text(), nullable=False),
        sa.Column("client", sa.Text(), nullable=False),
        sa.Column("model_requested", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("upstream_model", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("deployment", sa.Text(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("input_uncached", sa.BigInteger(), nullable=False),
        sa.Column("cache_read", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_5m", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_1h", sa.BigInteger(), nullable=False),
        sa.Column("cache_write_12h", sa.BigInteger(), nullable=False),
        sa.Column("output", sa.BigInteger(), nullable=False),
        sa.Column("reasoning", sa.BigInteger(), nullable=False),
        sa.Column("quality", sa.Text(), nullable=False),
        sa.Column("price_version", sa.Text(), nullable=False),
        sa.Column("finish", sa.Text(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("latency_ms", sa.BigInteger(), nullable=False),
        sa.Column("first_token_ms", sa.BigInteger(), nullable=True),
        sa.Column("upstream_request_id", sa.Text(), nullable=False),
        sa.Column("service_tier", sa.Text(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("at_ms", "entry_id", name=op.f("pk_ledger")),
        postgresql_partition_by="RANGE (at_ms)",
    )
    op.create_index("ix_ledger_request_id", "ledger", ["request_id"], unique=False)
    op.create_index("ix_ledger_task_id_at_ms", "ledger", ["task_id", "at_ms"], unique=False)
    op.create_index(
        "uq_ledger_correct",
        "ledger",
        ["attempt_id", "at_ms"],
        unique=True,
        postgresql_where=sa.text("kind = 'correct'"),
        sqlite_where=sa.text("kind = 'correct'"),
    )
    op.create_index(
        "uq_ledger_terminal",
        "ledger",
        ["attempt_id", "at_ms"],
        unique=True,
        postgresql_where=sa.text("kind <> 'correct'"),
        sqlite_where=sa.text("kind <> 'correct'"),
    )
    op.create_table(
        "outbox",
        sa.Column("outbox_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("dedupe", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("delivered_at_ms", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("outbox_id", name=op.f("pk_outbox")),
    )
    op.create_index("ix_outbox_dedupe", "outbox", ["dedupe"], unique=True)
    op.create_table(
        "replica",
        sa.Column("replica_id", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("started_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("replica_id", name=op.f("pk_replica")),
    )
    op.create_table(
        "revision",
        sa.Column("one", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("one = 1", name=op.f("ck_revision_single_row")),
        sa.PrimaryKeyConstraint("one", name=op.f("pk_revision")),
    )
    op.create_table(
        "task",
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("external_id", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("parent_task_id", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("last_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("attempts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cost_nano_usd", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("list_cost_nano_usd", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("input_uncached", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cache_read", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cache_write_5m", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cache_write_1h", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cache_write_12h", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("output", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("reasoning", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint("task_id", name=op.f("pk_task")),
    )
    op.create_index("ix_task_key_id_last_at_ms", "task", ["key_id", "last_at_ms"], unique=False)
    op.create_index("ix_task_last_at_ms", "task", ["last_at_ms"], unique=False)
    op.create_table(
        "team",
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("models", sa.Text(), nullable=False),
        sa.Column("requests_per_min", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_min", sa.BigInteger(), nullable=True),
        sa.Column("concurrent", sa.BigInteger(), nullable=True),
        sa.Column("default_task_budget_nano_usd", sa.BigInteger(), nullable=True),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("team_id", name=op.f("pk_team")),
    )
    op.create_index("ix_team_revision", "team", ["revision"], unique=False)
    op.create_index("ix_team_tenant_id_name", "team", ["tenant_id", "name"], unique=True)
    op.create_table(
        "tenant",
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant_id", name=op.f("pk_tenant")),
    )
    op.create_table(
        "usage_hour",
        sa.Column("hour_ms", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("deployment", sa.Text(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("client", sa.Text(), nullable=False),
        sa.Column("attempts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("errors", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("retries", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("retries_cost_nano_usd", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cost_nano_usd", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("list_cost_nano_usd", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("input_uncached", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cache_read", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cache_write_5m", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cache_write_1h", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cache_write_12h", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("output", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("reasoning", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.PrimaryKeyConstraint(
            "hour_ms",
            "tenant_id",
            "team_id",
            "key_id",
            "model",
            "provider",
            "deployment",
            "tier",
            "client",
            name=op.f("pk_usage_hour"),
        ),
    )
    op.create_table(
        "virtual_key",
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column("secret_hmac", sa.LargeBinary(), nullable=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("team_id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("models", sa.Text(), nullable=False),
        sa.Column("requests_per_min", sa.BigInteger(), nullable=True),
        sa.Column("tokens_per_min", sa.BigInteger(), nullable=True),
        sa.Column("concurrent", sa.BigInteger(), nullable=True),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("task_id", sa.Text(), nullable=True),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key_id", name=op.f("pk_virtual_key")),
    )
    op.create_index("ix_virtual_key_revision", "virtual_key", ["revision"], unique=False)
    op.create_index("ix_virtual_key_team_id", "virtual_key", ["team_id"], unique=False)

    op.execute("INSERT INTO revision (one, number) VALUES (1, 0)")
    if op.get_context().dialect.name == "postgresql":
        # The monthly partitions are made by the running gateway, ahead of time (storage/partitions.py).
        op.execute("CREATE TABLE ledger_default PARTITION OF ledger DEFAULT")


def downgrade() -> None:
    for table in (
        "virtual_key",
        "usage_hour",
        "tenant",
        "team",
        "task",
        "revision",
        "replica",
        "outbox",
        "ledger",
        "hold",
        "budget_closed",
        "budget",
        "audit",
    ):
        op.drop_table(table)
