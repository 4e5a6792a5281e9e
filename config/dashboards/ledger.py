"""Whether money can be held and settled."""

from __future__ import annotations

from config.dashboards.panels import (
    GREEN,
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

_HOLDS_SQL = """\
SELECT replica_id AS "Replica", count(*) AS "Open holds", sum(amount_nano_usd) / 1e9 AS "Held",
  (extract(epoch FROM clock_timestamp()) * 1000 - min(created_at_ms)) / 1000 AS "Oldest"
FROM hold WHERE state = 'held' GROUP BY replica_id ORDER BY "Open holds" DESC LIMIT 50"""

_REPLICAS_SQL = """\
SELECT replica_id AS "Replica", to_timestamp(started_at_ms / 1000.0) AS "Started",
  (expires_at_ms - extract(epoch FROM clock_timestamp()) * 1000) / 1000 AS "Lease left"
FROM replica ORDER BY expires_at_ms DESC LIMIT 50"""

LEDGER = Dashboard(
    "tollhouse-ledger",
    "Tollhouse / Ledger",
    "Whether money can be held and settled: the database, the journal, flights, Redis, and alerts on their way.",
    [
        Section(
            "Now",
            [
                stat(
                    "Ledger",
                    "1 if every process reaches the database; at 0 one refuses requests.",
                    "none",
                    "min(tollhouse_ledger_available)",
                    (RED, GREEN),
                    (1,),
                ),
                stat(
                    "Journal",
                    "Settlements that wait for the database, on all replicas.",
                    "short",
                    "sum(tollhouse_journal_records)",
                    (GREEN, RED),
                    (1,),
                ),
                stat(
                    "Not exact",
                    "Share of entries whose usage is not what the provider reported.",
                    "percentunit",
                    '(sum(increase(tollhouse_ledger_entries_total{quality!="exact"}[$__range])) or vector(0))'
                    " / sum(increase(tollhouse_ledger_entries_total[$__range]))",
                    (GREEN, YELLOW, RED),
                    (0.02, 0.1),
                ),
                stat(
                    "Refused for it",
                    "Requests in the chosen time that were refused because the ledger could not be reached.",
                    "short",
                    'sum(increase(tollhouse_refusals_total{kind="ledger_unavailable"}[$__range])) or vector(0)',
                    (GREEN, RED),
                    (1,),
                ),
                stat(
                    "Redis away",
                    "Processes that keep to their share of the limits because Redis is away; 0 as well if none is configured.",
                    "short",
                    "sum(tollhouse_limits_degraded) or vector(0)",
                    (GREEN, YELLOW),
                    (1,),
                ),
                stat(
                    "Oldest alert",
                    "Age of the oldest alert that waits for its receiver; 0 as well without a webhook.",
                    "s",
                    "max(tollhouse_outbox_oldest_seconds) or vector(0)",
                    (GREEN, YELLOW, RED),
                    (60, 300),
                ),
            ],
        ),
        Section(
            "Writing",
            [
                Panel(
                    "Flights",
                    "Transactions under way: admit makes holds, settle posts.",
                    "short",
                    [
                        Query(
                            'sum by (batcher) (tollhouse_ledger_queue{what="flights"})',
                            "{{batcher}}",
                        )
                    ],
                ),
                Panel(
                    "Waiting for a flight",
                    "Holds and settlements that are in no transaction yet; rising means that the database is too slow.",
                    "short",
                    [
                        Query(
                            'sum by (batcher) (tollhouse_ledger_queue{what="waiting"})',
                            "{{batcher}}",
                        )
                    ],
                ),
                Panel(
                    "Journal, by instance",
                    "Settlements of each process that wait for the database.",
                    "short",
                    [Query("tollhouse_journal_records", "{{instance}}")],
                    stacked=True,
                ),
                Panel(
                    "Database reached, by instance",
                    "1 if holds can be made.",
                    "none",
                    [Query("tollhouse_ledger_available", "{{instance}}")],
                ),
            ],
        ),
        Section(
            "Entries",
            [
                by(
                    "kind",
                    "tollhouse_ledger_entries_total",
                    "By kind",
                    "Terminal entries a second, one per attempt.",
                    "cps",
                ),
                by(
                    "quality",
                    "tollhouse_ledger_entries_total",
                    "By quality",
                    "How well their usage is known.",
                    "cps",
                ),
                Table(
                    "Open holds",
                    "Money reserved for calls under way, in seconds since the oldest. Needs Postgres.",
                    _HOLDS_SQL,
                    {"Held": "currencyUSD", "Oldest": "s"},
                    width=12,
                ),
                Table(
                    "Replicas",
                    "Whose lease is over does not run, and its holds are charged at their bounds. Needs Postgres.",
                    _REPLICAS_SQL,
                    {"Started": "dateTimeAsIso", "Lease left": "s"},
                    width=12,
                ),
            ],
        ),
        Section(
            "Alerts on their way",
            [
                Panel(
                    "In the database",
                    "Alerts that wait, and those given up; each replica counts all, so the largest is shown.",
                    "short",
                    [Query("max by (state) (tollhouse_outbox_messages)", "{{state}}")],
                ),
                by(
                    "outcome",
                    "tollhouse_webhooks_total",
                    "Deliveries",
                    "Attempts a second to deliver an alert.",
                    "cps",
                ),
            ],
        ),
    ],
)
