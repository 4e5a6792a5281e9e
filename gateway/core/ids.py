"""Ids: a prefix and the 32 hex digits of a UUIDv7, so that an id carries its own time and sorts by it."""

from __future__ import annotations

RANDOM_BYTES = 10
_MAX_MS = 2**48 - 1
#: Of the 80 bits that follow the time: the version is 7, the variant is 2, all others are random.
_VERSION_AND_VARIANT = 0x7 << 76 | 0b10 << 62
_RANDOM = 0xFFF << 64 | 2**62 - 1


def new_id(prefix: str, now_ms: int, random_bytes: bytes) -> str:
    """`prefix`, "_", then a UUIDv7 (RFC 9562) of `now_ms` (milliseconds since 1970 UTC) and 10 random bytes."""
    if len(random_bytes) != RANDOM_BYTES:
        raise ValueError(f"an id needs {RANDOM_BYTES} random bytes, not {len(random_bytes)}")
    if not 0 <= now_ms <= _MAX_MS:
        raise ValueError(f"no UUIDv7 can carry the time {now_ms}")
    noise = int.from_bytes(random_bytes, "big")
    return f"{prefix}_{now_ms:012x}{noise & _RANDOM | _VERSION_AND_VARIANT:020x}"


def ms_of(id_: str) -> int:
    """Milliseconds since 1970 UTC inside an id made by `new_id`; ValueError for anything else."""
    digits = id_.rpartition("_")[2]
    if len(digits) != 32 or digits[12] != "7":
        raise ValueError(f"not an id of this gateway: {id_!r}")
    return int(digits[:12], 16)
