"""Keeps fleets in step with the world: which replicas there are, whether they are well, what their metrics say.

Nothing of this is on the way of a request: it changes what `core.replicas.Fleet` knows, and requests ask that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from gateway.core.catalog import Catalog, Deployment, ReplicaSource
from gateway.core.replicas.fleet import Fleet
from gateway.core.replicas.group import NOT_ASKED, Group, Groups, policy_of
from gateway.core.replicas.scrape import parse
from gateway.ports import Replicas, ServedModel, Unanswered

TICK_S = 0.1
#: A replica that answers slowly may only be busy; after so many times in a row it counts as away.
SLOW_MAX = 3
#: What a replica serves is asked again this often: somebody may have replaced the server behind an address.
MODELS_EVERY_S = 60.0
#: Beyond this many replicas each is asked less often.
_AT_FULL_PACE = 25

_log = logging.getLogger("gateway")


@dataclass(slots=True)
class _Seen:
    """One address, as far as it was asked."""

    address: str
    next_s: float = 0.0
    asking: bool = False
    served_at_s: float | None = None  # when it last said what it serves
    slow: int = 0
    problem: str = NOT_ASKED  # as it was last told to people; "" = it is used


@dataclass(slots=True)
class _Look:
    """A deployment, and what is under way for it."""

    deployment: Deployment
    group: Group
    source: ReplicaSource
    next_s: float = 0.0
    looking: bool = False
    seen: dict[str, _Seen] = field(default_factory=dict)


class ReplicaWatch:
    """`begin` before requests come, then `run` for ever. Keeps one group in `groups` for each deployment of the catalog
    that has replicas. `back` hears of deployments with a replica that can be used again.
    """

    def __init__(
        self,
        groups: Groups,
        catalog: Callable[[], Catalog],
        replicas: Replicas,
        *,
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
        monotonic: Callable[[], float],
        random: Callable[[], float],
        back: Callable[[str], None] = lambda _: None,
        tick_s: float = TICK_S,
    ) -> None:
        self._groups = groups.by_deployment
        self._catalog = catalog
        self._replicas = replicas
        self._spawn = spawn
        self._monotonic = monotonic
        self._random = random
        self._back = back
        self._tick_s = tick_s
        self._looks: dict[str, _Look] = {}

    async def begin(self) -> None:
        """Find and ask all replicas once, so that the first request finds them. Takes a few seconds at most."""
        self._follow()
        looks = tuple(self._looks.values())
        await asyncio.gather(*(self._find(look) for look in looks))
        await asyncio.gather(*(self._ask(look, seen) for look in looks for seen in look.seen.values()))

    async def run(self) -> None:
        """For ever, until cancelled."""
        while True:
            self.turn()
            await asyncio.sleep(self._tick_s)

    def turn(self) -> None:
        """Start whatever is due."""
        self._follow()
        for look in self._looks.values():
            self._turn(look)

    def _follow(self) -> None:
        """A reload may bring deployments, take them away, or find their replicas elsewhere."""
        wanted = {d.name: d for d in self._catalog().deployments if d.replicas is not None}
        for name in [name for name in self._looks if name not in wanted]:
            dropped = self._looks.pop(name)
            del self._groups[name]
            self._forget(*dropped.seen)
        for name, deployment in wanted.items():
            source, look = deployment.replicas, self._looks.get(name)
            if source is None:
                continue
            if look is None or look.source != source:
                group = self._groups[name] = Group(name, source, Fleet(policy_of(source)))
                before = () if look is None else tuple(look.seen)
                look = self._looks[name] = _Look(deployment, group, source)
                self._forget(*before)
            if look.deployment != deployment:
                for seen in look.seen.values():
                    seen.served_at_s = None  # it may be asked for another model from now on
            look.deployment = deployment

    def _turn(self, look: _Look) -> None:
        now_s = self._monotonic()
        if now_s >= look.next_s and not look.looking:
            look.looking = True
            self._spawn(self._find(look), f"find replicas of {look.deployment.name}")
        for seen in look.seen.values():
            if now_s >= seen.next_s and not seen.asking:
                seen.asking = True
                self._spawn(self._ask(look, seen), f"ask {seen.address}")

    async def _find(self, look: _Look) -> None:
        try:
            found = await self._replicas.find(look.deployment)
        except Unanswered as error:
            if str(error) != look.group.problem:
                _log.warning("replicas of %s: %s; the last known ones stay", look.deployment.name, error)
            look.group.problem = str(error)
        else:
            look.group.problem = ""
            self._found(look, found)
        finally:
            look.looking = False
            look.next_s = self._monotonic() + self._jitter(look.source.refresh_s)

    def _found(self, look: _Look, addresses: tuple[str, ...]) -> None:
        name, group = look.deployment.name, look.group
        gone = [address for address in look.seen if address not in addresses]
        for address in gone:
            del look.seen[address]
            group.gone(address)
            _log.info("%s: replica %s is gone", name, address)
        self._forget(*gone)
        for address in addresses:
            if address not in look.seen:
                look.seen[address] = _Seen(address)
                group.unfit[address] = NOT_ASKED
                _log.info("%s: replica %s is new", name, address)
        group.fleet.members(addresses, self._monotonic())

    def _forget(self, *addresses: str) -> None:
        for address in addresses:
            if not any(address in look.seen for look in self._looks.values()):
                self._replicas.forget(address)

    async def _ask(self, look: _Look, seen: _Seen) -> None:
        started_s = self._monotonic()
        try:
            text = await self._replicas.metrics(look.deployment, seen.address)
            if seen.served_at_s is None or started_s - seen.served_at_s >= MODELS_EVERY_S:
                await self._identify(look, seen)
        except Unanswered as error:
            seen.slow = seen.slow + 1 if error.slow else SLOW_MAX
            if seen.slow >= SLOW_MAX:
                seen.served_at_s = None  # another server may come back in its place
                if look.seen.get(seen.address) is seen:
                    look.group.silent[seen.address] = str(error)
                look.group.fleet.unreachable(seen.address, self._monotonic())
                self._say(look, seen, str(error))
        else:
            seen.slow = 0
            look.group.silent.pop(seen.address, None)
            self._say(look, seen, look.group.unfit.get(seen.address, ""))
            look.group.fleet.scraped(seen.address, parse(text), self._monotonic())
        finally:
            pace = max(1.0, len(look.seen) / _AT_FULL_PACE)
            seen.asking = False
            seen.next_s = started_s + self._jitter(look.source.poll_s * pace)

    async def _identify(self, look: _Look, seen: _Seen) -> None:
        """Whether it is a replica of this deployment at all."""
        group = look.group
        served = await self._replicas.models(look.deployment, seen.address)
        version = await self._replicas.version(seen.address)
        if look.seen.get(seen.address) is not seen:
            return  # gone meanwhile
        group.versions[seen.address] = version
        seen.served_at_s = self._monotonic()
        wrong = misfit(look.deployment, served)
        if wrong:
            group.unfit[seen.address] = wrong
        else:
            group.unfit.pop(seen.address, None)

    def _say(self, look: _Look, seen: _Seen, problem: str) -> None:
        """Once for each change."""
        if problem == seen.problem:
            return
        seen.problem = problem
        if problem:
            _log.warning("%s: replica %s is not used: %s", look.deployment.name, seen.address, problem)
        else:
            _log.info("%s: replica %s is used", look.deployment.name, seen.address)
            self._back(look.deployment.name)

    def _jitter(self, seconds: float) -> float:
        """Gateways that start together do not ask together for ever."""
        return seconds * (0.9 + 0.2 * self._random())


def misfit(deployment: Deployment, served: tuple[ServedModel, ...]) -> str:
    """Why a server cannot be a replica of the deployment; "" if it can."""
    found = next((m for m in served if m.name == deployment.upstream_model), None)
    if found is None:
        names = ", ".join(repr(m.name[:80]) for m in served[:5]) or "no model"
        return f"it serves {names}, not {deployment.upstream_model!r}"
    least = deployment.context_tokens
    if least is not None and found.context_tokens is not None and found.context_tokens < least:
        return f"its context is {found.context_tokens} tokens, not {least}"
    return ""
