"""Sticky until saturated: which replica a request goes to, told as what happens to a fleet."""

from __future__ import annotations

from collections import Counter

import pytest

from gateway.core.replicas.terms import EndKind, FleetPolicy, Why
from tests.support.told_fleet import SYSTEM, A, B, C, Told, ask, history

# --- affinity ------------------------------------------------------------------------------------------------


def test_a_conversation_stays_where_its_history_is() -> None:
    told = Told(A, B, C)
    first = told.answer(history("x", 1))
    assert (first.why, first.predicted_cached_tokens) == (Why.LEAST_LOADED, 0)
    for turn in range(2, 30):
        told.send(history(f"noise{turn}", 3), to=first.address)  # it is the busiest, and stays the right one
        pick = told.answer(history("x", turn))
        assert (pick.address, pick.why) == (first.address, Why.WARM)
        # 1,000 tokens are new, and the engine reads whole blocks.
        assert 1_000 <= pick.uncached_tokens < 1_016 + 64


def test_new_conversations_go_to_the_least_loaded() -> None:
    told = Told(A, B, C)
    spread = Counter(told.send(ask(b"%d" % n * 4_000, f"t{n}"))[1].address for n in range(30))
    assert set(spread.values()) == {10}


def test_sub_agents_spread_as_soon_as_waiting_costs_more_than_a_second_copy() -> None:
    told = Told(A, B)
    for turn in (1, 2):
        told.answer(history("main", turn), to=A)
    went: list[str] = []
    while B not in went:
        went.append(told.send(history(f"sub{len(went)}", 1))[1].address)
    # A second copy is 10,000 tokens, and half of that again for what it displaces: far from tau.
    assert 10_000 < told.of(A).backlog_tokens < 20_000
    assert told.pick(history("main", 3)).address == A


def test_fifty_requests_with_one_beginning_in_one_instant_are_no_hits_and_do_not_herd() -> None:
    told = Told(A, B, C, "10.0.0.4:8000")
    sent = [told.send(ask(SYSTEM + b"%02d" % n * 200, f"t{n}")) for n in range(50)]
    assert Counter(pick.predicted_cached_tokens for _, pick in sent) == {0: 50}
    assert sorted(Counter(pick.address for _, pick in sent).values()) == [12, 12, 13, 13]
    assert told.fleet.backlog_tokens() == sum(pick.uncached_tokens for _, pick in sent) > 500_000
    # The first one's prefill is over: from now on there is something to hit on its replica.
    attempt, first = sent[0]
    told.fleet.first_chunk(attempt, 1.0)
    pick = told.pick(
        ask(SYSTEM + b"late" * 100, "late"), avoid=tuple({A, B, C, "10.0.0.4:8000"} - {first.address})
    )
    assert pick.predicted_cached_tokens > 10_000


def test_a_saturated_replica_lets_go_at_tau_and_not_before() -> None:
    told = Told(A, B, tau_tokens=50_000)
    for turn in (1, 2):
        told.answer(history("x", turn), to=A)
    waiting = [told.send(ask(b"%d" % n * 40_000), to=A)[0] for n in range(5)]  # 10,000 tokens each
    assert told.fleet.backlog_tokens() == 50_000
    assert told.pick(history("x", 3)).address == A
    more, _ = told.send(ask(b"one more" * 1_000), to=A)
    released = told.pick(history("x", 3))
    assert (released.address, released.why) == (B, Why.RELEASED)
    told.fleet.first_chunk(more, 1.0)
    assert told.pick(history("x", 3)).address == A
    for attempt in waiting:
        told.end(attempt, EndKind.CANCELLED)
    assert told.fleet.backlog_tokens() == 0


def test_where_decoding_is_what_takes_time_load_is_requests() -> None:
    told = Told(A, B, decode_bound=True)
    told.send(ask(b"x" * 400_000, "long"), to=A)
    for n in range(2):
        told.send(ask(b"%d" % n * 400, f"short{n}"), to=B)
    assert told.pick(ask(b"new" * 1_000, "new")).address == A


def test_exploration_seeds_a_second_copy() -> None:
    told = Told(A, B, exploration=0.01)
    told.answer(history("x", 1), to=A)
    lucky, other = (told.pick(history("x", 2), chance) for chance in (0.009, 0.01))
    assert (lucky.address, lucky.why, other.address, other.why) == (B, Why.EXPLORED, A, Why.WARM)


# --- backlog -------------------------------------------------------------------------------------------------


