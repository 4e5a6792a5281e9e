"""Deployments: their health, quotas and places."""

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
    percentiles,
    stat,
)

_FAILED = "upstream_.*"

_TIERS_SQL = """\
SELECT tier AS "Tier", deployment AS "Deployment", sum(attempts) AS "Attempts",
  100.0 * sum(errors) / NULLIF(sum(attempts), 0) AS "Failed", sum(cost_nano_usd) / 1e9 AS "Cost",
  sum(retries_cost_nano_usd) / 1e9 AS "On retries"
FROM usage_hour WHERE hour_ms >= $__from AND hour_ms < $__to
GROUP BY tier, deployment ORDER BY "Attempts" DESC LIMIT 50"""

_RULES_SQL = """\
SELECT rule AS "Rule", tier AS "Tier", deployment AS "Deployment", count(*) AS "Attempts",
  sum(amount_nano_usd) / 1e9 AS "Cost"
FROM ledger WHERE at_ms >= greatest($__from, $__to - 3600000) AND at_ms < $__to AND kind <> 'correct'
GROUP BY rule, tier, deployment ORDER BY "Attempts" DESC LIMIT 50"""

PROVIDERS = Dashboard(
    "tollhouse-providers",
    "Tollhouse / Routing and providers",
    "Where requests go and why, which deployments are in use, how fast they are, how their calls end, and where places are short.",
    [
        Section(
            "Now",
            [
                stat(
                    "In use",
                    "Deployments and credentials that calls go to, in the process that sees the fewest.",
                    "short",
                    "min(sum by (instance) (tollhouse_deployment_available))",
                    (GREEN,),
                ),
                stat(
                    "Ejected",
                    "Deployments and credentials that some process leaves alone after failures.",
                    "short",
                    'count(count by (subject) (tollhouse_deployment_status{status="open"})) or vector(0)',
                    (GREEN, RED),
                    (1,),
                ),
                stat(
                    "Cooling",
                    "After a 429, or because the provider said that its quota is used up.",
                    "short",
                    'count(count by (subject) (tollhouse_deployment_status{status="cooling"})) or vector(0)',
                    (GREEN, YELLOW),
                    (1,),
                ),
                stat(
                    "Drained",
                    "Taken out of the traffic by a person.",
                    "short",
                    'count(count by (subject) (tollhouse_deployment_status{status="drained"})) or vector(0)',
                ),
                stat(
                    "Failed attempts",
                    "Share of calls that ended in an error of the provider.",
                    "percentunit",
                    f'(sum(rate(tollhouse_attempts_total{{outcome=~"{_FAILED}"}}[5m])) or vector(0))'
                    " / sum(rate(tollhouse_attempts_total[5m]))",
                    (GREEN, YELLOW, RED),
                    (0.02, 0.05),
                ),
                stat(
                    "Refused credentials",
                    "Calls in the chosen time that a provider refused for our credential.",
                    "short",
                    'sum(increase(tollhouse_attempts_total{outcome="upstream_auth"}[$__range])) or vector(0)',
                    (GREEN, RED),
                    (1,),
                ),
            ],
        ),
        Section(
            "Health",
            [
                Panel(
                    "Out of use, by status",
                    "Processes that leave a deployment or credential alone; nothing drawn means all are in use.",
                    "short",
                    [
                        Query(
                            'sum by (subject, status) (tollhouse_deployment_status{status!="closed"})',
                            "{{subject}}: {{status}}",
                        )
                    ],
                    stacked=True,
                ),
                Panel(
                    "Failed attempts, by deployment",
                    "Share of calls that ended in an error of the provider.",
                    "percentunit",
                    [
                        Query(
                            f'(sum by (deployment) (rate(tollhouse_attempts_total{{outcome=~"{_FAILED}"}}{RATE}))'
                            f" or sum by (deployment) (rate(tollhouse_attempts_total{RATE})) * 0)"
                            f" / sum by (deployment) (rate(tollhouse_attempts_total{RATE}))",
                            "{{deployment}}",
                        )
                    ],
                ),
                by(
                    "deployment",
                    "tollhouse_attempts_total",
                    "Calls by deployment",
                    "Calls a second.",
                    "cps",
                ),
                percentiles(
                    "tollhouse_attempt_duration_seconds",
                    "Duration by deployment",
                    "From sending to the last byte read.",
                    "deployment",
                    (50, 95),
                ),
            ],
        ),
        Section(
            "Quotas and places",
            [
                Panel(
                    "Quota refusals, by deployment",
                    "Calls a second that the provider refused with 429.",
                    "cps",
                    [
                        Query(
                            f'sum by (deployment) (rate(tollhouse_attempts_total{{outcome="upstream_overloaded"}}{RATE}))',
                            "{{deployment}}",
                        )
                    ],
                    stacked=True,
                ),
                Panel(
                    "Places",
                    "Calls inside of deployments with `concurrent`, and waiting for a place there.",
                    "short",
                    [
                        Query(
                            "sum by (deployment, where) (tollhouse_deployment_places)",
                            "{{deployment}}: {{where}}",
                        )
                    ],
                ),
                by("provider", "tollhouse_tokens_total", "Tokens by provider", "Tokens a second.", "short"),
                Panel(
                    "Answers cut short",
                    "Streams a second that the client left or the provider cut.",
                    "cps",
                    [
                        Query(
                            "sum by (provider, outcome)"
                            f' (rate(tollhouse_attempts_total{{outcome=~"client_gone|upstream_cut"}}{RATE}))',
                            "{{provider}}: {{outcome}}",
                        )
                    ],
                    stacked=True,
                ),
            ],
        ),
        Section(
            "Speed",
            [
                percentiles(
                    "tollhouse_attempt_first_token_seconds",
                    "First event, by deployment",
                    "From sending to the first event of the stream.",
                    "deployment",
                    (50, 95),
                ),
                percentiles(
                    "tollhouse_inter_chunk_seconds",
                    "Between events, by deployment",
                    "Mean time between the events of each stream.",
                    "deployment",
                    (50, 95),
                ),
            ],
        ),
        Section(
            "Routing",
            [
                Table(
                    "Tiers and deployments",
                    "By whole hours, exact over all replicas. Needs Postgres.",
                    _TIERS_SQL,
                    {"Cost": "currencyUSD", "On retries": "currencyUSD", "Failed": "percent"},
                    width=12,
                ),
                Table(
                    "Rules",
                    "Which rule sent how much where, of the last hour of the chosen time. Needs Postgres.",
                    _RULES_SQL,
                    {"Cost": "currencyUSD"},
                    width=12,
                ),
            ],
        ),
    ],
)
