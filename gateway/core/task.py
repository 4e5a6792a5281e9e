"""A task's state, who may change it to what, and how far tasks may nest."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gateway.core.entry import OnExceed

#: A task without a parent has depth 0.
DEPTH_MAX = 3
#: Children of one task that are not done.
CHILDREN_MAX = 20
#: An alert ratio of that many percent or more, reached in a budget of the task, makes it `alerted`.
ALERTED_FROM_PERCENT = 80
#: The part of a limit, in percent, that is held back for the last answer of a task that is to sum up.
LANDING_PERCENT = 2


@dataclass(frozen=True, slots=True)
class TaskDefault:
    """The lifetime budget of a task that nobody gave one: what its team says, else `nano_usd` (None = no limit); and what
    happens when either is used up."""

    nano_usd: int | None = None
    on_exceed: OnExceed = OnExceed.ERROR


def landing_percent(on_exceed: OnExceed) -> int:
    """What a budget keeps back for a last answer, where nothing else is said."""
    return LANDING_PERCENT if on_exceed is OnExceed.SUMMARIZE else 0


class State(StrEnum):
    """`running` and `alerted` (an alert ratio was reached) admit requests, all others none.

    A task that is `paused_budget` still admits its landing.
    """

    RUNNING = "running"
    ALERTED = "alerted"
    PAUSED_BUDGET = "paused_budget"
    PAUSED_LOOP = "paused_loop"
    PAUSED_ADMIN = "paused_admin"
    DONE = "done"


ADMITTING = frozenset({State.RUNNING, State.ALERTED})
_PAUSED = frozenset({State.PAUSED_BUDGET, State.PAUSED_LOOP, State.PAUSED_ADMIN})
#: The states from which each can be reached. Whoever changes a state does so under this guard, in one transaction.
REACHED_FROM: dict[State, frozenset[State]] = {
    State.RUNNING: _PAUSED,
    State.ALERTED: frozenset({State.RUNNING}),
    State.PAUSED_BUDGET: ADMITTING,
    State.PAUSED_LOOP: ADMITTING,
    State.PAUSED_ADMIN: ADMITTING | {State.PAUSED_BUDGET, State.PAUSED_LOOP},
    State.DONE: frozenset(State) - {State.DONE},
}


#: `Attempt.rule` of a landing.
LANDING_RULE = "summarize"
_LANDED = "summed up by "


def landings_of(request_id: str) -> str:
    """How the reason of a pause begins whose landing was granted to an attempt of this request."""
    return f"{_LANDED}{request_id}#"


def landed_by(request_id: str, attempt_no: int) -> str:
    """The reason of a pause whose landing was granted to this attempt."""
    return f"{landings_of(request_id)}{attempt_no}"


def landing_under(stop: str) -> str:
    """How the reason of a task ends that had its last answer under a budget that others share (`budget.stop_of`)."""
    return f" under {stop}"


def may_land_under(reason: str, request_id: str, stop: str) -> bool:
    """Whether a task that runs takes a landing under a shared budget: that of one request per stop of that budget."""
    had = reason.startswith(_LANDED) and reason.endswith(landing_under(stop))
    return not had or reason.startswith(landings_of(request_id))


def admits(state: str, landing: bool) -> bool:
    """Whether a task in that state takes a request; a landing is the last answer of one whose budget is used up."""
    return state in ADMITTING or (landing and state == State.PAUSED_BUDGET)


def may_land(state: str, reason: str, request_id: str) -> bool:
    """Whether a task takes its landing: that of one request per pause, which ends when its budget is raised."""
    return state == State.PAUSED_BUDGET and (
        not reason.startswith(_LANDED) or reason.startswith(landings_of(request_id))
    )
