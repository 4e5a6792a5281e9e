"""What every store promises: holds, their one end, and what is derived from them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from gateway.core.budget import OnExceed
from gateway.core.entry import Granted, Kind, Refused, Settled
from gateway.core.errors import InvalidRequest, LedgerUnavailable
from gateway.core.usage import Quality, Usage
from gateway.storage import reports
from gateway.storage.accounts import Accounts, Team
from gateway.storage.database import Database, open_database
from gateway.storage.ledger import SqlLedger
from gateway.storage.transact import CommitUnknown, Conflict, Runner, Tx
from tests.storage.worlds import (
    TEAM,
    attempt,
    granted,
    opened,
    outcome,
    reserve,
    rows,
    run,
    scopes,
    usd,
    void,
)

T = TypeVar("T")


@pytest.fixture
async def world(store: str, tmp_path: Path) -> AsyncIterator[tuple[SqlLedger, Database, Accounts]]:
    async with opened(store, tmp_path / "journal") as everything:
        await everything[2].ensure_defaults()
        yield everything


World = tuple[SqlLedger, Database, Accounts]


async def totals(ledger: SqlLedger, scope: str = TEAM) -> tuple[int, int]:
    """(posted, held) of the scope's only budget."""
    (budget,) = await ledger.snapshot(scope)
    return budget.spent, budget.reserved


async def entries(database: Database) -> list[tuple[str, str, int]]:
    return [(e["attempt_id"], e["kind"], e["amount_nano_usd"]) for e in await reports.entries(database)]


async def test_a_hold_becomes_one_entry_and_gives_the_rest_back(world: World) -> None:
    ledger, database, accounts = world
    await accounts.set_budget(TEAM, 1_000)
    a = attempt(task_source="header", task_external_id="run-7")

    assert await reserve(ledger, a, 400) == granted(400, 600, TEAM, step=1)
    assert await totals(ledger) == (0, 400)
    assert await ledger.settle(a, outcome(70)) is Settled.SETTLED
    assert await totals(ledger) == (70, 0)

    (entry,) = await reports.entries(database)
    budget_id = (await ledger.snapshot(TEAM))[0].budget_id
    assert entry == {
        **{n: v for n, v in msgspec.structs.asdict(a).items() if not n.startswith("task_")},
        "task_id": "task_a",
        "at_ms": a.started_at_ms,
        "entry_id": entry["entry_id"],
        "kind": "post",
        "amount_nano_usd": 70,
        "list_cost_nano_usd": 210,
        "hold_nano_usd": 400,
        "step": 1,
        "posted_at_ms": entry["posted_at_ms"],
        "budgets": f'[["{budget_id}",0]]',
        "replica_id": "r1",
        "input_uncached": 100,
        "cache_read": 1_000,
        "cache_write_5m": 50,
        "cache_write_1h": 0,
        "cache_write_12h": 0,
        "output": 20,
        "reasoning": 5,
        "quality": "exact",
        "price_version": "2026-01",
        "finish": "stop",
        "status": 200,
        "error": "",
        "latency_ms": 900,
        "first_token_ms": 300,
        "upstream_request_id": "msg_1",
        "service_tier": "",
        "note": "",
        "charged_input_tokens": 1_150,
        "charged_output_tokens": 20,
        "charged_calls": 1,
        "served_by": None,
    }
    task = await accounts.get_task("run-7")
    assert (task.task_id, task.source, task.steps, task.attempts, task.cost_nano_usd) == (
        "task_a",
        "header",
        1,
        1,
        70,
    )


async def test_a_task_is_found_by_its_id_before_any_that_is_called_so(world: World) -> None:
    ledger, _, accounts = world
    for task_id, key_id, name in [
        ("task_a", "key00001", "nightly"),
        ("task_b", "key00001", "nightly"),
        ("task_c", "key00002", "task_a"),
    ]:
        a = attempt(task_id=task_id, key_id=key_id, task_source="header", task_external_id=name)
        await reserve(ledger, a, 1)
    assert (await accounts.get_task("task_a")).key_id == "key00001"
    assert (await accounts.get_task("nightly")).task_id == "task_b", "the latest of its key"

    await reserve(ledger, attempt(task_id="task_d", key_id="key00002", task_external_id="nightly"), 1)
    with pytest.raises(InvalidRequest, match="task_d of key key00002, task_b of key key00001"):
        await accounts.get_task("nightly")


