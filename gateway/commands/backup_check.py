"""backup-check: does a restored database fit together, and what is missing from it?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from gateway.commands.findings import Finding, State
from gateway.commands.opening import load_settings
from gateway.commands.output import dollars, moment, print_json, print_table, say
from gateway.core.errors import GatewayError
from gateway.settings import Settings
from gateway.storage import audit, integrity, reports, schema
from gateway.storage.database import Database, open_database
from gateway.storage.integrity import Integrity

SHOWN = 5


def backup_check(path: Path | None, as_json: bool) -> int:
    """0 if everything fits, 1 if not."""
    settings = load_settings(path)
    findings = asyncio.run(examine(settings))
    bad = sum(f.state is State.FAIL for f in findings)
    if as_json:
        print_json({"ok": not bad, "findings": [asdict(f) for f in findings]})
    else:
        rows = [[f.state, f.subject, f.found, f.to_do] for f in findings]
        print_table(["", "subject", "found", "what to do"], rows)
        say(f"{bad} of {len(findings)} do not fit" if bad else "the database fits together")
    return 1 if bad else 0


async def examine(settings: Settings) -> list[Finding]:
    """Schema, ledger against budgets, sums and tasks, holds, the audit trail; reads everything, changes nothing."""
    database = open_database(settings.database_url)
    try:
        if database.sqlite_path is not None and not database.sqlite_path.exists():
            return [
                Finding("database", State.FAIL, f"there is no {database.sqlite_path}", "restore it first")
            ]
        revision = await schema.check(database)
        return [
            Finding("schema", State.OK, f"revision {revision}"),
            *await _ledger(database),
            await _trail(database),
        ]
    except schema.SchemaMismatch as error:
        found = f"revision {error.found}, this version needs {error.wanted}"
        return [Finding("schema", State.FAIL, found, "tollhouse migrate, then check again")]
    except GatewayError as error:
        return [Finding("database", State.FAIL, f"{settings.database_shown}: {error.message}", "start it")]
    finally:
        await database.close()


async def _ledger(database: Database) -> list[Finding]:
    found = await integrity.examine(database)
    drifted = await reports.drift(database)
    return [
        _age(found),
        _fits(
            "budgets",
            [
                f"{d.scope} ({d.unit}): {d.posted} posted, entries say {d.posted_by_entries}; {d.held} held, holds say {d.held_by_holds}"
                for d in drifted
            ],
            "every budget is the sum of its entries and holds",
        ),
        _fits(
            "hourly sums",
            [
                f"{moment(h.hour_ms)}: entries say {h.attempts:+} attempts, {dollars(h.cost_nano_usd)} more"
                for h in found.hours
            ],
            "every hour is the sum of its entries",
        ),
        _fits(
            "sums by team",
            [
                f"{moment(t.hour_ms)}, team {t.team_id}: entries say {t.attempts:+} attempts, {dollars(t.cost_nano_usd)} more"
                for t in found.teams
            ],
            "every hour of a team is the sum of its entries",
        ),
        _fits(
            "tasks",
            [
                f"{t.task_id}: {dollars(t.cost_nano_usd)}, entries say {dollars(t.by_entries_nano_usd)}"
                for t in found.tasks
            ],
            "every task is the sum of its entries",
        ),
        _holds(found),
        _fits(
            "ended attempts",
            list(found.neither),
            "each has its entry",
            "attempts that ended without an entry",
        ),
        _fits(
            "held attempts", list(found.both), "none has an entry", "attempts that are held and have ended"
        ),
    ]


def _age(found: Integrity) -> Finding:
    if not found.entries:
        return Finding("ledger", State.WARN, "no entries", "is this the right database?")
    age_s = (time.time_ns() // 1_000_000 - found.newest_at_ms) / 1_000
    text = f"{found.entries:,} entries, the newest of {moment(found.newest_at_ms)}"
    to_do = "what replicas settled since: tollhouse journal replay" if age_s > 60 else ""
    return Finding("ledger", State.OK, text, to_do)


def _holds(found: Integrity) -> Finding:
    holds = found.holds
    if not holds.count:
        return Finding("open holds", State.OK, "none")
    text = f"{holds.count:,} of {holds.replicas} replicas, {dollars(holds.nano_usd)}, the oldest of {moment(holds.oldest_at_ms)}"
    to_do = "journal replay settles those whose answer is known; the reaper charges the rest at its bound"
    return Finding("open holds", State.WARN, text, to_do)


def _fits(subject: str, wrong: Sequence[str], right: str, what: str = "") -> Finding:
    if not wrong:
        return Finding(subject, State.OK, right)
    more = f" and {len(wrong) - SHOWN:,} more" if len(wrong) > SHOWN else ""
    text = f"{what + ': ' if what else ''}{'; '.join(wrong[:SHOWN])}{more}"
    return Finding(subject, State.FAIL, text, "do not serve from it: take an older backup, or report this")


async def _trail(database: Database) -> Finding:
    found = await audit.verify(database)
    if found.sound:
        return Finding(
            "audit trail",
            State.OK,
            f"{found.entries:,} entries in their places, the last {found.head[:16] or '-'}",
        )
    why = found.broken.why if found.broken else "entries are missing at the end"
    return Finding("audit trail", State.FAIL, why, "tollhouse audit verify")
