"""places: how many calls a deployment takes at once, and who gets the next place.

Whoever waits stands in the queue of its team; teams take turns, so one that asks a thousand times at once delays
another by one call. A queue that is full, or too slow, is said so with Retry-After.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from gateway.core.catalog import Deployment
from gateway.core.errors import Unavailable

WAIT_MAX_S = 10.0
#: Waiting calls per place that a deployment has, over all teams.
WAITING_PER_PLACE = 4
_RETRY_AFTER_S = 2


class _Gate:
    __slots__ = ("inside", "waiting")

    def __init__(self) -> None:
        self.inside = 0
        self.waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def queued(self) -> int:
        return sum(map(len, self.waiting.values()))

    def admit_next(self) -> bool:
        """Hand a place over to the team whose turn it is; False if nobody waits."""
        while self.waiting:
            team, queue = next(iter(self.waiting.items()))
            future = queue.popleft()
            del self.waiting[team]
            if queue:
                self.waiting[team] = queue  # behind the others
            if not future.done():
                future.set_result(None)
                return True
        return False


class Places:
    """The places of all deployments that have a limit, in this process."""

    def __init__(self, *, wait_max_s: float = WAIT_MAX_S) -> None:
        self._gates: dict[str, _Gate] = {}
        self._held: dict[str, str] = {}  # attempt -> deployment
        self._wait_max_s = wait_max_s

    def free(self, deployment: Deployment) -> bool:
        """A call would not have to wait."""
        gate = self._gates.get(deployment.name)
        return deployment.concurrent is None or gate is None or gate.inside < deployment.concurrent

    async def enter(self, deployment: Deployment, team: str, attempt_id: str) -> None:
        """Returns with a place, which `leave` gives back; raises `Unavailable` without one."""
        most = deployment.concurrent
        if most is None:
            return
        gate = self._gates.setdefault(deployment.name, _Gate())
        if gate.inside < most and not gate.waiting:
            gate.inside += 1
            self._held[attempt_id] = deployment.name
            return
        if gate.queued >= most * WAITING_PER_PLACE:
            raise _full(deployment)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gate.waiting.setdefault(team, deque()).append(turn)
        try:
            async with asyncio.timeout(self._wait_max_s):
                await turn
        except BaseException as stop:
            # The place may have come in the same turn of the loop.
            if turn.done() and not turn.cancelled():
                self._pass_on(gate)
            turn.cancel()
            if isinstance(stop, TimeoutError):
                raise _full(deployment) from stop
            raise
        self._held[attempt_id] = deployment.name

    def leave(self, attempt_id: str) -> None:
        """Give the attempt's place back, if it has one."""
        name = self._held.pop(attempt_id, None)
        if name is not None:
            self._pass_on(self._gates[name])

    def _pass_on(self, gate: _Gate) -> None:
        if not gate.admit_next():
            gate.inside -= 1

    def counts(self) -> dict[tuple[str, ...], float]:
        """(deployment, "inside" or "waiting") -> how many."""
        found: dict[tuple[str, ...], float] = {}
        for name, gate in self._gates.items():
            found[name, "inside"] = gate.inside
            found[name, "waiting"] = gate.queued
        return found


def _full(deployment: Deployment) -> Unavailable:
    return Unavailable(
        f"all {deployment.concurrent} places of {deployment.name} are taken, and others wait for one",
        retry_after_s=_RETRY_AFTER_S,
    )
