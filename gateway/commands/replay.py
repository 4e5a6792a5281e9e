"""replay: recorded runs against a provider's cache rules: without a cache, as sent, shaped, at best."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gateway.commands.opening import load_settings
from gateway.commands.output import OperatorError, console, dollars, print_json, print_table, say
from gateway.commands.replay_plot import bars, svg
from gateway.core.cache_rules import Style
from gateway.core.catalog import Operation
from gateway.core.errors import InvalidRequest
from gateway.core.replay import (
    RECORDING_BYTES_MAX,
    NotARun,
    Played,
    Run,
    Theatre,
    run_of,
    runs_of_captures,
)
from gateway.core.replay_shapes import shape_at
from gateway.core.shaping import Level
from gateway.settings import Settings

GAP_S = 15.0
#: What the bars and columns of a run are called, and the field that holds each.
_AS_SENT = (("no cache", "uncached_nano_usd"), ("as sent", "as_sent_nano_usd"))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked of a replay. No model = the provider's first one; no levels = all."""

    runs: Sequence[Path]
    provider: str
    model: str | None = None
    levels: tuple[Level, ...] = ()
    gap_s: float = GAP_S
    svg: Path | None = None


def replay(config: Path | None, wanted: Wanted, as_json: bool) -> int:
    theatre = theatre_of(load_settings(config), wanted.provider, wanted.model)
    levels = wanted.levels or tuple(Level)
    runs = load_runs(wanted.runs, theatre, wanted.gap_s)
    played: list[Played] = []
    with _progress() as progress:
        task = progress.add_task("replaying", total=sum(run.steps for run in runs) * (1 + len(levels)))
        step = partial(progress.advance, task)
        for run in runs:
            try:
                direct = theatre.direct(run, step)
                for level in levels:
                    shape = shape_at(level, theatre.rule, run.name)
                    played.append(theatre.play(run, level.value, shape, direct, step))
            except (NotARun, InvalidRequest) as e:
                raise OperatorError(f"{run.name}: {e}") from e
    if wanted.svg is not None:
        wanted.svg.write_text(svg(_title(theatre), [_amounts(group) for group in _by_run(played)]), "utf-8")
    if as_json:
        print_json([asdict(p) for p in played])
    else:
        _print(theatre, played)
    return 0


def theatre_of(settings: Settings, provider: str, model: str | None) -> Theatre:
    """Raises `OperatorError` for what has no price or no cache rule."""
    now_ms = time.time_ns() // 1_000_000
    names = [p.removeprefix(f"{provider}/") for p in settings.prices.by_price if p.startswith(f"{provider}/")]
    if not names:
        known = sorted({p.partition("/")[0] for p in settings.prices.by_price})
        raise OperatorError(
            f"there is no provider {provider!r} in the price list", f"known: {', '.join(known)}"
        )
    name = model or names[0]
    row = settings.prices.find(f"{provider}/{name}", now_ms)
    if row is None:
        raise OperatorError(
            f"{provider} has no model {name!r} in the price list", f"known: {', '.join(names)}"
        )
    rule = settings.cache_rules.find(f"{provider}/{name}", now_ms)
    if rule is None:
        raise OperatorError(
            f"nothing is known about how {provider}/{name} caches", "see config/providers.yaml"
        )
    return Theatre(provider, name, rule, row)


# --- recordings --------------------------------------------------------------------------------------------


