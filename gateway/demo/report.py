"""Ledger against bill, entry by entry. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from gateway.demo.bill import BillLine


@dataclass(frozen=True, slots=True)
class LedgerLine:
    """One ledger entry, as far as a bill can be compared with it. A `correct` entry's counts are signed."""

    attempt_id: str
    kind: str  # post | void | charge_unknown | correct
    input_uncached: int = 0
    cache_read: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0
    cache_write_12h: int = 0
    output: int = 0
    cost_nano_usd: int = 0

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> LedgerLine:
        """From a ledger row or its JSON; the money may be called cost_nano_usd or amount_nano_usd."""
        money = row.get("cost_nano_usd", row.get("amount_nano_usd", 0))
        counts = {name: int(row.get(name) or 0) for name in _COUNTS}
        return cls(str(row["attempt_id"]), str(row["kind"]), **counts, cost_nano_usd=int(money))


@dataclass(frozen=True, slots=True)
class Difference:
    """`what` is a count's name, cost_nano_usd, or "entries" (how many lines there are for the attempt)."""

    attempt_id: str
    what: str
    ledger: int
    bill: int


@dataclass(frozen=True, slots=True)
class Comparison:
    attempts: int  # attempt ids in either
    entries: int
    bill_lines: int
    ledger_nano_usd: int
    bill_nano_usd: int
    differences: tuple[Difference, ...]

    @property
    def equal(self) -> bool:
        return not self.differences


_COUNTS = tuple(f.name for f in fields(LedgerLine) if f.name not in ("attempt_id", "kind", "cost_nano_usd"))
_COMPARED = (*_COUNTS, "cost_nano_usd")


def compare(entries: Iterable[LedgerLine], bill: Iterable[BillLine]) -> Comparison:
    """Every attempt's entries, corrections summed in, against the bill lines with that client_request_id.

    An attempt must have exactly one terminal entry and at most one bill line; an attempt without a bill line
    must have cost nothing (it never arrived), and a bill line without an entry is a difference even at 0.
    """
    ledger: dict[str, list[LedgerLine]] = {}
    billed: dict[str, list[BillLine]] = {}
    for entry in entries:
        ledger.setdefault(entry.attempt_id, []).append(entry)
    for line in bill:
        billed.setdefault(line.client_request_id, []).append(line)
    differences: list[Difference] = []
    for attempt_id in dict.fromkeys([*ledger, *billed]):
        ours, theirs = ledger.get(attempt_id, []), billed.get(attempt_id, [])
        terminal = sum(1 for entry in ours if entry.kind != "correct")
        if terminal != 1 or len(theirs) > 1:
            differences.append(Difference(attempt_id, "entries", terminal, len(theirs)))
        for what in _COMPARED:
            have = sum(int(getattr(entry, what)) for entry in ours)
            want = sum(_billed(line, what) for line in theirs)
            if have != want:
                differences.append(Difference(attempt_id, what, have, want))
    return Comparison(
        attempts=len(ledger.keys() | billed.keys()),
        entries=sum(map(len, ledger.values())),
        bill_lines=sum(map(len, billed.values())),
        ledger_nano_usd=sum(entry.cost_nano_usd for lines in ledger.values() for entry in lines),
        bill_nano_usd=sum(line.nano_usd for lines in billed.values() for line in lines),
        differences=tuple(differences),
    )


def _billed(line: BillLine, what: str) -> int:
    if what == "cost_nano_usd":
        return line.nano_usd
    return 0 if what == "cache_write_12h" else int(getattr(line, what))
