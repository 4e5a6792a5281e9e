"""Budgets in every unit, in every window, with every way of being used up."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.core.budget import BudgetMode, OnExceed
from gateway.core.entry import Amounts, Attempt, Granted, Kind, Refused, Unit
from gateway.core.errors import InvalidRequest, NotFound
from gateway.core.usage import Quality, Usage
from gateway.core.windows import bounds, parse_window
from gateway.storage import reports
from gateway.storage.accounts import Accounts
from gateway.storage.database import Database
from gateway.storage.ledger import SqlLedger
from tests.storage.worlds import TEAM, HandClock, attempt, opened, outcome, rows, run, scopes, timeless, void

World = tuple[SqlLedger, Database, Accounts]


@pytest.fixture
async def world(store: str, tmp_path: Path) -> AsyncIterator[World]:
    async with opened(store, tmp_path / "journal") as everything:
        await everything[2].ensure_defaults()
        yield everything
        assert await reports.drift(everything[1]) == []


async def state(ledger: SqlLedger, scope: str = TEAM) -> dict[str, tuple[int, int]]:
    """Unit -> (posted, held)."""
    return {b.unit.value: (b.spent, b.reserved) for b in await ledger.snapshot(scope)}


async def told(database: Database, kind: str) -> list[dict[str, object]]:
    found = await rows(database, "SELECT body FROM outbox WHERE kind = $1 ORDER BY outbox_id", kind)
    return [json.loads(body) for (body,) in found]


async def test_one_hold_is_in_every_unit_and_settles_at_what_was_used(world: World) -> None:
    ledger, _, accounts = world
    await accounts.set_budget(TEAM, 1_000)
    await accounts.set_budget(TEAM, 5_000, unit=Unit.INPUT_TOKENS)
    await accounts.set_budget("tenant:default", 300, unit=Unit.OUTPUT_TOKENS)
    await accounts.set_budget("task:task_a", 2, unit=Unit.CALLS)
    a = attempt()

    answer = await ledger.reserve(a, scopes(a), Amounts(400, 2_000, 500), Amounts(100, 2_000, 200))
    assert timeless(answer) == Granted(400, 600, TEAM, 1, 300, 3_000, 0, 1)
    assert isinstance(answer, Granted)
    assert answer.used == (("tenant:default", 100), ("task:task_a", 50)), "what is half used up is named"
    assert await state(ledger) == {"usd": (0, 400), "input_tokens": (0, 2_000)}
    assert await state(ledger, "tenant:default") == {"output_tokens": (0, 300)}
    assert await state(ledger, "task:task_a") == {"calls": (0, 1)}
    assert await ledger.reserve(a, scopes(a), Amounts(9, 9, 9), Amounts(9, 9, 9)) == answer

    await ledger.settle(a, outcome(70))
    assert await state(ledger) == {"usd": (70, 0), "input_tokens": (1_150, 0)}
    assert await state(ledger, "tenant:default") == {"output_tokens": (20, 0)}
    assert await state(ledger, "task:task_a") == {"calls": (1, 0)}


@pytest.mark.parametrize(
    ("unit", "limit"), [(Unit.INPUT_TOKENS, 99), (Unit.OUTPUT_TOKENS, 49), (Unit.CALLS, 0), (Unit.USD, 9)]
)
async def test_what_does_not_fit_in_one_unit_is_held_in_none(world: World, unit: Unit, limit: int) -> None:
    ledger, database, accounts = world
    for each in Unit:
        await accounts.set_budget(TEAM, limit if each is unit else 10**6, unit=each)
    a = attempt()

    answer = await ledger.reserve(a, scopes(a), Amounts(10, 100, 60), Amounts(10, 100, 50))
    assert answer == Refused(TEAM, limit, 0, 0, None, unit)
    assert await state(ledger) == {each.value: (0, 0) for each in Unit}
    assert await rows(database, "SELECT count(*) FROM hold") == [(0,)]


async def test_what_cannot_be_bounded_in_a_unit_is_refused_by_hard_budgets_in_it(world: World) -> None:
    ledger, _, accounts = world
    await accounts.set_budget(TEAM, 10**6, unit=Unit.INPUT_TOKENS)
    unbounded = Amounts(10, None, 60)
    a = attempt()
    assert await ledger.reserve(a, scopes(a), unbounded, unbounded) == Refused(
        TEAM, 10**6, 0, 0, None, Unit.INPUT_TOKENS
    )
    await accounts.set_budget(TEAM, 10**6, unit=Unit.INPUT_TOKENS, on_exceed=OnExceed.WARN)
    ledger.revision_changed()
    assert isinstance(await ledger.reserve(a, scopes(a), unbounded, unbounded), Granted)
    await ledger.settle(a, outcome(5))
    assert await state(ledger) == {"input_tokens": (1_150, 0)}


async def test_void_gives_back_unknown_charges_what_was_held_and_proof_corrects_it(world: World) -> None:
    ledger, database, accounts = world
    for unit in Unit:
        await accounts.set_budget(TEAM, 10**6, unit=unit)
    ask = Amounts(400, 2_000, 300)
    never, lost = attempt(), attempt()
    for a in (never, lost):
        await ledger.reserve(a, scopes(a), ask, ask)

    await ledger.settle(never, void())
    unknown = outcome(400, Kind.CHARGE_UNKNOWN, usage=Usage(), quality=Quality.UNKNOWN)
    await ledger.settle(lost, unknown)
    assert await state(ledger) == {
        "usd": (400, 0),
        "input_tokens": (2_000, 0),
        "output_tokens": (300, 0),
        "calls": (1, 0),
    }
    await ledger.settle(lost, outcome(70))
    assert await state(ledger) == {
        "usd": (70, 0),
        "input_tokens": (1_150, 0),
        "output_tokens": (20, 0),
        "calls": (1, 0),
    }
    assert await rows(
        database,
        "SELECT kind, charged_input_tokens, charged_output_tokens, charged_calls FROM ledger "
        "WHERE attempt_id = $1 ORDER BY entry_id",
        lost.attempt_id,
    ) == [("charge_unknown", 2_000, 300, 1), ("correct", -850, -280, 0)]


async def test_more_tokens_than_were_held_are_posted_in_full_and_announced(world: World) -> None:
    ledger, database, accounts = world
    await accounts.set_budget(TEAM, 10_000, unit=Unit.INPUT_TOKENS)
    a = attempt()
    await ledger.reserve(a, scopes(a), Amounts(400, 1_000, 300), Amounts(400, 1_000, 300))
    await ledger.settle(a, outcome(70))

    assert await state(ledger) == {"input_tokens": (1_150, 0)}
    (breach,) = await told(database, "bound_breach")
    assert (breach["unit"], breach["held"], breach["charged"]) == ("input_tokens", 1_000, 1_150)


async def test_counting_tokens_is_no_call(world: World) -> None:
    ledger, _, accounts = world
    await accounts.set_budget(TEAM, 0, unit=Unit.CALLS)
    a = attempt(operation="count_tokens")
    free = Amounts(0, 0, 0, 0)
    assert isinstance(await ledger.reserve(a, scopes(a), free, free), Granted)
    await ledger.settle(a, outcome(0, usage=Usage()))
    assert await state(ledger) == {"calls": (0, 0)}


async def test_a_warning_comes_with_the_grant(world: World) -> None:
    ledger, _, accounts = world
    await accounts.set_budget(TEAM, 100, on_exceed=OnExceed.WARN)
    a, b = attempt(), attempt()
    ask = Amounts(80, 10, 10)
    assert timeless(await ledger.reserve(a, scopes(a), ask, ask)) == Granted(
        80, task_step=1, output_tokens=10
    )
    over = Granted(
        80,
        task_step=2,
        output_tokens=10,
        warned=(Refused(TEAM, 100, 0, 80, None, on_exceed=OnExceed.WARN),),
    )
    assert timeless(await ledger.reserve(b, scopes(b), ask, ask)) == over
    assert timeless(await ledger.reserve(b, scopes(b), ask, ask)) == over, "the first answer, as it was"
    assert await state(ledger) == {"usd": (0, 160)}


async def test_a_shadow_refuses_nothing_counts_what_it_would_and_says_so_once(world: World) -> None:
    ledger, database, accounts = world
    await accounts.set_budget(TEAM, 2, unit=Unit.CALLS, mode=BudgetMode.SHADOW)
    ask = Amounts(None, None, None)
    for step in range(1, 6):
        a = attempt()
        assert timeless(await ledger.reserve(a, scopes(a), ask, ask)) == Granted(0, task_step=step)
    (budget,) = await ledger.snapshot(TEAM)
    assert (budget.reserved, budget.would_refuse) == (5, 3)
    (event,) = await told(database, "budget_shadow")
    assert (event["scope"], event["unit"], event["limit"], event["held"]) == (TEAM, "calls", 2, 3)


async def test_alerts_are_at_the_budgets_own_ratios_once_per_window(world: World) -> None:
    ledger, database, accounts = world
    await accounts.set_budget(TEAM, 10, unit=Unit.CALLS, alert_percents=(30, 60))
    for _ in range(8):
        a = attempt()
        await ledger.reserve(a, scopes(a), Amounts(1, 1, 1), Amounts(1, 1, 1))
        await ledger.settle(a, outcome(1))
    alerts = await told(database, "budget_alert")
    assert [(a["scope"], a["unit"], a["percent"], a["spent"]) for a in alerts] == [
        (TEAM, "calls", 30, 3),
        (TEAM, "calls", 60, 6),
    ]


async def test_each_unit_of_a_scope_is_a_budget_of_its_own(world: World) -> None:
    ledger, _, accounts = world
    await accounts.set_budget(TEAM, 10, unit=Unit.CALLS)
    await accounts.set_budget(TEAM, 20)
    await accounts.set_budget(TEAM, 30, "day")
    assert sorted((b.unit.value, b.window, b.limit) for b in await accounts.list_budgets()) == [
        ("calls", "lifetime", 10),
        ("usd", "day", 30),
        ("usd", "lifetime", 20),
    ]
    await accounts.remove_budget(TEAM, unit=Unit.CALLS)
    with pytest.raises(NotFound):
        await accounts.remove_budget(TEAM, unit=Unit.CALLS)
    assert [b.limit for b in await ledger.snapshot(TEAM)] in ([20, 30], [30, 20])


async def test_a_limit_is_raised_and_lowered_with_a_reason(world: World) -> None:
    ledger, database, accounts = world
    await accounts.set_budget(TEAM, 100)
    a, b = attempt(), attempt()
    ask = Amounts(80, 1, 1)
    await ledger.reserve(a, scopes(a), ask, ask)
    await ledger.settle(a, outcome(80))

    lowered = await accounts.adjust_budget(TEAM, 50, "too fast")
    assert (lowered.limit, lowered.spent, lowered.left, lowered.epoch) == (50, 80, -30, 1)
    ledger.revision_changed()
    assert await ledger.reserve(b, scopes(b), ask, ask) == Refused(TEAM, 50, 80, 0, None)
    raised = await accounts.adjust_budget(TEAM, 200, "release week")
    assert (raised.limit, raised.epoch) == (200, 2)
    ledger.revision_changed()
    assert isinstance(await ledger.reserve(b, scopes(b), ask, ask), Granted)

    trail = await rows(
        database, "SELECT action, body FROM audit WHERE action LIKE 'budget.%' ORDER BY at_ms, audit_id"
    )
    bodies = {action: json.loads(body) for action, body in trail}
    lower = bodies["budget.lower"]
    assert (lower["before"], lower["after"], lower["spent"], lower["reason"]) == (100, 50, 80, "too fast")
    assert bodies["budget.raise"]["reason"] == "release week"
    with pytest.raises(InvalidRequest, match="say why"):
        await accounts.adjust_budget(TEAM, 1, " ")
    with pytest.raises(NotFound, match="has no budget in calls"):
        await accounts.adjust_budget(TEAM, 1, "x", unit=Unit.CALLS)


async def test_an_override_ends_by_itself(store: str, tmp_path: Path) -> None:
    async with opened(store, tmp_path) as (ledger, database, accounts):
        await accounts.ensure_defaults()
        await accounts.set_budget(TEAM, 100)
        ((now_ms,),) = await rows(database, "SELECT now_ms()")
        until_ms = now_ms + 3_600_000
        over = await accounts.adjust_budget(TEAM, 1_000, "demo day", until_ms=until_ms)
        assert (over.limit, over.base_limit, over.override_until_ms) == (1_000, 100, until_ms)
        a, b = attempt(), attempt()
        ask = Amounts(500, 1, 1)
        assert isinstance(await ledger.reserve(a, scopes(a), ask, ask), Granted)
        with pytest.raises(InvalidRequest, match="in the future"):
            await accounts.adjust_budget(TEAM, 1_000, "late", until_ms=now_ms - 1)

        await run(
            database, "UPDATE budget SET override_until_ms = $1", now_ms - 1
        )  # as if the hour were over
        assert await ledger.reserve(b, scopes(b), ask, ask) == Refused(TEAM, 100, 0, 500, None)
        (budget,) = await ledger.snapshot(TEAM)
        assert (budget.limit, budget.override_limit, budget.left) == (100, None, -400)


async def test_calendar_windows_are_those_of_their_zone(world: World) -> None:
    _, database, accounts = world
    for zone in ("UTC", "America/New_York", "Pacific/Chatham", "Asia/Kathmandu"):
        for window in ("hour", "day", "week", "month"):
            budget = await accounts.set_budget(TEAM, 5, window, zone=zone, unit=Unit.CALLS)
            ((now_ms,),) = await rows(database, "SELECT now_ms()")
            assert (budget.window_start_ms, budget.window_end_ms) == bounds(
                parse_window(window, zone), now_ms
            )


async def test_calls_over_rolling_hours_and_days_of_a_zone_as_time_goes_by(
    sqlite_url: str, tmp_path: Path
) -> None:
    """On SQLite the gateway's clock is the authority's, so that time can be told."""
    clock = HandClock()
    ask = Amounts(1, 1, 1)
    async with opened(sqlite_url, tmp_path, clock=clock) as (ledger, database, accounts):
        await accounts.ensure_defaults()
        await accounts.set_budget(TEAM, 2, "rolling:24h", unit=Unit.CALLS)
        await accounts.set_budget("tenant:default", 3, "day", zone="Asia/Kathmandu", unit=Unit.CALLS)

        async def call() -> Granted | Refused:
            await run(database, "UPDATE replica SET expires_at_ms = now_ms() + 30000")
            a = attempt(started_at_ms=clock.ms)
            answer = await ledger.reserve(a, scopes(a), ask, ask)
            if isinstance(answer, Granted):
                made.append(a)
            ledger.revision_changed()
            return answer

        made: list[Attempt] = []
        hour = 3_600_000
        assert isinstance(await call(), Granted)
        clock.ms += 6 * hour
        assert isinstance(await call(), Granted)
        refused = await call()
        assert isinstance(refused, Refused)
        assert (refused.unit, refused.held) == (Unit.CALLS, 2)
        clock.ms += (
            18 * hour + 25 * 60_000
        )  # the first one's bucket, 24 minutes long, has left; its hold is open
        assert isinstance(await call(), Granted)
        assert isinstance(await call(), Refused)
        # The first hold settles in the bucket that admitted it, which counts no more.
        await ledger.settle(made[0], outcome(1))
        assert (await state(ledger))["calls"] == (0, 2)
        await ledger.settle(made[1], outcome(1))
        assert (await state(ledger))["calls"] == (1, 1)
        # Midnight in Kathmandu came between the first call and the second.
        assert (await state(ledger, "tenant:default"))["calls"] == (1, 1)
        assert await reports.drift(database) == []


async def test_who_asks_again_at_once_is_not_refused_for_the_hold_of_its_last_call(world: World) -> None:
    """The answer of a call comes before its settlement is written down."""
    ledger, _, accounts = world
    await accounts.set_budget(TEAM, 1_000)
    ask = Amounts(600, 0, 0)
    for _ in range(3):
        a = attempt()
        assert isinstance(await ledger.reserve(a, scopes(a), ask, ask), Granted)
        ledger.post(a, outcome(50))
    b, c = attempt(), attempt()
    assert isinstance(await ledger.reserve(b, scopes(b), ask, ask), Granted)
    assert await ledger.reserve(c, scopes(c), ask, ask) == Refused(TEAM, 1_000, 150, 600, None)
    await ledger.settle(b, outcome(50))
