"""Refusals that hold for more than the request that was refused, by the scope whose budget is used up.

What is known is known for a second, and not after a change that this process has heard of (`ports.Ledger.changes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gateway.core import bounds
from gateway.core.catalog import Catalog
from gateway.core.entry import Attempt, OnExceed, Refused
from gateway.core.errors import BudgetExceeded
from gateway.core.least import least_nano_usd
from gateway.core.prices import PriceBook
from gateway.core.refusal import used_up
from gateway.core.task import State

TTL_S = 1.0
_MOST = 2_000
_MINUTE_MS = 60_000
#: States in which a task gets nothing, whatever is asked. One that is paused for its loop may go on when a person speaks.
_CLOSED = frozenset({State.PAUSED_BUDGET, State.PAUSED_ADMIN, State.DONE})


@dataclass(frozen=True, slots=True)
class Known:
    """A refusal as others are told it, the attempt that was refused first, and how long it is told."""

    error: BudgetExceeded
    refused: Refused
    attempt: Attempt
    until_s: float
    changes: int

    @property
    def left(self) -> int:
        """What holds that end cannot change: the limit less what is posted and kept back."""
        return self.refused.limit - self.refused.kept_back - self.refused.spent


class Spent:
    """By scope. Bounded; costs one comparison where nobody was refused lately."""

    def __init__(self) -> None:
        self._known: dict[str, Known] = {}
        self._until_s = 0.0  # of the latest
        self._cheapest: tuple[Catalog, PriceBook, int, int] | None = None

    def any(self, now_s: float) -> bool:
        return now_s < self._until_s

    def add(self, error: BudgetExceeded, landed: bool, changes: int, now_s: float) -> None:
        """Remember what an attempt was told, if it may hold for others. `landed`: its task had its last answer."""
        refused = error.refused
        if refused is None or error.asked is None or (refused.on_exceed is OnExceed.SUMMARIZE and not landed):
            return
        attempt = error.asked[0]
        own = f"task:{attempt.task_id}"
        if refused.state:
            if refused.state not in _CLOSED:
                return
            known, scopes = Known(error, refused, attempt, now_s + TTL_S, changes), {own}
        elif error.used_up:
            known = Known(used_up(refused), refused, attempt, now_s + TTL_S, changes)
            # Under a shared budget each task has its own last answer.
            shared = not refused.scope.startswith("task:")
            scopes = {own} if landed else {refused.scope} if shared else {refused.scope, own}
        else:
            return
        if not self.any(now_s) or len(self._known) >= _MOST:
            self._known.clear()
        self._until_s = known.until_s
        for scope in scopes:
            self._known[scope] = known

    def find(self, scopes: Iterator[str], changes: int, now_ms: int, now_s: float) -> Iterator[Known]:
        """What is still known of these scopes."""
        for scope in scopes:
            known = self._known.get(scope)
            if known is None or known.changes != changes or now_s >= known.until_s:
                continue
            resets_ms = known.refused.resets_at_ms
            if resets_ms is None or now_ms < resets_ms:
                yield known

    def cheapest_nano_usd(self, catalog: Catalog, book: PriceBook, now_ms: int) -> int:
        """The least that any request holds; 0 if a deployment is free, or has no price. Looked up once a minute."""
        minute = now_ms // _MINUTE_MS
        cached = self._cheapest
        if cached is None or cached[0] is not catalog or cached[1] is not book or cached[2] != minute:
            rows = [book.find(d.price, now_ms) for d in catalog.deployments]
            least = min(
                (0 if row is None else least_nano_usd(row, bounds.LEAST_TOKENS) for row in rows), default=0
            )
            self._cheapest = cached = catalog, book, minute, least
        return cached[3]
