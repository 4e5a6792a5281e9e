"""answers: whole answers that are given again to the same request, for those who ask for that.

Opt-in, per request by the header `x-response-cache: <seconds>`, or per key by its label `response_cache_s`; a request
says `x-response-cache: off` to a key's. Byte for byte the same body at the same address, within one tenant. Streams are
never kept, and requests with tools only if the header says so: `x-response-cache: 60, tools`. What is given again costs
nothing, has no attempt and no ledger entry, and says so.
"""

from __future__ import annotations

import hashlib

from gateway.core import dialects
from gateway.core.catalog import Operation
from gateway.core.entry import Kind, Outcome
from gateway.core.errors import InvalidRequest
from gateway.core.kept_answers import Kept, Wish
from gateway.pipeline.exchange import Exchange, World
from gateway.ports import Answer

HEADER = "x-response-cache"
LABEL = "response_cache_s"
LIFE_MAX_S = 86_400
_KEPT = frozenset({Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES, Operation.EMBEDDINGS})


def wish(x: Exchange) -> Wish | None:
    """None if nothing is to be kept or given again. Raises `InvalidRequest` for a header that means nothing."""
    own, usual = x.incoming.headers.get(HEADER), x.caller.key.labels.get(LABEL)
    if own is None and usual is None:
        return None
    life_s, tools = _parsed(own) if own is not None else (_seconds(usual or ""), False)
    if not life_s or x.facts.stream or x.operation not in _KEPT or (x.facts.tool_count and not tools):
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
        body=dialects.with_cost(x.operation, kept.body, "0") if world.policy.expose_cost else kept.body,
    )


def keep(
    world: World, x: Exchange, wanted: Wish, deployment: str, outcome: Outcome | None, answer: Answer
) -> None:
    """Keep a whole, good answer. `answer.body` is still as the provider sent it."""
    at = next((d for d in x.route.candidates if d.name == deployment), None)
    if (
        at is None
        or outcome is None
        or outcome.kind is not Kind.POST
        or outcome.error
        or answer.status != 200
    ):
        return
    now_s = world.clock.monotonic()
    names = (at.tier.value, at.model, *at.aliases)
    world.answers.keep(
        wanted.key,
        Kept(
            answer.body,
            answer.content_type,
            at.name,
            at.model,
            at.tier.value,
            names,
            now_s,
            now_s + wanted.life_s,
        ),
    )
    answer.headers.append((HEADER, "stored"))
