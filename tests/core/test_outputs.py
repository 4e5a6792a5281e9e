"""What is usual for answers, and below what no request is squeezed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.outputs import Outputs

WHO = ("key", "codex", "m")


def seen(*tokens: int) -> Outputs:
    outputs = Outputs()
    for n in tokens:
        outputs.note(WHO, n)
    return outputs


def test_who_was_never_seen_has_the_prior_and_learning_only_raises_it() -> None:
    assert Outputs().comfort(WHO, 2_048) == 2_048
    assert seen(*[300] * 500).comfort(WHO, 2_048) == 2_048


def test_a_client_of_long_answers_is_not_squeezed_into_short_ones() -> None:
    # one in fifty of 6,000 tokens: the class of lengths reaches to 6,143, and half as much again is the margin
    assert seen(*([300] * 49 + [6_000]) * 10).comfort(WHO, 2_048) == 6_143 * 3 // 2
    assert seen(*([300] * 199 + [6_000])).comfort(WHO, 2_048) == 2_048, "one in two hundred is not usual"


def test_what_a_client_does_now_counts_more_than_what_it_once_did() -> None:
    outputs = seen(*[20_000] * 1_000)
    for _ in range(200_000):
        outputs.note(WHO, 100)
    assert outputs.comfort(WHO, 2_048) == 2_048


def test_a_longer_answer_counts_at_once_and_shorter_ones_after_a_while() -> None:
    outputs = seen(4_000)
    assert outputs.comfort(WHO, 0) == 4_095 * 3 // 2
    outputs.note(WHO, 9_000)
    assert outputs.comfort(WHO, 0) == 10_239 * 3 // 2
    for _ in range(1_000):
        outputs.note(WHO, 100)
        outputs.comfort(WHO, 0)
    assert outputs.comfort(WHO, 0) == 111 * 3 // 2


def test_only_so_many_are_remembered() -> None:
    outputs = Outputs(most=2)
    for name in ("a", "b", "c"):
        outputs.note(name, 10_000)
    assert [outputs.comfort(name, 1) > 1 for name in ("a", "b", "c")] == [False, True, True]


@given(st.lists(st.integers(0, 2_000_000), min_size=1, max_size=99))
def test_with_few_answers_the_longest_of_them_fits(lengths: list[int]) -> None:
    longest = max(lengths)
    assert longest * 3 // 2 <= seen(*lengths).comfort(WHO, 0) <= (longest * 5 // 4 + 1) * 3 // 2
