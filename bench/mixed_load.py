#!/usr/bin/env python3
"""Mixed traffic with seeded faults, then the ledger against the provider's bill, entry by entry.

Starts a demo provider that bills and fails by seed, a gateway (SQLite and one process, or Postgres and three), and
clients of which some hang up. When nothing is held any more, every attempt must have exactly one terminal entry, an
entry called exact must equal the bill to the token and the nano-dollar, and one charged at its bound must not be below
it. Exit status 0 if all of that holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from bench.gateway_under_test import Gateway, start_gateway
from bench.mixed_requests import Tally, calls, send_all
from bench.postgres import throwaway_postgres
from gateway.demo.bill import BillLine
from gateway.demo.faults import FaultKind, FaultPlan
from gateway.demo.provider import DemoProvider
from gateway.demo.report import Comparison, LedgerLine, compare
from gateway.storage import reports
from gateway.storage.database import Database, open_database
from gateway.storage.transact import Fetch, Sql, Tx

SETTLE_S = 90.0
#: Longer than two passes of the gateway's reconciliation.
RECONCILED_S = 40.0
#: Share of upstream calls that fail in each of these ways: about one in four in all.
FAULTS = {
    FaultKind.REFUSE: 0.06,
    FaultKind.HTML_502: 0.01,
    FaultKind.EMPTY_200: 0.01,
    FaultKind.ERROR_IN_200: 0.02,
    FaultKind.CLOSE: 0.03,
    FaultKind.TRUNCATED_JSON: 0.02,
    FaultKind.CUT: 0.04,
    FaultKind.ERROR_EVENT: 0.02,
    FaultKind.USAGE_MISSING: 0.02,
    FaultKind.USAGE_TWICE: 0.01,
    FaultKind.USAGE_NEGATIVE: 0.01,
    FaultKind.USAGE_HUGE: 0.01,
    FaultKind.COMMENTS: 0.01,
    FaultKind.CRLF: 0.01,
}
_HELD = Sql("SELECT count(*) FROM hold WHERE state = 'held'")
_PAGE = 5_000


@dataclass(frozen=True, slots=True)
class Books:
    """The ledger when nothing was held any more, or when waiting for that was given up."""

    entries: list[dict[str, Any]]
    still_held: int
    drifting: int  # budget windows whose totals are not the sums of their entries and holds


@dataclass(frozen=True, slots=True)
class Verdict:
    """Attempts by how well they are known, and what is wrong. Nano-dollars."""

    comparison: Comparison
    attempts: Counter[str]  # by quality
    differing: Counter[str]  # attempts that differ from the bill, by quality
    wrong_entries: int  # attempts without exactly one terminal entry, or billed more than once
    exact_but_different: int
    bound_below_bill: int
    still_held: int
    drifting_budgets: int
    estimates_below_nano_usd: (
        int  # what the bill has more, over estimated attempts: no mistake, but no comfort
    )
    told: list[str]  # one line per attempt that differs, the wrong ones first

    @property
    def good(self) -> bool:
        return not (
            self.wrong_entries
            or self.exact_but_different
            or self.bound_below_bill
            or self.still_held
            or self.drifting_budgets
        )


def judge(books: Books, bill: list[BillLine]) -> Verdict:
    """Every attempt of ledger and bill. An attempt's quality is that of its latest entry: a `correct` improves it."""
    rows = books.entries
    comparison = compare([LedgerLine.of(row) for row in rows], bill)
    quality = {
        row["attempt_id"]: row["quality"] for row in sorted(rows, key=lambda r: bool(r["kind"] == "correct"))
    }
    differing = {d.attempt_id for d in comparison.differences}
    below = {
        d.attempt_id
        for d in comparison.differences
        if d.what == "cost_nano_usd" and d.ledger < d.bill and quality.get(d.attempt_id) == "unknown"
    }
    by_quality = Counter(quality.get(a, "no entry") for a in differing)
    return Verdict(
        comparison,
        Counter(quality.values()),
        by_quality,
        sum(1 for d in comparison.differences if d.what == "entries"),
        by_quality["exact"],
        len(below),
        books.still_held,
        books.drifting,
        sum(
            d.bill - d.ledger
            for d in comparison.differences
            if d.what == "cost_nano_usd" and d.ledger < d.bill and quality.get(d.attempt_id) == "estimated"
        ),
        _told(comparison, rows, bill),
    )


