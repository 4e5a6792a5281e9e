"""Whatever happens to a fleet in whatever order: backlogs add up, everything is released once, all is bounded."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.core.replicas.chain import Chain, links_of
from gateway.core.replicas.fleet import Fleet
from gateway.core.replicas.scrape import Scrape
from gateway.core.replicas.terms import Ask, Digest, End, EndKind, FleetPolicy, Health, Placed

ADDRESSES = [f"10.0.0.{n}:8000" for n in range(5)]
POLICY = FleetPolicy(
    tau_tokens=2_000,
    exploration=0.01,
    default_capacity_tokens=3_000,
    members_max=4,
    threads_max=3,
    in_flight_max=12,
    gone_keep_s=20.0,
)
counts = st.one_of(st.none(), st.integers(-5, 10_000), st.integers(10**12, 10**13))
sizes = st.one_of(st.none(), st.integers(0, 10_000))
chances = st.floats(0, 1, exclude_max=True)


@dataclass
class Flight:
    """What is in flight, as whoever sends counts it."""

    address: str
    uncached_tokens: int
    streams: bool
    prefilling: bool = True


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(POLICY)
        self.now_s = 0.0
        self.flights: dict[str, Flight] = {}
        self.sent = 0
        self.gone_s: dict[str, float] = {}

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 7.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(found=st.lists(st.sampled_from(ADDRESSES)))
    def look_up(self, found: list[str]) -> None:
        change = self.fleet.members(found, self.now_s)
        self.gone_s.update(dict.fromkeys(change.left, self.now_s))
        for address in change.joined:
            if self.now_s - self.gone_s.pop(address, self.now_s) > POLICY.gone_keep_s:
                # Another one has its address now; what is in flight belongs to the one before.
                for flight in self.flights.values():
                    flight.address = "" if flight.address == address else flight.address

    @rule(
        thread=st.sampled_from(["", "x", "y", "z", "w"]),
        blocks=st.integers(0, 40),
        other=st.booleans(),
        streams=st.booleans(),
        chance=chances,
        avoid=st.sets(st.sampled_from(ADDRESSES), max_size=2),
    )
    def send(
        self, thread: str, blocks: int, other: bool, streams: bool, chance: float, avoid: set[str]
    ) -> None:
        text = (b"s" * 2_000 + thread.encode() * 9_000 + b"o" * 500 * other)[: 256 * blocks + 7]
        ask = Ask(Chain(links_of(text, 1), len(text)), thread, streams=streams)
        pick = self.fleet.pick(ask, self.now_s, chance, avoid)
        health = {r.address: r.health for r in self.fleet.shown(self.now_s)}
        may = {a for a, h in health.items() if h not in (Health.GONE, Health.DRAINED)} - avoid
        assert (pick is None) == (not may)
        if pick is None:
            return
        assert pick.address in may
        usable = {a for a in may if health[a] not in (Health.COOLING, Health.UNREACHABLE)}
        assert pick.address in usable or not usable
        assert 0 <= pick.predicted_cached_tokens < max(1, pick.prompt_tokens)
        assert pick.predicted_cached_tokens + pick.uncached_tokens == pick.prompt_tokens
        self.sent += 1
        self.fleet.sent(f"a{self.sent}", ask, pick, self.now_s)
        self.flights[f"a{self.sent}"] = Flight(pick.address, pick.uncached_tokens, streams)
        if len(self.flights) > POLICY.in_flight_max:
            del self.flights[next(iter(self.flights))]

    @precondition(lambda self: self.sent > 0)
    @rule(which=st.integers(0, 50))
    def first_chunk(self, which: int) -> None:
        name = f"a{which % self.sent + 1}"
        self.fleet.first_chunk(name, self.now_s)
        if name in self.flights:
            self.flights[name].prefilling = False

    @precondition(lambda self: self.sent > 0)
    @rule(
        which=st.integers(0, 50), kind=st.sampled_from(EndKind), prompt=counts, cached=counts, output=counts
    )
    def end(
        self, which: int, kind: EndKind, prompt: int | None, cached: int | None, output: int | None
    ) -> None:
        name = f"a{which % self.sent + 1}"
        self.fleet.ended(name, End(kind, prompt, cached, output), self.now_s)
        self.flights.pop(name, None)

    @rule(
        address=st.sampled_from(ADDRESSES),
        load=st.tuples(sizes, sizes, st.one_of(st.none(), st.floats(0, 1))),
        kv=sizes,
        block=st.sampled_from([None, 16, 32]),
        started=st.sampled_from([None, 1.0, 99.0]),
        prompt=sizes,
    )
    def scrape(
        self,
        address: str,
        load: tuple[int | None, int | None, float | None],
        kv: int | None,
        block: int | None,
        started: float | None,
        prompt: int | None,
    ) -> None:
        self.fleet.scraped(address, Scrape(*load, kv, block, started, prompt), self.now_s)

    @rule(address=st.sampled_from(ADDRESSES))
    def unreachable(self, address: str) -> None:
        self.fleet.unreachable(address, self.now_s)

    @rule(address=st.sampled_from(ADDRESSES), on=st.booleans())
    def drain(self, address: str, on: bool) -> None:
        self.fleet.drain(address, on)

    @rule()
    def share_with_itself(self) -> None:
        self.fleet.merge("self", self.fleet.digest(self.now_s), self.now_s)

    @rule(
        peer=st.text(max_size=2),
        address=st.sampled_from(ADDRESSES),
        numbers=st.tuples(*[st.integers(-3, 2_000)] * 7),
    )
    def hear(self, peer: str, address: str, numbers: tuple[int, ...]) -> None:
        thread, link, blocks, chars, tokens, backlog, active = numbers
        placed = Placed(thread, address, link, blocks, chars, tokens, 0)
        self.fleet.merge(peer, Digest((placed,), ((address, backlog, active),)), self.now_s)

    @invariant()
    def what_is_shown_is_what_is_in_flight(self) -> None:
        shown = {r.address: r for r in self.fleet.shown(self.now_s)}
        for replica in shown.values():
            mine = [f for f in self.flights.values() if f.address == replica.address]
            # Those that do not stream are released when the time is up; nobody here knows when.
            surely = sum(f.uncached_tokens for f in mine if f.prefilling and f.streams)
            at_most = sum(f.uncached_tokens for f in mine if f.prefilling)
            assert surely <= replica.backlog_tokens <= at_most
            assert replica.active == len(mine)
            assert replica.backlog_tokens >= 0 <= replica.active
            assert 0 <= replica.index_blocks <= replica.index_capacity_blocks
            assert replica.peer_active >= 0 <= replica.peer_backlog_tokens
            assert len(replica.notes) <= 8
        assert sum(r.sessions for r in shown.values()) <= POLICY.threads_max
        assert sum(r.health is not Health.GONE for r in shown.values()) <= POLICY.members_max
        assert self.fleet.backlog_tokens() >= 0
        assert 0.5 <= self.fleet.chars_per_token <= 32.0


AnyOrder.TestCase.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)
TestAnyOrder = AnyOrder.TestCase
