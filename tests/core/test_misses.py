"""Why a request read less than it could have: told from digests, times and the provider's usage alone."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core import dialects
from gateway.core.catalog import Operation
from gateway.core.clients import recognise
from gateway.core.errors import InvalidRequest
from gateway.core.explanation import Cause, Explanation, Verdict, advice, prevented_by
from gateway.core.misses import Rules, rules_of
from gateway.core.prefix import anchor, chain
from gateway.core.prices import PriceRow
from gateway.core.rates import Rates
from gateway.core.threads import THREAD_BYTES, Answered, Threads
from gateway.core.usage import Usage
from tests.support.agent_runs import compact, facts_of
from tests.support.material import captured

#: $3 per million, written at 1.25 and read at 0.1 times that.
ROW = PriceRow("p/m", "p/m@1", 0, Rates(3_000_000, 15_000_000, 300_000, 3_750_000, 6_000_000))
EXPLICIT = Rules(explicit=True, min_tokens=1_000, life_ms=300_000, lookback_blocks=20)
IMPLICIT = Rules(min_tokens=1_000, granularity_tokens=128, life_ms=None)

Body = dict[str, Any]


@dataclass
class Play:
    """A task's requests, one after the other, ten seconds apart unless told."""

    rules: Rules = EXPLICIT
    threads: Threads = field(default_factory=Threads)
    now_ms: int = 1_000_000
    task_step: int = 1
    numbers: Any = field(default_factory=lambda: itertools.count(1))

    def sends(
        self,
        body: Body,
        usage: Usage,
        *,
        kind: str = "",
        deployment: str = "p/m",
        after_ms: int = 10_000,
        task: str = "t",
        operation: Operation = Operation.CHAT,
        level: str = "",
        restored: frozenset[str] = frozenset(),
    ) -> Explanation | None:
        self.now_ms += after_ms
        raw = compact({"model": "m", **body})
        facts = dialects.read(operation, raw)
        answered = Answered(
            f"req_{next(self.numbers)}",
            facts,
            raw,
            chain(facts.segments)[: anchor(facts.segments)],
            kind,
            deployment,
            usage,
            self.rules,
            ROW,
            "",
            self.now_ms - 1_000,
            self.task_step,
            level,
            restored=restored,
        )
        return self.threads.answered(task, answered, self.now_ms)


def tool(name: str, description: str = "does it") -> Body:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": {}}}


TOOLS = [tool("read"), tool("write"), tool("grep")]
SYSTEM = "\n".join(f"rule {n}: keep it short and in order" for n in range(100))
HISTORY = [
    {"role": "user" if n % 2 == 0 else "assistant", "content": f"turn {n} " + "word " * 40} for n in range(8)
]


def run(turns: int = 3, *, tools: list[Body] = TOOLS, system: str = SYSTEM, **settings: Any) -> Body:
    return {"messages": [{"role": "system", "content": system}, *HISTORY[:turns]], "tools": tools, **settings}


WROTE = Usage(input_uncached=10, cache_write_5m=5_000, output=5)
READ = Usage(input_uncached=10, cache_read=5_000, cache_write_5m=200, output=5)
LOST_ALL = Usage(input_uncached=10, cache_write_5m=5_200, output=5)


def test_a_run_that_only_grows_has_one_miss_its_first() -> None:
    play = Play()
    assert play.sends(run(1), WROTE) == Explanation(Verdict.MISS, Cause.FIRST_OF_ITS_KIND, input_tokens=5_010)
    assert play.sends(run(3), READ) is None
    assert play.sends(run(5), Usage(10, 5_200, 200)) is None


def second(body: Body, usage: Usage = LOST_ALL, *, rules: Rules = EXPLICIT, **how: Any) -> Explanation:
    """What is said about a second request that follows `run(3)`."""
    play = Play(rules)
    play.sends(run(3), WROTE)
    said = play.sends(body, usage, **how)
    assert said is not None
    return said


