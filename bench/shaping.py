"""CPU that shaping adds to a step of a run that is known: paired, the same requests with and without it.

    python bench/shaping.py            # writes SHAPING.md, exits 1 if a limit is passed

Each round builds the next step of each run (one answer and one tool result more), reads it and computes its chain as
every request is, and then times in turn, in random order, the body as it came and the body shaped, rendered both times.
The clock is the process's CPU time; the figure is the median of the differences.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gateway.core import dialects
from gateway.core.cache_rules import CacheRule
from gateway.core.catalog import Operation
from gateway.core.dialects import Edits, Facts
from gateway.core.prefix import chain
from gateway.core.shaping import Level, Request, Shaper
from gateway.settings import load, shipped

#: Bytes of a body, and the most that shaping may cost (microseconds).
LIMITS = {"1 KB": (1_000, 50), "400 KB": (400_000, 1_500), "2 MB": (2_000_000, 5_000)}
RESULT_BYTES = 1_900


def body(size: int, steps: int, clock: str) -> bytes:
    """A messages request of about `size` bytes after `steps` more turns."""
    result = "line of output\n" * (RESULT_BYTES // 15)
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Fix it. " * (120 if size < 2_000 else 1)}]
    for n in range(max(0, size - 80_000) // (RESULT_BYTES + 420) + (steps if size > 2_000 else 0)):
        use = {"type": "tool_use", "id": f"t{n}", "name": "t1", "input": {"path": f"src/{n}.py"}}
        done = {"type": "tool_result", "tool_use_id": f"t{n}", "content": f"{n}\n{result}"}
        turns += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [done]}]
    request: dict[str, Any] = {"model": "m", "max_tokens": 99}
    if size > 2_000:
        tools = [
            {"name": f"t{i}", "description": "d" * 900, "input_schema": {"type": "object"}} for i in range(12)
        ]
        rules = "\n".join(["Be careful.", f"It is {clock}.", *(f"Rule {n}: be brief." for n in range(700))])
        request |= {"tools": tools, "system": rules}
    return json.dumps({**request, "messages": turns}, separators=(",", ":")).encode()


def measure(size: int, level: Level, rule: CacheRule, rounds: int) -> tuple[int, float, float]:
    """(bytes, median microseconds that shaping adds, the same with a history that is seen for the first time)."""
    shaper, added, length = Shaper(), list[float](), 0
    for n in range(rounds + 2):
        clock = f"9:{10 + n % 50}" if level is Level.RELOCATE else "9:14"
        raw = body(size, n, clock)
        facts = dialects.read(Operation.MESSAGES, raw)
        links = chain(facts.segments)
        added.append(_paired(facts, raw, links, shaper, level, rule, n))
        length = len(raw)
    return length, statistics.median(added[2:]), added[0]


def _paired(
    facts: Facts, raw: bytes, links: tuple[bytes, ...], shaper: Shaper, level: Level, rule: CacheRule, n: int
) -> float:
    def plain() -> None:
        dialects.render(facts, raw, Edits(model="claude"))

    def shaped() -> None:
        request = Request(
            Operation.MESSAGES, facts, raw, links, ("key", "client", "run"), rule, level=level, now_s=20.0 * n
        )
        found = shaper.shape(request)
        dialects.render(facts, raw, Edits(model="claude", splices=found.splices, members=found.members))

    took: dict[Callable[[], None], int] = {}
    for act in random.sample([plain, shaped], 2):
        start = time.process_time_ns()
        act()
        took[act] = time.process_time_ns() - start
    return (took[shaped] - took[plain]) / 1_000


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--into", type=Path, default=Path(__file__).parent / "SHAPING.md")
    asked = parser.parse_args()
    rules = load(shipped("config/gateway.yaml"), {}).cache_rules
    rule = rules.find("anthropic/claude-opus-5", time.time_ns() // 1_000_000)
    assert rule is not None
    rows, over = [], False
    for name, (size, limit_us) in LIMITS.items():
        for level in Level:
            length, known_us, new_us = measure(size, level, rule, asked.rounds)
            over |= known_us > limit_us
            rows.append(f"| {name} | {level} | {length:,} | {known_us:,.0f} | {limit_us:,} | {new_us:,.0f} |")
            print(rows[-1], flush=True)
    head = (
        "# What shaping costs\n\nWritten by `python bench/shaping.py`: CPU microseconds added to one request, paired, "
        f"median of {asked.rounds}.\n\n| body | level | bytes | known run | limit | unknown run, once |\n"
        "|---|---|---|---|---|---|\n"
    )
    asked.into.write_text(head + "\n".join(rows) + "\n")
    return int(over)


if __name__ == "__main__":
    sys.exit(main())