def test_the_backlog_is_released_once_at_the_first_chunk() -> None:
    told = Told(A)
    attempt, pick = told.send(history("x", 1))
    assert told.of(A).backlog_tokens == pick.uncached_tokens == 11_241
    for _ in range(2):
        told.fleet.first_chunk(attempt, 1.0)
        assert (told.of(A).backlog_tokens, told.of(A).active) == (0, 1)
    for _ in range(2):
        told.end(attempt, EndKind.OK)
        assert (told.of(A).backlog_tokens, told.of(A).active) == (0, 0)


@pytest.mark.parametrize("kind", list(EndKind))
def test_whatever_the_end_nothing_stays_in_flight(kind: EndKind) -> None:
    told = Told(A)
    attempt, _ = told.send(history("x", 1))
    told.end(attempt, kind)
    assert (told.of(A).backlog_tokens, told.of(A).active) == (0, 0)
    # What was not answered was perhaps not computed.
    assert (told.of(A).index_blocks > 0) is (kind is EndKind.OK)


def test_without_a_stream_prefill_is_over_when_the_peak_rate_says_so() -> None:
    told = Told(A, r_peak_tokens_per_s=10_000.0)
    for thread in "xy":
        told.send(ask(thread.encode() * 40_000, thread, streams=False))
    for now_s, backlog in ((0.9, 20_000), (1.1, 10_000), (2.1, 0)):
        told.now_s = now_s
        assert told.of(A).backlog_tokens == backlog
    assert told.of(A).active == 2


def test_the_same_attempt_sent_twice_counts_once() -> None:
    told = Told(A)
    asked = history("x", 1)
    for _ in range(2):
        told.fleet.sent("same", asked, told.pick(asked), 0.0)
    assert (told.of(A).active, told.of(A).backlog_tokens) == (1, 11_241)


# --- tokens --------------------------------------------------------------------------------------------------


def test_characters_per_token_are_learned() -> None:
    told = Told(A)
    for n in range(300):
        told.answer(ask(b"%03d" % n * 2_000), tokens=2_000)
    assert told.fleet.chars_per_token == pytest.approx(3.0, abs=0.05)


def test_a_prompt_that_goes_on_is_predicted_from_what_was_reported() -> None:
    told = Told(A)
    told.scrape(A, block_size=32)
    # 3 bytes a token here, while the fleet still believes in 4.
    first = history("x", 1)
    told.answer(first, tokens=first.prompt_chars // 3)
    pick = told.pick(history("x", 2))
    assert pick.predicted_cached_tokens == first.prompt_chars // 3 // 32 * 32


def test_a_shared_beginning_is_predicted_from_what_was_reported_for_another() -> None:
    told = Told(A)
    told.answer(history("x", 1))
    told.answer(history("y", 1), cached=9_600)
    assert told.pick(history("z", 1)).predicted_cached_tokens == 9_600


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 10**9, "cached_tokens": 10},
        {"prompt_tokens": 1_000, "cached_tokens": 1_001},
        {"prompt_tokens": 0, "cached_tokens": 0},
        {"prompt_tokens": 1_000, "cached_tokens": -1},
        {"prompt_tokens": 1_000, "cached_tokens": 0, "output_tokens": -5},
    ],
)
def test_usage_that_cannot_be_is_counted_and_teaches_nothing(usage: dict[str, float]) -> None:
    told = Told(A)
    attempt, _ = told.send(history("x", 1))
    told.end(attempt, EndKind.OK, **usage)
    shown = told.of(A)
    assert (shown.lies, shown.reported_cached_tokens, told.fleet.chars_per_token) == (1, 0, 4.0)
    assert len(shown.notes) == 1


def test_two_threads_that_were_evicted_take_what_is_older_with_them() -> None:
    told = Told(A)
    for n in range(5):
        told.answer(ask(b"%d" % n * 8_000, f"t{n}"))
    for n in (2, 3):
        told.answer(ask(b"%d" % n * 8_000, f"t{n}"), cached=0)
    held = [told.pick(ask(b"%d" % n * 8_000)).predicted_cached_tokens > 0 for n in range(5)]
    assert held == [False, False, True, True, True]


@pytest.mark.parametrize(
    "policy",
    [{"exploration": 0.02}, {"warm_ratio": 0.0}, {"tau_tokens": -1}, {"t_max_s": 0.0}, {"members_max": 0}],
)
def test_a_policy_that_makes_no_sense_cannot_be_built(policy: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        FleetPolicy(**policy)  # type: ignore[arg-type]
