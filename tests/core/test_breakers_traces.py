"""200 made-up runs and the recorded ones: who is stuck is stopped, who works or waits is not (test matrix, row 19)."""

from __future__ import annotations

from collections import Counter

import pytest

from gateway.core.breakers import Asked, Breaker, BreakerPolicy, Mode, TaskState, Verdict, observe
from gateway.core.dialects import Facts
from gateway.core.tail import tail
from tests.core.agent_traces import Trace, legitimate, requests, stuck
from tests.support.agent_runs import recorded_runs
from tests.support.material import SHARED

START_MS = 1_790_000_000_000
STOPPING = BreakerPolicy().stopping()


def first(action: Mode, asked: list[tuple[int, Facts]], policy: BreakerPolicy) -> tuple[int, Verdict] | None:
    """The first verdict of that action, and after how many steps."""
    state = TaskState()
    for steps, (at_ms, facts) in enumerate(asked):
        fact = Asked(tail(facts.operation, facts.segments))
        state, verdicts = observe(state, fact, policy, START_MS + at_ms)
        for verdict in verdicts:
            if verdict.action is action:
                return steps, verdict
    return None


def test_stuck_runs_are_stopped_by_their_sixth_step() -> None:
    traces = stuck()
    caught: Counter[str] = Counter()
    missed = []
    for trace in traces:
        stop = first(Mode.STOP, list(requests(trace)), STOPPING)
        assert trace.stuck_from is not None
        if stop is None or stop[0] - trace.stuck_from > 6:
            missed.append((trace.name, stop and (stop[0] - trace.stuck_from, stop[1].breaker)))
        else:
            caught[stop[1].breaker.value] += 1
    assert len(traces) == 100
    assert caught == {"loop": 62, "ping_pong": 25, "monologue": 10}
    # No two calls alike: only that none of them works tells, and that is said at the tenth.
    assert missed == [(f"other errors {n}", (10, Breaker.TOOL_ERRORS)) for n in range(3)]


def test_working_and_waiting_runs_are_not_stopped() -> None:
    traces = legitimate()
    stopped = {t.name: stop for t in traces if (stop := first(Mode.STOP, list(requests(t)), STOPPING))}
    assert (len(traces), stopped) == (100, {})


def test_by_default_nothing_is_stopped_and_stuck_runs_are_told_of() -> None:
    quiet = []
    for trace in stuck():
        asked = list(requests(trace))
        assert first(Mode.STOP, asked, BreakerPolicy()) is None
        if first(Mode.ALERT, asked, BreakerPolicy()) is None:
            quiet.append(trace.name)
    assert quiet == []


RUNS = recorded_runs()


@pytest.mark.parametrize(
    "runs", [RUNS], ids=["recorded" if RUNS else f"{SHARED}/traces is not there: no recorded runs"]
)
def test_of_the_recorded_runs_only_the_one_that_is_stuck_is_stopped(
    runs: dict[str, tuple[Facts, ...]],
) -> None:
    stops = {
        name: (stop[0], stop[1].breaker, stop[1].evidence["tools"])
        for name, facts in runs.items()
        if (stop := first(Mode.STOP, [(n * 8_000, f) for n, f in enumerate(facts)], STOPPING))
    }
    # This agent books with the same wrong amounts, thinks the same thought, and books again, to its end.
    expected = {"tau-airline-04": (29, Breaker.PING_PONG, "book_reservation, think")}
    assert stops == (expected if runs else {})


def test_traces_are_the_same_in_every_run() -> None:
    names = [trace.name for trace in (*stuck(), *legitimate())]
    assert len(set(names)) == 200
    assert [t.steps for t in stuck()] == [t.steps for t in stuck()]
    assert isinstance(legitimate()[0], Trace)
