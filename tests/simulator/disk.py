"""The disk under a replica's journal: late, full, and, when the process dies during a write, half-written.

The files are real ones in memory, written by the product's own code; what happens here is when, and whether.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.simulator.loop import Owner, VirtualLoop


@dataclass(slots=True)
class _Visit:
    work: Callable[[], Any]
    answer: asyncio.Future[Any]


@dataclass
class JournalDisk:
    """`directory` outlives the process. While `full`, writes fail before they begin."""

    loop: VirtualLoop
    directory: Path
    rng: Random
    slow_s: float = 0.0
    full: bool = False
    _under_way: list[_Visit] = field(default_factory=list)

    def submit(self, owner: Owner, work: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        visit = _Visit(work, answer)
        self._under_way.append(visit)
        delay_s = self.rng.choice((0.0002, 0.002, 0.02)) + self.rng.random() * self.slow_s
        self.loop.call_later(delay_s, self._perform, visit)

    def _perform(self, visit: _Visit) -> None:
        self._under_way.remove(visit)
        if visit.answer.cancelled():
            return
        if self.full:
            visit.answer.set_exception(OSError(errno.ENOSPC, "no space left on the simulated device"))
            return
        try:
            result = visit.work()
        except OSError as e:
            visit.answer.set_exception(e)
        else:
            visit.answer.set_result(result)

    def crash(self) -> str:
        """The process died. What it was writing is on the disk, or not, or its last part is not. Says which."""
        said = []
        for visit in self._under_way:
            fate = self.rng.choice(("lost", "written", "torn"))
            said.append(fate)
            if fate == "lost":
                continue
            before = self._sizes()
            try:
                visit.work()
            except OSError:
                continue
            if fate == "torn":
                self._tear(before)
        self._under_way.clear()
        return ",".join(said)

    def _tear(self, before: dict[Path, int]) -> None:
        for path, size in self._sizes().items():
            new = size - before.get(path, 0)
            if new <= 0:
                continue
            content = bytearray(path.read_bytes())
            if self.rng.random() < 0.5:
                del content[size - self.rng.randint(1, new) :]
            else:
                content[size - self.rng.randint(1, new)] ^= 0xFF
            path.write_bytes(content)

    def _sizes(self) -> dict[Path, int]:
        return {path: path.stat().st_size for path in sorted(self.directory.iterdir()) if path.is_file()}
