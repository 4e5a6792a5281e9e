"""Keys of the admin API with roles, and its replies to requests that are sent again."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "admin_key",
        sa.Column("admin_key_id", sa.Text(), nullable=False),
        sa.Column("secret_hmac", sa.LargeBinary(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("name", "role", "tenant_id", "team_id")),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_at_ms", sa.BigInteger(), nullable=True),
        sa.Column("revoked_at_ms", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("admin_key_id", name=op.f("pk_admin_key")),
    )
    op.create_table(
        "admin_reply",
        sa.Column("key_digest", sa.LargeBinary(), nullable=False),
        sa.Column("request_digest", sa.LargeBinary(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("created_at_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key_digest", name=op.f("pk_admin_reply")),
    )
    op.create_index("ix_admin_reply_created_at_ms", "admin_reply", ["created_at_ms"], unique=False)


def downgrade() -> None:
    op.drop_table("admin_reply")
    op.drop_table("admin_key")
