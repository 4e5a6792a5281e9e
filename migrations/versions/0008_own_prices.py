"""Price rows that people state over the admin API."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "own_price",
        sa.Column("price_id", sa.Text(), nullable=False),
        sa.Column("price", sa.Text(), nullable=False),
        sa.Column("valid_from_ms", sa.BigInteger(), nullable=False),
        sa.Column("valid_to_ms", sa.BigInteger(), nullable=True),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("withdrawn_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("price_id", name=op.f("pk_own_price")),
    )
    op.create_index("ix_own_price_revision", "own_price", ["revision"], unique=False)
    op.create_index("ix_own_price_price", "own_price", ["price"], unique=False)


def downgrade() -> None:
    op.drop_table("own_price")
