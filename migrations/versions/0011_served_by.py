"""Which of a deployment's own replicas served an attempt: a column of the ledger, and of all its partitions."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ledger", sa.Column("served_by", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("ledger", "served_by")
