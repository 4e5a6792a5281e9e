"""shape: what of the prompt is compared with others, and what changes on its way to a deployment (`core.shaping`)."""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping

from gateway.core import bounds, secrets
from gateway.core import learned as learning
from gateway.core.cache_rules import CacheRule, KeyMeans
from gateway.core.catalog import Deployment, Wire
from gateway.core.errors import InvalidRequest
from gateway.core.identity import Caller
from gateway.core.known_prompts import Prompt
from gateway.core.protection import own_words, protected
from gateway.core.serving import CacheSalt
from gateway.core.shaping import AS_IT_CAME, LEAST_BYTES, Level, Request, Shaped, Transform
from gateway.pipeline.exchange import Exchange, World
from gateway.pipeline.urgency import priority_of

LEVEL_HEADER = "x-cache-level"

_log = logging.getLogger(__name__)
_TOO_SHORT = {level: Shaped(level, why_no_marks="below the minimum") for level in Level}


def shape(x: Exchange) -> None:
    """Raises `InvalidRequest` for a level that there is not."""
    x.prompt = Prompt.of(x.facts, x.incoming.body, x.caller.tenant_id)
    x.cache_level = _asked(x.incoming.headers)


def _asked(headers: Mapping[str, str]) -> Level | None:
    text = headers.get(LEVEL_HEADER)
    if text is None:
        return None
    try:
        return Level(text.strip().lower())
    except ValueError:
        known = ", ".join(Level)
        raise InvalidRequest(f"the header {LEVEL_HEADER} must be one of {known}, not {text[:32]!r}") from None


async def recall(world: World, x: Exchange) -> None:
    """Take over what other processes have learned of the run, where this one cannot know it yet."""
    learned, policy = world.learned, world.caching()
    if learned is None or x.facts.size < LEAST_BYTES:
        return
    level = policy.level_for(x.cache_level, x.caller.key_id, x.caller.team_id, "")
    levels = {level} if x.cache_level is not None else {level, *policy.deployments.values()}
    if levels == {Level.OBSERVE}:
        return
    scope = (x.caller.key_id, x.client, x.signal.external_id)
    try:
        unknown = learning.unknown(
            world.shaper,
            scope,
            x.operation,
            x.facts,
            x.incoming.body,
            tools=Transform.TOOLS not in policy.off,
            lines=Level.RELOCATE in levels and Transform.RELOCATE not in policy.off,
        )
        if unknown is None:
            return
        known = await learned.ask(x.caller.key_id, unknown)
        if known.order or known.lines:
            learning.take_over(world.shaper, scope, x.operation, x.facts, x.incoming.body, known)
    except Exception:
        # As in `shaped`: it costs a cache miss, and a 500 would cost the run.
        _log.exception("what others know of request %s could not be taken over", x.incoming.request_id)


def shaped(world: World, x: Exchange, deployment: Deployment) -> Shaped:
    """What leaves for this deployment instead of what came. Synchronous: what is remembered of a run belongs to one
    request from its first look to its last."""
    caller, provider = x.caller, deployment.provider
    rule = world.cache_rules().find(
        f"{provider.cache_rules or provider.name}/{deployment.upstream_model}", x.received_ms
    )
    level = world.caching().level_for(x.cache_level, caller.key_id, caller.team_id, deployment.name)
    if level is Level.OBSERVE:
        found = AS_IT_CAME
    elif x.facts.size < LEAST_BYTES:
        found = _TOO_SHORT[level]
    else:
        found = _shaped(world, x, deployment, rule, level)
    salted = rule is not None and rule.key_means is KeyMeans.ISOLATION
    if salted or deployment.serving.cache_salt is not None or deployment.serving.takes_priority:
        return _protected(world, x, deployment, found, salted)
    return found


def _shaped(
    world: World, x: Exchange, deployment: Deployment, rule: CacheRule | None, level: Level
) -> Shaped:
    policy = world.caching()
    scope = (x.caller.key_id, x.client, x.signal.external_id)
    try:
        found = world.shaper.shape(
            Request(
                operation=x.operation,
                facts=x.facts,
                body=x.incoming.body,
                links=x.chain,
                scope=scope,
                rule=rule,
                native=as_it_is(x, deployment),
                level=level,
                off=policy.off,
                trim=policy.trim,
                group=x.task.task_id,
                now_s=world.clock.monotonic(),
                again=x.attempts > 0,
            )
        )
        if found.diff:
            _log.info("request %s: from now on these lines move\n%s", x.incoming.request_id, found.diff)
        if found.note is not None and world.learned is not None:
            world.learned.tell(x.caller.key_id, learning.told_note(scope, *found.note))
        return found
    except Exception:
        # A prompt that cannot be shaped is sent as it came: that costs a cache miss, a 500 would cost the run.
        _log.exception("request %s could not be shaped and is sent as it came", x.incoming.request_id)
        return AS_IT_CAME


def as_it_is(x: Exchange, deployment: Deployment) -> bool:
    """The body leaves in the dialect in which it came."""
    return deployment.native(x.operation) and deployment.provider.wire is not Wire.LITELLM


def _protected(world: World, x: Exchange, deployment: Deployment, found: Shaped, salted: bool) -> Shaped:
    """With the salt and the priority that are the gateway's to say, whatever the level; never the client's."""
    for name in own_words(x.facts):
        if world.told.first(f"own {name}/{x.caller.key_id}"):
            _log.warning(
                "key %s sends %r of its own; %s gets the gateway's instead, now and from now on",
                *(x.caller.key_id, name, deployment.name),
            )
    apart = deployment.serving.cache_salt or (CacheSalt.TENANT if salted else CacheSalt.NONE)
    return protected(
        found,
        x.facts,
        salt=_salt(world, x.caller, apart),
        priority=priority_of(world, x, deployment),
        native=as_it_is(x, deployment),
    )


def _salt(world: World, caller: Caller, apart: CacheSalt) -> str:
    """The same for every request of a tenant, or of a team, and nothing that anybody else could guess; "" for none."""
    if apart is CacheSalt.NONE:
        return ""
    of = caller.tenant_id if apart is CacheSalt.TENANT else f"{caller.tenant_id}/team:{caller.team_id}"
    digest = secrets.hmac_of(world.pepper, f"cache_salt:{of}")
    return base64.urlsafe_b64encode(digest[:18]).decode()


def is_slow(world: World, x: Exchange) -> bool:
    """True if the first byte may take minutes: reasoning, or a very long prompt."""
    return x.facts.reasoning or bounds.estimate_input_tokens(x.facts.size) > world.policy.slow_input_tokens
