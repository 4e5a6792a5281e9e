"""Bounds on input tokens: never below what a provider bills, and tight where a prompt extends a known one."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core import dialects
from gateway.core.catalog import Deployment, Operation, Provider, Wire
from gateway.core.known_prompts import LEAST_BYTES, KnownPrompts, Prompt
from gateway.core.prefix import anchor, chain
from gateway.demo.cache import render
from gateway.demo.models import DEMO_LARGE
from gateway.demo.prompt import IMAGE_TOKENS, PRIMING_TOKENS
from gateway.demo.read import read_ask
from gateway.demo.tokens import TokenCounts
from tests.support.agent_runs import compact
from tests.support.material import ABSENT, captured

CHAT, RESPONSES, MESSAGES = Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES
SCHEMA = {"type": "object", "properties": {}, "description": "how to call it; " * 300}
TOOL = {"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}
BASH = {"name": "bash", "input_schema": SCHEMA}
PIXELS = "iVBORw0KGgo" * 5_000
COUNTS = TokenCounts()


def deployment(image_tokens_max: int | None = IMAGE_TOKENS) -> Deployment:
    provider = Provider("demo", Wire.DEMO, "http://x", "", image_tokens_max=image_tokens_max)
    return Deployment("demo/large", provider, "demo-large", "demo-large", "")


def body_of(operation: Operation, messages: list[dict[str, Any]], **more: Any) -> bytes:
    body: dict[str, Any] = {"model": "demo-large"}
    if operation is MESSAGES:
        body |= {"max_tokens": 1_000, "system": "You are careful.", "tools": [BASH]}
    elif operation is CHAT:
        body |= {"tools": [TOOL]}
    body["input" if operation is RESPONSES else "messages"] = messages
    return json.dumps(body | more, ensure_ascii=False).encode("utf-8", "surrogatepass")


def billed(operation: Operation, body: bytes) -> int:
    """Input tokens by the demo provider's own tokenizer and template."""
    return (
        render(read_ask(operation, msgspec.json.decode(body), DEMO_LARGE), b"", COUNTS)[-1].tokens
        + PRIMING_TOKENS
    )


class Gate:
    """One process that has bounded and sent what came before."""

    def __init__(self) -> None:
        self.known = KnownPrompts()

    def bound(
        self, operation: Operation, body: bytes, owner: str = "t1", at: Deployment | None = None
    ) -> int | None:
        facts = dialects.read(operation, body)
        links = chain(facts.segments)[: anchor(facts.segments)]
        return self.known.bound(at or deployment(), links, Prompt.of(facts, body, owner))

    def sent(self, operation: Operation, body: bytes, owner: str = "t1", tokens: int | None = None) -> int:
        """Returns what the provider reported."""
        facts = dialects.read(operation, body)
        links = chain(facts.segments)[: anchor(facts.segments)]
        tokens = billed(operation, body) if tokens is None else tokens
        self.known.note(deployment().name, links, Prompt.of(facts, body, owner), tokens)
        return tokens


