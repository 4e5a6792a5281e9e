"""What breakers saw and did, and who let the tasks that they stopped go on; since when a hold has no owner."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "breaker_event",
        sa.Column("event_id", sa.Text(), nullable=False),
        *(
            sa.Column(name, sa.Text(), nullable=False)
            for name in ("task_id", "key_id", "breaker", "action", "message", "evidence")
        ),
        sa.Column("tripped", sa.Boolean(), nullable=False),
        sa.Column("at_ms", sa.BigInteger(), nullable=False),
        sa.Column("resumed_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("resumed_by", sa.Text(), nullable=True),
        sa.Column("revision", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_breaker_event")),
    )
    op.create_index("ix_breaker_event_at_ms", "breaker_event", ["at_ms"], unique=False)
    op.create_index("ix_breaker_event_revision", "breaker_event", ["revision"], unique=False)
    op.create_index("ix_breaker_event_task_id_at_ms", "breaker_event", ["task_id", "at_ms"], unique=False)
    op.add_column("hold", sa.Column("orphaned_at_ms", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.execute("ALTER TABLE hold DROP COLUMN orphaned_at_ms")
    op.drop_table("breaker_event")
