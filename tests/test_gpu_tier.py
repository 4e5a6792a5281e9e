"""Replicas as money and as places: what is counted of them, and what a scrape shows."""

from __future__ import annotations

import asyncio
from functools import partial

from msgspec.structs import replace

from gateway.admin.ports import GpuCost
from gateway.all_workers import costs_of_all, rows_of_all
from gateway.core.catalog import Catalog, Deployment, ReplicaKind, ReplicaSource
from gateway.core.entry import Attempt, Outcome
from gateway.core.gpu_price import GpuBill, GpuPrice
from gateway.core.replicas.fleet import Fleet
from gateway.core.replicas.group import Group, policy_of
from gateway.core.replicas.terms import Ask, End, EndKind
from gateway.core.serving import Serving, Urgency
from gateway.fleets import Fleets
from gateway.gpu import GpuTier
from gateway.telemetry.crowd import Page, told, total
from gateway.telemetry.metrics import Metrics
from tests.support.small_world import deployment, provider
from tests.telemetry.facts import attempt, outcome

SOURCE = ReplicaSource(ReplicaKind.STATIC, urls=tuple(f"http://10.0.0.{n}:8000/v1" for n in range(3)))
OURS = GpuPrice(2_500_000_000, 16_000, 900)
GPU = deployment(
    provider("", name="gpu"), replicas=SOURCE, serving=Serving(gpu=OURS, concurrent_per_replica=2)
)
ONE = deployment(provider("http://127.0.0.1:1/v1", name="one"), serving=Serving(gpu=OURS))
API = deployment(provider("http://127.0.0.1:1/v1", name="api"))


class Tier:
    """Three replicas found by a fleet, on a clock that a test turns."""

    def __init__(self, *deployments: Deployment) -> None:
        self.now_s = 0.0
        self.group = Group("gpu/m", SOURCE, Fleet(policy_of(SOURCE)))
        self.group.fleet.members(SOURCE.urls, 0.0)
        self.metrics = Metrics(Catalog.of(deployments))
        catalog = Catalog.of(deployments)
        self.tier = GpuTier(lambda: catalog, self.metrics, lambda: self.now_s)
        self.tier.groups.by_deployment["gpu/m"] = self.group
        self.at(0.0)

    def at(self, now_s: float) -> None:
        self.now_s = now_s
        self.tier.tick()

    def lines(self, name: str) -> list[str]:
        page = self.metrics.render().decode().splitlines()
        return [line for line in page if line.startswith(name)]


def tried(name: str) -> Attempt:
    return replace(attempt(), deployment=name)


def ended(nano_usd: int) -> Outcome:
    return replace(outcome(), cost_nano_usd=nano_usd)


async def test_places_follow_the_replicas_in_use() -> None:
    t = Tier(GPU, API)
    assert (t.tier.live("gpu/m"), t.tier.live("api/m")) == (3, 1)
    assert (t.tier.places.most(GPU), t.tier.places.most(API)) == (6, None)
    t.group.fleet.drain(SOURCE.urls[0], True)
    t.group.unfit[SOURCE.urls[1]] = "serves another model"
    t.at(1.0)
    assert t.tier.places.most(GPU) == 2
    for n in range(2):
        await t.tier.places.enter(GPU, "t", f"in{n}")
    late = asyncio.ensure_future(t.tier.places.enter(GPU, "t", "late", Urgency.BATCH))
    await asyncio.sleep(0)
    assert t.lines("tollhouse_queue_waiting{") == [
        'tollhouse_queue_waiting{deployment="gpu/m",class="batch"} 1',
        'tollhouse_queue_waiting{deployment="gpu/m",class="interactive"} 0',
    ]
    t.group.unfit.clear()
    t.at(3.5)  # a replica is of use again, and nobody had to leave for that
    await late
    assert t.lines("tollhouse_queue_wait_seconds_count") == [
        'tollhouse_queue_wait_seconds_count{deployment="gpu/m",class="batch",outcome="entered"} 1',
        'tollhouse_queue_wait_seconds_count{deployment="gpu/m",class="interactive",outcome="entered"} 2',
    ]
    assert t.lines('tollhouse_queue_wait_seconds_sum{deployment="gpu/m",class="batch"') == [
        'tollhouse_queue_wait_seconds_sum{deployment="gpu/m",class="batch",outcome="entered"} 2.5'
    ]


