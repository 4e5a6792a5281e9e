"""settle: what an attempt's end means in money. The decisions are pure; `post` performs them."""

from __future__ import annotations

import msgspec

from gateway.core import bounds, prices
from gateway.core.dialects import Reading
from gateway.core.entry import Attempt, Kind, Outcome
from gateway.core.errors import UpstreamAborted, UpstreamError
from gateway.core.prices import PriceRow
from gateway.core.usage import Quality, Usage
from gateway.pipeline import bound, breakers, replicas, runs
from gateway.pipeline.exchange import Exchange, World
from gateway.pipeline.explain import explained


class Ending(msgspec.Struct, frozen=True):
    """How an attempt ended, as the wire showed it."""

    status: int
    finish: str
    error: str
    latency_ms: int
    first_token_ms: int | None
    upstream_request_id: str
    note: str = ""


def priced(
    row: PriceRow | None, reading: Reading, at_ms: int, ending: Ending, *, service_tier: str, quality: Quality
) -> Outcome:
    """An attempt whose usage is known or estimated. Without a price the tokens are kept and the cost is unknown."""
    tier = reading.service_tier or service_tier
    if row is None:
        return _outcome(
            Kind.POST, reading.usage, Quality.UNKNOWN, 0, 0, "", ending, tier, "no price is known"
        )
    cost = prices.cost(row, reading.usage, at_ms, service_tier=tier)
    return _outcome(
        Kind.POST,
        reading.usage,
        quality,
        cost.nano_usd,
        cost.list_nano_usd,
        cost.version,
        ending,
        tier,
        ending.note,
    )


def free(ending: Ending) -> Outcome:
    """An attempt of which it is proven that the provider did not bill it."""
    return _outcome(Kind.VOID, Usage(), Quality.EXACT, 0, 0, "", ending, "", ending.note)


def at_bound(row: PriceRow | None, hold_nano_usd: int, ending: Ending) -> Outcome:
    """An attempt whose answer is lost: charged what was held, until something proves better."""
    return _outcome(
        Kind.CHARGE_UNKNOWN,
        Usage(),
        Quality.UNKNOWN,
        hold_nano_usd,
        hold_nano_usd,
        row.version if row else "",
        ending,
        "",
        ending.note or "the answer was lost after the request was sent; charged at the bound",
    )


def aborted(
    row: PriceRow | None, hold_nano_usd: int, error: UpstreamAborted, at_ms: int, ending: Ending
) -> Outcome:
    """An attempt whose server broke it off before the client saw any of it: what the server says that it did.

    A server of one's own that had made no token has done nothing to pay for.
    """
    reading = error.reading
    if reading is None or reading.problem or (error.billed is False and not reading.usage.output):
        return failed(row, hold_nano_usd, error, ending)
    return priced(row, reading, at_ms, ending, service_tier="", quality=Quality.EXACT)


def failed(row: PriceRow | None, hold_nano_usd: int, error: UpstreamError, ending: Ending) -> Outcome:
    """An attempt that ended in an error before any output."""
    return free(ending) if error.billed is False else at_bound(row, hold_nano_usd, ending)


def estimated(input_tokens: int, reading: Reading | None, output_bytes: int, output_events: int) -> Reading:
    """The best reading when the provider's usage is missing or cannot be trusted.

    Input as the provider reported it if it did (Anthropic: in the first event), else `input_tokens`;
    output as the larger of what was reported and what was counted.
    """
    counted = bounds.estimate_output_tokens(output_bytes, output_events)
    if reading is not None and not reading.problem and reading.usage.input_total:
        u = reading.usage
        usage = Usage(
            u.input_uncached,
            u.cache_read,
            u.cache_write_5m,
            u.cache_write_1h,
            u.cache_write_12h,
            max(u.output, counted),
            u.reasoning,
        )
        return Reading(usage, "", reading.service_tier)
    return Reading(Usage(input_uncached=input_tokens, output=counted))


def _outcome(
    kind: Kind,
    usage: Usage,
    quality: Quality,
    cost: int,
    list_cost: int,
    version: str,
    ending: Ending,
    service_tier: str,
    note: str,
) -> Outcome:
    return Outcome(
        kind=kind,
        usage=usage,
        quality=quality,
        cost_nano_usd=cost,
        list_cost_nano_usd=list_cost,
        price_version=version,
        finish=ending.finish,
        status=ending.status,
        error=ending.error,
        latency_ms=ending.latency_ms,
        first_token_ms=ending.first_token_ms,
        upstream_request_id=ending.upstream_request_id,
        service_tier=service_tier,
        note=note,
    )


def post(world: World, x: Exchange, attempt: Attempt, outcome: Outcome) -> None:
    """Hand the outcome to the ledger, which has it from now on whatever becomes of the request."""
    outcome = explained(world, x, attempt, outcome)
    if x.replica is not None:
        outcome = replicas.ended(world, x.replica, outcome)
        x.replica = None
    if x.run is not None or x.route.rule:
        outcome = runs.ended(world, x, attempt, outcome)
    world.observer.attempt(attempt, outcome)
    world.ledger.post(attempt, outcome)
    world.places.leave(attempt.attempt_id)
    bound.learn(world, x, attempt, outcome)
    breakers.ended(world, x, outcome)
