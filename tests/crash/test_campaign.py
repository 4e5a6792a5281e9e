"""A few rounds of `make crash`, and that its checker would have seen it if they had gone wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

from gateway.core.budget import OnExceed
from gateway.crash import Point
from tests.crash.campaign import Evidence, play
from tests.crash.checker import Violation, Wrong
from tests.crash.plan import POINTS, Fault, Round, What, plan
from tests.crash.site import site
from tests.support.relay import Break

#: A death between a settlement's COMMIT and its answer, with an outage of Postgres; and deaths of those who reap.
SEEDS = {8: Point.SETTLE_AFTER_COMMIT, 14: Point.REAP_BEFORE_COMMIT}


def forget_an_entry(e: Evidence) -> None:
    e.ledger.remove(next(line for line in e.ledger if line.attempt_id == e.bill[0].attempt_id))


def post_an_entry_again(e: Evidence) -> None:
    e.ledger.append(next(line for line in e.ledger if line.kind == "post"))


def lower_a_limit(e: Evidence) -> None:
    spent = Counter[str]()
    for line in e.ledger:
        spent.update(dict.fromkeys(line.scopes, line.nano_usd))
    scope = next(s for s in e.limits if spent[s])
    e.limits[scope] = spent[scope] - 1


GUARDS: dict[Wrong, Callable[[Evidence], None]] = {
    Wrong.LOST: forget_an_entry,
    Wrong.DOUBLED: post_an_entry_again,
    Wrong.OVERSPENT: lower_a_limit,
}


#: A process that stands still, and networks that break, all at once.
STANDSTILL = (
    Fault(What.PAUSE, 0.2, gateway=0, lasts_s=0.8),
    Fault(What.POSTGRES_WAY, 0.2, gateway=1, lasts_s=1.0, how=Break.SILENT),
    Fault(What.POSTGRES_WAY, 0.3, gateway=2, lasts_s=0.2, how=Break.CUT),
    Fault(What.REDIS_WAY, 0.1, gateway=2, lasts_s=0.5, how=Break.SILENT),
)


def test_two_of_32_seeds_stand_still_past_their_lease() -> None:
    past = [(r.seed, f.what) for r in map(plan, range(64)) for f in r.faults if f.past_lease]
    assert past == [(3, What.PAUSE), (19, What.POSTGRES_WAY), (35, What.PAUSE), (51, What.POSTGRES_WAY)]


async def test_three_rounds_lose_double_and_overspend_nothing() -> None:
    violations: list[Violation] = []
    missed: list[Point] = []
    async with site() as here:
        for seed, point in SEEDS.items():
            assert POINTS[seed % len(POINTS)] is point
            played = await play(here, replace(plan(seed), calls=100))
            violations += played.violations
            if not played.reached[point]:
                missed.append(point)
            assert played.statuses[200] > 10
            for wrong, doctor in GUARDS.items():
                doctored = deepcopy(played.evidence)
                doctor(doctored)
                assert wrong in {v.wrong for v in doctored.judged()}
        played = await play(here, Round(2, STANDSTILL, calls=80, at_once=24, leaving=0.1))
        violations += played.violations
        assert here.gateways[1].to_postgres.held > 0
        assert here.gateways[2].to_postgres.cut > 0
        # A budget that only warns is no guard, and that shows.
        calm = Round(1, (), calls=40, at_once=16, leaving=0.0)
        unguarded = await play(here, calm, tight_nano_usd=20_000_000, on_exceed=OnExceed.WARN)
    assert (violations, missed) == ([], [])
    assert {v.wrong for v in unguarded.violations} == {Wrong.OVERSPENT}