def load_runs(paths: Sequence[Path], theatre: Theatre, gap_s: float = GAP_S) -> list[Run]:
    """All runs in these files and folders. In a folder, what is no recording is passed over."""
    rule = theatre.rule
    as_messages = rule.style is Style.EXPLICIT and Operation.MESSAGES in rule.markers
    start_ms, gap_ms = time.time_ns() // 1_000_000, round(gap_s * 1_000)
    runs: list[Run] = []
    captures: dict[Path, list[tuple[str, dict[str, Any]]]] = defaultdict(list)
    for path, must in _files(paths):
        try:
            recording = _read(path)
            if isinstance(recording.get("request"), dict):
                captures[path.parent].append((f"{path.parent.name}/{path.stem}", recording))
                continue
            runs.append(
                run_of(
                    path.stem,
                    recording,
                    model=theatre.model,
                    as_messages=as_messages,
                    start_ms=start_ms,
                    gap_ms=gap_ms,
                )
            )
        except NotARun as e:
            if must:
                raise OperatorError(f"{path}: {e}", "a run is {tools, messages} or {requests}") from e
    for folder, found in captures.items():
        try:
            runs += runs_of_captures(
                found, model=theatre.model, as_messages=as_messages, start_ms=start_ms, gap_ms=gap_ms
            )
        except NotARun as e:
            raise OperatorError(f"{folder}: {e}") from e
    if not runs:
        raise OperatorError("there is no recorded run", "give files or folders of JSON: {tools, messages}")
    return runs


def _files(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Each file, and whether it was named itself."""
    for path in paths:
        if path.is_dir():
            for file in sorted(path.rglob("*.json")):
                yield file, False
        elif path.exists():
            yield path, True
        else:
            raise OperatorError(f"there is no {path}")


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > RECORDING_BYTES_MAX:
            raise NotARun(f"it is larger than {RECORDING_BYTES_MAX >> 20} MB")
        recording = json.loads(path.read_bytes())
    except OSError as e:
        raise OperatorError(f"{path}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise NotARun(f"it is not JSON: {e}") from e
    if not isinstance(recording, dict):
        raise NotARun("it is no object")
    return recording


# --- what is shown ---------------------------------------------------------------------------------------------


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console(stderr=True), transient=True)


def _by_run(played: Sequence[Played]) -> list[list[Played]]:
    """The levels of each run."""
    groups: dict[int, list[Played]] = {}
    number, seen = 0, set[str]()
    for p in played:
        if p.level in seen:
            number, seen = number + 1, set()
        seen.add(p.level)
        groups.setdefault(number, []).append(p)
    return list(groups.values())


def _amounts(group: Sequence[Played]) -> tuple[str, list[tuple[str, int]]]:
    """A run's name, and what it costs in each way."""
    first = group[0]
    amounts = [(name, getattr(first, attribute)) for name, attribute in _AS_SENT]
    amounts += [(p.level, p.cost_nano_usd) for p in group]
    return first.run, [*amounts, ("best", first.best_nano_usd)]


def _print(theatre: Theatre, played: Sequence[Played]) -> None:
    groups = _by_run(played)
    names = [name for name, _ in _amounts(groups[0])[1]]
    rows = []
    for group in groups:
        run, amounts = _amounts(group)
        uncached = amounts[0][1]
        cells = [_cell(amount, uncached) for _, amount in amounts]
        rows.append([run, f"{group[0].steps:,}", f"{group[0].input_tokens:,}", *cells])
    totals = [(name, sum(_amounts(g)[1][i][1] for g in groups)) for i, name in enumerate(names)]
    if len(groups) > 1:
        steps, tokens = (sum(getattr(g[0], field) for g in groups) for field in ("steps", "input_tokens"))
        rows.append(["all", f"{steps:,}", f"{tokens:,}", *(_cell(n, totals[0][1]) for _, n in totals)])
    print_table(
        ["run", "steps>", "input tokens>", *(f"{name}>" for name in names)], rows, title=_title(theatre)
    )
    for line in bars(totals):
        say(line)
    say("")
    say(
        "Input only, tokens estimated from sizes; best = every token shared with an earlier step read, each new one"
    )
    say("written once, without the provider's limits.")


def _cell(amount: int, uncached: int) -> str:
    share = f" {100 * amount / uncached:3.0f}%" if uncached else ""
    return dollars(round(amount, -3)) + share


def _title(theatre: Theatre) -> str:
    return f"cost of input on {theatre.provider}/{theatre.model}"
