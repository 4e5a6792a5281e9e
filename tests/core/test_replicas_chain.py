"""The chain of a prompt is what a fresh look would give, however its thread went on; and memories are bounded."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core import dialects
from gateway.core.catalog import Operation
from gateway.core.dialects.facts import Segments
from gateway.core.dialects.known import KnownBodies
from gateway.core.replicas.chain import BLOCK_BYTES, Chain, Chains, links_of, seed_of
from tests.support.played_cache import compact

SEED = seed_of("m")
MARK = {"cache_control": {"type": "ephemeral"}}


def segments(turns: list[str], system: str = "s" * 900, tools: list[Any] | None = None) -> Segments:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    messages += [{"role": "user", "content": turn} for turn in turns]
    body = compact({"model": "m", **({"tools": tools} if tools else {}), "messages": messages})
    return dialects.read(Operation.CHAT, body).segments


def links(chain: Chain) -> list[int]:
    return list(chain.links)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.lists(st.sampled_from(["a", "bc" * 100, "d" * 256, "e" * 1_000]), min_size=1, max_size=6),
        min_size=2,
        max_size=6,
    )
)
def test_a_chain_is_the_same_whatever_came_before(prompts: list[list[str]]) -> None:
    memory = Chains()
    for turns in prompts:
        known, fresh = memory.of(segments(turns), "t", SEED), Chains().of(segments(turns), "other", SEED)
        assert (links(known), known.chars) == (links(fresh), fresh.chars)


def test_prompts_share_the_links_of_the_blocks_that_they_share() -> None:
    one, other = (Chains().of(segments(["x" * 600, end * 600]), "", SEED) for end in "yz")
    # Blocks up to the one in which the last messages begin to differ.
    shared = sum(a == b for a, b in zip(one.links, other.links, strict=True))
    assert links(one)[:shared] == links(other)[:shared]
    assert shared == (one.chars - 600) // BLOCK_BYTES
    assert len(set(one.links) | set(other.links)) == len(one) + len(other) - shared


def test_a_link_stands_for_all_that_is_before_it() -> None:
    whole = links_of(b"a" * 256 + b"b" * 256 + b"rest", SEED)
    assert len(whole) == 2
    assert links_of(b"b" * 256, whole[0])[0] == whole[1]
    assert whole[1] not in links_of(b"c" * 256 + b"b" * 256, SEED)


def test_model_salt_and_adapter_part_prompts_from_the_first_block_on() -> None:
    seeds = [seed_of("m"), seed_of("n"), seed_of("m", "salt"), seed_of("m", "", "salt")]
    assert len({Chains().of(segments(["x"]), "", seed).links[0] for seed in seeds}) == 4
    assert seed_of("m", "salt") == 4751075950327394049  # every process must say the same


def test_a_marker_that_moves_changes_no_link() -> None:
    def asked(*contents: Any) -> Segments:
        messages = [{"role": "user", "content": content} for content in contents]
        return dialects.read(
            Operation.MESSAGES, compact({"model": "m", "max_tokens": 9, "messages": messages})
        ).segments

    marked = [{"type": "text", "text": "x" * 400, **MARK}]
    memory = Chains()
    first = memory.of(asked(marked), "t", SEED)
    second = memory.of(asked("x" * 400, [{"type": "text", "text": "y" * 400, **MARK}]), "t", SEED)
    assert links(second)[: len(first)] == links(first)


def test_a_body_of_which_only_the_end_was_read_has_the_chain_of_the_whole() -> None:
    bodies, memory = KnownBodies(), Chains()
    for n in range(30, 36):
        messages = [{"role": "user", "content": f"{i} " * 300} for i in range(n)]
        body = compact({"model": "m", "messages": messages})
        facts = bodies.read(Operation.CHAT, body, lambda b: dialects.read(Operation.CHAT, b))
        fresh = Chains().of(dialects.read(Operation.CHAT, body).segments, "", SEED)
        assert links(memory.of(facts.segments, "t", SEED)) == links(fresh)


def test_tools_come_first() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 600}}]
    with_tools = Chains().of(segments(["x"], tools=tools), "", SEED)
    again = Chains().of(segments(["x"], system="another" * 200, tools=tools), "", SEED)
    assert links(with_tools)[:2] == links(again)[:2]


def test_an_empty_prompt_has_no_links() -> None:
    assert (len(Chains().of(Segments(), "t", SEED)), len(Chains().of(segments([], "s"), "t", SEED))) == (0, 0)


def test_ten_thousand_sessions_are_remembered_in_bounds() -> None:
    memory = Chains(links_max=2_000, threads_max=500)
    prompt = segments(["x" * 2_000])
    for n in range(10_000):
        memory.of(prompt, f"t{n}", SEED)
    # 11 links each: the links are what is short.
    assert memory.size_bytes < 2_000 * 8 + 200 * (600 + 3 * 16)
    assert links(memory.of(prompt, "t0", SEED)) == links(memory.of(prompt, "t9999", SEED))
