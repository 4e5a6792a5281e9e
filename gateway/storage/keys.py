"""Virtual keys in memory, kept fresh by polling one number.

Every change of a key or team counts up the revision and marks its row with it, so a poll is one tiny read, and after
a change it loads only the rows that changed. Revision numbers commit in order, because counting locks their row.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from gateway.core.errors import Unavailable
from gateway.core.identity import KeyRecord, RateLimit
from gateway.storage.database import Database
from gateway.storage.transact import Fetch, Row, Sql, Tx

#: Together with the time of one read well within the promised second.
POLL_EVERY_S = 0.5
#: How long known keys work while the store is down.
GRACE_S = 60.0
#: Unknown ids ask the store at most this often, however many there are.
_MISS_EVERY_S = 0.05

SELECT_KEYS = (
    "SELECT k.key_id, k.secret_hmac, k.tenant_id, k.team_id, k.name, k.models, t.models, k.expires_at_ms, "
    "k.revoked_at_ms, k.requests_per_min, k.tokens_per_min, k.concurrent, t.requests_per_min, t.tokens_per_min, "
    "t.concurrent, k.task_id, k.labels, k.declared_by FROM virtual_key k JOIN team t ON t.team_id = k.team_id"
)
_REVISION = Sql("SELECT number FROM revision")
_CHANGED = Sql(f"{SELECT_KEYS} WHERE k.revision > $1 OR t.revision > $1")
_log = logging.getLogger(__name__)


def record_of(row: Row) -> KeyRecord:
    """A row of SELECT_KEYS."""
    return KeyRecord(
        key_id=row[0],
        secret_hmac=bytes(row[1]),
        tenant_id=row[2],
        team_id=row[3],
        name=row[4],
        models=msgspec.json.decode(row[5], type=frozenset[str]),
        team_models=msgspec.json.decode(row[6], type=frozenset[str]),
        expires_at_ms=row[7],
        revoked_at_ms=row[8],
        limit=RateLimit(row[9], row[10], row[11]),
        team_limit=RateLimit(row[12], row[13], row[14]),
        task_id=row[15],
        labels=msgspec.json.decode(row[16], type=dict[str, str]),
        declared_by=row[17],
    )


class SqlKeyStore:
    """`ports.KeyStore`. Made by `open`, ended by `close`; `on_change` is called after any change anywhere."""

    def __init__(self, database: Database, on_change: Callable[[], None]) -> None:
        self._database = database
        self._clock = database.clock
        self._on_change = on_change
        self._records: dict[str, KeyRecord] = {}
        self._revision = -1
        self._fresh_at = float("-inf")
        self._down = False
        self._polling = asyncio.Lock()
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, database: Database, on_change: Callable[[], None] = lambda: None) -> SqlKeyStore:
        """Load all keys. Raises `Unavailable` if the store is down."""
        store = cls(database, on_change)
        await store.poll()
        store._task = asyncio.create_task(store._poll_for_ever(), name="keys")
        return store

    async def close(self) -> None:
        self._closing.set()
        if self._task is not None:
            await self._task

    async def find(self, key_id: str) -> KeyRecord | None:
        record = self._records.get(key_id)
        now = self._clock.monotonic()
        age_s = now - self._fresh_at
        if record is None:
            # It may have been made a moment ago: wait for a look that began after this request did.
            if age_s < _MISS_EVERY_S:
                await asyncio.sleep(_MISS_EVERY_S - age_s)
            await self.poll(unless_since=now)
            return self._records.get(key_id)
        if age_s > GRACE_S:
            raise Unavailable("keys cannot be looked up: the database does not answer")
        return record

    async def poll(self, unless_since: float = float("inf")) -> None:
        """Take over what changed since the last poll, unless one began after that time. Raises `Unavailable`."""
        async with self._polling:
            began = self._clock.monotonic()
            if self._fresh_at > unless_since:
                return
            revision, changed = await self._database.read(self._changes)
            # What was read is as old as the moment when reading began.
            self._fresh_at = began
            if revision == self._revision:
                return
            if revision < self._revision:
                self._records.clear()  # the store went back in time, so all rows were read
            self._records.update((record.key_id, record) for record in map(record_of, changed))
            self._revision = revision
        self._on_change()

    def _changes(self) -> Tx[tuple[int, list[Row]]]:
        revision: int = (yield Fetch(_REVISION))[0][0]
        if revision == self._revision:
            return revision, []
        since = self._revision if revision > self._revision else -1
        return revision, list((yield Fetch(_CHANGED, (since,))))

    async def _poll_for_ever(self) -> None:
        while not self._closing.is_set():
            try:
                await asyncio.wait_for(self._closing.wait(), POLL_EVERY_S)
            except TimeoutError:
                pass
            else:
                return
            try:
                await self.poll()
            except Unavailable as e:
                if not self._down:
                    _log.warning("keys in memory are used for at most %.0f s: %s", GRACE_S, e)
                self._down = True
            else:
                self._down = False
