#!/usr/bin/env python3
"""Which replica? Ways of picking, played against simulated replicas; no speed of this machine takes part.

Workloads: a generator of agent sessions with twelve tenants' system prompts, the same with one, and the recorded traces
of ../shared/traces (left out, and said so, where they are not there). Writes bench/GPU.md with bench/GPU.svg; exit status
1 if a promise is broken. What picking costs on this machine is measured apart, at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.gpu_plot import plot
from bench.gpu_policies import NAMES, policy
from bench.gpu_prompts import BLOCK_TOKENS, Run, agent_sessions, mixed, recorded, recorded_runs
from bench.gpu_replicas import Result, Simulation
from gateway.core.replicas.chain import BLOCK_BYTES, Chain, links_of
from gateway.core.replicas.fleet import Fleet
from gateway.core.replicas.terms import Ask, End, EndKind, FleetPolicy

HERE = Path(__file__).resolve().parent
TRACES = HERE.parent.parent / "shared" / "traces"
REPLICAS, PREFILL_PER_S, SESSIONS = 4, 16_000.0, 60
LOADS = ("light", "medium", "overloaded")
#: Sessions a second, and tokens that one replica's cache holds.
AGENT_LOADS = {"light": (0.05, 300_000), "medium": (0.12, 300_000), "overloaded": (0.25, 150_000)}
#: Of the time that computing what no cache could save keeps all replicas busy, and tokens of a cache: these traces
#: need caches in host memory before there is anything to route for.
TRACE_LOADS = {"light": (0.25, 8_000_000), "medium": (0.5, 8_000_000), "overloaded": (1.2, 2_000_000)}
AGENTS = {"agents": 12, "agents of one tenant": 1}
RECORDED = {
    "mooncake conversation": "mooncake-conversation-3000.jsonl",
    "mooncake synthetic": "mooncake-synthetic.jsonl",
}
POOLED = "pooled"
TITLES = {**NAMES, POOLED: "one replica with the memory and speed of all"}
PROMISES = (
    "At light and medium load, ours reads within 2 points of the best possible from the cache, and at least 10 points "
    "more than bounded consistent hashing (c = 1.25), unless fewer than 12 are left to gain. The first token (p90) "
    "comes at least as soon as under cache_aware; where overloaded, where seeds differ by more than the two do, not "
    "more than 5% later."
)
POINTS_TO_BEST, POINTS_ABOVE_HASHING, LATER_OVERLOADED = 2.0, 10.0, 1.05
PICK_US_MAX = 100.0


@dataclass(frozen=True, slots=True)
class Row:
    """Means over the seeds. Rates are parts of all prompt tokens."""

    workload: str
    load: str
    policy: str
    requests: int
    hit_rate: float
    best_hit_rate: float  # of a cache without end that all replicas share
    first_token_p50_s: float
    first_token_p90_s: float
    busiest: float  # requests of the busiest replica over the mean


@dataclass(frozen=True, slots=True)
class Picking:
    """CPU on this machine, and memory by the fleet's own account."""

    replicas: int
    prompt_tokens: int
    pick_us: float  # median of rounds
    attempt_us: float  # picking, sending, first chunk and end together
    fleet_bytes: int


def main() -> int:
    ap = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    ap.add_argument("--policies", default=",".join(TITLES), help=f"of: {', '.join(TITLES)}")
    ap.add_argument("--loads", default=",".join(LOADS), help=f"of: {', '.join(LOADS)}")
    ap.add_argument(
        "--workloads", default=",".join((*AGENTS, *RECORDED)), help="of: %(default)s".replace("%", "%")
    )
    ap.add_argument("--seeds", type=int, default=2, help="runs of the generator that are averaged")
    ap.add_argument("--sessions", type=int, default=SESSIONS, help="of the generator")
    ap.add_argument("--traces", type=Path, default=TRACES, help="folder of the recorded traces")
    ap.add_argument("--json", action="store_true", help="rows as JSON; writes no file")
    ap.add_argument("--out", type=Path, default=HERE / "GPU.md")
    args = ap.parse_args()
    asked = {name: getattr(args, name).split(",") for name in ("policies", "loads", "workloads")}
    for name, known in (("policies", TITLES), ("loads", LOADS), ("workloads", (*AGENTS, *RECORDED))):
        if unknown := [each for each in asked[name] if each not in known]:
            ap.error(f"--{name}: {unknown[0]!r} is none of {', '.join(known)}")
    missing = [name for name, file in RECORDED.items() if not (args.traces / file).exists()]
    for name in missing:
        print(f"gpu_routing: {name} is left out: no {args.traces / RECORDED[name]}", file=sys.stderr)
    workloads = [name for name in asked["workloads"] if name not in missing]
    rows = list(played(workloads, asked["loads"], asked["policies"], args.seeds, args.sessions, args.traces))
    cost = picking()
    found = broken(rows)
    if args.json:
        print(
            json.dumps(
                {"rows": [asdict(r) for r in rows], "picking": asdict(cost), "broken": found}, indent=1
            )
        )
    else:
        text = report(rows, cost, found, missing, args.seeds)
        print(text)
        if rows:
            args.out.write_text(text)
            args.out.with_suffix(".svg").write_text(plot([asdict(r) for r in rows], TITLES))
    return 1 if found else 0


