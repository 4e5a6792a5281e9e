"""`tollhouse demo`: a simulated agent through a real gateway, and its ledger held against the provider's bill."""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gateway.app import App
from gateway.core.money import usd_text
from gateway.demo.agent import AgentReport, StepReport, run_agent
from gateway.demo.provider import DemoProvider
from gateway.demo.report import Comparison, LedgerLine, compare
from gateway.settings import Listen, Settings, ensure_pepper
from gateway.storage import reports, schema
from gateway.storage.accounts import Accounts

#: What a small hosted model takes: enough to see a stream, little enough not to wait for it.
FIRST_TOKEN_S = 0.03
CHUNK_S = 0.001


@dataclass(frozen=True, slots=True)
class Result:
    """One run, its ledger entries summed, and the comparison with the bill."""

    report: AgentReport
    sums: dict[str, int]
    comparison: Comparison

    def json(self) -> dict[str, object]:
        return {
            "steps": len(self.report.steps),
            "input_uncached": self.sums["input_uncached"],
            "cache_read": self.sums["cache_read"],
            "cache_write_5m": self.sums["cache_write_5m"],
            "cache_write_1h": self.sums["cache_write_1h"],
            "cache_write_12h": self.sums["cache_write_12h"],
            "output": self.sums["output"],
            "cost_nano_usd": self.sums["amount_nano_usd"],
            "uncached_cost_nano_usd": self.sums["list_cost_nano_usd"],
            "ledger_entries": self.comparison.entries,
            "bill_entries": self.comparison.bill_lines,
            "ledger_equals_bill": self.comparison.equal,
            "added_latency_ms_p50": self.added_ms[0],
            "added_latency_ms_max": self.added_ms[1],
            "task_id": self.report.task_id,
            "error": self.report.error,
        }

    @property
    def added_ms(self) -> tuple[float, float]:
        """(median, maximum) of the gateway's own time per step."""
        own = [s.overhead_ms for s in self.report.steps if s.overhead_ms is not None] or [0.0]
        return round(statistics.median(own), 3), round(max(own), 3)


async def demonstrate(settings: Settings, steps: int, json_out: bool) -> int:
    """Run it in a throw-away state directory. 0 if the run finished and ledger equals bill."""
    with tempfile.TemporaryDirectory(prefix="tollhouse-demo-") as directory:
        state = Path(directory)
        provider = DemoProvider(
            state / "provider",
            first_token_delay_s=FIRST_TOKEN_S,
            chunk_delay_s=CHUNK_S,
            on_disconnect="drain",
        )
        async with provider:
            here = dataclasses.replace(
                settings.with_demo_at(provider.base_url),
                listen=Listen("127.0.0.1", 0),
                admin_listen=Listen("127.0.0.1", 0),
                state_dir=state,
                database_url=f"sqlite:///{state / 'ledger.db'}",
            )
            result = await _run(here, provider, steps, json_out)
    if json_out:
        print(json.dumps(result.json()))
    else:
        _show(result)
    return 0 if result.comparison.equal and result.report.finished else 1


async def _run(settings: Settings, provider: DemoProvider, steps: int, quiet: bool) -> Result:
    await schema.migrate(settings.database_url)
    async with App(settings, replica_id="demo", access_log=False) as app:
        accounts = Accounts(app.database, actor="demo")
        await accounts.ensure_defaults()
        _, key = await accounts.create_key(pepper=ensure_pepper(settings), name="demo")
        with _progress(steps, quiet) as advance:
            report = await run_agent(app.base_url, key, steps=steps, on_step=advance)
        await app.quiet()
        await provider.settled()
        entries = await reports.entries(app.database, limit=1_000_000)
    lines = [LedgerLine.of(entry) for entry in entries]
    names = (
        "input_uncached",
        "cache_read",
        "cache_write_5m",
        "cache_write_1h",
        "cache_write_12h",
        "output",
        "amount_nano_usd",
        "list_cost_nano_usd",
    )
    sums = {name: sum(int(entry[name]) for entry in entries) for name in names}
    return Result(report, sums, compare(lines, provider.bill()))


@contextmanager
def _progress(steps: int, quiet: bool) -> Iterator[Callable[[StepReport], None]]:
    columns = (
        TextColumn("agent"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        task = progress.add_task("", total=steps)

        def advance(step: StepReport) -> None:
            what = step.tool or "answers"
            progress.update(task, advance=1, description=f"{what}, {step.latency_ms:.0f} ms")

        yield advance


def _show(result: Result) -> None:
    console = Console()
    sums, comparison = result.sums, result.comparison
    cost, listed = sums["amount_nano_usd"], sums["list_cost_nano_usd"]
    writes = sums["cache_write_5m"] + sums["cache_write_1h"] + sums["cache_write_12h"]
    saved = 100 * (listed - cost) / listed if listed else 0.0
    table = Table(
        title=f"One agent task of {len(result.report.steps)} steps (demo provider)", show_header=False
    )
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in (
        ("steps", str(len(result.report.steps))),
        ("input, uncached", f"{sums['input_uncached']:,} tokens"),
        ("input, read from cache", f"{sums['cache_read']:,} tokens"),
        ("input, written to cache", f"{writes:,} tokens"),
        ("output", f"{sums['output']:,} tokens"),
        ("cost", f"${usd_text(cost)}"),
        ("cost without caching", f"${usd_text(listed)}"),
        ("saved by caching", f"{saved:.1f} %"),
        ("added latency, median / max", f"{result.added_ms[0]:.2f} / {result.added_ms[1]:.2f} ms"),
        ("ledger entries / bill lines", f"{comparison.entries} / {comparison.bill_lines}"),
        ("ledger equals the provider's bill", "yes, entry by entry" if comparison.equal else "NO"),
    ):
        table.add_row(name, value)
    console.print(table)
    if result.report.error:
        console.print(f"the run ended early: {result.report.error}")
    for difference in comparison.differences[:10]:
        console.print(
            f"{difference.attempt_id} {difference.what}: ledger {difference.ledger}, bill {difference.bill}"
        )
