"""A short run of what `make simulate` runs at length, and what the simulator itself promises."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulator.__main__ import main
from tests.simulator.guards import TrustsLostCommits
from tests.simulator.schedule import BudgetPlan, Call, Ends, Schedule, schedule_of
from tests.simulator.shrink import shrink
from tests.simulator.world import Result, run

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_nothing_is_lost_doubled_or_overspent(first: int) -> None:
    failed = {
        seed: result.violations for seed in range(first, first + 50) if (result := play(seed)).violations
    }
    assert failed == {}


def play(seed: int) -> Result:
    return run(schedule_of(seed))


def test_a_seed_is_a_schedule_and_a_schedule_goes_one_way() -> None:
    """Also in another process, where texts have other hashes."""
    here = digest(range(40, 48))
    assert digest(range(40, 48)) == here
    code = "from tests.simulator.test_schedules import digest; print(digest(range(40, 48)))"
    there = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (there.stdout.strip(), there.stderr) == (here, "")


def digest(seeds: range) -> str:
    """Of all that happens."""
    traces = "\n".join(line for seed in seeds for line in run(schedule_of(seed), trace=True).trace)
    return hashlib.sha256(traces.encode()).hexdigest()


def test_what_can_happen_does_happen() -> None:
    """A simulator in which nothing goes wrong proves nothing."""
    seen = set()
    for seed in range(100, 180):
        seen |= {name for name, n in play(seed).counts.items() if n}
    assert seen >= {
        *("granted", "refused", "unavailable", "billed", "charged as lost", "corrected", "settled again"),
        *(
            "crash",
            "pause",
            "leap",
            "outage",
            "storm",
            "baddisk",
            "setlimit",
            "remove",
            "revoke",
            "key refused",
        ),
        *("interleaved", "waits for locks", "late commits", "lost answers"),
    }


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("n", [1, 32, 256, 1_000])
def test_of_a_herd_exactly_those_that_fit_are_admitted(n: int, replicas: int) -> None:
    fitting = min(n, 7)
    for seed in range(3):
        result = run(herd(seed, n, replicas))
        assert result.violations == []
        assert (result.counts["granted"], result.counts["refused"]) == (fitting, n - fitting)


def herd(seed: int, n: int, replicas: int) -> Schedule:
    """n calls at the same moment, against a budget for seven of them."""
    calls = [
        Call(
            at_s=0.5,
            number=i,
            replica=i % replicas,
            key=i % 3,
            task=i % 3,
            below=0,
            names_parent=True,
            most=100,
            least=100,
            share=1.0,
            ends=Ends.EXACT,
            takes_s=1.0,
            settles=False,
            leaves_after_s=None,
            asked_twice=False,
            again=(),
            proof_after_s=None,
            landing=False,
        )
        for i in range(n)
    ]
    return replace(
        schedule_of(seed),
        replicas=replicas,
        embedded=False,
        skews_ms=(0,) * replicas,
        budgets=(BudgetPlan("tenant:default", "usd", "lifetime", "UTC", 799, "error", "enforce"),),
        task_limit=None,
        team_task_limit=None,
        keys_checked=False,
        spread=1.0,
        ops=tuple(calls),
    )


def test_a_failing_schedule_shrinks_to_what_matters() -> None:
    def fails(schedule: Schedule) -> bool:
        return any(v.rule == "I2" for v in run(schedule, ledger=TrustsLostCommits).violations)

    whole = next(s for s in (schedule_of(seed, hostile=True) for seed in range(100)) if fails(s))
    small = shrink(whole, fails)

    assert fails(small)
    assert len(small.ops) <= 6 < len(whole.ops) // 4
    kinds = {type(op).__name__ for op in small.ops}
    assert kinds >= {"Storm", "Call"}  # an answer that is lost, and a call that it was for


def test_the_last_line_says_how_many_were_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--schedules", "3", "--seed", "7", "--processes", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "3 schedules, 0 violations"