@pytest.mark.parametrize("n", [32, 300])
async def test_of_a_herd_exactly_those_that_fit_are_admitted(world: World, n: int) -> None:
    ledger, database, accounts = world
    await accounts.set_budget(TEAM, 7 * 100 + 99)
    herd = [attempt(task_id=f"task_{i % 5}") for i in range(n)]

    answers = await asyncio.gather(*(reserve(ledger, a, 100) for a in herd))

    held = [a for a, answer in zip(herd, answers, strict=True) if isinstance(answer, Granted)]
    assert len(held) == 7
    assert await totals(ledger) == (0, 700)
    assert await rows(database, "SELECT count(*) FROM hold") == [(7,)]
    await asyncio.gather(*(ledger.settle(a, outcome(100)) for a in held))
    assert await totals(ledger) == (700, 0)
    assert await reports.drift(database) == []


async def test_two_processes_share_a_budget_exactly(postgres_url: str, tmp_path: Path) -> None:
    async with (
        opened(postgres_url, tmp_path, replica_id="r1") as (one, database, accounts),
        opened(postgres_url, tmp_path, replica_id="r2") as (two, _, _),
    ):
        await accounts.ensure_defaults()
        await accounts.set_budget(TEAM, 5_000)
        herd = [(ledger, attempt(task_id=f"task_{i % 7}")) for i in range(100) for ledger in (one, two)]

        answers = await asyncio.gather(*(reserve(ledger, a, 100) for ledger, a in herd))
        held = [h for h, answer in zip(herd, answers, strict=True) if isinstance(answer, Granted)]
        assert len(held) == 50
        # Each settled by both processes at once: one of them ends it.
        both = await asyncio.gather(*(x.settle(a, outcome(60)) for _, a in held for x in (one, two)))
        assert sorted(both) == [Settled.ALREADY] * 50 + [Settled.SETTLED] * 50
        assert await totals(one) == (3_000, 0)
        assert await reports.drift(database) == []


async def test_a_repeated_reserve_gets_the_first_answer(world: World) -> None:
    ledger, _, accounts = world
    await accounts.set_budget(TEAM, 1_000)
    a = attempt()
    first = await reserve(ledger, a, 400)

    assert await reserve(ledger, a, 400) == first
    answers = await asyncio.gather(reserve(ledger, a, 900), reserve(ledger, attempt(), 600))
    assert tuple(answers) == (first, granted(600, 0, TEAM, step=2))
    assert await totals(ledger) == (0, 1_000)
    twin = attempt()
    await ledger.settle(a, outcome(0))
    both = await asyncio.gather(reserve(ledger, twin, 10), reserve(ledger, twin, 10))
    assert tuple(both) == (granted(10, 390, TEAM, step=3),) * 2
    assert await reserve(ledger, a, 400) == first  # ended, and not held again
    assert await totals(ledger) == (0, 610)


async def test_an_attempt_has_one_terminal_entry_and_at_most_one_correction(world: World) -> None:
    ledger, database, accounts = world
    await accounts.set_budget(TEAM, 1_000)
    a = attempt()
    await reserve(ledger, a, 400)

    assert await asyncio.gather(*(ledger.settle(a, outcome(cost)) for cost in (90, 90, 60, 50))) == [
        Settled.SETTLED,
        Settled.ALREADY,
        Settled.CORRECTED,
        Settled.ALREADY,
    ]
    assert await entries(database) == [(a.attempt_id, "post", 90), (a.attempt_id, "correct", -30)]
    assert await totals(ledger) == (60, 0)
    assert await reports.drift(database) == []


