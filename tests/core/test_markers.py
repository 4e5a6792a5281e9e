"""Where marks go: the planner on outlines written by hand, and what it earns at the demo provider's cache."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.cache_rules import CacheRule
from gateway.core.catalog import Operation
from gateway.core.dialects import blocks
from gateway.core.dialects.blocks import Message
from gateway.core.markers import Mark, Outline, better_life, plan
from gateway.core.shaping import Level
from tests.support.played_cache import Played, compact, rule_of

OPUS, HAIKU = rule_of("anthropic/claude-opus-4-8"), rule_of("anthropic/claude-haiku-4-5")
SOL, OLD = rule_of("openai/gpt-6-sol"), rule_of("openai/gpt-5.4")
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "?": ""}


def outline(
    roles: str,
    *,
    tools: bool = True,
    system: bool = True,
    size: int = 8_000,
    blocks: dict[int, int] | None = None,
    marked: tuple[int, ...] = (),
    long: tuple[int, ...] = (),
    automatic: bool = False,
) -> Outline:
    """Tools, system, then one message per letter; `blocks`, `marked` and `long` by segment."""
    first = tools + system
    messages = [
        Message(ROLES[r], (blocks or {}).get(i + first, 1), marked.count(i + first), i + first in long)
        for i, r in enumerate(roles)
    ]
    counts = [1] * first + [m.blocks for m in messages]
    sums = [sum(counts[: i + 1]) for i in range(len(counts))]
    sizes = [size * (i + 1) for i in range(len(counts))]
    return Outline(tools, system, messages, sizes, sums, sorted(marked), automatic)


def marks(
    rule: CacheRule,
    told: Outline,
    operation: Operation = Operation.MESSAGES,
    continued: bool = True,
    **more: Any,
) -> list[int]:
    return [m.segment for m in plan(rule, operation, told, continued=continued, **more).marks]


def test_a_run_is_marked_at_tools_system_and_tail() -> None:
    assert marks(OPUS, outline("uat")) == [0, 1, 4]
    # system messages at the front are the system prompt of chat; those at the end move along with the next step
    assert marks(OPUS, outline("ssuats", system=False), Operation.CHAT) == [0, 2, 5]
    # an answer takes no mark, and what has no shape that is known is left alone
    assert marks(OPUS, outline("uata?")) == [0, 1, 4]


def test_behind_a_head_that_changes_with_every_step_nothing_is_marked_but_the_tools() -> None:
    assert marks(OPUS, outline("uau"), head_changes=True) == [0]
    assert marks(OPUS, outline("uau", tools=False), head_changes=True) == []


def test_nothing_is_marked_below_the_minimum() -> None:
    assert plan(OPUS, Operation.MESSAGES, outline("u", size=1_100), continued=True).why == "below the minimum"
    # 1,024 tokens of 3.5 bytes are reached with the second of these segments, 4,096 with the fifth
    assert marks(OPUS, outline("uat", size=3_000)) == [1, 4]
    assert marks(HAIKU, outline("uat", size=3_000)) == [4]


def test_one_call_alone_is_not_marked_unless_others_share_its_head() -> None:
    alone = outline("u", tools=False)
    assert plan(OPUS, Operation.MESSAGES, alone, continued=False).why == "one call alone"
    assert marks(OPUS, alone, continued=False, head_seen=True) == [0]


@pytest.mark.parametrize(
    ("marked", "added"),
    [
        ((0, 1, 3, 4), []),  # no room
        ((0, 1, 2, 3, 4), []),  # one too many already: the provider says so, not we
        ((1, 4), []),  # Claude Code, opencode: head and tail are theirs
        ((4,), [0, 1]),  # mini-swe-agent marks its last block only
        ((1,), [4]),  # a head without a tail
    ],
)
def test_markers_of_the_client_are_counted_and_stay_alone_where_they_are(
    marked: tuple[int, ...], added: list[int]
) -> None:
    assert marks(OPUS, outline("uat", marked=marked)) == added


def test_automatic_caching_is_a_marker_too() -> None:
    assert marks(OPUS, outline("uat", automatic=True)) == [0, 1]
    # one for an hour: what stands before it may not live shorter (the provider answers 400)
    hour = outline("uat", automatic=True)
    hour.automatic_long = True
    assert plan(OPUS, Operation.MESSAGES, hour, continued=True).marks == (Mark(0, "1h"), Mark(1, "1h"))


def test_blocks_that_the_gateway_puts_between_count_for_the_lookback() -> None:
    close = outline("uat", blocks={3: 9, 4: 10})
    assert marks(OPUS, close) == [0, 1, 4]
    assert marks(OPUS, close, notes=[2]) == [0, 1, 2, 4]
    assert marks(OPUS, close, notes=[4]) == [0, 1, 4]
    told = outline("su" + "a" + "t" * 19, tools=False, system=False)
    assert marks(SOL, told, Operation.CHAT) == [0]
    assert marks(SOL, told, Operation.CHAT, notes=[1]) == [0, 1]


def test_what_runs_share_is_marked_in_front_of_what_is_one_run_s_alone() -> None:
    assert marks(OPUS, outline("uat", marked=(1,)), shared_head=True) == [1, 4]
    assert marks(OPUS, outline("uat", marked=(1,))) == [4]
    assert marks(OPUS, outline("uat", marked=(0, 1, 2, 4)), shared_head=True) == []


def test_a_result_of_a_tool_takes_a_breakpoint_in_the_responses_dialect() -> None:
    item = {"type": "function_call_output", "call_id": "c", "output": "out"}
    text = blocks.marker_text("prompt_cache_breakpoint")

    def marked(told: dict[str, Any]) -> Any:
        raw = compact(told)
        for start, end, added in reversed(blocks.mark_message(raw, Operation.RESPONSES, text)):
            raw = raw[:start] + added + raw[end:]
        return json.loads(raw)

    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    assert marked(item) == {**item, "output": [{"type": "input_text", "text": "out", **mark}]}
    listed = {**item, "output": [{"type": "input_text", "text": "a"}]}
    assert marked(listed) == {**item, "output": [{"type": "input_text", "text": "a", **mark}]}
    for other in (
        {**item, "output": ""},
        {**item, "type": "local_shell_call_output"},
        {**item, "output": {}},
    ):
        assert marked(other) == other


def test_an_anchor_where_the_step_before_ended_if_the_lookback_does_not_reach() -> None:
    wide = outline("uat", blocks={3: 11, 4: 11})
    assert marks(OPUS, wide) == [0, 1, 2, 4]
    assert marks(OPUS, outline("uat", blocks={3: 9, 4: 10})) == [0, 1, 4]
    # it goes where an earlier request is known to have written, and beside a client's own tail
    assert marks(OPUS, outline("uatat", blocks={5: 19}), entries=(1, 2)) == [0, 1, 2, 6]
    assert marks(OPUS, outline("uat", blocks={4: 30}, marked=(1, 4))) == [2]
    # only if nothing better is left: three of the client's own leave room for the anchor alone
    assert marks(OPUS, outline("uatat", blocks={6: 30}, marked=(0, 1, 6))) == [4]


def test_openai_is_marked_by_generation() -> None:
    """From 5.6 on the end of the latest message is marked by the provider, so the head and anchors are left."""
    told = outline("suat", tools=False, system=False)
    assert marks(SOL, told, Operation.CHAT) == [0]
    assert marks(SOL, outline("su" + "a" + "t" * 25, tools=False, system=False), Operation.CHAT) == [0, 1]
    # a reminder at the end will not be there in the next step, so what is before it is marked
    assert marks(SOL, outline("suats", tools=False, system=False), Operation.CHAT) == [0, 3]
    assert plan(SOL, Operation.MESSAGES, told, continued=True).why == "requests here cannot mark"
    assert plan(OLD, Operation.CHAT, told, continued=True).why == "requests here cannot mark"
    for model in ("gemini/gemini-3-pro", "deepseek/deepseek-v4-flash", "xai/grok-5", "vllm/m", "mistral/m"):
        assert plan(rule_of(model), Operation.CHAT, told, continued=True).marks == (), model
    qwen = plan(rule_of("qwen/qwen4-max"), Operation.CHAT, told, continued=True)
    assert qwen.marks == (Mark(0), Mark(3))


def test_a_longer_life_never_follows_a_shorter_one() -> None:
    hour = OPUS.lives[1]
    assert plan(OPUS, Operation.MESSAGES, outline("uat"), continued=True, life=hour).marks == (
        Mark(0, "1h"),
        Mark(1, "1h"),
        Mark(4, "1h"),
    )
    # before the client's hour only an hour may stand; behind its five minutes only five minutes
    told = outline("uatat", marked=(4,), long=(4,), blocks={6: 30})
    assert plan(OPUS, Operation.MESSAGES, told, continued=True, entries=(1,)).marks[:2] == (
        Mark(0, "1h"),
        Mark(1, "1h"),
    )
    five = plan(OPUS, Operation.MESSAGES, outline("uat", marked=(1,)), continued=True, life=hour)
    assert five.marks == (Mark(4),)


@pytest.mark.parametrize(
    ("gaps_s", "chosen"),
    [
        ([], None),
        ([10] * 16, None),
        ([400], None),  # once may be an accident: an hour costs twice the input price for all that is there
        ([400, 400], "1h"),
        ([10, 400, 10, 10, 10], None),
        ([10, 400, 10, 400, 10, 400], "1h"),
        ([4_000] * 5, None),  # even an hour has passed by then
    ],
)
def test_the_life_follows_the_gaps_between_turns(gaps_s: list[float], chosen: str | None) -> None:
    life = better_life(OPUS, Operation.MESSAGES, gaps_s)
    assert (life.name if life else None) == chosen


def test_no_longer_life_where_the_prices_do_not_make_it_pay() -> None:
    dear = replace(OPUS, lives=(OPUS.lives[0], replace(OPUS.lives[1], write_milli=9_000)))
    assert better_life(dear, Operation.MESSAGES, [400, 400]) is None
    assert better_life(replace(OPUS, lives=OPUS.lives[:1]), Operation.MESSAGES, [400, 400]) is None


@given(
    roles=st.text("suat?", min_size=1, max_size=40),
    blocks=st.lists(st.integers(1, 40), min_size=40, max_size=40),
    marked=st.lists(st.integers(0, 41), max_size=6),
    sizes=st.integers(1, 9_000),
    heads=st.tuples(st.booleans(), st.booleans()),
    automatic=st.booleans(),
    continued=st.booleans(),
    hour=st.booleans(),
)
def test_whatever_comes_no_more_is_marked_than_allowed(
    roles: str,
    blocks: list[int],
    marked: list[int],
    sizes: int,
    heads: tuple[bool, bool],
    automatic: bool,
    continued: bool,
    hour: bool,
) -> None:
    tools, system = heads
    n = len(roles) + tools + system
    theirs = tuple(m for m in marked if m < n)
    told = outline(
        roles,
        tools=tools,
        system=system,
        size=sizes,
        blocks=dict(enumerate(blocks)),
        marked=theirs,
        long=theirs[:1],
        automatic=automatic,
    )
    for rule, operation in ((OPUS, Operation.MESSAGES), (OPUS, Operation.CHAT), (SOL, Operation.CHAT)):
        found = plan(rule, operation, told, continued=continued, life=rule.lives[1] if hour else None).marks
        own = [m.segment for m in found]
        assert own == sorted(set(own))
        assert not own or len(own) + len(theirs) + automatic <= 4
        assert not set(own) & set(theirs)
        longs = [i for i, m in enumerate(found) if m.life]
        assert longs == list(range(len(longs)))


# --- at the demo provider -------------------------------------------------------------------------------------


def step(calls: list[int], *, words: int = 900) -> bytes:
    """A messages request after turns with so many parallel tool calls each."""
    system = [{"type": "text", "text": "rule " * words}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "task " * 200}]
    for turn, n in enumerate(calls):
        ids = [f"t{turn}_{i}" for i in range(n)]
        uses = [{"type": "tool_use", "id": i, "name": "f", "input": {"n": i}} for i in ids]
        results = [{"type": "tool_result", "tool_use_id": i, "content": f"result {i}"} for i in ids]
        messages += [{"role": "assistant", "content": uses}, {"role": "user", "content": results}]
    tools = [{"name": "f", "input_schema": {"type": "object", "properties": {"n": {"type": "string"}}}}]
    return compact({"model": "x", "max_tokens": 9, "system": system, "tools": tools, "messages": messages})


def test_many_parallel_calls_do_not_lose_the_history() -> None:
    """Eleven parallel calls are 22 blocks, two more than a marker looks back (anthropics/claude-code#63930)."""
    safe = Played("demo-large", Level.SAFE)
    first = safe.send(Operation.MESSAGES, step([]))
    wide = safe.send(Operation.MESSAGES, step([11]))
    assert first.cache_write_5m == wide.cache_read > 1_000
    wider = safe.send(Operation.MESSAGES, step([11, 40]))
    assert wider.cache_read == wide.cache_read + wide.cache_write_5m


def test_long_pauses_between_turns_choose_the_hour_and_then_keep_it() -> None:
    safe = Played("demo-large", Level.SAFE)
    reads = []
    for turn in range(6):
        split = safe.send(Operation.MESSAGES, step([1] * turn))
        reads.append((split.cache_read > 0, split.cache_write_5m > 0, split.cache_write_1h > 0))
        safe.now_s += 400
    assert reads == [
        (False, True, False),
        (False, True, False),
        (False, False, True),
        (True, False, True),
        (True, False, True),
        (True, False, True),
    ]
    assert safe.last is not None
    assert safe.last.long_write
