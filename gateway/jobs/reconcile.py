"""Turn estimates into facts: ask the provider about attempts whose usage was cut short, and correct them once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from gateway.core import prices
from gateway.core.catalog import Deployment, Provider
from gateway.core.dialects import Reading
from gateway.core.entry import Attempt, Kind, Outcome, Settled
from gateway.core.errors import Unavailable
from gateway.core.prices import PriceBook
from gateway.core.usage import Quality

#: A provider that knows nothing after this time will not know it later either.
GIVE_UP_MS = 24 * 3600 * 1_000
BATCH = 200
_log = logging.getLogger(__name__)


class Uncertain(Protocol):
    async def __call__(
        self, providers: Sequence[str], since_ms: int, limit: int
    ) -> Sequence[tuple[Attempt, Outcome]]:
        """Estimated or unknown entries without a correction, oldest first. Raises `Unavailable`."""
        ...


class Reconcile:
    """`find(provider, request id)` is `upstream.lookup.UsageLookup.find`; `deployments` by name."""

    def __init__(
        self,
        *,
        uncertain: Uncertain,
        settle: Callable[[Attempt, Outcome], Awaitable[Settled]],
        deployments: Callable[[], Mapping[str, Deployment]],
        price_book: Callable[[], PriceBook],
        find: Callable[[Provider, str], Awaitable[Reading | None]],
        now_ms: Callable[[], int],
    ) -> None:
        self._uncertain = uncertain
        self._settle = settle
        self._deployments = deployments
        self._price_book = price_book
        self._find = find
        self._now_ms = now_ms

    async def once(self) -> int:
        """One pass over what is uncertain; returns how many attempts were proven (corrected or confirmed)."""
        able = {name: d for name, d in self._deployments().items() if d.provider.usage_lookup}
        if not able:
            return 0
        names = tuple({d.provider.name for d in able.values()})
        proven = 0
        for attempt, outcome in await self._uncertain(names, self._now_ms() - GIVE_UP_MS, BATCH):
            deployment = able.get(attempt.deployment)
            row = self._price_book().find(deployment.price, attempt.started_at_ms) if deployment else None
            if deployment is None or row is None:
                continue
            reading = await self._reading(deployment.provider, attempt, outcome)
            if reading is not None:
                await self._settle(attempt, corrected(outcome, reading, row, attempt.started_at_ms))
                proven += 1
        return proven

    async def _reading(self, provider: Provider, attempt: Attempt, outcome: Outcome) -> Reading | None:
        # Providers that take our id back know a request whose answer, and so whose own id, never arrived.
        for request_id in dict.fromkeys((outcome.upstream_request_id, attempt.attempt_id)):
            if request_id and (reading := await self._find(provider, request_id)) is not None:
                return reading
        return None

    async def run(self, every_s: float) -> None:
        """Forever; a store or provider that is down is asked again in the next turn."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.once()
            except Unavailable as e:
                _log.warning("nothing reconciled: %s", e)


def corrected(outcome: Outcome, reading: Reading, row: prices.PriceRow, at_ms: int) -> Outcome:
    """The same ending with the provider's own counts."""
    cost = prices.cost(row, reading.usage, at_ms, service_tier=outcome.service_tier)
    return msgspec.structs.replace(
        outcome,
        kind=Kind.POST,
        usage=reading.usage,
        quality=Quality.EXACT,
        cost_nano_usd=cost.nano_usd,
        list_cost_nano_usd=cost.list_nano_usd,
        price_version=cost.version,
        note="usage looked up at the provider afterwards",
    )
