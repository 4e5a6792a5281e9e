"""What is spent, saved, lost and refused."""

from __future__ import annotations

from config.dashboards.panels import (
    GREEN,
    RATE,
    RED,
    YELLOW,
    Dashboard,
    Panel,
    Query,
    Section,
    Table,
    by,
    stat,
)

_BUDGETS_SQL = """\
WITH counting AS (
  SELECT b.*, now.ms AS now_ms, rolling.ms AS rolling_ms,
    b.window_end_ms IS NULL OR b.window_end_ms > now.ms OR b.window_start_ms >= now.ms - rolling.ms AS is_open
  FROM budget b,
    LATERAL (SELECT extract(epoch FROM clock_timestamp()) * 1000 AS ms) now,
    LATERAL (SELECT substring(b."window" FROM '([0-9]+)[smhdw]$')::numeric * 1000
      * CASE right(b."window", 1) WHEN 's' THEN 1 WHEN 'm' THEN 60 WHEN 'h' THEN 3600
             WHEN 'd' THEN 86400 WHEN 'w' THEN 604800 END AS ms) rolling
  WHERE b.scope NOT LIKE 'task:%'
), counted AS (
  SELECT c.*, CASE unit WHEN 'usd' THEN 1e9 ELSE 1 END AS per_unit,
    CASE WHEN c.override_until_ms > c.now_ms THEN c.override_limit_amount ELSE c.limit_amount END AS in_force,
    CASE WHEN is_open THEN c.posted_amount ELSE 0 END + earlier.posted AS spent,
    CASE WHEN is_open THEN c.held_amount ELSE 0 END + earlier.held AS held
  FROM counting c, LATERAL (
    SELECT COALESCE(sum(e.posted_amount), 0) AS posted, COALESCE(sum(e.held_amount), 0) AS held
    FROM budget_closed e WHERE e.budget_id = c.budget_id AND e.window_start_ms >= c.now_ms - c.rolling_ms
  ) earlier
)
SELECT scope AS "Budget", "window" AS "Window", unit AS "Unit", mode AS "Mode", on_exceed AS "At its end",
  100.0 * (spent + held) / NULLIF(in_force, 0) AS "Used", spent / per_unit AS "Spent", held / per_unit AS "Held",
  in_force / per_unit AS "Limit", would_refuse AS "Would have refused"
FROM counted ORDER BY "Used" DESC NULLS LAST LIMIT 50"""

_TASKS_SQL = """\
SELECT task_id AS "Task", team_id AS "Team", state AS "State", state_reason AS "Why", steps AS "Steps",
  cost_nano_usd / 1e9 AS "Cost", (list_cost_nano_usd - cost_nano_usd) / 1e9 AS "Saved",
  100.0 * cache_read / NULLIF(input_uncached + cache_read + cache_write_5m + cache_write_1h + cache_write_12h, 0)
    AS "Read from cache",
  to_timestamp(last_at_ms / 1000.0) AS "Last step"
FROM task WHERE last_at_ms >= $__from AND last_at_ms < $__to ORDER BY cost_nano_usd DESC LIMIT 50"""

_KEYS_SQL = """\
SELECT u.key_id AS "Key", k.name AS "Name", u.team_id AS "Team", u.client AS "Client",
  sum(u.cost_nano_usd) / 1e9 AS "Cost", sum(u.list_cost_nano_usd - u.cost_nano_usd) / 1e9 AS "Saved",
  sum(u.retries_cost_nano_usd) / 1e9 AS "On retries", sum(u.attempts) AS "Attempts", sum(u.errors) AS "Errors"
FROM usage_hour u LEFT JOIN virtual_key k USING (key_id)
WHERE u.hour_ms >= $__from AND u.hour_ms < $__to
GROUP BY u.key_id, k.name, u.team_id, u.client ORDER BY "Cost" DESC LIMIT 50"""

_COST, _LIST = "tollhouse_cost_usd_total", "tollhouse_list_cost_usd_total"
#: What was not read, from 1: a model that reads nothing has no series of reads, and must show as 0.
_READ_SHARE = (
    '1 - sum{by}(rate(tollhouse_tokens_total{{class=~"input_uncached|cache_write_.*"}}{window}))'
    ' / sum{by}(rate(tollhouse_tokens_total{{class!="output"}}{window}))'
)

