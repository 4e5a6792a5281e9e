"""Leaving a warm cache: the arithmetic, and what it comes to over whole runs."""

from __future__ import annotations

import random

import pytest

from gateway.core.rules import TaskFacts
from gateway.core.runs import Held, Runs, Thread, only_reads
from gateway.core.switching import Arithmetic, Habit, Habits, Lengths, Pace, Side, Terms, Warm, weigh
from tests.core.switch_replay import (
    ANTHROPIC,
    CLOSE,
    OPENAI,
    Pair,
    Run,
    always_rule,
    always_standard,
    cost,
    generated,
    guarded,
    traces,
)
from tests.support.material import SHARED

STANDARD, SMALL = ANTHROPIC.standard, ANTHROPIC.small
PACE = Pace(
    100_000, 0, 0, 10.0, remaining_turns=9, share=0.5, stretch_turns=1
)  # one turn here, one turn there


def test_the_arithmetic_of_one_switch() -> None:
    # 100k tokens: a turn there costs 0.01 instead of 0.03 dollars, but to be written first 0.115 more
    home, cold = Side(STANDARD, Warm(100_000, 60.0)), Side(SMALL)
    found = weigh(home, cold, PACE, now_s=0.0)
    assert found == Arithmetic(
        pays=False,
        turns=1.0,
        saving_nano_usd=20_000_000,
        going_nano_usd=115_000_000,
        return_nano_usd=0,
        later_nano_usd=80_000_000,
    )
    assert found.net_nano_usd == -15_000_000
    assert found.text == (
        "1.0 turns x $0.020000 + $0.080000 later against $0.115000 to go and $0.000000 to return"
    )


@pytest.mark.parametrize(
    ("home", "target", "remaining", "pays"),
    [
        (Warm(100_000, 60.0), Warm(), 9, False),  # as above
        (Warm(100_000, 60.0), Warm(), 40, True),  # the run is long enough
        (Warm(100_000, 60.0), Warm(100_000, 60.0), 0, True),  # it is warm there, too
        (Warm(100_000, 60.0), Warm(100_000, 0.0), 9, False),  # it was
        (Warm(100_000, 0.0), Warm(), 0, True),  # home has gone cold: nothing is abandoned
        (Warm(100_000, 0.0), Warm(), 9, False),  # but the run comes back: then both are written
    ],
)
def test_when_a_switch_pays(home: Warm, target: Warm, remaining: int, pays: bool) -> None:
    pace = Pace(100_000, 0, 0, 10.0, remaining, 0.5, 1)
    assert weigh(Side(STANDARD, home), Side(SMALL, target), pace, now_s=1.0).pays is pays


def test_a_dearer_target_never_pays_and_a_recent_switch_raises_the_bar() -> None:
    warm = Warm(100_000, 60.0)
    pace = Pace(100_000, 0, 0, 10.0, 12, 0.5, 1)
    assert not weigh(Side(SMALL, warm), Side(STANDARD, warm), pace, 0.0).pays
    home, target = Side(STANDARD, warm), Side(SMALL)
    assert weigh(home, target, pace, 0.0).pays
    assert not weigh(home, target, pace, 0.0, unrest=1.0).pays


def test_expected_turns_are_learned_from_how_far_the_runs_of_a_kind_went() -> None:
    lengths = Lengths()
    lengths.saw(1)
    assert (lengths.remaining(1), lengths.remaining(60)) == (11.0, 20.0)  # the prior; one that has come far
    for turns in [2] * 9 + [100]:
        for step in range(1, turns + 1):
            lengths.saw(step)
    lengths.saw(1)  # the run that asks
    # 11 others came to turn 1, of which ten had a second one and one 98 more; and one run by the prior
    assert lengths.remaining(1) == pytest.approx((10 + 98 + 11) / 12)
    lengths.saw(2)
    assert lengths.remaining(2) == pytest.approx((98 + 11) / 11)
    for step in range(3, 41):
        lengths.saw(step)
    assert lengths.remaining(40) == pytest.approx((60 + 40 / 3) / 2)  # only the long one came as far
    lengths.saw(1_000_000)  # is not kept
    assert lengths.remaining(1_000_000) == pytest.approx(1_000_000 / 3)


def test_the_ranges_of_steps_join_without_a_gap() -> None:
    lengths = Lengths()
    for step in range(1, 5_000):
        lengths.saw(step)
    assert set(lengths.reached[1:]) == {1}
    assert lengths.turns[:16] == [0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4]


def test_how_often_a_rule_wants_its_target_is_learned() -> None:
    assert Habit().beside(Habit()) == (0.5, 3.0)
    habits, before = Habits(), ""
    for target in ["small", "small", "small", "standard"] * 25:
        habits.saw(target, before)
        before = target
    assert (habits.of("small"), habits.of("standard")) == (Habit(100, 75, 25), Habit(100, 25, 24))
    share, stretch = habits.of("small").beside(habits.of("small"))
    assert (round(share, 2), round(stretch, 2)) == (0.75, 3.0)
    always = Habit(1_000, 1_000)  # never ended by a rule: no return is expected in a run of any length
    assert round(always.beside(always)[1]) == 1_336


