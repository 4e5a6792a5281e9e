"""Requests and how fast they are answered."""

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
    by,
    percentiles,
    stat,
)

TRAFFIC = Dashboard(
    "tollhouse-traffic",
    "Tollhouse / Traffic and latency",
    "Requests, how fast they are answered, the gateway's own part in it, errors, attempts and retries.",
    [
        Section(
            "Now",
            [
                stat(
                    "Requests",
                    "Answered requests a second.",
                    "reqps",
                    "sum(rate(tollhouse_requests_total[5m]))",
                ),
                stat(
                    "In flight",
                    "Requests being served.",
                    "short",
                    "sum(tollhouse_inflight_requests)",
                ),
                stat(
                    "Server errors",
                    "Share of requests answered with 5xx.",
                    "percentunit",
                    '(sum(rate(tollhouse_requests_total{status_class="5xx"}[5m])) or vector(0))'
                    " / sum(rate(tollhouse_requests_total[5m]))",
                    (GREEN, YELLOW, RED),
                    (0.01, 0.05),
                ),
                stat(
                    "First token, median",
                    "From the request line to the first byte of the answer's body.",
                    "s",
                    "histogram_quantile(0.5, sum by (le) (rate(tollhouse_first_token_seconds_bucket[5m])))",
                ),
                stat(
                    "Own time, p99",
                    "What the gateway itself took, without waiting for provider or client.",
                    "s",
                    "histogram_quantile(0.99, sum by (le) (rate(tollhouse_overhead_seconds_bucket[5m])))",
                    (GREEN, YELLOW, RED),
                    (0.02, 0.05),
                ),
                stat(
                    "Attempts per request",
                    "Above 1: retries and fallbacks. Below: refusals and answers from the response cache.",
                    "none",
                    "sum(rate(tollhouse_attempts_total[5m])) / sum(rate(tollhouse_requests_total[5m]))",
                ),
            ],
        ),
        Section(
            "Requests a second",
            [
                by(
                    "operation",
                    "tollhouse_requests_total",
                    "By operation",
                    "Answered requests a second.",
                    "reqps",
                ),
                by(
                    "client",
                    "tollhouse_requests_total",
                    "By client",
                    "Answered requests a second, by the kind of agent.",
                    "reqps",
                ),
                by(
                    "status_class",
                    "tollhouse_requests_total",
                    "By status",
                    "A client that left counts as 4xx.",
                    "reqps",
                ),
                Panel(
                    "In flight, by instance",
                    "Requests being served by each process.",
                    "short",
                    [Query("tollhouse_inflight_requests", "{{instance}}")],
                ),
            ],
        ),
        Section(
            "Latency",
            [
                percentiles(
                    "tollhouse_overhead_seconds", "The gateway's own time", "Without provider and client."
                ),
                percentiles(
                    "tollhouse_first_token_seconds",
                    "First token",
                    "From the request line to the first byte of the answer's body, by operation.",
                    "operation",
                    (50, 95),
                ),
                percentiles(
                    "tollhouse_request_duration_seconds",
                    "Whole requests",
                    "From the request line to the last byte, by operation.",
                    "operation",
                    (50, 95),
                ),
                percentiles(
                    "tollhouse_attempt_duration_seconds",
                    "Calls to providers",
                    "From sending to the last byte read, by provider.",
                    "provider",
                    (50, 95),
                ),
            ],
        ),
        Section(
            "Attempts and errors",
            [
                by(
                    "outcome",
                    "tollhouse_attempts_total",
                    "Attempts by outcome",
                    "Calls to providers a second, by how they ended.",
                    "cps",
                ),
                Panel(
                    "Retries not made",
                    "Attempts a second that were not tried again because the retry budget was used up.",
                    "cps",
                    [
                        Query(
                            f"sum by (instance) (rate(tollhouse_retries_refused_total{RATE}))",
                            "{{instance}}",
                        )
                    ],
                ),
                Panel(
                    "Answers given again",
                    "Requests a second that the response cache answered.",
                    "reqps",
                    [Query(f"sum(rate(tollhouse_answers_given_again_total{RATE}))", "from the cache")],
                ),
                by(
                    "rule",
                    "tollhouse_rule_failures_total",
                    "Rules that failed",
                    "Requests a second on which a rule could not be evaluated, so that it did not match.",
                    "reqps",
                ),
            ],
        ),
        Section(
            "Processes",
            [
                Panel(
                    "CPU",
                    "Cores in use by each process; one process uses one core.",
                    "short",
                    [Query(f"rate(process_cpu_seconds_total{RATE})", "{{instance}}")],
                ),
                Panel(
                    "Memory",
                    "Resident memory of each process.",
                    "bytes",
                    [Query("process_resident_memory_bytes", "{{instance}}")],
                ),
                Panel(
                    "File descriptors",
                    "Share of the limit that is open.",
                    "percentunit",
                    [Query("process_open_fds / process_max_fds", "{{instance}}")],
                ),
                Panel(
                    "Versions",
                    "Processes by version: two while a rollout is under way.",
                    "short",
                    [Query("sum by (version) (tollhouse_build_info)", "{{version}}")],
                    stacked=True,
                ),
            ],
        ),
    ],
)