def played(
    workloads: Sequence[str],
    loads: Sequence[str],
    policies: Sequence[str],
    seeds: int,
    sessions: int,
    traces: Path,
) -> Iterator[Row]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    total = sum(len(loads) * len(policies) * (seeds if w in AGENTS else 1) for w in workloads)
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        for workload in workloads:
            for load in loads:
                runs, kv_tokens = prompts(workload, load, seeds, sessions, traces)
                for name in policies:
                    results = []
                    for seed, each in enumerate(runs):
                        progress.update(task, description=f"{workload}, {load}: {name}")
                        results.append(play(each, name, kv_tokens, seed))
                        progress.advance(task)
                    yield _row(workload, load, name, results)


def prompts(workload: str, load: str, seeds: int, sessions: int, traces: Path) -> tuple[list[list[Run]], int]:
    """The runs of each seed, and the tokens that one replica's cache holds."""
    if workload in AGENTS:
        per_s, kv_tokens = AGENT_LOADS[load]
        found = [agent_sessions(seed + 1, sessions, per_s, AGENTS[workload]) for seed in range(seeds)]
        return found, kv_tokens
    busy, kv_tokens = TRACE_LOADS[load]
    requests = recorded(traces / RECORDED[workload], seed=1, limit=4_000)
    return [recorded_runs(requests, REPLICAS * PREFILL_PER_S, busy)], kv_tokens


def play(runs: Sequence[Run], name: str, kv_tokens: int, seed: int) -> Result:
    if name == POOLED:
        one = policy("round_robin", 1, kv_tokens, PREFILL_PER_S, seed)
        return Simulation(runs, one, 1, kv_tokens * REPLICAS, PREFILL_PER_S * REPLICAS).play()
    picks = policy(name, REPLICAS, kv_tokens, PREFILL_PER_S, seed)
    return Simulation(runs, picks, REPLICAS, kv_tokens, PREFILL_PER_S).play()


def _row(workload: str, load: str, name: str, results: Sequence[Result]) -> Row:
    def mean(of: Callable[[Result], float]) -> float:
        return round(statistics.fmean(of(r) for r in results), 4)

    return Row(
        *(workload, load, name, sum(r.requests for r in results)),
        *(mean(lambda r: r.hit_rate), mean(lambda r: r.best_hit_rate)),
        *(mean(lambda r: r.first_token_at(0.5)), mean(lambda r: r.first_token_at(0.9))),
        mean(lambda r: r.most_of_fair_share),
    )


def broken(rows: Sequence[Row]) -> list[str]:
    """Which promises do not hold; of what was not played, nothing is said."""
    found = []
    by = {(r.workload, r.load, r.policy): r for r in rows}
    for (workload, load, name), ours in by.items():
        if name != "ours":
            continue
        where = f"{workload}, {load} load"
        hit, best = 100 * ours.hit_rate, 100 * ours.best_hit_rate
        if load != "overloaded" and best - hit > POINTS_TO_BEST:
            found.append(f"{where}: {hit:.1f}% from the cache, {best:.1f}% are possible")
        hashing = by.get((workload, load, "session_1.25"))
        if load != "overloaded" and hashing is not None:
            there = 100 * hashing.hit_rate
            gain = best - there >= POINTS_ABOVE_HASHING + POINTS_TO_BEST
            if gain and hit - there < POINTS_ABOVE_HASHING:
                found.append(f"{where}: {hit:.1f}% from the cache, hashing has {there:.1f}%")
        aware = by.get((workload, load, "cache_aware"))
        later = LATER_OVERLOADED if load == "overloaded" else 1.0
        if aware is not None and ours.first_token_p90_s > later * aware.first_token_p90_s:
            found.append(
                f"{where}: first token p90 {ours.first_token_p90_s:.2f} s, cache_aware {aware.first_token_p90_s:.2f} s"
            )
    return found