def _told(comparison: Comparison, rows: list[dict[str, Any]], bill: list[BillLine]) -> list[str]:
    entries = {row["attempt_id"]: row for row in rows if row["kind"] != "correct"}
    lines = {line.client_request_id: line for line in bill}
    what: dict[str, list[str]] = {}
    for d in comparison.differences:
        what.setdefault(d.attempt_id, []).append(f"{d.what} {d.ledger}, billed {d.bill}")
    told = []
    for attempt_id, differences in what.items():
        e, b = entries.get(attempt_id), lines.get(attempt_id)
        ours = (
            "no entry"
            if e is None
            else " ".join(str(e[k]) for k in ("quality", "kind", "finish", "error", "note"))
        )
        theirs = (
            "no bill line"
            if b is None
            else f"{b.operation} {b.status} {b.state.value} {b.finish} stream={b.stream}"
        )
        told.append(f"{ours} | {theirs} | {'; '.join(differences)} | {attempt_id}")
    return sorted(told, key=lambda line: line.startswith(("estimated", "unknown")))


async def run(args: argparse.Namespace) -> int:
    async with AsyncExitStack() as stack:
        # Outermost: a gateway's last lines and a server's files outlive both of them.
        sync = stack.enter_context(ExitStack())
        state = Path(sync.enter_context(tempfile.TemporaryDirectory(prefix="mixed-load-")))
        gateway, provider = await _parties(args, stack, sync, state)
        began_s = time.monotonic()
        tally = await send_all(
            gateway.base_url, gateway.key, calls(args.requests, args.seed, args.leave), args.connections
        )
        sent_s = time.monotonic() - began_s
        verdict = judge(await _when_settled(gateway.ledger_url), await _bill(provider))
        if args.reconcile:
            verdict = await _when_reconciled(gateway.ledger_url, provider, verdict)
    shown = _shown(args, tally, verdict, sent_s)
    print(json.dumps(shown, indent=2) if args.json else _table(shown))
    return 0 if verdict.good else 1


async def _parties(
    args: argparse.Namespace, stack: AsyncExitStack, sync: ExitStack, state: Path
) -> tuple[Gateway, str]:
    """The gateway and the root URL of its provider: those that were given, or new ones."""
    plan = FaultPlan(seed=args.seed, rates={} if args.no_faults else FAULTS)
    if args.base_url:
        await _set_faults(args.provider_url, plan)
        return Gateway(args.base_url, args.key, args.ledger_url), args.provider_url
    provider = await stack.enter_async_context(DemoProvider(chunk_delay_s=0.001, faults=plan))
    database = sync.enter_context(throwaway_postgres()) if args.postgres else ""
    workers = args.workers or (3 if args.postgres else 1)
    gateway = await stack.enter_async_context(
        start_gateway(state, provider.base_url, database, workers, args.on_disconnect, args.reconcile)
    )
    return gateway, provider.root_url


async def _set_faults(provider_url: str, plan: FaultPlan) -> None:
    body = {"seed": plan.seed, "rates": {kind.value: rate for kind, rate in plan.rates.items()}}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{provider_url}/demo/faults", json=body) as answer,
    ):
        answer.raise_for_status()


async def _bill(provider_url: str) -> list[BillLine]:
    """All lines, once the provider has stopped adding any."""
    async with aiohttp.ClientSession() as session:
        before = -1
        while True:
            async with session.get(f"{provider_url}/demo/bill") as answer:
                lines = msgspec.convert((await answer.json())["data"], list[BillLine])
            if len(lines) == before:
                return lines
            before = len(lines)
            await asyncio.sleep(0.5)


