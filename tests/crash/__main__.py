"""`make crash ROUNDS=n [SEED=s]`: n rounds of load and faults on three real gateways. Exit code 1 if any is wrong.

Ends with `n rounds: 0 lost, 0 doubled, 0 overspent`. A failing round is played again with each of its faults alone,
and the smallest that still fails is said with the command that plays it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import replace

from tests.crash.campaign import Played, play
from tests.crash.checker import Violation, Wrong
from tests.crash.plan import POINTS, Round, plan
from tests.crash.site import Site, site
from tests.support.servers import ServerMissing

_AGAIN = 2  # real processes do not repeat themselves exactly


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.crash", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=48, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--fault", type=int, help="only this one of each round's faults, counted from 0")
    parser.add_argument("--json", action="store_true", help="a JSON object instead of lines")
    options = parser.parse_args()
    try:
        return asyncio.run(_campaign(options))
    except ServerMissing as why:
        print(f"crash: {why}", file=sys.stderr)
        return 2


def only(todo: Round, fault: int) -> Round:
    return replace(todo, faults=todo.faults[fault : fault + 1])


async def _campaign(options: argparse.Namespace) -> int:
    began_s = time.monotonic()
    all_played: list[Played] = []
    async with site() as here:
        for seed in range(options.seed, options.seed + options.rounds):
            todo = plan(seed)
            if options.fault is not None:
                todo = only(todo, options.fault)
            if not options.json:
                away = "" if todo.stays_away is None else f"; gateway {todo.stays_away} stays away"
                print(f"seed {seed}: {'; '.join(map(str, todo.faults))}{away}", flush=True)
            played = await play(here, todo)
            all_played.append(played)
            if not options.json:
                _progress(len(all_played), options.rounds, played)
            if played.violations and len(todo.faults) > 1:
                await _shrink(here, todo)
    seconds = time.monotonic() - began_s
    print(
        json.dumps(_report(all_played, seconds), indent=2) if options.json else _summary(all_played, seconds)
    )
    counts = Counter(v.wrong for p in all_played for v in p.violations)
    if not options.json:
        print(f"{len(all_played)} rounds: " + ", ".join(f"{counts[wrong]} {wrong}" for wrong in Wrong))
    return 1 if counts else 0


def _progress(number: int, rounds: int, played: Played) -> None:
    statuses = ", ".join(f"{n} x {status}" for status, n in sorted(played.statuses.items()))
    print(
        f"  {number}/{rounds}: {statuses}, {played.cut} cut; {len(played.evidence.bill)} billed, "
        f"{len(played.evidence.ledger)} entries, {played.corrected} corrected at the end; "
        f"{len(played.violations)} violations",
        flush=True,
    )
    for violation in played.violations:
        print(f"  !! {violation}", flush=True)


async def _shrink(here: Site, todo: Round) -> None:
    """The first fault that is enough by itself, to standard error."""
    for number, fault in enumerate(todo.faults):
        for _ in range(_AGAIN):
            violations: list[Violation] = (await play(here, only(todo, number))).violations
            if violations:
                print(
                    f"  enough: {fault}\n  again: .venv/bin/python -m tests.crash --rounds 1 --seed {todo.seed} "
                    f"--fault {number}\n  {violations[0]}",
                    file=sys.stderr,
                    flush=True,
                )
                return
    print(
        f"  none of them alone; again: make crash ROUNDS=1 SEED={todo.seed}",
        file=sys.stderr,
        flush=True,
    )


def _reached(all_played: list[Played]) -> Counter[str]:
    return sum((p.reached for p in all_played), Counter[str]())


def _summary(all_played: list[Played], seconds: float) -> str:
    reached = _reached(all_played)
    points = ", ".join(f"{reached[point]} {point}" for point in POINTS)
    paused, apart = (f"{n} (of which {late} corrected later)" for n, late in _outlived(all_played))
    return (
        f"deaths at named points: {points}\n"
        f"charged while their gateway stood still: {paused}; while it was cut off from Postgres: {apart}\n"
        f"{seconds:.0f} s"
    )


def _outlived(all_played: list[Played]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Attempts that were charged while their gateway stood still, and while it was cut off; and how many were corrected."""
    return (
        (
            sum(len(p.charged_paused) for p in all_played),
            sum(p.late(p.charged_paused) for p in all_played),
        ),
        (sum(len(p.charged_apart) for p in all_played), sum(p.late(p.charged_apart) for p in all_played)),
    )


def _report(all_played: list[Played], seconds: float) -> dict[str, object]:
    counts = Counter(v.wrong for p in all_played for v in p.violations)
    return {
        "rounds": len(all_played),
        **{wrong: counts[wrong] for wrong in Wrong},
        "seconds": round(seconds, 1),
        "billed": sum(len(p.evidence.bill) for p in all_played),
        "entries": sum(len(p.evidence.ledger) for p in all_played),
        "charged_paused": sum(len(p.charged_paused) for p in all_played),
        "charged_apart": sum(len(p.charged_apart) for p in all_played),
        "deaths_at": {point: _reached(all_played)[point] for point in POINTS},
        "violations": [
            {"seed": p.round.seed, "faults": list(map(str, p.round.faults)), "violation": str(v)}
            for p in all_played
            for v in p.violations
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
