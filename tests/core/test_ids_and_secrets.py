"""Ids that carry their time, and keys of which only an HMAC is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.ids import ms_of, new_id
from gateway.core.secrets import hmac_of, key_text, matches, new_key, parse_key

NOON_MS = 1_790_000_000_000


def test_an_id_is_a_prefix_and_a_uuid_of_version_7() -> None:
    # The example of RFC 9562, appendix A.6: 12 random bits, then 62; what stands where version and variant go is lost.
    noise = (0xFCC3 << 64 | 0b11 << 62 | 0x18C4DC0C0C07398F).to_bytes(10, "big")
    assert new_id("att", 0x017F22E279B0, noise) == "att_017f22e279b07cc398c4dc0c0c07398f"


@given(st.integers(0, 2**48 - 1), st.binary(min_size=10, max_size=10))
def test_an_id_gives_its_time_back(now_ms: int, noise: bytes) -> None:
    made = new_id("req", now_ms, noise)
    assert (ms_of(made), len(made), made[16], made[20] in "89ab") == (now_ms, 36, "7", True)


@given(st.integers(0, 2**48 - 2), st.binary(min_size=10, max_size=10), st.binary(min_size=10, max_size=10))
def test_ids_sort_by_time(now_ms: int, one: bytes, two: bytes) -> None:
    assert new_id("ent", now_ms, one) < new_id("ent", now_ms + 1, two)


@pytest.mark.parametrize("text", ["", "att_", "att_123", "att_" + "0" * 32, "task_by_client"])
def test_other_texts_are_not_ids(text: str) -> None:
    with pytest.raises(ValueError, match="not an id of this gateway"):
        ms_of(text)


def test_bad_material_makes_no_id() -> None:
    with pytest.raises(ValueError, match="10 random bytes"):
        new_id("att", NOON_MS, b"short")
    with pytest.raises(ValueError, match="no UUIDv7 can carry"):
        new_id("att", -1, bytes(10))


@given(st.binary(min_size=5, max_size=5), st.binary(min_size=32, max_size=32))
def test_a_key_is_read_back_and_only_its_secret_matches(id_bytes: bytes, secret_bytes: bytes) -> None:
    key_id, secret = new_key(id_bytes, secret_bytes)
    text = key_text(key_id, secret)

    assert (len(text), parse_key(text)) == (55, (key_id, secret))
    stored = hmac_of(b"pepper", secret)
    assert matches(b"pepper", secret, stored)
    assert not matches(b"other", secret, stored)
    assert not matches(b"pepper", secret[::-1] + "x", stored)


@pytest.mark.parametrize(
    "text",
    ["", "sk-abc", "gw-", "gw-abcdefgh-", f"gw-abcdefgh-{'A' * 42}", f"gw-abcdefgh-{'A' * 44}", f"gw-ABCDEFGH-{'A' * 43}",
     f"gw-abcdefgh-{'A' * 43}\n", f" gw-abcdefgh-{'A' * 43}", f"gw-abcdefgh-{'é' * 43}"],
)  # fmt: skip
def test_what_does_not_look_like_a_key_is_not_parsed(text: str) -> None:
    assert parse_key(text) is None


def test_an_empty_pepper_is_refused() -> None:
    with pytest.raises(ValueError, match="pepper"):
        hmac_of(b"", "secret")
