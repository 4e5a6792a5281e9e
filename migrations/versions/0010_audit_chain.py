"""The audit trail as a chain: each entry carries the hash of the one before it."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_CHAINED = sa.text("number IS NOT NULL")


def upgrade() -> None:
    op.add_column("audit", sa.Column("number", sa.BigInteger(), nullable=True))
    op.add_column("audit", sa.Column("hash", sa.Text(), nullable=True))
    op.create_index(
        "ix_audit_number", "audit", ["number"], unique=True, postgresql_where=_CHAINED, sqlite_where=_CHAINED
    )
    op.add_column(
        "revision", sa.Column("audit_head", sa.Text(), nullable=False, server_default=sa.text("''"))
    )


def downgrade() -> None:
    op.drop_column("revision", "audit_head")
    op.drop_index("ix_audit_number", "audit")
    op.drop_column("audit", "hash")
    op.drop_column("audit", "number")
