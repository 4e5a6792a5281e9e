from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from gateway.demo.agent import StepReport, run_agent, streams
from gateway.demo.bill import BillLine, State
from gateway.demo.faults import Fault, FaultKind, FaultPlan
from gateway.demo.hearing import Counted
from gateway.demo.provider import DemoProvider
from gateway.demo.report import Comparison, Difference, LedgerLine, compare
from gateway.demo.script import Conversation, Dialect, Heard, system_prompt
from gateway.demo.tokens import pieces
from tests.demo.talk import talking


@pytest.mark.parametrize(("dialect", "model"), [("messages", "demo-large"), ("chat", "demo-fast")])
async def test_twenty_steps_with_a_warm_prefix_and_a_bill_that_agrees(dialect: Dialect, model: str) -> None:
    async with talking(DemoProvider(keep_requests=20)) as talk:
        steps: list[StepReport] = []
        report = await run_agent(
            talk.provider.base_url, "k", model=model, dialect=dialect, on_step=steps.append, task_id="t1"
        )
        assert (report.error, report.steps, report.task_id) == ("", tuple(steps), "t1")
        assert [s.step for s in steps] == list(range(1, 21))
        assert [s.stream for s in steps] == [streams(n) for n in range(1, 21)]
        assert {s.tool for s in steps[:-1]} == {
            "list_files", "read_file", "search", "run_command", "edit_file", "run_tests", "write_file", "git_diff",
        }  # fmt: skip
        assert (steps[-1].tool, report.text[:6]) == ("", "[demo]")
        # each step reads everything that the step before sent
        assert [b.usage.cache_read for a, b in pairwise(steps)] == [
            a.usage.input_total - 3 for a, _ in pairwise(steps)
        ]
        bill = talk.provider.bill()
        assert [Counted(b.input_uncached, b.cache_read, b.cache_write_5m, b.output) for b in bill] == [
            s.usage for s in steps
        ]
        assert {seen.headers["x-task-id"] for seen in talk.provider.seen} == {"t1"}


async def test_without_markers_the_same_agent_pays_for_every_token_again() -> None:
    async with talking(DemoProvider()) as talk:
        cold = await run_agent(talk.provider.base_url, "k", model="demo-large", dialect="chat")
        cold_cost = sum(line.nano_usd for line in talk.provider.bill())
        warm = await run_agent(talk.provider.base_url, "k", model="demo-large", dialect="messages")
        warm_cost = sum(line.nano_usd for line in talk.provider.bill(after=20))
    assert (cold.usage.cache_read, cold.finished, warm.finished) == (0, True, True)
    assert cold_cost > 4 * warm_cost


async def test_two_runs_send_the_same_bytes() -> None:
    runs = []
    for _ in range(2):
        async with talking(DemoProvider(keep_requests=6)) as talk:
            await run_agent(talk.provider.base_url, "k", steps=6, dialect="chat", model="demo-fast")
            # the ids of tool calls are the provider's, drawn from what it received
            runs.append([seen.body for seen in talk.provider.seen])
    assert runs[0] == runs[1]
    assert len(runs[0]) == 6


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(FaultKind.REFUSE, 402), "HTTP 402: [demo] injected error 402"),
        (Fault(FaultKind.HTML_502), "HTTP 502"),
        (Fault(FaultKind.ERROR_EVENT), "[demo] injected stream error"),
        (Fault(FaultKind.TRUNCATED_JSON), "DecodeError: Input data was truncated"),
    ],
)
async def test_a_run_ends_at_the_first_failure_and_says_why(fault: Fault, error: str) -> None:
    async with talking(DemoProvider(faults=FaultPlan((Fault(), fault)))) as talk:
        report = await run_agent(talk.provider.base_url, "k", steps=5)
    assert (len(report.steps), report.finished) == (2, False)
    assert report.error == error


def test_the_conversation_only_grows_and_marks_the_last_two_user_messages() -> None:
    talk = Conversation("m", "messages", steps=4)
    bodies: list[Any] = [talk.body(True)]
    for n in range(3):
        assert talk.hear(Heard("", f"toolu_{n}", "read_file", '{"path":"a"}'))
        bodies.append(talk.body(False))
    assert not talk.hear(Heard("done"))
    for before, after in pairwise(bodies):
        assert _unmarked(after)["messages"][: len(before["messages"])] == _unmarked(before)["messages"]
    marked = [i for i, m in enumerate(bodies[-1]["messages"]) if "cache_control" in m["content"][-1]]
    assert (marked, len(bodies[-1]["messages"])) == ([4, 6], 7)
    assert 2_500 < len(pieces(system_prompt())) < 4_000


def _unmarked(body: Any) -> Any:
    return json.loads(json.dumps(body).replace(', "cache_control": {"type": "ephemeral"}', ""))


def test_a_model_that_stops_early_is_told_to_go_on() -> None:
    talk = Conversation("m", "chat", steps=3)
    assert talk.hear(Heard("I am done."))
    roles = [m["role"] for m in talk.body(False)["messages"]]
    assert roles == ["system", "user", "assistant", "user"]


# --- ledger against bill -----------------------------------------------------------------------------


def line(attempt: str, bill_id: int = 1, *, output: int = 10, nano_usd: int = 100) -> BillLine:
    return BillLine(
        bill_id,
        attempt,
        "r",
        0,
        "m",
        "m",
        "chat",
        200,
        5,
        0,
        0,
        0,
        output,
        nano_usd,
        State.COMPLETE,
        "stop",
        False,
    )


def entry(
    attempt: str, kind: str = "post", *, input_uncached: int = 5, output: int = 10, cost: int = 100
) -> LedgerLine:
    return LedgerLine(attempt, kind, input_uncached=input_uncached, output=output, cost_nano_usd=cost)


def test_equal_when_corrections_make_it_so() -> None:
    entries = [
        entry("a"),
        entry("b", "charge_unknown", input_uncached=50, output=99, cost=900),
        entry("b", "correct", input_uncached=-45, output=-89, cost=-800),
        entry("never_arrived", "void", input_uncached=0, output=0, cost=0),
    ]
    assert compare(entries, [line("a"), line("b", 2)]) == Comparison(3, 4, 2, 200, 200, ())


def test_every_difference_is_listed() -> None:
    found = compare(
        [entry("a", cost=101), entry("b"), entry("b"), entry("lost", input_uncached=0, output=0, cost=1)],
        [line("a"), line("b", 2), line("unknown", 3), line("twice", 4, output=0), line("twice", 5, output=0)],
    )
    assert found.differences == (
        Difference("a", "cost_nano_usd", 101, 100),
        Difference("b", "entries", 2, 1),
        Difference("b", "input_uncached", 10, 5),
        Difference("b", "output", 20, 10),
        Difference("b", "cost_nano_usd", 200, 100),
        Difference("lost", "cost_nano_usd", 1, 0),
        Difference("unknown", "entries", 0, 1),
        Difference("unknown", "input_uncached", 0, 5),
        Difference("unknown", "output", 0, 10),
        Difference("unknown", "cost_nano_usd", 0, 100),
        Difference("twice", "entries", 0, 2),
        Difference("twice", "input_uncached", 0, 10),
        Difference("twice", "cost_nano_usd", 0, 200),
    )
    assert not found.equal


def test_ledger_lines_are_read_from_rows_of_either_spelling() -> None:
    row = {"attempt_id": "a", "kind": "post", "input_uncached": 5, "output": 10}
    assert (
        LedgerLine.of({**row, "amount_nano_usd": 100})
        == LedgerLine.of({**row, "cost_nano_usd": 100})
        == entry("a")
    )
