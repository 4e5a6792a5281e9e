"""Whose tasks are: `ports.TaskOwners`."""

from __future__ import annotations

from functools import partial

from gateway.storage.database import Database
from gateway.storage.transact import Fetch, Sql, Tx

_OWNER = Sql("SELECT key_id FROM task WHERE task_id = $1")
_KNOWN_MAX = 50_000


class SqlTaskOwners:
    """Looked up once per task: it never changes hands."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[str, str] = {}

    async def owner(self, task_id: str) -> str | None:
        known = self._known.get(task_id)
        if known is not None:
            return known
        found = await self._database.read(partial(_owner, task_id))
        if found is not None:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[task_id] = found
        return found


def _owner(task_id: str) -> Tx[str | None]:
    rows = yield Fetch(_OWNER, (task_id,))
    return rows[0][0] if rows else None