async def test_a_correction_carries_differences_that_add_up(world: World) -> None:
    ledger, database, accounts = world
    a = attempt(attempt_no=2)
    await reserve(ledger, a, 400)
    unknown = outcome(400, Kind.CHARGE_UNKNOWN, usage=Usage(), quality=Quality.UNKNOWN, error="upstream_lost")
    await ledger.settle(a, unknown)
    proof = outcome(37, Kind.CORRECT, usage=Usage(input_uncached=9, output=3))

    assert await ledger.settle(a, proof) is Settled.CORRECTED

    (total,) = await reports.usage(database, by=("task",), from_ms=0, to_ms=2**50)
    (hourly,) = await reports.usage(database, by=("model",), from_ms=0, to_ms=2**50)
    assert replace(total, group=()) == replace(hourly, group=())
    assert (total.attempts, total.errors, total.retries, total.retries_cost_nano_usd) == (1, 1, 1, 37)
    assert (total.cost_nano_usd, total.list_cost_nano_usd, total.saved_nano_usd) == (37, 111, 74)
    assert (total.tokens["input_uncached"], total.tokens["output"]) == (9, 3)
    task = await accounts.get_task("task_a")
    assert (task.attempts, task.cost_nano_usd, task.tokens) == (1, 37, total.tokens)


async def test_a_void_gives_everything_back(world: World) -> None:
    ledger, database, accounts = world
    await accounts.set_budget(TEAM, 1_000)
    a = attempt()
    await reserve(ledger, a, 1_000)

    assert await ledger.settle(a, void()) is Settled.SETTLED
    assert await entries(database) == [(a.attempt_id, "void", 0)]
    assert await totals(ledger) == (0, 0)


async def test_an_unknown_charge_is_no_proof_against_what_is_posted(world: World) -> None:
    ledger, database, _ = world
    a = attempt()
    await reserve(ledger, a, 400)
    await ledger.settle(a, outcome(70))

    assert await ledger.settle(a, outcome(400, Kind.CHARGE_UNKNOWN)) is Settled.ALREADY
    assert await entries(database) == [(a.attempt_id, "post", 70)]


async def test_every_scope_of_a_hold_is_charged(world: World) -> None:
    ledger, _, accounts = world
    for scope, limit in (("tenant:default", 9_000), (TEAM, 800), ("task:task_a", 500)):
        await accounts.set_budget(scope, limit)
    a, b = attempt(), attempt(task_id="task_b")
    assert await reserve(ledger, a, 400) == granted(400, 100, "task:task_a", step=1)
    assert await reserve(ledger, b, 401) == Refused(TEAM, 800, 0, 400, None)
    await ledger.settle(a, outcome(300))

    assert await totals(ledger, "tenant:default") == (300, 0)
    assert await totals(ledger, TEAM) == (300, 0)
    assert await totals(ledger, "task:task_a") == (300, 0)


async def test_the_retry_of_a_request_is_the_same_step(world: World) -> None:
    ledger, _, _ = world
    first = attempt()
    second = attempt(request_id=first.request_id, attempt_no=2)

    assert await reserve(ledger, first, 10) == granted(10, step=1)
    assert await reserve(ledger, second, 10) == granted(10, step=1)
    batch = [attempt(), attempt(task_id="task_b"), attempt()]
    answers = await asyncio.gather(*(reserve(ledger, a, 10) for a in batch))
    assert [g.task_step for g in answers if isinstance(g, Granted)] == [2, 1, 3]


async def test_an_unbounded_attempt_is_held_at_nothing_unless_a_hard_budget_applies(world: World) -> None:
    ledger, database, accounts = world
    a = attempt()
    assert await reserve(ledger, a, None) == granted(0, step=1)
    assert await rows(database, "SELECT amount_nano_usd, budgets FROM hold") == [(0, "[]")]
    await accounts.set_budget(TEAM, 1_000, on_exceed=OnExceed.WARN)
    warned = (Refused(TEAM, 1_000, 0, 0, None, on_exceed=OnExceed.WARN),)
    assert await reserve(ledger, attempt(), None) == granted(0, step=2, warned=warned)
    await accounts.set_budget(TEAM, 1_000)
    assert await reserve(ledger, attempt(), None) == Refused(TEAM, 1_000, 0, 0, None)