MONEY = Dashboard(
    "tollhouse-money",
    "Tollhouse / Money",
    "What is spent, what caches save, what is lost, what was refused, and which budgets end soon.",
    [
        Section(
            "In the chosen time",
            [
                stat(
                    "Spent",
                    "Cost charged to the ledger.",
                    "currencyUSD",
                    f"sum(increase({_COST}[$__range]))",
                ),
                stat(
                    "Saved by caches",
                    "What the same tokens would have cost without any cache, less what they cost.",
                    "currencyUSD",
                    f"sum(increase({_LIST}[$__range])) - sum(increase({_COST}[$__range]))",
                    (GREEN,),
                ),
                stat(
                    "Lost to changed prompts",
                    "What calls cost more than they would have, had they read all that a provider's cache could have held.",
                    "currencyUSD",
                    "sum(increase(tollhouse_cache_lost_usd_total[$__range])) or vector(0)",
                    (YELLOW,),
                ),
                stat(
                    "Input read from cache",
                    "Share of input tokens that providers read from their caches.",
                    "percentunit",
                    _READ_SHARE.format(by=" ", window="[$__range]"),
                    (RED, YELLOW, GREEN),
                    (0.3, 0.6),
                ),
                stat(
                    "Refused by budgets",
                    "Requests refused because a budget would not have held them.",
                    "short",
                    'sum(increase(tollhouse_refusals_total{kind="budget_exceeded"}[$__range])) or vector(0)',
                ),
                stat(
                    "Spending now",
                    "Dollars an hour, from the last five minutes.",
                    "currencyUSD",
                    f"sum(rate({_COST}[5m])) * 3600",
                ),
            ],
        ),
        Section(
            "Spend, in dollars an hour",
            [
                by(
                    "team",
                    _COST,
                    "By team",
                    "Cost in the ledger, by the id of the team.",
                    "currencyUSD",
                    per_hour=True,
                ),
                by("model", _COST, "By model", "Cost in the ledger, by model.", "currencyUSD", per_hour=True),
                by(
                    "client",
                    "tollhouse_client_cost_usd_total",
                    "By client",
                    "Cost in the ledger, by the kind of agent that asked.",
                    "currencyUSD",
                    per_hour=True,
                ),
                by(
                    "provider",
                    _COST,
                    "By provider",
                    "Cost in the ledger, by who bills it.",
                    "currencyUSD",
                    per_hour=True,
                ),
            ],
        ),
        Section(
            "Caches",
            [
                Panel(
                    "Saved, in dollars an hour",
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
            "Limits",
            [
                by(
                    "kind",
                    "tollhouse_refusals_total",
                    "Refusals by kind",
                    "Requests a second that were refused before anything was spent.",
                    "reqps",
                ),
                Panel(
                    "Breakers",
                    "What breakers had to say, once per episode: observed, told, stopped.",
                    "cps",
                    [
                        Query(
                            f"sum by (breaker, action) (rate(tollhouse_breaker_episodes_total{RATE}))",
                            "{{breaker}}: {{action}}",
                        )
                    ],
                    stacked=True,
                ),
                Table(
                    "Budgets near their end",
                    "Spent and held against the limit in force, the fullest first; budgets of single tasks are left out. "
                    "Needs Postgres.",
                    _BUDGETS_SQL,
                    {"Used": "percent"},
                ),
                Table(
                    "Tasks that spend most",
                    "Of those with a step in the chosen time; the cost is that of the whole task. Needs Postgres.",
                    _TASKS_SQL,
                    {
                        "Cost": "currencyUSD",
                        "Saved": "currencyUSD",
                        "Read from cache": "percent",
                        "Last step": "dateTimeAsIso",
                    },
                ),
                Table(
                    "Keys that spend most",
                    "By whole hours, exact over all replicas. Needs Postgres.",
                    _KEYS_SQL,
                    {"Cost": "currencyUSD", "Saved": "currencyUSD", "On retries": "currencyUSD"},
                ),
            ],
        ),
    ],
)