def test_replicas_cost_their_hours_and_earn_what_was_charged() -> None:
    t = Tier(GPU, ONE, API)
    t.group.fleet.drain(SOURCE.urls[0], True)  # it is paid for all the same
    t.at(3_600.0)
    t.tier.attempt(tried("gpu/m"), ended(1_500_000_000))
    t.tier.attempt(tried("gpu/m"), ended(1))
    t.tier.attempt(tried("api/m"), ended(9))
    hour_ms = 3_600_000
    assert t.tier.meter.bills() == {
        "gpu/m": GpuBill(3 * hour_ms, 7_500_000_000, 1_500_000_001, 600),
        "one/m": GpuBill(hour_ms, 2_500_000_000, 0, 600),
    }
    t.group.fleet.members(SOURCE.urls[:1], 3_600.0)  # two are gone
    t.at(7_200.0)
    assert t.tier.costs() == [
        GpuCost("gpu/m", 1, 2_500_000_000, 4.0, 10_000_000_000, 1_500_000_001, 8_499_999_999, 0.09, 0.6),
        GpuCost("one/m", 1, 2_500_000_000, 2.0, 5_000_000_000, 0, 5_000_000_000, 0.0, 0.6),
    ]
    assert t.lines("tollhouse_gpu_") == [
        'tollhouse_gpu_replica_hours_total{deployment="gpu/m"} 4.0',
        'tollhouse_gpu_replica_hours_total{deployment="one/m"} 2.0',
        'tollhouse_gpu_cost_usd_total{deployment="gpu/m"} 10',
        'tollhouse_gpu_cost_usd_total{deployment="one/m"} 5',
        'tollhouse_gpu_charged_usd_total{deployment="gpu/m"} 1.500000001',
        'tollhouse_gpu_charged_usd_total{deployment="one/m"} 0',
        'tollhouse_gpu_sold_share{deployment="gpu/m"} 0.6',
        'tollhouse_gpu_sold_share{deployment="one/m"} 0.6',
    ]


def test_two_workers_show_hours_once_and_charges_and_calls_of_both() -> None:
    """The same three replicas for two hours, seen by both; each has served other calls. One of them answers."""
    tiers = [Tier(GPU), Tier(GPU)]
    for n, t in enumerate(tiers):
        fleet = t.group.fleet
        for call in range(n + 1):
            ask = Ask(streams=True)
            pick = fleet.pick(ask, 0.0, 0.5, SOURCE.urls[1:])
            assert pick is not None
            t.group.sent(f"{n}/{call}", ask, pick, 0.0)
            fleet.ended(f"{n}/{call}", End(EndKind.OK, 10, 0, 1), 0.0)
            t.group.sent(f"{n}/{call} goes on", ask, pick, 0.0)
        t.tier.attempt(tried("gpu/m"), ended(1_500_000_000))
        t.at(7_200.0 + n)
    fleets = [Fleets(t.tier.groups, partial(getattr, t, "now_s")) for t in tiers]
    for t, each in zip(tiers, fleets, strict=True):
        each.add_metrics(t.metrics)
    pages = [Page(n, 1, tuple(t.metrics.read())) for n, t in enumerate(tiers)]
    families = total({page.index: told(None, page) for page in pages}, pages)

    assert costs_of_all(tiers[0].tier.costs(), families) == [
        GpuCost(
            *("gpu/m", 3, 2_500_000_000, 6.0008, 15_002_083_333, 3_000_000_000, 12_002_083_333),
            *(round(0.6 * 3 / 15.002083333, 4), 0.6),
        )
    ]
    # A Redis tells of the other worker's two calls, too, and of three elsewhere.
    own = fleets[0].rows()[0]._replace(peer_active=5)
    (row, *_) = rows_of_all([own], families)
    assert (own.active, own.picks, own.prompt_tokens) == (1, {"least_loaded": 2}, 10)
    assert (row.active, row.peer_active) == (3, 3)
    assert (row.picks, row.prompt_tokens) == ({"least_loaded": 6}, 30)