def steps(n: int, size: int = 4_000) -> list[dict[str, Any]]:
    """A history of so many steps of an agent, each with a tool's result of `size` bytes."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Mend the build."}]
    for i in range(n):
        messages += [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": f"c{i}", "name": "bash", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": f"c{i}", "content": f"word{i} " * (size // 6)}
                ],
            },
        ]
    return messages


def test_a_step_reserves_what_the_last_one_was_billed_and_the_bytes_of_what_is_new() -> None:
    gate = Gate()
    before, after = body_of(MESSAGES, steps(20)), body_of(MESSAGES, steps(21))
    by_bytes = gate.bound(MESSAGES, after)
    reported = gate.sent(MESSAGES, before)
    bound, truth = gate.bound(MESSAGES, after), billed(MESSAGES, after)
    assert by_bytes is not None
    assert bound is not None
    assert truth <= bound <= reported + (len(after) - len(before)) + 300
    assert by_bytes > 3 * bound, "what the bytes alone would have reserved"


def test_another_session_that_begins_alike_is_bounded_by_the_first_ones_beginning() -> None:
    gate = Gate()
    tools = [{**BASH, "name": f"tool{i}", "description": "what it does " * 100} for i in range(20)]
    first = body_of(MESSAGES, [{"role": "user", "content": "one"}], tools=tools)
    reported = gate.sent(MESSAGES, first)
    other = body_of(MESSAGES, [{"role": "user", "content": "quite another question"}], tools=tools)
    bound = gate.bound(MESSAGES, other)
    assert bound is not None
    assert billed(MESSAGES, other) <= bound <= reported + 300


def test_the_shortest_prompt_that_began_so_says_how_long_the_beginning_can_be() -> None:
    gate = Gate()
    gate.sent(MESSAGES, body_of(MESSAGES, steps(30)))
    loose = gate.bound(MESSAGES, body_of(MESSAGES, [{"role": "user", "content": "x"}]))
    gate.sent(MESSAGES, body_of(MESSAGES, steps(1)))
    assert loose is not None
    assert (gate.bound(MESSAGES, body_of(MESSAGES, [{"role": "user", "content": "x"}])) or 0) <= loose


@pytest.mark.parametrize(
    "change",
    [
        {"thinking": {"type": "enabled", "budget_tokens": 2_000}},
        {"tool_choice": {"type": "none"}},
        {"some_new_setting": True},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
    ],
)
def test_a_prompt_of_other_settings_is_another_prompt(change: dict[str, Any]) -> None:
    gate = Gate()
    gate.sent(MESSAGES, body_of(MESSAGES, steps(5)), tokens=1)
    assert (gate.bound(MESSAGES, body_of(MESSAGES, steps(5), **change)) or 0) > len(
        body_of(MESSAGES, steps(5))
    )


def test_what_changes_no_token_compares_alike() -> None:
    gate = Gate()
    gate.sent(MESSAGES, body_of(MESSAGES, steps(5)), tokens=1_000)
    marked = steps(5)
    marked[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    again = body_of(MESSAGES, marked, max_tokens=77, metadata={"user_id": "u"}, temperature=0)
    assert (gate.bound(MESSAGES, again) or 0) < 1_500


def test_dropping_old_thinking_only_shortens_but_other_edits_compare_with_nothing() -> None:
    gate = Gate()
    keep = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    cut = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
    for more, tight in ((keep, True), (cut, False)):
        gate.sent(MESSAGES, body_of(MESSAGES, steps(5), **more), tokens=1_000)
        assert ((gate.bound(MESSAGES, body_of(MESSAGES, steps(5), **more)) or 0) < 2_000) is tight


def test_what_is_short_is_bounded_by_its_bytes_and_not_remembered() -> None:
    gate = Gate()
    body = body_of(CHAT, [{"role": "user", "content": "hello"}], tools=[])
    assert len(body) < LEAST_BYTES
    gate.sent(CHAT, body, tokens=1)
    assert gate.bound(CHAT, body) == len(body) + 64 + 16


def test_tenants_learn_nothing_from_each_other() -> None:
    gate = Gate()
    gate.sent(MESSAGES, body_of(MESSAGES, steps(5)), owner="t1", tokens=1)
    assert (gate.bound(MESSAGES, body_of(MESSAGES, steps(5)), owner="t2") or 0) > 20_000


def test_a_larger_prompt_is_never_taken_for_a_known_one() -> None:
    """Whoever sends a prompt chooses what is hashed; two of one hash must not make the larger one cheap."""
    known = KnownPrompts()
    small, large = (
        dialects.read(MESSAGES, b) for b in (body_of(MESSAGES, steps(1)), body_of(MESSAGES, steps(40)))
    )
    links = chain(small.segments)
    prompts = [
        Prompt.of(f, b, "t")
        for f, b in ((small, body_of(MESSAGES, steps(1))), (large, body_of(MESSAGES, steps(40))))
    ]
    known.note("demo/large", links, msgspec.structs.replace(prompts[0], group=1), 10)
    bound = known.bound(
        deployment(),
        [*[b"?"] * (len(large.segments) - 1), links[-1]],
        msgspec.structs.replace(prompts[1], group=1),
    )
    assert bound is not None
    assert bound > 100_000


def test_the_most_that_was_ever_reported_for_a_prompt_is_what_bounds_it() -> None:
    gate = Gate()
    body = body_of(MESSAGES, steps(5))
    for tokens in (9_000, 8_000):
        gate.sent(MESSAGES, body, tokens=tokens)
    assert 9_000 <= (gate.bound(MESSAGES, body) or 0) < 9_500


def test_a_deployment_that_billed_above_its_bound_is_bounded_by_bytes_from_then_on() -> None:
    gate = Gate()
    body = body_of(MESSAGES, steps(5))
    gate.sent(MESSAGES, body, tokens=1_000)
    gate.known.distrust("demo/large")
    gate.sent(MESSAGES, body, tokens=1_000)
    assert (gate.bound(MESSAGES, body) or 0) > 20_000


def test_memory_is_bounded_and_what_is_forgotten_only_loosens_the_bound() -> None:
    gate = Gate()
    gate.known = KnownPrompts(capacity=8)
    gate.sent(MESSAGES, body_of(MESSAGES, steps(5)), tokens=1_000)
    for i in range(20):
        gate.sent(MESSAGES, body_of(MESSAGES, [{"role": "user", "content": str(i)}], system=f"s{i}"))
    assert (gate.bound(MESSAGES, body_of(MESSAGES, steps(5))) or 0) > 20_000


# --- estimates ---------------------------------------------------------------------------------------------


def estimate(gate: Gate, body: bytes) -> int:
    facts = dialects.read(MESSAGES, body)
    return gate.known.estimate(deployment(), chain(facts.segments), Prompt.of(facts, body, "t1"))


def test_an_estimate_is_what_was_reported_and_the_deployments_own_average_of_the_rest() -> None:
    gate = Gate()
    first, second = body_of(MESSAGES, steps(20)), body_of(MESSAGES, steps(25))
    assert estimate(gate, first) == -(-len(first) // 4), "four bytes a token, where nothing is known"
    reported = gate.sent(MESSAGES, first)
    guess, truth = estimate(gate, second), billed(MESSAGES, second)
    assert reported + (truth - reported) * 0.9 < guess < reported + (truth - reported) * 1.5
    assert guess <= (gate.bound(MESSAGES, second) or 0)


def test_an_estimate_is_never_above_the_bound() -> None:
    gate = Gate()
    gate.sent(MESSAGES, body_of(MESSAGES, steps(5)), tokens=10**6)
    other = body_of(MESSAGES, [{"role": "user", "content": "short"}], system="another", tools=[])
    assert estimate(gate, other) == gate.bound(MESSAGES, other)


# --- real clients ------------------------------------------------------------------------------------------

#: (first turn, second turn) of real clients; after both, the whole history was sent once
TURNS = [
    ("claude-code/01-first-turn", "claude-code/02-second-turn"),
    ("codex/01-first-turn", "codex/02-second-turn"),
    ("copilot-cli/01-chat-first", "copilot-cli/02-chat-second"),
    ("cline/01-first-turn", "cline/02-second-turn"),
    ("opencode/02-chat-first-turn", "opencode/03-chat-second-turn"),
]


@pytest.mark.parametrize(("first", "second"), TURNS if captured() else [(ABSENT, ABSENT)])
def test_real_clients_second_turns_are_bounded_by_their_first(first: str, second: str) -> None:
    by_name = {c.name: c for c in captured()}
    if not by_name:
        return
    gate = Gate()
    bodies = [compact(by_name[name].body) for name in (first, second)]
    operation = next(
        op for op in (CHAT, RESPONSES, MESSAGES) if by_name[first].path.partition("?")[0].endswith(op.path)
    )
    reported = gate.sent(operation, bodies[0], tokens=len(bodies[0]) // 4)
    bound = gate.bound(operation, bodies[1])
    assert bound is not None
    assert bound < reported + (len(bodies[1]) - len(bodies[0])) + 1_500


# --- images and what is elsewhere ------------------------------------------------------------------------


def picture(url: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}


def test_an_image_counts_as_the_providers_most_and_not_by_its_bytes() -> None:
    gate = Gate()
    body = body_of(CHAT, [picture(f"data:image/png;base64,{PIXELS}")])
    bound = gate.bound(CHAT, body)
    assert bound is not None
    assert billed(CHAT, body) <= bound < len(body) - len(PIXELS) + IMAGE_TOKENS + 2_000


def test_images_where_no_most_is_known_and_other_media_have_no_bound() -> None:
    gate = Gate()
    body = body_of(CHAT, [picture("https://x.example/a.png")])
    assert gate.bound(CHAT, body, at=deployment(None)) is None
    assert (
        gate.bound(
            CHAT, body_of(CHAT, [{"role": "user", "content": [{"type": "file", "file": {"file_id": "f"}}]}])
        )
        is None
    )


@pytest.mark.parametrize("name", ["previous_response_id", "conversation", "prompt"])
def test_text_that_is_kept_elsewhere_has_no_bound(name: str) -> None:
    gate = Gate()
    messages = [{"role": "user", "content": "go on"}]
    assert gate.bound(RESPONSES, body_of(RESPONSES, messages, **{name: "id_1"})) is None
    assert gate.bound(RESPONSES, body_of(RESPONSES, messages, **{name: None})) is not None


def test_known_images_are_in_what_was_reported_but_one_at_an_address_may_be_another_by_now() -> None:
    gate = Gate()
    here, there = f"data:image/png;base64,{PIXELS}", "https://x.example/a.png"
    for url, again in ((here, 0), (there, IMAGE_TOKENS)):
        body = body_of(CHAT, [picture(url)])
        reported = gate.sent(CHAT, body)
        after = body_of(
            CHAT,
            [picture(url), {"role": "assistant", "content": "a cat"}, {"role": "user", "content": "why?"}],
        )
        bound = gate.bound(CHAT, after)
        assert bound is not None
        assert max(reported + again, billed(CHAT, after)) <= bound < reported + again + 400


# --- whatever is sent --------------------------------------------------------------------------------------

#: One token a byte and worse: letters beside digits, single symbols, four-byte characters, escapes, control characters.
HOSTILE = st.one_of(
    st.text(alphabet="a1", min_size=1, max_size=300),
    st.text(alphabet="\u20ac\u6f22\U0001f600\U00010348", min_size=1, max_size=100),
    st.text(alphabet='\\"\n\t\x00\x1f/', min_size=1, max_size=100),
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=200),
    st.text(alphabet="ab ", max_size=600),
)
PARTS = st.lists(
    st.one_of(
        st.builds(lambda t: {"type": "text", "text": t}, HOSTILE),
        st.builds(
            lambda url: {"type": "image_url", "image_url": {"url": url}},
            st.sampled_from([f"data:image/png;base64,{PIXELS}", "https://x.example/a.png"]),
        ),
    ),
    min_size=1,
    max_size=3,
)
MESSAGE = st.one_of(
    st.builds(lambda t: {"role": "user", "content": t}, HOSTILE.filter(bool)),
    st.builds(lambda p: {"role": "user", "content": p}, PARTS),
    st.builds(lambda t: {"role": "assistant", "content": t}, HOSTILE.filter(bool)),
    st.builds(lambda t: {"role": "system", "content": t}, HOSTILE.filter(bool)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(MESSAGE, min_size=1, max_size=4), min_size=1, max_size=6), st.data())
def test_no_bound_is_below_what_the_provider_bills(
    growth: list[list[dict[str, Any]]], data: st.DataObject
) -> None:
    """A run that grows, goes back, and begins anew, in a process that remembers all of it."""
    gate = Gate()
    history: list[dict[str, Any]] = []
    for added in growth:
        kept = data.draw(st.integers(0, len(history)))
        history = [*history[:kept], *added]
        body = body_of(CHAT, history)
        bound = gate.bound(CHAT, body)
        assert bound is not None
        assert gate.sent(CHAT, body) <= bound
