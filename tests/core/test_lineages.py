"""What is remembered of a run is what a fresh look would find, however its requests change; and it is bounded."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core import dialects
from gateway.core.catalog import Operation
from gateway.core.dialects import Facts
from gateway.core.lineages import Lineages
from gateway.core.markers import Outline
from gateway.core.prefix import chain
from tests.support.played_cache import compact

MARK = {"cache_control": {"type": "ephemeral"}}
TURNS = st.sampled_from(
    [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "a", **MARK}]},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "n", "input": {}}] * 3},
        {"role": "system", "content": "s"},
        {"role": 7, "content": None},
    ]
)
HEADS = st.sampled_from(
    [
        {},
        {"system": "one"},
        {"system": "another one"},
        {"system": [{"type": "text", "text": "x", **MARK}]},
        {"system": "one", "tools": [{"name": "a"}]},
        {"tools": [{"name": "a"}, {"name": "b", **MARK}]},
        {"system": "one", "cache_control": {"type": "ephemeral"}},
    ]
)


def asked(head: dict[str, Any], turns: list[dict[str, Any]]) -> tuple[Facts, bytes]:
    said = [*turns, {"role": "user", "content": "end"}]
    body = compact({"model": "m", "max_tokens": 9, **head, "messages": said})
    return dialects.read(Operation.MESSAGES, body), body


def outlined(memory: Lineages, facts: Facts, body: bytes) -> Outline:
    return memory.outline(memory.at(("k",), b""), facts, body)


@settings(deadline=None)
@given(st.lists(st.tuples(HEADS, st.lists(TURNS, max_size=8)), min_size=1, max_size=6))
def test_an_outline_is_the_same_whatever_came_before(requests: list[tuple[Any, Any]]) -> None:
    memory = Lineages()
    for head, turns in requests:
        facts, body = asked(head, turns)
        assert outlined(memory, facts, body) == outlined(Lineages(), facts, body)
    # and when one of them comes again with a step more
    head, turns = requests[0]
    facts, body = asked(head, [*turns, {"role": "assistant", "content": "x"}])
    assert outlined(memory, facts, body) == outlined(Lineages(), facts, body)


def test_a_run_is_known_by_its_opening_whatever_the_order_of_its_tools() -> None:
    memory = Lineages()
    tools = [{"name": "a"}, {"name": "b"}]
    first, _ = asked({"system": "one", "tools": tools}, [])
    again, _ = asked({"system": "one", "tools": tools[::-1]}, [])
    other, _ = asked({"system": "two", "tools": tools}, [])
    run = memory.find(("k",), first.segments)
    assert memory.find(("k",), again.segments) is run
    assert memory.find(("k",), other.segments) is not run
    assert memory.find(("another key",), first.segments) is not run


def test_memory_is_bounded_by_runs_and_by_segments() -> None:
    memory = Lineages(lineages_max=3, segments_max=100)
    facts, body = asked({}, [{"role": "user", "content": str(n)} for n in range(40)])
    runs = [memory.at(("k",), b"%d" % n) for n in range(4)]
    assert memory.at(("k",), b"0") is not runs[0]
    for n in range(10, 14):
        memory.outline(memory.at(("k",), b"%d" % n), facts, body)
    last = memory.at(("k",), b"13")
    assert last.outline is not None
    assert memory.at(("k",), b"10").outline is None


def test_gaps_are_those_between_turns_and_not_between_parallel_calls() -> None:
    memory = Lineages()
    run = memory.at(("k",), b"")
    for now_s in (100.0, 100.1, 130.0, 930.0):
        memory.arrive(run, now_s)
    assert ([round(gap, 1) for gap in run.gaps_s], run.steps, run.longest_gap_s) == ([29.9, 800.0], 4, 800.0)
    for n in range(40):
        memory.arrive(run, 2_000.0 + 10 * n)
    assert len(run.gaps_s) == 16


def test_a_head_is_seen_within_its_life_only() -> None:
    memory = Lineages()
    facts, _ = asked({"system": "one"}, [])
    links = chain(facts.segments)
    assert [memory.head_seen(links, 0, now_s, 300.0) for now_s in (0.0, 299.0, 600.0)] == [False, True, False]
    assert not memory.head_seen(links, -1, 600.0, 300.0)