async def test_new_tasks_get_the_budget_of_their_team_and_children_share_it(
    store: str, tmp_path: Path
) -> None:
    async with opened(store, tmp_path, task_limit=100) as (ledger, _, accounts):
        await accounts.put_team(Team("default"))
        await accounts.put_team(Team("rich", task_budget_nano_usd=500))
        rich = attempt(team_id="rich", task_id="task_r")
        child = attempt(team_id="rich", task_id="task_c", parent_task_id="task_r")

        assert await reserve(ledger, attempt(), 60) == granted(60, 40, "task:task_a", step=1)
        assert await reserve(ledger, attempt(), 60) == Refused("task:task_a", 100, 0, 60, None)
        assert await reserve(ledger, rich, 450) == granted(450, 50, "task:task_r", step=1)
        in_both = (*scopes(child), "task:task_r")
        assert await ledger.reserve(child, in_both, usd(60), usd(60)) == Refused(
            "task:task_r", 500, 0, 450, None
        )
        # What an operator sets for a task stands.
        await accounts.set_budget("task:task_a", 1_000)
        assert await reserve(ledger, attempt(), 60) == granted(60, 880, "task:task_a", step=2)


async def test_a_hold_settles_in_the_window_that_admitted_it(world: World) -> None:
    ledger, database, accounts = world
    before = await accounts.set_budget(TEAM, 1_000, "day")
    old, late = attempt(), attempt()
    await reserve(ledger, old, 400)
    await reserve(ledger, late, 600)
    await ledger.settle(old, outcome(100))
    # As if the day had ended a moment ago.
    yesterday_ms = before.window_start_ms - 86_400_000
    await run(
        database,
        "UPDATE budget SET window_start_ms = $1, window_end_ms = $2",
        yesterday_ms,
        before.window_start_ms,
    )
    await run(database, "UPDATE hold SET budgets = $1", f'[["{before.budget_id}",{yesterday_ms}]]')

    assert await totals(ledger) == (0, 0)
    assert await reserve(ledger, attempt(), 1_000) == granted(1_000, 0, TEAM, step=3)
    await ledger.settle(late, outcome(50))

    assert await totals(ledger) == (0, 1_000)
    assert await rows(database, "SELECT window_start_ms, posted_amount, held_amount FROM budget_closed") == [
        (yesterday_ms, 150, 0)
    ]


async def test_a_rolling_window_counts_its_earlier_buckets(world: World) -> None:
    ledger, database, accounts = world
    now = await accounts.set_budget(TEAM, 1_000, "1h")
    a, b = attempt(), attempt()
    await reserve(ledger, a, 400)
    await ledger.settle(a, outcome(300))
    await reserve(ledger, b, 200)
    before_ms = now.window_start_ms - 60_000
    await run(
        database,
        "UPDATE budget SET window_start_ms = $1, window_end_ms = $2",
        before_ms,
        now.window_start_ms,
    )
    await run(database, "UPDATE hold SET budgets = $1", f'[["{now.budget_id}",{before_ms}]]')

    assert await reserve(ledger, attempt(), 500) == granted(500, 0, TEAM, step=3)
    assert await totals(ledger) == (300, 700)
    await ledger.settle(b, outcome(120))
    assert await totals(ledger) == (420, 500)
    # An hour later the bucket has left.
    await run(database, "UPDATE budget_closed SET window_start_ms = window_start_ms - 3660000")
    assert await totals(ledger) == (0, 500)


async def test_refusals_by_posted_money_cost_no_transaction_until_something_changes(world: World) -> None:
    ledger, database, accounts = world
    await accounts.set_budget(TEAM, 100)
    a = attempt()
    await reserve(ledger, a, 100)
    assert await reserve(ledger, attempt(), 50) == Refused(TEAM, 100, 0, 100, None)  # held: may come back
    await ledger.settle(a, outcome(90))
    assert await reserve(ledger, attempt(), 50) == Refused(TEAM, 100, 90, 0, None)

    await run(database, "UPDATE budget SET limit_amount = 1000")  # behind the revision's back
    assert await reserve(ledger, attempt(), 50) == Refused(TEAM, 100, 90, 0, None)
    assert await reserve(ledger, attempt(), 5) == granted(5, 905, TEAM, step=2)
    ledger.revision_changed()
    assert await reserve(ledger, attempt(), 50) == granted(50, 855, TEAM, step=3)


