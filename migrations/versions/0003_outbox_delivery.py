"""How often a message of the outbox was tried, when it is next, and whether it was given up."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_WAITING = sa.text("delivered_at_ms IS NULL AND dead_at_ms IS NULL")


def upgrade() -> None:
    for name in ("attempts", "next_at_ms"):
        op.add_column("outbox", sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False))
    op.add_column("outbox", sa.Column("dead_at_ms", sa.BigInteger(), nullable=True))
    op.add_column("outbox", sa.Column("last_error", sa.Text(), server_default=sa.text("''"), nullable=False))
    op.create_index(
        "ix_outbox_next_at_ms",
        "outbox",
        ["next_at_ms"],
        unique=False,
        postgresql_where=_WAITING,
        sqlite_where=_WAITING,
    )


def downgrade() -> None:
    op.drop_index("ix_outbox_next_at_ms", "outbox")
    for name in ("attempts", "next_at_ms", "dead_at_ms", "last_error"):
        op.execute(f"ALTER TABLE outbox DROP COLUMN {name}")