async def _when_settled(ledger_url: str) -> Books:
    database = open_database(ledger_url)
    until_s = time.monotonic() + SETTLE_S
    try:
        while (held := await database.read(_held)) and time.monotonic() < until_s:
            await asyncio.sleep(0.2)
        return Books(await _entries(database), held, len(await reports.drift(database)))
    finally:
        await database.close()


async def _when_reconciled(ledger_url: str, provider_url: str, verdict: Verdict) -> Verdict:
    """The verdict once ledger and bill are equal, or once no difference has gone for a while."""
    unchanged_since_s = time.monotonic()
    while not verdict.comparison.equal and time.monotonic() - unchanged_since_s < RECONCILED_S:
        await asyncio.sleep(2.0)
        latest = judge(await _when_settled(ledger_url), await _bill(provider_url))
        if latest.differing != verdict.differing:
            unchanged_since_s = time.monotonic()
        verdict = latest
    return verdict


def _held() -> Tx[int]:
    return int((yield Fetch(_HELD))[0][0])


async def _entries(database: Database) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    after = (-1, "")
    while page := await reports.entries(database, after=after, limit=_PAGE):
        found += page
        after = (page[-1]["at_ms"], page[-1]["entry_id"])
    return found


def _shown(args: argparse.Namespace, tally: Tally, verdict: Verdict, sent_s: float) -> dict[str, Any]:
    c = verdict.comparison
    return {
        "requests": args.requests,
        "seed": args.seed,
        "requests_per_s": round(args.requests / sent_s, 1),
        "by_operation": dict(sorted(tally.by_operation.items())),
        "statuses": {str(status): n for status, n in sorted(tally.statuses.items())},
        "clients_left": tally.left,
        "answers_broken": tally.broken,
        "attempts": c.attempts,
        "ledger_entries": c.entries,
        "bill_lines": c.bill_lines,
        "ledger_nano_usd": c.ledger_nano_usd,
        "bill_nano_usd": c.bill_nano_usd,
        "attempts_by_quality": dict(sorted(verdict.attempts.items())),
        "estimates_below_bill_nano_usd": verdict.estimates_below_nano_usd,
        "differing_by_quality": dict(sorted(verdict.differing.items())),
        "still_held": verdict.still_held,
        "drifting_budgets": verdict.drifting_budgets,
        "wrong_entries": verdict.wrong_entries,
        "exact_but_different": verdict.exact_but_different,
        "bound_below_bill": verdict.bound_below_bill,
        "good": verdict.good,
        "differing": verdict.told[: args.show],
    }


def _table(shown: dict[str, Any]) -> str:
    lines = []
    for name, value in shown.items():
        if name == "differing":
            lines += [f"  {line}" for line in value]
            continue
        text_ = ", ".join(f"{k}: {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
        lines.append(f"{name:22} {text_}")
    return "\n".join(lines)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--requests", type=int, default=2_000)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--connections", type=int, default=32)
    ap.add_argument("--leave", type=float, default=0.15, help="share of clients that hang up")
    ap.add_argument("--no-faults", action="store_true")
    ap.add_argument("--postgres", action="store_true", help="a throw-away Postgres and three workers")
    ap.add_argument("--workers", type=int, default=0)
    ap.add_argument(
        "--on-disconnect", default="cancel_estimate", choices=["drain", "cancel_estimate", "cancel_free"]
    )
    ap.add_argument(
        "--reconcile", action="store_true", help="let the gateway ask the provider about estimates, and wait"
    )
    ap.add_argument("--show", type=int, default=20, help="print at most so many differences")
    ap.add_argument("--json", action="store_true")
    given = ap.add_argument_group("a gateway that runs already, in front of a demo provider")
    given.add_argument("--base-url", help="http://127.0.0.1:4000")
    given.add_argument("--key", help="virtual key")
    given.add_argument("--ledger-url", help="its database")
    given.add_argument("--provider-url", help="root of its demo provider, without /v1")
    args = ap.parse_args()
    if args.base_url and not (args.key and args.ledger_url and args.provider_url):
        ap.error("--base-url needs --key, --ledger-url and --provider-url")
    return asyncio.run(run(args))


if __name__ == "__main__":
    sys.exit(main())
