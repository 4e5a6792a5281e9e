"""Budgets that are known to be used up: whoever they bind is refused before its body is looked at.

An agent whose budget has ended goes on asking, mostly with longer and longer histories. What a refusal says of a budget
holds for every request under it for which even the least that it could hold is more than what is left: then neither the
size of a body nor what is new in it may cost anything. A refusal says nothing of a smaller request, so there are three looks,
each with a bound of its own on what a request needs at least:

    unread      before the body has arrived: nothing is left that could pay for the cheapest prompt of any deployment
    read        after its facts are read: its model and its bound on output
    identified  after `identify`: its task, if only the history of a conversation tells; and where a model's answer stands for
                the refusal, or a stream for Codex
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from gateway.core import bounds, clients, prices
from gateway.core.catalog import Operation
from gateway.core.entry import OnExceed, Unit
from gateway.core.errors import BudgetExceeded, InvalidRequest
from gateway.core.identity import Caller
from gateway.pipeline import answers, identify
from gateway.pipeline.exchange import Exchange, World
from gateway.pipeline.spent import Known

#: A session that a body may name before some headers do, in the messages dialect: what wins against it is certain.
_ANOTHER_SESSION = "00000000-0000-4000-8000-000000000000"
_ANOTHER = {"user_id": f"user__session_{_ANOTHER_SESSION}"}


async def unread(
    world: World, operation: Operation, caller: Caller, headers: Mapping[str, str], path_task: str | None
) -> BudgetExceeded | None:
    """What a request is told whose body nobody has looked at; None = it is to be read."""
    client = clients.label(headers)
    if operation is Operation.RESPONSES and client == "codex":
        return None  # its refusal is a stream, if it asked for one
    if _may_be_kept(caller, headers):
        return None
    now_ms = world.clock.now_ms()
    task_ids = await _named_tasks(world, operation, caller, headers, path_task)
    for known in world.spent.find(
        _scopes(caller, task_ids), world.ledger.changes, now_ms, world.clock.monotonic()
    ):
        if known.refused.on_exceed is OnExceed.SOFT_STOP:
            continue  # what stands for a refusal is a model's answer
        if known.refused.state or known.left < _least_unread(world, operation, known.refused.unit, now_ms):
            _count(world, known, caller, client)
            return known.error.with_traceback(None)
    return None


def read(world: World, x: Exchange) -> BudgetExceeded | None:
    """What a request is told whose facts are known and whose task is not: by the budgets of its key, team and tenant."""
    client = clients.label(x.incoming.headers)
    if x.operation is Operation.RESPONSES and x.facts.stream and client == "codex":
        return None
    return _told(world, x, (), client, speaks=False)


def identified(world: World, x: Exchange) -> BudgetExceeded | None:
    """The same by its task's budgets as well; what stands for the refusal is up to the caller."""
    return _told(world, x, (x.task.task_id, x.task.parent_task_id or ""), x.client, speaks=True)


def _told(
    world: World, x: Exchange, task_ids: tuple[str, ...], client: str, *, speaks: bool
) -> BudgetExceeded | None:
    if _may_be_kept(x.caller, x.incoming.headers):
        return None
    now_s = world.clock.monotonic()
    for known in world.spent.find(_scopes(x.caller, task_ids), world.ledger.changes, x.received_ms, now_s):
        if known.refused.on_exceed is OnExceed.SOFT_STOP and not speaks:
            continue
        if known.refused.state or known.left < _least(world, x, known.refused.unit):
            _count(world, known, x.caller, client)
            return known.error.with_traceback(None)
    return None


def _may_be_kept(caller: Caller, headers: Mapping[str, str]) -> bool:
    """An answer that is given again costs nothing, whatever is left."""
    return answers.HEADER in headers or answers.LABEL in caller.key.labels


def _scopes(caller: Caller, task_ids: tuple[str, ...]) -> Iterator[str]:
    yield f"key:{caller.key_id}"
    yield f"team:{caller.team_id}"
    yield f"tenant:{caller.tenant_id}"
    for task_id in task_ids:
        if task_id:
            yield f"task:{task_id}"


async def _named_tasks(
    world: World, operation: Operation, caller: Caller, headers: Mapping[str, str], path_task: str | None
) -> tuple[str, ...]:
    """The task that a request belongs to whatever its body says, and its parent; none if the body may say more."""
    if caller.key.task_id is not None:
        return (caller.key.task_id,)
    hints = _ANOTHER if operation is Operation.MESSAGES else {}
    try:
        signal = clients.recognise(headers, hints, path_task)
    except InvalidRequest:
        return ()  # told after the body has come
    name, parent = signal.external_id, signal.parent_external_id
    if not name or name == _ANOTHER_SESSION:
        return ()
    own = (await identify.named(world, caller.key.key_id, name))[0]
    return (own,) if not parent else (own, (await identify.named(world, caller.key.key_id, parent))[0])


def _least_unread(world: World, operation: Operation, unit: Unit, now_ms: int) -> int:
    """The least that any request of this operation holds; 0 = it may be free."""
    if operation is Operation.COUNT_TOKENS:
        return 0
    if unit is Unit.USD:
        return world.spent.cheapest_nano_usd(world.catalog(), world.prices(), now_ms)
    if unit is Unit.OUTPUT_TOKENS:
        return 0 if operation is Operation.EMBEDDINGS else 1
    return bounds.LEAST_TOKENS if unit is Unit.INPUT_TOKENS else 1


def _least(world: World, x: Exchange, unit: Unit) -> int:
    """The least that this request holds, wherever it may go; 0 = it may be free."""
    there = world.catalog().by_model.get(x.facts.model, ())
    bounded = unit is Unit.USD or unit is Unit.OUTPUT_TOKENS
    if not (bounded and there) or x.operation in (Operation.COUNT_TOKENS, Operation.EMBEDDINGS):
        # The rules of a virtual model may cap what it writes.
        return _least_unread(world, x.operation, unit, x.received_ms)
    policy, facts = world.policy, x.facts
    prior = policy.comfort_reasoning_output_tokens if facts.reasoning else policy.comfort_output_tokens
    asked = min(facts.max_output_tokens or policy.default_output_tokens, prior)
    least = None
    for d in there:
        output = asked if d.max_output_tokens is None else min(asked, d.max_output_tokens)
        needs = output * facts.n
        if unit is Unit.USD:
            row = world.prices().find(d.price, x.received_ms)
            if row is None:
                return 0
            needs = prices.ceiling(
                row,
                x.received_ms,
                input_bound_tokens=bounds.LEAST_TOKENS,
                output_bound_tokens=needs,
                writes=True,
                writes_1h=False,
                service_tier=facts.service_tier,
            )
        least = needs if least is None else min(least, needs)
    return least or 0


def _count(world: World, known: Known, caller: Caller, client: str) -> None:
    """As a refusal of this caller, of an amount that nobody has looked up."""
    attempt = msgspec.structs.replace(
        known.attempt,
        tenant_id=caller.tenant_id,
        team_id=caller.team_id,
        key_id=caller.key_id,
        client=client,
        model="",
        provider="",
        deployment="",
        tier="",
    )
    world.refused(attempt, known.refused, None)
