"""Whole answers by a digest of their request, bounded in bytes and time. Of one process; losing it loses a saving."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

BYTES_MAX = 64 << 20
#: Larger answers are not kept.
ANSWER_BYTES_MAX = 4 << 20


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request may be answered from, and how long its own answer is kept."""

    key: bytes
    life_s: float


@dataclass(frozen=True, slots=True)
class Kept:
    body: bytes
    content_type: str
    deployment: str
    model: str
    tier: str
    names: tuple[str, ...]  # of what answered: whoever may not use it gets nothing
    since_s: float
    until_s: float


class KeptAnswers:
    """The answers that one process keeps, least recently used out first."""

    def __init__(self, *, bytes_max: int = BYTES_MAX) -> None:
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()
        self._bytes = 0
        self._bytes_max = bytes_max
        self.given = 0

    def find(self, key: bytes, now_s: float) -> Kept | None:
        found = self._kept.get(key)
        if found is not None and now_s >= found.until_s:
            self._drop(key)
            return None
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def keep(self, key: bytes, answer: Kept) -> None:
        if len(answer.body) > min(ANSWER_BYTES_MAX, self._bytes_max):
            return
        self._drop(key)
        self._kept[key] = answer
        self._bytes += len(answer.body)
        while self._bytes > self._bytes_max:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: bytes) -> None:
        found = self._kept.pop(key, None)
        if found is not None:
            self._bytes -= len(found.body)
