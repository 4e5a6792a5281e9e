from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.demo.tokens import TokenCounts, pieces


def test_pieces_are_the_documented_ones() -> None:
    text = "def  month_end(day: int):\n    return 20261130 + später"
    assert pieces(text) == [
        "def",
        "  ",
        "month",
        "_",
        "end",
        "(",
        "day",
        ":",
        " int",
        "):",
        "\n    ",
        "retur",
        "n",
        " 202",
        "611",
        "30",
        " ",
        "+",
        " sp",
        "ä",
        "ter",
    ]


@given(st.text())
def test_pieces_lose_nothing_and_are_never_more_than_bytes(text: str) -> None:
    assert "".join(pieces(text)) == text
    assert len(pieces(text)) <= len(text.encode())


def test_counting_again_is_a_look_up_and_old_texts_are_forgotten() -> None:
    counts = TokenCounts(max_entries=2)
    first = [counts.measure(text)[1] for text in ("one two", "a", "b", "one two")]
    assert first == [2, 1, 1, 2]
    assert counts.measure("a")[0] != counts.measure("b")[0]
