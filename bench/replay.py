"""Write bench/REPLAY.md: what the input of recorded runs costs without a cache, as sent, shaped, and at best.

Runs: the traces of ../shared/traces, and the sessions of ../shared/fixtures/clients with their placeholders filled up to
the size of the original text. Prices and cache rules are those of the release; nothing is sent anywhere. Exit status 1
if a promise is broken (see `PROMISES`).
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gateway import settings as config
from gateway.commands.output import console, dollars
from gateway.commands.replay import load_runs, theatre_of
from gateway.core.cache_rules import MARKERS
from gateway.core.catalog import Operation
from gateway.core.replay import Played, Run, Theatre, runs_of_captures
from gateway.core.replay_shapes import shape_at
from gateway.core.shaping import Level

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
OUT = ROOT / "bench" / "REPLAY.md"
#: Anthropic's models of today, and OpenAI's from GPT-5.6 on.
MODELS = (
    "anthropic/claude-fable-5-1",
    "anthropic/claude-opus-5-5",
    "anthropic/claude-opus-5",
    "anthropic/claude-sonnet-5-5",
    "anthropic/claude-sonnet-5",
    "anthropic/claude-haiku-5-5",
    "openai/gpt-6.1-sol",
    "openai/gpt-6-sol",
    "openai/gpt-5.6-sol",
)
GAP_MS = 15_000
#: Their second request is no turn: a compaction.
CLOCKED = ", with a clock"
NO_TURNS = ("claude-code/05-tui-turn",)
LONG_STEPS = 20
#: Captured sessions are two turns long: they are also played with so many, each with a result of so many characters.
PROLONGED_STEPS, TURN_CHARS = 30, 2_000
MOST_OF_UNCACHED, MOST_OF_BEST = 0.25, 1.10
#: Of a run whose system prompt changes with every step: what it takes to notice that.
MOST_OF_SENT = 1.02
PROMISES = (
    f"At `safe`, the input of a run of {LONG_STEPS} steps and more that passes the model's minimum costs at most "
    f"{MOST_OF_UNCACHED:.0%} of what it costs without a cache, and at most {MOST_OF_BEST - 1:.0%} above the best possible. "
    "`observe` is never dearer than going straight to the provider."
)
_PLACEHOLDER = re.compile(r"\[placeholder \w+ text, (\d+) chars, #(\w+)[^\]]*\]")
_WORDS = [
    "the",
    "a",
    "of",
    "to",
    "in",
    "file",
    "run",
    "test",
    "use",
    "not",
    "when",
    "each",
    "line",
    "must",
    "only",
    "return",
    "value",
    "call",
    "with",
    "set",
]


def main() -> int:
    if not SHARED.is_dir():
        print(f"{SHARED} is not there: nothing to replay", file=sys.stderr)
        return 2
    settings = config.load(config.shipped("config/gateway.yaml"), {})
    theatres = [theatre_of(settings, *name.split("/", 1)) for name in MODELS]
    played: list[Played] = []
    for theatre in theatres:
        traces = load_runs([SHARED / "traces"], theatre, GAP_MS / 1_000)
        runs = [*traces, *map(clocked, traces[-2:]), *sessions(theatre)]
        for run in runs:
            played += [
                theatre.play(run, level.value, shape_at(level, theatre.rule, run.name)) for level in Level
            ]
        console(stderr=True).print(f"{theatre.provider}/{theatre.model}: {len(runs)} runs")
    broken = list(broken_promises(played))
    OUT.write_text("\n".join(report(played, broken)), "utf-8")
    for line in broken:
        print(line, file=sys.stderr)
    return 1 if broken else 0


def clocked(run: Run) -> Run:
    """The same run by an agent that writes the time into the first line of its system prompt: no promise holds for it."""
    requests = []
    for step, request in enumerate(run.requests):
        body = json.loads(request.body)
        line = f"Current time: 2026-11-30 12:{step // 4:02d}:{step % 4 * 15:02d}\n"
        holder = body["system"][0] if "system" in body else body["messages"][0]
        name = "text" if "text" in holder else "content"
        holder[name] = line + holder[name]
        requests.append(replace(request, body=json.dumps(body).encode()))
    return Run(f"{run.name}{CLOCKED}", tuple(requests))


# --- the sessions of real clients ------------------------------------------------------------------------------


def sessions(theatre: Theatre) -> list[Run]:
    """Captured sessions whose dialect the provider speaks, by itself or in translation."""
    as_messages = theatre.provider == "anthropic"
    runs: list[Run] = []
    for folder in sorted((SHARED / "fixtures" / "clients").iterdir()):
        captures = [
            (f"{folder.name}/{path.stem}", filled(json.loads(path.read_text())))
            for path in sorted(folder.glob("*.json"))
        ]
        found = runs_of_captures(
            captures,
            model=theatre.model,
            as_messages=as_messages,
            start_ms=time.time_ns() // 1_000_000,
            gap_ms=GAP_MS,
        )
        runs += [run for run in found if _grows(run)]
    found = [
        run for run in runs if not (theatre.provider == "openai" and run.requests[0].operation.anthropic)
    ]
    return [*found, *(prolonged(run) for run in found if run.name not in NO_TURNS)]


def _grows(run: Run) -> bool:
    """Its second request says more than its first, and is no repetition of it."""
    if run.steps < 2:
        return False
    first, second = (json.loads(request.body) for request in run.requests[:2])
    name = "input" if run.requests[0].operation is Operation.RESPONSES else "messages"
    return len(second[name]) > len(first[name])


def prolonged(run: Run) -> Run:
    """The same session with `PROLONGED_STEPS`: each turn adds what the captured second one added, with a result of its
    own, and the client's markers stay with the latest turn, where it had put them.
    """
    first, second = (json.loads(request.body) for request in run.requests[:2])
    name = "input" if run.requests[0].operation is Operation.RESPONSES else "messages"
    opening, added = _unmarked(first[name]), second[name][len(first[name]) :]
    requests = [run.requests[0]]
    for step in range(1, PROLONGED_STEPS):
        turns = [_varied(added if n == step else _unmarked(added), n) for n in range(1, step + 1)]
        body = {**second, name: [*opening, *(message for turn in turns for message in turn)]}
        at_ms = run.requests[0].at_ms + step * GAP_MS
        requests.append(replace(run.requests[1], body=json.dumps(body).encode(), at_ms=at_ms))
    return Run(f"{run.name}, prolonged", tuple(requests))


def _unmarked(value: Any) -> Any:
    """Without markers; what was a list of one block of text only to carry one stays a list."""
    if isinstance(value, dict):
        return {k: _unmarked(v) for k, v in value.items() if k not in MARKERS}
    return [_unmarked(v) for v in value] if isinstance(value, list) else value


def _varied(value: Any, turn: int, name: str = "") -> Any:
    """Turn `turn` of a prolonged session: ids and texts of its own."""
    if isinstance(value, dict):
        return {k: _varied(v, turn, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_varied(v, turn, name) for v in value]
    if isinstance(value, str) and name in ("content", "text", "output"):
        return f"{value} {_words(f'{turn}', TURN_CHARS)}"
    return f"{value}-{turn}" if isinstance(value, str) and (name == "id" or name.endswith("_id")) else value


def filled(value: Any) -> Any:
    """With text as long as the original in the place of each placeholder, the same for the same original."""
    if isinstance(value, dict):
        return {name: filled(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [filled(inner) for inner in value]
    return _PLACEHOLDER.sub(_text, value) if isinstance(value, str) else value


def _text(found: re.Match[str]) -> str:
    return _words(found[2], int(found[1]))


def _words(seed: str, chars: int) -> str:
    words, text = random.Random(seed), ""
    while len(text) < chars:
        text += " ".join(words.choices(_WORDS, k=12)) + "\n"
    return text[:chars]


# --- the table -----------------------------------------------------------------------------------------------


def broken_promises(played: Sequence[Played]) -> Iterator[str]:
    for p in played:
        name = f"{p.provider}/{p.model} {p.run} {p.level}"
        if p.level == Level.OBSERVE and p.cost_nano_usd > p.as_sent_nano_usd:
            yield f"{name}: dearer than as sent"
        if p.run.endswith(CLOCKED):
            if p.level == Level.SAFE and p.cost_nano_usd > MOST_OF_SENT * p.as_sent_nano_usd:
                yield f"{name}: {p.cost_nano_usd / p.as_sent_nano_usd - 1:.1%} dearer than as sent"
            continue
        if p.level == Level.SAFE and p.steps >= LONG_STEPS and p.minimum_met:
            if p.cost_nano_usd > MOST_OF_UNCACHED * p.uncached_nano_usd:
                yield f"{name}: {p.cost_nano_usd / p.uncached_nano_usd:.0%} of uncached"
            if p.cost_nano_usd > MOST_OF_BEST * p.best_nano_usd:
                yield f"{name}: {p.cost_nano_usd / p.best_nano_usd - 1:.0%} above the best possible"


def report(played: Sequence[Played], broken: Sequence[str]) -> Iterator[str]:
    yield "# Replay: what the input of recorded runs costs"
    yield ""
    yield PROMISES
    yield ""
    yield "Written by `make bench-replay`, from the cache rules and prices of this release. Tokens are estimated from sizes;"
    yield f"{GAP_MS // 1_000} s between steps. Percents are of the cost without a cache; `best` reads every token that an earlier"
    yield "step of the run had and writes every new one once, without the provider's limits. `prolonged`: the captured second turn,"
    yield f"again and again with other text, {PROLONGED_STEPS} steps in all. `with a clock`: the time in the first line of the system"
    yield f"prompt, which only `relocate` can help; `safe` costs at most {MOST_OF_SENT - 1:.0%} more than as sent there."
    yield ""
    yield f"**{'All kept.' if not broken else f'{len(broken)} broken: ' + '; '.join(broken)}**"
    for model in dict.fromkeys((p.provider, p.model) for p in played):
        own = [p for p in played if (p.provider, p.model) == model]
        yield ""
        yield f"## {'/'.join(model)}"
        yield ""
        yield "| run | steps | input tokens | no cache | as sent | observe | safe | relocate | best |"
        yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
        for run in dict.fromkeys(p.run for p in own):
            yield _row([p for p in own if p.run == run])
    yield ""


def _row(levels: Sequence[Played]) -> str:
    first = levels[0]
    costs = [first.as_sent_nano_usd, *(p.cost_nano_usd for p in levels), first.best_nano_usd]
    shares = [f"{cost / first.uncached_nano_usd:.1%}" for cost in costs]
    uncached = dollars(round(first.uncached_nano_usd, -5))
    return f"| {first.run} | {first.steps} | {first.input_tokens:,} | {uncached} | {' | '.join(shares)} |"


if __name__ == "__main__":
    sys.exit(main())
