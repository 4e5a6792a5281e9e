"""From what the client asked for to the deployments that may answer, in the order in which to try them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType

from gateway.core.catalog import Catalog, Deployment, Operation, Tier
from gateway.core.errors import InvalidRequest, ModelNotFound
from gateway.core.health import HealthState, fit
from gateway.core.pools import DRAWS, Pools
from gateway.core.rules import Caps, Decision

AUTO = "auto"

#: A longer name is no typing error of a model's name; comparing it would only cost time.
_MAX_NAME = 128
_TIERS = frozenset(Tier)
_NO_WEIGHT = 1e-9  # what is left of a sum by rounding


@dataclass(frozen=True, slots=True)
class Needs:
    """What a candidate must be able to take. `input_tokens` is an estimate (`bounds.estimate_input_tokens`)."""

    input_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request may go. `tier` is None for a pinned model; `candidates` is never empty."""

    tier: Tier | None
    rule: str  # name of the rule that decided, "" if none did
    why: str  # one line for people and the ledger
    candidates: tuple[Deployment, ...]
    caps: Caps = Caps()  # noqa: RUF009 - frozen
    #: the tier or model that the rules wanted while the warm cache kept the task where it is; "" = nothing was kept
    instead_of: str = ""

    def named(self, deployment: str) -> Deployment | None:
        for d in self.candidates:
            if d.name == deployment:
                return d
        return None


def route(
    model: str,
    operation: Operation,
    catalog: Catalog,
    decision: Decision | None,
    health: Mapping[str, HealthState],
    may_use: Callable[..., bool],
    *,
    pick: float,
    now_s: float,
    warm: Mapping[str, int] = MappingProxyType({}),
    rank: Mapping[str, float] = MappingProxyType({}),
    needs: Needs = Needs(),  # noqa: B008 - frozen
    pools: Pools | None = None,
) -> Route:
    """Choose the candidates for `model`: "auto", a tier's name, or a model's public name or alias.

    `health` is keyed by `health.subjects`; `may_use(*names)` is `Caller.may_use`; `warm` is the
    number of the request's tokens that each deployment holds in its cache; `pick` in [0, 1) makes the weighted choice; `now_s` is monotonic.
    `rank` orders deployments of the same priority, low first; those without one come before all others.
    A model's own name wins over a tier of the same name. `pools`: those of the catalog, for a key that may use whatever
    there is, and with the same `rank`; they come to the same in less time.

    Raises `ModelNotFound` (also for what the key may not use: its existence is not told), and `InvalidRequest`
    if the model exists but does not serve `operation`.
    """
    if pools is not None:
        plain = _plain(model, operation, decision, health, pools, needs.input_tokens, pick, now_s, warm)
        if plain is not None:
            return plain
    if model in catalog.by_model:
        tier, rule, why = None, "", f"the client asked for {model}"
        named = [d for d in catalog.by_model[model] if may_use(d.model, *d.aliases)]
    else:
        tier, named, why = _by_tier(model, operation, catalog, decision, may_use)
        rule = decision.rule if decision is not None and model == AUTO else ""
    if not named:
        raise _not_found(model, catalog, may_use)
    serving = [d for d in named if d.serves(operation)]
    if not serving:
        raise _not_served(model, operation, named)
    return Route(tier, rule, why, _ordered(_roomy(serving, needs), health, warm, rank, pick, now_s))


def _plain(
    model: str,
    operation: Operation,
    decision: Decision | None,
    health: Mapping[str, HealthState],
    pools: Pools,
    input_tokens: int,
    pick: float,
    now_s: float,
    warm: Mapping[str, int],
) -> Route | None:
    """Out of a pool in which nothing is to be looked at one by one; None if there is none."""
    catalog, tier, rule = pools.catalog, None, ""
    if model in catalog.by_model:
        why = f"the client asked for {model}"
        pool = pools.of_model(model, operation)
    else:
        if model == AUTO:
            tier, why = catalog.default_tier, "the default tier"
            if decision is not None:
                tier, rule, why = decision.tier, decision.rule, decision.why
        elif model in _TIERS:
            tier, why = Tier(model), f"the client asked for tier {model}"
        else:
            return None
        pool = pools.of_tier(tier, operation)
    if pool is None or not pool.takes(input_tokens, health, now_s):
        return None
    return Route(tier, rule, why, pool.ordered(pick, warm))


def larger(than: Deployment, among: Sequence[Deployment]) -> list[Deployment]:
    """Those with a larger context window, as they come; an unknown window may be larger."""
    if than.context_tokens is None:
        return []
    return [d for d in among if d.context_tokens is None or d.context_tokens > than.context_tokens]


def fits(deployment: Deployment, health: Mapping[str, HealthState], now_s: float) -> bool:
    """Neither it nor its credential is ejected, cooling, being probed or drained."""
    return fit(health, deployment, now_s)