def picking(replicas: int = 32, prompt_tokens: int = 200_000, rounds: int = 15, each: int = 200) -> Picking:
    """Replicas that all hold one system prompt and twenty sessions, and one of them a long history that goes on."""
    fleet = Fleet(FleetPolicy())
    addresses = [f"10.0.0.{n}:8000" for n in range(replicas)]
    fleet.members(addresses, 0.0)
    system = bytes(mixed(n) & 0xFF for n in range(40_000))
    number = 0

    def attempt(ask: Ask, avoid: Sequence[str] = ()) -> None:
        nonlocal number
        number += 1
        pick = fleet.pick(ask, 0.0, 0.5, avoid)
        assert pick is not None, "one replica is always left"
        fleet.sent(str(number), ask, pick, 0.0)
        fleet.first_chunk(str(number), 0.0)
        usage = (ask.prompt_chars // 4, pick.predicted_cached_tokens, 300)
        fleet.ended(str(number), End(EndKind.OK, *usage), 0.0)

    for n, address in enumerate(addresses):
        others = [other for other in addresses if other != address]
        for session in range(20):
            text = system + b"%d/%d " % (n, session) * 4_000
            attempt(Ask(Chain(links_of(text, 1), len(text)), f"{n}/{session}"), others)
    chars = prompt_tokens * 4
    text = system + bytes(n * 7 % 251 for n in range(chars - len(system)))
    for size in range(chars // 2, chars, chars // 100):
        attempt(Ask(Chain(links_of(text[:size], 1), size), "long"), addresses[1:])
    ask = Ask(Chain(links_of(text, 1), chars), "long")
    assert len(ask.chain) == chars // BLOCK_BYTES, "every block has a link"

    def us(of: Callable[[], object]) -> float:
        took = []
        for _ in range(rounds):
            began = time.process_time_ns()
            for _ in range(each):
                of()
            took.append((time.process_time_ns() - began) / each / 1e3)
        return round(statistics.median(took), 1)

    pick_us = us(lambda: fleet.pick(ask, 0.0, 0.5))
    return Picking(replicas, prompt_tokens, pick_us, us(lambda: attempt(ask)), fleet.size_bytes)


def report(
    rows: Sequence[Row], cost: Picking, found: Sequence[str], missing: Sequence[str], seeds: int
) -> str:
    lines = [
        "# Picking a replica",
        "",
        PROMISES,
        "",
        "Written by `make bench-gpu`. A simulation, not a measurement: "
        f"{REPLICAS} replicas, prefill of {PREFILL_PER_S:,.0f} tokens/s each, first come first served, an LRU cache of "
        f"{BLOCK_TOKENS}-token blocks, decode beside it at 60 tokens/s. Agent workloads: {SESSIONS} sessions, mean of {seeds} "
        "seeds; their requests come when the one before has ended. Recorded traces come at their own times, stretched "
        "so that what no cache could save keeps the replicas busy for 25%, 50% and 120% of the time; caches of "
        "8,000,000 tokens a replica, 2,000,000 where overloaded. `ours` is the product's own `Fleet`, which sees bytes, "
        "first chunks and reported usage, never true tokens.",
        "",
        "**All kept.**" if not found else "**Broken:** " + "; ".join(found) + ".",
    ]
    lines += [f"Not played, for lack of the recording: {name}." for name in missing]
    lines += ["", "![hit rate and first token](GPU.svg)"]
    for workload in dict.fromkeys(r.workload for r in rows):
        mine = [r for r in rows if r.workload == workload]
        loads = list(dict.fromkeys(r.load for r in mine))
        best = ", ".join(
            f"{max(r.best_hit_rate for r in mine if r.load == load):.1%} ({load})" for load in loads
        )
        lines += [
            "",
            f"## {workload[0].upper()}{workload[1:]}",
            "",
            f"Hit rate / first token p90. Best possible hit rate, by a shared cache without end: {best}.",
            "",
            "| policy | " + " | ".join(loads) + " |",
            "|---|" + "---:|" * len(loads),
        ]
        for name in dict.fromkeys(r.policy for r in mine):
            cells = {r.load: r for r in mine if r.policy == name}
            shown = [f"{cells[x].hit_rate:.1%} / {cells[x].first_token_p90_s:.2f} s" for x in loads]
            title = f"**{TITLES[name]}**" if name == "ours" else TITLES[name]
            lines.append(f"| {title} | " + " | ".join(shown) + " |")
    verdict = "kept" if cost.pick_us < PICK_US_MAX else "broken"
    lines += [
        "",
        "## What picking costs",
        "",
        f"{cost.replicas} replicas, a known lineage of {cost.prompt_tokens:,} tokens: **{cost.pick_us:.0f} us** of CPU to "
        f"pick (limit {PICK_US_MAX:.0f} us: {verdict}), {cost.attempt_us:.0f} us with all that is done for the attempt "
        f"until its end. Indexes and memories of that fleet, 641 lineages: {cost.fleet_bytes / 1e6:.2f} MB.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
