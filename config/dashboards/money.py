"""What is spent and saved, and by whom."""

from __future__ import annotations

from config.dashboards.panels import (
    GREEN,
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

_TEAMS_SQL = """\
SELECT u.team_id AS "Team", t.name AS "Name", sum(u.cost_nano_usd) / 1e9 AS "Cost",
  sum(u.list_cost_nano_usd - u.cost_nano_usd) / 1e9 AS "Saved",
  sum(u.retries_cost_nano_usd) / 1e9 AS "On retries", sum(u.failed_cost_nano_usd) / 1e9 AS "On failures",
  sum(u.attempts) AS "Attempts"
FROM team_hour u LEFT JOIN team t USING (team_id)
WHERE u.hour_ms >= $__from AND u.hour_ms < $__to
GROUP BY u.team_id, t.name ORDER BY "Cost" DESC LIMIT 50"""

_MODELS_SQL = """\
SELECT model AS "Model", provider AS "Provider", tier AS "Tier", sum(cost_nano_usd) / 1e9 AS "Cost",
  sum(list_cost_nano_usd - cost_nano_usd) / 1e9 AS "Saved",
  100.0 * sum(cache_read)
    / NULLIF(sum(input_uncached + cache_read + cache_write_5m + cache_write_1h + cache_write_12h), 0)
    AS "Read from cache",
  sum(output) AS "Output tokens", sum(attempts) AS "Attempts"
FROM usage_hour WHERE hour_ms >= $__from AND hour_ms < $__to
GROUP BY model, provider, tier ORDER BY "Cost" DESC LIMIT 50"""

_KEYS_SQL = """\
SELECT u.key_id AS "Key", k.name AS "Name", u.team_id AS "Team", u.client AS "Client",
  sum(u.cost_nano_usd) / 1e9 AS "Cost", sum(u.list_cost_nano_usd - u.cost_nano_usd) / 1e9 AS "Saved",
  sum(u.retries_cost_nano_usd) / 1e9 AS "On retries", sum(u.attempts) AS "Attempts", sum(u.errors) AS "Errors"
FROM usage_hour u LEFT JOIN virtual_key k USING (key_id)
WHERE u.hour_ms >= $__from AND u.hour_ms < $__to
GROUP BY u.key_id, k.name, u.team_id, u.client ORDER BY "Cost" DESC LIMIT 50"""

_COST, _LIST = "tollhouse_cost_usd_total", "tollhouse_list_cost_usd_total"

MONEY = Dashboard(
    "tollhouse-money",
    "Tollhouse / Spend and savings",
    "What is spent, by whom and on what, what caches save, and what is lost. A click on a team shows its tasks.",
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
                    "On refused holds",
                    "What holds would have reserved that budgets refused.",
                    "currencyUSD",
                    "sum(increase(tollhouse_refused_usd_total[$__range])) or vector(0)",
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
            "Savings, in dollars an hour",
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
                by(
                    "cause",
                    "tollhouse_cache_lost_usd_total",
                    "Lost by cause, in dollars an hour",
                    "What misses of providers' caches cost more than hits would have.",
                    "currencyUSD",
                    per_hour=True,
                ),
            ],
        ),
        Section(
            "From the ledger",
            [
                Table(
                    "Teams that spend most",
                    "By whole hours, exact over all replicas. Needs Postgres.",
                    _TEAMS_SQL,
                    {
                        "Cost": "currencyUSD",
                        "Saved": "currencyUSD",
                        "On retries": "currencyUSD",
                        "On failures": "currencyUSD",
                    },
                    {"Team": TO_TEAM},
                ),
                Table(
                    "Models",
                    "By whole hours, exact over all replicas. Needs Postgres.",
                    _MODELS_SQL,
                    {"Cost": "currencyUSD", "Saved": "currencyUSD", "Read from cache": "percent"},
                ),
                Table(
                    "Keys that spend most",
                    "By whole hours, exact over all replicas. Needs Postgres.",
                    _KEYS_SQL,
                    {"Cost": "currencyUSD", "Saved": "currencyUSD", "On retries": "currencyUSD"},
                    {"Team": TO_TEAM},
                ),
            ],
        ),
    ],
)
