"""Servers of one's own: which replicas are in use, how far behind they are, what their caches hold, and what they cost."""

from __future__ import annotations

from config.dashboards.panels import GREEN, RATE, RED, YELLOW, Dashboard, Panel, Query, Section, stat

_REPLICA = "deployment, replica"
_LEGEND = "{{deployment}} {{replica}}"


def _now(metric: str, title: str, description: str, unit: str = "short", how: str = "max") -> Panel:
    """A gauge by replica. Each gateway sees all replicas; what it has sent there itself is added up."""
    return Panel(title, description, unit, [Query(f"{how} by ({_REPLICA}) ({metric})", _LEGEND)])


def _rate(metric: str, title: str, description: str) -> Panel:
    query = Query(f"sum by ({_REPLICA}) (increase({metric}[$__range]))", _LEGEND)
    return Panel(title, description, "short", [query])


def _share(part: str, by: str = "deployment", window: str = RATE) -> str:
    return (
        f"sum by ({by}) (rate(tollhouse_replica_{part}_tokens_total{window}))"
        f" / sum by ({by}) (rate(tollhouse_replica_prompt_tokens_total{window}))"
    )


GPU = Dashboard(
    "tollhouse-gpu",
    "Tollhouse / GPU tier",
    "Servers of one's own: which replicas are in use, how far behind they are, what their caches hold, and what they cost.",
    [
        Section(
            "Now",
            [
                stat(
                    "Replicas in use",
                    "Replicas that calls go to, in the process that sees the fewest.",
                    "short",
                    f"sum(min by ({_REPLICA}) (tollhouse_replica_up))",
                    (RED, GREEN),
                    (1,),
                ),
                stat(
                    "Out of use",
                    "Replicas that are there and get no calls: away, cooling, drained, or not what they should be.",
                    "short",
                    f"sum(1 - min by ({_REPLICA}) (tollhouse_replica_up))",
                    (GREEN, YELLOW),
                    (1,),
                ),
                stat(
                    "Look-ups that fail",
                    "Deployments whose replicas cannot be found at the moment; the last known ones stay.",
                    "short",
                    "sum(max by (deployment) (tollhouse_replicas_lookup_failed))",
                    (GREEN, RED),
                    (1,),
                ),
                stat(
                    "Backlog",
                    "Uncached prompt tokens that were sent and whose answer has not begun.",
                    "short",
                    "sum(tollhouse_replica_backlog_tokens)",
                ),
                stat(
                    "Read from caches",
                    "Share of all prompt tokens of the last hour that replicas read from their caches.",
                    "percentunit",
                    "sum(rate(tollhouse_replica_reported_cached_tokens_total[1h]))"
                    " / sum(rate(tollhouse_replica_prompt_tokens_total[1h]))",
                    (RED, YELLOW, GREEN),
                    (0.3, 0.6),
                ),
                stat(
                    "Waiting here",
                    "Calls that wait in the gateway for a place.",
                    "short",
                    "sum(tollhouse_queue_waiting)",
                    (GREEN, YELLOW),
                    (10,),
                ),
            ],
        ),
        Section(
            "Load",
            [
                _now(
                    "tollhouse_replica_backlog_tokens",
                    "Backlog by replica",
                    "Uncached prompt tokens sent to it whose answer has not begun; what decides where the next call goes.",
                    how="sum",
                ),
                _now(
                    "tollhouse_replica_waiting", "Queue by replica", "Requests in its own queue, as it says."
                ),
                _now(
                    "tollhouse_replica_running",
                    "Running by replica",
                    "Requests that it works on, as it says; those of others than this gateway, too.",
                ),
                _now(
                    "tollhouse_replica_kv_usage",
                    "KV cache in use",
                    "Share of its cache that running requests use; what is only kept for later counts as free.",
                    "percentunit",
                ),
                Panel(
                    "Waiting in the gateway",
                    "Calls that wait for a place at a deployment, by whether somebody waits for them.",
                    "short",
                    [
                        Query(
                            "sum by (deployment, class) (tollhouse_queue_waiting)",
                            "{{deployment}}: {{class}}",
                        )
                    ],
                    stacked=True,
                ),
                _now(
                    "tollhouse_replica_sessions",
                    "Sessions by replica",
                    "Sessions whose last call went there.",
                    how="sum",
                ),
            ],
        ),
        Section(
            "Caches",
            [
                Panel(
                    "Expected and read",
                    "Share of prompt tokens that the gateway expected in the replica's cache, and that it read from there.",
                    "percentunit",
                    [
                        Query(_share("predicted_cached"), "{{deployment}}: expected"),
                        Query(_share("reported_cached"), "{{deployment}}: read"),
                    ],
                ),
                Panel(
                    "Read by replica",
                    "Share of the prompt tokens of each that it read from its cache.",
                    "percentunit",
                    [Query(_share("reported_cached", _REPLICA), _LEGEND)],
                ),
                Panel(
                    "Why a replica was picked",
                    "Calls a second: warm (it has the prompt), released (that one is too far behind), least_loaded (nobody has"
                    " it), explored (for a second copy), last_resort (all have failed lately).",
                    "cps",
                    [
                        Query(
                            f"sum by (deployment, why) (rate(tollhouse_replica_picks_total{RATE}))",
                            "{{deployment}}: {{why}}",
                        )
                    ],
                    stacked=True,
                ),
                _now(
                    "tollhouse_replica_index_bytes",
                    "Memory of the index",
                    "What all processes keep to know what its cache holds.",
                    "bytes",
                    how="sum",
                ),
            ],
        ),
        Section(
            "Health",
            [
                _now("tollhouse_replica_up", "In use", "1 while calls go to it.", how="min"),
                _rate(
                    "tollhouse_replica_restarts_total",
                    "Restarts",
                    "Times in the chosen time that it came back with an empty cache, added up over processes that saw it.",
                ),
                _rate(
                    "tollhouse_replica_refusals_total",
                    "Refused because it was full",
                    "Calls in the chosen time that it refused with 503; the gateway went on to another one.",
                ),
                _rate(
                    "tollhouse_replica_aborts_total",
                    "Cut short when shut down",
                    "Answers in the chosen time that it ended with `abort`: its grace period is too short.",
                ),
            ],
        ),
        Section(
            "Money",
            [
                Panel(
                    "Cost and what was charged",
                    "Dollars an hour of the replicas of each deployment, and of the calls there; the rest is idle time.",
                    "currencyUSD",
                    [
                        Query(
                            "max by (deployment) (rate(tollhouse_gpu_cost_usd_total[1h])) * 3600",
                            "{{deployment}}: cost",
                        ),
                        Query(
                            "sum by (deployment) (rate(tollhouse_gpu_charged_usd_total[1h])) * 3600",
                            "{{deployment}}: charged",
                        ),
                    ],
                ),
                Panel(
                    "Replica hours",
                    "Replicas that were there, in use or not.",
                    "short",
                    [
                        Query(
                            "max by (deployment) (rate(tollhouse_gpu_replica_hours_total[1h])) * 3600",
                            "{{deployment}}",
                        )
                    ],
                ),
            ],
        ),
    ],
)
