#!/usr/bin/env python3
"""Which replica? Ways of picking, played against simulated replicas; no speed of this machine takes part.

Workloads: a generator of agent sessions with twelve tenants' system prompts, the same with one, and the recorded traces
of ../shared/traces (left out, and said so, where they are not there). Writes bench/GPU.md with bench/GPU.svg; exit status
1 if a promise is broken. What picking costs on this machine is measured apart, at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.gpu_plot import plot
from bench.gpu_policies import NAMES, policy
from bench.gpu_prompts import BLOCK_TOKENS, Recorded, Run, agent_sessions, mixed, recorded, recorded_runs
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
#: The traces once more with smaller caches, at this load, and by these policies.
SIZES = (300_000, 500_000, 1_000_000, 2_000_000, 8_000_000)
SIZES_LOAD, SIZES_POLICIES = "medium", (POOLED, "session_1.25", "cache_aware", "ours")
PROMISES = (
    "At light and medium load, ours reads within 2 points of the best possible from the cache, and at least 10 points "
    "more than bounded consistent hashing (c = 1.25), unless the best possible itself is fewer than 12 points above it "
    "(*What there is to gain*, below). The first token (p90, mean of the seeds) comes at least as soon as under "
    "cache_aware, at every load."
)
POINTS_TO_BEST, POINTS_ABOVE_HASHING = 2.0, 10.0
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
    first_token_p90_by_seed_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Sized:
    """One play of a recorded trace with a cache of another size."""

    workload: str
    kv_tokens: int  # of one replica
    policy: str
    hit_rate: float
    first_token_p90_s: float


@dataclass(frozen=True, slots=True)
class Play:
    """What a worker is asked for. `kv_tokens` 0: the size that belongs to the load."""

    workload: str
    load: str
    policy: str
    seed: int
    sessions: int
    traces: Path
    kv_tokens: int = 0


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
    ap.add_argument("--seeds", type=int, default=10, help="runs of the generator that are averaged")
    ap.add_argument("--sessions", type=int, default=SESSIONS, help="of the generator")
    ap.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="that play at once")
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
    plays = [
        Play(workload, load, name, seed, args.sessions, args.traces)
        for workload in workloads
        for load in asked["loads"]
        for seed in range(args.seeds if workload in AGENTS else 1)
        for name in asked["policies"]
    ]
    plays += [
        Play(workload, SIZES_LOAD, name, 0, args.sessions, args.traces, kv_tokens)
        for workload in workloads
        if workload in RECORDED and SIZES_LOAD in asked["loads"]
        for kv_tokens in SIZES
        for name in SIZES_POLICIES
        if name in asked["policies"]
    ]
    results = dict(zip(plays, played(plays, args.processes), strict=True))
    rows, sized = rows_of(results)
    cost = picking()
    found = broken(rows)
    if args.json:
        print(
            json.dumps(
                {
                    "rows": [asdict(r) for r in rows],
                    "sizes": [asdict(r) for r in sized],
                    "picking": asdict(cost),
                    "broken": found,
                },
                indent=1,
            )
        )
    else:
        text = report(rows, sized, cost, found, missing, args.seeds)
        print(text)
        if rows:
            args.out.write_text(text)
            args.out.with_suffix(".svg").write_text(plot([asdict(r) for r in rows], TITLES))
    return 1 if found else 0


def played(plays: Sequence[Play], processes: int) -> Iterator[Result]:
    """In the order of `plays`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=Console(stderr=True)) as progress,
        ProcessPoolExecutor(max(1, processes)) as workers,
    ):
        task = progress.add_task("", total=len(plays))
        # Neighbours have the same prompts, which a worker makes once.
        for each, result in zip(plays, workers.map(played_one, plays, chunksize=len(TITLES)), strict=True):
            progress.update(task, description=f"{each.workload}, {each.load}: {each.policy}", advance=1)
            yield result


def played_one(asked: Play) -> Result:
    runs, kv_tokens = prompts(asked.workload, asked.load, asked.seed, asked.sessions, asked.traces)
    return play(runs, asked.policy, asked.kv_tokens or kv_tokens, asked.seed)


@lru_cache(maxsize=1)
def prompts(workload: str, load: str, seed: int, sessions: int, traces: Path) -> tuple[list[Run], int]:
    """The runs, and the tokens that one replica's cache holds."""
    if workload in AGENTS:
        per_s, kv_tokens = AGENT_LOADS[load]
        return agent_sessions(seed + 1, sessions, per_s, AGENTS[workload]), kv_tokens
    busy, kv_tokens = TRACE_LOADS[load]
    return recorded_runs(trace(traces / RECORDED[workload]), REPLICAS * PREFILL_PER_S, busy), kv_tokens


@lru_cache(maxsize=1)
def trace(path: Path) -> list[Recorded]:
    return recorded(path, seed=1, limit=4_000)


def play(runs: Sequence[Run], name: str, kv_tokens: int, seed: int) -> Result:
    if name == POOLED:
        one = policy("round_robin", 1, kv_tokens, PREFILL_PER_S, seed)
        return Simulation(runs, one, 1, kv_tokens * REPLICAS, PREFILL_PER_S * REPLICAS).play()
    picks = policy(name, REPLICAS, kv_tokens, PREFILL_PER_S, seed)
    return Simulation(runs, picks, REPLICAS, kv_tokens, PREFILL_PER_S).play()


