"""Why attempts read less from their providers' caches than they could have."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_TEXTS = (
    "request_id",
    "tenant_id",
    "team_id",
    "key_id",
    "task_id",
    "model",
    "provider",
    "deployment",
    "client",
    "verdict",
    "cause",
)


def upgrade() -> None:
    op.create_table(
        "prefix_miss",
        sa.Column("attempt_id", sa.Text(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in _TEXTS),
        sa.Column("lost_tokens", sa.BigInteger(), nullable=False),
        sa.Column("lost_nano_usd", sa.BigInteger(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("attempt_id", name=op.f("pk_prefix_miss")),
    )
    op.create_index("ix_prefix_miss_at_ms", "prefix_miss", ["at_ms"], unique=False)
    op.create_index("ix_prefix_miss_request_id", "prefix_miss", ["request_id"], unique=False)
    op.create_index("ix_prefix_miss_task_id_at_ms", "prefix_miss", ["task_id", "at_ms"], unique=False)


def downgrade() -> None:
    op.drop_table("prefix_miss")
