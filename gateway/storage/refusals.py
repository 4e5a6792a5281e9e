"""Refusals that are known: repeated from memory for a moment, so that a storm of them costs no SQL.

Only what no hold that ends can change is kept: a budget that is used up by what is posted, and a task that waits for
somebody. A budget that is raised is a new revision, with which everything is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.core.budget import exhausted
from gateway.core.entry import Amounts, Refused
from gateway.ports import Clock

TTL_S = 1.0
_MOST = 10_000


class Refusals:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: dict[str, tuple[float, Refused]] = {}  # scope -> until when, and what it says
        self.changes = 0  # how often all was forgotten
        self.revision = 0  # of budgets, as of the latest admission
        #: tells other replicas: scope, what it says, as of which revision
        self.share: Callable[[str, Refused, int], None] | None = None

    def find(
        self, own: str, scopes: Sequence[str], ask: Amounts, least: Amounts, landing: bool
    ) -> Refused | None:
        """What an ask of the task with the scope `own` is told without asking.

        A landing, which may use more than others, is told only what landings of its task were told.
        """
        if not self._known:
            return None
        for scope in (_landing_of(own),) if landing else (own, *scopes):
            until_s, refused = self._known.get(scope, (0.0, None))
            if refused is None:
                continue
            fits = ask.of(refused.unit) == 0 or not exhausted(refused, least)
            if fits and not refused.state:
                continue
            over = refused.resets_at_ms is not None and refused.resets_at_ms <= self._clock.now_ms()
            if not over and self._clock.monotonic() < until_s:
                return refused
            del self._known[scope]
        return None

    def add(self, own: str, refused: Refused, least: Amounts, landing: bool) -> None:
        """Remember what an ask was told, if that will stay so. `own` may be below the task whose budget refused."""
        if not (refused.state or exhausted(refused, least)):
            return
        if len(self._known) >= _MOST:
            self._known.clear()
        until_s = self._clock.monotonic() + TTL_S
        # The state is that of a task, whatever budget says how much is left.
        where = {own} if refused.state else {refused.scope, own}
        for scope in {_landing_of(own)} if landing else where:
            self._known[scope] = until_s, refused
            if self.share is not None:
                self.share(scope, refused, self.revision)

    def learn(self, scope: str, refused: Refused, revision: int, left_s: float) -> None:
        """What another replica was told, and for how long it would still repeat it."""
        if revision >= self.revision and scope not in self._known and len(self._known) < _MOST:
            self._known[scope] = self._clock.monotonic() + left_s, refused

    def forget(self) -> None:
        self.changes += 1
        self._known.clear()


def _landing_of(scope: str) -> str:
    return f"landing of {scope}"
