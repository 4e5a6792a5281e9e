"""places: how many calls a deployment takes at once, and who gets the next place (`core.waiting`).

A queue that is full, or too slow, is said so with Retry-After: 429 to a team whose own calls fill it, 503 to others.

Queues are of each process. Places are, too, or of all processes together, once they are shared: then a process with a
queue asks every few milliseconds for one that somebody has left, so that all who wait have the same chance of it.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace

from gateway.core.catalog import Deployment
from gateway.core.errors import GatewayError, RateLimited, Unavailable
from gateway.core.serving import QueuePolicy, Urgency
from gateway.core.waiting import Line, Ticket
from gateway.ports import Limits, Spawn

#: Waiting calls per place that a deployment has, over all teams, unless its `queue` says how many.
WAITING_PER_PLACE = 4
_RETRY_AFTER_S = 2
_RETRY_AFTER_MAX_S = 60
#: A process with a queue asks for a place that all share after this time, or up to twice that, lest two keep step.
_ASK_AGAIN_S = 0.006
#: The weight of the newest call in how long a place is held.
_NEWEST = 0.1

#: What is told of a call that came to a deployment with places: deployment, urgency, seconds that it waited, and how it
#: ended: "entered", "late", "full" or "left".
Waited = Callable[[str, Urgency, float, str], None]


def _one(_deployment: str) -> int:
    return 1


def _untold(_deployment: str, _urgency: Urgency, _waited_s: float, _how: str) -> None:
    """Nobody counts."""


class _Gate:
    """One deployment as it was last asked for, who is inside, and who waits."""

    __slots__ = ("asking", "deployment", "held_s", "inside", "line", "turns")

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.inside = 0
        self.line = Line()
        #: a turn ends with a place, or with why there is none
        self.turns: dict[Ticket, asyncio.Future[GatewayError | str]] = {}
        self.held_s = 0.0  # for how long a place is held, averaged; 0 = not known
        #: asks for shared places as long as somebody waits
        self.asking: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True)
class _Held:
    gate: _Gate
    since_s: float
    place: str  # as it is known to those who share it; "" = of this process alone


class Places:
    """The places of all deployments that have a limit, in this process or, after `share`, in all.

    `live` tells how many replicas of a deployment are in use; one at least counts, for a request that finds none is
    refused elsewhere. `wait_max_s` replaces that of every deployment.
    """

    def __init__(
        self,
        *,
        live: Callable[[str], int] = _one,
        waited: Waited = _untold,
        monotonic: Callable[[], float] = time.monotonic,
        wait_max_s: float | None = None,
    ) -> None:
        self._gates: dict[str, _Gate] = {}
        self._held: dict[str, _Held] = {}  # by attempt
        self._live = live
        self._waited = waited
        self._monotonic = monotonic
        self._wait_max_s = wait_max_s
        self._shared: Limits | None = None
        self._spawn: Spawn | None = None
        self._random: Callable[[], float] = float

    def share(self, limits: Limits, spawn: Spawn, random: Callable[[], float]) -> None:
        """From now on places are counted there for all processes. `random` gives numbers from 0 to 1."""
        self._shared, self._spawn, self._random = limits, spawn, random

    def most(self, deployment: Deployment) -> int | None:
        """Calls at once; None = as many as come."""
        per_replica = deployment.serving.concurrent_per_replica
        if per_replica is None:
            return deployment.concurrent
        return per_replica * max(1, self._live(deployment.name))

    def free(self, deployment: Deployment) -> bool:
        """A call would not have to wait."""
        most = self.most(deployment)
        gate = self._gates.get(deployment.name)
        return most is None or gate is None or gate.inside < most

    async def enter(
        self, deployment: Deployment, team: str, attempt_id: str, urgency: Urgency = Urgency.INTERACTIVE
    ) -> None:
        """Returns with a place, which `leave` gives back; raises `Unavailable` or `RateLimited` without one."""
        most = self.most(deployment)
        if most is None:
            return
        gate = self._gates.get(deployment.name)
        if gate is None:
            gate = self._gates[deployment.name] = _Gate(deployment)
        gate.deployment = deployment
        now_s = self._monotonic()
        if len(gate.line):
            self._fill(gate)  # a replica may have come since
        place = None if len(gate.line) else await self._taken(gate, most)
        if place is None:
            place = await self._wait(gate, Ticket(team, urgency, now_s), most)
        entered_s = self._monotonic()
        self._held[attempt_id] = _Held(gate, entered_s, place)
        self._waited(deployment.name, urgency, entered_s - now_s, "entered")

    def leave(self, attempt_id: str) -> None:
        """Give the attempt's place back, if it has one."""
        held = self._held.pop(attempt_id, None)
        if held is None:
            return
        gate, took_s = held.gate, self._monotonic() - held.since_s
        gate.held_s += (_NEWEST if gate.held_s else 1.0) * (took_s - gate.held_s)
        self._give_back(gate, held.place)

    def look(self, deployment: str) -> None:
        """More replicas may be there than before: let in who waits, as far as there is room."""
        gate = self._gates.get(deployment)
        if gate is not None:
            self._fill(gate)

    def counts(self) -> dict[tuple[str, ...], float]:
        """(deployment, "inside" or "waiting") -> how many."""
        found: dict[tuple[str, ...], float] = {}
        for name, gate in self._gates.items():
            found[name, "inside"] = gate.inside
            found[name, "waiting"] = len(gate.line)
        return found

    def waiting(self) -> dict[tuple[str, ...], float]:
        """(deployment, urgency) -> how many wait."""
        return {
            (name, urgency.value): gate.line.waiting(urgency)
            for name, gate in self._gates.items()
            for urgency in Urgency
        }

    async def _taken(self, gate: _Gate, most: int | None) -> str | None:
        """A place, or None if there is none now."""
        if most is not None and gate.inside >= most:
            return None
        gate.inside += 1
        if self._shared is None or most is None:
            return ""
        place = uuid.uuid4().hex
        try:
            full = await self._shared.enter([(f"deployment:{gate.deployment.name}", most)], place)
        except BaseException:
            self._give_back(gate, place)
            raise
        if full is None:
            return place
        gate.inside -= 1
        return None

    async def _wait(self, gate: _Gate, ticket: Ticket, most: int) -> str:
        name, policy = gate.deployment.name, self._policy(gate.deployment)
        away = gate.line.join(ticket, policy.waiting_max or most * WAITING_PER_PLACE)
        if away is not None:
            self._waited(name, away.ticket.urgency, self._monotonic() - away.ticket.since_s, "full")
            refusal = self._refusal(gate, most, crowding=away.crowding)
            if away.ticket is ticket:
                raise refusal
            displaced = gate.turns.pop(away.ticket)
            if not displaced.done():
                displaced.set_result(refusal)
        turn: asyncio.Future[GatewayError | str] = asyncio.get_running_loop().create_future()
        gate.turns[ticket] = turn
        if self._shared is not None:
            self._fill(gate)
        try:
            async with asyncio.timeout(policy.longest_wait_s(ticket.urgency)):
                place = await turn
        except BaseException as stop:
            gate.line.discard(ticket)
            gate.turns.pop(ticket, None)
            # The place may have come in the same turn of the loop.
            if turn.done() and not turn.cancelled() and isinstance(given := turn.result(), str):
                self._give_back(gate, given)
            late = isinstance(stop, TimeoutError)
            self._waited(name, ticket.urgency, self._monotonic() - ticket.since_s, "late" if late else "left")
            if late:
                raise self._refusal(gate, most, crowding=False) from stop
            raise
        if isinstance(place, GatewayError):
            raise place
        return place

    def _policy(self, deployment: Deployment) -> QueuePolicy:
        policy = deployment.serving.queue
        return policy if self._wait_max_s is None else replace(policy, wait_max_s=self._wait_max_s)

    def _give_back(self, gate: _Gate, place: str) -> None:
        gate.inside -= 1
        if place and self._shared is not None:
            self._shared.leave(place)
        self._fill(gate)

    def _fill(self, gate: _Gate) -> None:
        if self._spawn is not None:
            if len(gate.line) and (gate.asking is None or gate.asking.done()):
                gate.asking = self._spawn(self._ask(gate), "places")
            return
        most = self.most(gate.deployment)
        after_s = gate.deployment.serving.queue.batch_turn_after_s
        while most is None or gate.inside < most:
            ticket = gate.line.next(self._monotonic(), after_s)
            if ticket is None:
                return
            turn = gate.turns.pop(ticket)
            if not turn.done():
                gate.inside += 1
                turn.set_result("")

    async def _ask(self, gate: _Gate) -> None:
        """Let in who waits, as there are shared places, until nobody does."""
        while len(gate.line):
            place = await self._taken(gate, self.most(gate.deployment))
            if place is None:
                await asyncio.sleep(_ASK_AGAIN_S + self._random() * _ASK_AGAIN_S)
                continue
            ticket = gate.line.next(self._monotonic(), gate.deployment.serving.queue.batch_turn_after_s)
            turn = None if ticket is None else gate.turns.pop(ticket)
            if turn is None or turn.done():
                self._give_back(gate, place)
            else:
                turn.set_result(place)

    def _refusal(self, gate: _Gate, most: int, *, crowding: bool) -> GatewayError:
        after_s = _RETRY_AFTER_S
        if gate.held_s:  # when those who wait now will have had their turn
            after_s = min(_RETRY_AFTER_MAX_S, max(1, math.ceil(gate.held_s * (len(gate.line) + 1) / most)))
        taken = f"all {most} places of {gate.deployment.name} are taken"
        if crowding:
            return RateLimited(f"{taken}, and calls of this team wait for them", retry_after_s=after_s)
        return Unavailable(f"{taken}, and others wait for one", retry_after_s=after_s)
