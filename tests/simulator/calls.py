"""The ledger's interface, in one place: what the simulator asks for, and how it says how things ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.core.entry import Amounts as LedgerAmounts
from gateway.core.entry import Attempt, Granted, Kind, Outcome, Refused
from gateway.core.usage import Quality, Usage
from gateway.storage.ledger import SqlLedger

#: What an attempt holds, and later is charged, of each unit.
UNITS = ("usd", "input_tokens", "output_tokens", "calls")
Amounts = tuple[int, int, int, int]
NOTHING: Amounts = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a call may use at most, and how much money and output is the least that is of use to it."""

    most: Amounts
    least: Amounts
    landing: bool = False


def wish(most: int, least: int, landing: bool) -> Wish:
    return Wish((most, most * 2, most, 1), (least, most * 2, least, 1), landing)


async def reserve(ledger: SqlLedger, a: Attempt, scopes: Sequence[str], w: Wish) -> Granted | Refused:
    return await ledger.reserve(a, scopes, LedgerAmounts(*w.most), LedgerAmounts(*w.least), landing=w.landing)


def granted_amounts(w: Wish, granted: Granted) -> Amounts:
    return granted.amount_nano_usd, w.most[1], granted.output_tokens or 0, 1


def shares(held: Amounts, share: float) -> Amounts:
    """A bill of that share of what was held."""
    return int(held[0] * share), int(held[1] * share), int(held[2] * share), 1


def more_than(held: Amounts) -> Amounts:
    usd, inputs, outputs = (h + h // 2 + 1 for h in held[:3])
    return usd, inputs, outputs, 1


def between(bill: Amounts, held: Amounts) -> Amounts:
    usd, inputs, outputs = (b + (h - b) // 2 for b, h in zip(bill[:3], held[:3], strict=True))
    return usd, inputs, outputs, 1


def posted(bill: Amounts, quality: Quality = Quality.EXACT) -> Outcome:
    return _outcome(Kind.POST, bill, quality, "")


def at_bound(held: Amounts) -> Outcome:
    """The end was not seen: charged at the hold."""
    return _outcome(Kind.CHARGE_UNKNOWN, (held[0], 0, 0, 0), Quality.UNKNOWN, "upstream_cut")


def void() -> Outcome:
    return _outcome(Kind.VOID, NOTHING, Quality.EXACT, "upstream_unreachable")


def _outcome(kind: Kind, bill: Amounts, quality: Quality, error: str) -> Outcome:
    return Outcome(
        kind=kind,
        usage=Usage(input_uncached=bill[1], output=bill[2]),
        quality=quality,
        cost_nano_usd=bill[0],
        list_cost_nano_usd=bill[0] * 2,
        price_version="simulated",
        finish="stop",
        status=200 if kind is Kind.POST else 0,
        error=error,
        latency_ms=1,
        first_token_ms=None,
        upstream_request_id="",
    )


def attempt(
    attempt_id: str,
    request_id: str,
    key: str,
    team: str,
    task: str,
    parent: str | None,
    number: int,
    at_ms: int,
) -> Attempt:
    return Attempt(
        attempt_id=attempt_id,
        request_id=request_id,
        tenant_id="default",
        team_id=team,
        key_id=key,
        task_id=task,
        parent_task_id=parent,
        attempt_no=number,
        operation="chat",
        client="simulated",
        model_requested="m",
        model="m",
        upstream_model="m",
        provider="stub",
        deployment="stub",
        tier="standard",
        rule="default",
        stream=False,
        started_at_ms=at_ms,
    )


def scopes_of(a: Attempt) -> tuple[str, ...]:
    tasks = [f"task:{t}" for t in (a.task_id, a.parent_task_id) if t]
    return (f"tenant:{a.tenant_id}", f"team:{a.team_id}", f"key:{a.key_id}", *tasks)


def least_of(w: Wish, unit: str) -> int:
    return w.least[UNITS.index(unit)]
