"""Death on order, for `make crash` (docs/proof.md): a process that kills itself where a crash would hurt most.

Only if `$TOLLHOUSE_CRASH_FILE` is set does the composition root put these wrappers around its adapters; without it
nothing of this is loaded. The file, when it exists, holds the name of a point: the first to reach it removes the
file and dies by SIGKILL, as a process does whose machine takes its memory away.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TypeVar

from gateway.ports import Upstream, UpstreamAnswer, UpstreamCall
from gateway.storage.admission import admit
from gateway.storage.database import Database
from gateway.storage.journal import Journal
from gateway.storage.lease import reap
from gateway.storage.settlement import Ending, settle
from gateway.storage.transact import Runner, Tx

T = TypeVar("T")


class Point(StrEnum):
    """Where a process can be told to die."""

    HOLD_BEFORE_COMMIT = "hold-before-commit"
    HOLD_AFTER_COMMIT = "hold-after-commit"  # its answer has not reached the request
    BEFORE_SEND = "before-send"  # admitted, and no byte sent to the provider
    AFTER_HEADERS = "after-headers"
    AFTER_FIRST_BYTES = "after-first-bytes"
    AMID_STREAM = "amid-stream"
    AFTER_LAST_BYTES = "after-last-bytes"  # of the provider's answer, which nobody has priced yet
    SETTLE_BEFORE_COMMIT = "settle-before-commit"
    SETTLE_AFTER_COMMIT = "settle-after-commit"
    JOURNAL_BEFORE_WRITE = "journal-before-write"
    JOURNAL_TORN = "journal-torn"  # half of it is written
    JOURNAL_AFTER_SYNC = "journal-after-sync"
    REPLAY_BEGUN = "replay-begun"
    REPLAY_POSTED = "replay-posted"  # and the segment is still there
    REAP_BEFORE_COMMIT = "reap-before-commit"
    REAP_AFTER_COMMIT = "reap-after-commit"


_AROUND_COMMIT = {
    admit: (Point.HOLD_BEFORE_COMMIT, Point.HOLD_AFTER_COMMIT),
    settle: (Point.SETTLE_BEFORE_COMMIT, Point.SETTLE_AFTER_COMMIT),
    reap: (Point.REAP_BEFORE_COMMIT, Point.REAP_AFTER_COMMIT),
}
#: This piece of a stream has some before it and, if the stream is not very short, some after it.
_AMID = 3


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Crash:
    """The order, and the wrappers that look for it."""

    def __init__(self, order: Path, die: Callable[[], None] = _kill) -> None:
        self._order = order
        self._die = die

    def ordered(self, point: Point) -> bool:
        try:
            return self._order.read_text().strip() == point
        except FileNotFoundError:
            return False

    def reached(self, point: Point) -> None:
        """Returns, unless death at this point is ordered."""
        if self.ordered(point):
            self._order.unlink(missing_ok=True)
            self._die()

    def database(self, database: Database) -> Database:
        """The same, whose transactions look for the order."""
        return replace(database, writer=_Transactions(database.writer, self))

    def journal(self, directory: Path, replica_id: str) -> Journal:
        return _Journal(directory, replica_id, self)

    def upstream(self, upstream: Upstream) -> Upstream:
        return _Provider(upstream, self)


class _Transactions(Runner):
    def __init__(self, inner: Runner, crash: Crash) -> None:
        self.flights = inner.flights
        self._inner = inner
        self._crash = crash

    async def run(self, tx: Callable[[], Tx[T]], timeout_s: float) -> T:
        points = _AROUND_COMMIT.get(tx.func) if isinstance(tx, partial) else None
        if points is None:
            return await self._inner.run(tx, timeout_s)
        before, after = points

        def watched() -> Tx[T]:
            result = yield from tx()
            # A turn of the reaper that finds nothing to charge is no place to die at.
            if result:
                self._crash.reached(before)
            return result

        result = await self._inner.run(watched, timeout_s)
        if result:
            self._crash.reached(after)
        return result

    async def close(self) -> None:
        await self._inner.close()


class _Journal(Journal):
    def __init__(self, directory: Path, replica_id: str, crash: Crash) -> None:
        super().__init__(directory, replica_id)
        self._crash = crash

    async def append(self, endings: Sequence[Ending]) -> None:
        self._crash.reached(Point.JOURNAL_BEFORE_WRITE)
        await super().append(endings)
        self._crash.reached(Point.JOURNAL_AFTER_SYNC)

    async def close_segment(self) -> list[Path]:
        segments = await super().close_segment()
        if segments:
            self._crash.reached(Point.REPLAY_BEGUN)
        return segments

    async def drop(self, segment: Path) -> None:
        self._crash.reached(Point.REPLAY_POSTED)
        await super().drop(segment)

    def _append(self, frames: bytes) -> None:
        if self._crash.ordered(Point.JOURNAL_TORN):
            super()._append(frames[: len(frames) // 2])
            self._crash.reached(Point.JOURNAL_TORN)
        super()._append(frames)


class _Provider:
    def __init__(self, inner: Upstream, crash: Crash) -> None:
        self._inner = inner
        self._crash = crash

    async def open(self, call: UpstreamCall) -> UpstreamAnswer:
        self._crash.reached(Point.BEFORE_SEND)
        answer = await self._inner.open(call)
        self._crash.reached(Point.AFTER_HEADERS)
        return _Answer(answer, self._crash)


class _Answer:
    def __init__(self, inner: UpstreamAnswer, crash: Crash) -> None:
        self._inner = inner
        self._crash = crash

    @property
    def status(self) -> int:
        return self._inner.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._inner.headers

    async def read(self, limit: int) -> bytes:
        body = await self._inner.read(limit)
        self._crash.reached(Point.AFTER_LAST_BYTES)
        return body

    async def chunks(self) -> AsyncIterator[bytes]:
        number = 0
        async for piece in self._inner.chunks():
            number += 1
            yield piece
            if number == 1:
                self._crash.reached(Point.AFTER_FIRST_BYTES)
            elif number == _AMID:
                self._crash.reached(Point.AMID_STREAM)
        self._crash.reached(Point.AFTER_LAST_BYTES)

    async def close(self) -> None:
        await self._inner.close()
