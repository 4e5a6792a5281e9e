"""The ledger against the provider's own bill, entry by entry, after everything that can go wrong has."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest

from gateway.demo.faults import FaultKind, FaultPlan
from gateway.storage import reports
from gateway.storage.accounts import Accounts
from gateway.storage.tables import TOKEN_COLUMNS
from tests.e2e.traffic import calls, send_all
from tests.support.running import Running, running

#: About every third upstream call fails in one of these ways.
FAULTS = FaultPlan(
    seed=7,
    rates={
        FaultKind.REFUSE: 0.05,
        FaultKind.HTML_502: 0.02,
        FaultKind.EMPTY_200: 0.02,
        FaultKind.ERROR_IN_200: 0.02,
        FaultKind.CLOSE: 0.04,
        FaultKind.STALL_HEADERS: 0.01,
        FaultKind.TRUNCATED_JSON: 0.02,
        FaultKind.STALL: 0.01,
        FaultKind.CUT: 0.04,
        FaultKind.ERROR_EVENT: 0.03,
        FaultKind.USAGE_MISSING: 0.03,
        FaultKind.USAGE_TWICE: 0.02,
        FaultKind.USAGE_NEGATIVE: 0.02,
        FaultKind.USAGE_HUGE: 0.02,
        FaultKind.WRONG_TYPE: 0.01,
        FaultKind.COMMENTS: 0.01,
        FaultKind.CRLF: 0.01,
    },
)


@pytest.mark.parametrize(
    ("on_disconnect", "provider_bills"), [("drain", "drain"), ("cancel_estimate", "stop")]
)
async def test_ledger_equals_bill(
    store: str, on_disconnect: str, provider_bills: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(
        store,
        faults=FAULTS,
        bills_after_disconnect=provider_bills,
        first_token_delay_s=0.005,
        chunk_delay_s=0.001,
        on_disconnect=on_disconnect,
        first_byte_timeout_s=2.0,
        idle_timeout_s=2.0,
    ) as gw:
        await Accounts(gw.app.database, actor="test").set_budget("tenant:default", 10**12, "month")
        tally = await send_all(gw.url, gw.key, calls(150, seed=7, leaving=0.3), at_once=16)

        compared = await gw.ledger_equals_bill()

        assert compared.differences == ()
        assert compared.attempts > 150  # retries are attempts of their own
        assert compared.bill_nano_usd == compared.ledger_nano_usd > 0
        await every_attempt_ended_once(gw)
        await sums_are_those_of_the_entries(gw)
        assert tally.left > 20
        assert tally.cut == 0
        assert set(tally.statuses) <= {200, 429, 502, 503, 504, 529}
        assert tally.statuses[200] > 100
        assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


async def every_attempt_ended_once(gw: Running) -> None:
    terminal: Counter[str] = Counter()
    corrections: Counter[str] = Counter()
    for entry in await gw.entries():
        (corrections if entry["kind"] == "correct" else terminal)[entry["attempt_id"]] += 1
    assert set(terminal.values()) == {1}
    assert set(corrections.values()) == {1}  # there were faults, so something was corrected; never twice
    assert corrections.keys() <= terminal.keys()
    assert await gw.open_holds() == 0
    assert await reports.drift(gw.app.database) == []


async def sums_are_those_of_the_entries(gw: Running) -> None:
    entries = await gw.entries()
    (hourly,) = await reports.usage(gw.app.database, by=(), from_ms=0, to_ms=2**50)
    assert (hourly.attempts, hourly.cost_nano_usd, hourly.list_cost_nano_usd) == _sums(entries)
    assert hourly.tokens == {c: sum(e[c] for e in entries) for c in TOKEN_COLUMNS}
    by_task: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        by_task.setdefault(entry["task_id"], []).append(entry)
    tasks = await Accounts(gw.app.database, actor="test").list_tasks(limit=1_000)
    assert {t.task_id: (t.attempts, t.cost_nano_usd, t.list_cost_nano_usd) for t in tasks} == {
        task_id: _sums(own) for task_id, own in by_task.items()
    }


def _sums(entries: list[dict[str, Any]]) -> tuple[int, int, int]:
    attempts = sum(1 for e in entries if e["kind"] != "correct")
    return (
        attempts,
        sum(e["amount_nano_usd"] for e in entries),
        sum(e["list_cost_nano_usd"] for e in entries),
    )
