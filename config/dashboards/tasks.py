"""Agents' runs: which are dear, which are stuck, how they turn out; and one of them, request by request."""

from __future__ import annotations

from config.dashboards.panels import (
    GREEN,
    RATE,
    RED,
    TEAM,
    TO_REQUEST,
    TO_TASK,
    TO_TEAM,
    YELLOW,
    Dashboard,
    Panel,
    Query,
    Section,
    Table,
    Variable,
    stat,
)

_IN_TEAM = "team_id IN (${team:sqlstring})"
_IN_TIME = "last_at_ms >= $__from AND last_at_ms < $__to"
_READ = "100.0 * cache_read / NULLIF(input_uncached + cache_read + cache_write_5m + cache_write_1h + cache_write_12h, 0)"

_TASKS_SQL = f"""\
SELECT task_id AS "Task", team_id AS "Team", NULLIF(name, '') AS "Name", state AS "State", state_reason AS "Why",
  steps AS "Steps", cost_nano_usd / 1e9 AS "Cost", (list_cost_nano_usd - cost_nano_usd) / 1e9 AS "Saved",
  retries_cost_nano_usd / 1e9 AS "On retries", {_READ} AS "Read from cache",
  to_timestamp(last_at_ms / 1000.0) AS "Last step"
FROM task WHERE {_IN_TIME} AND {_IN_TEAM} ORDER BY cost_nano_usd DESC LIMIT 100"""  # noqa: S608

_STUCK_SQL = f"""\
SELECT task_id AS "Task", team_id AS "Team", state AS "State", state_reason AS "Why", steps AS "Steps",
  cost_nano_usd / 1e9 AS "Cost", to_timestamp(last_at_ms / 1000.0) AS "Last step"
FROM task WHERE state LIKE 'paused%' AND {_IN_TIME} AND {_IN_TEAM} ORDER BY last_at_ms DESC LIMIT 50"""  # noqa: S608

_OUTCOMES_SQL = f"""\
SELECT team_id AS "Team", count(*) AS "Tasks", count(success) AS "With an outcome",
  100.0 * avg(CASE WHEN success THEN 1.0 WHEN NOT success THEN 0.0 END) AS "Successful",
  sum(cost_nano_usd) / 1e9 AS "Cost",
  sum(cost_nano_usd) FILTER (WHERE success IS NOT NULL) / 1e9 / NULLIF(count(*) FILTER (WHERE success), 0)
    AS "Cost of a success",
  sum(output) FILTER (WHERE success) / NULLIF(count(*) FILTER (WHERE success), 0) AS "Output tokens of a success",
  avg(steps) AS "Steps"
FROM task WHERE {_IN_TIME} AND {_IN_TEAM} GROUP BY team_id ORDER BY "Cost" DESC LIMIT 50"""  # noqa: S608

_SLOPE_SQL = """\
SELECT task_id AS "Task", team_id AS "Team", count(*) AS "Calls", sum(amount_nano_usd) / 1e9 AS "Cost",
  sum(amount_nano_usd) * 4 / 1e9 AS "Dollars an hour", max(step) AS "Step"
FROM ledger
WHERE at_ms >= extract(epoch FROM clock_timestamp()) * 1000 - 900000 AND team_id IN (${team:sqlstring})
GROUP BY task_id, team_id ORDER BY "Cost" DESC LIMIT 50"""

TASKS = Dashboard(
    "tollhouse-tasks",
    "Tollhouse / Agent tasks",
    "Runs of agents by spend, slope, state and outcome. A click on a task shows its requests.",
    [
        Section(
            "In the chosen time",
            [
                stat(
                    "Breakers",
                    "What they had to say, once per episode.",
                    "short",
                    "sum(increase(tollhouse_breaker_episodes_total[$__range])) or vector(0)",
                    (GREEN, YELLOW),
                    (1,),
                ),
                stat(
                    "Stopped",
                    "Episodes in which a breaker stopped a task.",
                    "short",
                    'sum(increase(tollhouse_breaker_episodes_total{action="stop"}[$__range])) or vector(0)',
                    (GREEN, RED),
                    (1,),
                ),
                stat(
                    "Refused for its state",
                    "Requests of tasks that are paused, stopped or done.",
                    "short",
                    'sum(increase(tollhouse_refusals_total{kind="task_stopped"}[$__range])) or vector(0)',
                ),
            ],
        ),
        Section(
            "Over time",
            [
                Panel(
                    "Breakers by kind",
                    "Episodes a second.",
                    "cps",
                    [
                        Query(
                            f"sum by (breaker) (rate(tollhouse_breaker_episodes_total{RATE}))", "{{breaker}}"
                        )
                    ],
                    stacked=True,
                ),
                Panel(
                    "By client, in dollars an hour",
                    "Cost in the ledger, by the kind of agent that asked.",
                    "currencyUSD",
                    [
                        Query(
                            "sum by (client) (rate(tollhouse_client_cost_usd_total[1h])) * 3600",
                            "{{client}}",
                        )
                    ],
                    stacked=True,
                ),
            ],
        ),
        Section(
            "From the ledger",
            [
                Table(
                    "Tasks that spend most",
                    "Of those with a step in the chosen time; the cost is that of the whole task. Needs Postgres.",
                    _TASKS_SQL,
                    {
                        "Cost": "currencyUSD",
                        "Saved": "currencyUSD",
                        "On retries": "currencyUSD",
                        "Read from cache": "percent",
                        "Last step": "dateTimeAsIso",
                    },
                    {"Task": TO_TASK, "Team": TO_TEAM},
                ),
                Table(
                    "Spending fastest",
                    "In the last quarter of an hour, whatever time is chosen. Needs Postgres.",
                    _SLOPE_SQL,
                    {"Cost": "currencyUSD", "Dollars an hour": "currencyUSD"},
                    {"Task": TO_TASK, "Team": TO_TEAM},
                ),
                Table(
                    "Paused",
                    "By a breaker or a person, and why. Needs Postgres.",
                    _STUCK_SQL,
                    {"Cost": "currencyUSD", "Last step": "dateTimeAsIso"},
                    {"Task": TO_TASK, "Team": TO_TEAM},
                ),
                Table(
                    "How they turn out",
                    "Of tasks whose outcome was reported; their whole cost divided by those that succeeded. Needs Postgres.",
                    _OUTCOMES_SQL,
                    {"Successful": "percent", "Cost": "currencyUSD", "Cost of a success": "currencyUSD"},
                    {"Team": TO_TEAM},
                ),
            ],
        ),
    ],
    [TEAM],
)

