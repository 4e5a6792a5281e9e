"""The breakers of a task and of a key, one by one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from gateway.core.breakers import (
    Asked,
    Breaker,
    BreakerPolicy,
    Child,
    Ended,
    Errors,
    FanOut,
    KeyState,
    Mode,
    Polling,
    Repeats,
    Signs,
    SpendSlope,
    StepCap,
    TaskState,
    Verdict,
    WallClock,
    Watch,
    forgive,
    observe,
    observe_key,
)
from gateway.core.tail import Call, Tail, Turn

NOON_MS = 1_790_000_000_000
STOPPING = BreakerPolicy().stopping()
NUDGE = b"nudge"


def turn(name: str, number: int = 0, *, failed: bool = False, prompted: bytes = b"") -> Turn:
    """Turns of one name are alike; the number says which of them it is."""
    call = Call(name, b"arguments", b"result", failed)
    return Turn(f"{name}#{number}".encode(), name.encode(), prompted, (call,), failed)


def words(name: str, prompted: bytes = b"") -> Turn:
    return Turn(name.encode(), name.encode(), prompted, (), False)


class Task:
    """A task whose turns come one by one, `gap_s` apart; each request shows the last `window` of them."""

    def __init__(self, policy: BreakerPolicy = STOPPING, *, window: int = 8) -> None:
        self.policy = policy
        self.window = window
        self.state = TaskState()
        self.now_ms = NOON_MS
        self.shown: list[Turn] = []
        self.made = 0

    def ask(self, pending: bytes = b"") -> dict[Breaker, Verdict]:
        return self.observe(Asked(Tail(tuple(self.shown[-self.window :]), pending)))

    def observe(self, fact: Asked | Ended | Child) -> dict[Breaker, Verdict]:
        self.state, verdicts = observe(self.state, fact, self.policy, self.now_ms)
        return {verdict.breaker: verdict for verdict in verdicts}

    def do(self, *names: str, gap_s: float = 5.0, failed: bool = False) -> dict[Breaker, Verdict]:
        verdicts: dict[Breaker, Verdict] = {}
        for name in names:
            self.made += 1
            self.shown.append(turn(name, self.made, failed=failed))
            self.now_ms += round(gap_s * 1_000)
            verdicts = self.ask()
        return verdicts

    def compact(self, keep: int = 0) -> None:
        self.shown = self.shown[len(self.shown) - keep :]


def levels(verdicts: dict[Breaker, Verdict]) -> dict[str, tuple[str, bool]]:
    return {breaker.value: (v.action.value, v.tripped) for breaker, v in verdicts.items()}


# --- loops ------------------------------------------------------------------------------------------------


def test_a_loop_warns_at_three_and_stops_at_six() -> None:
    task = Task()
    said = [levels(task.do("ls")) for _ in range(7)]
    warning, stop = {"loop": ("alert", False)}, {"loop": ("stop", True)}
    assert said == [{}, {}, warning, warning, warning, stop, stop]


def test_a_verdict_carries_its_evidence() -> None:
    task = Task()
    verdict = task.do("cat", *("ls",) * 6)[Breaker.LOOP]
    assert verdict == Verdict(
        Breaker.LOOP,
        Mode.STOP,
        tripped=True,
        fresh=True,
        episode=f"loop/trip/{b'ls#2'.hex()}/{b'ls'.hex()}/{NOON_MS + 10_000}",
        evidence={"turns": 6, "sign": b"ls".hex(), "tools": "ls", "since_ms": NOON_MS + 10_000},
        message="this task has called ls 6 times in a row with the same arguments and the same result",
    )
    again = task.do("ls")[Breaker.LOOP]
    assert (again.episode, again.fresh, again.evidence["turns"]) == (verdict.episode, False, 7)


@pytest.mark.parametrize(
    ("mode", "warning", "trip"),
    [
        (Mode.OFF, None, None),
        (Mode.OBSERVE, Mode.OBSERVE, Mode.OBSERVE),
        (Mode.ALERT, Mode.ALERT, Mode.ALERT),
        (Mode.STOP, Mode.ALERT, Mode.STOP),
    ],
)
def test_a_mode_is_the_most_that_a_breaker_does(mode: Mode, warning: Mode | None, trip: Mode | None) -> None:
    task = Task(BreakerPolicy(loop=Repeats(mode, stop=6, warn=3)))
    assert [
        v.action if v else None
        for v in (task.do(*"aaa").get(Breaker.LOOP), task.do(*"aaa").get(Breaker.LOOP))
    ] == [
        warning,
        trip,
    ]


def test_another_turn_between_ends_a_loop() -> None:
    task = Task()
    task.do(*("ls",) * 5)
    assert task.do("cat") == {}
    assert levels(task.do(*("ls",) * 5)) == {"loop": ("alert", False)}


def test_two_turns_in_turn_stop_at_six() -> None:
    task = Task()
    assert [levels(task.do(name)) for name in "cababab"] == [*({},) * 6, {"ping_pong": ("stop", True)}]
    verdict = task.do("a")[Breaker.PING_PONG]
    assert (verdict.evidence["turns"], verdict.evidence["tools"]) == (7, "b, a")
    assert verdict.message.startswith("this task has gone back and forth between b and a for 7 turns")


def test_three_turns_in_turn_are_no_ping_pong() -> None:
    assert Task().do(*"abcabcabcabc") == {}


def test_the_same_words_three_times_are_a_monologue() -> None:
    task = Task()
    said = []
    for n in range(4):
        task.shown.append(words("done", NUDGE if n else b""))
        task.now_ms += 5_000
        said.append(levels(task.ask(pending=NUDGE)))
    assert said == [{}, {}, {"monologue": ("stop", True)}, {"monologue": ("stop", True)}]
    assert task.ask(pending=b"a question") == {}  # a person's


def test_waiting_is_no_loop() -> None:
    slow = Task()
    assert slow.do(*("ls",) * 20, gap_s=30.0) == {}
    assert levels(slow.do(*("ls",) * 5, gap_s=29.9)) == {"loop": ("stop", True)}
    assert Task().do(*("BashOutput",) * 20) == {}
    assert Task().do(*("BashOutput", "ls") * 10) == {}
    own = replace(STOPPING, polling=Polling(tools=frozenset({"ls"}), gap_s=5.0))
    assert Task(own).do(*("ls",) * 10) == {}
    assert levels(Task(own).do(*("BashOutput",) * 6, gap_s=4.9)) == {"loop": ("stop", True)}


# --- what clients do to their history --------------------------------------------------------------------


@pytest.mark.parametrize("window", [2, 8])
def test_a_client_that_shows_only_its_last_turns_is_seen_through(window: int) -> None:
    task = Task(window=window)
    assert [levels(task.do("ls")).get("loop") for _ in range(6)][2:] == [
        *[("alert", False)] * 3,
        ("stop", True),
    ]


def test_a_compaction_does_not_hide_a_loop() -> None:
    task = Task()
    task.do("cat", *("ls",) * 4)
    assert task.ask(pending=b"summarize the conversation") == {}  # must not be refused
    task.compact()
    assert task.ask() == {}  # nor the first one after it, which shows nothing
    # With nothing in common, the first turn after it may be the last one before under a new id: it counts once.
    assert [levels(task.do("ls")) for _ in range(3)] == [
        {"loop": ("alert", False)},
        {"loop": ("alert", False)},
        {"loop": ("stop", True)},
    ]


@pytest.mark.parametrize("keep", [1, 3])
def test_a_compaction_that_keeps_turns_does_not_count_them_again(keep: int) -> None:
    task = Task()
    task.do("cat", *("ls",) * 4)
    task.compact(keep)
    assert task.ask()[Breaker.LOOP].evidence["turns"] == 4
    assert task.do("ls")[Breaker.LOOP].evidence["turns"] == 5


def test_a_compaction_does_not_hide_a_ping_pong() -> None:
    task = Task()
    task.do(*"abab")
    task.compact()
    task.ask()
    assert levels(task.do(*"ab")) == {"ping_pong": ("stop", True)}


def test_a_repeated_request_counts_once() -> None:
    task = Task()
    task.do(*("ls",) * 5)
    assert [task.ask()[Breaker.LOOP].evidence["turns"] for _ in range(10)] == [5] * 10


def test_calls_under_new_ids_each_time_count_once() -> None:
    task = Task()
    for n in range(1, 7):
        task.shown = [turn("ls", 100 * n + i) for i in range(n)]
        task.now_ms += 5_000
        verdicts = task.ask()
        assert verdicts[Breaker.LOOP].evidence["turns"] == n if n > 2 else verdicts == {}
    assert levels(verdicts) == {"loop": ("stop", True)}


def test_calls_without_ids_of_their_own_count_as_they_come() -> None:
    task = Task()
    for n in range(1, 7):
        task.shown = [turn("cat", 1), *(turn("ls", 1) for _ in range(n))]
        task.now_ms += 5_000
        verdicts = task.ask()
    assert verdicts[Breaker.LOOP].evidence["turns"] == 6


def test_a_client_that_goes_back_does_not_repeat_what_it_took_back() -> None:
    task = Task()
    task.do(*"abab")
    task.shown = task.shown[:2]
    assert task.do(*"ac") == {}  # a b | a c, not a b a b a b
    assert [seen.turn.sign for seen in task.state.threads[0]] == [b"a", b"b", b"a", b"c"]


def test_threads_under_one_task_do_not_add_up() -> None:
    """Eight sub-agents that begin with the same two calls."""
    threads: list[Task] = [Task() for _ in range(8)]
    state = TaskState()
    for round_ in range(2):
        for n, thread in enumerate(threads):
            thread.shown.append(turn("ls", 100 * n + round_))
            state, verdicts = observe(
                state, Asked(Tail(tuple(thread.shown))), STOPPING, NOON_MS + round_ * 900 + n
            )
            assert [v for v in verdicts if v.tripped] == []


def test_a_loop_inside_one_of_two_threads_is_seen() -> None:
    state, stopped = TaskState(), []
    one: list[Turn] = []
    other: list[Turn] = []
    for n in range(8):
        one.append(turn(f"work{n}", n))
        other.append(turn("ls", 100 + n))
        for shown in (one, other):
            now_ms = NOON_MS + n * 5_000
            state, verdicts = observe(state, Asked(Tail(tuple(shown[-8:]))), STOPPING, now_ms)
            stopped += [n for v in verdicts if v.action is Mode.STOP]
    assert stopped == [5, 6, 7]


def test_a_history_seen_for_the_first_time_warns_until_a_repetition_is_seen_to_be_quick() -> None:
    task = Task()
    task.shown = [turn("ls", n) for n in range(7)]
    assert levels(task.ask()) == {"loop": ("alert", False)}  # it may have polled, at another replica
    assert levels(task.do("ls", gap_s=5)) == {"loop": ("stop", True)}
    polling = Task()
    polling.shown = [turn("ls", n) for n in range(7)]
    polling.ask()
    assert polling.do(*("ls",) * 5, gap_s=60) == {}


def test_turns_that_other_replicas_served_came_evenly() -> None:
    for gap_s, said in ((5, {"loop": ("stop", True)}), (60, {})):
        task = Task()
        task.do("cat")
        task.shown += [turn("ls", 100 + n) for n in range(6)]
        task.now_ms += 6 * gap_s * 1_000
        assert levels(task.ask()) == said


def test_who_is_spoken_to_has_something_new_to_do() -> None:
    task = Task()
    task.do(*("ls",) * 6)
    assert task.ask(pending=b"try another way") == {}
    task.shown.append(turn("ls", 99, prompted=b"try another way"))
    assert task.ask() == {}


def test_a_task_that_was_forgiven_begins_anew() -> None:
    task = Task()
    task.do(*("ls",) * 7)
    task.state = forgive(task.state)
    assert task.ask() == {}
    assert [bool(task.do("ls")) for _ in range(6)] == [False, False, True, True, True, True]
    assert levels(task.ask()) == {"loop": ("stop", True)}


# --- errors -----------------------------------------------------------------------------------------------


def test_ten_failed_calls_in_a_row_or_more_than_half_of_twenty() -> None:
    task = Task()
    for n in range(9):
        assert task.do(f"t{n}", failed=True) == {}
    verdict = task.do("t9", failed=True)[Breaker.TOOL_ERRORS]
    assert (verdict.action, verdict.evidence) == (
        Mode.STOP,
        {"in_row": 10, "failed": 10, "of": 10, "since_ms": NOON_MS + 5_000},
    )
    assert task.ask(pending=b"let me help") == {}
    half = Task()
    for n in range(20):
        assert half.do(f"t{n}", failed=n % 2 == 0) == {}  # a test that fails after each edit
    half.do("u1", failed=True)
    assert half.do("u2", failed=True)[Breaker.TOOL_ERRORS].evidence["failed"] == 11


def test_upstream_errors_open_and_one_probe_closes() -> None:
    task = Task()
    failed, ended = Ended(True, 0), Ended(False, 0)
    for _ in range(9):
        assert task.observe(failed) == {}
    news = task.observe(failed)[Breaker.UPSTREAM_ERRORS]
    assert (news.fresh, news.evidence["in_row"]) == (True, 10)
    task.now_ms += 20_000
    verdict = task.ask()[Breaker.UPSTREAM_ERRORS]
    assert (verdict.action, verdict.fresh, verdict.retry_after_s) == (Mode.STOP, False, 10)
    task.now_ms += 10_000
    assert task.ask() == {}  # the probe
    assert levels(task.ask()) == {"upstream_errors": ("stop", True)}
    task.now_ms += 5_000
    assert task.observe(failed) == {}
    task.now_ms += 29_999
    assert levels(task.ask()) == {"upstream_errors": ("stop", True)}
    task.now_ms += 1
    assert task.ask() == {}
    assert task.observe(ended) == {}
    assert (task.ask(), task.ask(), task.state.upstream.results) == ({}, {}, 0)


def test_a_probe_that_never_ends_is_followed_by_another() -> None:
    task = Task()
    for _ in range(10):
        task.observe(Ended(True, 0))
    task.now_ms += 30_000
    assert (task.ask(), bool(task.ask())) == ({}, True)
    task.now_ms += 30_000
    assert (task.ask(), bool(task.ask())) == ({}, True)


def test_upstream_errors_more_than_half_of_twenty() -> None:
    task = Task()
    for n in range(20):
        assert task.observe(Ended(n % 2 == 0, 0)) == {}
    task.observe(Ended(True, 0))  # replaces a failure
    assert task.observe(Ended(True, 0))[Breaker.UPSTREAM_ERRORS].evidence["failed"] == 11


# --- caps -------------------------------------------------------------------------------------------------


def test_steps_are_capped_by_what_the_ledger_counted() -> None:
    task = Task(BreakerPolicy(steps=StepCap(Mode.STOP, most=3)))
    for step in (1, 2, 2):
        assert task.ask() == {}
        task.observe(Ended(False, 0, step))  # the second attempt of a request is no step
    assert task.ask() == {}
    task.observe(Ended(False, 0, 3))
    verdict = task.ask()[Breaker.STEPS]
    assert (verdict.action, verdict.evidence) == (Mode.STOP, {"steps": 3, "most": 3})
    assert verdict.message == "this task has made 3 model calls, and its limit is 3"
    assert [task.ask()[Breaker.STEPS].evidence["steps"] for _ in range(5)] == [3] * 5  # refused ones are none


def test_the_wall_clock_begins_with_the_task() -> None:
    task = Task(BreakerPolicy(wall_clock=WallClock(Mode.STOP, most_s=60)))
    assert task.ask() == {}
    task.now_ms += 60_000
    assert task.ask() == {}
    task.now_ms += 1_000
    assert levels(task.ask()) == {"wall_clock": ("stop", True)}
    assert levels(task.observe(Asked(began_ms=NOON_MS + 50_000))) == {"wall_clock": ("stop", True)}
    other = Task(task.policy)
    assert levels(other.observe(Asked(began_ms=NOON_MS - 61_000))) == {"wall_clock": ("stop", True)}


def test_fan_out_is_capped_in_all_three_ways() -> None:
    task = Task()
    assert levels(task.observe(Asked(running=7, depth=3))) == {}
    verdicts = task.observe(Asked(running=8, depth=4))
    assert levels(verdicts) == {"concurrency": ("stop", True), "depth": ("stop", True)}
    assert verdicts[Breaker.CONCURRENCY].retry_after_s == 1
    for n in range(20):
        assert task.observe(Child(f"child{n}")) == {}
    verdict = task.observe(Child("one more"))[Breaker.CHILDREN]
    assert verdict.evidence == {"children": 20, "most": 20, "refused": "one more"}
    assert task.observe(Child("child3")) == {}  # goes on


# --- money ------------------------------------------------------------------------------------------------


def test_spending_has_a_limit_per_minute() -> None:
    task = Task(BreakerPolicy(spend_slope=SpendSlope(Mode.STOP, limit_nano_usd_per_min=1_000, over_min=5)))
    assert task.observe(Ended(False, 5_000)) == {}
    assert task.ask() == {}
    news = task.observe(Ended(False, 5))[Breaker.SPEND_SLOPE]
    assert (news.fresh, news.evidence["nano_usd_per_min"], news.evidence["limit_nano_usd_per_min"]) == (
        True,
        1_001,
        1_000,
    )
    assert levels(task.ask()) == {"spend_slope": ("stop", True)}
    task.now_ms += 5 * 60_000
    assert task.ask() == {}


def test_a_task_that_spends_ten_times_what_it_did_is_told_of() -> None:
    task = Task()
    for _ in range(15):
        assert task.observe(Ended(False, 100_000_000)) == {}  # $0.10 a minute
        task.now_ms += 60_000
    assert task.observe(Ended(False, 4_600_000_000)) == {}  # $1 a minute over the last five
    verdict = task.observe(Ended(False, 100_000_000))[Breaker.SPEND_SLOPE]
    assert verdict.evidence == {
        "nano_usd_per_min": 1_020_000_000,
        "over_min": 5,
        "own_nano_usd_per_min": 100_000_000,
    }
    assert verdict.message == "this task spends $1.02 per minute, more than 10 times its own average of $0.1"
    young = Task()
    assert young.observe(Ended(False, 10**12)) == {}  # nothing to compare with


def test_cents_are_no_slope() -> None:
    task = Task()
    for _ in range(15):
        task.observe(Ended(False, 1_000))
        task.now_ms += 60_000
    assert task.observe(Ended(False, 400_000_000)) == {}


# --- keys -------------------------------------------------------------------------------------------------


def after(requests: Sequence[tuple[bytes, int]], gap_ms: int = 1_000) -> tuple[KeyState, tuple[Verdict, ...]]:
    state = KeyState()
    verdicts: tuple[Verdict, ...] = ()
    for n, (body, retries) in enumerate(requests):
        state, verdicts = observe_key(state, body, retries, BreakerPolicy().retries, NOON_MS + n * gap_ms)
    return state, verdicts


def bodies(count: int) -> list[bytes]:
    return [n.to_bytes(2, "big") for n in range(count)]


def test_a_key_amplifies_when_over_a_fifth_of_its_last_fifty_requests_are_retries() -> None:
    counted = [(body, int(n < 11)) for n, body in enumerate(bodies(50))]
    state, (verdict,) = after(counted)
    assert verdict == Verdict(
        Breaker.RETRIES,
        Mode.ALERT,
        tripped=True,
        fresh=True,
        episode=f"retries/trip/{NOON_MS // 3_600_000}",
        evidence={"retries": 11, "of": 50, "percent": 20},
        message="11 of the last 50 requests of this key were retries",
        retry_after_s=60,
    )
    assert state.retries == 11
    assert after([*counted[1:], (b"new", 0)])[1] == ()  # ten of fifty
    assert after([(body, 1) for body in bodies(49)])[1] == ()  # too few to tell
    assert after([*counted, (b"new", 0)])[1] == ()  # the oldest has left
    assert not after([*counted, (b"new", 1)])[1][0].fresh


def test_the_same_body_again_is_a_retry_whatever_the_client_counts() -> None:
    repeated = [body for body in bodies(40) for _ in range(1 + (body < b"\0\x0b"))]
    assert after([(body, 0) for body in repeated])[0].retries == 11
    assert after([(b"same", 0)] * 2, gap_ms=599_999)[0].retries == 1
    assert after([(b"same", 0)] * 2, gap_ms=600_000)[0].retries == 0


# --- policies and the watch --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: StepCap(most=0),
        lambda: WallClock(most_s=0),
        lambda: Repeats(stop=1),
        lambda: Repeats(stop=21),
        lambda: Repeats(stop=6, warn=7),
        lambda: Polling(gap_s=0),
        lambda: Errors(in_row=0),
        lambda: Errors(window=21),
        lambda: Errors(percent=101),
        lambda: Errors(probe_after_s=0),
        lambda: SpendSlope(limit_nano_usd_per_min=0),
        lambda: SpendSlope(times_own=1),
        lambda: SpendSlope(over_min=0),
        lambda: FanOut(concurrent=0),
        lambda: FanOut(depth=-1),
    ],
)  # fmt: skip
def test_numbers_that_mean_nothing_are_no_policy(make: object) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match="must|trip at"):
        make()


def test_a_policy_is_changed_as_people_write_it() -> None:
    changed = BreakerPolicy().changed(
        {
            "loop": "stop",
            "steps": {"mode": "stop", "most": 500},
            "polling": {"tools": ["watch"], "gap_s": 10},
            "spend_slope": {"times_own": None},
        }
    )
    assert changed == replace(
        BreakerPolicy(),
        loop=Repeats(Mode.STOP, stop=6, warn=3),
        steps=StepCap(Mode.STOP, 500),
        polling=Polling(frozenset({"watch"}), 10.0),
        spend_slope=SpendSlope(times_own=None),
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"loops": "stop"}, "there is no breaker 'loops'; there are steps, wall_clock, loop, ping_pong,"),
        ({"loop": {"at": 3}}, "loop has no at; it has mode, stop, warn"),
        ({"loop": "halt"}, "loop: Invalid enum value 'halt'"),
        ({"loop": {"stop": "six"}}, "loop: Expected `int`, got `str`"),
        ({"loop": {"stop": 1}}, "loop: repeats trip at 2 to 20, not at 1"),
        ({"loop": 3}, "loop must be a mode or a table, not 3"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_by_name(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        BreakerPolicy().changed(overrides)


def test_stopping_leaves_off_what_is_off() -> None:
    assert (STOPPING.steps.mode, STOPPING.loop, STOPPING.polling) == (
        Mode.OFF,
        Repeats(Mode.STOP, stop=6, warn=3),
        Polling(),
    )


def test_a_watch_keeps_tasks_apart_and_counts_what_is_under_way() -> None:
    watch = Watch()
    for n in range(8):
        assert watch.asked("a", Tail(), STOPPING, NOON_MS) == ()
        watch.began("a")
        assert watch.running("a") == n + 1
    assert [v.breaker for v in watch.asked("a", Tail(), STOPPING, NOON_MS)] == [Breaker.CONCURRENCY]
    assert watch.asked("b", Tail(), STOPPING, NOON_MS) == ()
    watch.ended("a", Ended(False, 1), STOPPING, NOON_MS)
    assert watch.asked("a", Tail(), STOPPING, NOON_MS) == ()


def test_a_watch_knows_how_deep_a_task_is() -> None:
    watch = Watch()
    for child, parent in (("b", "a"), ("c", "b"), ("d", "c")):
        assert watch.asked(child, Tail(), STOPPING, NOON_MS, parent_task_id=parent) == ()
    said = watch.asked("e", Tail(), STOPPING, NOON_MS, parent_task_id="d")
    assert [(v.breaker, v.evidence) for v in said] == [(Breaker.DEPTH, {"depth": 4, "most": 3})]
    for n in range(20):
        watch.asked(f"child{n}", Tail(), STOPPING, NOON_MS, parent_task_id="a")
    said = watch.asked("child20", Tail(), STOPPING, NOON_MS, parent_task_id="a")
    assert [v.breaker for v in said] == [Breaker.CHILDREN]


def test_a_watch_forgets_the_oldest_that_is_not_under_way() -> None:
    watch = Watch(tasks_max=2, keys_max=1)
    watch.began("a")
    for name in "bc":
        watch.asked(name, Tail(), STOPPING, NOON_MS)
    assert [watch.state(name) is not None for name in "abc"] == [True, False, True]
    for n in range(60):
        watch.key_asked("k1", n.to_bytes(2, "big"), 1, STOPPING, NOON_MS)
    assert watch.key_asked("k1", b"x", 1, STOPPING, NOON_MS) != ()
    watch.key_asked("k2", b"x", 0, STOPPING, NOON_MS)
    assert watch.key_asked("k1", b"x", 1, STOPPING, NOON_MS) == ()


def test_rules_can_ask_for_repeats_and_failures() -> None:
    watch = Watch()
    assert watch.signs("a", STOPPING) == Signs(0, 0)
    shown: list[Turn] = []
    seen = []
    for n, name in enumerate(("ls", "cat", "cat", "cat")):
        shown.append(turn(name, n, failed=n > 1))
        watch.asked("a", Tail(tuple(shown)), STOPPING, NOON_MS + n * 1_000)
        seen.append(watch.signs("a", STOPPING))
    assert seen == [Signs(1, 0), Signs(1, 0), Signs(2, 1), Signs(3, 2)]


def test_a_state_can_be_written_down_and_read_again() -> None:
    task = Task()
    task.do(*"aabab", failed=True)
    task.observe(Ended(True, 7))
    task.observe(Child("b"))
    state = msgspec.structs.replace(task.state, told=("x",))
    assert msgspec.json.decode(msgspec.json.encode(state), type=TaskState) == state
    key, _ = observe_key(KeyState(), b"body", 1, BreakerPolicy().retries, NOON_MS)
    assert msgspec.json.decode(msgspec.json.encode(key), type=KeyState) == key


def test_a_watch_lets_a_forgiven_task_go_on() -> None:
    watch = Watch()
    shown: list[Turn] = []
    for n in range(6):
        shown.append(turn("ls", n))
        said = watch.asked("a", Tail(tuple(shown)), STOPPING, NOON_MS + n * 1_000)
    assert [v.action for v in said] == [Mode.STOP]
    watch.forgive("a")
    watch.forgive("unknown")
    assert watch.asked("a", Tail(tuple(shown)), STOPPING, NOON_MS + 9_000) == ()
