"""Sums by team and hour, of misses by cause, and of refused holds; failed attempts' cost; of tasks the same sums.

Safe while the version before still writes: what it leaves out of team_hour is mended by `storage/rollups.py`.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_TOKENS = (
    "input_uncached",
    "cache_read",
    "cache_write_5m",
    "cache_write_1h",
    "cache_write_12h",
    "output",
    "reasoning",
)
_SUMS = (
    "attempts",
    "errors",
    "retries",
    "retries_cost_nano_usd",
    "failed_cost_nano_usd",
    "cost_nano_usd",
    "list_cost_nano_usd",
    *_TOKENS,
)
_TEAM = ("tenant_id", "team_id")
_ALL = (*_TEAM, "key_id", "model", "provider", "deployment", "tier", "client")
_OF_TASKS = ("errors", "retries", "retries_cost_nano_usd", "failed_cost_nano_usd")


def _sum(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), server_default=sa.text("0"), nullable=False)


def _hourly(name: str, keys: tuple[str, ...], sums: tuple[str, ...]) -> None:
    op.create_table(
        name,
        sa.Column("hour_ms", sa.BigInteger(), autoincrement=False, nullable=False),
        *(sa.Column(key, sa.Text(), nullable=False) for key in keys),
        *map(_sum, sums),
        sa.PrimaryKeyConstraint("hour_ms", *keys, name=op.f(f"pk_{name}")),
    )


def upgrade() -> None:
    op.add_column("usage_hour", _sum("failed_cost_nano_usd"))
    for name in _OF_TASKS:
        op.add_column("task", _sum(name))
    _hourly("team_hour", _TEAM, _SUMS)
    _hourly("miss_hour", (*_ALL, "cause"), ("attempts", "lost_tokens", "lost_nano_usd"))
    _hourly("refused_hour", (*_ALL, "scope_kind"), ("refusals", "unbounded", "refused_nano_usd"))
    sums = ", ".join(f"CAST(sum({name}) AS BIGINT)" for name in _SUMS)
    op.execute(
        f"INSERT INTO team_hour (hour_ms, tenant_id, team_id, {', '.join(_SUMS)}) "  # noqa: S608
        f"SELECT hour_ms, tenant_id, team_id, {sums} FROM usage_hour GROUP BY hour_ms, tenant_id, team_id"
    )
    op.execute(
        f"INSERT INTO miss_hour (hour_ms, {', '.join(_ALL)}, cause, attempts, lost_tokens, lost_nano_usd) "  # noqa: S608
        f"SELECT m.at_ms / 3600000 * 3600000, {', '.join(f'm.{key}' for key in _ALL).replace('m.tier', 'l.tier')}, "
        "m.cause, count(*), CAST(sum(m.lost_tokens) AS BIGINT), CAST(sum(m.lost_nano_usd) AS BIGINT) "
        "FROM prefix_miss m JOIN ledger l "
        "ON l.attempt_id = m.attempt_id AND l.at_ms = m.at_ms AND l.kind <> 'correct' "
        "GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10"
    )


def downgrade() -> None:
    for name in ("refused_hour", "miss_hour", "team_hour"):
        op.drop_table(name)
    for name in _OF_TASKS:
        op.drop_column("task", name)
    op.drop_column("usage_hour", "failed_cost_nano_usd")
