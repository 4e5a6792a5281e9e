"""What the guard over warm caches costs, against "always standard" and "always as the rules say": a grid of prices x
ways to price a cache x kinds of runs. No speed is measured; the same seed gives the same figures everywhere.

    python -m bench.switching                       # 12 runs of each kind
    python -m bench.switching --runs 40 --seeds 7   # more runs: less of it is learning
    python -m bench.switching --json

A case is a number of runs of one kind, one after the other, at one pair of prices, by a process that knows nothing of
them at first. Its excess is what the guard's bill is over the lower one of both.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from gateway.core.runs import Runs
from gateway.core.switching import Terms
from tests.core.switch_replay import Pair, Run, always_rule, always_standard, cost, generated, guarded

STANDARD_PICO_USD = 3_000_000
#: Of output, over input.
OUTPUT = 5
#: The small tier's price over the standard one's.
RATIOS = (0.1, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
#: (read, write): what a cached token costs that is read, and one that is written, over one of plain input.
CACHES = ((0.02, 1.0), (0.1, 1.0), (0.1, 1.25), (0.25, 1.0), (0.5, 1.0), (0.1, 2.0))
#: Lengths of runs and stretches in turns, the start in tokens: see `tests.core.switch_replay.generated`.
KINDS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "short stretches": {"small_for": 2, "standard_for": 4},
    "alternating": {"small_for": 1.2, "standard_for": 1.2},
    "long stretches": {"small_for": 40, "standard_for": 20},
    "hardly ever small": {"small_for": 1.5, "standard_for": 30},
    "often small": {"small_for": 10, "standard_for": 2},
    "mostly small": {"small_for": 30, "standard_for": 1.2},
    "all small": {"small_for": 1e9, "standard_for": 0.5},
    "big histories": {"small_for": 4, "standard_for": 8, "start": (60_000, 180_000)},
    "big, alternating": {
        "small_for": 1.2,
        "standard_for": 1.2,
        "start": (60_000, 180_000),
        "turns": (20, 60),
    },
    "short runs": {"small_for": 2, "standard_for": 2, "turns": (1, 6)},
    "short runs, big": {"small_for": 2, "standard_for": 2, "turns": (1, 6), "start": (30_000, 120_000)},
    "with pauses": {"pauses": 0.1},
    "40 turns": {"small_for": 3, "standard_for": 3, "turns": (40, 40)},
    "2 to 200 turns": {"small_for": 8, "standard_for": 4, "turns": (2, 200)},
    "150, mostly small": {"small_for": 20, "standard_for": 1.5, "turns": (150, 150)},
    "300, mixed": {"turns": (300, 300)},
    "300, mostly small": {"small_for": 30, "standard_for": 1.2, "turns": (300, 300)},
}


@dataclass(frozen=True, slots=True)
class Case:
    kind: str
    seed: int
    ratio: float
    read: float
    write: float
    standard_usd: float
    rule_usd: float
    guard_usd: float

    @property
    def excess(self) -> float:
        return self.guard_usd / min(self.standard_usd, self.rule_usd) - 1.0


@dataclass(frozen=True, slots=True)
class Summary:
    cases: int
    over_2: int
    over_5: int
    worst: float
    mean: float
    below_both: int


def priced(ratio: float, read: float, write: float) -> Pair:
    def at(price: float) -> Terms:
        return Terms(*(round(price * each) for each in (1, read, write, OUTPUT)))

    return Pair(at(STANDARD_PICO_USD), at(ratio * STANDARD_PICO_USD))


def runs_of(kind: str, seed: int, runs: int) -> list[Run]:
    return generated(Random(f"{kind} {seed}").randrange(2**32), runs=runs, **KINDS[kind])


def cases(job: tuple[str, int, int, float]) -> list[Case]:
    kind, seed, count, ratio = job
    runs, found = runs_of(kind, seed, count), []
    for read, write in CACHES:
        pair = priced(ratio, read, write)
        bills = [cost(runs, pair, policy) for policy in (always_standard, always_rule, guarded(Runs()))]
        found.append(Case(kind, seed, ratio, read, write, *bills))
    return found


def summary(found: Sequence[Case]) -> Summary:
    excess = [case.excess for case in found]
    return Summary(
        len(found),
        sum(e > 0.02 for e in excess),
        sum(e > 0.05 for e in excess),
        max(excess),
        sum(excess) / len(excess),
        sum(e < 0 for e in excess),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=12, help="of each kind (default 12)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    jobs = [
        (kind, seed, asked.runs, ratio) for kind in asked.kinds for seed in asked.seeds for ratio in RATIOS
    ]
    with multiprocessing.Pool(asked.processes) as pool:
        found = [case for each in pool.imap_unordered(cases, jobs) for case in each]
    found.sort(key=lambda case: -case.excess)
    by_kind = {kind: summary([case for case in found if case.kind == kind]) for kind in asked.kinds}
    whole = summary(found)
    if asked.json:
        doc = {
            "runs": asked.runs,
            "seeds": asked.seeds,
            "all": asdict(whole),
            "kinds": {kind: asdict(each) for kind, each in by_kind.items()},
            "worst": [asdict(case) | {"excess": case.excess} for case in found[:20]],
        }
        print(json.dumps(doc, indent=1))
        return
    print(f"{asked.runs} runs of each kind, seeds {' '.join(map(str, asked.seeds))}")
    print(f"{'kind':<20}{'cases':>7}{'> 2 %':>7}{'> 5 %':>7}{'worst':>9}{'mean':>9}{'below both':>12}")
    for kind, each in [*by_kind.items(), ("all", whole)]:
        print(
            f"{kind:<20}{each.cases:>7}{each.over_2:>7}{each.over_5:>7}{each.worst:>9.1%}{each.mean:>9.2%}"
            f"{each.below_both:>12}"
        )
    print("\nworst")
    for case in found[:8]:
        print(f"  {case.excess:6.1%}  {case.kind}, {case.ratio} of the price, cache {case.read}/{case.write}")


if __name__ == "__main__":
    main()
