"""What budgets hold, refuse, and who is about to reach the end of one."""

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

#: Budgets as they count now: rolling windows are buckets, of which the closed ones lie in budget_closed.
_COUNTED_SQL = """\
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
)"""

_BUDGETS_SQL = f"""\
{_COUNTED_SQL}
SELECT scope AS "Budget", "window" AS "Window", unit AS "Unit", mode AS "Mode", on_exceed AS "At its end",
  100.0 * (spent + held) / NULLIF(in_force, 0) AS "Used", spent / per_unit AS "Spent", held / per_unit AS "Held",
  in_force / per_unit AS "Limit", would_refuse AS "Would have refused"
FROM counted ORDER BY "Used" DESC NULLS LAST LIMIT 50"""  # noqa: S608

#: Dollars an hour over the last day, from whole hours and the one under way.
_SOON_SQL = f"""\
{_COUNTED_SQL}, slope AS (
  SELECT u.scope, sum(u.cost_nano_usd) / 24.0 AS per_hour FROM (
    SELECT 'team:' || team_id AS scope, cost_nano_usd, hour_ms FROM team_hour
    UNION ALL SELECT 'tenant:' || tenant_id, cost_nano_usd, hour_ms FROM team_hour
    UNION ALL SELECT 'key:' || key_id, cost_nano_usd, hour_ms FROM usage_hour
  ) u WHERE u.hour_ms > extract(epoch FROM clock_timestamp()) * 1000 - 86400000 GROUP BY u.scope
)
SELECT c.scope AS "Budget", c."window" AS "Window", c.mode AS "Mode",
  CASE WHEN c.scope LIKE 'team:%' THEN substring(c.scope FROM 6) END AS "Team",
  100.0 * (c.spent + c.held) / NULLIF(c.in_force, 0) AS "Used", (c.in_force - c.spent - c.held) / 1e9 AS "Left",
  s.per_hour / 1e9 AS "Dollars an hour",
  3600.0 * greatest(c.in_force - c.spent - c.held, 0) / s.per_hour AS "Used up in"
FROM counted c JOIN slope s USING (scope)
WHERE c.unit = 'usd' AND s.per_hour > 0 ORDER BY "Used up in" LIMIT 50"""  # noqa: S608

_TASK_BUDGETS_SQL = """\
SELECT substring(b.scope FROM 6) AS "Task", t.team_id AS "Team", t.state AS "State", b.unit AS "Unit",
  b.on_exceed AS "At its end", 100.0 * (b.posted_amount + b.held_amount) / NULLIF(b.limit_amount, 0) AS "Used",
  b.posted_amount / CASE b.unit WHEN 'usd' THEN 1e9 ELSE 1 END AS "Spent",
  b.limit_amount / CASE b.unit WHEN 'usd' THEN 1e9 ELSE 1 END AS "Limit"
FROM task t JOIN budget b ON b.scope = 'task:' || t.task_id
WHERE t.last_at_ms >= $__from AND t.last_at_ms < $__to ORDER BY "Used" DESC NULLS LAST LIMIT 50"""

_REFUSED_SQL = """\
SELECT r.team_id AS "Team", k.name AS "Key", r.client AS "Client", r.scope_kind AS "Refused by",
  sum(r.refusals) AS "Refusals", sum(r.refused_nano_usd) / 1e9 AS "Would have held",
  sum(r.unbounded) AS "Of no known amount"
FROM refused_hour r LEFT JOIN virtual_key k USING (key_id)
WHERE r.hour_ms >= $__from AND r.hour_ms < $__to
GROUP BY r.team_id, k.name, r.client, r.scope_kind ORDER BY "Refusals" DESC LIMIT 50"""

BUDGETS = Dashboard(
    "tollhouse-budgets",
    "Tollhouse / Budgets",
    "Who is about to reach the end of a budget, what budgets refuse, and how much more is held than is used.",
    [
        Section(
            "In the chosen time",
            [
                stat(
                    "Requests refused",
                    "Because a budget would not have held them.",
                    "short",
                    'sum(increase(tollhouse_refusals_total{kind="budget_exceeded"}[$__range])) or vector(0)',
                    (GREEN, YELLOW),
                    (1,),
                ),
                stat(
                    "Holds refused",
                    "Of all attempts that asked for one, by budgets and by the state of tasks.",
                    "short",
                    "sum(increase(tollhouse_holds_refused_total[$__range])) or vector(0)",
                ),
                stat(
                    "Would have held",
                    "What the refused holds would have reserved.",
                    "currencyUSD",
                    "sum(increase(tollhouse_refused_usd_total[$__range])) or vector(0)",
                ),
                stat(
                    "Held",
                    "Money held before calls were sent.",
                    "currencyUSD",
                    "sum(increase(tollhouse_held_usd_total[$__range]))",
                ),
                stat(
                    "Used of what was held",
                    "Cost as a share of holds; the rest was reserved for nothing, for as long as the call took.",
                    "percentunit",
                    "sum(increase(tollhouse_cost_usd_total[$__range]))"
                    " / sum(increase(tollhouse_held_usd_total[$__range]))",
                ),
                stat(
                    "Tasks stopped",
                    "By breakers, once per episode.",
                    "short",
                    'sum(increase(tollhouse_breaker_episodes_total{action="stop"}[$__range])) or vector(0)',
                    (GREEN, RED),
                    (1,),
                ),
            ],
        ),
        Section(
            "Who is about to hit one",
            [
                Table(
                    "Used up soonest",
                    "If it goes on as in the last 24 hours; budgets in dollars of tenants, teams and keys. Needs Postgres.",
                    _SOON_SQL,
                    {
                        "Used": "percent",
                        "Left": "currencyUSD",
                        "Dollars an hour": "currencyUSD",
                        "Used up in": "s",
                    },
                    {"Team": TO_TEAM},
                ),
                Table(
                    "Budgets near their end",
                    "Spent and held against the limit in force, the fullest first; budgets of single tasks are left out. "
                    "Needs Postgres.",
                    _BUDGETS_SQL,
                    {"Used": "percent"},
                ),
                Table(
                    "Tasks near their end",
                    "Budgets of tasks with a step in the chosen time. Needs Postgres.",
                    _TASK_BUDGETS_SQL,
                    {"Used": "percent"},
                    {"Task": TO_TASK, "Team": TO_TEAM},
                ),
            ],
        ),
        Section(
            "Refused and held",
            [
                by(
                    "kind",
                    "tollhouse_refusals_total",
                    "Refusals by kind",
                    "Requests a second that were refused before anything was spent.",
                    "reqps",
                ),
                by(
                    "scope",
                    "tollhouse_holds_refused_total",
                    "Holds refused, by whose budget it was",
                    "Holds a second.",
                    "cps",
                ),
                Panel(
                    "Held against used",
                    "Dollars an hour that were held before calls were sent, and what they cost then.",
                    "currencyUSD",
                    [
                        Query(f"sum(rate(tollhouse_held_usd_total{RATE})) * 3600", "held"),
                        Query(f"sum(rate(tollhouse_cost_usd_total{RATE})) * 3600", "cost"),
                    ],
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
                    "Who was refused",
                    "By whole hours; a process that was killed takes its last seconds along. Needs Postgres.",
                    _REFUSED_SQL,
                    {"Would have held": "currencyUSD"},
                    {"Team": TO_TEAM},
                ),
            ],
        ),
    ],
)
