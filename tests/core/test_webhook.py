"""What a webhook says, its signature, and when it is tried again."""

from __future__ import annotations

import pytest

from gateway.core.webhook import GIVE_UP_MS, Message, envelope, retry_in_ms, signature

NOON_MS = 1_790_000_000_007


def message(**changes: object) -> Message:
    facts = {
        "message_id": "out_1",
        "kind": "budget_alert",
        "dedupe": "bud_1/0/0/80",
        "body": '{"scope":"task:a","percent":80}',
        "created_at_ms": NOON_MS,
        "attempts": 1,
        "age_ms": 0,
    }
    return Message(**{**facts, **changes})  # type: ignore[arg-type]


def test_an_envelope_says_what_when_and_which() -> None:
    assert envelope(message()) == (
        b'{"id":"bud_1/0/0/80","type":"budget_alert","created_at":"2026-09-21T14:13:20.007Z",'
        b'"data":{"scope":"task:a","percent":80}}'
    )
    assert message(dedupe="line\nbreak").event_id == "out_1"  # no header could carry the other


def test_a_signature_can_be_checked_by_anybody_with_the_secret() -> None:
    # printf '1790000000.{}' | openssl dgst -sha256 -hmac whsec
    digest = "7782ea78090bcceac513c09959e7f393ee96edc4c6653f7802ea6b63eac7b3ae"
    assert signature(b"whsec", b"{}", 1_790_000_000) == f"t=1790000000,v1={digest}"


def test_an_empty_secret_signs_nothing() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        signature(b"", b"{}", 0)


def test_waits_double_up_to_an_hour_and_chance_takes_up_to_half() -> None:
    assert [retry_in_ms(message(attempts=n), 0.0) for n in (1, 2, 3, 12, 13, 99)] == [
        *(1_000, 2_000, 4_000, 2_048_000, 3_600_000, 3_600_000),
    ]
    assert [retry_in_ms(message(attempts=n), 0.999) for n in (1, 13)] == [500, 1_801_800]


def test_nothing_is_tried_after_a_day() -> None:
    assert retry_in_ms(message(attempts=1, age_ms=GIVE_UP_MS - 1_001), 0.0) == 1_000
    assert retry_in_ms(message(attempts=1, age_ms=GIVE_UP_MS - 1_000), 0.0) is None
    assert [message(age_ms=age).expired for age in (GIVE_UP_MS - 1, GIVE_UP_MS)] == [False, True]