def _by_tier(
    model: str,
    operation: Operation,
    catalog: Catalog,
    decision: Decision | None,
    may_use: Callable[..., bool],
) -> tuple[Tier | None, list[Deployment], str]:
    """The tier, its deployments that the key may use, and why. Only "auto" may leave the tier it was given."""

    def usable(tier: Tier) -> list[Deployment]:
        deployments = catalog.by_tier.get(tier, ())
        return [d for d in deployments if may_use(model, tier.value, d.model, *d.aliases)]

    if model != AUTO:
        try:
            tier = Tier(model)
        except ValueError:
            return None, [], ""
        return tier, usable(tier), f"the client asked for tier {tier}"
    wanted, why = (
        (catalog.default_tier, "the default tier") if decision is None else (decision.tier, decision.why)
    )
    deployments = usable(wanted)
    if any(d.serves(operation) for d in deployments):
        return wanted, deployments, why
    for tier in dict.fromkeys((catalog.default_tier, *Tier)):
        deployments = usable(tier)
        if any(d.serves(operation) for d in deployments):
            return tier, deployments, f"{why}; tier {wanted} has nothing to offer here"
    return wanted, usable(wanted), why


def _roomy(deployments: list[Deployment], needs: Needs) -> list[Deployment]:
    """Those whose context window fits the request; all, if none does: an estimate is no ground to refuse."""
    fitting = [d for d in deployments if d.context_tokens is None or needs.input_tokens <= d.context_tokens]
    return fitting or deployments


def _ordered(
    deployments: Sequence[Deployment],
    health: Mapping[str, HealthState],
    warm: Mapping[str, int],
    rank: Mapping[str, float],
    pick: float,
    now_s: float,
) -> tuple[Deployment, ...]:
    """Healthy ones only, unless none is: then all, because the last way out is never closed.

    The warm one goes first, then by priority, and within a priority by a weighted shuffle.
    """
    if len(deployments) == 1:
        return tuple(deployments)
    candidates = list(deployments)
    if health:
        candidates = [d for d in deployments if fit(health, d, now_s)] or _not_drained(deployments, health)
    ordered: list[Deployment] = []
    by_priority = sorted(candidates, key=_priority)
    for _, equals in groupby(by_priority, key=_priority):
        weighed = [(d.weight * _share(health, d, now_s), d) for d in equals]
        shuffled, pick = _weighted_shuffle(weighed, pick)
        ordered += shuffled
    if warm or rank:
        ordered.sort(key=lambda d: (-warm.get(d.name, 0), d.priority, rank.get(d.name, 0.0)))
    return tuple(ordered)


_priority = attrgetter("priority")


def _not_drained(deployments: Sequence[Deployment], health: Mapping[str, HealthState]) -> list[Deployment]:
    """What a person has taken out stays out, unless nothing else is there."""
    left = [d for d in deployments if not ((state := health.get(d.name)) and state.drained)]
    return left or list(deployments)


def _share(health: Mapping[str, HealthState], deployment: Deployment, now_s: float) -> float:
    state = health.get(deployment.name) if health else None
    return 1.0 if state is None else state.share(now_s)


def _weighted_shuffle(weighed: list[tuple[float, Deployment]], pick: float) -> tuple[list[Deployment], float]:
    """A random order of which the first few are drawn by weight, and what is left of `pick`; weight 0 comes last.

    One uniform number is enough: the part of it that did not decide a draw is uniform again. No request tries more
    than a few, so behind them the order is that of the weights.
    """
    if len(weighed) == 1:
        return [weighed[0][1]], pick
    order: list[Deployment] = []
    total = sum(weight for weight, _ in weighed)
    while weighed and total > _NO_WEIGHT and len(order) < DRAWS:
        at = pick * total
        last = len(weighed) - 1
        for i, (weight, _) in enumerate(weighed):
            if at < weight or i == last:
                break
            at -= weight
        # float rounding can push `at` past the end or onto a weight of 0
        weight, drawn = weighed.pop(i)
        pick = min(max(at / weight, 0.0), 1.0 - 2**-53) if weight else 0.0
        total -= weight
        order.append(drawn)
    weighed.sort(key=lambda pair: -pair[0])
    return order + [d for _, d in weighed], pick


def _not_found(model: str, catalog: Catalog, may_use: Callable[..., bool]) -> ModelNotFound:
    shown = model if len(model) <= _MAX_NAME else f"{model[:_MAX_NAME]}..."
    message = f"The model {shown!r} does not exist or this key may not use it."
    if len(model) <= _MAX_NAME:
        # only names that the key may use: a suggestion must not tell what else there is
        names = [n for n, ds in catalog.by_model.items() if any(may_use(d.model, *d.aliases) for d in ds)]
        names += [AUTO, *(tier.value for tier in catalog.by_tier)]
        close = difflib.get_close_matches(model, [n for n in names if n != model], n=1, cutoff=0.6)
        if close:
            message += f" Did you mean {close[0]!r}?"
    return ModelNotFound(message, param="model")


def _not_served(model: str, operation: Operation, named: Sequence[Deployment]) -> InvalidRequest:
    served = [o for o in Operation if any(d.serves(o) for d in named)]
    addresses = ", ".join(f"/v1{o.path}" for o in served) or "no address"
    return InvalidRequest(
        f"The model {model!r} is not served at /v1{operation.path}; it is served at {addresses}.",
        param="model",
    )
