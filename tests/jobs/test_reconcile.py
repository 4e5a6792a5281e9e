"""What was guessed is asked for until the provider knows it: all of it, once, and not too often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from gateway.core.catalog import Provider, Wire
from gateway.core.dialects import Reading
from gateway.core.entry import Attempt, Kind, Outcome, Settled
from gateway.core.ids import ms_of
from gateway.core.prices import PriceBook, PriceRow, Rates
from gateway.core.usage import Quality, Usage
from gateway.jobs.reconcile import BATCH, GIVE_UP_MS, Reconcile
from tests.storage.worlds import NOON_MS, attempt, outcome
from tests.support.small_world import deployment

KNOWING = Provider("up", Wire.OPENAI, "http://127.0.0.1:1/v1", "", usage_lookup="/generation?id=")
BOOK = PriceBook.of([PriceRow("up/m", "up/m@1", 0, Rates(3_000_000, 15_000_000))])


@dataclass(slots=True)
class World:
    """A ledger of guesses, and a provider that knows some of them by an id."""

    guesses: list[tuple[Attempt, Outcome]]
    known: dict[str, Usage] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    settled: dict[str, Outcome] = field(default_factory=dict)
    now_ms: int = NOON_MS

    def job(self, at: Provider = KNOWING) -> Reconcile:
        only = deployment(at)
        return Reconcile(
            uncertain=self.uncertain,
            settle=self.settle,
            deployments=lambda: {only.name: only},
            price_book=lambda: BOOK,
            find=self.find,
            now_ms=lambda: self.now_ms,
        )

    async def uncertain(
        self, providers: Sequence[str], since_ms: int, limit: int
    ) -> Sequence[tuple[Attempt, Outcome]]:
        assert tuple(providers) == ("up",)
        left = [
            (a, o)
            for a, o in self.guesses
            if ms_of(a.attempt_id) >= since_ms and a.attempt_id not in self.settled
        ]
        return left[:limit]

    async def settle(self, attempt: Attempt, outcome: Outcome) -> Settled:
        self.settled[attempt.attempt_id] = outcome
        return Settled.CORRECTED

    async def find(self, _: Provider, request_id: str) -> Reading | None:
        self.asked[request_id] += 1
        usage = self.known.get(request_id)
        return None if usage is None else Reading(usage)


def guess(at_ms: int = NOON_MS, upstream_request_id: str = "") -> tuple[Attempt, Outcome]:
    cut = outcome(
        900,
        usage=Usage(input_uncached=300, output=1),
        quality=Quality.ESTIMATED,
        finish="upstream_cut",
        upstream_request_id=upstream_request_id,
    )
    return attempt(started_at_ms=at_ms, deployment="up/m", provider="up"), cut


async def test_the_providers_own_counts_replace_the_guess() -> None:
    a, cut = guess(upstream_request_id="gen-1")
    world = World([(a, cut)], known={"gen-1": Usage(input_uncached=100, output=20)})

    assert await world.job().once() == 1

    assert list(world.settled) == [a.attempt_id]
    proof = world.settled[a.attempt_id]
    # 100 x 3 + 20 x 15 micro-dollars
    assert (proof.kind, proof.quality, proof.cost_nano_usd) == (Kind.POST, Quality.EXACT, 600_000)
    assert (proof.usage, proof.finish, proof.price_version) == (
        Usage(input_uncached=100, output=20),
        "upstream_cut",
        "up/m@1",
    )


async def test_an_answer_that_never_came_is_found_by_our_own_id() -> None:
    a, lost = guess()
    world = World([(a, lost)], known={a.attempt_id: Usage(input_uncached=1)})
    assert await world.job().once() == 1


async def test_what_the_provider_never_knew_hides_nothing_behind_it() -> None:
    unknown = [guess(NOON_MS - 5_000 + n) for n in range(BATCH + 50)]
    late = guess(NOON_MS)
    world = World([*unknown, late], known={late[0].attempt_id: Usage(input_uncached=1)})
    assert await world.job().once() == 1
    assert list(world.settled) == [late[0].attempt_id]


async def test_what_the_provider_does_not_know_is_asked_for_less_and_less_and_then_no_more() -> None:
    a, cut = guess()
    world = World([(a, cut)])
    job = world.job()
    asked_at_s = []
    while world.now_ms <= NOON_MS + GIVE_UP_MS + 3_600_000:
        before = world.asked.total()
        await job.once()
        if world.asked.total() > before:
            asked_at_s.append((world.now_ms - NOON_MS) // 1_000)
        world.now_ms += 10_000
    assert asked_at_s[:6] == [0, 10, 30, 70, 150, 310]
    assert max(b - a for a, b in pairwise(asked_at_s)) == 3_600
    assert asked_at_s[-1] <= GIVE_UP_MS // 1_000
    world.known[a.attempt_id] = Usage(input_uncached=1)
    assert await job.once() == 0


async def test_a_provider_that_cannot_be_asked_is_left_alone() -> None:
    world = World([guess()])
    assert await world.job(Provider("up", Wire.OPENAI, "http://127.0.0.1:1/v1", "")).once() == 0
    assert world.asked.total() == 0
