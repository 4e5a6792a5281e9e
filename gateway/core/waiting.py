"""Who waits for a place at one deployment, and whose turn it is.

Teams take turns, so one that asks a thousand times at once delays another by one call. Interactive calls go before
batch calls; a batch call that has waited long enough gets every other place, so that it is held back but not for ever.
Where the queue is full, whoever crowds it gives way: batch to interactive, and the team that waits most often to one
that waits less.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from gateway.core.serving import Urgency


@dataclass(slots=True, eq=False)
class Ticket:
    """One call that waits. `since_s` is of a monotonic clock."""

    team: str
    urgency: Urgency
    since_s: float


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """A call that gets no place in a full queue. `crowding`: because its own team's calls fill it."""

    ticket: Ticket
    crowding: bool


class Line:
    """The queue of one deployment."""

    def __init__(self) -> None:
        self._queues: dict[Urgency, OrderedDict[str, deque[Ticket]]] = {u: OrderedDict() for u in Urgency}
        self._waiting = dict.fromkeys(Urgency, 0)
        self._aged_last = False

    def __len__(self) -> int:
        return sum(self._waiting.values())

    def waiting(self, urgency: Urgency) -> int:
        return self._waiting[urgency]

    def join(self, ticket: Ticket, most: int) -> TurnedAway | None:
        """Take the ticket in. Where `most` wait already, one is turned away: another, which has left the queue then, or
        this one, which has not come in."""
        away = self._turned_away(ticket) if len(self) >= most else None
        if away is not None and away.ticket is ticket:
            return away
        if away is not None:
            self.discard(away.ticket)
        self._queues[ticket.urgency].setdefault(ticket.team, deque()).append(ticket)
        self._waiting[ticket.urgency] += 1
        return away

    def discard(self, ticket: Ticket) -> None:
        """It waits no longer, if it does."""
        queue = self._queues[ticket.urgency].get(ticket.team)
        if queue is not None and ticket in queue:
            queue.remove(ticket)
            self._waiting[ticket.urgency] -= 1
            if not queue:
                del self._queues[ticket.urgency][ticket.team]

    def next(self, now_s: float, batch_turn_after_s: float) -> Ticket | None:
        """Whose turn it is; it has left the queue then."""
        aged = self._aged(now_s - batch_turn_after_s)
        interactive = self._queues[Urgency.INTERACTIVE]
        if aged is not None and not (interactive and self._aged_last):
            self._aged_last = True
            return self._take(Urgency.BATCH, aged)
        self._aged_last = False
        for urgency in Urgency:
            if self._queues[urgency]:
                return self._take(urgency, next(iter(self._queues[urgency])))
        return None

    def _aged(self, before_s: float) -> str | None:
        """The team whose batch call has waited longest, if that came before then."""
        batch = self._queues[Urgency.BATCH]
        if not batch:
            return None
        team = min(batch, key=lambda name: batch[name][0].since_s)
        return team if batch[team][0].since_s <= before_s else None

    def _take(self, urgency: Urgency, team: str) -> Ticket:
        queues = self._queues[urgency]
        queue = queues.pop(team)
        ticket = queue.popleft()
        if queue:
            queues[team] = queue  # behind the others
        self._waiting[urgency] -= 1
        return ticket

    def _turned_away(self, ticket: Ticket) -> TurnedAway:
        """The newest batch call of the team with most of them, for an interactive one; else the newest of the team
        with most calls of this kind, if that has more than the one that comes would have; else this one itself."""
        batch = self._queues[Urgency.BATCH]
        if ticket.urgency is Urgency.INTERACTIVE and batch:
            return TurnedAway(batch[_largest(batch)][-1], crowding=False)
        alike = self._queues[ticket.urgency]
        own = len(alike.get(ticket.team, ()))
        if alike and len(alike[_largest(alike)]) > own + 1:
            return TurnedAway(alike[_largest(alike)][-1], crowding=True)
        return TurnedAway(ticket, crowding=own > 0)


def _largest(queues: OrderedDict[str, deque[Ticket]]) -> str:
    return max(queues, key=lambda team: len(queues[team]))
