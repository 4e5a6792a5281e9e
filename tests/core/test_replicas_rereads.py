"""How much of an answer the next prompt of its conversation reads from the cache: learned from what answers report."""

from __future__ import annotations

from random import Random

import pytest

from gateway.core.replicas.terms import End, EndKind
from tests.support.told_fleet import A, Told, ask

BLOCK = 16


def conversations(
    told: Told, *, kept_text: bool, kept_calls: bool, calls: float = 0.0, dropped: int = 0, seed: int = 1
) -> tuple[int, int]:
    """(predictions, those less than a block apart) of forty conversations with answers of 1 to 400 tokens.

    An engine has all tokens of a prompt and its answer but the last one; `kept_*`: the next prompt renders such an answer
    as it was made, else it differs from `dropped` tokens before the prompt's end on. A token has 3.2 to 4.6 bytes.
    """
    chance = Random(seed)
    for conversation in range(40):
        text, tokens, held = b"", 0, 0
        for turn in range(12):
            more = chance.randint(30, 900)
            text += b"%d/%d " % (conversation, turn) * more
            text = text[: len(text) - chance.randint(0, 3)]
            tokens += more * 2
            asked = ask(text, str(conversation))
            attempt, _ = told.send(asked, A)
            told.fleet.first_chunk(attempt, told.now_s)
            output, with_calls = chance.randint(1, 400), chance.random() < calls
            cached = min(held, tokens - 1) // BLOCK * BLOCK
            told.fleet.ended(attempt, End(EndKind.OK, tokens, cached, output, calls=with_calls), told.now_s)
            kept = kept_calls if with_calls else kept_text
            held = tokens + output - 1 if kept else tokens - dropped
            text += b"x" * int(output * chance.uniform(3.2, 4.6))
            tokens += output + 3
    shown = told.of(A)
    return shown.predictions, shown.predictions_close


@pytest.mark.parametrize(
    "model",
    [
        {"kept_text": True, "kept_calls": True},
        {"kept_text": True, "kept_calls": False, "calls": 0.5},
        {"kept_text": False, "kept_calls": False, "calls": 0.5, "dropped": 2},
    ],
    ids=["as it was made", "calls in another form", "reasoning is dropped"],
)
def test_predictions_are_less_than_a_block_off_whatever_the_template_does(model: dict[str, object]) -> None:
    told = Told(A)
    told.scrape(A, block_size=BLOCK, kv_cache_size_tokens=4_000_000)
    made, close = conversations(told, **model)  # type: ignore[arg-type]
    assert made == 480
    assert close >= 0.95 * made
