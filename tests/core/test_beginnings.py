"""When the first request of a run without tools is marked: if enough of its kind went on for the write to pay."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.beginnings import LEAST_SEEN, Beginnings
from gateway.core.catalog import Operation
from gateway.core.shaping import Level
from tests.support.played_cache import Played, compact, cost, rule_of

WHO = ("key", "client")
RULE = rule_of("anthropic/claude-opus-5")


@pytest.mark.parametrize(
    ("runs", "went_on", "pays"), [(40, 8, False), (40, 9, True), (7, 7, False), (8, 8, True)]
)
def test_a_fifth_must_go_on_at_a_write_of_one_and_a_quarter(runs: int, went_on: int, pays: bool) -> None:
    seen = Beginnings()
    for n in range(runs):
        seen.saw(WHO, 1, False)
        if n < went_on:
            seen.saw(WHO, 2, True)
            seen.saw(WHO, 3, True)
    assert seen.go_on(WHO, RULE) is pays
    assert not seen.go_on(("key", "another"), RULE)


def test_what_was_long_ago_counts_less() -> None:
    seen = Beginnings(capacity=1)
    for _ in range(60):
        seen.saw(WHO, 1, False)
    for _ in range(30):
        seen.saw(WHO, 1, False)
        seen.saw(WHO, 2, True)
    assert seen.go_on(WHO, RULE)
    seen.saw(("key", "another"), 1, False)
    assert not seen.go_on(WHO, RULE)  # only one is remembered here


@pytest.mark.parametrize("turns", [1, 2, 6])
def test_talks_of_two_turns_get_cheaper_and_calls_alone_stay_as_they_are(turns: int) -> None:
    paid = {}
    for level in (Level.OBSERVE, Level.SAFE):
        played, paid[level] = Played("demo-large", level), 0.0
        marked: list[bool] = []
        for talk in range(2 * LEAST_SEEN):
            said: list[dict[str, Any]] = [{"role": "user", "content": f"Question {talk}. " * 800}]
            for turn in range(turns):
                body = compact(
                    {"model": "m", "max_tokens": 9, "system": f"You are {talk}.", "messages": said}
                )
                split = played.send(Operation.MESSAGES, body)
                paid[level] += float(cost(split, rule_of("demo/demo-large")))
                if turn == 0:
                    marked.append(bool(played.last and played.last.marks))
                played.now_s += 20
                said += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And?"}]
        if level is Level.SAFE:
            assert marked == [turns > 1 and talk >= LEAST_SEEN - 1 for talk in range(2 * LEAST_SEEN)]
    if turns == 1:
        assert paid[Level.SAFE] == paid[Level.OBSERVE]
    else:
        assert paid[Level.SAFE] < (0.9 if turns == 2 else 0.5) * paid[Level.OBSERVE]
