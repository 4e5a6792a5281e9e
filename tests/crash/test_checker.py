"""What the campaign's checker calls lost, doubled and overspent, and what it does not."""

from __future__ import annotations

from gateway.crash import Point
from gateway.storage.reports import Drift
from tests.crash.checker import Billed, Line, Violation, Wrong, judge
from tests.crash.plan import What, plan

KEY = ("key:k",)


def entry(attempt_id: str, nano_usd: int, kind: str = "post", proven: bool = True) -> Line:
    return Line(attempt_id, kind, nano_usd, proven, KEY)


def test_a_ledger_that_equals_its_bill_is_right() -> None:
    ledger = [entry("a", 7), entry("b", 0, "void"), entry("c", 9, "charge_unknown", False)]
    corrected = [entry("d", 9, "charge_unknown", False), entry("d", -4, "correct")]
    assert judge([*ledger, *corrected], [Billed("a", 7), Billed("d", 5)], {"key:k": 21}) == []


def test_what_is_billed_and_not_charged_is_lost() -> None:
    bill = [Billed("a", 7), Billed("b", 8)]
    assert judge([entry("b", 6)], bill, {}, open_holds=["c"]) == [
        Violation(Wrong.LOST, "c", "its hold is still open"),
        Violation(Wrong.LOST, "b", "charged 6, billed 8"),
        Violation(Wrong.LOST, "a", "billed 7, and no entry ends it"),
    ]


def test_what_ends_twice_or_costs_more_than_its_bill_is_doubled() -> None:
    ledger = [
        *[entry("a", 7), entry("a", 0, "charge_unknown", False)],
        *[entry("b", 9, "post", False), entry("b", -1, "correct"), entry("b", 0, "correct")],
        entry("c", 9, "charge_unknown", False),
        entry("d", 3),
        entry("e", 4),
    ]
    bill = [Billed("a", 7), Billed("b", 8), Billed("c", 5), Billed("e", 2), Billed("e", 2)]
    assert judge(ledger, bill, {}) == [
        Violation(Wrong.DOUBLED, "a", "2 terminal entries"),
        Violation(Wrong.DOUBLED, "b", "2 corrections"),
        Violation(Wrong.DOUBLED, "c", "charged 9, billed 5"),
        Violation(Wrong.DOUBLED, "d", "charged 3, billed 0"),
        Violation(Wrong.DOUBLED, "e", "sent 2 times"),
    ]


def test_a_budget_is_overspent_by_the_ledger_or_by_the_bill() -> None:
    ledger = [entry("a", 7), entry("b", 8)]
    bill = [Billed("a", 7), Billed("b", 8)]
    assert judge(ledger, bill, {"key:k": 15, "task:other": 0}) == []
    assert judge(ledger, bill, {"key:k": 14}) == [
        Violation(Wrong.OVERSPENT, "key:k", "spent 15 of 14 nano-dollars"),
        Violation(Wrong.OVERSPENT, "key:k", "billed 15 of 14 nano-dollars"),
    ]


def test_totals_that_are_not_the_sums_of_the_entries_are_wrong() -> None:
    short = Drift("bud_1", 0, "key:k", "usd", 7, 8, 0, 0)
    over = Drift("bud_1", 0, "key:k", "usd", 8, 8, 1, 0)
    assert [v.wrong for v in judge([], [], {}, drift=[short, over])] == [Wrong.LOST, Wrong.DOUBLED]


def test_sixteen_seeds_in_a_row_go_through_all_points() -> None:
    rounds = [plan(seed) for seed in range(100, 116)]
    assert {f.point for r in rounds for f in r.faults if f.what is What.KILL_AT} == set(Point)
    assert rounds == [plan(seed) for seed in range(100, 116)]
