"""Whether what is in a database fits together: for one that came back from a backup. Reads the whole ledger."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.errors import Unavailable
from gateway.storage.database import Database
from gateway.storage.transact import Fetch, Sql, StoreDown, Tx

#: The largest tables take their time.
READ_TIMEOUT_S = 1_800.0


def _off(table: str, groups: str) -> Sql:
    """Hours of `table` that are not the sums of their entries, in each of its `groups`: how much more the entries say."""
    keys = f"hour_ms{groups}"
    return Sql(
        f"SELECT {keys}, CAST(sum(n) AS BIGINT), CAST(sum(cost) AS BIGINT), CAST(sum(list_cost) AS BIGINT) FROM ("  # noqa: S608
        f"SELECT at_ms / 3600000 * 3600000 AS hour_ms{groups}, count(CASE WHEN kind <> 'correct' THEN 1 END) AS n, "
        "sum(amount_nano_usd) AS cost, sum(list_cost_nano_usd) AS list_cost FROM ledger "
        f"GROUP BY at_ms / 3600000 * 3600000{groups} "
        f"UNION ALL SELECT {keys}, -sum(attempts), -sum(cost_nano_usd), -sum(list_cost_nano_usd) FROM {table} "
        f"GROUP BY {keys}) d "
        f"GROUP BY {keys} HAVING sum(n) <> 0 OR sum(cost) <> 0 OR sum(list_cost) <> 0 ORDER BY {keys}"
    )


_HOURS = _off("usage_hour", "")
_TEAMS = _off("team_hour", ", tenant_id, team_id")
_TASKS = Sql(
    "SELECT t.task_id, t.cost_nano_usd, CAST(coalesce(sum(l.amount_nano_usd), 0) AS BIGINT) FROM task t "
    "LEFT JOIN ledger l ON l.task_id = t.task_id GROUP BY t.task_id, t.cost_nano_usd "
    "HAVING t.cost_nano_usd <> coalesce(sum(l.amount_nano_usd), 0) ORDER BY t.task_id"
)
_HOLDS = Sql(
    "SELECT count(*), CAST(coalesce(sum(amount_nano_usd), 0) AS BIGINT), coalesce(min(created_at_ms), 0), "
    "count(DISTINCT replica_id) FROM hold WHERE state = 'held'"
)
_BOTH = Sql(
    "SELECT h.attempt_id FROM hold h JOIN ledger l ON l.attempt_id = h.attempt_id AND l.kind <> 'correct' "
    "WHERE h.state = 'held' ORDER BY 1"
)
_NEITHER = Sql(
    "SELECT h.attempt_id FROM hold h LEFT JOIN ledger l ON l.attempt_id = h.attempt_id AND l.kind <> 'correct' "
    "WHERE h.state <> 'held' AND l.attempt_id IS NULL ORDER BY 1"
)
_ENTRIES = Sql("SELECT count(*), coalesce(max(posted_at_ms), 0) FROM ledger")


@dataclass(frozen=True, slots=True)
class HourOff:
    """An hour whose sums are not those of its entries: how much more the entries say."""

    hour_ms: int
    attempts: int
    cost_nano_usd: int
    list_cost_nano_usd: int


@dataclass(frozen=True, slots=True)
class TeamOff:
    """The same of one team."""

    hour_ms: int
    tenant_id: str
    team_id: str
    attempts: int
    cost_nano_usd: int
    list_cost_nano_usd: int


@dataclass(frozen=True, slots=True)
class TaskOff:
    task_id: str
    cost_nano_usd: int
    by_entries_nano_usd: int


@dataclass(frozen=True, slots=True)
class OpenHolds:
    """Money that is held for attempts which had not ended when the backup was made."""

    count: int
    nano_usd: int
    oldest_at_ms: int
    replicas: int


@dataclass(frozen=True, slots=True)
class Integrity:
    """`both`: attempts that are held and have ended; `neither`: attempts that have ended without an entry."""

    entries: int
    newest_at_ms: int
    holds: OpenHolds
    both: tuple[str, ...]
    neither: tuple[str, ...]
    hours: tuple[HourOff, ...]
    teams: tuple[TeamOff, ...]
    tasks: tuple[TaskOff, ...]


async def examine(database: Database) -> Integrity:
    """Everything at one moment. Raises `Unavailable` if the store is down."""
    try:
        return await database.reader.run(_examine, READ_TIMEOUT_S)
    except StoreDown as e:
        raise Unavailable(f"the database does not answer: {e}") from e


def _examine() -> Tx[Integrity]:
    entries, newest_at_ms = (yield Fetch(_ENTRIES))[0]
    holds = OpenHolds(*(yield Fetch(_HOLDS))[0])
    both = tuple(row[0] for row in (yield Fetch(_BOTH)))
    neither = tuple(row[0] for row in (yield Fetch(_NEITHER)))
    hours = tuple(HourOff(*row) for row in (yield Fetch(_HOURS)))
    teams = tuple(TeamOff(*row) for row in (yield Fetch(_TEAMS)))
    tasks = tuple(TaskOff(*row) for row in (yield Fetch(_TASKS)))
    return Integrity(entries, newest_at_ms, holds, both, neither, hours, teams, tasks)
