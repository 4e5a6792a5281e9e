"""Caches by their documented rules: against the demo provider's own, and against what the vendors' pages say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import settings as config
from gateway.core.cache_rules import CacheRule
from gateway.core.cache_simulator import (
    MESSAGE_TOKENS,
    Block,
    CacheSimulator,
    Prompt,
    TooManyMarkers,
    best_usages,
    read_prompt,
)
from gateway.core.catalog import Operation
from gateway.core.usage import Usage
from gateway.demo.cache import PromptCache, render
from gateway.demo.models import DEMO_FAST, DEMO_LARGE, DemoModel
from gateway.demo.prompt import PRIMING_TOKENS, Ask, Kind, Part, Section, Ttl
from gateway.demo.tokens import TokenCounts

SHIPPED = config.load(config.shipped("config/gateway.yaml"), {})
NOW_MS = 1_796_000_000_000


def rule(model: str) -> CacheRule:
    found = SHIPPED.cache_rules.find(model, NOW_MS)
    assert found is not None
    return found


# --- against the demo provider -------------------------------------------------------------------------------

COUNTS = TokenCounts()
TEXTS = st.sampled_from(["short", "word " * 400, "line\n" * 900, "x"])


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[int, tuple[Part, ...]]]:
    """Steps of one run that grows, at times, with markers anywhere; once in a while its beginning changes."""
    length = draw(st.integers(2, 40))
    texts = [draw(TEXTS) + f"#{n}" for n in range(length)]
    starts = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    steps = []
    at_ms = NOW_MS
    for end in sorted(draw(st.lists(st.integers(1, length), min_size=1, max_size=8))):
        at_ms += draw(st.sampled_from([1_000, 200_000, 400_000, 4_000_000]))
        opening = draw(st.sampled_from(["", "", "", "other"]))
        marked = sorted(draw(st.sets(st.integers(0, end - 1), max_size=4)))
        long_until = draw(st.integers(0, 4))
        parts = []
        message = -1
        for n in range(end):
            message += n == 0 or starts[n]
            marker = None
            if n in marked:
                marker = Ttl.LONG if marked.index(n) < long_until else Ttl.SHORT
            text = (opening if n == 0 else "") + texts[n]
            parts.append(
                Part(Section.MESSAGES, message, "user", Kind.TEXT, text, None, marker, marker is not None)
            )
        steps.append((at_ms, tuple(parts)))
    return steps


@pytest.mark.parametrize("model", [DEMO_LARGE, DEMO_FAST], ids=lambda m: m.name)
@settings(max_examples=150, deadline=None)
@given(steps=conversations(), implicit=st.booleans())
def test_two_caches_that_know_nothing_of_each_other_bill_alike(
    model: DemoModel, steps: list[tuple[int, tuple[Part, ...]]], implicit: bool
) -> None:
    theirs, ours = PromptCache(), CacheSimulator(rule(f"demo/{model.name}"))
    for at_ms, parts in steps:
        ask = Ask(Operation.CHAT, model, model.name, parts, implicit_breakpoint=implicit)
        blocks = render(ask, b"", COUNTS)
        split = theirs.split(ask, blocks, at_ms)
        theirs.begin(split, at_ms)
        prompt = Prompt(
            tuple(
                Block(b.digest, b.tokens, None if b.marker is None else b.marker.value, b.message_end)
                for b in blocks
            ),
            implicit=implicit,
        )
        assert ours.ask(prompt, at_ms) == Usage(
            split.input_uncached - PRIMING_TOKENS,
            split.cache_read,
            split.cache_write_5m,
            split.cache_write_1h,
        )


# --- rules as the vendors state them ---------------------------------------------------------------------------


def blocks(*sizes: int, marks: tuple[int, ...] = (), life: str = "") -> Prompt:
    """Blocks of so many tokens, each a message of its own."""
    total = 0
    made = []
    for i, size in enumerate(sizes):
        total += size
        made.append(Block(b"%d/%d" % (i, total), total, life if i in marks else None, True))
    return Prompt(tuple(made))


def test_anthropic_reads_only_what_a_marker_wrote_and_looks_back_twenty_blocks() -> None:
    cache = CacheSimulator(rule("anthropic/claude-sonnet-4-6"))
    assert cache.ask(blocks(2_000, 500), NOW_MS) == Usage(2_500)  # not marked
    assert cache.ask(blocks(2_000, 500, marks=(1,)), NOW_MS) == Usage(0, 0, 2_500)
    near = [2_000, 500, *[1] * 19]
    assert cache.ask(blocks(*near, marks=(20,)), NOW_MS) == Usage(0, 2_500, 19)
    far = [2_000, 500, *[2] * 20]
    assert cache.ask(blocks(*far, marks=(21,)), NOW_MS) == Usage(0, 0, 2_540)
    assert cache.ask(blocks(900, marks=(0,)), NOW_MS) == Usage(900)  # below the minimum
    with pytest.raises(TooManyMarkers, match="5 markers, and at most 4"):
        cache.ask(blocks(*[2_000] * 5, marks=(0, 1, 2, 3, 4)), NOW_MS)


def test_an_entry_lives_as_long_as_it_was_written_for_and_longer_if_it_is_read() -> None:
    cache = CacheSimulator(rule("anthropic/claude-sonnet-4-6"))
    short, long = blocks(2_000, marks=(0,)), blocks(2_001, marks=(0,), life="1h")
    assert cache.ask(short, NOW_MS) == Usage(0, 0, 2_000)
    assert cache.ask(long, NOW_MS) == Usage(0, 0, 0, 2_001)
    assert cache.ask(short, NOW_MS + 299_000) == Usage(0, 2_000)
    assert cache.ask(short, NOW_MS + 598_000) == Usage(0, 2_000)
    assert cache.ask(short, NOW_MS + 898_000) == Usage(0, 0, 2_000)
    assert cache.ask(long, NOW_MS + 3_599_000) == Usage(0, 2_001)


def test_openai_marks_the_end_of_the_latest_message_by_itself() -> None:
    cache = CacheSimulator(rule("openai/gpt-5.6-sol"))
    assert cache.ask(blocks(2_000, 50), NOW_MS) == Usage(0, 0, 2_050)
    assert cache.ask(blocks(2_000, 50, 30), NOW_MS + 1_000) == Usage(0, 2_050, 30)
    # a shared beginning before another message is no entry
    assert cache.ask(blocks(2_000, 60), NOW_MS + 2_000) == Usage(0, 0, 2_060)


def test_older_caches_find_any_beginning_in_steps_and_cost_nothing_to_write() -> None:
    cache = CacheSimulator(rule("openai/gpt-5.4"))
    assert cache.ask(blocks(2_000, 50), NOW_MS) == Usage(2_050)
    assert cache.ask(blocks(2_000, 60), NOW_MS) == Usage(2_060 - 1_920, 1_920)
    assert cache.ask(blocks(500, 60), NOW_MS) == Usage(560)


# --- bodies ------------------------------------------------------------------------------------------------------


def prompt(operation: Operation = Operation.CHAT, **body: Any) -> Prompt:
    return read_prompt(
        rule("anthropic/claude-sonnet-5-5"), operation, json.dumps({"model": "m", **body}).encode()
    )


def test_a_body_is_blocks_in_the_order_in_which_it_is_rendered() -> None:
    read = prompt(
        Operation.MESSAGES,
        tools=[{"name": "f", "input_schema": {}}],
        system=[{"type": "text", "text": "abcdefgh", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        messages=[
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "yes"}, {"type": "tool_use", "id": "t"}],
            },
        ],
    )
    assert [(b.text, b.life, b.message_end) for b in read.blocks] == [
        ('{"name":"f","input_schema":{}}', None, True),
        ("abcdefgh", "1h", True),
        ("hi", None, True),
        ("yes", None, False),
        ('{"type":"tool_use","id":"t"}', None, True),
    ]
    assert read.blocks[1].tokens - read.blocks[0].tokens == MESSAGE_TOKENS + 2


def test_changes_of_form_and_markers_change_no_digest_and_all_else_does() -> None:
    def digests(content: Any, **more: Any) -> list[bytes]:
        return [b.digest for b in prompt(messages=[{"role": "user", "content": content}], **more).blocks]

    text = {"type": "text", "text": "hi"}
    plain = digests("hi")
    assert plain == digests([text]) == digests([{**text, "cache_control": {"type": "ephemeral"}}])
    assert plain == digests("hi", temperature=1)
    assert plain != digests("hi ")
    assert plain != digests("hi", tool_choice="none")
    assert plain != digests("hi", tools=[text])


# --- the best possible -----------------------------------------------------------------------------------------


def test_the_best_possible_writes_each_token_once_wherever_it_stands() -> None:
    first = prompt(messages=[{"role": "user", "content": "aaaa\nbbbb"}])
    moved = prompt(
        messages=[{"role": "user", "content": "9:14\nbbbb\naaaa"}, {"role": "user", "content": "cccc"}]
    )
    one, two = best_usages([first, moved])
    assert one == Usage(cache_write_5m=first.tokens)
    # only "9:14" and the second message are new; a message's own tokens go with it
    assert two == Usage(cache_read=moved.tokens - (1 + 4), cache_write_5m=1 + 4)


def test_no_cache_is_better_than_the_best_possible() -> None:
    history = [{"role": "user", "content": f"{n} " + "word " * 300} for n in range(20)]
    prompts = [prompt(messages=history[:n]) for n in range(1, 21)]
    for model in (
        "openai/gpt-5.6-sol",
        "openai/gpt-5.4",
        "deepseek/deepseek-v4-pro",
        "gemini/gemini-2.5-pro",
    ):
        cache = CacheSimulator(rule(model))
        reads = [cache.ask(p, NOW_MS).cache_read for p in prompts]
        assert all(read <= best.cache_read for read, best in zip(reads, best_usages(prompts), strict=True))
        assert sum(reads) > 0


def test_what_a_provider_does_not_promise_is_taken_to_last_an_hour() -> None:
    cache = CacheSimulator(replace(rule("deepseek/deepseek-v4-pro"), granularity_tokens=None))
    cache.ask(blocks(2_000), NOW_MS)
    assert cache.ask(blocks(2_000), NOW_MS + 3_599_000).cache_read == 2_000
    cache = CacheSimulator(rule("deepseek/deepseek-v4-pro"))
    cache.ask(blocks(2_000), NOW_MS)
    assert cache.ask(blocks(2_000), NOW_MS + 3_600_000).cache_read == 0
