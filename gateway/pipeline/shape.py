"""shape: what of the prompt is compared with others, and what changes on its way to a deployment (`core.shaping`)."""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping
from functools import partial

from gateway.core import bounds, secrets
from gateway.core.cache_rules import KeyMeans
from gateway.core.catalog import Deployment, Wire
from gateway.core.errors import InvalidRequest
from gateway.core.known_prompts import Prompt
from gateway.core.shaping import AS_IT_CAME, LEAST_BYTES, Level, Request, Shaped
from gateway.pipeline.exchange import Exchange, World

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


def shaped(world: World, x: Exchange, deployment: Deployment) -> Shaped:
    """What leaves for this deployment instead of what came. Synchronous: what is remembered of a run belongs to one
    request from its first look to its last."""
    caller, provider = x.caller, deployment.provider
    policy = world.caching()
    level = policy.level_for(x.cache_level, caller.key_id, caller.team_id, deployment.name)
    if level is Level.OBSERVE:
        return AS_IT_CAME
    rule = world.cache_rules().find(
        f"{provider.cache_rules or provider.name}/{deployment.upstream_model}", x.received_ms
    )
    isolated = rule is not None and rule.key_means is KeyMeans.ISOLATION
    if x.facts.size < LEAST_BYTES and not isolated:
        return _TOO_SHORT[level]
    try:
        found = world.shaper.shape(
            Request(
                operation=x.operation,
                facts=x.facts,
                body=x.incoming.body,
                links=x.chain,
                scope=(caller.key_id, x.client, x.signal.external_id),
                rule=rule,
                native=deployment.native(x.operation) and provider.wire is not Wire.LITELLM,
                level=level,
                off=policy.off,
                trim=policy.trim,
                group=x.task.task_id,
                salt=partial(_salt, world, caller.tenant_id) if isolated else None,
                now_s=world.clock.monotonic(),
                again=x.attempts > 0,
            )
        )
        if found.diff:
            _log.info("request %s: from now on these lines move\n%s", x.incoming.request_id, found.diff)
        return found
    except Exception:
        # A prompt that cannot be shaped is sent as it came: that costs a cache miss, a 500 would cost the run.
        _log.exception("request %s could not be shaped and is sent as it came", x.incoming.request_id)
        return AS_IT_CAME


def _salt(world: World, tenant_id: str) -> str:
    """The same for a tenant's every request, and nothing that another tenant could guess."""
    digest = secrets.hmac_of(world.pepper, f"cache_salt:{tenant_id}")
    return base64.urlsafe_b64encode(digest[:18]).decode()


def is_slow(world: World, x: Exchange) -> bool:
    """True if the first byte may take minutes: reasoning, or a very long prompt."""
    return x.facts.reasoning or bounds.estimate_input_tokens(x.facts.size) > world.policy.slow_input_tokens