async def test_a_lowered_limit_admits_nothing_and_a_raised_one_does_again(world: World) -> None:
    ledger, _, accounts = world
    await accounts.set_budget(TEAM, 1_000)
    a = attempt()
    await reserve(ledger, a, 800)
    await ledger.settle(a, outcome(800))
    assert (await accounts.set_budget(TEAM, 500)).epoch == 1
    assert await reserve(ledger, attempt(), 1) == Refused(TEAM, 500, 800, 0, None)
    await accounts.set_budget(TEAM, 900)
    ledger.revision_changed()
    assert await reserve(ledger, attempt(), 100) == granted(100, 0, TEAM, step=2)


async def test_a_bill_above_the_hold_is_posted_in_full_and_announced(world: World) -> None:
    ledger, database, accounts = world
    await accounts.set_budget(TEAM, 1_000)
    a = attempt()
    await reserve(ledger, a, 900)
    await ledger.settle(a, outcome(950))

    assert await totals(ledger) == (950, 0)
    assert await rows(database, "SELECT kind, body FROM outbox WHERE kind = 'bound_breach'") == [
        (
            "bound_breach",
            f'{{"attempt_id":"{a.attempt_id}","deployment":"sonnet-main","price_version":"2026-01",'
            '"unit":"usd","held":900,"charged":950}',
        )
    ]
    alerts = await rows(database, "SELECT dedupe FROM outbox WHERE kind = 'budget_alert' ORDER BY dedupe")
    assert [dedupe.rpartition("/")[2] for (dedupe,) in alerts] == ["50", "80", "90"]


async def test_settling_what_the_store_has_lost_makes_the_entry_once(world: World) -> None:
    """As after a failover that lost the last commits, when a journal brings the entries back."""
    ledger, database, accounts = world
    await accounts.set_budget(TEAM, 1_000)
    a = attempt()

    assert await ledger.settle(a, outcome(70)) is Settled.SETTLED
    assert await ledger.settle(a, outcome(70)) is Settled.ALREADY
    assert await entries(database) == [(a.attempt_id, "post", 70)]
    assert await totals(ledger) == (70, 0)
    task = await accounts.get_task("task_a")
    assert (task.steps, task.attempts, task.cost_nano_usd) == (0, 1, 70)


async def test_a_hold_that_turns_up_after_its_entry_is_released_not_charged_twice(world: World) -> None:
    ledger, database, accounts = world
    await accounts.set_budget(TEAM, 1_000)
    a = attempt()
    await ledger.settle(a, outcome(70))  # the entry is there, the hold is not
    await reserve(ledger, a, 400)
    assert await totals(ledger) == (70, 400)

    assert await ledger.settle(a, outcome(70)) is Settled.ALREADY
    assert await totals(ledger) == (70, 0)
    assert await entries(database) == [(a.attempt_id, "post", 70)]


async def test_the_store_itself_refuses_a_second_terminal_entry(world: World) -> None:
    """The last guard: whatever a process believes, the unique index knows."""
    ledger, database, _ = world
    a = attempt()
    await reserve(ledger, a, 10)
    await ledger.settle(a, outcome(5))
    names = [c for c in (await reports.entries(database))[0] if c != "entry_id"]
    again = (
        f"INSERT INTO ledger (entry_id, {', '.join(names)}) "
        f"SELECT 'ent_other', {', '.join(names)} FROM ledger"
    )

    with pytest.raises(Exception, match="too busy"):
        await run(database, again)
    assert len(await reports.entries(database)) == 1


async def test_text_that_no_store_takes_is_replaced(world: World) -> None:
    ledger, database, _ = world
    a = attempt(model_requested="a\0b", client="agent/\udcff")
    await reserve(ledger, a, 10)
    await ledger.settle(a, outcome(5, finish="st\0p"))

    (entry,) = await reports.entries(database)
    assert (entry["model_requested"], entry["client"], entry["finish"]) == (
        "a\ufffdb",
        "agent/?",
        "st\ufffdp",
    )


