"""Three policies for a thread, in imagination: what each would have paid, and which one is in force."""

from __future__ import annotations

from gateway.core.policies import Bills, Imagined, Policy
from gateway.core.runs import Held, Runs, Thread
from gateway.core.switching import Pace, Side, Terms, Warm

#: pico-dollars per token: input, read, write, output
STANDARD = Terms(3_000_000, 300_000, 3_750_000, 15_000_000)
SMALL = Terms(1_000_000, 100_000, 1_250_000, 5_000_000)
PACE = Pace(100_000, 0, 0, 10.0, remaining_turns=4, share=0.5, stretch_turns=1)
WARM = {"big": Warm(100_000, 300.0)}


def small(imagined: Imagined, now_s: float = 0.0, really: str = "big") -> Bills:
    """The rules want the small tier, and the answer comes: 100,000 tokens, 10 of output."""
    imagined.asked(["tiny"], SMALL, PACE, now_s)
    return imagined.answered(really, 100_000, 10)


def test_each_policy_pays_for_what_it_would_have_held() -> None:
    imagined = Imagined("big", STANDARD, WARM)
    # read at home; written at the small tier, then read there
    assert small(imagined) == Bills(weigh=30_150_000, stay=30_150_000, follow=125_050_000)
    assert small(imagined) == Bills(weigh=30_150_000, stay=30_150_000, follow=10_050_000)
    imagined.asked(["big"], STANDARD, PACE, 10.0)  # the rules want home again: all are there, and it is warm
    assert imagined.answered("big", 101_000, 0) == Bills(33_750_000, 33_750_000, 33_750_000)
    assert imagined.answered("big", 101_000, 0) == Bills()  # nobody asked a rule for this one


def test_a_cache_that_has_gone_cold_or_whose_history_is_rewritten_is_written_again() -> None:
    imagined = Imagined("big", STANDARD, WARM)
    assert small(imagined, now_s=300.0).stay == 375_150_000
    imagined.asked(["tiny"], SMALL, PACE, 310.0, rewritten=True)
    assert imagined.answered("big", 50_000, 0).stay == 187_500_000


def test_a_dearer_target_is_followed_by_all_and_a_bound_thread_goes_nowhere() -> None:
    imagined = Imagined("tiny", SMALL, {})
    imagined.bound(0.0)
    assert imagined.answered("tiny", 1_000, 0) == Bills(1_250_000, 1_250_000, 1_250_000)
    imagined.asked(["big"], STANDARD, PACE, 0.0)
    assert imagined.answered("big", 1_000, 0) == Bills(3_750_000, 3_750_000, 3_750_000)
    imagined.asked(["tiny"], SMALL, PACE, 0.0, always=True)
    assert imagined.answered("tiny", 1_000, 0) == Bills(100_000, 100_000, 100_000)


def test_what_staying_has_passed_up_counts_half_and_from_its_least_since_the_last_switch() -> None:
    imagined = Imagined("big", STANDARD, WARM)
    rent = [imagined.rent_nano_usd]
    for _ in range(4):
        small(imagined)
        rent.append(imagined.rent_nano_usd)
    # to follow costs 94.9 million more at first and then 20.1 million less a turn
    assert rent == [0, 0, 10_050_000, 20_100_000, 30_150_000]
    small(imagined, really="tiny")
    assert imagined.rent_nano_usd == 0
    small(imagined, really="big")  # is back, which is a switch as well
    assert imagined.rent_nano_usd == 0


def test_what_was_passed_up_makes_a_long_run_switch() -> None:
    thread, home, target = Thread(), Side(STANDARD, Warm(100_000, 300.0)), Side(SMALL)
    thread.home, thread.held = "big", {"big": Held(100_000, 300.0, 1, b"1")}
    thread.imagine(Bills(), STANDARD, "big")
    assert thread.imagined is not None
    goes = []
    for _ in range(10):
        goes.append(thread.choose(home, target, PACE, 0.0, Bills()).goes)
        small(thread.imagined)
    # 10.05 million more each turn; with 50 million for this and later stays it has to be 126.5
    assert goes == [False] * 9 + [True]


def test_another_policy_is_in_force_only_if_it_cost_less_by_more_than_chance() -> None:
    found = [
        Bills(weigh, stay, follow, runs).best.value
        for weigh, stay, follow, runs in [
            (0, 0, 0, 0),
            (105, 100, 110, 1),  # a twentieth is asked for after one run
            (106, 100, 110, 1),
            (103, 110, 100, 9),  # a hundredth after nine
            (101, 110, 100, 9),
            (99, 110, 100, 99),
        ]
    ]
    assert found == ["weigh", "weigh", "stay", "follow", "weigh", "weigh"]
    one, two = Bills(1, 2, 3, 4), Bills(10, 20, 30, 40)
    one.observe(two)  # of two processes, say
    assert one == Bills(11, 22, 33, 44)


def test_a_choice_says_the_policy_and_the_bills_beside_the_arithmetic() -> None:
    thread, home, target = Thread(), Side(STANDARD, Warm(100_000, 60.0)), Side(SMALL)
    bills = Bills(2_500_000_000, 2_000_000_000, 1_500_000_000, 7)
    thread.imagine(bills, STANDARD, "big")
    choice = thread.choose(home, target, PACE, 0.0, bills)
    assert (choice.goes, choice.policy, choice.arithmetic.pays) == (True, Policy.FOLLOW, False)
    assert choice.text == (
        "1.0 turns x $0.020000 + $0.030000 later against $0.115000 to go and $0.000000 to return; policy follow: in "
        "8 such runs weighing would have cost $2.5000, staying $2.0000, following the rules $1.5000"
    )
    fresh = Thread()
    fresh.imagine(Bills(), STANDARD, "big")
    told = fresh.choose(home, target, PACE, 0.0, Bills()).text
    assert told.endswith("; policy weigh: nothing is known of such runs yet")


def test_runs_of_one_kind_share_their_bills_and_a_thread_keeps_its_policy() -> None:
    runs = Runs()
    first, other = runs.asked("one", "kind", 0), runs.asked("two", "another kind", 0)
    runs.bills(first).observe(Bills(3, 2, 1, 1))
    second = runs.asked("three", "kind", 0)
    assert (runs.bills(second), runs.bills(other)) == (Bills(3, 2, 1, 1), Bills())
    thread = second.thread(b"main")
    thread.imagine(runs.bills(second), STANDARD, "big")
    runs.bills(first).observe(Bills(0, 0, 9))
    assert (thread.policy, runs.bills(second)) == (Policy.FOLLOW, Bills(3, 2, 10, 2))
