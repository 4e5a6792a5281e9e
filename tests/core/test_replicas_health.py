"""Replicas fail, fill up, restart, come and go, and several gateways send to them: who still gets requests."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from gateway.core.replicas.fleet import Fleet
from gateway.core.replicas.terms import Digest, EndKind, FleetPolicy, Health, Membership, Why
from tests.support.told_fleet import A, B, C, Told, ask, history

# --- health --------------------------------------------------------------------------------------------------


def test_a_failed_replica_is_left_at_once_and_comes_back_slowly() -> None:
    told = Told(A, B, cooldown_s=2.0, slow_start_s=10.0)
    told.answer(history("x", 1), to=A)
    attempt, _ = told.send(history("x", 2))
    told.end(attempt, EndKind.FAILED)
    assert (told.health(), told.pick(history("x", 2)).address) == ([Health.COOLING, Health.READY], B)
    told.now_s = 2.0
    # Just back, it counts as tau behind: one more request there, and B would still be the better one.
    assert told.health() == [Health.RETURNING, Health.READY]
    told.send(ask(b"busy" * 10_000), to=B)
    assert told.pick(ask(b"new" * 1_000, "new")).address == B
    told.now_s = 11.9
    assert told.pick(ask(b"new" * 1_000, "new")).address == A
    told.now_s = 12.0
    assert told.health() == [Health.READY, Health.READY]


def test_failures_at_one_time_count_once_and_later_ones_double_the_rest() -> None:
    told = Told(A, cooldown_s=2.0, cooldown_max_s=5.0)
    for attempt in [told.send(history(f"t{n}", 1))[0] for n in range(10)]:
        told.end(attempt, EndKind.FAILED)
    assert told.of(A).failures == 1
    for until_s in (2.0, 6.0, 11.0, 16.0):  # rests of 2, 4, 5 and 5 seconds
        told.now_s = until_s - 0.1
        assert told.health() == [Health.COOLING]
        told.now_s = until_s
        assert told.health() == [Health.RETURNING]
        told.end(told.send(history("x", 1))[0], EndKind.ABORTED)
    assert told.of(A).aborts == 4
    told.now_s = 30.0
    told.answer(history("x", 1))
    assert told.of(A).failures == 0


def test_a_full_replica_rests_as_long_as_it_says() -> None:
    told = Told(A, B)
    told.end(told.send(history("x", 1), to=A)[0], EndKind.REFUSED, retry_after_s=3.0)
    told.now_s = 2.9
    assert (told.of(A).health, told.of(A).refusals, told.of(A).failures) == (Health.COOLING, 1, 0)
    told.now_s = 3.0
    assert told.of(A).health is Health.RETURNING


def test_a_replica_whose_memory_is_full_lets_its_conversations_go() -> None:
    told = Told(A, B)
    told.answer(history("x", 1), to=A)
    told.send(ask(b"x" * 400), to=A)
    told.scrape(A, waiting=4, running=9, kv_usage=0.99)
    assert (told.of(A).health, told.pick(history("x", 2)).address) == (Health.FULL, B)
    told.now_s = 11.0  # what was read longer ago than its life says nothing
    assert told.pick(history("x", 2)).address == A


def test_an_unreachable_replica_is_left_until_it_answers() -> None:
    told = Told(A, B)
    told.answer(history("x", 1), to=A)
    told.fleet.unreachable(A, 1.0)
    assert told.pick(history("x", 2)).address == B
    told.now_s = 500.0
    assert told.pick(history("x", 2)).address == B
    told.scrape(A)
    assert told.of(A).health is Health.RETURNING


def test_a_drained_replica_gets_nothing_not_even_as_a_last_resort() -> None:
    told = Told(A, B)
    told.answer(history("x", 1), to=A)
    assert (told.fleet.drain(A, True), told.fleet.drain("nobody", True)) == (True, False)
    assert (told.pick(history("x", 2)).address, told.of(A).health) == (B, Health.DRAINED)
    told.fleet.drain(B, True)
    assert told.fleet.pick(history("x", 2), 0.0, 0.5) is None
    told.fleet.drain(A, False)
    assert (told.pick(history("x", 2)).address, told.of(A).health) == (A, Health.RETURNING)


def test_when_all_have_failed_the_one_that_is_due_first_is_tried() -> None:
    told = Told(A, B)
    for address in (B, A):
        told.end(told.send(history("x", 1), to=address)[0], EndKind.FAILED)
        told.now_s += 0.5
    pick = told.pick(history("x", 1))
    assert (pick.address, pick.why) == (B, Why.LAST_RESORT)
    assert told.fleet.pick(history("x", 1), 0.0, 0.5, avoid=(A, B)) is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"process_start_s": 1000.0}, {"process_start_s": 1060.0}),
        ({"prompt_tokens": 500}, {"prompt_tokens": 20}),
        ({"prefix_hits": 500}, {"prefix_hits": 0}),
        ({"block_size": 16}, {"block_size": 32}),
    ],
)
def test_a_restart_clears_the_index(before: dict[str, float], after: dict[str, float]) -> None:
    told = Told(A, B)
    told.answer(history("x", 1), to=A)
    told.scrape(A, **before)
    told.scrape(A, **before)
    assert told.pick(history("x", 2)).predicted_cached_tokens > 11_000
    told.scrape(A, **after)
    shown = told.of(A)
    assert (shown.index_blocks, shown.restarts, shown.health) == (0, 1, Health.RETURNING)
    assert told.pick(history("x", 2)).predicted_cached_tokens == 0


def test_a_replica_that_failed_and_then_knows_nothing_was_restarted() -> None:
    told = Told(A)
    prompts = {thread: ask(thread.encode() * 40_000, thread) for thread in "xyz"}
    for asked in prompts.values():
        told.answer(asked)
    told.end(told.send(prompts["x"])[0], EndKind.FAILED)
    told.answer(prompts["x"], cached=0)
    held = {thread: told.pick(asked).predicted_cached_tokens > 0 for thread, asked in prompts.items()}
    assert held == {"x": True, "y": False, "z": False}


def test_what_others_send_counts_after_own_counts() -> None:
    told = Told(A, B)
    told.scrape(A, running=5, waiting=3)
    told.send(ask(b"x" * 4_000), to=B)  # 1,000 tokens are less than what three others probably wait for
    assert told.pick(ask(b"new" * 1_000, "new")).address == B
    own = [told.send(ask(b"%d" % n * 4_000, f"t{n}"), to=B)[0] for n in range(8)]
    told.scrape(B, running=5, waiting=4)  # these are our own
    assert told.of(B).active == 9
    for attempt in own:
        told.end(attempt, EndKind.OK)
    assert told.pick(ask(b"new" * 1_000, "new")).address == B


def test_odd_metrics_are_noted() -> None:
    told = Told(A)
    told.scrape(A, models=("small",))
    told.scrape(A, models=("large",), older_names=True)
    assert told.of(A).notes == ("model changed from small to large", "metrics in an older naming")


# --- members -------------------------------------------------------------------------------------------------


def test_an_empty_list_changes_nothing_and_says_so() -> None:
    told = Told(A, B)
    told.answer(history("x", 1), to=A)
    assert told.fleet.members([], 1.0) == Membership(kept=True)
    assert (told.fleet.kept, told.pick(history("x", 2)).address) == (True, A)
    assert told.fleet.members([B, A, B, A], 2.0) == Membership()
    assert not told.fleet.kept
    assert Fleet(FleetPolicy()).members([], 0.0) == Membership()


def test_a_hundred_addresses_are_a_fleet_and_more_than_allowed_are_left_out() -> None:
    many = [f"10.0.{n // 100}.{n % 100}:8000" for n in range(100)]
    told = Told(*many, members_max=100)
    spread = Counter(told.send(ask(b"%03d" % n * 2_000, f"t{n}"))[1].address for n in range(200))
    assert (len(spread), set(spread.values())) == (100, {2})
    change = told.fleet.members(["a-new-one:8000", *many], 1.0)
    assert change == Membership(over=1)  # those in use stay


def test_the_gone_leave_at_once_and_come_back_with_what_they_had() -> None:
    told = Told(A, B)
    told.answer(history("x", 1), to=A)
    attempt, _ = told.send(history("x", 2))
    assert told.fleet.members([B, C], 1.0) == Membership(joined=(C,), left=(A,))
    assert told.pick(history("x", 2)).address in (B, C)
    assert [(r.address, r.health) for r in told.shown()] == [
        (A, Health.GONE),
        (B, Health.READY),
        (C, Health.RETURNING),
    ]
    told.end(attempt, EndKind.OK)  # of one that is gone: nothing breaks
    assert told.fleet.members([A, B], 30.0) == Membership(joined=(A,), left=(C,))
    told.now_s = 60.0
    assert told.pick(history("x", 3)).address == A
    told.fleet.members([B], 61.0)
    told.fleet.members([A, B], 200.0)
    assert told.of(A).index_blocks == 0


def test_ten_thousand_sessions_fit_in_bounded_memory() -> None:
    told = Told(A, B, threads_max=1_000, default_capacity_tokens=64_000)
    for n in range(10_000):
        told.answer(ask(b"%05d" % n * 100, f"t{n}"))
        told.fleet.unreachable("nobody", 0.0)
    assert told.fleet.size_bytes < 2_500_000
    assert sum(r.sessions for r in told.shown()) == 1_000
    assert all(r.index_blocks <= r.index_capacity_blocks == 1_000 for r in told.shown())


def test_attempts_that_nobody_ends_are_forgotten() -> None:
    told = Told(A, in_flight_max=10)
    for n in range(50):
        told.send(ask(b"%02d" % n * 500))
    assert (told.of(A).active, told.of(A).backlog_tokens) == (10, 2_500)


# --- several gateways ----------------------------------------------------------------------------------------


def test_another_process_learns_where_conversations_are_and_what_is_in_flight() -> None:
    one, other = Told(A, B), Told(A, B)
    one.answer(history("x", 1), to=B)
    one.send(ask(b"busy" * 10_000), to=B)
    told = msgspec.json.decode(msgspec.json.encode(one.fleet.digest(0.0)), type=Digest)
    other.fleet.merge("one", told, 0.0)
    assert other.of(B).peer_backlog_tokens == 10_000
    pick = other.pick(history("x", 2))
    assert (pick.address, pick.why) == (B, Why.WARM)
    assert pick.predicted_cached_tokens == 11_232
    # Silence ends its load, a restart of the replica what it was said to hold.
    other.now_s = 10.1
    other.scrape(B, prompt_tokens=5)
    other.scrape(B, prompt_tokens=4)
    assert (other.of(B).peer_backlog_tokens, other.pick(history("x", 2)).predicted_cached_tokens) == (0, 0)
    assert one.fleet.digest(0.0).placed == ()


def test_a_peer_that_talks_nonsense_changes_nothing() -> None:
    told = Told(A, B)
    nonsense = msgspec.json.decode(
        b'[[[1,"nobody",2,3,4,5,6],[1,"%s",2,-3,4,5,6]],[["%s",-1,-1],["nobody",5,5]]]'
        % (A.encode(), A.encode()),
        type=Digest,
    )
    for n in range(200):
        told.fleet.merge(f"peer{n}", nonsense, 0.0)
    assert (told.of(A).peer_active, told.of(A).peer_backlog_tokens) == (0, 0)
