"""A short play of bench/gpu_routing.py: what is promised of routing holds, with predicted tokens."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.gpu_plot import plot
from bench.gpu_policies import NAMES, policy
from bench.gpu_prompts import BLOCK_TOKENS, agent_sessions, recorded, recorded_runs
from bench.gpu_replicas import Cache, Result, Simulation
from bench.gpu_routing import Row, broken

REPLICAS, KV_TOKENS, PREFILL_PER_S = 4, 150_000, 16_000.0


@pytest.mark.parametrize("per_s", [0.05, 0.12])
def test_ours_is_near_the_best_possible_far_above_hashing_and_no_slower_than_cache_aware(
    per_s: float,
) -> None:
    runs = agent_sessions(3, 12, per_s, tenants=6)

    def play(name: str) -> Result:
        picks = policy(name, REPLICAS, KV_TOKENS, PREFILL_PER_S, 0)
        return Simulation(runs, picks, REPLICAS, KV_TOKENS, PREFILL_PER_S).play()

    results = {name: play(name) for name in ("ours", "session_1.25", "cache_aware")}
    ours = results["ours"]
    assert len({r.requests for r in results.values()}) == 1
    assert ours.best_hit_rate - ours.hit_rate < 0.02
    assert ours.hit_rate - results["session_1.25"].hit_rate > 0.10
    assert ours.first_token_at(0.9) <= results["cache_aware"].first_token_at(0.9)


@pytest.mark.parametrize("name", NAMES)
def test_every_policy_plays_every_request(name: str) -> None:
    runs = agent_sessions(1, 3, 0.1)
    result = Simulation(runs, policy(name, 3, 50_000, PREFILL_PER_S, 0), 3, 50_000, PREFILL_PER_S).play()
    assert result.requests == sum(len(run.turns) for run in runs)
    assert 0 < result.hit_rate <= result.best_hit_rate < 1


def test_the_simulated_cache_holds_what_a_list_of_single_blocks_would_hold() -> None:
    runs = agent_sessions(5, 8, 0.1, tenants=2, system_tokens=2_000)
    capacity = 40_000 // BLOCK_TOKENS
    cache, simple = Cache(40_000), OrderedDict[int, None]()
    turns = sorted((n, i, turn) for i, run in enumerate(runs) for n, turn in enumerate(run.turns))
    for _, _, turn in turns:
        blocks = turn.blocks
        held = next((n for n, block in enumerate(blocks) if block not in simple), len(blocks))
        assert cache.match(blocks) == held
        cache.use(blocks)
        for block in reversed(blocks):
            simple[block] = None
            simple.move_to_end(block)
        while len(simple) > capacity:
            simple.popitem(last=False)


def test_a_recorded_trace_is_stretched_to_the_load_and_its_threads_are_found(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 1_536, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 0, "input_length": 1_536, "output_length": 5, "hash_ids": [0, 7, 8]},
        {"timestamp": 3000, "input_length": 2_048, "output_length": 5, "hash_ids": [0, 1, 2, 3]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, lines)))
    requests = recorded(trace, seed=1, limit=10)
    threads = {tuple(r.turn.blocks)[-1]: r.turn.thread for r in requests}
    assert sorted(threads.values()) == [0, 0, 1]
    runs = recorded_runs(requests, uncached_per_s=1_000.0, load=0.5)
    assert runs[-1].starts_s == pytest.approx((1_536 + 1_024 + 512) / 1_000 / 0.5)


def test_a_broken_promise_is_named_and_a_plot_is_svg() -> None:
    def row(name: str, hit: float, first_s: float) -> Row:
        return Row("agents", "light", name, 10, hit, 0.9, 0.1, first_s, 1.0)

    good = [row("ours", 0.89, 0.4), row("session_1.25", 0.7, 1.0), row("cache_aware", 0.85, 0.4)]
    assert broken(good) == []
    assert broken([row("ours", 0.79, 0.5), *good[1:]]) == [
        "agents, light load: 79.0% from the cache, 90.0% are possible",
        "agents, light load: 79.0% from the cache, hashing has 70.0%",
        "agents, light load: first token p90 0.50 s, cache_aware 0.40 s",
    ]
    drawn = ElementTree.fromstring(plot([vars_of(r) for r in good], NAMES))
    assert len(drawn.findall("{http://www.w3.org/2000/svg}circle")) == 6


def vars_of(row: Row) -> dict[str, object]:
    return {name: getattr(row, name) for name in Row.__slots__}
