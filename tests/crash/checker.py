"""The provider's bill against the ledger: what is lost, doubled, overspent. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gateway.storage.reports import Drift


class Wrong(StrEnum):
    LOST = "lost"
    DOUBLED = "doubled"
    OVERSPENT = "overspent"


@dataclass(frozen=True, slots=True)
class Violation:
    wrong: Wrong
    about: str  # an attempt, or a budget's scope
    why: str

    def __str__(self) -> str:
        return f"{self.wrong}: {self.about}: {self.why}"


@dataclass(frozen=True, slots=True)
class Line:
    """One ledger entry. `scopes` are those whose budgets it counts in; `proven`: its usage is the provider's own."""

    attempt_id: str
    kind: str  # post | void | charge_unknown | correct
    nano_usd: int
    proven: bool
    scopes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Billed:
    attempt_id: str
    nano_usd: int


def judge(
    ledger: Iterable[Line],
    bill: Iterable[Billed],
    limits: Mapping[str, int],
    *,
    open_holds: Sequence[str] = (),
    drift: Sequence[Drift] = (),
) -> list[Violation]:
    """All that is wrong when everything has ended. `limits`: nano-dollars of hard lifetime budgets by scope.

    Lost: billed and not in the ledger, or charged less than was billed; a hold that nobody ended.
    Doubled: a second terminal entry or correction, or charged more than was billed. An attempt without a bill may stay
    charged at its bound, if nobody could prove that it was not sent.
    Overspent: the ledger's or the bill's sum of a budget's scope is above its limit.
    """
    lines: dict[str, list[Line]] = defaultdict(list)
    bills: dict[str, list[Billed]] = defaultdict(list)
    for line in ledger:
        lines[line.attempt_id].append(line)
    for billed in bill:
        bills[billed.attempt_id].append(billed)
    found = [Violation(Wrong.LOST, a, "its hold is still open") for a in open_holds]
    for attempt_id in dict.fromkeys([*lines, *bills]):
        found += _attempt(attempt_id, lines[attempt_id], bills[attempt_id])
    found += _overspent(lines, bills, limits)
    for d in drift:
        short = d.posted < d.posted_by_entries or d.held < d.held_by_holds
        why = f"posted {d.posted} of {d.posted_by_entries}, held {d.held} of {d.held_by_holds} {d.unit}"
        found.append(Violation(Wrong.LOST if short else Wrong.DOUBLED, d.scope, why))
    return found


def _attempt(attempt_id: str, lines: Sequence[Line], bills: Sequence[Billed]) -> list[Violation]:
    terminal = [line for line in lines if line.kind != "correct"]
    corrections = len(lines) - len(terminal)
    charged = sum(line.nano_usd for line in lines)
    billed = sum(b.nano_usd for b in bills)
    found = []
    if not terminal:
        found.append(Violation(Wrong.LOST, attempt_id, f"billed {billed}, and no entry ends it"))
    if len(terminal) > 1:
        found.append(Violation(Wrong.DOUBLED, attempt_id, f"{len(terminal)} terminal entries"))
    if corrections > 1:
        found.append(Violation(Wrong.DOUBLED, attempt_id, f"{corrections} corrections"))
    if len(bills) > 1:
        found.append(Violation(Wrong.DOUBLED, attempt_id, f"sent {len(bills)} times"))
    unsent_and_unproven = not bills and not any(line.proven for line in lines)
    if terminal and charged < billed:
        found.append(Violation(Wrong.LOST, attempt_id, f"charged {charged}, billed {billed}"))
    if charged > billed and not unsent_and_unproven:
        found.append(Violation(Wrong.DOUBLED, attempt_id, f"charged {charged}, billed {billed}"))
    return found


def _overspent(
    lines: Mapping[str, Sequence[Line]], bills: Mapping[str, Sequence[Billed]], limits: Mapping[str, int]
) -> list[Violation]:
    spent: dict[str, int] = defaultdict(int)
    billed: dict[str, int] = defaultdict(int)
    for attempt_id, own in lines.items():
        for scope in {s for line in own for s in line.scopes}:
            spent[scope] += sum(line.nano_usd for line in own)
            billed[scope] += sum(b.nano_usd for b in bills.get(attempt_id, ()))
    return [
        Violation(Wrong.OVERSPENT, scope, f"{name} {amount} of {limit} nano-dollars")
        for scope, limit in limits.items()
        for name, amount in (("spent", spent[scope]), ("billed", billed[scope]))
        if amount > limit
    ]
