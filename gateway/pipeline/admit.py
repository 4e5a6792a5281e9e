"""admit: a place, rate limits, then the hold. Nothing goes upstream before its hold is committed."""

from __future__ import annotations

import time

import msgspec

from gateway.core import bounds, prices
from gateway.core.catalog import Deployment, Operation
from gateway.core.entry import Attempt, Granted, Refused
from gateway.core.errors import BudgetExceeded, RateLimited, UnboundableRequest
from gateway.core.identity import RateLimit
from gateway.core.money import usd_text
from gateway.core.prices import PriceRow
from gateway.pipeline.exchange import Exchange, World

#: Retry-After of a rate limit never exceeds this: above it SDKs and agents give up (clients.md, 5).
RETRY_AFTER_MAX_S = 60


class Hold(msgspec.Struct, frozen=True):
    """A committed hold, and the output bound that it pays for (None: the client's own request stands)."""

    amount_nano_usd: int
    row: PriceRow | None
    output_bound_tokens: int | None


async def enter(world: World, x: Exchange) -> None:
    """A place among the concurrent requests of the key and its team, and what the rates give, or `RateLimited`.

    Once it has returned, `leave` is due when the provider's work for this request has ended.
    """
    try:
        await _take_place(world, x)
        await _take_rates(world, x)
    except BaseException:
        leave(world, x)
        raise


def leave(world: World, x: Exchange) -> None:
    """The request takes up no place any more. May be called twice, and from any `finally`."""
    world.limits.leave(x.incoming.request_id)


def _limits(world: World, x: Exchange) -> tuple[tuple[str, RateLimit], ...]:
    """What applies to this request, from the narrow to the wide."""
    key = x.caller.key
    own = key.limit if key.limit != RateLimit() else world.policy.key_limit
    return (f"key:{key.key_id}", own), (f"team:{key.team_id}", key.team_limit)


async def _take_place(world: World, x: Exchange) -> None:
    most = {name: limit.concurrent for name, limit in _limits(world, x)}
    names = [(name, places) for name, places in most.items() if places is not None]
    if not names:
        return
    full = await world.limits.enter(names, x.incoming.request_id)
    if full is not None:
        raise RateLimited(
            f"the limit of {most[full]} requests at once of {full.replace(':', ' ')} is reached",
            retry_after_s=1,
        )


async def _take_rates(world: World, x: Exchange) -> None:
    tokens = bounds.estimate_input_tokens(x.facts.size)
    buckets = []
    for name, limit in _limits(world, x):
        if limit.requests_per_min is not None:
            buckets.append((f"{name}:requests", 1, limit.requests_per_min))
        if limit.tokens_per_min is not None:
            buckets.append((f"{name}:tokens", min(tokens, limit.tokens_per_min), limit.tokens_per_min))
    if not buckets:
        return
    empty = await world.limits.take(buckets, x.received_ms)
    if empty is not None:
        name, wait_s = empty
        scope, _, unit = name.rpartition(":")
        raise RateLimited(
            f"the limit of {unit} per minute of {scope.replace(':', ' ')} is reached",
            retry_after_s=min(RETRY_AFTER_MAX_S, max(1, round(wait_s + 0.5))),
        )


async def reserve(world: World, x: Exchange, attempt: Attempt, deployment: Deployment) -> Hold:
    """Commit the hold of one attempt in all its scopes.

    Raises `BudgetExceeded` when it does not fit, `UnboundableRequest` when a hard budget applies and the
    request has no price or no upper bound, `LedgerUnavailable` when the ledger cannot answer.
    """
    row = world.prices().find(deployment.price, x.received_ms)
    asked_output = _output_bound(world, x, deployment)
    amount = _ceiling(x, row, asked_output)
    least = amount
    comfort = _comfort(world, x)
    if amount is not None and asked_output > comfort:
        least = _ceiling(x, row, comfort)
    key = x.caller
    scopes = (
        f"tenant:{key.tenant_id}",
        f"team:{key.team_id}",
        f"key:{key.key_id}",
        f"task:{attempt.task_id}",
    )
    granted = await world.ledger.reserve(attempt, scopes, amount, least)
    if isinstance(granted, Refused):
        raise _refusal(granted, amount)
    x.task_step = granted.task_step
    x.budget_remaining_nano_usd = granted.remaining_nano_usd
    x.budget_scope = granted.remaining_scope
    return Hold(granted.amount_nano_usd, row, _bound_to_write(x, row, granted, amount, asked_output))


def _output_bound(world: World, x: Exchange, deployment: Deployment) -> int:
    if x.operation in (Operation.EMBEDDINGS, Operation.COUNT_TOKENS):
        return 0
    bound = x.facts.max_output_tokens or world.policy.default_output_tokens
    if deployment.max_output_tokens is not None:
        bound = min(bound, deployment.max_output_tokens)
    return bound * x.facts.n


def _comfort(world: World, x: Exchange) -> int:
    policy = world.policy
    return policy.comfort_reasoning_output_tokens if x.facts.reasoning else policy.comfort_output_tokens


def _ceiling(x: Exchange, row: PriceRow | None, output_tokens: int) -> int | None:
    if x.operation is Operation.COUNT_TOKENS:
        return 0  # providers do not bill counting
    if row is None or x.input_bound is None:
        return None
    return prices.ceiling(
        row,
        x.received_ms,
        input_bound_tokens=x.input_bound,
        output_bound_tokens=output_tokens,
        writes=True,
        writes_1h=x.facts.long_cache_write,
        service_tier=x.facts.service_tier,
    )


def _bound_to_write(
    x: Exchange, row: PriceRow | None, granted: Granted, asked: int | None, asked_output: int
) -> int | None:
    """The output bound to splice into the request: only under a budget, and only if the client's does not stand."""
    if granted.remaining_nano_usd is None or row is None or asked is None or not asked_output:
        return None
    if granted.amount_nano_usd >= asked:
        return asked_output // x.facts.n if x.facts.max_output_tokens is None else None
    low, high = 1, asked_output
    while low < high:  # the largest output that the granted amount pays for
        middle = (low + high + 1) // 2
        fits = (_ceiling(x, row, middle) or 0) <= granted.amount_nano_usd
        low, high = (middle, high) if fits else (low, middle - 1)
    return max(1, low // x.facts.n)


def _refusal(refused: Refused, amount: int | None) -> BudgetExceeded | UnboundableRequest:
    scope = refused.scope.replace(":", " ", 1)
    if amount is None:
        return UnboundableRequest(
            f"this request has no known price or no upper bound, and the {scope} has a hard budget",
            param="model",
        )
    resets = _iso(refused.resets_at_ms)
    return BudgetExceeded(
        f"the budget of the {scope} is used up: ${usd_text(refused.spent_nano_usd)} spent and "
        f"${usd_text(refused.held_nano_usd)} reserved of ${usd_text(refused.limit_nano_usd)}; this request may cost up "
        f"to ${usd_text(amount)}. "
        + (f"It resets at {resets}." if resets else "Ask its owner to raise it, or start a new task."),
        scope=refused.scope,
        limit_nano_usd=refused.limit_nano_usd,
        spent_nano_usd=refused.spent_nano_usd,
        held_nano_usd=refused.held_nano_usd,
        resets_at=resets,
    )


def _iso(at_ms: int | None) -> str | None:
    return None if at_ms is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_ms / 1000))
