"""serve: one request through all stages, in the order of the story.

    read -> identify -> shape -> breakers -> route -> admit -> call -> meter -> settle

`shape`, `breakers` and `route` come before `admit` because a hold needs a price, and a price needs candidates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import lru_cache

from gateway.core import dialects
from gateway.core.catalog import OnDisconnect, Operation
from gateway.core.errors import BudgetExceeded, GatewayError, TaskStopped, provider_request_id
from gateway.core.identity import Caller
from gateway.core.money import usd_text
from gateway.core.refusal import granted_headers
from gateway.core.replicas.group import short_name
from gateway.core.task import LANDING_RULE, State
from gateway.pipeline import admit, answers, breakers, early, ending, identify, meter, runs
from gateway.pipeline.call import Opened, open_answer
from gateway.pipeline.exchange import Exchange, World
from gateway.pipeline.read import read
from gateway.pipeline.route import route
from gateway.pipeline.shape import recall, shape
from gateway.ports import Answer, Incoming
from gateway.telemetry.steps import Steps

#: Headers of the provider that clients use; all others stay here.
_RETURNED = ("openai-processing-ms", "openai-model", "anthropic-organization-id")
_RETURNED_PREFIXES = ("x-ratelimit-", "anthropic-ratelimit-")
_HEADER_CHARS_MAX = 300


class Gateway:
    """The pipeline as the edge sees it."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Before the body is read. Raises `Unauthenticated`, or `Unavailable` when keys cannot be looked up."""
        return await identify.authenticate(self._world, headers)

    def models(self, caller: Caller) -> tuple[str, ...]:
        """The public names that this caller may use, in configuration order."""
        catalog = self._world.catalog()
        named = [d.model for d in catalog.deployments if caller.may_use(d.model, *d.aliases, d.tier.value)]
        return tuple(dict.fromkeys((*named, *filter(caller.may_use, self._world.virtual()))))

    def offers(self, caller: Caller, model: str) -> bool:
        """True if this caller may ask for a model of this name, be it an alias."""
        if model in self._world.virtual():
            return caller.may_use(model)
        found = self._world.catalog().by_model.get(model, ())
        return any(caller.may_use(d.model, *d.aliases, d.tier.value) for d in found)

    @property
    def refusing(self) -> bool:
        """Somebody was refused lately: ask `refusal` before a body is read."""
        return self._world.spent.any(self._world.clock.monotonic())

    async def refusal(
        self, operation: Operation, caller: Caller, headers: Mapping[str, str], path_task: str | None
    ) -> GatewayError | None:
        """What such a request is told whatever its body says; None = serve it. Raises `Unavailable`."""
        return await early.unread(self._world, operation, caller, headers, path_task)

    async def serve(self, incoming: Incoming, steps: Steps) -> Answer:
        """The answer to one model call. Raises `GatewayError`; nothing of a refused request is left behind."""
        world = self._world
        told = world.repeats.find(incoming, world.ledger.changes, world.clock.monotonic())
        if told is not None:
            if told.error.asked is not None:
                world.refused(*told.error.asked)
            return told.again()
        changes = world.ledger.changes
        x = Exchange(incoming, world.clock.now_ms(), steps)
        read(x)
        steps.mark("read")
        refusing = self.refusing
        if refusing and (known := early.read(world, x)) is not None:
            raise known
        await identify.identify(world, x)
        steps.mark("identify")
        if refusing and (known := early.identified(world, x)) is not None:
            return _told(x, known)
        shape(x)
        steps.mark("shape")
        x.wish = answers.wish(x)
        if x.wish is not None and (kept := answers.again(world, x, x.wish)) is not None:
            return kept
        try:
            breakers.ask(world, x)
            if world.bindings is not None:
                await runs.recall(world, x)
            if world.learned is not None:
                await recall(world, x)
            route(world, x)
            steps.mark("route")
            await admit.enter(world, x)
            return await _answered(world, x)
        except (BudgetExceeded, TaskStopped) as refusal:
            answer = await _instead(world, x, refusal)
            if isinstance(refusal, BudgetExceeded) and (answer is None or answer.error):
                now_s = world.clock.monotonic()
                world.repeats.add(incoming, refusal, answer, changes, now_s)
                world.spent.add(refusal, x.landed, changes, now_s)
            if answer is None:
                raise
            return answer


async def _answered(world: World, x: Exchange) -> Answer:
    opened = await _opened(world, x)
    identify.remember(world, x)
    answer = _answer(x, opened, _headers(world, x, opened))
    if opened.meter is not None:
        answer.stream = await meter.pump(world, x, opened)
        if x.wish is not None:
            answer.headers.append((answers.HEADER, "miss"))
            answer.stream = await answers.recorded(world, x, x.wish, opened, answer, answer.stream)
    else:
        if x.wish is not None:
            answers.keep(world, x, x.wish, opened.deployment.name, opened.outcome, answer)
        _add_cost(world, x, opened, answer)
    return answer


