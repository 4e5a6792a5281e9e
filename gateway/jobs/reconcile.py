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
from gateway.core.ids import ms_of
from gateway.core.prices import PriceBook
from gateway.core.usage import Quality

#: A provider that knows nothing after this time will not know it later either.
GIVE_UP_MS = 24 * 3600 * 1_000
BATCH = 200
FIRST_WAIT_MS = 10_000
LONGEST_WAIT_MS = 3_600_000
_log = logging.getLogger(__name__)


class Uncertain(Protocol):
    async def __call__(
        self, providers: Sequence[str], since_ms: int, limit: int
    ) -> Sequence[tuple[Attempt, Outcome]]:
        """Estimated or unknown entries without a correction, oldest first. Raises `Unavailable`."""
        ...


def _unheard(_attempt: Attempt, _difference_nano_usd: int) -> None:
    """Nobody counts corrections."""


class Reconcile:
    """`find(provider, request id)` is `upstream.lookup.UsageLookup.find`; `deployments` by name. `told` hears of each
    correction, and by how many nano-dollars."""

    def __init__(
        self,
        *,
        uncertain: Uncertain,
        settle: Callable[[Attempt, Outcome], Awaitable[Settled]],
        deployments: Callable[[], Mapping[str, Deployment]],
        price_book: Callable[[], PriceBook],
        find: Callable[[Provider, str], Awaitable[Reading | None]],
        now_ms: Callable[[], int],
        told: Callable[[Attempt, int], None] = _unheard,
    ) -> None:
        self._uncertain = uncertain
        self._settle = settle
        self._deployments = deployments
        self._price_book = price_book
        self._find = find
        self._now_ms = now_ms
        self._told = told
        #: attempts that their provider did not know: (when to ask again, how long that is to wait), in ms
        self._waits: dict[str, tuple[int, int]] = {}

    async def once(self) -> int:
        """One pass over all that is uncertain; returns how many attempts were proven (corrected or confirmed).

        What a provider did not know is asked for again after 10 s, then at intervals that double up to an hour.
        """
        able = {name: d for name, d in self._deployments().items() if d.provider.usage_lookup}
        if not able:
            return 0
        names = tuple({d.provider.name for d in able.values()})
        now_ms = self._now_ms()
        since_ms = now_ms - GIVE_UP_MS
        self._waits = {i: wait for i, wait in self._waits.items() if ms_of(i) >= since_ms}
        proven = 0
        while True:
            batch = await self._uncertain(names, since_ms, BATCH)
            for attempt, outcome in batch:
                deployment = able.get(attempt.deployment)
                if deployment is not None and await self._prove(deployment, attempt, outcome, now_ms):
                    proven += 1
            if len(batch) < BATCH:
                return proven
            since_ms = ms_of(batch[-1][0].attempt_id) + 1

    async def _prove(self, deployment: Deployment, attempt: Attempt, outcome: Outcome, now_ms: int) -> bool:
        not_before_ms, waited_ms = self._waits.get(attempt.attempt_id, (0, FIRST_WAIT_MS // 2))
        row = self._price_book().find(deployment.price, attempt.started_at_ms)
        if row is None or now_ms < not_before_ms:
            return False
        reading = await self._reading(deployment.provider, attempt, outcome)
        if reading is None:
            wait_ms = min(2 * waited_ms, LONGEST_WAIT_MS)
            self._waits[attempt.attempt_id] = (now_ms + wait_ms, wait_ms)
            return False
        proven = corrected(outcome, reading, row, attempt.started_at_ms)
        if await self._settle(attempt, proven) is Settled.CORRECTED:
            self._told(attempt, proven.cost_nano_usd - outcome.cost_nano_usd)
        return True

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
