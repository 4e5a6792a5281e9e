"""admit: a place, rate limits, then the hold. Nothing goes upstream before its hold is committed."""

from __future__ import annotations

import msgspec

from gateway.core import bounds, prices
from gateway.core.catalog import Deployment, Operation
from gateway.core.entry import Amounts, Attempt, Granted, Refused
from gateway.core.errors import BudgetExceeded, RateLimited
from gateway.core.identity import RateLimit
from gateway.core.prices import PriceRow
from gateway.core.refusal import refusal_of
from gateway.core.task import State
from gateway.pipeline import bound, ending, runs
from gateway.pipeline.exchange import Exchange, World


class Hold(msgspec.Struct, frozen=True):
    """A committed hold, and the output bound that it pays for (None: the client's own request stands)."""

    amount_nano_usd: int
    row: PriceRow | None
    output_bound_tokens: int | None


async def enter(world: World, x: Exchange) -> None:
    """A place among the concurrent requests of the key and its team, and what the rates give, or `RateLimited`.

    Once it has returned, `leave` is due when the provider's work for this request has ended.
    """
    limits = _limits(world, x)
    if not limits:
        return
    try:
        await _take_place(world, x, limits)
        await _take_rates(world, x, limits)
    except BaseException:
        leave(world, x)
        raise


def leave(world: World, x: Exchange) -> None:
    """The request takes up no place any more. May be called twice, and from any `finally`."""
    world.limits.leave(x.incoming.request_id)


#: (scope, limit)
_Limits = list[tuple[str, RateLimit]]
_NO_LIMIT = RateLimit()


def _limits(world: World, x: Exchange) -> _Limits:
    """What applies to this request, from the narrow to the wide."""
    key = x.caller.key
    own = key.limit if key.limit != _NO_LIMIT else world.policy.key_limit
    found = []
    if own != _NO_LIMIT:
        found.append((f"key:{x.caller.key_id}", own))
    if key.team_limit != _NO_LIMIT:
        found.append((f"team:{key.team_id}", key.team_limit))
    return found


async def _take_place(world: World, x: Exchange, limits: _Limits) -> None:
    most = {name: limit.concurrent for name, limit in limits}
    names = [(name, places) for name, places in most.items() if places is not None]
    if not names:
        return
    full = await world.limits.enter(names, x.incoming.request_id)
    if full is not None:
        raise RateLimited(
            f"the limit of {most[full]} requests at once of {full.replace(':', ' ')} is reached",
            retry_after_s=1,
        )


async def _take_rates(world: World, x: Exchange, limits: _Limits) -> None:
    tokens = bounds.estimate_input_tokens(x.facts.size)
    buckets = []
    for name, limit in limits:
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
            retry_after_s=max(1, round(wait_s + 0.5)),
        )


async def reserve(world: World, x: Exchange, attempt: Attempt, deployment: Deployment) -> Hold:
    """Commit the hold of one attempt in all its scopes.

    Raises `BudgetExceeded` when it does not fit, `UnboundableRequest` when a hard budget applies and the
    request has no price or no upper bound in its unit, `LedgerUnavailable` when the ledger cannot answer.
    """
    row = world.prices().find(deployment.price, x.received_ms)
    x.input_bound = bound.input_bound(world, x, deployment)
    asked_output = _output_bound(world, x, deployment)
    ask = least = _amounts(x, row, asked_output)
    if asked_output > _prior(world, x) and (comfort := _comfort(world, x)) < asked_output:
        least = _amounts(x, row, comfort)
    scopes = _scopes(attempt)
    granted = await world.ledger.reserve(attempt, scopes, ask, least, landing=x.landing)
    stuck = isinstance(granted, Refused) and granted.state == State.PAUSED_LOOP
    # A person who speaks to a stuck agent is what its breaker waits for.
    if stuck and x.spoken and await world.go_on(attempt.task_id, "somebody has spoken to the model"):
        granted = await world.ledger.reserve(attempt, scopes, ask, least)
    if isinstance(granted, Refused):
        error = refusal_of(granted, ask, least, bound.unbounded_by(x, deployment))
        if not x.landing:  # in the place of a request that was counted
            world.refused(attempt, granted, ask.nano_usd)
            if isinstance(error, BudgetExceeded):
                error.asked = attempt, granted, ask.nano_usd
        raise error
    x.task_step = granted.task_step
    x.task_began_ms = granted.task_began_ms
    if x.run is not None:
        runs.granted(world, scopes, granted)
    x.under_hard_budget = granted.under_hard_budget
    x.granted = granted
    if granted.warned:
        ending.warn(world, granted)
    return Hold(granted.amount_nano_usd, row, _bound_to_write(x, row, granted, ask))


