"""fallback: where a request goes after an attempt has failed, and whether it goes on at all."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gateway.core import bounds, routing
from gateway.core.catalog import Deployment
from gateway.core.errors import UpstreamError, UpstreamOverloaded, UpstreamRefused
from gateway.core.routing import AUTO
from gateway.pipeline import replicas
from gateway.pipeline.exchange import Exchange, World
from gateway.pipeline.route import rules_of

#: Ways in which providers say that a prompt is too long for a model (vendors' error pages, November 2026).
_TOO_LONG_CODES = frozenset({"context_length_exceeded", "context_window_exceeded", "string_above_max_length"})
_TOO_LONG_TEXTS = ("maximum context length", "prompt is too long", "context window", "too many tokens")
#: Falling over when a provider asks for money would move the spend elsewhere without anybody's knowing.
_PAYMENT_REQUIRED = 402
#: How often one request may go on to another replica of a deployment, besides its tries.
MOVES_MAX = 2


@dataclass(frozen=True, slots=True)
class Next:
    deployment: Deployment
    delay_s: float = 0.0


class Way:
    """The deployments of one request, in the order in which they are tried."""

    def __init__(self, world: World, x: Exchange) -> None:
        self._world, self._x = world, x
        self._left = list(x.route.candidates)
        self._tried: list[Deployment] = []
        self._moves = 0  # to other replicas of a deployment: none of them is a try of another kind
        self._ahead: frozenset[str] = frozenset()  # of other tiers, asked before the candidates
        if world.health and x.route.tier is not None and not self._fit(self._left[0]):
            # Candidates are unfit only if all are. Asking one of them all the same is for those without a way out.
            found = self._further()
            if found:
                self._ahead = frozenset(d.name for d in found)
                self._left = [*found, *self._left]
                x.route = replace(x.route, why=f"{x.route.why}; nothing in tier {x.route.tier} is well")

    def first(self) -> Deployment:
        """The first candidate, or one further on that has a free place."""
        self._world.retries.asked(self._left[0].provider.name)
        return self._take()

    def without_those_ahead(self) -> Deployment | None:
        """The first candidate, after a budget had no room for what was asked before it; None if nothing was."""
        if self._tried[-1].name not in self._ahead:
            return None
        self._left = list(self._x.route.candidates)
        return self._take()

    def after(self, error: UpstreamError) -> Next | None:
        """What to try next; None if the error is the answer."""
        x = self._x
        if x.client_gone:
            return None
        tried = self._tried[-1]
        if tried.replicas is not None and self._moves_on(tried, error):
            return Next(tried)
        if x.attempts - self._moves >= self._tries_max():
            return None
        if _too_long(error):
            return self._larger(self._tried[-1])
        # A lost answer may be billed: under a hard budget it is never paid for twice.
        unproven = error.billed is not False and x.under_hard_budget
        if not error.retryable or unproven or error.upstream_status == _PAYMENT_REQUIRED:
            return None
        if not self._left:
            self._left = [d for d in self._further() if d not in self._tried]
        delay_s: float | None = 0.0
        if not self._left:  # each was tried once without waiting; now again, from the first on
            self._left = list(x.route.candidates)
            delay_s = bounds.retry_delay_s(x.attempts, error.retry_after_s, self._world.random())
        if delay_s is None:
            return None
        found = self._take()
        if not self._world.retries.take(found.provider.name, self._world.clock.monotonic()):
            return None
        return Next(found, delay_s)

    def _tries_max(self) -> int:
        most = self._world.policy.attempts_max
        if not self._x.retried:
            return most
        return max(1, most - most // 2)  # the client's SDK retries already

    def _moves_on(self, tried: Deployment, error: UpstreamError) -> bool:
        """To another replica of the same deployment, at once. Nobody sends a bill for what the first one did."""
        if self._moves >= MOVES_MAX or not replicas.another(self._world, self._x, tried, error):
            return False
        # The first one is free: a replica that dies takes all its calls with it in one moment, and no budget has so many.
        # A request that kills them gets no further.
        free = not self._moves and not isinstance(error, UpstreamOverloaded)
        if not free and not self._world.retries.take(tried.provider.name, self._world.clock.monotonic()):
            return False
        self._moves += 1
        return True

    def _take(self) -> Deployment:
        at = 0
        if self._left[0].limited:
            at = next((i for i, d in enumerate(self._left) if self._world.places.free(d)), 0)
        self._tried.append(self._left.pop(at))
        return self._tried[-1]

    def _larger(self, failed: Deployment) -> Next | None:
        """A deployment with more room: of the candidates, else of any tier if the client pinned no model."""
        x = self._x
        found = routing.larger(failed, [d for d in self._left if d not in self._tried])
        if not found and x.route.tier is not None:
            others = self._world.catalog().deployments
            found = routing.larger(failed, [d for d in others if self._open(d)])
        if not found:
            return None
        self._left = found
        return Next(self._take())

    def _further(self) -> list[Deployment]:
        """Of the tiers to which this one may fall back, by configuration."""
        tier, catalog = self._x.route.tier, self._world.catalog()
        if tier is None:
            return []
        tiers = catalog.fallbacks.get(tier, ())
        return [d for other in tiers for d in catalog.by_tier.get(other, ()) if self._open(d)]

    def _open(self, d: Deployment) -> bool:
        """The caller may use it for this, and it is well. Its price is held against the budgets like any other's."""
        x = self._x
        return (
            x.caller.may_use(*self._asked_for(d), d.tier.value, d.model, *d.aliases)
            and d.serves(x.operation)
            and self._fit(d)
        )

    def _fit(self, d: Deployment) -> bool:
        return routing.fits(d, self._world.health, self._world.clock.monotonic())

    def _asked_for(self, d: Deployment) -> tuple[str, ...]:
        """The name that the client asked for, if that may lead to `d` by itself: who may use one tier may not use
        another for that."""
        asked = self._x.facts.model
        rules = rules_of(self._world, asked)
        leads = asked == AUTO or (rules is not None and rules.leads_to(d.tier, (d.model, *d.aliases)))
        return (asked,) if leads else ()


def _too_long(error: UpstreamError) -> bool:
    if not isinstance(error, UpstreamRefused) or error.upstream_status not in (400, 413, 422):
        return False
    if error.error_code in _TOO_LONG_CODES:
        return True
    said = error.message.lower()
    return any(text in said for text in _TOO_LONG_TEXTS)
