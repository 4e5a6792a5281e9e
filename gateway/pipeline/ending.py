"""ending: what a caller gets when a budget ends, by the budget's `on_exceed`.

    error       the refusal (`core.refusal`), which `edge/errors.py` writes down
    soft_stop   a normal answer that says nothing but that
    summarize   once per stop, a last answer by the small tier out of what the task's budget keeps back for it
    warn        the request itself; a header says so, and somebody is told

A stream for Codex fails in its stream: that is the one form of a refusal whose text it shows (clients.md, 6).
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from gateway.core import bounds, dialects, landing, prices, routing
from gateway.core.catalog import Operation, Tier
from gateway.core.dialects import spoken
from gateway.core.dialects.spoken import SPEAKABLE, Spoken
from gateway.core.entry import Granted, OnExceed, Refused, Unit
from gateway.core.errors import BudgetExceeded, GatewayError, InvalidRequest, NotFound, TaskStopped
from gateway.core.refusal import refusal_headers, warning_of
from gateway.core.routing import Route
from gateway.core.task import LANDING_RULE
from gateway.pipeline.exchange import Exchange, World
from gateway.pipeline.shape import shape
from gateway.ports import Answer

_CODEX = "codex"
#: Summaries that what a shared budget keeps back is to pay for, at the least.
_LANDINGS = 8


def warn(world: World, granted: Granted) -> None:
    """Tell somebody of the budgets that would have refused this, were they to do more than warn."""
    for refused in granted.warned:
        dedupe, body = warning_of(refused)
        if world.told.first(dedupe):
            world.tell("budget_warning", dedupe, body)


def answer_of(x: Exchange, error: BudgetExceeded | TaskStopped) -> Answer | None:
    """The answer that stands for a refusal, or None where it is to be the refusal itself."""
    refused = error.refused if isinstance(error, BudgetExceeded) else None
    if x.operation not in SPEAKABLE:
        return None
    facts = x.facts
    said = Spoken(
        x.operation,
        facts.model,
        x.incoming.request_id.rpartition("_")[2],
        x.received_ms // 1_000,
        " ".join(error.message.split()),
    )
    headers = [("x-task-id", x.task.task_id), ("x-should-retry", "false")]
    if isinstance(error, BudgetExceeded):
        headers += refusal_headers(error)
    if refused is not None and refused.on_exceed is OnExceed.SOFT_STOP:
        headers.append(("x-budget-stop", OnExceed.SOFT_STOP.value))
        body = (
            spoken.events(said, facts.n, facts.include_usage) if facts.stream else spoken.body(said, facts.n)
        )
    elif x.operation is Operation.RESPONSES and facts.stream and x.client == _CODEX:
        body = spoken.failed(said, "invalid_prompt")
    else:
        return None
    return Answer(
        status=200,
        headers=headers,
        content_type="text/event-stream" if facts.stream else "application/json",
        task_id=x.task.task_id,
        client=x.client,
        deployment="",
        body=body,
        error=error.kind,
    )


def last_exchange(world: World, x: Exchange, error: GatewayError) -> Exchange | None:
    """The request for a summary in the place of `x`, or None if its task is not to sum up, or nothing pays for it."""
    refused = error.refused if isinstance(error, BudgetExceeded) and error.used_up else None
    if refused is None or refused.on_exceed is not OnExceed.SUMMARIZE:
        return None
    # That of a task above is summed up by that task.
    own, above = f"task:{x.task.task_id}", refused.scope.startswith("task:")
    if (above and refused.scope != own) or x.operation not in SPEAKABLE or x.landing:
        return None
    route = _route(world, x)
    body = None if route is None else _body(world, x, route, refused)
    if route is None or body is None:
        return None
    last = Exchange(msgspec.structs.replace(x.incoming, body=body), x.received_ms, x.steps)
    last.facts = dialects.read(x.operation, body)
    last.signal, last.task, last.route, last.landing = x.signal, x.task, route, True
    shape(last)
    return last


def _route(world: World, x: Exchange) -> Route | None:
    try:
        found = routing.route(
            model=Tier.SMALL.value,
            operation=x.operation,
            catalog=world.catalog(),
            decision=None,
            health=world.health,
            may_use=x.caller.may_use,
            pick=world.random(),
            now_s=world.clock.monotonic(),
        )
    except (NotFound, InvalidRequest):
        return None
    small = tuple(d for d in found.candidates if d.tier is Tier.SMALL)
    return replace(found, rule=LANDING_RULE, why="the budget is used up", candidates=small) if small else None


def _body(world: World, x: Exchange, route: Route, refused: Refused) -> bytes | None:
    """As much of the run as what is left of the refusing budget, its allowance included, pays for."""
    deployment = route.candidates[0]
    row = world.prices().find(deployment.price, x.received_ms)
    room = refused.limit - refused.spent - refused.held
    # What many tasks share must do for several; the smallest summary may take what there is.
    share = room if refused.scope.startswith("task:") else min(room, refused.kept_back // _LANDINGS)
    smallest = landing.SIZES[-1]
    most = deployment.max_output_tokens
    if row is None or room < 1:
        return None
    for size, output in landing.SIZES:
        said = landing.record(x.facts.segments, size)
        body = landing.request(x.operation, deployment.model, said, output, x.facts.stream)
        tokens = bounds.input_bound_tokens(len(body), 2, 0)
        cost = prices.ceiling(
            row,
            x.received_ms,
            input_bound_tokens=tokens,
            output_bound_tokens=output,
            writes=True,
            writes_1h=False,
            service_tier="",
        )
        needed = {Unit.USD: cost, Unit.INPUT_TOKENS: tokens, Unit.OUTPUT_TOKENS: output, Unit.CALLS: 1}
        window = deployment.context_tokens
        if (
            needed[refused.unit] <= (room if (size, output) == smallest else share)
            and (most is None or output <= most)
            and (window is None or tokens + output <= window)
        ):
            return body
    return None
