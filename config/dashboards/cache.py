"""What providers read from their caches, what they did not, why, and what it costs."""

from __future__ import annotations

from config.dashboards.panels import (
    GREEN,
    RATE,
    RED,
    TO_TASK,
    TO_TEAM,
    YELLOW,
    Dashboard,
    Panel,
    Query,
    Section,
    Table,
    by,
    stat,
)

_COST, _LIST = "tollhouse_cost_usd_total", "tollhouse_list_cost_usd_total"
#: What was not read, from 1: a model that reads nothing has no series of reads, and must show as 0.
_READ_SHARE = (
    '1 - sum{by}(rate(tollhouse_tokens_total{{class=~"input_uncached|cache_write_.*"}}{window}))'
    ' / sum{by}(rate(tollhouse_tokens_total{{class!="output"}}{window}))'
)

_MISSES_SQL = """\
SELECT m.team_id AS "Team", m.client AS "Client", m.cause AS "Cause", m.model AS "Model",
  sum(m.attempts) AS "Calls", sum(m.lost_tokens) AS "Tokens", sum(m.lost_nano_usd) / 1e9 AS "Lost"
FROM miss_hour m WHERE m.hour_ms >= $__from AND m.hour_ms < $__to
GROUP BY m.team_id, m.client, m.cause, m.model ORDER BY "Lost" DESC LIMIT 50"""

_TASKS_SQL = """\
SELECT m.task_id AS "Task", m.team_id AS "Team", m.client AS "Client", m.cause AS "Cause",
  count(*) AS "Calls", sum(m.lost_tokens) AS "Tokens", sum(m.lost_nano_usd) / 1e9 AS "Lost"
FROM prefix_miss m WHERE m.at_ms >= $__from AND m.at_ms < $__to
GROUP BY m.task_id, m.team_id, m.client, m.cause ORDER BY "Lost" DESC LIMIT 50"""

CACHE = Dashboard(
    "tollhouse-cache",
    "Tollhouse / Caches",
    "Hit rate, misses by cause, and dollars lost; docs/operations.md explains each cause.",
    [
        Section(
            "In the chosen time",
            [
                stat(
                    "Input read from cache",
                    "Share of input tokens that providers read from their caches.",
                    "percentunit",
                    _READ_SHARE.format(by=" ", window="[$__range]"),
                    (RED, YELLOW, GREEN),
                    (0.3, 0.6),
                ),
                stat(
                    "Saved",
                    "What the same tokens would have cost without any cache, less what they cost.",
                    "currencyUSD",
                    f"sum(increase({_LIST}[$__range])) - sum(increase({_COST}[$__range]))",
                    (GREEN,),
                ),
                stat(
                    "Lost",
                    "What calls cost more than they would have, had they read all that a cache could have held.",
                    "currencyUSD",
                    "sum(increase(tollhouse_cache_lost_usd_total[$__range])) or vector(0)",
                    (YELLOW,),
                ),
                stat(
                    "Misses",
                    "Calls that read less than they could have.",
                    "short",
                    "sum(increase(tollhouse_cache_misses_total[$__range])) or vector(0)",
                ),
            ],
        ),
        Section(
            "Over time",
            [
                Panel(
                    "Saved by model, in dollars an hour",
                    "Cost without any cache less cost, by model. Below zero where writing costs more than is read later.",
                    "currencyUSD",
                    [
                        Query(
                            f"(sum by (model) (rate({_LIST}[1h])) - sum by (model) (rate({_COST}[1h]))) * 3600",
                            "{{model}}",
                        )
                    ],
                    below_zero=True,
                ),
                Panel(
                    "Read from cache, by model",
                    "Share of input tokens that providers read from their caches.",
                    "percentunit",
                    [
                        Query(_READ_SHARE.format(by=" by (model) ", window=RATE), "{{model}}"),
                    ],
                ),
                by(
                    "cause",
                    "tollhouse_cache_misses_total",
                    "Misses by cause",
                    "Calls a second that read less than they could have; docs/operations.md explains each cause.",
                    "cps",
                ),
                by(
                    "cause",
                    "tollhouse_cache_lost_usd_total",
                    "Lost by cause, in dollars an hour",
                    "What these misses cost.",
                    "currencyUSD",
                    per_hour=True,
                ),
                by(
                    "class",
                    "tollhouse_tokens_total",
                    "Tokens by billing class",
                    "Tokens a second, as providers bill them.",
                    "short",
                ),
                by(
                    "team",
                    "tollhouse_cache_lost_usd_total",
                    "Lost by team, in dollars an hour",
                    "Whose prompts change.",
                    "currencyUSD",
                    per_hour=True,
                ),
            ],
        ),
        Section(
            "From the ledger",
            [
                Table(
                    "Where it is lost",
                    "By whole hours, exact over all replicas. Needs Postgres.",
                    _MISSES_SQL,
                    {"Lost": "currencyUSD"},
                    {"Team": TO_TEAM},
                ),
                Table(
                    "Tasks that lost most",
                    "A click on a task shows its requests and why each was not read. Needs Postgres.",
                    _TASKS_SQL,
                    {"Lost": "currencyUSD"},
                    {"Task": TO_TASK, "Team": TO_TEAM},
                ),
            ],
        ),
    ],
)
