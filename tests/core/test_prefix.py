"""Prefix chains, and which task a request continues."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.dialects import Facts, Segment
from gateway.core.prefix import anchor, chain, divergence, longest
from gateway.storage.memory import MemoryPrefixIndex
from tests.support.agent_runs import chat, facts_of, recorded_runs
from tests.support.material import ABSENT, captured


def links(*raws: bytes | str | dict[str, Any] | list[Any], kind: str = "message") -> tuple[bytes, ...]:
    texts = [r if isinstance(r, bytes) else json.dumps(r, separators=(",", ":")).encode() for r in raws]
    return chain([Segment(kind, memoryview(t)) for t in texts])


def test_a_longer_prompt_keeps_the_links_of_its_beginning() -> None:
    user, answer, result = ({"role": r, "content": r} for r in ("user", "assistant", "tool"))
    assert links(user, answer, result)[:2] == links(user, answer)
    assert links(user)[0] != links(answer)[0]
    assert links(user, answer)[1] != links(result, answer)[1]
    assert links(user, kind="system") != links(user)
    assert links() == ()


TEXT = {"type": "text", "text": 'say "hi"\\ and \n {"cache_control":{"a":1}} x'}
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
TOOL_USE = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": {"b": 1}}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "out"}


@pytest.mark.parametrize(
    ("plain", "marked"),
    [
        ({"role": "user", "content": TEXT["text"]}, {"role": "user", "content": [{**TEXT, **MARK}]}),
        ({"role": "user", "content": TEXT["text"]}, {"role": "user", "content": [TEXT]}),
        ({"content": TEXT["text"], "role": "user"}, {"content": [{**TEXT, **MARK}], "role": "user"}),
        ({"role": "user", "content": "é"}, {"role": "user", "content": [{"text": "é", "type": "text"}]}),
        (
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        ),
        ({"role": "user", "content": ""}, {"role": "user", "content": [{"type": "text", "text": ""}]}),
        (
            {"role": "system", "content": "a", "output_config": {"effort": "low"}},
            {
                "role": "system",
                "content": [{"type": "text", "text": "a", **MARK}],
                "output_config": {"effort": "low"},
            },
        ),
        (
            {"role": "user", "content": [TEXT, RESULT]},
            {"role": "user", "content": [TEXT, {**RESULT, **MARK}]},
        ),
        (
            {"role": "assistant", "content": [TOOL_USE]},
            {"role": "assistant", "content": [{**TOOL_USE, **MARK}]},
        ),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "a", **MARK}),
        (
            {"role": "user", "content": "a"},
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}
                ],
            },
        ),
        ([{"name": "f"}, {"name": "g"}], [{"name": "f"}, {"name": "g", **MARK}]),
        ("be terse", [{"type": "text", "text": "be terse", **MARK}]),
    ],
)
def test_changes_of_form_alone_do_not_change_a_link(plain: Any, marked: Any) -> None:
    assert links(plain) == links(marked)
    # and as Python's json writes it by default
    assert links(json.dumps(plain).encode()) == links(json.dumps(marked).encode())


@pytest.mark.parametrize(
    "other",
    [
        {"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "c"}]},
        {"role": "user", "content": [{"type": "text", "text": "ab", "citations": None}]},
        {"role": "user", "content": [{"type": "image", "text": "ab"}]},
        {"role": "user", "content": "ab "},
        {"content": "ab", "role": "user"},  # the order of keys reaches the provider's template
        {"role": "user", "content": 'ab","cache_control":{}'},
    ],
)
def test_all_else_changes_a_link(other: Any) -> None:
    assert links(other) != links({"role": "user", "content": "ab"})


def test_arguments_of_a_tool_are_never_taken_for_a_marker() -> None:
    def call(value: str) -> dict[str, Any]:
        arguments = json.dumps({"cache_control": {"type": value}})
        return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}

    assert links(call("a")) != links(call("b"))


def test_divergence_and_longest_agree_with_a_walk() -> None:
    old = [bytes([n]) for n in range(7)]
    for same in range(8):
        new = [*old[:same], *(b"x%d" % n for n in range(same, 9))]
        assert divergence(old, new) == same
    assert divergence(old, old[:3]) == divergence(old[:3], old) == 3
    assert divergence([], old) == 0
    assert longest({old[1], old[4]}, old) == 5
    assert longest(set(), old) == 0


def test_a_reminder_at_the_end_is_not_kept() -> None:
    sys_, user, reminder = (
        {"role": r, "content": t} for r, t in (("system", "s"), ("user", "u"), ("system", "r"))
    )
    assert anchor(chat([sys_, user, reminder]).segments) == 2
    assert anchor(chat([sys_, user]).segments) == 2
    assert anchor(chat([sys_]).segments) == 1
    quoting = {"role": "user", "content": '{"role":"system"}'}
    assert anchor(chat([sys_, quoting]).segments) == 2


# --- captured clients ----------------------------------------------------------------------------------

CONTINUED = [
    ("claude-code/01-first-turn", "claude-code/02-second-turn"),
    ("cline/01-first-turn", "cline/02-second-turn"),
    ("codex/01-first-turn", "codex/02-second-turn"),
    ("copilot-cli/01-chat-first", "copilot-cli/02-chat-second"),
    ("mini-swe-agent/01-chat-first", "mini-swe-agent/02-chat-second"),
    ("openai-agents/01-responses-first", "openai-agents/02-responses-second"),
    ("opencode/02-chat-first-turn", "opencode/03-chat-second-turn"),
]
SEPARATE = [
    ("codex/02-second-turn", "codex/04-compaction"),
    ("opencode/01-title", "opencode/02-chat-first-turn"),
    ("claude-code/04-tui-title", "claude-code/05-tui-turn"),
]
FACTS = {r.name: f for r in captured() if (f := facts_of(r))}


@pytest.mark.parametrize(("first", "second"), CONTINUED if FACTS else [], ids=lambda n: n.replace("/", ":"))
def test_the_second_turn_of_a_real_client_extends_its_first(first: str, second: str) -> None:
    one, two = chain(FACTS[first].segments), chain(FACTS[second].segments)
    assert divergence(one, two) == len(one) < len(two)


@pytest.mark.parametrize(("first", "second"), SEPARATE if FACTS else [], ids=lambda n: n.replace("/", ":"))
def test_side_calls_and_compactions_extend_nothing(first: str, second: str) -> None:
    one, two = chain(FACTS[first].segments), chain(FACTS[second].segments)
    assert divergence(one, two) < len(one)


# --- the index -----------------------------------------------------------------------------------------


class Gateway:
    """Names tasks as the pipeline does: find, else a new one; then remember."""

    def __init__(self, **bounds: Any) -> None:
        self.now_s = 0.0
        self.index = MemoryPrefixIndex(lambda: self.now_s, **bounds)
        self.tasks = 0

    def serve(self, *steps: str, key: str = "key") -> str:
        return self.serve_chain(links(*steps), key)

    def serve_facts(self, facts: Facts) -> str:
        return self.serve_chain(chain(facts.segments)[: anchor(facts.segments)], "key")

    def serve_chain(self, a_chain: tuple[bytes, ...], key: str) -> str:
        found = self.index.known(key, a_chain)
        if found is None:
            self.tasks += 1
        task = found[1] if found else f"task {self.tasks}"
        self.index.put(key, a_chain, task)
        return task


def test_a_run_stays_one_task_and_another_key_never_joins_it() -> None:
    gateway = Gateway()
    assert gateway.serve("s", "u") == "task 1"
    assert gateway.index.known("key", links("s", "u", "a", "t")) == (2, "task 1")
    assert gateway.serve("s", "u", "a", "t") == "task 1"
    assert gateway.serve("s", "u", "a", "t", "a2", "t2") == "task 1"
    assert len(gateway.index) == 1
    assert gateway.serve("s", "u", "a", "t", "a2", "t2", "a3", key="other") == "task 2"


def test_a_shared_opening_alone_is_not_the_same_task() -> None:
    gateway = Gateway()
    assert gateway.serve("s", "u1") == "task 1"
    assert gateway.serve("s", "u2") == "task 2"
    assert gateway.serve("s", "u1", "a", "t") == "task 1"
    assert gateway.serve("s", "u1", "b") == "task 3"  # task 1 has gone another way
    assert gateway.serve("s", "u2", "a", "t") == "task 2"


def test_two_runs_with_the_same_first_prompt_separate_at_their_first_difference() -> None:
    gateway = Gateway()
    assert gateway.serve("s", "u") == gateway.serve("s", "u") == "task 1"
    assert gateway.serve("s", "u", "a1", "t1") == "task 1"
    assert gateway.serve("s", "u", "a2", "t2") == "task 2"
    assert gateway.serve("s", "u", "a1", "t1", "a3") == "task 1"
    assert gateway.serve("s", "u", "a2", "t2", "a4") == "task 2"


def test_the_same_first_request_again_is_a_retry_for_a_minute_and_then_another_run() -> None:
    gateway = Gateway()
    assert gateway.serve("s", "u") == "task 1"
    gateway.now_s = 60
    assert gateway.serve("s", "u") == "task 1"
    gateway.now_s = 120.1
    assert gateway.serve("s", "u") == "task 2"
    # both wait for their first answer; each goes on as one task
    assert gateway.serve("s", "u", "a1") == "task 2"
    assert gateway.serve("s", "u", "a2") == "task 1"
    assert gateway.serve("s", "u", "a2", "t2") == "task 1"
    assert gateway.serve("s", "u", "a1", "t1") == "task 2"


def test_a_late_retry_of_a_later_step_is_still_its_task() -> None:
    gateway = Gateway()
    assert gateway.serve("s", "u") == gateway.serve("s", "u", "a", "t") == "task 1"
    gateway.now_s = 600
    assert gateway.serve("s", "u", "a", "t") == "task 1"


def test_a_second_run_that_repeats_the_first_word_for_word_keeps_to_itself() -> None:
    gateway = Gateway()
    assert gateway.serve("s", "u") == gateway.serve("s", "u", "a", "t") == "task 1"
    gateway.now_s = 600
    assert gateway.serve("s", "u") == "task 2"
    assert gateway.serve("s", "u", "a", "t") == "task 2"
    assert gateway.serve("s", "u", "a", "t", "b") == "task 2"
    assert gateway.index.known("key", links("s", "u", "a", "t", "c")) == (4, "task 1")


def test_what_is_old_or_too_much_is_forgotten() -> None:
    gateway = Gateway(max_entries=3, ttl_s=100)
    for user in ("u1", "u2", "u3", "u4"):
        gateway.serve("s", user)
    assert len(gateway.index) == 3
    assert gateway.index.known("key", links("s", "u1", "a")) is None
    assert gateway.index.known("key", links("s", "u2", "a")) == (2, "task 2")
    gateway.serve("s", "u1", key="busy")
    assert gateway.index.known("key", links("s", "u2", "a")) is None  # the key used least recently pays
    gateway.now_s = 100
    assert gateway.index.known("key", links("s", "u3", "a")) is None
    gateway.serve("s", "u", key="busy")
    assert len(gateway.index) == 1


def test_sixteen_runs_at_one_point_are_the_most_that_are_told_apart() -> None:
    gateway = Gateway()
    for n in range(40):
        gateway.index.put("key", links("s", "u"), f"task {n}")
    assert len(gateway.index) == 1
    assert gateway.index.known("key", links("s", "u", "a")) == (2, "task 39")
    for n in range(39, 23, -1):
        gateway.index.put("key", links("s", "u", f"a{n}"), f"task {n}")
    assert gateway.index.known("key", links("s", "u", "b")) is None


@pytest.mark.parametrize("runs", [recorded_runs()], ids=lambda r: "recorded" if r else ABSENT)
def test_recorded_runs_interleaved_step_by_step_are_a_task_each(runs: dict[str, tuple[Facts, ...]]) -> None:
    gateway = Gateway()
    tasks: dict[str, set[str]] = {name: set() for name in runs}
    for step in range(max(map(len, runs.values()), default=0)):
        for name, requests in runs.items():
            if step < len(requests):
                tasks[name].add(gateway.serve_facts(requests[step]))
    assert all(len(found) == 1 for found in tasks.values()), tasks
    assert len(set().union(*tasks.values())) == len(runs)
