"""migrate, what the other commands need of the database, and how it does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gateway.commands.findings import Finding, State, clock_skew
from gateway.commands.opening import load_settings
from gateway.commands.output import OperatorError, say
from gateway.core.errors import GatewayError, InvalidRequest, NotFound
from gateway.settings import Settings
from gateway.storage import reports, schema
from gateway.storage.accounts import Accounts, Team
from gateway.storage.database import Database, open_database
from gateway.storage.transact import Fetch, Sql, Tx

T = TypeVar("T")
#: Who changes things from here, for the audit trail.
ACTOR = "cli"
_NOW = Sql("SELECT now_ms()")


@dataclass(frozen=True, slots=True)
class Desk:
    """What a command works with."""

    settings: Settings
    database: Database
    accounts: Accounts


def migrate(path: Path | None, *, down: bool) -> int:
    settings = load_settings(path)
    if settings.database_url.startswith("sqlite"):
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    revision = asyncio.run(_told(settings, schema.migrate(settings.database_url, "-1" if down else "head")))
    say(f"{settings.database_shown} is at {f'revision {revision}' if revision else 'no schema'}")
    return 0


def at_desk(path: Path | None, act: Callable[[Desk], Awaitable[T]]) -> T:
    """Do something with the configured database; what goes wrong becomes one line for the operator."""
    settings = load_settings(path)
    return asyncio.run(_told(settings, _at_desk(settings, act)))


async def _at_desk(settings: Settings, act: Callable[[Desk], Awaitable[T]]) -> T:
    database = open_database(settings.database_url)
    try:
        if not _there(database):
            raise OperatorError(f"there is no database {database.sqlite_path} yet", "run: tollhouse migrate")
        await schema.check(database)
        accounts = Accounts(database, actor=ACTOR)
        await declare(accounts, settings)
        return await act(Desk(settings, database, accounts))
    finally:
        await database.close()


async def declare(accounts: Accounts, settings: Settings) -> None:
    """Make the teams and budgets that the configuration declares what it says they are; the rest stays as it is.

    Raises `NotFound` for a budget of a key that does not exist, `Unavailable` if the store is down.
    """
    await accounts.ensure_defaults()
    for team in settings.teams:
        own = Team(team.id, team.tenant, frozenset(team.models), team.limit, team.task_budget_nano_usd)
        await accounts.put_team(own)
    for b in settings.budgets:
        await accounts.set_budget(
            b.scope,
            b.limit,
            b.window,
            b.on_exceed,
            b.zone,
            unit=b.unit,
            mode=b.mode,
            alert_percents=b.alert_percents,
            landing_percent=b.landing_percent,
            reason=f"configured in {settings.file}",
        )


def _there(database: Database) -> bool:
    """A SQLite file that does not exist would be made by a mere look."""
    return database.sqlite_path is None or database.sqlite_path.exists()


async def _told(settings: Settings, doing: Awaitable[T]) -> T:
    try:
        return await doing
    except schema.SchemaMismatch as error:
        raise OperatorError(str(error)) from error
    except (InvalidRequest, NotFound) as error:
        raise OperatorError(error.message) from error
    except GatewayError as error:
        raise OperatorError(
            f"{settings.database_shown}: {error.message}", "`tollhouse doctor` tries it"
        ) from error


# --- for doctor ------------------------------------------------------------------------------------------


async def examine(settings: Settings) -> list[Finding]:
    """Can it be reached, is its schema this version's, does its clock agree, do its sums."""
    database = open_database(settings.database_url)
    try:
        if not _there(database):
            return [
                Finding(
                    "database", State.FAIL, f"there is no {database.sqlite_path} yet", "tollhouse migrate"
                )
            ]
        return await _examine(database, settings)
    except GatewayError as error:
        to_do = "start it, or mend database_url"
        return [Finding("database", State.FAIL, f"{settings.database_shown}: {error.message}", to_do)]
    finally:
        await database.close()


async def _examine(database: Database, settings: Settings) -> list[Finding]:
    began_ms = _now_ms()
    database_ms = await database.read(_clock)
    findings = [
        Finding("database", State.OK, f"{settings.database_shown} answers"),
        clock_skew(database_ms, began_ms, _now_ms()),
    ]
    try:
        await schema.check(database)
    except schema.SchemaMismatch as error:
        return [*findings, Finding("schema", State.FAIL, str(error).partition(";")[0], "tollhouse migrate")]
    findings.append(Finding("schema", State.OK, "is that of this version"))
    drifted = await reports.drift(database)
    if not drifted:
        return [
            *findings,
            Finding("ledger", State.OK, "every budget equals the sum of its entries and holds"),
        ]
    scopes = ", ".join(sorted({d.scope for d in drifted}))
    to_do = "report this with the output of `tollhouse budgets list --json`; budgets may be wrong"
    return [*findings, Finding("ledger", State.FAIL, f"does not add up for {scopes}", to_do)]


def _clock() -> Tx[int]:
    now_ms: int = (yield Fetch(_NOW))[0][0]
    return now_ms


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
