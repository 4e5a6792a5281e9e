"""One serving process per SQLite file. Command-line tools do not need the lock."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO


class AlreadyServing(Exception):
    """Another process serves from this database file."""

    def __init__(self, path: Path, pid: str) -> None:
        self.path = path
        self.pid = pid
        super().__init__(
            f"another gateway (pid {pid or 'unknown'}) already serves from {path}; stop it, or use Postgres "
            "for more than one process"
        )


class ServingLock:
    """Held from `take` to `release`; the kernel releases it when the process dies, however it dies."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    @classmethod
    def take(cls, database: Path) -> ServingLock:
        """Raises `AlreadyServing` at once if another process, or this one, holds it."""
        path = database.with_name(database.name + ".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            pid = file.read().strip()
            file.close()
            raise AlreadyServing(database, pid) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        return cls(file)

    def release(self) -> None:
        """Twice is harmless. The file stays: removing it would let two processes lock two files of one name."""
        self._file.close()
