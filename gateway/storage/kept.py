"""The last day's settlements once more, on the replica's own disk, for a database that has lost commits.

After a failover to a standby that was behind, or from a backup, the database has forgotten what it had confirmed.
`tollhouse journal replay` posts these files again: idempotent, as each attempt has one terminal entry and at most one
correction. They are written once a second and not synced: what a crash of the machine takes from them is in the
database. Journal segments (`storage.journal`), which were synced, come here when they are posted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

KEEP_S = 86_400.0
#: Of all files together; the oldest go first. A settlement is about 1 kB.
BYTES_MAX = 256 << 20
#: A file is closed at this size or age, so that what is too old can go.
FILE_BYTES = 8 << 20
FILE_AGE_S = 3_600.0
PRUNE_EVERY_S = 600.0
#: What is not written yet, because the disk is slow or full: beyond this it is dropped.
BUFFER_BYTES_MAX = 16 << 20
DIRECTORY = "kept"
SUFFIX = ".kept"


class Kept:
    """One replica's copy, below its journal. `now_s`: wall clock, the time of files."""

    def __init__(self, journals: Path, replica_id: str, now_s: Callable[[], float] = time.time) -> None:
        self._directory = journals / DIRECTORY
        self._replica_id = replica_id
        self._now_s = now_s
        self._buffer: list[bytes] = []
        self._buffered = 0
        self._path: Path | None = None
        self._opened_s = 0.0
        self._written = 0
        self._count = 0
        self._pruned_s = float("-inf")

    def add(self, frames: Iterable[bytes]) -> None:
        """Into the buffer; `flush` writes it. Never fails."""
        for frame in frames:
            if self._buffered + len(frame) > BUFFER_BYTES_MAX:
                return
            self._buffer.append(frame)
            self._buffered += len(frame)

    @property
    def waiting(self) -> bool:
        """Something was added."""
        return bool(self._buffer)

    @property
    def due(self) -> bool:
        """`flush` has something to do."""
        return self.waiting or self._now_s() - self._pruned_s > PRUNE_EVERY_S

    def flush(self) -> None:
        """Write what was added, and let go of what is too old or too much. Blocks; raises OSError."""
        frames, self._buffer, self._buffered = self._buffer, [], 0
        if frames:
            self._write(b"".join(frames))
        if self._now_s() - self._pruned_s > PRUNE_EVERY_S:
            self.prune()

    def adopt(self, segment: Path) -> None:
        """Take over a file of frames of the journal. Blocks; raises OSError."""
        self._directory.mkdir(exist_ok=True)
        segment.replace(self._fresh_path())
        self.prune()

    def prune(self) -> None:
        """Whatever replica's: one that does not come back has nobody else to do it."""
        self._pruned_s = self._now_s()
        ages = []
        for path in kept_files(self._directory.parent):
            with suppress(FileNotFoundError):  # another process on this machine was faster
                stat = path.stat()
                ages.append((stat.st_mtime, stat.st_size, path))
        left = sum(size for _, size, _ in ages)
        for at_s, size, path in sorted(ages):
            if path != self._path and (self._now_s() - at_s > KEEP_S or left > BYTES_MAX):
                left -= size
                path.unlink(missing_ok=True)

    def _write(self, content: bytes) -> None:
        now_s = self._now_s()
        if (
            self._path is None
            or self._written + len(content) > FILE_BYTES
            or now_s - self._opened_s > FILE_AGE_S
        ):
            self._directory.mkdir(exist_ok=True)
            self._path, self._opened_s, self._written = self._fresh_path(), now_s, 0
        with open(self._path, "ab", opener=_private) as file:
            file.write(content)
        self._written += len(content)

    def _fresh_path(self) -> Path:
        """Sorts by time. Two runs of a replica never meet in one file, for a torn end hides what comes behind it."""
        self._count += 1
        at_ms = round(self._now_s() * 1_000)
        name = f"{at_ms:015d}-{self._count:06d}-{os.getpid()}-{self._replica_id}{SUFFIX}"
        return self._directory / name


def kept_files(journals: Path) -> Sequence[Path]:
    """All that is kept below a directory of journals, the oldest first."""
    return sorted((journals / DIRECTORY).glob(f"*{SUFFIX}"))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