async def _instead(world: World, x: Exchange, refusal: BudgetExceeded | TaskStopped) -> Answer | None:
    """What is answered instead of a refusal; None = nothing is."""
    last = ending.last_exchange(world, x, refusal)
    if last is not None:
        try:
            return await _answered(world, last)
        except BudgetExceeded as again:  # another request has had the task's last answer, or is about to
            x.landed = again.refused is not None and again.refused.state == State.PAUSED_BUDGET
        except GatewayError:
            pass  # its model failed: the refusal stands
    return ending.answer_of(x, refusal)


def _told(x: Exchange, refusal: BudgetExceeded) -> Answer:
    answer = ending.answer_of(x, refusal)
    if answer is None:
        raise refusal
    return answer


@lru_cache(maxsize=1_024)
def in_a_header(text: str) -> str:
    """On one line, in ASCII, not too long."""
    plain = " ".join(text.split()).encode("ascii", "replace").decode()
    return plain if len(plain) <= _HEADER_CHARS_MAX else f"{plain[: _HEADER_CHARS_MAX - 3]}..."


def _answer(x: Exchange, opened: Opened, headers: list[tuple[str, str]]) -> Answer:
    plain = "text/event-stream" if opened.meter is not None else "application/json"
    return Answer(
        status=opened.answer.status,
        headers=headers,
        content_type=opened.answer.headers.get("content-type", plain),
        task_id=x.task.task_id,
        client=x.client,
        deployment=opened.deployment.name,
        body=opened.body,
        first_token_s=None if opened.first_token_ms is None else opened.first_token_ms / 1_000,
    )


def _add_cost(world: World, x: Exchange, opened: Opened, answer: Answer) -> None:
    outcome = opened.outcome
    if outcome is None or not outcome.price_version or not world.policy.expose_cost:
        return
    cost = usd_text(outcome.cost_nano_usd + x.charged_nano_usd)
    answer.headers += (("x-cost-usd", cost), ("x-uncached-cost-usd", usd_text(outcome.list_cost_nano_usd)))
    answer.body = dialects.with_cost(x.operation, opened.body, cost)


async def _opened(world: World, x: Exchange) -> Opened:
    """The answer's beginning. Where a provider bills to the end anyway, the call runs in a task of its own, so that a
    client who leaves does not cut it; everywhere else leaving cancels it here, and the attempt posts that itself."""
    for candidate in x.route.candidates:
        if candidate.provider.on_disconnect is OnDisconnect.DRAIN:
            break
    else:
        return await open_answer(world, x)
    task = world.spawn(open_answer(world, x), "call")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        world.spawn(_abandon(world, x, task), "abandon")
        raise


async def _abandon(world: World, x: Exchange, task: asyncio.Task[Opened]) -> None:
    """The client left before the answer began: by the provider's policy wait for it or stop it; either way it is
    posted."""
    x.client_gone = True
    # Before the first attempt is sent and between attempts there is nothing that a provider would bill.
    bills_on = x.calling is not None and x.calling.provider.on_disconnect is OnDisconnect.DRAIN
    drain = bills_on and world.drains.acquire()
    try:
        if not drain:
            task.cancel()
        async with asyncio.timeout(world.policy.drain_s):
            opened = await task
    except (GatewayError, TimeoutError, asyncio.CancelledError):
        return  # posted where it failed
    finally:
        if drain:
            world.drains.release()
    if opened.meter is not None:
        await meter.abandon_stream(world, x, opened)


def _headers(world: World, x: Exchange, opened: Opened) -> list[tuple[str, str]]:
    """What clients and people can read about this request without asking the ledger."""
    deployment = opened.deployment
    headers = [
        ("x-task-id", x.task.task_id),
        ("x-task-step", str(x.task_step)),
        ("x-model", deployment.model),
        ("x-tier", str(deployment.tier)),
        ("x-deployment", deployment.name),
        ("x-attempts", str(x.attempts)),
    ]
    if opened.replica:
        headers.append(("x-replica", short_name(opened.replica)))
    shaped, route = x.shaped, x.route
    if shaped.applied or shaped.protections:
        headers.append(("x-cache-transforms", ",".join((*shaped.applied, *shaped.protections))))
    if route.rule:
        headers.append(("x-rule", in_a_header(route.rule)))
    if route.why:
        headers.append(("x-route-reason", in_a_header(route.why)))
    if route.instead_of:
        headers.append(("x-route-instead-of", in_a_header(route.instead_of)))
    if x.granted is not None and (x.under_hard_budget or x.granted.warned):
        headers += granted_headers(x.granted)
    if x.landing:
        headers.append(("x-budget-stop", LANDING_RULE))
    if world.limits.degraded:
        headers.append(("x-gw-degraded", "ratelimit"))
    upstream = opened.answer.headers
    for name in _returned(tuple(upstream)):
        headers.append((name, upstream[name]))
    upstream_id = provider_request_id(upstream)
    if upstream_id:
        headers.append(("x-upstream-request-id", upstream_id))
    return headers


@lru_cache(maxsize=256)
def _returned(names: tuple[str, ...]) -> tuple[str, ...]:
    """Which headers of an answer the client gets; a provider sends the same names with each."""
    return tuple(name for name in names if name in _RETURNED or name.startswith(_RETURNED_PREFIXES))
