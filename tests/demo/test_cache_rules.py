"""The published cache rules, one test each, on the pure parts; the last ones through the server."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.catalog import Operation
from gateway.demo.cache import PromptCache, render
from gateway.demo.models import MINUTE_MS, find_model
from gateway.demo.prompt import BadRequest
from gateway.demo.provider import DemoProvider
from gateway.demo.read import read_ask
from gateway.demo.tokens import TokenCounts
from tests.demo.talk import Talk, talking

MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}
HOUR: dict[str, Any] = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


def words(n: int, word: str = "word") -> str:
    """A text of exactly n tokens."""
    return word + f" {word}" * (n - 1)


def text(n: int, marker: dict[str, Any] | None = None, word: str = "word") -> dict[str, Any]:
    return {"type": "text", "text": words(n, word), **(marker or {})}


class Meter:
    """Sends bodies to one cache; `(uncached, read, write 5m, write 1h)` comes back."""

    def __init__(self) -> None:
        self.cache = PromptCache()
        self.now_ms = 0

    def send(
        self, body: dict[str, Any], *, key: bytes = b"k", begin: bool = True
    ) -> tuple[int, int, int, int]:
        operation = Operation.MESSAGES if "max_tokens" in body else Operation.CHAT
        model = find_model(body["model"])
        assert model
        ask = read_ask(operation, body, model)
        split = self.cache.split(ask, render(ask, key, TokenCounts()), self.now_ms)
        if begin:
            self.cache.begin(split, self.now_ms)
        return split.input_uncached, split.cache_read, split.cache_write_5m, split.cache_write_1h


def messages(*contents: Any, model: str = "demo-large", **more: Any) -> dict[str, Any]:
    rows = [{"role": "assistant" if i % 2 else "user", "content": c} for i, c in enumerate(contents)]
    return {"model": model, "max_tokens": 10, "messages": rows, **more}


def chat(*contents: Any, model: str = "demo-fast", **more: Any) -> dict[str, Any]:
    body = messages(*contents, model=model, **more)
    del body["max_tokens"]
    return body


# --- Anthropic ---------------------------------------------------------------------------------------


def test_without_markers_nothing_is_cached() -> None:
    meter = Meter()
    assert [meter.send(messages(words(5_000))) for _ in range(2)] == [(5_006, 0, 0, 0)] * 2


def test_a_marked_prefix_is_written_once_and_then_read() -> None:
    meter = Meter()
    body = messages([text(2_000, MARK), text(10, word="tail")])
    assert meter.send(body) == (13, 0, 2_003, 0)
    assert meter.send(body) == (13, 2_003, 0, 0)


@pytest.mark.parametrize(
    ("model", "tokens", "written"),
    [
        ("demo-large", 1_020, 0),
        ("demo-large", 1_021, 1_024),  # 3 more for the message's role
        ("demo-small", 4_092, 0),
        ("demo-small", 4_093, 4_096),
    ],
)
def test_a_prefix_below_the_minimum_is_silently_not_cached(model: str, tokens: int, written: int) -> None:
    meter = Meter()
    body = messages([text(tokens, MARK)], model=model)
    assert meter.send(body) == (tokens + 6 - written, 0, written, 0)
    assert meter.send(body) == (tokens + 6 - written, written, 0, 0)


def test_a_fifth_breakpoint_is_refused_and_the_automatic_one_counts() -> None:
    four = messages([text(5, MARK)] * 4 + [text(5)])
    Meter().send(four)
    with pytest.raises(
        BadRequest, match=r"A maximum of 4 blocks with cache_control may be provided. Found 5."
    ):
        Meter().send(messages([text(5, MARK)] * 5))
    with pytest.raises(BadRequest, match=r"Found 5"):
        Meter().send({**four, **MARK})


def test_the_automatic_breakpoint_lands_on_the_last_block_and_moves() -> None:
    meter = Meter()
    first = messages([text(2_000)], **MARK)
    assert meter.send(first) == (3, 0, 2_003, 0)
    assert meter.send(messages([text(2_000)], words(50), words(70), **MARK)) == (3, 2_003, 126, 0)


@pytest.mark.parametrize(("blocks_between", "read"), [(18, 1_503), (19, 0)])
def test_look_back_is_20_blocks_the_marked_one_included(blocks_between: int, read: int) -> None:
    meter = Meter()
    meter.send(messages([text(1_500, MARK)]))
    grown = messages([text(1_500), *[text(1)] * blocks_between, text(1, MARK)])
    total = 1_503 + blocks_between + 1
    assert meter.send(grown) == (3, read, total - read, 0)


def test_a_second_marker_within_the_window_saves_the_hit() -> None:
    meter = Meter()
    meter.send(messages([text(1_500, MARK)]))
    bridged = messages([text(1_500), *[text(1)] * 10, text(1, MARK), *[text(1)] * 10, text(1, MARK)])
    assert meter.send(bridged) == (3, 1_503, 22, 0)


def test_only_blocks_that_carried_a_marker_are_found_again() -> None:
    meter = Meter()
    meter.send(messages([text(2_000), text(50, MARK)]))
    changed_tail = messages([text(2_000, MARK), text(50, MARK, word="other")])
    assert meter.send(changed_tail) == (3, 0, 2_053, 0)
    assert meter.send(changed_tail) == (3, 2_053, 0, 0)


def test_five_minutes_from_the_last_hit() -> None:
    meter = Meter()
    body = messages([text(2_000, MARK)])
    seen = []
    for wait_ms in (0, 5 * MINUTE_MS - 1, 5 * MINUTE_MS - 1, 5 * MINUTE_MS):
        meter.now_ms += wait_ms
        seen.append(meter.send(body)[1:])
    assert seen == [(0, 2_003, 0), (2_003, 0, 0), (2_003, 0, 0), (0, 2_003, 0)]


def test_one_hour_markers_live_an_hour_and_are_written_in_their_own_class() -> None:
    meter = Meter()
    body = messages([text(2_000, HOUR)])
    seen = []
    for wait_ms in (0, 59 * MINUTE_MS, 60 * MINUTE_MS):
        meter.now_ms += wait_ms
        seen.append(meter.send(body)[1:])
    assert seen == [(0, 0, 2_003), (2_003, 0, 0), (0, 0, 2_003)]


def test_mixed_lives_split_the_write_and_longer_ones_come_first() -> None:
    meter = Meter()
    mixed = messages([text(2_000, HOUR), text(500, MARK), text(7)])
    assert meter.send(mixed) == (10, 0, 500, 2_003)
    meter.now_ms += 10 * MINUTE_MS
    assert meter.send(mixed) == (10, 2_003, 500, 0)
    with pytest.raises(BadRequest, match=r"ttl='1h' cache_control block must not come after a ttl='5m'"):
        meter.send(messages([text(2_000, MARK), text(500, HOUR)]))


def test_tools_come_before_system_before_messages() -> None:
    tool = {"name": "t", "description": words(1_200), "input_schema": {"type": "object"}}
    base = messages([text(2_000, MARK)], tools=[{**tool, **MARK}], system=[text(1_000, MARK, word="rule")])
    meter = Meter()
    _, _, written, _ = meter.send(base)
    tools_tokens = written - 1_003 - 2_003
    other_user = {**base, "messages": messages([text(2_000, MARK, word="new")])["messages"]}
    assert meter.send(other_user)[1:] == (tools_tokens + 1_003, 2_003, 0)
    other_system = {**base, "system": [text(1_000, MARK, word="law")]}
    assert meter.send(other_system)[1:] == (tools_tokens, 1_003 + 2_003, 0)
    other_tools = {**base, "tools": [{**tool, "name": "u"}]}
    assert meter.send(other_tools)[1] == 0


def test_tool_choice_ends_the_reuse_of_messages_only() -> None:
    body = messages([text(2_000, MARK)], system=[text(1_500, MARK)])
    meter = Meter()
    meter.send(body)
    assert meter.send({**body, "tool_choice": {"type": "none"}})[1:] == (1_503, 2_003, 0)


def test_an_image_ends_the_reuse_of_messages_only() -> None:
    body = messages([text(2_000, MARK)], system=[text(1_500, MARK)])
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    with_image = messages([text(2_000, MARK), image], system=[text(1_500, MARK)])
    meter = Meter()
    meter.send(body)
    assert meter.send(with_image) == (3 + 765, 1_503, 2_003, 0)


def test_speed_ends_the_reuse_from_the_system_on() -> None:
    body = messages([text(2_000, MARK)], system=[text(1_500, MARK)])
    meter = Meter()
    meter.send(body)
    assert meter.send({**body, "speed": "fast"})[1:] == (0, 3_506, 0)


def test_who_says_it_is_part_of_the_prompt() -> None:
    meter = Meter()
    meter.send(chat(words(2_000)))
    by_another = chat(words(2_000))
    by_another["messages"][0]["role"] = "assistant"
    assert meter.send(by_another) == (3, 0, 2_003, 0)


def test_what_counts_is_the_rendered_prompt_not_the_json() -> None:
    meter = Meter()
    meter.send(messages([text(2_000, MARK)], words(20), [text(30, MARK)]))
    string_and_moved_marker = messages(words(2_000), [text(20)], [text(30, MARK)])
    assert meter.send(string_and_moved_marker) == (3, 2_059, 0, 0)


def test_an_entry_can_be_read_only_after_the_first_answer_began() -> None:
    meter = Meter()
    body = messages([text(2_000, MARK)])
    assert meter.send(body, begin=False) == (3, 0, 2_003, 0)
    assert meter.send(body) == (3, 0, 2_003, 0)
    assert meter.send(body) == (3, 2_003, 0, 0)


def test_markers_that_cannot_be_are_refused() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s", **MARK}
    for body, message in (
        (messages("q", [thinking]), "thinking blocks"),
        (messages([{"type": "text", "text": "", **MARK}]), "empty text blocks"),
        (
            messages([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": "2h"}}]),
            "ttl",
        ),
        (messages([{"type": "text", "text": "x", "cache_control": {"type": "forever"}}]), "ephemeral"),
    ):
        with pytest.raises(BadRequest, match=message):
            Meter().send(body)


def test_chat_requests_carry_markers_in_parts_messages_and_tools() -> None:
    meter = Meter()
    in_part = chat([text(2_000, MARK)], model="demo-large")
    assert meter.send(in_part) == (3, 0, 2_003, 0)
    on_message = chat(words(2_000), model="demo-large")
    on_message["messages"][0].update(MARK)
    assert meter.send(on_message) == (3, 2_003, 0, 0)
    assert meter.send(chat(words(2_000), model="demo-large")) == (2_006, 0, 0, 0)


# --- OpenAI 5.6 and later ----------------------------------------------------------------------------


def test_the_end_of_the_latest_message_is_cached_without_markers() -> None:
    meter = Meter()
    assert meter.send(chat(words(1_020))) == (1_026, 0, 0, 0)
    assert meter.send(chat(words(1_021))) == (3, 0, 1_024, 0)
    grown = chat(words(1_021), words(50), words(80))
    assert meter.send(grown) == (3, 1_024, 136, 0)
    assert meter.send(grown) == (3, 1_160, 0, 0)


def test_a_boundary_is_exact_so_an_extended_message_misses() -> None:
    meter = Meter()
    meter.send(chat([text(2_000)]))
    assert meter.send(chat([text(2_000), text(10)])) == (3, 0, 2_013, 0)


def test_a_shared_prefix_before_a_varying_message_needs_a_marked_part() -> None:
    meter = Meter()
    marked: dict[str, Any] = {"prompt_cache_breakpoint": {}}
    meter.send(chat([text(2_000, marked), text(10, word="a")]))
    assert meter.send(chat([text(2_000, marked), text(10, word="b")])) == (3, 2_003, 10, 0)
    plain = Meter()
    plain.send(chat([text(2_000), text(10, word="a")]))
    assert plain.send(chat([text(2_000), text(10, word="b")])) == (3, 0, 2_013, 0)


def test_only_the_latest_three_marked_parts_are_written_beside_the_implicit_one() -> None:
    marked: dict[str, Any] = {"prompt_cache_breakpoint": {}}
    parts = [text(2_000, marked), *[text(100, marked)] * 3, text(10, word="a")]
    reads = []
    for kept in (1, 2):
        meter = Meter()
        meter.send(chat(parts))
        reads.append(meter.send(chat([*parts[:kept], text(9, word="other")]))[1])
    assert reads == [0, 2_103]


def test_twenty_earlier_message_ends_are_examined() -> None:
    reads = []
    for added in (20, 21):
        meter = Meter()
        meter.send(chat(words(2_000)))
        reads.append(meter.send(chat(words(2_000), *[words(1)] * added))[1])
    assert reads == [2_003, 0]


def test_thirty_minutes_and_the_cache_key_separate() -> None:
    meter = Meter()
    body = chat(words(2_000), prompt_cache_key="a")
    meter.send(body)
    meter.now_ms += 30 * MINUTE_MS - 1
    assert meter.send(body)[1] == 2_003
    assert meter.send({**body, "prompt_cache_key": "b"})[1] == 0
    meter.now_ms += 30 * MINUTE_MS
    assert meter.send(body)[1] == 0


def test_explicit_mode_writes_no_implicit_boundary() -> None:
    meter = Meter()
    body = chat(words(2_000), prompt_cache_options={"mode": "explicit"})
    assert [meter.send(body) for _ in range(2)] == [(2_006, 0, 0, 0)] * 2


# --- through the server ------------------------------------------------------------------------------


async def test_nothing_is_shared_between_credentials(talk: Talk) -> None:
    body = messages([text(2_000, MARK)])
    reads = []
    for key in ("k1", "k1", "k2"):
        got = await talk.post("messages", body, key=key)
        reads.append(got.body["usage"]["cache_read_input_tokens"])
    got = await talk.post("messages", body, headers={"authorization": "", "x-api-key": "k2"})
    reads.append(got.body["usage"]["cache_read_input_tokens"])
    assert reads == [0, 2_003, 0, 2_003]


async def test_the_server_takes_its_time_from_the_clock_it_was_given() -> None:
    now = [1_000_000]
    async with talking(DemoProvider(clock_ms=lambda: now[0])) as talk:
        body = messages([text(2_000, MARK)])
        reads = []
        for wait_ms in (0, 5 * MINUTE_MS - 1, 5 * MINUTE_MS):
            now[0] += wait_ms
            reads.append((await talk.post("messages", body)).body["usage"]["cache_read_input_tokens"])
        assert reads == [0, 2_003, 0]
        assert [line.at_ms for line in talk.provider.bill()] == [1_000_000, 1_299_999, 1_599_999]