def rows_of(results: Mapping[Play, Result]) -> tuple[list[Row], list[Sized]]:
    cells: dict[tuple[str, str, str], list[Result]] = {}
    sized = []
    for p, r in results.items():
        if p.kv_tokens:
            sized.append(
                Sized(
                    p.workload, p.kv_tokens, p.policy, round(r.hit_rate, 4), round(r.first_token_at(0.9), 4)
                )
            )
        else:
            cells.setdefault((p.workload, p.load, p.policy), []).append(r)
    return [_row(*cell, of) for cell, of in cells.items()], sized


def _row(workload: str, load: str, name: str, results: Sequence[Result]) -> Row:
    def mean(of: Callable[[Result], float]) -> float:
        return round(statistics.fmean(of(r) for r in results), 4)

    return Row(
        *(workload, load, name, sum(r.requests for r in results)),
        *(mean(lambda r: r.hit_rate), mean(lambda r: r.best_hit_rate)),
        *(mean(lambda r: r.first_token_at(0.5)), mean(lambda r: r.first_token_at(0.9))),
        mean(lambda r: r.most_of_fair_share),
        tuple(round(r.first_token_at(0.9), 4) for r in results),
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
        if aware is not None and ours.first_token_p90_s > aware.first_token_p90_s:
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
    rows: Sequence[Row],
    sized: Sequence[Sized],
    cost: Picking,
    found: Sequence[str],
    missing: Sequence[str],
    seeds: int,
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
    lines += against(rows) + sizes(sized)
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


def against(rows: Sequence[Row]) -> list[str]:
    """The two other ways that promises name, beside ours."""
    by = {(r.workload, r.load, r.policy): r for r in rows}
    gains, waits = [], []
    for (workload, load, name), ours in by.items():
        hashing, aware = (by.get((workload, load, other)) for other in ("session_1.25", "cache_aware"))
        if name != "ours":
            continue
        if hashing is not None and load != "overloaded":
            hit, there, best = (100 * x for x in (ours.hit_rate, hashing.hit_rate, ours.best_hit_rate))
            gains.append(
                f"| {workload}, {load} | {best:.1f} - {there:.1f} = **{best - there:.1f}** | "
                f"{hit:.1f} - {there:.1f} = **{hit - there:.1f}** | {best - hit:.1f} |"
            )
        if aware is not None:
            later = [
                mine - other
                for mine, other in zip(
                    ours.first_token_p90_by_seed_s, aware.first_token_p90_by_seed_s, strict=True
                )
            ]
            spread = f"{statistics.stdev(later) / len(later) ** 0.5:.2f} s" if len(later) > 1 else "one play"
            waits.append(
                f"| {workload}, {load} | {ours.first_token_p90_s:.2f} s | {aware.first_token_p90_s:.2f} s | "
                f"{statistics.fmean(later):+.2f} s | {spread} | {sum(x <= 0 for x in later)} of {len(later)} |"
            )
    lines = []
    if gains:
        lines += [
            "",
            "## What there is to gain",
            "",
            "Points of hit rate above bounded consistent hashing of the session (c = 1.25): what the best possible has, "
            "what ours has, and what ours leaves. No policy can be 10 points above where the best possible is not.",
            "",
            "| workload, load | best possible - hashing | ours - hashing | best possible - ours |",
            "|---|---:|---:|---:|",
            *gains,
        ]
    if waits:
        lines += [
            "",
            "## First token against cache_aware",
            "",
            "p90, mean of the seeds; the difference seed by seed, with its standard error, and the seeds in which ours is "
            "no later.",
            "",
            "| workload, load | ours | cache_aware | difference | standard error | no later |",
            "|---|---:|---:|---:|---:|---:|",
            *waits,
        ]
    return lines


def sizes(sized: Sequence[Sized]) -> list[str]:
    """The recorded traces by the size of a replica's cache; the best possible there is one shared cache of all."""
    lines = []
    for workload in dict.fromkeys(s.workload for s in sized):
        by = {(s.kv_tokens, s.policy): s for s in sized if s.workload == workload}
        lines += [
            "",
            f"## {workload[0].upper()}{workload[1:]} by size of a cache, {SIZES_LOAD} load",
            "",
            "Hit rate / first token p90. 300,000 tokens are what the agents above have, 500,000 what is taken for a server "
            "that does not tell; a million and more are in host memory. Possible is, here, what one replica with the "
            "memory of all reads.",
            "",
            "| tokens a replica | "
            + " | ".join(TITLES[p] for p in SIZES_POLICIES)
            + " | possible - hashing | ours - hashing |",
            "|---:|" + "---:|" * (len(SIZES_POLICIES) + 2),
        ]
        for kv_tokens in dict.fromkeys(size for size, _ in by):
            found = [by.get((kv_tokens, p)) for p in SIZES_POLICIES]
            if None in found:
                continue
            pooled, hashing, _, ours = (100 * s.hit_rate for s in found if s is not None)
            cells = " | ".join(
                f"{s.hit_rate:.1%} / {s.first_token_p90_s:.2f} s" for s in found if s is not None
            )
            lines.append(f"| {kv_tokens:,} | {cells} | {pooled - hashing:.1f} | {ours - hashing:.1f} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