def test_a_thread_knows_what_is_warm_where() -> None:
    thread = Thread()
    thread.answered("a", Held(900, 50.0, 2, b"2"), 1_000, 500, 10)
    assert thread.warm("a", [b"1", b"2", b"3"]) == Warm(900, 50.0)
    assert thread.warm("a", [b"1", b"x", b"3"]) == Warm()  # the history was rewritten
    assert thread.warm("b", [b"1", b"2"]) == Warm()
    thread.answered("a", None, 1_000, 500, 10)  # it kept nothing
    assert thread.warm("a", [b"1", b"2"]) == Warm()


def test_runs_are_forgotten_before_they_are_too_many() -> None:
    runs = Runs(runs_max=2, kinds_max=2)
    for n in range(4):
        runs.asked(f"task {n}", f"kind {n}", 0)
    assert [runs.known(f"task {n}") is not None for n in range(4)] == [False, False, True, True]


def test_a_person_who_speaks_again_is_waiting_for_a_while() -> None:
    runs = Runs()
    run = runs.asked("t", "k", 0, spoken=True)

    def facts(now_ms: int) -> TaskFacts:
        return runs.facts(run, now_ms, budget_used=0.0, tool_errors=0, repeats=0, reading=False)

    assert not facts(0).interactive  # the first words are the task itself
    runs.asked("t", "k", 10_000, spoken=True)
    later = facts(70_000)
    assert (later.step, later.age_s, later.interactive) == (2, 70.0, True)
    assert not facts(610_000).interactive


@pytest.mark.parametrize(
    ("tools", "reads"),
    [
        (["Read", "Grep"], True),
        (["read_file", "list_dir", "codebase_search", "WebFetch", "get_user_details"], True),
        (["Read", "Edit"], False),
        (["Bash"], False),
        (["update_reservation_flights"], False),
        ([], False),
    ],
)
def test_which_tools_only_read(tools: list[str], reads: bool) -> None:
    assert only_reads(tools) is reads


# --- over whole runs -----------------------------------------------------------------------------------------

RECORDED = traces()
SCENARIOS: dict[str, list[Run]] = {
    "recorded" if RECORDED else f"recorded runs were not played: {SHARED} is not there": RECORDED,
    "mixed": generated(1, runs=30),
    "short stretches": generated(2, runs=30, small_for=2, standard_for=4),
    "alternating": generated(3, runs=30, small_for=1.2, standard_for=1.2),
    "long stretches": generated(4, runs=30, small_for=40, standard_for=20),
    "hardly ever small": generated(5, runs=30, small_for=1.5, standard_for=30),
    "big histories": generated(7, runs=30, start=(60_000, 180_000), small_for=4, standard_for=8),
    "short runs": generated(8, runs=150, turns=(1, 6), small_for=2, standard_for=2),
    "with pauses": generated(9, runs=30, pauses=0.1),
    "all small": generated(10, runs=30, small_for=1e9, standard_for=0.5),
}


@pytest.mark.parametrize("pair", [ANTHROPIC, OPENAI, CLOSE], ids=["anthropic", "openai", "close"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_guard_costs_at_most_two_percent_more_than_the_better_of_both(name: str, pair: Pair) -> None:
    runs = SCENARIOS[name]
    standard, rule = cost(runs, pair, always_standard), cost(runs, pair, always_rule)
    assert cost(runs, pair, guarded(Runs())) <= 1.02 * min(standard, rule)


@pytest.mark.parametrize("parts", [("hardly ever small", "mixed"), ("hardly ever small", "short runs")])
def test_over_runs_of_both_kinds_it_is_cheaper_than_either(parts: tuple[str, str]) -> None:
    runs = [run for name in parts for run in SCENARIOS[name]]
    random.Random(5).shuffle(runs)
    standard, rule = cost(runs, ANTHROPIC, always_standard), cost(runs, ANTHROPIC, always_rule)
    assert cost(runs, ANTHROPIC, guarded(Runs())) < min(standard, rule)


def _pair(ratio: float, read: float, write: float) -> Pair:
    """A small tier at `ratio` of the standard price; cached input is read and written at these multiples of it."""

    def at(price: float) -> Terms:
        return Terms(*(round(price * each) for each in (1, read, write, 5)))

    return Pair(at(3_000_000), at(ratio * 3_000_000))


@pytest.mark.parametrize("ratio", [0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.99])
def test_long_runs_that_nearly_always_want_the_cheaper_tier_cost_at_most_a_tenth_more(ratio: float) -> None:
    # some stretches outlive the cache at home and some do not: a threshold at their mean took it for always warm
    runs = generated(320, runs=12, turns=(300, 300), small_for=30, standard_for=1.2)
    worst = 0.0
    for read, write in [(0.02, 1.0), (0.1, 1.25), (0.5, 1.0)]:
        pair = _pair(ratio, read, write)
        better = min(cost(runs, pair, always_standard), cost(runs, pair, always_rule))
        worst = max(worst, cost(runs, pair, guarded(Runs())) / better - 1)
    assert worst <= 0.10


def test_a_recent_switch_does_not_count_the_return_twice() -> None:
    warm, pair = Warm(100_000, 60.0), _pair(0.85, 0.1, 1.25)
    pace = Pace(100_000, 2_000, 400, 1.0, remaining_turns=40, share=0.95, stretch_turns=20)
    found = weigh(Side(pair.standard, warm), Side(pair.small, warm), pace, 0.0, unrest=1.0)
    assert (found.going_nano_usd, found.pays) == (0, True)


def test_without_the_guard_near_prices_would_cost_more() -> None:
    runs = SCENARIOS["alternating"]
    assert cost(runs, CLOSE, always_rule) > 1.04 * cost(runs, CLOSE, guarded(Runs()))