def _scopes(attempt: Attempt) -> tuple[str, ...]:
    """Where the attempt is held; what is further above its task's parent only the ledger knows."""
    scopes = (
        f"tenant:{attempt.tenant_id}",
        f"team:{attempt.team_id}",
        f"key:{attempt.key_id}",
        f"task:{attempt.task_id}",
    )
    return scopes if attempt.parent_task_id is None else (*scopes, f"task:{attempt.parent_task_id}")


def _amounts(x: Exchange, row: PriceRow | None, output_tokens: int) -> Amounts:
    """The most that the request can use with this bound on its output."""
    if x.operation is Operation.COUNT_TOKENS:
        return Amounts(0, 0, 0, 0)  # nothing is generated, and providers do not bill it
    return Amounts(_ceiling(x, row, output_tokens), x.input_bound, output_tokens)


def _output_bound(world: World, x: Exchange, deployment: Deployment) -> int:
    if x.operation in (Operation.EMBEDDINGS, Operation.COUNT_TOKENS):
        return 0
    bound = x.facts.max_output_tokens or world.policy.default_output_tokens
    if deployment.max_output_tokens is not None:
        bound = min(bound, deployment.max_output_tokens)
    if x.route.caps.max_output_tokens is not None:
        bound = min(bound, x.route.caps.max_output_tokens)
    return bound * x.facts.n


def _prior(world: World, x: Exchange) -> int:
    policy = world.policy
    prior = policy.comfort_reasoning_output_tokens if x.facts.reasoning else policy.comfort_output_tokens
    return prior * x.facts.n


def _comfort(world: World, x: Exchange) -> int:
    """Output below which the request is refused rather than squeezed: what its like was seen to use, and whatever it
    keeps for thinking, beside which there must be room for an answer."""
    n = x.facts.n
    learned = world.outputs.comfort(bound.asker(x), _prior(world, x) // n)
    if x.facts.thinking_budget:
        learned = max(learned, x.facts.thinking_budget + world.policy.comfort_output_tokens)
    return learned * n


def _ceiling(x: Exchange, row: PriceRow | None, output_tokens: int) -> int | None:
    if row is None or x.input_bound is None:
        return None
    return prices.ceiling(
        row,
        x.received_ms,
        input_bound_tokens=x.input_bound,
        output_bound_tokens=output_tokens,
        writes=True,
        writes_1h=x.facts.long_cache_write or x.shaped.long_write,
        service_tier=x.facts.service_tier,
    )


def _bound_to_write(x: Exchange, row: PriceRow | None, granted: Granted, ask: Amounts) -> int | None:
    """The output bound to splice into the request: only under a budget, and only if the client's does not stand."""
    asked = ask.output_tokens
    if not asked:
        return None
    tokens = asked
    if granted.remaining_output_tokens is not None and granted.output_tokens is not None:
        tokens = granted.output_tokens
    elif granted.remaining_nano_usd is None or row is None:
        return max(1, asked // x.facts.n) if _capped(x) else None
    if ask.nano_usd is not None and granted.amount_nano_usd < ask.nano_usd:
        tokens = min(tokens, _paid_for(x, row, granted.amount_nano_usd, asked))
    if tokens >= asked and x.facts.max_output_tokens is not None and not _capped(x):
        return None
    return max(1, tokens // x.facts.n)


def _capped(x: Exchange) -> bool:
    """A rule allows less output than the client asked for."""
    cap, own = x.route.caps.max_output_tokens, x.facts.max_output_tokens
    return cap is not None and (own is None or own > cap)


def _paid_for(x: Exchange, row: PriceRow | None, nano_usd: int, most: int) -> int:
    """The largest output, up to `most`, that this amount pays for."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        fits = (_ceiling(x, row, middle) or 0) <= nano_usd
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