@pytest.mark.parametrize(
    ("body", "cause", "segment", "index"),
    [
        (run(5, tools=[*TOOLS, tool("bash")]), Cause.TOOLS_ADDED, "tools", 3),
        (run(5, tools=[tool("bash"), *TOOLS]), Cause.TOOLS_ADDED, "tools", 0),
        (run(5, tools=[]), Cause.TOOLS_REMOVED, "tools", 0),
        (run(5, tools=TOOLS[:2]), Cause.TOOLS_REMOVED, "tools", 2),
        (run(5, tools=[TOOLS[0], TOOLS[2], TOOLS[1]]), Cause.TOOLS_REORDERED, "tools", 1),
        (run(5, tools=[TOOLS[0], tool("write", "9:14"), TOOLS[2]]), Cause.TOOLS_SCHEMA_CHANGED, "tools", 1),
        (run(5, system=SYSTEM.replace("rule 4:", "at 9:14")), Cause.SYSTEM_LINE_CHANGED, "system", 5),
        (run(5, system=SYSTEM + "\nmore"), Cause.SYSTEM_LINE_CHANGED, "system", 101),
        (run(5, reasoning_effort="high"), Cause.SETTINGS_CHANGED, "settings", -1),
        (
            {**run(5), "messages": [run(5)["messages"][0], {"role": "user", "content": "x"}, *HISTORY[1:5]]},
            Cause.HISTORY_REWRITTEN,
            "message",
            1,
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_the_first_difference_is_named(body: Body, cause: Cause, segment: str, index: int) -> None:
    said = second(body)
    assert (said.verdict, said.cause, said.segment, said.index) == (Verdict.MISS, cause, segment, index)
    assert said.previous_request_id == "req_1"
    assert advice(cause)


def test_an_explanation_prices_what_was_lost_and_says_where() -> None:
    before = SYSTEM.index("rule 50")
    said = second(run(5, system=SYSTEM.replace("rule 50:", "at 9:14:07")))
    tools_bytes = len(compact(TOOLS))
    assert said == Explanation(
        Verdict.MISS,
        Cause.SYSTEM_LINE_CHANGED,
        "system",
        51,
        tools_bytes + before,
        "",
        5_210,
        0,
        said.expected_tokens,
        said.expected_tokens,
        # what was written at 3.75 could have been read at 0.3
        said.expected_tokens * 3_450,
        "req_1",
        9_000,
    )
    # all that was the same text: one line of a hundred and two new turns were not
    assert 4_200 < said.expected_tokens < 5_000
    assert "9:14" not in msgspec.json.encode(said).decode()


def test_a_setting_is_named_and_what_is_no_part_of_the_prefix_is_not_one() -> None:
    assert second(run(5, tool_choice="none")).setting == "tool_choice"
    assert second(run(5, temperature=1, user="u"), rules=EXPLICIT).cause is Cause.PROVIDER_SIDE


@pytest.mark.parametrize(
    ("how", "usage", "cause"),
    [
        ({"after_ms": 400_000}, LOST_ALL, Cause.EXPIRED),
        ({"deployment": "q/m"}, LOST_ALL, Cause.MODEL_OR_DEPLOYMENT_CHANGED),
        ({}, LOST_ALL, Cause.PROVIDER_SIDE),
        ({}, Usage(input_uncached=5_210), Cause.NOT_MARKED),
    ],
)
def test_where_the_prompt_goes_on_unchanged_time_and_place_decide(
    how: dict[str, Any], usage: Usage, cause: Cause
) -> None:
    said = second(run(5), usage, **how)
    assert (said.verdict, said.cause, said.segment, said.lost_tokens) == (Verdict.MISS, cause, "", 5_000)


def test_where_the_request_before_was_not_marked_nothing_was_there_to_be_read() -> None:
    """As the first one of a run often is not that could have been one call alone."""
    play = Play()
    play.sends(run(3), Usage(input_uncached=5_000))
    said = play.sends(run(5), Usage(10, cache_write_5m=5_200))
    assert said is not None
    assert said.cause is Cause.NOT_MARKED
    said = play.sends(run(7), Usage(10, cache_write_5m=5_400))
    assert said is not None
    assert said.cause is Cause.PROVIDER_SIDE


def test_a_longer_life_that_was_paid_for_is_not_expired_after_five_minutes() -> None:
    play = Play()
    play.sends(run(3), Usage(10, cache_write_1h=5_000))
    said = play.sends(run(5), LOST_ALL, after_ms=1_000_000)
    assert said is not None
    assert said.cause is Cause.PROVIDER_SIDE
    play = Play()
    play.sends(run(3), Usage(10, cache_write_12h=5_000))
    for after_ms, cause in ((40_000_000, Cause.PROVIDER_SIDE), (60_000_000, Cause.EXPIRED)):
        said = play.sends(run(5), Usage(10, cache_write_12h=5_000), after_ms=after_ms)
        assert said is not None
        assert said.cause is cause


def test_more_blocks_than_the_look_back_are_an_overrun() -> None:
    def with_calls(count: int) -> Body:
        calls = [{"id": f"c{n}", "function": {"name": "read", "arguments": "{}"}} for n in range(count)]
        results = [{"role": "tool", "tool_call_id": f"c{n}", "content": "x"} for n in range(count)]
        body = run(3)
        return {**body, "messages": [*body["messages"], {"role": "assistant", "tool_calls": calls}, *results]}

    assert second(with_calls(11)).cause is Cause.LOOKBACK_OVERRUN
    assert second(with_calls(9)).cause is Cause.PROVIDER_SIDE


def test_part_of_a_prefix_read_is_partial_and_a_rounded_length_is_a_hit() -> None:
    play = Play(IMPLICIT)
    assert play.sends(run(3), Usage(input_uncached=5_000)) == Explanation(
        Verdict.MISS, Cause.FIRST_OF_ITS_KIND, input_tokens=5_000
    )
    assert play.sends(run(4), Usage(200, 4_992)) is None
    said = play.sends(run(5), Usage(4_200, 1_024))
    assert said is not None
    assert (said.verdict, said.cause, said.lost_tokens) == (
        Verdict.PARTIAL,
        Cause.PROVIDER_SIDE,
        5_192 // 128 * 128 - 1_024,
    )
    # uncached at 3 instead of read at 0.3
    assert said.lost_nano_usd == said.lost_tokens * 2_700


def test_what_is_too_short_to_be_cached_says_nothing_and_is_not_remembered() -> None:
    play = Play()
    assert play.sends(run(1), Usage(input_uncached=900)) is None
    assert play.threads.size_bytes == 0
    assert play.sends(run(3), WROTE, after_ms=1) == Explanation(
        Verdict.MISS, Cause.FIRST_OF_ITS_KIND, input_tokens=5_010
    )


def test_a_provider_of_which_nothing_is_known_is_measured_by_what_it_has_shown() -> None:
    play = Play(rules_of(None))
    play.sends(run(3), Usage(input_uncached=5_000))
    assert play.sends(run(5), Usage(input_uncached=5_200)) is None  # it may have no cache at all
    assert play.sends(run(6), Usage(200, 5_000)) is None
    said = play.sends(run(7), Usage(input_uncached=5_300))
    assert said is not None
    assert (said.cause, said.lost_tokens) == (Cause.PROVIDER_SIDE, 5_000)


def test_what_another_process_has_answered_is_not_called_the_first() -> None:
    said = [Play(task_step=step).sends(run(3), WROTE) for step in (1, 2)]
    assert [s and (s.cause, s.unseen) for s in said] == [
        (Cause.FIRST_OF_ITS_KIND, False),
        (Cause.FIRST_OF_ITS_KIND, True),
    ]


def test_of_two_that_were_sent_at_once_neither_could_read_the_other() -> None:
    play = Play()
    play.sends(run(3), WROTE)
    said = play.sends(run(3), WROTE, after_ms=500)  # began 500 ms before the first was answered
    assert said == Explanation(Verdict.MISS, Cause.FIRST_OF_ITS_KIND, input_tokens=5_010)


# --- threads --------------------------------------------------------------------------------------------


def test_title_calls_sub_agents_and_compactions_are_no_misses_of_the_main_run() -> None:
    play = Play()
    play.sends(run(3), WROTE)
    title = {"messages": [{"role": "system", "content": "Give a title. " * 500}, HISTORY[0]]}
    other = {"messages": [{"role": "system", "content": "You are a sub-agent. " * 300}, HISTORY[0]]}
    first = Explanation(Verdict.MISS, Cause.FIRST_OF_ITS_KIND, input_tokens=5_010)
    assert play.sends(title, WROTE, kind="title") == first
    assert play.sends(other, WROTE, kind="subagent/a1") == first
    assert play.sends(run(5), READ) is None
    assert (
        play.sends({**other, "messages": [*other["messages"], HISTORY[1]]}, READ, kind="subagent/a1") is None
    )
    compaction = {"messages": [*run(5)["messages"], {"role": "user", "content": "sum up"}]}
    assert play.sends(compaction, WROTE, kind="compaction") == first
    window = {**run(1), "messages": [run(1)["messages"][0], {"role": "user", "content": "the story so far"}]}
    said = play.sends(window, Usage(10, cache_write_5m=3_000))
    assert said is not None
    assert (said.cause, said.segment, said.index) == (Cause.COMPACTION, "message", 1)
    # of the new window only tools and system prompt could have been read
    assert said.expected_tokens < 3_000


def test_two_runs_of_one_task_separate_at_their_first_difference_and_both_go_on() -> None:
    play = Play()

    def side(turns: int) -> Body:
        body = run(turns)
        others = [{"role": m["role"], "content": m["content"].upper()} for m in HISTORY[1:turns]]
        return {**body, "messages": [*body["messages"][:2], *others]}

    assert play.sends(run(1), WROTE) is not None
    assert play.sends(run(3), READ) is None
    assert play.sends(side(3), READ) is None  # forks: the beginning that both have was read
    assert play.sends(side(5), Usage(10, 5_200, 200)) is None


def test_memory_is_bounded_in_tasks_threads_bytes_and_pieces() -> None:
    one = THREAD_BYTES + 5 * 8  # tools, system and three turns, 8 bytes each
    play = Play(threads=Threads(tasks_max=3))
    for task in "abcd":
        play.sends(run(3), WROTE, task=task)
    assert play.threads.size_bytes == 3 * one
    assert play.sends(run(5), READ, task="a") is None  # forgotten, so nothing is said
    small = Threads(bytes_max=2 * one + 1)
    play = Play(threads=small)
    for task in "abcdefgh":
        play.sends(run(3), WROTE, task=task)
    assert small.size_bytes == 2 * one
    play = Play()
    for n in range(30):
        play.sends({"messages": [{"role": "user", "content": f"{n}"}]}, WROTE)
    assert play.threads.size_bytes == 8 * (THREAD_BYTES + 8)
    play.threads.forget("t")
    assert play.threads.size_bytes == 0


def test_a_system_prompt_that_is_no_longer_remembered_line_by_line_is_told_to_have_changed() -> None:
    changed = run(5, system=SYSTEM.replace("rule 7", "9:14"))
    for pieces_max, index in ((1_000, 8), (110, 1)):  # of a hundred lines and three tools each
        play = Play(threads=Threads(pieces_max=pieces_max))
        play.sends(run(3), WROTE)
        play.sends(run(3, system="other\n" * 100), WROTE, task="u")
        said = play.sends(changed, LOST_ALL)
        assert said is not None
        assert (said.cause, said.index) == (Cause.SYSTEM_LINE_CHANGED, index)


SAME_RUN = [
    ("claude-code/01-first-turn", "claude-code/02-second-turn"),
    ("codex/01-first-turn", "codex/02-second-turn"),
    ("cline/01-first-turn", "cline/02-second-turn"),
    ("opencode/02-chat-first-turn", "opencode/03-chat-second-turn"),
    ("mini-swe-agent/01-chat-first", "mini-swe-agent/02-chat-second"),
]
FACTS = {r.name: (f, compact(r.body)) for r in captured() if (f := facts_of(r)) is not None}


@pytest.mark.parametrize(("first", "then"), SAME_RUN if FACTS else [], ids=lambda n: n.replace("/", ":"))
def test_second_turns_of_real_clients_differ_in_nothing_that_is_cached(first: str, then: str) -> None:
    threads = Threads()
    said = []
    for n, name in enumerate((first, then)):
        facts, body = FACTS[name]
        links = chain(facts.segments)[: anchor(facts.segments)]
        a = Answered(
            name, facts, body, links, "", "p/m", Usage(10, 0, 5_000), EXPLICIT, ROW, "", 10_000 * n + 1
        )
        said.append(threads.answered("t", a, 10_000 * n + 2))
    # nothing in the prompt has changed, so it is the provider's doing that nothing was read
    assert [s and s.cause for s in said] == [Cause.FIRST_OF_ITS_KIND, Cause.PROVIDER_SIDE]


#: Requests of one captured session each, and what nothing but their prompts would tell of each if none was read.
SESSIONS = {
    "claude-code": {
        "01-first-turn": Cause.FIRST_OF_ITS_KIND,
        "02-second-turn": Cause.PROVIDER_SIDE,
        "03-subagent": Cause.FIRST_OF_ITS_KIND,
        "04-tui-title": Cause.FIRST_OF_ITS_KIND,
        "05-tui-turn": Cause.FIRST_OF_ITS_KIND,
        "06-tui-compact": Cause.PROVIDER_SIDE,  # it goes on with the turn before, as it should
    },
    "codex": {
        "01-first-turn": Cause.FIRST_OF_ITS_KIND,
        "02-second-turn": Cause.PROVIDER_SIDE,
        "04-compaction": Cause.FIRST_OF_ITS_KIND,
        "05-after-compaction": Cause.FIRST_OF_ITS_KIND,
    },
    "opencode": {
        "01-title": Cause.FIRST_OF_ITS_KIND,
        "02-chat-first-turn": Cause.FIRST_OF_ITS_KIND,
        "03-chat-second-turn": Cause.PROVIDER_SIDE,
        "06-subagent": Cause.FIRST_OF_ITS_KIND,
    },
}


@pytest.mark.parametrize("client", SESSIONS if FACTS else [])
def test_the_threads_of_real_sessions_are_told_apart(client: str) -> None:
    threads = Threads()
    said: dict[str, Cause | None] = {}
    for n, r in enumerate(r for r in captured() if r.name.split("/")[0] == client):
        name = r.name.split("/")[1]
        if name not in SESSIONS[client]:
            continue
        facts, body = FACTS[r.name]
        headers = {key.lower(): value for key, value in r.headers}
        signal = recognise(headers, facts.session_hints, None, facts.tool_count)
        kind = f"{signal.purpose}/{signal.agent_id}" if signal.purpose or signal.agent_id else ""
        links = chain(facts.segments)[: anchor(facts.segments)]
        usage = Usage(10, 0, 5_000)
        a = Answered(name, facts, body, links, kind, "p/m", usage, EXPLICIT, ROW, "", 10_000 * (n + 1))
        explanation = threads.answered(signal.external_id.split("/")[0], a, 10_000 * (n + 1) + 1)
        said[name] = None if explanation is None else explanation.cause
    assert said == SESSIONS[client]


def test_what_the_gateway_restored_is_not_blamed() -> None:
    play = Play()
    play.sends(run(3), WROTE)
    backwards = run(5, tools=TOOLS[::-1])
    assert play.sends(backwards, READ, restored=frozenset({"tools"})) is None
    said = play.sends(run(7, tools=TOOLS[::-1]), LOST_ALL, restored=frozenset({"tools"}), level="safe")
    assert said is not None
    assert (said.cause, said.level) == (Cause.PROVIDER_SIDE, "safe")
    assert prevented_by(Cause.TOOLS_REORDERED) == "safe"
    clock = SYSTEM.replace("rule 7", "9:14")
    # the first time that a line moves, the prompt changes
    for turns, cause in ((7, Cause.SYSTEM_LINE_CHANGED), (8, Cause.PROVIDER_SIDE)):
        body = run(turns, system=clock.replace("9:14", f"9:1{turns}"))
        said = play.sends(body, LOST_ALL, restored=frozenset({"system", "tools"}))
        assert said is not None
        assert said.cause is cause


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "name", "function", "content", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
OBJECT = st.dictionaries(
    st.sampled_from(["type", "text", "name", "function", "content", "tool_calls", "cache_control"]),
    JSON,
    max_size=4,
)


@settings(max_examples=60)
@given(
    bodies=st.lists(
        st.fixed_dictionaries(
            {
                "messages": st.lists(
                    OBJECT.flatmap(
                        lambda m: st.sampled_from(["system", "user", "assistant", "tool"]).map(
                            lambda role: {"role": role, **m}
                        )
                    ),
                    min_size=1,
                    max_size=4,
                )
            },
            optional={
                "tools": st.lists(OBJECT, max_size=3),
                "system": st.text(max_size=8) | st.lists(JSON, max_size=2),
                "tool_choice": JSON,
            },
        ),
        min_size=2,
        max_size=4,
    ),
    operation=st.sampled_from([Operation.CHAT, Operation.MESSAGES]),
)
def test_no_prompt_that_is_accepted_is_too_odd_to_be_compared(
    bodies: list[Body], operation: Operation
) -> None:
    play = Play()
    for body in bodies:
        try:
            said = play.sends({**body, "max_tokens": 1}, LOST_ALL, operation=operation)
        except InvalidRequest:
            continue  # refused long before
        assert said is None or 0 <= said.lost_tokens <= said.input_tokens


def test_explanations_survive_json() -> None:
    said = second(run(5, tools=TOOLS[:2]))
    assert msgspec.json.decode(msgspec.json.encode(said), type=Explanation) == said
    assert json.loads(msgspec.json.encode(said))["cause"] == "tools_removed"
