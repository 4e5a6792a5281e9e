"""The checks of `make test-vllm`, in front of any two replicas: real ones there, fakes in the suite."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from gateway.core.replicas.group import short_name
from gateway.storage.transact import Fetch, Sql, Tx
from tests.support.gpu_tier import GpuTier, gpu_tier
from tests.vllm.checks import counted, served, settled_once
from tests.vllm.load import Load

_OPEN_HOLDS = Sql("SELECT count(*) FROM hold WHERE state = 'held'")
_PATIENT_S = 300.0
#: Of each answer where predictions count: a random model's text is not tokenised again as it was made, so nobody can
#: tell how much of it the next prompt will read.
_SHORT_TOKENS = 1
#: Where a replica ends, most calls should be in the middle of an answer.
_LONG_TOKENS = 160


class Replica(Protocol):
    """`terminate`: SIGTERM, and gone when it returns. `kill`: SIGKILL, likewise. `back`: serving again, with no cache."""

    @property
    def base_url(self) -> str: ...
    @property
    def url(self) -> str: ...

    async def terminate(self) -> None: ...
    async def kill(self) -> None: ...
    async def back(self) -> None: ...


@dataclass(slots=True)
class Found:
    """Of one check: how much was looked at, and what is wrong."""

    name: str
    looked_at: str
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Campaign:
    """A gateway on a store of its own in front of two replicas."""

    tier: GpuTier
    replicas: tuple[Replica, Replica]
    agents: int = 8
    seed: int = 1
    known: set[str] = field(default_factory=set)  # attempts of earlier checks

    async def predictions(self, turns: int, output_tokens: int = _SHORT_TOKENS) -> Found:
        """How often the picker knew, to less than a block, what would be read from the cache."""
        before = self._sums()
        load = self._load(output_tokens)
        await load.run(self.agents, turns)
        await self.tier.app.quiet()
        made, close, predicted, reported = (n - m for n, m in zip(self._sums(), before, strict=True))
        told = sum(c.usage[1] for c in load.calls if c.usage)
        found = Found(
            "predicted cached tokens match reported ones",
            f"{made} requests, {close} of them less than a block apart; {predicted} tokens predicted, "
            f"{reported} reported",
        )
        if made < 0.9 * len(load.calls):
            found.wrong.append(f"only {made} predictions for {len(load.calls)} requests")
        if close < 0.95 * made:
            found.wrong.append(
                f"only {close / max(1, made):.1%} of the predictions are less than a block apart"
            )
        if reported != told:
            found.wrong.append(f"{reported} cached tokens are shown, the answers told {told}")
        found.wrong += (await self._settled(load, None, (0, 0)))[1]
        return found

    def _sums(self) -> tuple[int, int, int, int]:
        rows = [self.tier.rows()[r.base_url] for r in self.replicas]
        return (
            sum(r.predictions for r in rows),
            sum(r.predictions_close for r in rows),
            sum(r.predicted_cached_tokens for r in rows),
            sum(r.reported_cached_tokens for r in rows),
        )

    async def ending(self, name: str, which: int, end: Callable[[Replica], Awaitable[None]]) -> Found:
        """One replica ends under load and comes back."""
        ending, survivor = self.replicas[which], self.replicas[1 - which]
        before = await counted(survivor.url)
        load = self._load(_LONG_TOKENS)
        running = asyncio.create_task(load.run(self.agents, 10_000))
        await self._until(lambda: running.done() or len(load.calls) >= 2 * self.agents)
        # Its answers end together, for they are made in one batch: wait until streams are in the middle.
        rows = self.tier.rows
        await self._until(lambda: running.done() or (rows()[ending.base_url].active > 1 and load.begun > 1))
        await end(ending)
        ended = len(load.calls)
        await self._until(lambda: running.done() or len(load.calls) >= ended + 3 * self.agents)
        load.over = True
        await running
        looked_at, wrong = await self._settled(load, survivor, before)
        await ending.back()
        await self._until(lambda: self.tier.rows()[ending.base_url].in_use)
        row = self.tier.rows()[ending.base_url]
        if row.index_blocks:
            wrong.append(f"it came back empty, and {row.index_blocks} blocks are still believed to be there")
        return Found(name, looked_at, wrong)

    async def _settled(
        self, load: Load, survivor: Replica | None, before: tuple[int, int]
    ) -> tuple[str, list[str]]:
        entries = [e for e in await self.tier.entries() if e["attempt_id"] not in self.known]
        self.known |= {e["attempt_id"] for e in entries}
        wrong = settled_once(load.calls, entries, await self._open_holds())
        if survivor is not None:
            booked = served(entries, short_name(survivor.base_url))
            now = await counted(survivor.url)
            counts = now[0] - before[0], now[1] - before[1]
            if booked != counts:
                wrong.append(
                    f"booked {booked} (prompt, output) for the replica that stayed, which counts {counts}"
                )
        broken = sum(not c.whole for c in load.calls)
        failed: dict[str, int] = {}
        for entry in entries:
            if entry["error"]:
                failed[entry["error"]] = failed.get(entry["error"], 0) + 1
        text = f"{len(load.calls)} calls, {broken} streams ended with an error event, {len(entries)} attempts"
        kinds = ", ".join(f"{n} {kind}" for kind, n in failed.items()) or "none"
        return f"{text}, of them failed: {kinds}", wrong

    async def _open_holds(self) -> int:
        def tx() -> Tx[int]:
            return int((yield Fetch(_OPEN_HOLDS))[0][0])

        return await self.tier.app.database.read(tx)

    def _load(self, output_tokens: int = _SHORT_TOKENS) -> Load:
        self.seed += 1
        return Load(self.tier.http, self.seed, "small", output_tokens)

    @staticmethod
    async def _until(reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(_PATIENT_S):
            while not reached():
                await asyncio.sleep(0.02)


async def run(
    directory: Path,
    store: str,
    drains: Replica,
    aborts: Replica,
    *,
    agents: int = 8,
    turns: int = 25,
    again: bool = True,
    told: Callable[[Found], None] = lambda _: None,
) -> list[Found]:
    """`drains` has a shutdown timeout, `aborts` has none. `again`: predictions are looked at once more at the end.
    `told` hears of each check when it is over."""
    urls = {"urls": [drains.base_url, aborts.base_url]}
    found: list[Found] = []
    async with gpu_tier(store, directory, (), source=urls) as tier:
        campaign = Campaign(tier, (drains, aborts), agents)
        await campaign._until(
            lambda: all(row.in_use for row in tier.rows().values()) and len(tier.rows()) == 2
        )
        found.append(await campaign.predictions(turns))
        told(found[-1])
        for name, which, end in (
            ("a drain loses and doubles nothing", 0, lambda r: r.terminate()),
            ("SIGTERM without a drain loses and doubles nothing", 1, lambda r: r.terminate()),
            ("SIGKILL loses and doubles nothing", 0, lambda r: r.kill()),
        ):
            found.append(await campaign.ending(name, which, end))
            told(found[-1])
        if again:
            last = await campaign.predictions(turns)
            found.append(replace(last, name=f"{last.name}, after all that"))
            told(found[-1])
    return found
