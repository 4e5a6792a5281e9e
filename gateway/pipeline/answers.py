"""answers: whole answers that are given again to the same request, for those who ask for that.

Opt-in, per request by the header `x-response-cache: <seconds>`, or per key by its label `response_cache_s`; a request
says `x-response-cache: off` to a key's. Byte for byte the same body at the same address, within one tenant; requests with
tools only if the header says so: `x-response-cache: 60, tools`. A stream is kept once it has ended as it should, and given
again as a stream, all at once. What is given again costs nothing, has no attempt and no ledger entry, and says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator

from gateway.core import dialects
from gateway.core.catalog import Operation
from gateway.core.entry import Kind, Outcome
from gateway.core.errors import InvalidRequest
from gateway.core.kept_answers import ANSWER_BYTES_MAX, Kept, Wish
from gateway.core.meter import StreamMeter
from gateway.pipeline.call import Opened
from gateway.pipeline.exchange import Exchange, World
from gateway.ports import Answer

HEADER = "x-response-cache"
LABEL = "response_cache_s"
LIFE_MAX_S = 86_400
_STREAM = "text/event-stream"
_KEPT = frozenset({Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES, Operation.EMBEDDINGS})


def wish(x: Exchange) -> Wish | None:
    """None if nothing is to be kept or given again. Raises `InvalidRequest` for a header that means nothing."""
    own, usual = x.incoming.headers.get(HEADER), x.caller.key.labels.get(LABEL)
    if own is None and usual is None:
        return None
    life_s, tools = _parsed(own) if own is not None else (_seconds(usual or ""), False)
    if not life_s or x.operation not in _KEPT or (x.facts.tool_count and not tools):
        return None
    scope = f"{x.caller.tenant_id}\0{x.operation}\0{x.incoming.query}\0".encode()
    digest = hashlib.blake2b(scope, digest_size=32)
    digest.update(x.incoming.body)
    return Wish(digest.digest(), life_s)


def _parsed(header: str) -> tuple[float, bool]:
    words = [word.strip().lower() for word in header.split(",")]
    seconds, more = words[0], words[1:]
    if seconds in ("off", "0") and not more:
        return 0.0, False
    life_s = _seconds(seconds)
    if not life_s or more not in ([], ["tools"]):
        raise InvalidRequest(
            f"{HEADER} must be off, or seconds from 1 to {LIFE_MAX_S}, and may end in ', tools'", param=HEADER
        )
    return life_s, bool(more)


def _seconds(text: str) -> float:
    """0 for what is no number of seconds within bounds."""
    if not (text.isascii() and text.isdigit()) or len(text) > 6:
        return 0.0
    return float(text) if int(text) <= LIFE_MAX_S else 0.0


def again(world: World, x: Exchange, wanted: Wish) -> Answer | None:
    """The kept answer to this very request, if there is one that the caller may still get."""
    now_s = world.clock.monotonic()
    kept = world.answers.find(wanted.key, now_s)
    if kept is None or not x.caller.may_use(x.facts.model, *kept.names):
        return None
    world.answers.given += 1
    expose = world.policy.expose_cost
    stream = _replayed(x.operation, kept.body, expose) if kept.content_type.startswith(_STREAM) else None
    headers = [
        ("x-task-id", x.task.task_id),
        ("x-model", kept.model),
        ("x-tier", kept.tier),
        ("x-deployment", kept.deployment),
        ("x-attempts", "0"),
        ("x-cost-usd", "0"),
        (HEADER, "hit"),
        ("age", str(int(now_s - kept.since_s))),
    ]
    return Answer(
        status=200,
        headers=headers,
        content_type=kept.content_type,
        task_id=x.task.task_id,
        client=x.client,
        deployment=kept.deployment,
        body=b"" if stream else dialects.with_cost(x.operation, kept.body, "0") if expose else kept.body,
        stream=stream,
    )


async def _replayed(operation: Operation, events: bytes, expose_cost: bool) -> AsyncGenerator[bytes, None]:
    """A stream as it was sent, with its cost put right."""
    meter = StreamMeter(operation, hide_usage=False, price=lambda _: "0" if expose_cost else None)
    yield meter.feed(events) + meter.end()


async def recorded(
    world: World,
    x: Exchange,
    wanted: Wish,
    opened: Opened,
    answer: Answer,
    stream: AsyncGenerator[bytes, None],
) -> AsyncGenerator[bytes, None]:
    """The same stream, which is kept if it ends as it should. Closing it closes the other, as `meter.pump` says."""
    events = _recording(world, x, wanted, opened, answer, stream)
    await anext(events)  # as in `meter.pump`: what was never started closes nothing
    return events


async def _recording(
    world: World,
    x: Exchange,
    wanted: Wish,
    opened: Opened,
    answer: Answer,
    stream: AsyncGenerator[bytes, None],
) -> AsyncGenerator[bytes, None]:
    parts: list[bytes] = []
    size = 0
    try:
        yield b""
        async for data in stream:
            size += len(data)
            if size <= ANSWER_BYTES_MAX:
                parts.append(data)
            else:
                parts.clear()
            yield data
    finally:
        await stream.aclose()
        meter = opened.meter
        # Whoever hangs up on the last event, as Codex does, had all of it.
        if meter is not None and meter.complete and meter.error is None and parts:
            _keep(world, x, wanted, opened.deployment.name, b"".join(parts), answer.content_type)


def keep(
    world: World, x: Exchange, wanted: Wish, deployment: str, outcome: Outcome | None, answer: Answer
) -> None:
    """Keep a whole, good answer. `answer.body` is still as the provider sent it."""
    if outcome is None or outcome.kind is not Kind.POST or outcome.error or answer.status != 200:
        return
    if _keep(world, x, wanted, deployment, answer.body, answer.content_type):
        answer.headers.append((HEADER, "stored"))


def _keep(world: World, x: Exchange, wanted: Wish, deployment: str, body: bytes, content_type: str) -> bool:
    at = x.route.named(deployment)
    if at is None:
        return False
    now_s = world.clock.monotonic()
    names = (at.tier.value, at.model, *at.aliases)
    world.answers.keep(
        wanted.key,
        Kept(
            body,
            content_type,
            at.name,
            at.model,
            at.tier.value,
            names,
            now_s,
            now_s + wanted.life_s,
        ),
    )
    return True
