"""Webhooks that people add over the admin API, and what became of each message at each of them."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_WAITING = sa.text("delivered_at_ms IS NULL AND dead_at_ms IS NULL")
_UNSPREAD = sa.text("spread = 0")


def upgrade() -> None:
    op.create_table(
        "webhook",
        sa.Column("webhook_id", sa.Text(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("name", "url", "kinds")),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in ("secret_version", "created_at_ms", "revision")
        ),
        sa.PrimaryKeyConstraint("webhook_id", name=op.f("pk_webhook")),
    )
    op.create_table(
        "webhook_delivery",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("webhook_id", "outbox_id", "kind")),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0"))
            for name in ("attempts", "next_at_ms")
        ),
        *(sa.Column(name, sa.BigInteger(), nullable=True) for name in ("delivered_at_ms", "dead_at_ms")),
        sa.Column("last_error", sa.Text(), nullable=False, server_default=sa.text("''")),
        sa.PrimaryKeyConstraint("webhook_id", "outbox_id", name=op.f("pk_webhook_delivery")),
    )
    op.create_index(
        "ix_webhook_delivery_webhook_id_next_at_ms",
        "webhook_delivery",
        ["webhook_id", "next_at_ms"],
        unique=False,
        postgresql_where=_WAITING,
        sqlite_where=_WAITING,
    )
    op.create_index("ix_webhook_delivery_created_at_ms", "webhook_delivery", ["created_at_ms"], unique=False)
    op.add_column("outbox", sa.Column("spread", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
    op.create_index(
        "ix_outbox_spread",
        "outbox",
        ["outbox_id"],
        unique=False,
        postgresql_where=_UNSPREAD,
        sqlite_where=_UNSPREAD,
    )


def downgrade() -> None:
    op.drop_index("ix_outbox_spread", "outbox")
    op.drop_column("outbox", "spread")
    op.drop_table("webhook_delivery")
    op.drop_table("webhook")
