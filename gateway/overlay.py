"""Configuration that is written over the admin API, in the running gateway: taken over by every process within a second,
tried before it is written. A process that cannot take it over keeps what it has and says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from gateway.admin.ports import Tried
from gateway.administration import configured
from gateway.core.config_overlay import Documents, Stored
from gateway.reload import demo_url, found, renewed
from gateway.settings import ConfigError, Settings
from gateway.storage import documents
from gateway.storage.database import Database
from gateway.storage.transact import Tx
from gateway.telemetry.metrics import Metrics

_log = logging.getLogger("gateway")

#: What the files say with these documents laid over it. Raises `ConfigError`.
Read = Callable[[Documents], Settings]


class Overlay:
    """`begin` before the first request, `turn` after any change in the store takes it over. `documents` are those that
    ought to be in force: so a later reading of the files includes them.
    """

    def __init__(
        self,
        read: Read | None,
        settings: Callable[[], Settings],
        use: Callable[[Settings], None],
        metrics: Metrics | None = None,
    ) -> None:
        """`settings` are those in force, `use` puts others in force. Without `read` there is nothing to lay anything over."""
        self.on = read is not None
        self._read: Read = read or (lambda _: settings())
        self._settings = settings
        self._use = use
        self._demo = ""
        self._database: Database | None = None
        self._stored = Stored()
        self._turning = asyncio.Lock()
        self.writing = asyncio.Lock()
        self._taken_over = 0
        #: why what is written is not in force here, "" if it is
        self.trouble = ""
        #: nothing that was written was ever in force here: the process began with the files alone
        self._never = False
        if metrics is not None:
            metrics.gauge(
                "tollhouse_overlay_not_in_force",
                "1 if what was written over the admin API is not in force in this process.",
                lambda: float(bool(self.trouble)),
            )

    @property
    def documents(self) -> Documents:
        return self._stored.documents

    async def begin(self, database: Database) -> None:
        """Raises `Unavailable`. What does not fit leaves the files alone in force."""
        self._database, self._demo = database, demo_url(self._settings())
        await self.turn()
        self._never = bool(self.trouble)

    def reload(self, read: Callable[[], Settings]) -> tuple[str, ...]:
        """Take over what `reload.LIVE` names; returns what else has changed. Raises `ConfigError`, and everything stays."""
        settings, waiting = renewed(self._settings(), read, self._demo)
        self._use(settings)
        return waiting

    def reread(self) -> tuple[str, ...]:
        """The same with what files say now, and what was written over the admin API."""
        if not self.on:
            return ()
        waiting = self.reload(partial(self._read, self.documents))
        self._in_force()
        return waiting

    def reasons(self) -> list[str]:
        """Why traffic should go elsewhere. Not for a process that keeps what was in force before."""
        never = "what was written over the admin API is not in force here; the log says why"
        return [never] if self._never and self.trouble else []

    def _in_force(self) -> None:
        self.trouble, self._never = "", False
        self._taken_over += 1

    async def turn(self) -> None:
        """Take over what changed. Raises `Unavailable`."""
        if not self.on or self._database is None:
            return
        async with self._turning:
            at = self._stored.stamp

            def changed() -> Tx[Stored | None]:
                if (yield from documents.stamp()) == at:
                    return None
                return (yield from documents.stored())

            stored = await self._database.read(changed)
            if stored is None:
                return
            self._stored = stored
            try:
                await self._take_over(stored.documents)
            except ConfigError as error:
                self.trouble = "; ".join(str(problem) for problem in error.problems)
                for problem in error.problems:
                    _log.error("what was written over the admin API is not in force here: %s", problem)
                return
            self._in_force()
            _log.info("the configuration of the admin API is in force: %d documents", len(stored.documents))

    async def _take_over(self, wanted: Documents) -> None:
        while True:
            before = self._taken_over
            new = await asyncio.to_thread(self._read, wanted)
            # Else the files were read anew meanwhile, and may say something else.
            if before == self._taken_over:
                break
        self._use(renewed(self._settings(), lambda: new, self._demo)[0])

    async def tried(self, wanted: Documents) -> Tried:
        """What the configuration would be with these documents, or what is wrong with it; nothing changes."""
        return await asyncio.to_thread(self._tried, wanted)

    def _tried(self, wanted: Documents) -> Tried:
        try:
            settings, _ = renewed(self._settings(), partial(self._read, wanted), self._demo)
        except ConfigError as error:
            return Tried(None, tuple(found(problem) for problem in error.problems))
        return Tried(configured(settings))
