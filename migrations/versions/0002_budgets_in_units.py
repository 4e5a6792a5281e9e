"""Budgets in tokens and calls, shadow budgets, overrides; declared tasks with children and outcomes."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

#: In both directions; RENAME COLUMN changes constraints along with it, on either store.
RENAMED = (
    ("budget", "limit_nano_usd", "limit_amount"),
    ("budget", "posted_nano_usd", "posted_amount"),
    ("budget", "held_nano_usd", "held_amount"),
    ("budget_closed", "limit_nano_usd", "limit_amount"),
    ("budget_closed", "posted_nano_usd", "posted_amount"),
    ("budget_closed", "held_nano_usd", "held_amount"),
)


def _text(name: str, default: str) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), server_default=sa.text(f"'{default}'"), nullable=False)


def _int(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)


def _maybe_int(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=True)


def _added() -> tuple[tuple[str, tuple[sa.Column, ...]], ...]:
    return (
        (
            "budget",
            (
                _text("unit", "usd"),
                _text("mode", "enforce"),
                _text("alert_percents", "[50,80,90,100]"),
                _int("landing_percent"),
                _maybe_int("override_limit_amount"),
                _maybe_int("override_until_ms"),
                _text("ancestors", "[]"),
                _int("carved_amount"),
                _int("would_refuse"),
            ),
        ),
        ("budget_closed", (_text("unit", "usd"), _int("would_refuse"))),
        ("hold", (_int("input_tokens"), _int("output_tokens"), _int("calls"), _text("answer", "{}"))),
        (
            "ledger",
            (_int("charged_input_tokens"), _int("charged_output_tokens"), _int("charged_calls")),
        ),
        (
            "task",
            (
                _text("name", ""),
                _text("labels", "{}"),
                sa.Column("breakers", sa.Text(), nullable=True),
                _int("depth"),
                _text("state_reason", ""),
                sa.Column("success", sa.Boolean(), nullable=True),
                sa.Column("score", sa.Float(), nullable=True),
                sa.Column("outcome_labels", sa.Text(), nullable=True),
                _maybe_int("outcome_at_ms"),
            ),
        ),
        ("virtual_key", (sa.Column("declared_by", sa.Text(), nullable=True),)),
    )


def upgrade() -> None:
    for table, before, after in RENAMED:
        op.execute(f"ALTER TABLE {table} RENAME COLUMN {before} TO {after}")
    for table, columns in _added():
        for column in columns:
            op.add_column(table, column)
    op.drop_index("ix_budget_scope_window_zone", "budget")
    op.create_index(
        "ix_budget_scope_unit_window_zone", "budget", ["scope", "unit", "window", "zone"], unique=True
    )
    op.create_index(
        "ix_task_parent_task_id",
        "task",
        ["parent_task_id"],
        unique=False,
        postgresql_where=sa.text("parent_task_id IS NOT NULL"),
        sqlite_where=sa.text("parent_task_id IS NOT NULL"),
    )
    # The first answer of each hold, which a repeated request for it gets again. Scopes that JSON would have to
    # escape lose the characters in question; nothing but a text for people is made of them.
    op.execute(
        "UPDATE hold SET answer = '{\"amount_nano_usd\":' || amount_nano_usd || ',\"task_step\":' || step || "
        "CASE WHEN remaining_nano_usd IS NULL THEN '' ELSE ',\"remaining_nano_usd\":' || remaining_nano_usd || "
        "',\"remaining_scope\":\"' || replace(replace(remaining_scope, '\\', ''), '\"', '') || '\"' END || '}'"
    )
    op.execute("ALTER TABLE hold DROP COLUMN remaining_nano_usd")
    op.execute("ALTER TABLE hold DROP COLUMN remaining_scope")


def downgrade() -> None:
    """Budgets in other units than dollars cannot be kept, and open holds forget what remained after them."""
    op.add_column("hold", _maybe_int("remaining_nano_usd"))
    op.add_column("hold", _text("remaining_scope", ""))
    op.drop_index("ix_task_parent_task_id", "task")
    op.drop_index("ix_budget_scope_unit_window_zone", "budget")
    op.execute("DELETE FROM budget WHERE unit <> 'usd'")
    op.execute("DELETE FROM budget_closed WHERE unit <> 'usd'")
    op.create_index("ix_budget_scope_window_zone", "budget", ["scope", "window", "zone"], unique=True)
    for table, columns in _added():
        for column in columns:
            op.execute(f"ALTER TABLE {table} DROP COLUMN {column.name}")
    for table, before, after in RENAMED:
        op.execute(f"ALTER TABLE {table} RENAME COLUMN {after} TO {before}")
