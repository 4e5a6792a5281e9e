"""Requests that come again after they were refused: told the same, before anything of them is read.

Agents and SDKs repeat what was refused, up to thirty times (clients.md), and always the same bytes. Only what stays so
until somebody changes a budget or a task is told again, for a second, and not after a change that this process has
heard of (`ports.Ledger.changes`).
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash
from msgspec.structs import replace

from gateway.core.errors import BudgetExceeded
from gateway.ports import Answer, Incoming

TTL_S = 1.0
_MOST = 2_000
#: Differ between repeats of one request.
_PASSED_OVER = frozenset({"x-stainless-retry-count", "content-length", "connection"})


@dataclass(frozen=True, slots=True)
class Told:
    """A refusal, or the answer that stood for it."""

    error: BudgetExceeded
    answer: Answer | None
    until_s: float
    changes: int

    def again(self) -> Answer:
        """Raises the error, if no answer stands for it."""
        if self.answer is None:
            raise self.error.with_traceback(None)
        return replace(self.answer, headers=list(self.answer.headers))


class Repeats:
    def __init__(self) -> None:
        self._told: dict[int, Told] = {}

    def find(self, incoming: Incoming, changes: int, now_s: float) -> Told | None:
        """Costs nothing where nobody was refused lately: the whole body is hashed to find it."""
        self._forget(now_s)
        if not self._told:
            return None
        mark = _mark(incoming)
        told = self._told.get(mark)
        if told is None:
            return None
        if told.changes == changes:
            return told
        del self._told[mark]
        return None

    def add(
        self, incoming: Incoming, error: BudgetExceeded, answer: Answer | None, changes: int, now_s: float
    ) -> None:
        """Remember what a request was told, if it stays so."""
        if not (error.used_up or (error.refused is not None and error.refused.state)):
            return
        if len(self._told) >= _MOST:
            self._told.clear()
        kept = None if answer is None else replace(answer, headers=list(answer.headers))
        mark = _mark(incoming)
        self._told.pop(mark, None)
        self._told[mark] = Told(error, kept, now_s + TTL_S, changes)

    def _forget(self, now_s: float) -> None:
        """What was told too long ago: the oldest is first, for all last equally long."""
        while self._told:
            mark = next(iter(self._told))
            if now_s < self._told[mark].until_s:
                return
            del self._told[mark]


def _mark(incoming: Incoming) -> int:
    """The same for the same request of the same key, and for no other."""
    mark = xxhash.xxh3_128(incoming.body)
    about = [incoming.operation, incoming.caller.key.key_id, incoming.path_task or "", incoming.query]
    for name, value in incoming.headers.items():
        low = name.lower()
        if low not in _PASSED_OVER:
            about += low, value
    mark.update("\0".join(about).encode("utf-8", "surrogateescape"))
    return mark.intdigest()
