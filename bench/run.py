#!/usr/bin/env python3
"""Tollhouse against the yardsticks of ../shared/bench: `make bench`. Prints a table, writes bench/RESULTS.md.

Runs `compare` of that folder with our entries (contestants.toml) merged into its own, so that everybody is
measured by the same mock, load and rules: in turn, on one core, paired by round.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import results
from bench.contestant import KEY
from bench.machine import description
from bench.memory import idle_mb
from bench.postgres import NoPostgres, throwaway_postgres

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent / "shared" / "bench"
WORK = "A,B400,B2M,CI,D"
LOAD_CORE = 1


def main() -> int:
    args = _arguments()
    problem = _missing(args.shared)
    if problem:
        print(f"bench: {problem}", file=sys.stderr)
        return 2
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollhouse-bench-")))
        ours = [] if args.yardsticks_only else ["tollhouse", f"tollhouse{results.WITH_BUDGET}"]
        postgres: list[str] = []
        if ours and not args.no_postgres:
            cores = {LOAD_CORE} if (os.cpu_count() or 1) > 1 else None
            try:
                # One for each: a budget stays in a database.
                postgres = [stack.enter_context(throwaway_postgres(cores)) for _ in range(2)]
                ours += [f"tollhouse-postgres{end}" for end in ("", results.WITH_BUDGET)]
            except NoPostgres as why:
                print(f"bench: without tollhouse-postgres: {why}", file=sys.stderr)
        contestants = work / "contestants.toml"
        contestants.write_text(_merged(args.shared, postgres))
        raw = args.rows or work / "rows.jsonl"
        tables, status = _compare(
            args, contestants, [results.REFERENCE, results.DIRECT, *args.also, *ours], raw
        )
        rows = [json.loads(line) for line in raw.read_text().splitlines()] if raw.exists() else []
        idle = {"tollhouse": idle_mb(work / "idle")} if ours else {}
    return _report(args, rows, ours, idle, tables, status)


def _arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser(description="Compare tollhouse with the yardsticks of ../shared/bench.")
    ap.add_argument(
        "--shared", type=Path, default=SHARED, help="the folder with `compare` (default: ../shared/bench)"
    )
    ap.add_argument("--work", default=WORK, help=f"workloads, comma-separated (default: {WORK})")
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--seconds", type=float, default=4.0, help="of each run")
    ap.add_argument(
        "--also", default=[], type=lambda s: s.split(","), help="more contestants of ../shared/bench"
    )
    ap.add_argument("--no-postgres", action="store_true", help="SQLite only")
    ap.add_argument(
        "--yardsticks-only", action="store_true", help="leave tollhouse out: is this machine fit?"
    )
    ap.add_argument("--rows", type=Path, help="keep compare's raw rows here, one JSON object a line")
    ap.add_argument("--out", type=Path, default=HERE / "RESULTS.md")
    ap.add_argument("--json", action="store_true", help="print figures as JSON instead of the table")
    ap.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    return ap.parse_args()


def _missing(shared: Path) -> str:
    """Why this cannot run here, or ""."""
    if not (shared / "compare").is_file():
        return (
            f"{shared} is not there: the yardsticks (mock provider, load generator, contestants) live outside of "
            "this repository. Give their folder with --shared."
        )
    for program, package in (("gcc", "gcc"), ("make", "make")):
        if shutil.which(program) is None:
            return f"{program} is needed to build the mock and the load generator (apt-get install {package})"
    return ""


def _merged(shared: Path, postgres: Sequence[str]) -> str:
    """Their contestants and ours in one file; `compare` fills in what is left."""
    ours = (HERE / "contestants.toml").read_text()
    first, second = postgres or ("", "")
    values = {"bench": str(HERE), "key": KEY, "postgres": first, "postgres_budget": second}
    for name, value in values.items():
        ours = ours.replace(f"{{{name}}}", value)
    return (shared / "contestants.toml").read_text() + "\n" + ours


def _compare(args: argparse.Namespace, contestants: Path, names: Sequence[str], raw: Path) -> tuple[str, int]:
    """Run it; its tables go to standard error as they come, and are returned."""
    command = [sys.executable, str(args.shared / "compare"), "--contestants", str(contestants)]
    command += ["--only", ",".join(names), "--work", args.work, "--rounds", str(args.rounds)]
    command += ["--seconds", str(args.seconds), "--out", str(raw)]
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    ) as child:
        for line in child.stdout or ():
            lines.append(line)
            print(line, end="", file=sys.stderr, flush=True)
    return "".join(lines), child.returncode


def _report(
    args: argparse.Namespace,
    rows: Sequence[results.Row],
    ours: Sequence[str],
    idle: dict[str, float],
    tables: str,
    status: int,
) -> int:
    ran = {r["contestant"] for r in rows}
    left_out = [name for name in ours if name not in ran]
    found = [f for name in ours for f in results.figures(rows, name)]
    faults = {name: results.wrong(rows, name) for name in ours if name in ran}
    head = [
        f"Measured {datetime.now(UTC):%d %b %Y %H:%M} UTC on {description()}.",
        f"{args.rounds} rounds of {args.seconds:g} s; others used {_foreign(rows):.2f} cores meanwhile "
        "(above 0.2, trust ratios and CPU only).",
    ]
    notes = [
        f"{name}: {e} errors, {lost} upstream calls lost or extra (both must be 0)."
        for name, (e, lost) in faults.items()
    ]
    notes += [f"{name}: {mb:.0f} MB idle (target <= {results.IDLE_MB:.0f})." for name, mb in idle.items()]
    notes += [f"{name} did not take part: see the messages above." for name in left_out]
    text = "\n".join([*head, "", results.table(found), "", *(f"- {n}" for n in notes)])
    missed = status != 0 or bool(left_out) or not all(f.met for f in found)
    missed = (
        missed or any(sum(x) for x in faults.values()) or any(mb > results.IDLE_MB for mb in idle.values())
    )
    if ours and ran:
        args.out.write_text(f"# Results\n\n{text}\n\n## Tables of compare\n{tables}\n")
    print(json.dumps(_as_json(found, faults, idle), indent=2) if args.json else text)
    return 1 if status or (args.check and missed) else 0


def _foreign(rows: Sequence[results.Row]) -> float:
    return sum(r["foreign_cpu"] for r in rows) / len(rows) if rows else 0.0


def _as_json(
    found: Sequence[results.Figure], faults: dict[str, tuple[int, int]], idle: dict[str, float]
) -> dict[str, Any]:
    return {
        "figures": list(_flat(found)),
        "faults": {name: {"errors": e, "lost_or_extra": lost} for name, (e, lost) in faults.items()},
        "idle_mb": idle,
    }


def _flat(found: Sequence[results.Figure]) -> Iterator[dict[str, Any]]:
    for f in found:
        yield {
            "work": f.target.work,
            "contestant": f.contestant,
            "unit": f.target.unit,
            "value": f.value,
            "reference": f.reference,
            "score": f.score,
            "range": [f.lowest, f.highest],
            "target": f.most,
            "met": f.met,
        }


if __name__ == "__main__":
    sys.exit(main())
