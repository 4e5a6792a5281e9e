"""Posts settlements from files once more, for a database that has lost commits (`storage.kept`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gateway.core.entry import Settled
from gateway.core.errors import Unavailable
from gateway.core.ids import ms_of
from gateway.storage.database import Database
from gateway.storage.journal import read_segment
from gateway.storage.kept import kept_files
from gateway.storage.settlement import Ending, settle

_BATCH = 200
_REPLICA = "journal-replay"
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Replayed:
    """How many settlements the database had lost, had otherwise, had, and does not take."""

    files: int = 0
    posted: int = 0
    corrected: int = 0
    known: int = 0
    rejected: int = 0


async def replay(database: Database, journals: Path, since_ms: int = 0) -> Replayed:
    """Post what the files below `journals` say of attempts that began at `since_ms` or later, each at most once.

    Gateways may be serving: what they post at the same time meets it at the same guards. Raises `Unavailable`; what was
    posted before stays so, and the next replay goes on from there.
    """
    done = Replayed()
    for path in _files(journals):
        endings = await asyncio.to_thread(read_segment, path)
        done.files += 1
        for batch in _batches([e for e in endings if ms_of(e.attempt.attempt_id) >= since_ms]):
            for answer in await _post(database, batch, done):
                if answer is Settled.SETTLED:
                    done.posted += 1
                elif answer is Settled.CORRECTED:
                    done.corrected += 1
                else:
                    done.known += 1
    return done


def _files(journals: Path) -> list[Path]:
    """What is kept, then what waits: a gateway posts that by itself, but may be gone for good."""
    return [*kept_files(journals), *sorted(journals.glob("*.journal"))]


async def _post(database: Database, batch: Sequence[Ending], done: Replayed) -> list[Settled]:
    try:
        return await database.write(partial(settle, batch, _REPLICA, True))
    except Unavailable:
        raise
    except Exception as e:  # one that the store does not take must not keep the others out
        if len(batch) == 1:
            _log.error("the store refuses the settlement of %s: %s", batch[0].attempt.attempt_id, e)
            done.rejected += 1
            return []
    return [answer for ending in batch for answer in await _post(database, [ending], done)]


def _batches(endings: Sequence[Ending]) -> Iterator[list[Ending]]:
    """In order, and no attempt twice in one batch: one transaction settles none twice."""
    batch: dict[str, Ending] = {}
    for ending in endings:
        if ending.attempt.attempt_id in batch or len(batch) == _BATCH:
            yield [*batch.values()]
            batch = {}
        batch[ending.attempt.attempt_id] = ending
    if batch:
        yield [*batch.values()]