_ONE_SQL = f"""\
SELECT task_id AS "Task", team_id AS "Team", external_id AS "Named by the client", source AS "Known by",
  state AS "State", state_reason AS "Why", steps AS "Steps", cost_nano_usd / 1e9 AS "Cost",
  (list_cost_nano_usd - cost_nano_usd) / 1e9 AS "Saved", {_READ} AS "Read from cache", success AS "Success",
  parent_task_id AS "Parent", to_timestamp(created_at_ms / 1000.0) AS "Began",
  to_timestamp(last_at_ms / 1000.0) AS "Last step"
FROM task WHERE task_id = ${{task:sqlstring}}"""  # noqa: S608

_CHILDREN_SQL = """\
SELECT task_id AS "Task", state AS "State", steps AS "Steps", cost_nano_usd / 1e9 AS "Cost",
  to_timestamp(last_at_ms / 1000.0) AS "Last step"
FROM task WHERE parent_task_id = ${task:sqlstring} ORDER BY created_at_ms LIMIT 100"""

_REQUESTS_SQL = """\
SELECT l.request_id AS "Request", to_timestamp(min(l.started_at_ms) / 1000.0) AS "At", max(l.step) AS "Step",
  string_agg(DISTINCT l.deployment, ', ') AS "Deployments", max(l.tier) AS "Tier", max(l.rule) AS "Rule",
  count(*) FILTER (WHERE l.kind <> 'correct') AS "Attempts", sum(l.amount_nano_usd) / 1e9 AS "Cost",
  sum(l.cache_read) AS "Cached", sum(l.input_uncached) AS "Uncached", sum(l.output) AS "Output",
  max(m.cause) AS "Not read because", max(l.latency_ms) / 1000.0 AS "Took",
  string_agg(DISTINCT NULLIF(l.error, ''), ', ') AS "Errors"
FROM ledger l LEFT JOIN prefix_miss m USING (attempt_id)
WHERE l.task_id = ${task:sqlstring} GROUP BY l.request_id ORDER BY "At" DESC LIMIT 500"""

_ATTEMPTS_SQL = """\
SELECT l.attempt_no AS "No", l.kind AS "Entry", l.deployment AS "Deployment", l.model_requested AS "Asked for",
  l.upstream_model AS "Model", l.tier AS "Tier", l.rule AS "Rule", l.status AS "Status", l.error AS "Error",
  l.finish AS "Finish", l.quality AS "Usage is", l.hold_nano_usd / 1e9 AS "Held", l.amount_nano_usd / 1e9 AS "Cost",
  l.cache_read AS "Cached", l.input_uncached AS "Uncached", l.output AS "Output",
  l.first_token_ms / 1000.0 AS "First token", l.latency_ms / 1000.0 AS "Took", m.cause AS "Not read because",
  m.lost_nano_usd / 1e9 AS "Lost", l.upstream_request_id AS "Id at the provider", l.note AS "Note"
FROM ledger l LEFT JOIN prefix_miss m USING (attempt_id)
WHERE l.request_id = ${request:sqlstring} ORDER BY l.at_ms, l.kind LIMIT 100"""

TASK = Dashboard(
    "tollhouse-task",
    "Tollhouse / One task",
    "A task, its children, its requests, and one of these attempt by attempt. Needs Postgres.",
    [
        Section(
            "The task",
            [
                Table(
                    "Task",
                    "As the ledger has it; the cost is its own, without its children's.",
                    _ONE_SQL,
                    {
                        "Cost": "currencyUSD",
                        "Saved": "currencyUSD",
                        "Read from cache": "percent",
                        "Began": "dateTimeAsIso",
                        "Last step": "dateTimeAsIso",
                    },
                    {"Team": TO_TEAM, "Parent": TO_TASK},
                    height=5,
                ),
                Table(
                    "Children",
                    "Tasks of sub-agents, the oldest first.",
                    _CHILDREN_SQL,
                    {"Cost": "currencyUSD", "Last step": "dateTimeAsIso"},
                    {"Task": TO_TASK},
                    height=6,
                ),
                Table(
                    "Requests",
                    "The newest first; a click shows one below.",
                    _REQUESTS_SQL,
                    {"Cost": "currencyUSD", "Took": "s", "At": "dateTimeAsIso"},
                    {"Request": TO_REQUEST},
                    height=14,
                ),
            ],
        ),
        Section(
            "One request",
            [
                Table(
                    "Attempts",
                    "Entries of the ledger of the request that is chosen above, corrections included.",
                    _ATTEMPTS_SQL,
                    {
                        "Held": "currencyUSD",
                        "Cost": "currencyUSD",
                        "Lost": "currencyUSD",
                        "First token": "s",
                        "Took": "s",
                    },
                ),
            ],
        ),
    ],
    [Variable("task", "Task"), Variable("request", "Request")],
)
