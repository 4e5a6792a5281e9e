"""call: send the request, try again or elsewhere only before the first byte; each try is an attempt of its own.

An attempt ends in exactly one `settle.post`: here if it fails or its whole answer is read, in `meter.py` if it
streams. Whoever abandons an attempt still posts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import msgspec

from gateway.core import dialects, health, prices
from gateway.core.catalog import Deployment, OnDisconnect, Operation
from gateway.core.dialects import ABORT, AnswerFacts, Reading
from gateway.core.dialects.caps import cap_edits
from gateway.core.entry import Attempt, Outcome
from gateway.core.errors import (
    BudgetExceeded,
    GatewayError,
    UnboundableRequest,
    UpstreamAborted,
    UpstreamAuthFailed,
    UpstreamError,
    UpstreamLost,
    UpstreamMalformed,
    UpstreamTimeout,
    provider_request_id,
)
from gateway.core.meter import StreamMeter
from gateway.core.money import usd_text
from gateway.core.quota import used_up_for_s
from gateway.core.usage import Quality, Usage
from gateway.pipeline import admit, bound, breakers, replicas, settle, shape
from gateway.pipeline.exchange import ANSWER_BYTES_MAX, Exchange, World
from gateway.pipeline.explain import ask_vendor
from gateway.pipeline.fallback import Way
from gateway.pipeline.urgency import urgency_of
from gateway.ports import Unsent, UpstreamAnswer, UpstreamCall

#: Headers of the client that go upstream; everything else stays here (allow-list, resilience: HTTP).
FORWARDED = ("anthropic-version", "anthropic-beta", "openai-beta", "traceparent", "tracestate")


_NEWEST = 0.2


class Opened(msgspec.Struct):
    """An attempt that the provider has begun to answer."""

    attempt: Attempt
    deployment: Deployment
    hold: admit.Hold
    answer: UpstreamAnswer
    sent_s: float
    replica: str = ""  # the address of the one that serves, where a deployment has several
    first_token_ms: int | None = None
    # a whole answer, read and posted
    body: bytes = b""
    outcome: Outcome | None = None
    # or a stream, whose first events are here and whose end `meter.pump` posts
    meter: StreamMeter | None = None
    first: bytes = b""
    chunks: AsyncIterator[bytes] | None = None


async def open_answer(world: World, x: Exchange) -> Opened:
    """The first good answer over the candidates. Raises the last attempt's `UpstreamError`, or what `admit` refused.

    The caller's place is free again once an answer is whole, or if there is none; one of a stream is left by `meter`.
    """
    opened = None
    failed: UpstreamError | None = None
    way = Way(world, x)
    try:
        deployment = way.first()
        while True:
            try:
                opened = await _attempt(world, x, deployment)
                return opened
            except (BudgetExceeded, UnboundableRequest) as refusal:
                # Another attempt that the budget has no room for is not made, and is no end of the budget.
                own = None if _stopped(refusal) else way.without_those_ahead()
                if own is not None:
                    deployment = own
                elif failed is None or _stopped(refusal):
                    raise
                else:
                    raise failed from refusal
            except UpstreamError as error:
                step = way.after(error)
                if step is None:
                    raise
                failed, deployment = error, step.deployment
                if step.delay_s:
                    x.steps.pause()
                    await asyncio.sleep(step.delay_s)
                    x.steps.resume()
    finally:
        if opened is None or opened.meter is None:
            admit.leave(world, x)


def _stopped(refusal: BudgetExceeded | UnboundableRequest) -> bool:
    """The task was stopped between two attempts."""
    return isinstance(refusal, BudgetExceeded) and refusal.refused is not None and bool(refusal.refused.state)


async def _attempt(world: World, x: Exchange, deployment: Deployment) -> Opened:
    attempt = _attempt_of(world, x, deployment)
    x.shaped = shape.shaped(world, x, deployment)
    if deployment.limited:
        x.steps.pause()
        try:
            await world.places.enter(deployment, attempt.team_id, attempt.attempt_id, urgency_of(world, x))
        finally:
            x.steps.resume()
    try:
        hold = await admit.reserve(world, x, attempt, deployment)
    except BaseException:
        world.places.leave(attempt.attempt_id)
        raise
    breakers.began(world, x)
    x.attempts = attempt.attempt_no
    x.steps.mark("admit")
    sent_s = world.clock.monotonic()
    if world.health:
        world.health.update(health.begin_call(world.health, deployment, sent_s))
    answer: UpstreamAnswer | None = None
    opened: Opened | None = None
    x.steps.pause()
    x.calling = deployment
    try:
        if deployment.replicas is not None:
            replicas.choose(world, x, deployment, attempt)
        answer = await world.upstream.open(_call_of(world, x, attempt, deployment, hold))
        opened = Opened(attempt, deployment, hold, answer, sent_s)
        if x.replica is not None:
            opened.replica = x.replica.address
        if x.facts.stream and "json" not in answer.headers.get("content-type", ""):
            await _first_events(world, x, opened)
        else:
            await _whole(world, x, opened)
        _note_good(world, deployment, answer, sent_s)
        return opened
    except UpstreamError as error:
        if x.replica is not None:
            replicas.failed(x, x.replica, error)
        status = error.upstream_status or (answer.status if answer is not None else 0)
        finish = ABORT if isinstance(error, UpstreamAborted) else "error"
        request_id = error.upstream_request_id or ""
        ending = _ending(world, sent_s, status, finish, error.kind, request_id, error.message)
        if isinstance(error, UpstreamAborted):
            outcome = settle.aborted(hold.row, hold.amount_nano_usd, error, x.received_ms, ending)
        else:
            outcome = settle.failed(hold.row, hold.amount_nano_usd, error, ending)
        x.charged_nano_usd += outcome.cost_nano_usd
        settle.post(world, x, attempt, outcome)
        if not x.avoided or not replicas.another(world, x, deployment, error):
            _note_health(world, deployment, error)
        if answer is not None:
            await answer.close()
        raise
    except asyncio.CancelledError as stop:
        # The client is gone and the provider's policy is to stop (`serve.abandon`).
        ending = _ending(world, sent_s, answer.status if answer else 0, "client_gone", "client_gone", "")
        if isinstance(stop, Unsent) or deployment.provider.on_disconnect is OnDisconnect.CANCEL_FREE:
            settle.post(world, x, attempt, settle.free(ending))
        else:
            settle.post(world, x, attempt, settle.at_bound(hold.row, hold.amount_nano_usd, ending))
        if answer is not None:
            world.spawn(answer.close(), "close")
        raise
    except Exception:
        # A fault of our own: the provider may have answered, so the hold is charged and the caller gets a 500.
        ending = _ending(
            world, sent_s, answer.status if answer else 0, "error", "internal", "", "gateway fault"
        )
        settle.post(world, x, attempt, settle.at_bound(hold.row, hold.amount_nano_usd, ending))
        if answer is not None:
            world.spawn(answer.close(), "close")
        raise
    finally:
        x.calling = None
        x.steps.resume()
        x.steps.mark("call")


async def _whole(world: World, x: Exchange, o: Opened) -> None:
    """Read a plain answer to its end, price it, post it."""
    body = await o.answer.read(ANSWER_BYTES_MAX)
    facts = dialects.read_answer(x.operation, body)
    if facts.error is not None:
        raise _said(facts.error)
    if x.facts.stream:
        # It was generated and will be billed, and the same server would do the same again.
        raise UpstreamMalformed(
            "the model provider answered a stream request without a stream", retryable=False
        )
    if dialects.aborted(x.operation, facts.finish):
        raise UpstreamAborted(
            upstream_status=o.answer.status, upstream_request_id=facts.response_id, reading=facts.reading
        )
    await o.answer.close()
    x.said = body
    o.outcome = whole_outcome(world, x, o, facts)
    settle.post(world, x, o.attempt, o.outcome)
    o.body = body


def whole_outcome(world: World, x: Exchange, o: Opened, facts: AnswerFacts) -> Outcome:
    """Exact where the provider reported valid usage, else estimated from the bytes of both directions."""
    reading, quality, note = facts.reading, Quality.EXACT, ""
    if x.operation is Operation.COUNT_TOKENS:
        reading = Reading(Usage())  # counting is not billed
    elif reading.problem:
        quality = Quality.ESTIMATED
        note = (
            f"usage {reading.problem}: estimated from {x.facts.size} bytes in, {facts.output_bytes} bytes out"
        )
        reading = settle.estimated(bound.input_estimate(world, x, o.deployment), None, facts.output_bytes, 0)
    request_id = facts.response_id or provider_request_id(o.answer.headers)
    ending = _ending(world, o.sent_s, o.answer.status, facts.finish, "", request_id, note)
    return settle.priced(
        o.hold.row, reading, x.received_ms, ending, service_tier=x.facts.service_tier, quality=quality
    )


async def _first_events(world: World, x: Exchange, o: Opened) -> None:
    """Wait for the first event of a stream: until it is here, another attempt is still possible."""

    def price(reading: Reading) -> str | None:
        if not world.policy.expose_cost or o.hold.row is None or reading.problem:
            return None
        tier = reading.service_tier or x.facts.service_tier
        cost = prices.cost(o.hold.row, reading.usage, x.received_ms, service_tier=tier)
        return usd_text(cost.nano_usd + x.charged_nano_usd)

    hide = x.operation is Operation.CHAT and not x.facts.include_usage
    o.meter = meter = StreamMeter(x.operation, hide_usage=hide, price=price)
    o.chunks = o.answer.chunks()
    provider = o.deployment.provider
    limit_s = provider.first_event_timeout_s
    if limit_s >= provider.idle_timeout_s:
        # Silence is noticed before that, and keep-alives are looked at as they come: no timer.
        first = await _until_said(world, x, o, meter, o.chunks)
    else:
        try:
            async with asyncio.timeout(limit_s - (world.clock.monotonic() - o.sent_s)):
                first = await _until_said(world, x, o, meter, o.chunks)
        except TimeoutError:
            raise _unsaid(limit_s) from None
    if meter.aborted:
        async for data in o.chunks:  # its usage and its end follow at once
            meter.feed(data)
        raise UpstreamAborted(
            upstream_status=o.answer.status, upstream_request_id=meter.response_id, reading=meter.reading
        )
    if not meter.events:
        raise UpstreamLost(
            "the model provider's stream ended before its first event", upstream_status=o.answer.status
        )
    o.first_token_ms = _ms_since(world, o.sent_s)
    if x.replica is not None:
        replicas.first_chunk(world, x.replica)
    o.first = first


async def _until_said(
    world: World, x: Exchange, o: Opened, meter: StreamMeter, chunks: AsyncIterator[bytes]
) -> bytes:
    """What may be forwarded of a stream up to its first event; one's own servers': up to their first token."""
    limit_s = o.deployment.provider.first_event_timeout_s
    first: list[bytes] = []
    async for data in chunks:
        first.append(meter.feed(data))
        said = meter.first_output or meter.finish or meter.complete
        if meter.error is not None and (meter.events == 1 or (x.replica is not None and not said)):
            raise _said(meter.error)
        # An error further on goes to the client: what came before it may be billed. One's own servers send no bill,
        # and begin every answer with an event that says nothing.
        if meter.events and (said or x.replica is None):
            break
        if world.clock.monotonic() - o.sent_s > limit_s:
            raise _unsaid(limit_s)
    return b"".join(first)


def _unsaid(limit_s: float) -> UpstreamTimeout:
    return UpstreamTimeout(
        f"the model provider's stream had no event within {limit_s:g} s, only keep-alives or nothing",
        billed=None,
    )


def _said(error: GatewayError) -> UpstreamError:
    """An error object inside a 200, before anything else: that is proof that nothing was billed."""
    return UpstreamError(error.message, billed=False)


def _attempt_of(world: World, x: Exchange, deployment: Deployment) -> Attempt:
    caller, task = x.caller, x.task
    return Attempt(
        attempt_id=world.new_id("att"),
        request_id=x.incoming.request_id,
        tenant_id=caller.tenant_id,
        team_id=caller.team_id,
        key_id=caller.key_id,
        task_id=task.task_id,
        parent_task_id=task.parent_task_id,
        task_source=str(task.source),
        task_external_id=task.external_id,
        attempt_no=x.attempts + 1,
        operation=str(x.operation),
        client=x.client,
        model_requested=x.facts.model,
        model=deployment.model,
        upstream_model=deployment.upstream_model,
        provider=deployment.provider.name,
        deployment=deployment.name,
        tier=str(deployment.tier),
        rule=x.route.rule,
        stream=x.facts.stream,
        started_at_ms=world.clock.now_ms(),
    )


def _call_of(
    world: World, x: Exchange, attempt: Attempt, deployment: Deployment, hold: admit.Hold
) -> UpstreamCall:
    facts = x.facts
    splices, members = x.shaped.splices, x.shaped.members
    caps = x.route.caps
    if caps.service_tier is not None or caps.reasoning_effort is not None:
        more, added = cap_edits(facts, x.incoming.body, caps.service_tier, caps.reasoning_effort)
        splices, members = (*splices, *more), members + added
    if world.caching().diagnostics:
        members += ask_vendor(world, x, deployment)
    edits = dialects.Edits(
        model=deployment.upstream_model if deployment.upstream_model != facts.model else None,
        include_usage=(
            x.operation is Operation.CHAT
            and facts.stream
            and not facts.include_usage
            and deployment.provider.stream_usage
        ),
        max_output_tokens=hold.output_bound_tokens,
        splices=splices,
        members=members,
    )
    headers = x.incoming.headers
    forwarded = [(name, headers[name]) for name in FORWARDED if name in headers]
    if world.traceparent is not None:
        given = headers.get("traceparent")
        own = world.traceparent(attempt.request_id, attempt.attempt_id, given)
        forwarded = [*(pair for pair in forwarded if pair[0] != "traceparent"), ("traceparent", own)]
    return UpstreamCall(
        attempt_id=attempt.attempt_id,
        deployment=deployment,
        operation=x.operation,
        body=dialects.render(facts, x.incoming.body, edits),
        headers=(*forwarded, *x.shaped.headers),
        stream=facts.stream,
        slow=shape.is_slow(world, x),
        query=x.incoming.query,
        address=x.replica.address if x.replica is not None else "",
    )


def _ending(
    world: World, sent_s: float, status: int, finish: str, error: str, request_id: str, note: str = ""
) -> settle.Ending:
    return settle.Ending(status, finish, error, _ms_since(world, sent_s), None, request_id, note)


def _ms_since(world: World, at_s: float) -> int:
    return round((world.clock.monotonic() - at_s) * 1_000)


def _note_good(world: World, deployment: Deployment, answer: UpstreamAnswer, sent_s: float) -> None:
    took_s = world.clock.monotonic() - sent_s
    known = world.latency.get(deployment.name, took_s)
    world.latency[deployment.name] = known + _NEWEST * (took_s - known)
    # Where nothing has failed yet there is no health to mend.
    if world.health or used_up_for_s(answer.headers) is not None:
        _note_health(world, deployment, None, answer)


def _note_health(
    world: World, deployment: Deployment, error: UpstreamError | None, answer: UpstreamAnswer | None = None
) -> None:
    now_s = world.clock.monotonic()
    after_s = error.retry_after_s if error is not None else None
    changes = health.observe(world.health, deployment, health.result_of(error), now_s, after_s)
    if answer is not None:
        used_up_s = used_up_for_s(answer.headers)
        if used_up_s is not None:
            known = changes.get(deployment.name) or world.health.get(deployment.name, health.HealthState())
            changes[deployment.name] = health.pause(known, now_s, used_up_s)
    if not changes:
        return
    if isinstance(error, UpstreamAuthFailed):
        _tell_of_credential(world, deployment, error, changes)
    world.health.update(changes)
    world.health_changed(changes)


def _tell_of_credential(
    world: World, deployment: Deployment, error: UpstreamError, changes: Mapping[str, health.HealthState]
) -> None:
    """A person must look: told once per ejection."""
    for name, state in changes.items():
        known = world.health.get(name)
        if known is None or known.open_until_s is None:
            body = {
                "subject": name,
                "provider": deployment.provider.name,
                "deployment": deployment.name,
                "status": error.upstream_status,
                "message": f"the provider {deployment.provider.name} refuses the gateway's credential "
                f"(HTTP {error.upstream_status}); its deployments are left alone until it works again",
            }
            world.tell(
                "credential_refused", f"{name}/{world.clock.now_ms() // 60_000}/{state.ejections}", body
            )
