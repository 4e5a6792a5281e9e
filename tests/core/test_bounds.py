"""Bounds on tokens, estimates of them, and the pause before a retry."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.bounds import (
    added_bound_tokens,
    estimate_input_tokens,
    estimate_output_tokens,
    input_bound_tokens,
    retry_delay_s,
)


def test_the_bound_is_the_bytes_and_what_a_provider_adds_around_them() -> None:
    assert input_bound_tokens(1000, messages=0, tools=0) == 1064
    assert input_bound_tokens(1000, messages=3, tools=0) == 1064 + 48
    assert input_bound_tokens(1000, messages=3, tools=2) == 1064 + 48 + 1024 + 128


def test_what_is_added_to_a_known_prompt_needs_no_second_tool_prompt() -> None:
    assert added_bound_tokens(1000, messages=2) == 1064 + 32


@given(st.text())
def test_the_bytes_of_a_body_are_never_fewer_than_those_of_its_text(text: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    for escaped in (True, False):
        body = json.dumps(text, ensure_ascii=escaped).encode("utf-8", "surrogatepass")
        assert input_bound_tokens(len(body), messages=1, tools=0) > size


def test_estimates_round_up() -> None:
    assert [estimate_input_tokens(n) for n in (0, 1, 4, 5, 400_000)] == [0, 1, 1, 2, 100_000]
    # by text, or by one token an event where the text is short
    assert estimate_output_tokens(400, 20) == 100
    assert estimate_output_tokens(30, 20) == 20
    assert estimate_output_tokens(0, 0) == 0


def test_retries_spread_over_a_ceiling_that_doubles_up_to_eight_seconds() -> None:
    assert [retry_delay_s(n, None, 0.0) for n in (1, 2, 3)] == [0.25, 0.25, 0.25]
    top = 1 - 2**-53
    assert [retry_delay_s(n, None, top) for n in (1, 2, 3, 4, 5, 6, 5000)] == pytest.approx(
        [0.5, 1, 2, 4, 8, 8, 8]
    )


def test_a_retry_after_is_waited_for_in_full_up_to_thirty_seconds() -> None:
    assert retry_delay_s(1, 7, 0.0) == 7.0
    assert retry_delay_s(1, 30, 0.5) == 30.125
    assert retry_delay_s(1, 31, 0.0) is None
    assert retry_delay_s(1, -3, 0.0) == 0.0
