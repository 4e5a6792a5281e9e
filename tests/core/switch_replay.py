"""Agent runs replayed against two deployments with caches, under three policies: what each would have cost.

The bill here is written apart from `core.switching`: a cache holds a prefix until its life is over, what it holds is
read, the rest is written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random

from gateway.core.runs import Held, Runs, Thread, only_reads
from gateway.core.runs import Run as KnownRun
from gateway.core.switching import Side, Terms, turn_saving
from tests.support.material import SHARED

CHARS_PER_TOKEN = 4


@dataclass(frozen=True)
class Step:
    context: int  # tokens of the request
    output: int
    gap_s: float
    small: bool  # the rule wants the small tier for it


@dataclass(frozen=True)
class Pair:
    """Two deployments as their provider bills them: pico-dollars per token."""

    standard: Terms
    small: Terms


ANTHROPIC = Pair(
    Terms(3_000_000, 300_000, 3_750_000, 15_000_000), Terms(1_000_000, 100_000, 1_250_000, 5_000_000)
)
OPENAI = Pair(Terms(2_500_000, 250_000, 2_500_000, 10_000_000), Terms(250_000, 25_000, 250_000, 2_000_000))
#: Models that cost nearly the same: a switch hardly ever pays.
CLOSE = Pair(
    Terms(3_000_000, 300_000, 3_750_000, 15_000_000), Terms(2_500_000, 250_000, 3_125_000, 12_000_000)
)

Run = list[Step]
Policy = Callable[[str, Iterable[Step], Pair], Iterator[str]]


class Bill:
    def __init__(self, pair: Pair) -> None:
        self._terms = {"standard": pair.standard, "small": pair.small}
        self._held: dict[str, tuple[int, float]] = {}
        self.pico_usd = 0

    def charge(self, tier: str, step: Step, now_s: float) -> None:
        terms = self._terms[tier]
        tokens, until_s = self._held.get(tier, (0, 0.0))
        held = min(tokens, step.context) if now_s < until_s else 0
        self.pico_usd += held * terms.read + (step.context - held) * terms.write + step.output * terms.output
        self._held[tier] = (step.context, now_s + terms.life_s)


def cost(runs: Iterable[Run], pair: Pair, policy: Callable[[str, Run, Pair], list[str]]) -> float:
    """Dollars for all runs, one after the other, as one client's."""
    total = 0
    for n, run in enumerate(runs):
        bill, now_s = Bill(pair), 1_000.0
        for tier, step in zip(policy(f"task {n}", run, pair), run, strict=True):
            now_s += step.gap_s
            bill.charge(tier, step, now_s)
        total += bill.pico_usd
    return total / 1e12


def always_standard(_task: str, run: Run, _pair: Pair) -> list[str]:
    return ["standard"] * len(run)


def always_rule(_task: str, run: Run, _pair: Pair) -> list[str]:
    return ["small" if step.small else "standard" for step in run]


def guarded(runs: Runs) -> Callable[[str, Run, Pair], list[str]]:
    """What the gateway does: it knows of each step only what it knows then."""

    def decide(task: str, run: Run, pair: Pair) -> list[str]:
        chosen, now_s = [], 1_000.0
        for n, step in enumerate(run):
            now_s += step.gap_s
            known = runs.asked(task, "key/client", round(now_s * 1_000))
            thread = known.thread(b"main")
            tier = _choice(runs, known, thread, step, pair, now_s, n)
            terms = pair.small if tier == "small" else pair.standard
            thread.answered(
                tier,
                Held(step.context, now_s + terms.life_s, n + 1, b"%d" % n),
                step.context,
                step.context,
                step.output,
            )
            if thread.imagined is not None:
                runs.bills(known).observe(thread.imagined.answered(tier, step.context, step.output))
            chosen.append(tier)
        return chosen

    return decide


def _choice(runs: Runs, run: KnownRun, thread: Thread, step: Step, pair: Pair, now_s: float, n: int) -> str:
    wanted = "small" if step.small else "standard"
    thread.came(now_s)
    habit = runs.habit(run, thread, wanted)
    at = thread.home or "standard"
    if at == wanted and thread.imagined is None:
        return wanted
    chain = [b"%d" % i for i in range(n + 1)]
    sides = {
        tier: Side(terms, thread.warm(tier, chain))
        for tier, terms in (("standard", pair.standard), ("small", pair.small))
    }
    home, target = sides[at], sides[wanted]
    pace = thread.pace(step.context, habit, runs.remaining(run))
    cheaper = at != wanted and turn_saving(home.terms, target.terms, pace) > 0
    if thread.imagined is None and cheaper:
        thread.imagine(runs.bills(run), home.terms, at)
    if thread.imagined is not None:
        thread.imagined.asked((wanted,), target.terms, pace, now_s)
    if not cheaper:
        return wanted
    return wanted if thread.choose(home, target, pace, now_s, runs.bills(run)).goes else at


# --- runs ----------------------------------------------------------------------------------------------


def traces() -> list[Run]:
    """The recorded agent runs, none if `SHARED` is not there; a step after tools that only read may be small."""
    return [_trace(json.loads(path.read_text())) for path in sorted((SHARED / "traces").glob("*-*.json"))]


def _trace(doc: dict[str, list[dict[str, object]]]) -> Run:
    run: Run = []
    size = len(json.dumps(doc["tools"]))
    reading = False
    for message in doc["messages"]:
        length = len(json.dumps(message))
        if message["role"] == "assistant":
            run.append(Step(size // CHARS_PER_TOKEN, length // CHARS_PER_TOKEN, 8.0, reading))
            calls = message.get("tool_calls") or []
            assert isinstance(calls, list)
            reading = only_reads([call["function"]["name"] for call in calls])
        elif message["role"] == "user":
            reading = False
        size += length
    return run


def generated(
    seed: int,
    *,
    runs: int = 60,
    turns: tuple[int, int] = (5, 150),
    small_for: float = 6.0,
    standard_for: float = 6.0,
    start: tuple[int, int] = (4_000, 30_000),
    pauses: float = 0.0,
) -> list[Run]:
    """Longer runs: stretches of steps that may be small, between stretches that may not (lengths in steps, on
    average). `pauses`: share of steps before which everything goes cold."""
    random = Random(seed)
    made = []
    for _ in range(runs):
        context = random.randint(*start)
        small = random.random() < small_for / (small_for + standard_for)
        run = []
        for _ in range(random.randint(*turns)):
            gap_s = 900.0 if random.random() < pauses else random.uniform(2, 30)
            output = round(random.expovariate(1 / 350)) + 20
            run.append(Step(context, output, gap_s, small))
            context += output + round(random.expovariate(1 / 900)) + 50
            if random.random() < 1 / (small_for if small else standard_for):
                small = not small
        made.append(run)
    return made
