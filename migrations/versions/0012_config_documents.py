"""Configuration that operators write over the admin API: providers, credentials (never their secrets), deployments, tiers,
rules, virtual models. What is deleted stays as a row without a body, so that its version goes on.
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "config_document",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("kind", "name", "body")),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in ("version", "created_at_ms", "updated_at_ms", "revision")
        ),
        sa.Column("deleted_at_ms", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("kind", "name", name=op.f("pk_config_document")),
    )
    op.create_index("ix_config_document_revision", "config_document", ["revision"], unique=False)


def downgrade() -> None:
    op.drop_table("config_document")
