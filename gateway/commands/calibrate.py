"""calibrate: how fast one idle replica reads, reads from its cache, and writes; kept, and used from the next start on."""

from __future__ import annotations

import asyncio
import difflib
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import aiohttp
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gateway.commands.opening import load_settings
from gateway.commands.output import OperatorError, console, print_json, print_table, say
from gateway.core.calibration import (
    Calibration,
    Point,
    Timed,
    Unmeasurable,
    calibration,
    point_of,
    sizes,
)
from gateway.core.catalog import Deployment, Operation, ReplicaKind, ReplicaSource, Wire
from gateway.core.replicas.scrape import Scrape, parse
from gateway.ports import Unanswered
from gateway.settings import Settings
from gateway.settings.calibration import keep
from gateway.upstream.discovery import Discovery
from gateway.upstream.replicas import HttpReplicas
from gateway.upstream.timed_calls import TimedCalls

_CALL_TIMEOUT_S = 600.0
_WARM_UP_CHARS = 8_000
#: Room for the template and the answer.
_SPARE_TOKENS = 512
#: Of the prompt tokens that the replica counts meanwhile, at most so many may be somebody else's.
_STRANGE_SHARE = 0.02
_WORDS = (
    "river",
    "stone",
    "window",
    "paper",
    "garden",
    "letter",
    "north",
    "copper",
    "winter",
    "signal",
    "harbor",
)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for on the command line. `replica` "" = the first one that is idle."""

    deployment: str
    replica: str = ""
    chunk_tokens: int = 8_192
    repeats: int = 3
    streams: int = 32
    output_tokens: int = 128
    kept: bool = True


@dataclass(frozen=True, slots=True)
class Found:
    address: str
    points: tuple[Point, ...]
    calibration: Calibration


def calibrate(path: Path | None, wanted: Wanted, as_json: bool) -> int:
    settings = load_settings(path)
    deployment = _deployment(settings, wanted.deployment)
    calls = wanted.repeats * (len(sizes(wanted.chunk_tokens)) + 1) + wanted.streams + 2
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), disable=as_json) as progress:
        bar = progress.add_task("looking for an idle replica", total=calls)

        def step(what: str) -> None:
            progress.update(bar, advance=1, description=what)

        found = asyncio.run(measure(settings, deployment, wanted, step))
    file = keep(settings.state_dir, deployment.name, found.calibration) if wanted.kept else None
    if as_json:
        print_json(_document(deployment, found, file))
    else:
        _print(deployment, found, wanted, file)
    return 0


def _deployment(settings: Settings, name: str) -> Deployment:
    known = {d.name: d for d in settings.catalog.deployments}
    by_model = settings.catalog.by_model.get(name, ())
    found = known.get(name) or (by_model[0] if len(by_model) == 1 else None)
    if found is None:
        near = difflib.get_close_matches(name, known, n=1)
        raise OperatorError(
            f"there is no deployment {name!r}",
            f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}",
        )
    if found.provider.wire is not Wire.OPENAI or not found.serves(Operation.CHAT):
        raise OperatorError(f"{found.name} is no server that speaks OpenAI's chat completions")
    if found.replicas is None and found.serving.gpu is None:
        raise OperatorError(
            f"{found.name} is not said to be a server of one's own",
            "calibrating a hosted model would only cost money; declare `replicas:` or `price: {gpu: ...}`",
        )
    return found


async def measure(
    settings: Settings, deployment: Deployment, wanted: Wanted, step: Callable[[str], None]
) -> Found:
    """Raises `OperatorError`."""
    if deployment.replicas is None:  # one endpoint is one replica
        urls = (deployment.provider.base_url,)
        deployment = replace(deployment, replicas=ReplicaSource(ReplicaKind.STATIC, urls=urls))
    most = deployment.context_tokens
    if most is not None and wanted.chunk_tokens + _SPARE_TOKENS > most:
        raise OperatorError(
            f"a chunk of {wanted.chunk_tokens} tokens does not fit the model's {most}", "--chunk-tokens"
        )
    secrets = {name: secret.reveal() for name, secret in settings.credentials.items()}
    replicas = HttpReplicas(secrets, Discovery(), lambda _address: None)
    await replicas.start()
    try:
        address, before = await _idle(replicas, deployment, wanted.replica)
        timeout = aiohttp.ClientTimeout(total=_CALL_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        secret = secrets.get(deployment.provider.credential, "")
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {secret}"} if secret else {}
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            calls = TimedCalls(http, address, deployment.upstream_model, headers, time.monotonic)
            run = _Run(calls, wanted, step)
            points, found = await run.all(deployment.upstream_model)
        _refuse_company(before, parse(await replicas.metrics(deployment, address)), run.prompt_tokens)
        return Found(address, points, found)
    except Unanswered as error:
        raise OperatorError(f"{deployment.name}: {error}") from error
    except Unmeasurable as error:
        raise OperatorError(f"{deployment.name}: {error}", "is another gateway using it?") from error
    finally:
        await replicas.stop()


async def _idle(replicas: HttpReplicas, deployment: Deployment, wanted: str) -> tuple[str, Scrape]:
    """A replica with nothing to do, and its metrics. Raises `OperatorError`, `Unanswered`."""
    addresses = await replicas.find(deployment)
    if wanted:
        addresses = tuple(a for a in addresses if wanted in (a, a.partition("://")[2].removesuffix("/v1")))
        if not addresses:
            raise OperatorError(
                f"{deployment.name} has no replica {wanted!r}", "`tollhouse replicas` lists them"
            )
    busy = []
    for address in addresses:
        try:
            seen = parse(await replicas.metrics(deployment, address))
        except Unanswered as error:
            busy.append(f"{address}: {error}")
            continue
        at_work = (seen.running or 0) + (seen.waiting or 0)
        if not at_work:
            return address, seen
        busy.append(f"{address} has {at_work} requests")
    hint = "drain one first: `tollhouse replicas drain`"
    raise OperatorError(f"no replica of {deployment.name} is idle: {'; '.join(busy)}", hint)


def _refuse_company(before: Scrape, after: Scrape, own_tokens: int) -> None:
    """Whoever else used the replica meanwhile has made it slower."""
    if before.prompt_tokens is None or after.prompt_tokens is None:
        return
    strange = after.prompt_tokens - before.prompt_tokens - own_tokens
    if strange > own_tokens * _STRANGE_SHARE:
        raise Unmeasurable(f"somebody else sent it {strange} tokens meanwhile, so nothing of this holds")


class _Run:
    """One measurement."""

    def __init__(self, calls: TimedCalls, wanted: Wanted, step: Callable[[str], None]) -> None:
        self._calls = calls
        self._wanted = wanted
        self._step = step
        self._random = random.SystemRandom()
        self.prompt_tokens = 0

    async def all(self, model: str) -> tuple[tuple[Point, ...], Calibration]:
        wanted = self._wanted
        self._step("warming up")
        _, first = await self._ask(self._text(_WARM_UP_CHARS), 1)
        chars_per_token = _WARM_UP_CHARS / max(1, first.prompt_tokens)
        points: list[Point] = []
        prompts: list[str] = []
        for tokens in sizes(wanted.chunk_tokens):
            answers = []
            prompts = [self._text(round(tokens * chars_per_token)) for _ in range(wanted.repeats)]
            for prompt in prompts:
                self._step(f"reading {tokens:,} tokens")
                answers.append((await self._ask(prompt, 1))[1])
            points.append(point_of(answers))
        again = []
        for prompt in prompts:
            self._step("reading them from its cache")
            again.append((await self._ask(prompt, 1))[1])
        self._step("writing alone")
        alone = await self._ask(self._text(200), wanted.output_tokens)
        together = await asyncio.gather(*(self._write() for _ in range(wanted.streams)))
        found = calibration(
            points, again, alone, together, upstream_model=model, now_ms=time.time_ns() // 1_000_000
        )
        return tuple(points), found

    async def _write(self) -> tuple[float, Timed]:
        answer = await self._ask(self._text(200), self._wanted.output_tokens)
        self._step(f"writing, {self._wanted.streams} at once")
        return answer

    async def _ask(self, prompt: str, output_tokens: int) -> tuple[float, Timed]:
        sent_s, timed = await self._calls.ask(prompt, output_tokens)
        self.prompt_tokens += timed.prompt_tokens
        return sent_s, timed

    def _text(self, chars: int) -> str:
        """Words in an order that nobody has sent before, from the first one on."""
        words = [f"{self._random.getrandbits(64):016x}", *self._random.choices(_WORDS, k=chars // 4 + 1)]
        return " ".join(words)[: max(16, chars)]


def _lines(found: Calibration) -> tuple[str, str]:
    """For the configuration: of `replicas`, and of `price.gpu`."""
    cached = (
        "" if found.cached_tokens_per_s is None else f"cached_tokens_per_s: {found.cached_tokens_per_s:.0f}, "
    )
    return (
        f"prefill_tokens_per_s: {found.prefill_tokens_per_s:.0f}",
        f"input_tokens_per_s: {found.prefill_tokens_per_s:.0f}, {cached}"
        f"output_tokens_per_s: {found.output_tokens_per_s:.0f}",
    )


def _document(deployment: Deployment, found: Found, file: Path | None) -> dict[str, object]:
    source, tau_tokens = deployment.replicas, None
    if source is not None:
        tau_tokens = found.calibration.tau_tokens(source.first_token_max_s)
    return {
        "deployment": deployment.name,
        "replica": found.address,
        "points": [{**asdict(p), "tokens_per_s": round(p.tokens_per_s, 1)} for p in found.points],
        **asdict(found.calibration),
        "tau_tokens": tau_tokens,
        "kept_in": None if file is None else str(file),
    }


def _print(deployment: Deployment, found: Found, wanted: Wanted, file: Path | None) -> None:
    print_table(
        ["prompt tokens>", "first token ms>", "tokens/s>"],
        [
            [f"{p.prompt_tokens:,}", f"{p.first_s * 1_000:,.1f}", f"{p.tokens_per_s:,.0f}"]
            for p in found.points
        ],
        title=f"{deployment.name} at {found.address}",
    )
    c, source = found.calibration, deployment.replicas
    cached = "does not say what it reads from its cache (--enable-prompt-tokens-details)"
    if c.cached_tokens_per_s is not None:
        cached = f"{c.cached_tokens_per_s:,.0f} tokens/s"
    rows = [
        ["R_peak", f"{c.prefill_tokens_per_s:,.0f} tokens/s", f"one chunk of {c.chunk_tokens:,} tokens"],
        ["cached", cached, "the same prompts again"],
        ["output", f"{c.output_tokens_per_s:,.0f} tokens/s", f"{wanted.streams} answers at once"],
        ["output alone", f"{c.single_output_tokens_per_s:,.0f} tokens/s", "one answer"],
    ]
    if source is not None:
        tau = c.tau_tokens(source.first_token_max_s)
        rows.append(["tau", f"{tau:,} tokens", f"R_peak x {source.first_token_max_s:g} s"])
    print_table(["", "measured", "of"], rows)
    if file is not None:
        say(f"Kept in {file}; used from the next start or reload of a gateway with this state directory on.")
    replicas, price = _lines(c)
    say(f"For a configuration, which goes before it and reaches every gateway:\n  {replicas}\n  {price}")
