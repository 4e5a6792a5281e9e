"""The first order of a list of tools, told by hashes and put on by whoever has the same tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.learned import in_order, order_of

TOOLS = [{"name": name, "parameters": {"a": 1, "b": [2, 3]}} for name in ("read", "write", "run", "run")]


def text(tools: list[Any], separators: tuple[str, str] = (",", ":")) -> bytes:
    return json.dumps(tools, separators=separators).encode()


@given(st.permutations(TOOLS), st.permutations(TOOLS), st.sampled_from([(",", ":"), (", ", ": ")]))
def test_the_same_tools_go_into_the_order_of_others(
    one: list[Any], other: list[Any], separators: tuple[str, str]
) -> None:
    first, now = text(one, separators), text(other, separators)
    assert in_order(now, order_of(first)) == first


@pytest.mark.parametrize(
    "now",
    [
        text(TOOLS[:3]),
        text([*TOOLS, TOOLS[0]]),
        text([{**TOOLS[0], "name": "reed"}, *TOOLS[1:]]),
        text([{"parameters": {"a": 1, "b": [2, 3]}, "name": "read"}, *TOOLS[1:]]),
        text(TOOLS, (", ", ": ")),
        b"[]",
        b"{}",
        b"[1,",
        b"",
    ],
)
def test_what_would_not_be_the_same_bytes_is_left_as_it_is(now: bytes) -> None:
    assert in_order(now, order_of(text(TOOLS))) is None


def test_an_order_holds_no_text_and_is_small() -> None:
    order = order_of(text(TOOLS))
    assert len(order) == 16 + 8 * len(TOOLS)
    assert (order_of(b"[]"), order_of(b"no json"), order_of(text([{}] * 1_001))) == (b"", b"", b"")
    assert in_order(text(TOOLS), b"") is None
    assert in_order(text(TOOLS), order[:-1]) is None
