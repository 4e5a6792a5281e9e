"""Health of deployments and credentials, as the process that answers sees it: to look at, to reset, to drain."""

from __future__ import annotations

from typing import Literal

from gateway.admin.call import Call, Reply
from gateway.admin.problems import not_found
from gateway.admin.route import Route
from gateway.admin.schemas import In, Name
from gateway.admin.shown import Out, shown
from gateway.core.offices import Right


class SubjectOut(Out):
    """A deployment, or "credential:<name>". `back_in_s`: until a call may try it again; 0 = it is in use, or only a person
    brings it back. `share` of its weight, while it comes back slowly.
    """

    subject: str
    status: str
    cause: str
    failures_in_a_row: int
    ejections: int
    back_in_s: float
    share: float


class HealthIn(In):
    """`reset` forgets what is known of it, `drain` takes it out of the traffic, `undrain` puts it back."""

    subject: Name
    action: Literal["reset", "drain", "undrain"]


async def list_health(call: Call) -> Reply:
    """All deployments, and what is known of credentials."""
    return Reply({"data": [shown(SubjectOut.model_validate(row)) for row in call.deps.subjects()]})


async def change_health(call: Call) -> Reply:
    """Every replica follows within a second if they share a Redis; without one, only the process that answers does."""
    wanted = HealthIn.model_validate(call.body)
    if not call.deps.change_health(wanted.subject, wanted.action, call.admin.actor):
        raise not_found(f"deployment or credential: {wanted.subject}")
    (row,) = (row for row in call.deps.subjects() if row.subject == wanted.subject)
    return Reply(shown(SubjectOut.model_validate(row)))


ROUTES = (
    Route("GET", "/health", list_health, Right.READ, "configuration"),
    Route("POST", "/health", change_health, Right.OPERATE, "configuration", SubjectOut, body=HealthIn),
)