async def test_bad_amounts_and_ids_are_refused_before_anything_else(world: World) -> None:
    ledger, _, _ = world
    with pytest.raises(ValueError, match="an amount must be from 0"):
        await reserve(ledger, attempt(), 2**63)
    with pytest.raises(ValueError, match="an amount must be from 0"):
        await ledger.settle(attempt(), outcome(-1))
    with pytest.raises(ValueError, match="not an id of this gateway"):
        await reserve(ledger, attempt(attempt_id="att_1"), 1)


class Paused(Runner):
    """Holds the next transaction back until told to go on, and then loses nothing."""

    def __init__(self, inner: Runner) -> None:
        self.flights = 1
        self._inner = inner
        self.pausing = False
        self.entered = asyncio.Event()
        self.go_on = asyncio.Event()

    async def run(self, tx: Callable[[], Tx[T]], timeout_s: float) -> T:
        if self.pausing:
            self.entered.set()
            await self.go_on.wait()
        return await self._inner.run(tx, timeout_s)

    async def close(self) -> None:
        await self._inner.close()


async def test_the_hold_of_a_caller_that_left_is_voided(store: str, tmp_path: Path) -> None:
    opened_database = open_database(store)
    paused = Paused(opened_database.writer)
    database = replace(opened_database, writer=paused)
    ledger = await SqlLedger.open(database, replica_id="r1", journal_dir=tmp_path)
    await Accounts(database, actor="test").ensure_defaults()
    await Accounts(database, actor="test").set_budget(TEAM, 1_000)
    a = attempt()

    paused.pausing = True
    caller = asyncio.create_task(reserve(ledger, a, 400))
    await paused.entered.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    paused.go_on.set()
    await ledger.close()

    assert await entries(database) == [(a.attempt_id, "void", 0)]
    assert await rows(database, "SELECT held_amount FROM budget") == [(0,)]
    await database.close()


class Unlucky(Runner):
    """Performs transactions, and says of some that it does not know whether it did."""

    def __init__(self, inner: Runner, commits: list[bool | None]) -> None:
        self.flights = 1
        self._inner = inner
        self._commits = commits  # None: say how it is; else whether to commit before losing the answer

    async def run(self, tx: Callable[[], Tx[T]], timeout_s: float) -> T:
        commit = self._commits.pop(0) if self._commits else None
        if commit is None:
            return await self._inner.run(tx, timeout_s)

        result: list[T] = []

        def rolled_back() -> Tx[T]:
            result.append((yield from tx()))
            raise Conflict

        if commit:
            result.append(await self._inner.run(tx, timeout_s))
        else:
            with pytest.raises(Conflict):
                await self._inner.run(rolled_back, timeout_s)
        raise CommitUnknown("the answer was lost", result[0])

    async def close(self) -> None:
        await self._inner.close()


@pytest.mark.parametrize("happened", [True, False])
async def test_after_a_lost_answer_to_commit_the_hold_is_looked_for(
    store: str, tmp_path: Path, happened: bool
) -> None:
    commits: list[bool | None] = []
    opened_database = open_database(store)
    database = replace(opened_database, writer=Unlucky(opened_database.writer, commits))
    ledger = await SqlLedger.open(database, replica_id="r1", journal_dir=tmp_path / "journal")
    accounts = Accounts(database, actor="test")
    await accounts.ensure_defaults()
    await accounts.set_budget(TEAM, 1_000)
    a = attempt()

    commits.append(happened)
    if happened:
        assert await reserve(ledger, a, 400) == granted(400, 600, TEAM, step=1)
        commits.append(True)  # now the answer to the settlement is lost, too
        assert await ledger.settle(a, outcome(70)) is Settled.SETTLED
    else:
        with pytest.raises(LedgerUnavailable):
            await reserve(ledger, a, 400)
    await ledger.close()

    expected = (a.attempt_id, "post", 70) if happened else (a.attempt_id, "void", 0)
    assert await entries(database) == [expected]
    assert await reports.drift(database) == []
    assert not list((tmp_path / "journal").glob("*.journal"))
    await database.close()
