"""meter: pass a stream on event by event, read its usage on the side, post its end whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from gateway.core import meter as meters
from gateway.core.catalog import OnDisconnect, Operation
from gateway.core.dialects import ABORT
from gateway.core.entry import Outcome
from gateway.core.errors import (
    UpstreamAborted,
    UpstreamError,
    UpstreamLost,
    UpstreamTimeout,
    provider_request_id,
)
from gateway.core.meter import StreamMeter
from gateway.core.usage import Quality
from gateway.pipeline import admit, bound, settle
from gateway.pipeline.call import Opened
from gateway.pipeline.exchange import Exchange, World


async def pump(world: World, x: Exchange, o: Opened) -> AsyncGenerator[bytes, None]:
    """Whole events for the client. An upstream that breaks off becomes an error event, never a clean end.

    Closing this iterator early, even unread, means that the client is gone; the attempt then ends by the
    provider's policy.
    """
    events = _events(world, x, o)
    await anext(events)  # a generator that was never started would skip its `finally` when closed
    return events


async def _events(world: World, x: Exchange, o: Opened) -> AsyncGenerator[bytes, None]:
    meter, chunks = o.meter, o.chunks
    if meter is None or chunks is None:
        raise RuntimeError("pump needs an opened stream")
    finish, error = "", ""
    gone = True
    begun = False
    try:
        yield b""
        begun = True
        yield o.first
        said, quiet_from_s = meter.events, 0.0
        async for data in chunks:
            out = meter.feed(data)
            if meter.events != said:
                said, quiet_from_s = meter.events, 0.0
            else:
                quiet_from_s = _still_quiet(world, o, quiet_from_s)
            if out:
                yield out
        tail = meter.end()
        if tail:
            yield tail
        if meter.aborted:
            raise UpstreamAborted()
        if not meter.complete and meter.error is None:
            raise UpstreamLost("the model provider cut the stream in the middle of its answer")
        if meter.error is not None:
            finish, error = "error", meter.error.kind
        gone = False
    except UpstreamError as e:
        gone = False
        finish, error = ABORT if meter.aborted else "upstream_cut", e.kind
        kind = "api_error" if x.operation.anthropic else "server_error"
        yield meters.error_event(x.operation, e.code, kind, e.message)
    finally:
        # No await here: this runs while the generator is being closed, possibly under cancellation.
        if gone:
            # Codex and others hang up on the last event, without waiting for the end of the body.
            world.spawn(abandon_stream(world, x, o, sent_all=begun and meter.complete), "abandon")
        else:
            admit.leave(world, x)
            outcome = stream_outcome(world, x, o, finish, error)
            settle.post(world, x, o.attempt, outcome)
            if meter.events > 1 and o.first_token_ms is not None:
                world.streamed(o.attempt, meter.events, (outcome.latency_ms - o.first_token_ms) / 1e3)
            world.spawn(o.answer.close(), "close")


def _still_quiet(world: World, o: Opened, since_s: float) -> float:
    """Since when only keep-alives have come; 0 = they begin now. Raises `UpstreamTimeout` if that is too long."""
    now_s = world.clock.monotonic()
    limit_s = o.deployment.provider.event_idle_timeout_s
    if since_s and now_s - since_s > limit_s:
        raise UpstreamTimeout(f"the model provider's stream had only keep-alives for {limit_s:g} s")
    return since_s or now_s


async def abandon_stream(world: World, x: Exchange, o: Opened, *, sent_all: bool = False) -> None:
    """The client is gone: read on or stop, as the provider bills, then post.

    `sent_all`: it was sent the last event before, so nothing is missing on its side and nothing went wrong.
    """
    meter = o.meter
    if meter is None:
        raise RuntimeError("abandon_stream needs an opened stream")
    policy = o.deployment.provider.on_disconnect
    try:
        if policy is OnDisconnect.DRAIN and world.drains.acquire():
            try:
                async with asyncio.timeout(world.policy.drain_s):
                    async for data in o.answer.chunks():
                        meter.feed(data)
                meter.end()
            except (UpstreamError, TimeoutError):
                pass  # what was read so far is what is known
            finally:
                world.drains.release()
    finally:
        admit.leave(world, x)
        await o.answer.close()
        if policy is OnDisconnect.CANCEL_FREE and not (meter.complete or meter.final):
            ending = _ending(world, o, meter, "client_gone", "client_gone", "")
            settle.post(world, x, o.attempt, settle.free(ending))
        else:
            gone = "" if sent_all else "client_gone"
            settle.post(world, x, o.attempt, stream_outcome(world, x, o, gone, gone))


def stream_outcome(world: World, x: Exchange, o: Opened, finish: str, error: str) -> Outcome:
    """Exact if the provider's final usage arrived, whoever hung up and when; else estimated from what was seen."""
    meter = o.meter
    if meter is None:
        raise RuntimeError("stream_outcome needs an opened stream")
    reading = meter.reading
    x.said = meter.usage_events[0 if x.operation is Operation.MESSAGES else 1]
    if reading is not None and meter.final:
        quality, note = Quality.EXACT, ""
    else:
        why = "missing" if reading is None or not reading.problem else reading.problem
        quality = Quality.ESTIMATED
        note = f"usage {why}: estimated from {x.facts.size} bytes in, {meter.output_events} output events"
        input_tokens = bound.input_estimate(world, x, o.deployment)
        reading = settle.estimated(input_tokens, reading, meter.output_bytes, meter.output_events)
    ending = _ending(world, o, meter, finish or meter.finish, error, note)
    return settle.priced(
        o.hold.row, reading, x.received_ms, ending, service_tier=x.facts.service_tier, quality=quality
    )


def _ending(world: World, o: Opened, meter: StreamMeter, finish: str, error: str, note: str) -> settle.Ending:
    latency_ms = round((world.clock.monotonic() - o.sent_s) * 1_000)
    request_id = meter.response_id or provider_request_id(o.answer.headers)
    return settle.Ending(o.answer.status, finish, error, latency_ms, o.first_token_ms, request_id, note)
