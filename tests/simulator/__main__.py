"""`make simulate SCHEDULES=n [SEED=s]`: n schedules from seed s on, on all cores. Exit code 1 if any fails.

A failing seed is played again with ever fewer operations, and what is left of it is printed with its trace.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.simulator.checker import Violation
from tests.simulator.play import Played, play, report

_CHUNK = 20
#: How many failing seeds are shown; the rest is counted.
_SHOWN = 3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulator", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--schedules", type=int, default=1_000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many at once")
    options = parser.parse_args(arguments)

    began_s = time.monotonic()
    last = options.seed + options.schedules
    chunks = [range(s, min(s + _CHUNK, last)) for s in range(options.seed, last, _CHUNK)]
    counts: Counter[str] = Counter()
    failed: list[tuple[int, list[Violation]]] = []
    with _progress() as progress:
        bar = progress.add_task("schedules", total=options.schedules, failed=0)
        for played in _played(chunks, options.processes):
            counts.update(played.counts)
            failed += played.failed
            progress.update(bar, advance=played.schedules, failed=len(failed))
    for seed, violations in sorted(failed)[:_SHOWN]:
        print(report(seed, violations), end="\n\n")
    if failed:
        print(f"failing seeds: {', '.join(str(seed) for seed, _ in sorted(failed))}")
    seconds = time.monotonic() - began_s
    print("what happened: " + ", ".join(f"{n:,} {name}" for name, n in sorted(counts.items())))
    print(f"{options.schedules / seconds:.1f} schedules/s on {options.processes} processes")
    violated = sum(len(violations) for _, violations in failed)
    print(f"{options.schedules} schedules, {violated} violations")
    return 1 if failed else 0


def _played(chunks: Sequence[range], processes: int) -> Iterator[Played]:
    if processes == 1 or len(chunks) == 1:
        yield from map(play, chunks)
        return
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(play, chunk) for chunk in chunks]):
            yield done.result()


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


if __name__ == "__main__":
    sys.exit(main())
